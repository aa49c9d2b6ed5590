// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/backend/activation.h"
#include "engine/core/host_device.h"
#include "engine/core/step_plan.h"

/// The kernels as plain functions of raw device pointers, sizes and a queue, without tensors. Each
/// enqueues a launch and returns its error. The caller (cuda_backend.cc) validates the arguments.
///
/// Kernels compute each row of the batch in an order that depends on the row's shape alone: no
/// float atomics, and no split of a reduction depends on the batch. See docs/kernels.md.

namespace denoised::cuda {

enum class Element : uint8_t {
  kF32,
  kBf16,
  kF16,     // only weights before they are packed
  kE4m3x2,  // two neighbouring numbers in e4m3: 16 bits, so that what only copies sees no
            // difference from bf16. Channels and strides count pairs
};

constexpr int kE4m3Vector = 16;  // numbers in 16 bytes; a row in e4m3 has a multiple of them

/// A device matrix: `stride` elements from one row (a pixel, a token, a sample) to the next.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0;
  Element element = Element::kF32;
  bool vector = false;  // data and stride are multiples of 16 bytes
  float scale = 1;      // kE4m3x2: a number is what is stored times this power of two
};

/// The matrix from a row on; no matrix if there is none.
inline Rows RowsFrom(Rows rows, int64_t first) {
  if (rows.data != nullptr) {
    rows.data = static_cast<std::byte*>(rows.data) +
                first * rows.stride * (rows.element == Element::kF32 ? 4 : 2);
  }
  return rows;
}

struct Queue {
  cudaStream_t stream = nullptr;
  int multiprocessors = 1;
  bool hopper = false;            // compute capability 9.0, with generic kernels not requested
  bool dependent_launch = false;  // sm_90 and later: dependent_launch.h
};

/// A 1×1 convolution of concat(x, x2), in bf16, that another convolution adds to its result.
struct ShortcutLaunch {
  Rows x, x2;  // [images · out_height · out_width, channels] and channels2; x null: no shortcut
  int channels = 0, channels2 = 0;
  const void* weight = nullptr;  // [outputs, channels + channels2], rows padded as below
  int weight_stride = 0;
};

/// Replaces a convolution's result by SiLU of its group norm. Null gamma: no output norm.
struct OutputNorm {
  const float* gamma = nullptr;  // [outputs]
  const float* beta = nullptr;
  int groups = 1;
  float eps = 0;
};

/// Convolution, and linear as a 1×1 convolution over [M, 1, 1, K]:
///   out = act((conv(concat(x, x2)) + bias + add + residual + shortcut) · scale)
/// A layer is a launch without the number of images. Code that decides bits takes a layer, so it
/// cannot depend on that number.
struct ConvLayer {
  Rows x, x2;  // [images · height · width, channels] and channels2
  int channels = 0, channels2 = 0;
  int height = 0, width = 0;  // of x, before upsampling
  int out_height = 0, out_width = 0;
  int kernel = 1, stride = 1, pad_top = 0, pad_left = 0;
  bool upsample2x = false;
  const void* weight = nullptr;  // [outputs, kernel · kernel · (channels + channels2)], the rows
  int weight_stride = 0;         //   padded with zeros to a multiple of kDepthPadding; after
                                 //   upsample2x [4, outputs, 2 · 2 · …]: implicit_gemm.cuh
  /// With upsample2x, bit 4 · phase + tap: this tap's weights are zero, so it may be left out. At
  /// least one tap of each phase is not zero.
  uint16_t zero_taps = 0;
  /// kBf16: tensor cores; kF32: fp32 arithmetic, x is kF32; kE4m3x2: so is x, for
  /// LaunchConv2dHopper, without x2, or Conv2dCandidates, also without shortcut.
  Element weight_element = Element::kF32;
  const float* scales = nullptr;  // kE4m3x2: [outputs + kBiasPadding], of the sums of products
  const float* bias = nullptr;    // [outputs + kBiasPadding], or null
  int outputs = 0;
  /// The fused input norm: GroupNormLaunch::factors for SiLU, or null. The convolution's input is
  /// then silu(2 · (concat(x, x2) · factor + offset)), rounded to bf16. For LaunchConv2dHopper, if
  /// SuitsHaloTile().
  const float* input_factors = nullptr;
  Rows add;                 // [images, outputs], or null
  Rows residual;            // as out, or null; may be `out`
  ShortcutLaunch shortcut;  // for LaunchConv2dHopper alone
  float scale = 1;
  Activation activation = Activation::kNone;
  /// GEGLU: the layer's outputs are values and gates (GatedOutput()), rounded to bf16 before the
  /// product, so the bits are those of a separate LaunchGegluGate. `out` then has outputs / 2. For
  /// LaunchConv2dHopper, if SuitsGate().
  bool gated = false;
  /// Of a gated layer in e4m3: the result rounded to bf16, then to e4m3, in place of `out`; or
  /// null. [pixels, outputs / 2], outputs / 2 a multiple of 16.
  Rows rounded_out;
  /// The fused output norm. The result is rounded to bf16 before it, so the bits are those of a
  /// separate LaunchGroupNormCluster. For LaunchConv2dHopper, if SuitsOutputNorm().
  OutputNorm output_norm;
  Rows out;  // [images · out_height · out_width, outputs]
};
struct Conv2dLaunch : ConvLayer {
  int images = 0;
  // For Conv3x3Candidates() of small images: partial sums of split-K. If it is null or too small,
  // the candidates that need it are omitted.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  int* semaphores = nullptr;  // kSemaphores; zero before and after a launch
};

