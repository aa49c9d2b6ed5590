// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/backend/activation.h"
#include "engine/backend/compute_device.h"
#include "engine/backend/resample.h"
#include "engine/core/status.h"
#include "engine/core/tensor.h"
#include "engine/training/device_data.h"

/// The device interface of training: ops, each followed by its backward op, weights in the layouts
/// that kernels read, and the optimizer. Serving's Backend (engine/backend/backend.h) does not
/// depend on it. cpu/ implements it on oneDNN in fp32 and is the oracle; cuda/ in bf16 or fp32.
///
/// **Layout.** Activations and their gradients are contiguous NHWC ([N, H, W, C], [N, tokens, C] or
/// [N, C]) in activation_dtype(), unless a line says F32. q, k and v of attention and the parts of
/// a fused linear may be Columns() views. Master weights, their gradients and the optimizer's state
/// are F32 in the checkpoint's own shapes: [Cout, Cin, k, k] for a convolution, [out, in] for a
/// linear, [C] for biases and norms.
///
/// **Passes and chunks.** A batch is cut into a power of two of equal chunks of consecutive
/// samples. An op sees a pass: `rows` samples, which are one or more whole chunks of chunk_rows(),
/// again a power of two. Every result for a row depends on that row alone. A gradient of parameters
/// is written (never added to). It is the sum over the chunks of the pass, added as a balanced
/// binary tree: chunk sums in the order 0…n−1 are added in neighbouring pairs, then the pairs, and
/// so on (TreeSum). Inside a chunk the backend chooses the order, which depends on shapes and
/// chunk_rows() alone. The trainer continues the same tree over passes and ranks, so the bits
/// depend neither on the rows of a pass, nor on the number of passes, nor on the number of ranks.
/// No float atomics.
///
/// **Order and errors.** Ops only enqueue and return nothing; a wrong shape is a bug (CHECK).
/// Errors of the device are kept and returned by status(). `d` in front of a name is the gradient
/// of the loss with respect to it. If dx, dadd, … is undefined, it is not computed.

struct CUstream_st;  // *cudaStream_t

