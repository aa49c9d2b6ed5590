// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "engine/backend/activation.h"
#include "engine/backend/cuda/launch.h"
#include "engine/training/device_data.h"

/// The kernels of training as plain functions of device pointers, sizes and a queue, like those of
/// serving in engine/backend/cuda/launch.h. cuda_backend.cc has validated the arguments.
///
/// Kernels wait for their predecessors before they read or write any memory (dependent_launch.h),
/// except those of group_norm.cu, which start when all before them have ended.
///
/// No atomics in the kernels below. Results for a sample depend on that sample alone. A sum over
/// samples is computed chunk by chunk, each in an order that depends on shapes only, and
/// LaunchTreeSum adds the chunks as backend.h describes. How a sum is split into parts never
/// depends on the number of chunks.

namespace denoised::training::cuda {

using denoised::cuda::AttentionLaunch;
using denoised::cuda::Element;
using denoised::cuda::Queue;
using denoised::cuda::Rows;

/// The im2col matrix of a convolution's input, which is not written to memory. Row p is output
/// pixel p. The columns of tap t are the input's channels at that tap, or zeros beyond the edge.
struct Patches {
  int height = 0, width = 0;  // of the input, before doubling
  int out_height = 0, out_width = 0;
  int kernel = 1, stride = 1, pad_top = 0, pad_left = 0;
  bool upsample2x = false;
};

/// A batch of matrices, one per (outer, inner). A line is one k: m or n contiguous elements.
struct Operand {
  const void* data = nullptr;
  int64_t stride = 0;            // elements from line to line
  int64_t outer = 0, inner = 0;  // elements from batch to batch
};

/// out(m, n) = Σ_k a(k, m) · b(k, n), in fp32 over ascending k.
struct GemmLaunch {
  Operand a, b;
  Element element = Element::kF32;  // of a and b; kBf16 in aligned vectors uses tensor cores
  int64_t m = 0, n = 0, k = 0;
  int outer = 1, inner = 1;
  /// If not 0: split-K. The inner batches are parts of one sum of length k; each has k_part, but
  /// the last may have fewer.
  int64_t k_part = 0;
  /// If not null: b is the input of this convolution. Its output pixels are the lines of k, n is
  /// its number of channels, and the result has kernel² · n columns, tap by tap. b.outer and k_part
  /// count lines.
  const Patches* patches = nullptr;
  float* out = nullptr;
  int64_t out_stride = 0, out_outer = 0, out_inner = 0;
};
cudaError_t LaunchGemm(const GemmLaunch& gemm, const Queue& queue);
/// Number of parts of k that fills a GPU. Depends on the shapes alone.
int SplitsOfK(int64_t m, int64_t columns, int64_t k);

/// out[g, j] = the sum of in[g, chunk, split, i]: over splits in an order that depends on their
/// number alone, over chunks as a tree. j is i; with taps, i is an index of [output, tap, channel]
/// and j of [output, channel, tap].
struct TreeSumLaunch {
  const float* in = nullptr;
  int64_t in_stride = 0;  // elements from one split to the next
  int64_t groups = 1;
  int64_t in_group = 0;            // elements from one group to the next; 0: groups are contiguous
  int64_t chunks = 1, splits = 1;  // chunks: a power of two
  int64_t count = 0;               // elements of `in` per group, chunk and split
  int taps = 1, channels = 1, in_channels = 1;  // in_channels: with padding, which is dropped
  float scale = 1;                              // of the result
  void* out = nullptr;
  Element out_element = Element::kF32;
  int64_t out_stride = 0;  // elements from one group to the next
};
cudaError_t LaunchTreeSum(const TreeSumLaunch& sum, const Queue& queue);

/// The gradients of a weight and its bias, on Hopper: doutᵀ · x, or with nine taps that of a 3×3
/// convolution; and the sum of dout. Chunks are added as a tree.
struct WeightGradientLaunch {
  // dout [images · height · width, ..], and x the same or, with nine taps, [images · x_height ·
  // x_width, ..]; bf16 in aligned vectors.
  Rows dout, x;
  int outputs = 0, channels = 0;
  int64_t images = 0, height = 1, width = 1;  // of dout
  int64_t chunks = 1;                         // of the images: a power of two
  int taps = 1;                               // or 9
  // With nine taps; x has at least `stride` columns, and its lines are a multiple of `stride`.
  int64_t x_height = 1, x_width = 1;
  int stride = 1, pad_top = 0, pad_left = 0;  // stride: or 2
  // Scratch of WeightGradientPartials() floats, 128-byte aligned. Its contents are undefined
  // afterwards.
  float* partial = nullptr;
  float* out = nullptr;   // [outputs, channels, taps]
  float* bias = nullptr;  // [outputs], or null: not computed
};
int64_t WeightGradientPartials(const WeightGradientLaunch& launch);
cudaError_t LaunchWeightGradient(const WeightGradientLaunch& launch, const Queue& queue);

/// Number of parts into which `lines` lines of a segment are divided.
int PartsOf(int64_t lines);
/// partial[segment, part, c] = Σ over the part's lines of x[segment, line, c].
cudaError_t LaunchColumnSums(const Rows& x, int64_t segments, int64_t lines, int channels,
                             float* partial, const Queue& queue);

struct NormLaunch {
  Rows x;  // everything that has pixels is of this element type
  int64_t rows = 0, pixels = 0;
  int channels = 0, groups = 1;
  const float* gamma = nullptr;
  const float* beta = nullptr;
  float eps = 0;
  Rows scale_shift;  // [rows, 2 · channels], or null
  Activation activation = Activation::kNone;
  float* statistics = nullptr;  // [rows, groups, 2]
  Rows out;
  /// Scratch: [rows, PartsOf(pixels), channels, 2].
  float* partial = nullptr;
};
cudaError_t LaunchNorm(const NormLaunch& norm, const Queue& queue);
/// LaunchNorm's kernel in one pass. Suits…: whether the device, the layout and the size allow it.
bool SuitsNormHopper(const NormLaunch& norm, const Queue& queue);
cudaError_t LaunchNormHopper(const NormLaunch& norm, const Queue& queue);

struct NormBackwardLaunch {
  NormLaunch forward;  // without out
  Rows dout, add;
  Rows dx, dx_rest;     // the first dx_channels, and the others
  int dx_channels = 0;  // all of them: dx_rest is null
  /// Out [rows, channels], or null: the sums of dx over pixels, before it is rounded. Without
  /// `add` and dx_rest, and for LaunchNormBackwardHopper alone.
  Rows dx_sums;
  Rows dscale_shift;
  float* coefficients = nullptr;  // scratch [rows, channels, 2]
  float* parameters = nullptr;    // out [rows, 2, channels]: a row's share of dγ and dβ
};
cudaError_t LaunchNormBackward(const NormBackwardLaunch& norm, const Queue& queue);
/// Likewise.
bool SuitsNormBackwardHopper(const NormBackwardLaunch& norm, const Queue& queue);
cudaError_t LaunchNormBackwardHopper(const NormBackwardLaunch& norm, const Queue& queue);

/// The forward pass is LaunchAttention() of serving, with log_sum_exp and without key sets.
struct AttentionBackwardLaunch {
  AttentionLaunch forward;
  Rows dout;               // as out
  float* delta = nullptr;  // scratch [images, heads, tokens]
  Rows dq, dk, dv;         // as q, k and v
};
cudaError_t LaunchAttentionBackward(const AttentionBackwardLaunch& backward, const Queue& queue);
struct LayerNormLaunch {
  Rows x;  // everything that has tokens is of this element type
  int64_t tokens = 0;
  int channels = 0;
  const float* gamma = nullptr;
  const float* beta = nullptr;
  float eps = 0;
  float* statistics = nullptr;  // [tokens, 2]: mean, rstd
  Rows out;
};
cudaError_t LaunchLayerNorm(const LayerNormLaunch& norm, const Queue& queue);

struct LayerNormBackwardLaunch {
  LayerNormLaunch forward;  // without out
  Rows dout, add, dx;
  int64_t chunk_tokens = 0;
  /// Out [chunks, PartsOf(chunk_tokens), 2, channels]: shares of dγ and dβ; null: not computed.
  float* parameters = nullptr;
};
cudaError_t LaunchLayerNormBackward(const LayerNormBackwardLaunch& norm, const Queue& queue);

/// The line of a 3×3 window of stride 2 by which outputs in line j − 1 + parity + tap read line
/// 2j + parity of the input, if the padding before it is `pad`. Not in [0, 3) if none does.
DENOISED_HOST_DEVICE inline int StridedTap(bool pad, int parity, int tap) {
  return (pad ? 3 : 2) - parity - 2 * tap;
}

/// Weights of a convolution of dout whose result is dx.
enum class BackwardForm : uint8_t {
  kRotated,  // [channels, taps, outputs], the taps rotated by 180°, starting at column first_output
  kPhases,  // stride 2, a 3×3 window with padding 0 or 1: [4 phases, channels, 2×2 taps, outputs],
            // as of a convolution after doubling. A tap without a StridedTap() is zero
  kPairs,  // stride 1, a 3×3 window with padding 1: [2, channels, 3×3 taps, 2, outputs], of pairs
           // of neighbouring pixels. Taps that do not reach from one pixel to the other are zero
};
/// Rounds a master weight [outputs, channels, taps] and its bias into the layouts that serving's
/// convolutions read (engine/backend/cuda/weights.h). Forward: [outputs, taps, channels], starting
/// at row first_output, or in four phases.
struct PackLaunch {
  const float* weight = nullptr;
  const float* bias = nullptr;  // or null
  int outputs = 0, channels = 0, taps = 1, first_output = 0;
  int all_outputs = 0;  // of all fused layers
  bool phases = false;  // forward
  BackwardForm backward_form = BackwardForm::kRotated;
  bool pad_top = false, pad_left = false;  // with kPhases
  Rows forward, backward;                  // forward: or null
  float* packed_bias = nullptr;            // of all fused layers
};
cudaError_t LaunchPacks(const std::vector<PackLaunch>& packs, const Queue& queue);

cudaError_t LaunchActivateBackward(Activation activation, const Rows& x, const Rows& dout,
                                   int64_t count, const Rows& dx, const Queue& queue);
/// GEGLU: x [lines, 2 · width], values, then gates. dx may be x.
cudaError_t LaunchGeglu(const Rows& x, int64_t lines, int width, const Rows& out,
                        const Queue& queue);
cudaError_t LaunchGegluBackward(const Rows& x, const Rows& dout, int64_t lines, int width,
                                const Rows& dx, const Queue& queue);
/// to[line, c] = from[line, c] for c < columns, else 0, up to to_columns. Both of one element type.
cudaError_t LaunchCopyColumns(const Rows& from, int columns, int64_t lines, const Rows& to,
                              int to_columns, const Queue& queue);
/// Pool: small[n, h, w] = scale · Σ of the four pixels of large. Spread: each of the four pixels of
/// large = scale · small[n, h, w].
cudaError_t LaunchPool(const Rows& large, int64_t images, int height, int width, int channels,
                       float scale, const Rows& small, const Queue& queue);
cudaError_t LaunchSpread(const Rows& small, int64_t images, int height, int width, int channels,
                         float scale, const Rows& large, const Queue& queue);
/// out[n, stride·h + offset_top, stride·w + offset_left] = x[n, h, w]; other elements are 0.
struct DilateLaunch {
  Rows x;
  int64_t images = 0;
  int in_height = 0, in_width = 0, height = 0, width = 0, channels = 0;
  int stride = 1, offset_top = 0, offset_left = 0;
  Rows out;
};
cudaError_t LaunchDilate(const DilateLaunch& dilate, const Queue& queue);
/// out = a·scale_a + b·scale_b + shift; b may be null.
cudaError_t LaunchScaledSum(const Rows& a, float scale_a, const Rows& b, float scale_b, float shift,
                            int64_t count, const Rows& out, const Queue& queue);
cudaError_t LaunchDropout(const Rows& x, int64_t rows, int64_t elements, float probability,
                          uint64_t seed, const int32_t* step, const SampleRow* samples,
                          uint32_t layer, const Rows& out, const Queue& queue);

struct EmbeddingBackwardLaunch {
  const int32_t* index = nullptr;  // [lines]
  Rows dout;                       // [lines, dim]
  int64_t lines = 0, chunk_lines = 0;
  int entries = 0, dim = 0;
  int2* sorted = nullptr;   // scratch [lines]
  float* sums = nullptr;    // scratch [lines, dim], aligned
  float* dtable = nullptr;  // [entries, dim]
};
cudaError_t LaunchEmbeddingBackward(const EmbeddingBackwardLaunch& embedding, const Queue& queue);

struct SamplesLaunch {
  const uint8_t* images = nullptr;    // [.., from_height, from_width, channels]
  const float* posteriors = nullptr;  // or [.., height, width, 2 · channels]
  const SampleRow* rows = nullptr;
  int64_t count = 0;
  int height = 0, width = 0, channels = 0, from_height = 0, from_width = 0;
  uint64_t seed = 0;
  const int32_t* step = nullptr;
  Rows x;
  float* target = nullptr;
  float* condition = nullptr;
  int32_t* label = nullptr;
  float* image = nullptr;  // y, or null
};
cudaError_t LaunchMakeSamples(const SamplesLaunch& samples, const Queue& queue);
/// out [rows, elements]: standard normal noise that samples posteriors.
cudaError_t LaunchNoise(uint64_t seed, const int32_t* step, const SampleRow* samples, int64_t rows,
                        int64_t elements, float* out, const Queue& queue);
/// See LossArgs. loss [rows].
cudaError_t LaunchLoss(const float* output, const float* target, const SampleRow* samples,
                       int64_t rows, int64_t elements, float scale, float* loss, float* doutput,
                       const Queue& queue);

/// See VarianceLossArgs.
struct VarianceLossLaunch {
  const float* output = nullptr;
  const float* target = nullptr;
  const float* image = nullptr;
  const SampleRow* samples = nullptr;
  int64_t rows = 0, elements = 0;  // elements: of target, per row
  int channels = 0;                // of target
  float scale = 1, weight = 0;
  float* loss = nullptr;
  float* doutput = nullptr;
};
cudaError_t LaunchVarianceLoss(const VarianceLossLaunch& of, const Queue& queue);

/// See GaussianArgs.
struct GaussianLaunch {
  const float* moments = nullptr;
  const float* noise = nullptr;
  int64_t rows = 0, elements = 0;  // elements: of latents, per row
  int channels = 0;                // of latents
  float weight = 0;
  Rows latents;
  float* kl = nullptr;
};
cudaError_t LaunchGaussian(const GaussianLaunch& gaussian, const Queue& queue);
struct GaussianBackwardLaunch {
  GaussianLaunch forward;  // without latents and kl
  Rows dlatents;
  float scale = 1;
  float* dmoments = nullptr;
};
cudaError_t LaunchGaussianBackward(const GaussianBackwardLaunch& backward, const Queue& queue);

/// Scratch per row; depends on its number of elements alone.
struct ReconstructionScratch {
  int64_t halved;  // doubles
  int parts;       // doubles
};
ReconstructionScratch ReconstructionScratchOf(int64_t elements);
/// See ReconstructionLossArgs.
struct ReconstructionLaunch {
  const float* output = nullptr;
  const float* target = nullptr;
  int64_t rows = 0;
  int height = 0, width = 0, channels = 0;
  float edges = 0;
  const float* add = nullptr;  // or null
  float scale = 1;
  float* loss = nullptr;
  float* doutput = nullptr;
  double* halved = nullptr;   // scratch
  double* partial = nullptr;  // scratch
};
cudaError_t LaunchReconstruction(const ReconstructionLaunch& of, const Queue& queue);

/// Floats of scratch for LaunchSquaredNorm().
int64_t SquaredNormParts(int64_t count);
cudaError_t LaunchSquaredNorm(const float* x, int64_t count, float* partial, float* out,
                              const Queue& queue);
cudaError_t LaunchAccumulate(float* a, const float* b, int64_t count, const Queue& queue);
struct UpdateLaunch {
  float *master = nullptr, *m = nullptr, *v = nullptr;
  const float* gradient = nullptr;
  float* averages[8] = {};
  int average_count = 0;
  int64_t count = 0;
  const float* squared_norm = nullptr;
  const UpdateScalars* scalars = nullptr;
  float m_share = 0, v_share = 0;  // 1 − β₁, 1 − β₂
  float eps = 0, weight_decay = 0, clip = 0;
};
cudaError_t LaunchUpdate(const UpdateLaunch& update, const Queue& queue);

}  // namespace denoised::training::cuda