inline bool IsE4m3(const ConvLayer& conv) { return conv.x.element == Element::kE4m3x2; }
inline bool InVectors(const Rows& rows) {
  return rows.data == nullptr || (rows.element == Element::kBf16 && rows.vector);
}
/// Whether 16-byte loads of eight channels can read the sources.
inline bool HasVectorInputs(const ConvLayer& conv) {
  return conv.x.vector && conv.channels % 8 == 0 &&
         (conv.x2.data == nullptr || (conv.x2.vector && conv.channels2 % 8 == 0));
}
/// Whether outputs and their addends are bf16 in vectors of eight.
inline bool HasVectorOutputs(const ConvLayer& conv) {
  return conv.outputs % 8 == 0 && InVectors(conv.out) && InVectors(conv.add) &&
         InVectors(conv.residual) &&
         (conv.activation == Activation::kNone || conv.activation == Activation::kSilu);
}

constexpr int kSemaphores = 1024;
constexpr int kDepthPadding = 32;
constexpr int kBiasPadding = 256;  // outputs of the widest tile
/// One of the tiles that can compute a convolution. All give the same bits.
struct ConvCandidate {
  std::string name;         // unique among those of one launch
  double microseconds = 0;  // expected for a launch
  cudaError_t (*launch)(Conv2dLaunch conv, const Queue& queue) = nullptr;
};
/// The cheapest first; equals stay in order.
template <typename Candidate>
std::vector<Candidate> CheapestFirst(std::vector<Candidate> candidates) {
  std::stable_sort(
      candidates.begin(), candidates.end(),
      [](const Candidate& a, const Candidate& b) { return a.microseconds < b.microseconds; });
  return candidates;
}
/// For any convolution in bf16 or with fp32 inputs, the cheapest first; in e4m3 if
/// HasE4m3Kernels().
std::vector<ConvCandidate> Conv2dCandidates(const Conv2dLaunch& conv, const Queue& queue);
/// Whether this build has code for the device that multiplies in e4m3: compiled for sm_89 or later.
bool HasE4m3Kernels();
cudaError_t LaunchConv2dFp32(const Conv2dLaunch& conv, const Queue& queue);
/// 3×3 from halo tiles on mma.sync, if SuitsConv3x3().
bool SuitsConv3x3(const ConvLayer& conv);
std::vector<ConvCandidate> Conv3x3Candidates(const Conv2dLaunch& conv, const Queue& queue);
/// Few inputs per window, or few outputs, if SuitsFewInputs() or SuitsFewOutputs().
bool SuitsFewInputs(const ConvLayer& conv);
cudaError_t LaunchConv2dFewInputs(const Conv2dLaunch& conv, const Queue& queue);
bool SuitsFewOutputs(const ConvLayer& conv);
cudaError_t LaunchConv2dFewOutputs(const Conv2dLaunch& conv, const Queue& queue);
/// Linear over images of one pixel, fast for few of them, if SuitsRowLinear().
bool SuitsRowLinear(const ConvLayer& linear);
cudaError_t LaunchRowLinear(const Conv2dLaunch& linear, const Queue& queue);