namespace denoised::training {

/// A convolution's weights in the layouts of its forward and backward kernels. Made once;
/// PackConv2d() fills them again after every update of the master.
class PackedConv2d {
 public:
  virtual ~PackedConv2d() = default;
  int in_channels = 0, out_channels = 0, kernel = 0;
  bool upsample2x = false;  // the input is doubled first, by nearest neighbour; kernel 3, stride 1
};

/// Linears with the same input, fused into one (q, k, v). `parts` are their numbers of outputs.
class PackedLinear {
 public:
  virtual ~PackedLinear() = default;
  int in_features = 0, out_features = 0;
  std::vector<int> parts;  // their sum is out_features
};

struct Conv2dGeometry {
  int stride = 1;
  int pad_top = 0, pad_left = 0, pad_bottom = 0, pad_right = 0;
};
/// Whether a GPU also packs a convolution's weights in four phases, for the gradient of its input.
inline bool PacksPhases(const Conv2dGeometry& geometry, int kernel, bool upsample2x) {
  return kernel == 3 && geometry.stride == 2 && !upsample2x && geometry.pad_top <= 1 &&
         geometry.pad_left <= 1;
}
/// Whether a Hopper GPU, in bf16, packs them for pairs of neighbouring pixels, too: a pair has up
/// to 64 channels, in vectors of eight.
inline bool PacksPairs(int in, int out, const Conv2dGeometry& geometry, int kernel,
                       bool upsample2x) {
  return in <= 32 && out <= 32 && in % 4 == 0 && out % 4 == 0 && kernel == 3 && !upsample2x &&
         geometry.stride == 1 && geometry.pad_top == 1 && geometry.pad_left == 1 &&
         geometry.pad_bottom == 1 && geometry.pad_right == 1;
}

/// out = (conv(x) + bias + add + residual) · scale
struct Conv2dArgs {
  Tensor x;  // [N, H, W, Cin]
  const PackedConv2d* weight = nullptr;
  Conv2dGeometry geometry;
  Tensor add;       // optional [N, Cout]: added to every pixel
  Tensor residual;  // optional, shape of out
  float scale = 1;
  Tensor out;  // [N, Ho, Wo, Cout]; activation dtype, or F32
};

/// The gradients of Conv2d for x, weights and bias. With a scale, `dout` is already multiplied by
/// it; the residual's gradient is then dout itself, and the gradient of add is SumPixels(dout).
struct Conv2dBackwardArgs {
  Tensor x;  // as forward; only read when dweight is wanted
  const PackedConv2d* weight = nullptr;
  Conv2dGeometry geometry;
  Tensor dout;     // [N, Ho, Wo, Cout]; activation dtype, or F32
  Tensor dx;       // optional, shape of x
  Tensor dweight;  // optional F32 [Cout, Cin, k, k]
  Tensor dbias;    // optional F32 [Cout], beside dweight
};

/// out = (xWᵀ + bias + residual) · scale
struct LinearArgs {
  Tensor x;  // rows of in_features: [N, K] or [N, H, W, K] or [N, tokens, K]
  const PackedLinear* weight = nullptr;
  Tensor residual;  // optional, shape of out
  float scale = 1;
  Tensor out;  // rows of out_features
};

struct LinearBackwardArgs {
  Tensor x;  // as forward; only read when a dweight is wanted
  const PackedLinear* weight = nullptr;
  Tensor dout;                   // as out, already multiplied by the scale
  Tensor add;                    // optional, shape of dx: added to dx; may be dx
  Tensor dx;                     // optional, shape of x
  std::vector<Tensor> dweights;  // by part: F32 [part, K]; empty: not wanted
  std::vector<Tensor> dbiases;   // by part: F32 [part]; empty: the layer has none
};

/// z = (x − mean)·rstd·γ + β; with scale_shift z·(1 + scale) + shift; out = act(z). Statistics are
/// those of a row and a group of channels.
struct GroupNormArgs {
  Tensor x;            // [N, H, W, C] or [N, tokens, C]
  Tensor gamma, beta;  // F32 [C], masters
  int groups = 1;
  float eps = 1e-5f;
  Tensor scale_shift;                         // optional [N, 2C]: scale, then shift
  Activation activation = Activation::kNone;  // kNone, kSilu, kMish, kGelu or kRelu
  Tensor statistics;  // F32 [N, groups, 2]: mean, rstd; written by the forward op, read by its twin
  Tensor out;         // shape of x
};

struct GroupNormBackwardArgs {
  GroupNormArgs forward;  // as it was called; its `out` is not read and may be undefined
  Tensor dout;            // shape of x
  Tensor add;             // optional, shape of x: added to dx (a residual's gradient); may be dx
  Tensor dx;              // shape of x; may be dout
  /// Optional: the last channels of dx, and `dx` has those before. For x from Concat. Neither may
  /// be dout or add.
  Tensor dx_rest;
  /// Optional [N, C]: SumPixels(dx), of values before or after they are rounded. Without add and
  /// dx_rest.
  Tensor dx_sums;
  Tensor dscale_shift;   // [N, 2C], with scale_shift
  Tensor dgamma, dbeta;  // F32 [C]
};

/// y = (x − mean)·rstd·γ + β; statistics are those of a token.
struct LayerNormArgs {
  Tensor x;            // [N, tokens, C]
  Tensor gamma, beta;  // F32 [C], masters
  float eps = 1e-5f;
  Tensor statistics;  // F32 [N, tokens, 2]: mean, rstd; written by the forward op, read by its twin
  Tensor out;         // shape of x
};

struct LayerNormBackwardArgs {
  LayerNormArgs forward;  // as it was called; its `out` is not read and may be undefined
  Tensor dout;            // shape of x
  Tensor add;             // optional, shape of x: added to dx (a residual's gradient); may be dx
  Tensor dx;              // shape of x; may be dout
  Tensor dgamma, dbeta;   // F32 [C]; undefined: not wanted
};

/// out = softmax(q kᵀ · scale) v, per head. Keys may come from another sequence than queries.
struct AttentionArgs {
  Tensor q;     // [N, tokens, heads · dim], may be Columns() views, as k and v
  Tensor k, v;  // [N, keys, heads · dim]
  int heads = 1;
  float scale = 1;
  bool causal = false;  // query i sees keys 0 … i only; keys = tokens
  Tensor
      log_sum_exp;  // F32 [N, heads, tokens]: of the scaled scores; written forward, read backward
  Tensor out;       // [N, tokens, heads · dim]
};

struct AttentionBackwardArgs {
  AttentionArgs forward;  // as it was called; `out` is read
  Tensor dout;            // shape of out
  Tensor dq, dk, dv;      // may be Columns() views
};

struct SamplesArgs {
  Tensor images;  // U8 [M, Hi, Wi, C]; pixels are value / 127.5 − 1
  /// Instead of images: F32 [M, H, W, 2C], Gaussians of latents, mean before deviation. Each sample
  /// draws its own y from one; flip, top and left are 0.
  Tensor posteriors;
  Tensor rows;  // I32 [N, kSampleNumbers]: SampleRow
  uint64_t seed = 0;
  Tensor step;       // I32 [1], for Philox
  Tensor x;          // [N, H, W, C], H ≤ Hi, W ≤ Wi
  Tensor target;     // F32 [N, H, W, C]
  Tensor condition;  // F32 [N]
  Tensor label;      // optional I32 [N]
  Tensor image;      // optional F32 [N, H, W, C]: y itself, for VarianceLoss()
};

struct LossArgs {
  Tensor output;    // F32 [N, H, W, C]
  Tensor target;    // F32 [N, H, W, C]
  Tensor rows;      // I32 [N, kSampleNumbers]: SampleRow
  float scale = 1;  // of the gradient: 1 / samples of the global batch
  Tensor loss;      // F32 [N]: weight · mean over the elements of (output − target)²
  Tensor sum;       // optional F32 [1]: scale · Σ loss, over chunks as gradients are
  Tensor doutput;   // F32 [N, H, W, C]: gradient of scale · Σ loss
};

/// The hybrid loss of improved DDPM (Nichol and Dhariwal, arXiv 2102.09672, equations 14 to 16):
/// Loss() of the first C channels, plus weight · L. The row's condition is the DDPM timestep t.
/// With v the last C channels, every pixel has
///
///   ln Σ = ½(1 + v) · log_variance_max + ½(1 − v) · log_variance_min
///   δ    = mean_factor · (prediction − target), the distance of the two means
///   L    = KL(N(δ, e^log_variance_min) ‖ N(0, Σ)), at t = 0 −ln p(y) of a picture of 8 bits
///          (DDPM, arXiv 2006.11239, equation 13), δ being y − the mean
///
/// and L is the mean over the pixels. L sends no gradient into the mean.
struct VarianceLossArgs {
  Tensor output;     // F32 [N, H, W, 2C]: the prediction, then v
  Tensor target;     // F32 [N, H, W, C]
  Tensor image;      // F32 [N, H, W, C]: y; read where t = 0
  Tensor rows;       // I32 [N, kSampleNumbers]: SampleRow
  float scale = 1;   // as LossArgs
  float weight = 0;  // of L, in nats
  Tensor loss;       // F32 [N]
  Tensor sum;        // optional F32 [1]: as LossArgs
  Tensor doutput;    // F32 [N, H, W, 2C]
};

/// The posterior of AutoencoderKL: latents = mean + exp(logvar / 2)·noise, and its distance from
/// N(0, 1), KL = weight · mean(mean² + exp(logvar) − 1 − logvar) / 2. logvar is clamped to [−30,
/// 20].
struct GaussianArgs {
  Tensor moments;    // F32 [N, h, w, 2C]: mean, then logvar
  Tensor noise;      // F32 [N, h, w, C]
  float weight = 0;  // of KL
  Tensor latents;    // [N, h, w, C]
  Tensor kl;         // F32 [N]
};

struct GaussianBackwardArgs {
  GaussianArgs forward;  // as it was called; latents and kl are not read
  Tensor dlatents;       // [N, h, w, C]
  float scale = 1;       // of KL's gradient: 1 / samples of the global batch
  Tensor dmoments;       // F32 [N, h, w, 2C]
};

/// The distance of two pictures: mean |d| + edges · Σ over four scales of (mean |∂d/∂x| + mean
/// |∂d/∂y|), where d = output − target is halved by 2×2 means from scale to scale, and ∂ is the
/// difference of neighbours. Heights and widths must be at least 16 and divisible by 8.
struct ReconstructionLossArgs {
  Tensor output, target;  // F32 [N, H, W, C]
  float edges = 0;
  Tensor add;       // optional F32 [N]: added to the loss, without a gradient
  float scale = 1;  // of the gradient: 1 / samples of the global batch
  Tensor loss;      // F32 [N]
  Tensor sum;       // F32 [1]: scale · Σ loss, over chunks as gradients are
  Tensor doutput;   // F32 [N, H, W, C]: gradient of scale · Σ loss
};

/// Inverted dropout by Philox: out = x / (1 − p) if the element's uniform number is ≥ p, else 0.
/// Its backward op is the same op on the gradient.
struct DropoutArgs {
  Tensor x;
  float probability = 0;
  uint64_t seed = 0;
  Tensor step;         // I32 [1]
  Tensor rows;         // I32 [N, kSampleNumbers]: SampleRow, for `sample`
  uint32_t layer = 0;  // which dropout of the network
  Tensor out;          // may be x
};

/// AdamW (arXiv 1711.05101, as torch.optim.AdamW): g = gradient · min(1, clip / (norm + 1e-6));
/// m ← m + (1 − β₁)(g − m); v ← v + (1 − β₂)(g² − v);
/// w ← w − rate·decay·w − rate/correction1 · m / (√v/√correction2 + eps); then average ← average +
/// share·(w − average). Nothing at all is changed when `squared_norm` is not finite.
///
/// Each 1 − x is rounded once: as a float, 0.999 leaves 1 − 0.999 wrong by 1.3e-5.
struct UpdateArgs {
  Tensor master, gradient, m, v;  // F32 [P]
  std::vector<Tensor> averages;   // F32 [P] each, at most 8
  Tensor squared_norm;            // F32 [1], of the whole gradient
  Tensor scalars;                 // F32 [16]: UpdateScalars
  double beta1 = 0.9, beta2 = 0.999;
  float eps = 1e-8f, weight_decay = 0.01f;
  float clip = 0;  // 0: no clipping
};

/// What a backend has recorded of ops that are enqueued repeatedly.
class Recording {
 public:
  virtual ~Recording() = default;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;    // "cpu", "cuda:0"
  virtual std::string description() const = 0;  // for people
  virtual denoised::Device device() const = 0;
  virtual DType activation_dtype() const = 0;
  /// What the bits depend on besides a run's settings: the chip and libraries, but not the number
  /// of threads.
  virtual std::string arithmetic() const { return description(); }
  /// FLOP/s of the chip's dense products of activation_dtype(); 0 where that is not known (peak.h).
  virtual double peak_flops() const { return 0; }