struct NormLayer {
  Rows x, x2;  // [images · pixels, channels] and channels2
  int channels = 0, channels2 = 0;
  int pixels = 0;
  const float* gamma = nullptr;  // [channels + channels2]
  const float* beta = nullptr;
  int groups = 1;
  float eps = 0;
  Rows scale_shift;  // [images, 2 · (channels + channels2)], or null
  Activation activation = Activation::kNone;
  Rows out;  // [images · pixels, channels + channels2]

  DENOISED_HOST_DEVICE int AllChannels() const { return channels + channels2; }
  DENOISED_HOST_DEVICE int GroupChannels() const { return AllChannels() / groups; }
};
struct GroupNormLaunch : NormLayer {
  int images = 0;
  /// [images, 2, channels + channels2]: factors, then offsets: out = act(x · factor + offset). Both
  /// are halved if SiLU follows (SiluOfHalf), as Conv2dLaunch::input_factors expects them. If not
  /// null, LaunchGroupNormCluster writes them instead of `out`. LaunchGroupNorm and
  /// LaunchGroupNormStream ignore them.
  float* factors = nullptr;
  void* workspace = nullptr;   // partial moments of at least one image; with more, a launch
  size_t workspace_bytes = 0;  //   takes more images
  int* semaphores = nullptr;   // for LaunchGroupNormFactors and …Pieces, as in Conv2dLaunch
  /// For LaunchGroupNormStream: kFlagBytes, zero before the first launch. Nothing else may write
  /// them, and launches that run at the same time must not share them.
  void* flags = nullptr;
};
constexpr int kMaxNormChannels = 6144;
constexpr int kFlagBytes = 2 << 20;
cudaError_t LaunchGroupNorm(const GroupNormLaunch& norm, const Queue& queue);
/// LaunchGroupNormFactors: the factors in two passes, for bf16 images of any size, if
/// SuitsGroupNormFactors(). LaunchGroupScale: `out` from these factors or those of the kernels
/// below; also in e4m3, if the channels are a multiple of 16.
bool SuitsGroupNormFactors(const NormLayer& norm);
cudaError_t LaunchGroupNormFactors(const GroupNormLaunch& norm, const Queue& queue);
cudaError_t LaunchGroupScale(const GroupNormLaunch& norm, const Queue& queue);
/// `out` or factors in one pass over memory, without a workspace, by clusters on Hopper, if
/// SuitsGroupNormCluster(). The bits differ from those of the two passes. `out` in e4m3 as above.
bool SuitsGroupNormCluster(const NormLayer& norm, const Queue& queue);
cudaError_t LaunchGroupNormCluster(const GroupNormLaunch& norm, const Queue& queue);
/// `out` with the same bits by a persistent kernel, also in e4m3; it must not overlap x or x2.
/// Prefers…: whether this kernel is faster than LaunchGroupNormCluster, or the only one that
/// supports the launch.
bool SuitsGroupNormStream(const NormLayer& norm);
bool PrefersGroupNormStream(const GroupNormLaunch& norm, const Queue& queue);
cudaError_t LaunchGroupNormStream(const GroupNormLaunch& norm, const Queue& queue);
/// Factors with the same bits, with a workspace, by CTAs that each read a piece of an image.
/// Prefers…: likewise.
bool SuitsGroupNormPieces(const NormLayer& norm);
bool PrefersGroupNormPieces(const GroupNormLaunch& norm, const Queue& queue);
cudaError_t LaunchGroupNormPieces(const GroupNormLaunch& norm, const Queue& queue);