  // Passes.
  /// The rows of a chunk in ops that compute gradients. Set before the first of them, and changed
  /// only between passes (latents.cc restores what it found).
  virtual void SetChunkRows(int64_t rows) = 0;
  virtual int64_t chunk_rows() const = 0;
  /// How many of a micro-batch's `chunks` one pass should have; a power of two. The CPU takes 1 and
  /// runs passes in parallel.
  virtual int64_t PassChunks(int64_t chunks) const = 0;
  /// Passes that run at one time, each with its own activations.
  virtual int workers() const = 0;
  /// Calls body(pass, worker) for every pass in [0, count), in ascending order of begin, at most
  /// workers() at a time. Returns when all have returned (a GPU: when all are enqueued).
  virtual void ForEachPass(int64_t count, const std::function<void(int64_t, int)>& body) = 0;
  /// Runs `body`, which enqueues ops and may call ForEachPass(), but no other function above. Every
  /// body that is run with the same recording must enqueue the same ops on the same memory, so that
  /// a GPU can launch the recording instead; a GPU may also run it twice. Only the first run may
  /// call Allocate(). The CPU runs it every time, and its recordings are null.
  virtual std::unique_ptr<Recording> NewRecording() { return nullptr; }
  virtual void Run(Recording* /*recording*/, const std::function<void()>& body) { body(); }

  // Memory.
  /// ResourceExhausted says how much `purpose` needed and how much is free. Zeroed.
  virtual absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype,
                                          std::string_view purpose) = 0;
  /// Copies host memory into `to` in order; `from` may be reused on return.
  virtual void Upload(const void* from, size_t bytes, const Tensor& to) = 0;
  /// Waits for the enqueued work and copies `from` (contiguous) to host memory.
  virtual absl::StatusOr<Tensor> Download(const Tensor& from) = 0;
  /// The same without waiting: what `from` holds after the work that is enqueued now. For a few
  /// bytes, since a GPU makes a copy of its own.
  virtual std::unique_ptr<denoised::Download> BeginDownload(const Tensor& from) {
    return std::make_unique<denoised::ReadyDownload>(Download(from));
  }
  /// The first error since the backend was made. Waits for the enqueued work.
  virtual absl::Status status() = 0;
  /// Bytes of a GPU's memory in use, including other processes'; 0 on the CPU.
  virtual size_t MemoryInUse() const { return 0; }

  // For a library that enqueues work of its own between the ops (nccl.h).
  /// CUDA's stream of the ops, whose device becomes this thread's current one. Null on the CPU.
  virtual CUstream_st* Stream() { return nullptr; }
  /// Has all that is enqueued been done? Does not wait. An error as status().
  virtual absl::StatusOr<bool> Done() { return true; }
  /// The GPU's UUID; empty on the CPU.
  virtual std::string uuid() const { return ""; }