/// `out` may be x. Also in e4m3, if LayerNormRounds().
bool LayerNormRounds(const Rows& x, int channels);
cudaError_t LaunchLayerNorm(const Rows& x, const float* gamma, const float* beta, float eps,
                            int64_t tokens, int channels, const Rows& out, const Queue& queue);

struct AttentionLayer {
  Rows q, k, v;  // [images · tokens, heads · dim]; k, v: [key_sets · key_tokens, heads · dim]
  int tokens = 0, key_tokens = 0;
  int heads = 1, dim = 0;
  float scale = 1;
  const int32_t* key_set = nullptr;     // [images], or null: image n attends to set n
  const int32_t* key_counts = nullptr;  // [key_sets], or null: every set has key_tokens keys
  bool causal = false;                  // query i sees keys 0 to i
  bool fp32 = false;                    // fp32 arithmetic
  /// [images · tokens, heads · dim]. For LaunchAttentionHopper also in e4m3, rounded to bf16 first,
  /// if heads · dim is a multiple of 16.
  Rows out;
  /// [images, heads, tokens], or null: of the scaled scores, for the backward pass.
  float* log_sum_exp = nullptr;
};
struct AttentionLaunch : AttentionLayer {
  int images = 0;
  int key_sets = 0;  // equals images without a key_set
};
constexpr int kMaxHeadDim = 512;
/// Whether an image may attend to other keys than all of its own.
inline bool SelectsKeys(const AttentionLayer& attention) {
  return attention.key_set != nullptr || attention.key_counts != nullptr || attention.causal;
}
/// Values of key_set and key_counts that are out of range are clamped.
cudaError_t LaunchAttention(const AttentionLaunch& attention, const Queue& queue);
/// fp32 arithmetic, for any element type and any dim up to kMaxHeadDim.
cudaError_t LaunchAttentionFp32(const AttentionLaunch& attention, const Queue& queue);
/// LaunchAttention's kernel for Hopper. SuitsHopper: whether it can read the operands; not for
/// causal attention, nor for large heads where SelectsKeys().
bool SuitsHopper(const AttentionLayer& attention);
cudaError_t LaunchAttentionHopper(const AttentionLaunch& attention, const Queue& queue);

/// *largest = max(*largest, the bits of the largest magnitude), which is in the order of
/// magnitudes.
cudaError_t LaunchLargest(const Rows& x, int channels, int64_t rows, uint32_t* largest,
                          const Queue& queue);

struct TimestepEmbeddingLaunch {
  const float* t = nullptr;  // [rows]
  int rows = 0, dim = 0;
  bool flip_sin_to_cos = false;
  double freq_shift = 0, scale = 1, max_period = 10000;
  Rows out;  // [rows, dim]
};
cudaError_t LaunchTimestepEmbedding(const TimestepEmbeddingLaunch& embedding, const Queue& queue);

struct FourierEmbeddingLaunch {
  const float* t = nullptr;       // [rows]
  const float* weight = nullptr;  // [dim / 2]
  int rows = 0, dim = 0;
  bool log = true, flip_sin_to_cos = false;
  Rows out;  // [rows, dim]
};
cudaError_t LaunchFourierEmbedding(const FourierEmbeddingLaunch& embedding, const Queue& queue);

/// out[i] = table[index[i]], or table[number[i]], rounded, where number is not null. Indices
/// outside [0, entries) are clamped.
cudaError_t LaunchEmbedding(const Rows& table, int entries, int dim, const int32_t* index,
                            const float* number, int rows, const Rows& out, const Queue& queue);

/// Outputs per block if blocks of values and of gates alternate: eight, so that one thread of a
/// wgmma has both. Otherwise all values come first, then all gates.
DENOISED_HOST_DEVICE inline int GatedBlock(int features) {
  return features % 8 == 0 ? 8 : features;
}
/// Packed position of output `i` of a gated layer; in the file, values come first, then gates.
DENOISED_HOST_DEVICE inline int64_t GatedOutput(int64_t i, int64_t features, int64_t block) {
  const int64_t is_gate = i >= features, c = i - is_gate * features;
  return c / block * 2 * block + is_gate * block + c % block;
}
/// out[.., c] = value c · gelu(gate c) over rows of 2 · features, as GatedOutput() has them.
cudaError_t LaunchGegluGate(const Rows& x, int64_t rows, int features, const Rows& out,
                            const Queue& queue);

/// out[p] = the row of codebook [codes, channels] closest to x[p] [channels], the first of equals.
cudaError_t LaunchNearestCode(const float* x, const float* codebook, int codes, int64_t pixels,
                              int channels, const Rows& out, const Queue& queue);

struct GaussianLaunch {
  const float* moments = nullptr;  // [pixels, 2 · channels]: means, logarithms of variances
  const float* noise = nullptr;    // [pixels, channels], or null
  const float* scale = nullptr;    // [channels]
  const float* shift = nullptr;
  int64_t pixels = 0;
  int channels = 0;
  float* out = nullptr;  // [pixels, channels]
};
cudaError_t LaunchGaussian(const GaussianLaunch& gaussian, const Queue& queue);

/// Nearest-neighbour doubling to an output of this size: twice the input's, or one less.
cudaError_t LaunchUpsample2x(const Rows& x, int images, int height, int width, int channels,
                             const Rows& out, const Queue& queue);
/// The mean of 2×2 pixels (an odd last line is dropped).
cudaError_t LaunchAveragePool2x(const Rows& x, int images, int height, int width, int channels,
                                const Rows& out, const Queue& queue);

/// resample.h's Resample::kFirUp or kFirDown of an input of this size.
cudaError_t LaunchFir2x(const Rows& x, int images, int height, int width, int channels, bool up,
                        const Rows& out, const Queue& queue);

/// out = act(a · scale + b + shift); b may be null. All [rows, columns].
cudaError_t LaunchAdd(const Rows& a, float scale, const Rows& b, float shift, Activation activation,
                      int64_t rows, int columns, const Rows& out, const Queue& queue);

/// Normal noise of unit size, the same for the same seed: operands for measurements, in fp32, bf16
/// or e4m3. In e4m3, columns are a multiple of four pairs.
cudaError_t LaunchNoise(const Rows& out, int64_t rows, int columns, uint64_t seed,
                        const Queue& queue);

/// out[n] = x[n] / divisor[n] for images of `elements` contiguous values.
cudaError_t LaunchDivideRows(const Rows& x, const float* divisor, int images, int64_t elements,
                             const Rows& out, const Queue& queue);

/// Packs a part of a weight [outputs, channels, taps], the file's layout, into [outputs, taps,
/// channels]; or a 3×3 weight into four 2×2 weights [4, outputs, 2 · 2, channels] for outputs at
/// (even, even), (even, odd), (odd, even) and (odd, odd) positions of a doubled image.
struct PackWeightLaunch {
  const void* from = nullptr;  // [pairs, taps]
  Element from_element = Element::kF32;
  int64_t first_pair = 0;  // index of the (output, channel) pair that `from` begins with
  int64_t pairs = 0;
  int channels = 0, taps = 0;
  int64_t phase_outputs = 0;  // outputs of the weight, if it is packed in phases
  int64_t gated_outputs = 0;  // values and gates together, if their blocks alternate
  Rows to;                    // rows of taps · channels; their padding is not written
  /// If `to` is kE4m3x2, each tap has a multiple of 16 channels. ConvLayer::scales, made by the
  /// functions below; input_scale is the part of the input.
  float* scales = nullptr;
  float input_scale = 0;
};
cudaError_t LaunchPackWeight(const PackWeightLaunch& pack, const Queue& queue);
/// For weights in e4m3, before they are packed. `scales`, zeros at first, become the largest
/// magnitude of each output's weights; when all parts have been seen, the scales of these times
/// input_scale.
cudaError_t LaunchLargestWeights(const PackWeightLaunch& pack, const Queue& queue);
cudaError_t LaunchE4m3Scales(float* scales, int outputs, float input_scale, const Queue& queue);