  // Weights.
  /// `geometry`: with which it will be used. Another is correct but may be slower.
  virtual std::unique_ptr<PackedConv2d> NewConv2d(int in_channels, int out_channels, int kernel,
                                                  bool upsample2x,
                                                  const Conv2dGeometry& geometry) = 0;
  virtual std::unique_ptr<PackedLinear> NewLinear(int in_features,
                                                  const std::vector<int>& parts) = 0;
  /// Fills the packed weights from masters, which must stay where they are. `bias` may be
  /// undefined.
  virtual void PackConv2d(const Tensor& weight, const Tensor& bias, PackedConv2d* packed) = 0;
  /// `biases` is empty or has one for each part.
  virtual void PackLinear(const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                          PackedLinear* packed) = 0;
  /// Runs `packs`, which only calls the two above. They may then share launches.
  virtual void PackTogether(const std::function<void()>& packs) { packs(); }

  // Ops and their backward twins.
  virtual void Conv2d(const Conv2dArgs& args) = 0;
  virtual void Conv2dBackward(const Conv2dBackwardArgs& args) = 0;
  virtual void Linear(const LinearArgs& args) = 0;
  virtual void LinearBackward(const LinearBackwardArgs& args) = 0;
  virtual void GroupNorm(const GroupNormArgs& args) = 0;
  virtual void GroupNormBackward(const GroupNormBackwardArgs& args) = 0;
  virtual void Attention(const AttentionArgs& args) = 0;
  virtual void AttentionBackward(const AttentionBackwardArgs& args) = 0;
  virtual void LayerNorm(const LayerNormArgs& args) = 0;
  virtual void LayerNormBackward(const LayerNormBackwardArgs& args) = 0;
  /// GEGLU: x [.., 2C] → out [.., C] = x[.., :C] · gelu(x[.., C:]), gelu by erf. dx may be x.
  virtual void Geglu(const Tensor& x, const Tensor& out) = 0;
  virtual void GegluBackward(const Tensor& x, const Tensor& dout, const Tensor& dx) = 0;
  /// out = act(x); any but kTanh. `out` may be x.
  virtual void Activate(Activation activation, const Tensor& x, const Tensor& out) = 0;
  /// dx = dout · act′(x); `x` is the forward input. `dx` may be dout.
  virtual void ActivateBackward(Activation activation, const Tensor& x, const Tensor& dout,
                                const Tensor& dx) = 0;
  /// out = scale · x resampled: [N, H, W, C] → [N, 2H, 2W, C] or [N, H / 2, W / 2, C].
  virtual void Resample2x(Resample kind, const Tensor& x, float scale, const Tensor& out) = 0;
  void Resample2xBackward(Resample kind, const Tensor& dout, const Tensor& dx) {
    Resample2x(Opposite(kind), dout, Doubles(kind) ? 4.0f : 0.25f, dx);
  }
  /// out[.., :C] = a, out[.., C:] = b. Backwards: GroupNormBackwardArgs::dx_rest.
  virtual void Concat(const Tensor& a, const Tensor& b, const Tensor& out) = 0;
  /// out = a·scale_a + b·scale_b + shift; b may be undefined; `out` may be a or b. Shapes must be
  /// equal; dtypes may differ.
  virtual void Add(const Tensor& a, float scale_a, const Tensor& b, float scale_b, float shift,
                   const Tensor& out) = 0;
  /// out[n, c] = Σ over the pixels of x[n, .., c]: the gradient of Conv2dArgs::add.
  virtual void SumPixels(const Tensor& x, const Tensor& out) = 0;
  /// out[n] = x[n] / divisor[n]; divisor F32 [N]; x and out F32. It is its own backward op.
  virtual void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) = 0;
  /// diffusers' Timesteps: t F32 [N] → out [N, dim]. No gradient.
  virtual void TimestepEmbedding(const Tensor& t, bool flip_sin_to_cos, double freq_shift,
                                 const Tensor& out) = 0;
  /// diffusers' GaussianFourierProjection of ln t: weight F32 [dim / 2]. No gradient.
  virtual void FourierEmbedding(const Tensor& t, const Tensor& weight, const Tensor& out) = 0;
  /// out[n] = table[index[n]]; table F32 [entries, dim] (a master), index I32 [N] or [N, tokens],
  /// out of its shape and dim.
  virtual void Embedding(const Tensor& table, const Tensor& index, const Tensor& out) = 0;
  /// dtable F32 [entries, dim]: Σ dout[n] over the rows of each entry, 0 for entries without rows.
  virtual void EmbeddingBackward(const Tensor& index, const Tensor& dout, const Tensor& dtable) = 0;
  virtual void Dropout(const DropoutArgs& args) = 0;

  // Objective and optimizer.
  virtual void MakeSamples(const SamplesArgs& args) = 0;
  /// out [N, ..] ~ N(0, 1) by Philox of (seed, kPosterior, step, the row's sample, element); rows
  /// as SamplesArgs has them.
  virtual void Noise(uint64_t seed, const Tensor& step, const Tensor& rows, const Tensor& out) = 0;
  virtual void Loss(const LossArgs& args) = 0;
  virtual void VarianceLoss(const VarianceLossArgs& args) = 0;
  virtual void Gaussian(const GaussianArgs& args) = 0;
  virtual void GaussianBackward(const GaussianBackwardArgs& args) = 0;
  virtual void ReconstructionLoss(const ReconstructionLossArgs& args) = 0;
  /// out F32 [1] = Σ x², x F32 [P]. The order depends on P alone.
  virtual void SquaredNorm(const Tensor& x, const Tensor& out) = 0;
  /// a += b, F32 [P]: one node of the tree of sums.
  virtual void Accumulate(const Tensor& a, const Tensor& b) = 0;
  virtual void Update(const UpdateArgs& args) = 0;
};