/// What a layer in e4m3 reads: `out` (kE4m3x2) = concat(x, x2) / out.scale, rounded. Its padding,
/// to a multiple of 16 channels, becomes zero.
cudaError_t LaunchRoundToE4m3(const Rows& x, int channels, const Rows& x2, int channels2,
                              int64_t rows, const Rows& out, const Queue& queue);

/// Slot state (sampler_ops.h's SlotState): `elements` = H · W · channels per image.
struct SlotsLaunch {
  float* x = nullptr;                       // [slots, elements]
  float* registers = nullptr;               // [slots, kRegisters, elements]
  float* x0 = nullptr;                      // [slots, elements]
  const DeviceEvaluation* plans = nullptr;  // [slots, max_evaluations]
  int max_evaluations = 0;
  int64_t plan_bytes = 0;              // from one slot's plan to the next
  int32_t* evaluation = nullptr;       // [slots]
  int32_t* nonfinite = nullptr;        // [slots]
  const int64_t* seed = nullptr;       // [slots]
  const Guidance* guidance = nullptr;  // [slots]
  const float* embedding = nullptr;    // [slots, embedding_dim], or null
  int embedding_dim = 0;
  float* known = nullptr;        // [slots, 2, elements], or null
  const float* mask = nullptr;   // [slots, pixels]
  const float* extra = nullptr;  // [slots, pixels, extra_channels], or null
  int extra_channels = 0;
  int64_t elements = 0;
  int channels = 0;
  bool vector = false;  // every image, also of an evaluation, begins at a multiple of 16 bytes
};
/// source and noise: [elements], or null.
cudaError_t LaunchBeginSlot(const SlotsLaunch& slots, int slot, const float* source,
                            const float* noise, float source_scale, float noise_scale,
                            float churn_scale, float shift, bool keeps_known, const Queue& queue);
/// rows: int32 [count, 6] (EvaluationRow). x: [count, pixels, channels + extra_channels]; label and
/// embedding may be null.
cudaError_t LaunchGather(const SlotsLaunch& slots, const int32_t* rows, int count, const Rows& x,
                         float* condition, int32_t* label, float* embedding, const Queue& queue);
/// model_output: [count, pixels, model_channels], model_channels = channels or 2 · channels.
/// factors: [count].
cudaError_t LaunchMeasureOutputs(const SlotsLaunch& slots, const int32_t* rows, int count,
                                 const float* model_output, int model_channels,
                                 OutputFactors* factors, const Queue& queue);
/// factors: [count], or null.
cudaError_t LaunchAdvance(const SlotsLaunch& slots, const int32_t* rows, int count,
                          const float* model_output, int model_channels,
                          const OutputFactors* factors, const Queue& queue);

/// Loads every kernel and sets its shared-memory limit, because loading a kernel during a capture
/// fails it. cudaErrorNoKernelImageForDevice: the build lacks this device's architecture.
cudaError_t LoadConv2dKernels();
cudaError_t LoadConv3x3Kernels();
cudaError_t LoadConv2dFp32Kernels();
cudaError_t LoadConv2dNarrowKernels();
cudaError_t LoadRowLinearKernels();
cudaError_t LoadGroupNormKernels();
cudaError_t LoadGroupNormClusterKernels(bool clusters);
cudaError_t LoadGroupNormStreamKernels();
cudaError_t LoadGroupNormPiecesKernels();
cudaError_t LoadLayerNormKernels(bool hopper);
cudaError_t LoadNearestCodeKernels();
cudaError_t LoadAttentionKernels();
cudaError_t LoadAttentionFp32Kernels();
cudaError_t LoadAttentionHopperKernels();
cudaError_t LoadEmbeddingKernels();
cudaError_t LoadElementwiseKernels();
cudaError_t LoadSamplingKernels();
cudaError_t LoadPackWeightKernels();
cudaError_t LoadRoundToE4m3Kernels();
cudaError_t LoadLargestKernel();

}  // namespace denoised::cuda