/// The CPU, with oneDNN and as many threads as in serving (OMP_NUM_THREADS limits them).
absl::StatusOr<std::unique_ptr<Backend>> OpenCpuBackend();
/// Bytes of host memory that are free for this process, on the machine or in its control group.
size_t FreeHostMemory();
/// Calls task(0) … task(count − 1), in any order on the CPU backend's threads, and returns when all
/// have returned.
void OnCpuThreads(int count, const std::function<void(int)>& task);

struct CudaOptions {
  int number = 0;              // the device
  bool fp32 = false;           // activations and products in fp32, for debugging; else bf16
  std::string autotune_cache;  // folder for measured times of kernels; empty: not kept
};
/// FailedPrecondition, with the remedy, without a GPU or in a build without CUDA.
absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(const CudaOptions& options);
/// OK if there is a GPU and this build supports it; else the error of OpenCudaBackend().
absl::Status CheckCuda(const CudaOptions& options);

/// Counts the memory and work of a step and computes nothing: its tensors have no memory.
struct Cost {
  double multiply_adds = 0;    // of convolutions, linears and attention, forward and backward
  int64_t conv2d_weights = 0;  // elements of the kernels of all NewConv2d()
  int64_t more_weights = 0;    // elements that a GPU packs besides, in phases and pairs
};
std::unique_ptr<Backend> NewCountingBackend(DType activation_dtype, Cost* cost);
/// Bytes of the packed weights of parameters with so many elements: for both directions, on the CPU
/// those of convolutions alone, on a GPU all of them, in the type of activations, and some in
/// phases or in pairs.
size_t PackedBytes(const Backend& backend, int64_t elements, const Cost& cost);

/// The balanced binary tree of `backend.h`: sums[0] becomes the sum of all. The count is a power of
/// two. For backends that sum chunk by chunk on the host.
template <typename Add>
void TreeSum(int64_t count, const Add& add) {
  for (int64_t width = 1; width < count; width *= 2)
    for (int64_t i = 0; i + width < count; i += 2 * width) add(i, i + width);
}

}  // namespace denoised::training
