// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/backend/activation.h"
#include "engine/core/notify.h"
#include "engine/core/status.h"
#include "engine/core/step_plan.h"
#include "engine/core/tensor.h"

/// The device interface. nn/ is written once against it, and says what it wants: what is fused with
/// a product, and what is an op of its own, each backend decides. cpu/ implements it plainly in
/// fp32 and is the reference for tests; cuda/ fuses.
///
/// Activations are NHWC ([N, H, W, C], or [N, tokens, C]) in activation_dtype(). "Row" is one
/// sample of the batch: dimension 0. Every op computes each row with an order of operations that
/// depends on the row's shape alone, so a row has the same bits in any batch.
///
/// Ops only enqueue and return nothing. Shapes were validated when the model was loaded, so a wrong
/// one is a bug (CHECK). Errors of the device are kept and returned by status(). Only the thread
/// that owns the device uses a backend, except inside ForEachPart().

namespace denoised {

/// Limits that every backend supports; nn/ refuses larger models when they are loaded.
constexpr int kMaxHeadDim = 512;
constexpr int kMaxNormChannels = 6144;

/// A convolution or linear layer that may multiply in e4m3 (engine/core/e4m3.h). With an input
/// scale s, its input is RoundToE4m3(x / s), and its weights are rounded in the same way when they
/// are packed, with the E4m3Scale() of each output's largest. Products are exact, sums F32. So the
/// result is the layer's of the rounded numbers, and all else in its op is as without: bias, add,
/// residual, scale, activation. Not for `upsample2x`, nor for linears of one vector a row (rank 2).
struct E4m3Layer {
  std::string name;       // in the checkpoint, for InputObserver; empty: it is not observed
  float input_scale = 0;  // a power of two; 0: products are in the activation dtype
};

/// Called with the inputs of layers that have a name, each time that they have been computed, on
/// any thread, several at a time. For calibration.
using InputObserver = std::function<void(const std::string& layer, const Tensor& x)>;

/// Weights in the layout of the backend's kernels, made once at load.
class PackedConv2d {
 public:
  virtual ~PackedConv2d() = default;
  int in_channels = 0, out_channels = 0, kernel = 0;
  bool upsample2x = false;
  bool has_bias = false;
  E4m3Layer e4m3;
};
class PackedLinear {
 public:
  virtual ~PackedLinear() = default;
  int in_features = 0, out_features = 0;
  bool gated = false;  // packed for Epilogue::ungated
  E4m3Layer e4m3;
};

/// A group norm and what follows it: act(norm(x)·(1 + scale) + shift).
struct Norm {
  Tensor gamma, beta;  // F32 [C]; undefined: no norm
  int groups = 32;
  float eps = 1e-5f;
  Tensor scale_shift;  // optional [N, 2·C], may be a Columns() view: scales, then shifts
  Activation activation = Activation::kNone;
  bool applied = false;  // by the Epilogue of what wrote x
};
inline bool IsToBeApplied(const Norm& norm) { return norm.gamma.defined() && !norm.applied; }

/// A 1×1 convolution, stride 1, of concat(x, x2). Another convolution adds its result to its own.
struct Conv2dShortcut {
  Tensor x;   // [N, Ho, Wo, C]: height and width of the other convolution's output
  Tensor x2;  // optional [N, Ho, Wo, C2]
  const PackedConv2d* weight = nullptr;  // [Cout, 1, 1, C + C2]; its bias is part of the other's
};

/// What becomes of the input `x` of a convolution or a linear layer before the product. A backend
/// fuses what it can and is faster; the rest it runs as ops of their own (decompose.h), with the
/// same bits. Only convolutions have `x2` and `upsample2x`.
struct Prologue {
  Tensor x2;                // optional [N, H, W, C2]: the input is concat(x, x2) along channels
  Norm norm;                // optional, of concat(x, x2)
  Tensor normed;            // with a norm: [.., C + C2] for its result; undefined afterwards
  bool upsample2x = false;  // nearest-neighbour doubling then, as packed; the kernel is 3 × 3, the
                            // stride 1 and the padding 1 on all sides
};

/// What becomes of the product with weight and bias:
///   out = act((product + add + residual or shortcut) · scale), or its gate.
/// Fused as a Prologue is. Only convolutions have `add` and `shortcut`, only linears a gate, which
/// is alone then.
struct Epilogue {
  Tensor add;       // optional [N, Cout], rows may be a Columns() view: added to every pixel
  Tensor residual;  // optional, shape of out
  Conv2dShortcut shortcut;  // optional, in place of a residual; `out` must not overlap its inputs
  float scale = 1.0f;
  Activation activation = Activation::kNone;
  /// Optional, with weights that were packed for it: GEGLU (arXiv 2002.05202). [.., 2·C] for values
  /// and gates; undefined afterwards. out [.., C] is value · gelu(gate), both rounded to the
  /// activation dtype before.
  Tensor ungated;
  /// Optional: the norm through which alone `out` is read. The backend may apply it to `out` and
  /// set `applied`; else it is left to the Prologue of who reads `out`, which has the same norm.
  Norm* norm = nullptr;
};

struct Conv2dArgs {
  Tensor x;                              // [N, H, W, C]
  const PackedConv2d* weight = nullptr;  // [Cout, k, k, C + C2] and optional bias
  int stride = 1;
  int pad_top = 0, pad_left = 0, pad_bottom = 0, pad_right = 0;
  Prologue prologue;
  Epilogue epilogue;
  Tensor out;  // [N, Ho, Wo, Cout]; activation dtype, or F32
};

struct LinearArgs {
  Tensor x;                              // [M, K], or any rank: rows of K; activation dtype or F32
  const PackedLinear* weight = nullptr;  // [Nout, K] and optional bias
  Prologue prologue;
  Epilogue epilogue;
  Tensor out;  // rows of Nout; activation dtype or F32
};

struct GroupNormArgs {
  Tensor x;   // [N, H, W, C] or [N, tokens, C]
  Tensor x2;  // optional [N, H, W, C2]: normalises concat(x, x2)
  Norm norm;
  Tensor out;  // [.., C + C2]; must not overlap x, x2
};

struct LayerNormArgs {
  Tensor x;            // [.., C]
  Tensor gamma, beta;  // F32 [C]
  float eps = 1e-5f;
  Tensor out;  // [.., C]; may be x
};

struct AttentionArgs {
  Tensor q;     // [N, tokens, heads·dim], may be a Columns() view
  Tensor k, v;  // [S, key tokens, heads·dim], likewise; S is N unless there is a key_set
  /// Optional I32 [N]: row n attends to set key_set[n], in [0, S), of keys and values.
  Tensor key_set;
  /// Optional I32 [S]: only so many of a set's keys exist, from 1 to all. What k and v hold behind
  /// them has no effect.
  Tensor key_counts;
  bool causal = false;  // query i attends to keys 0 to i
  int heads = 1;
  float scale = 1.0f;  // softmax(q kᵀ · scale) v
  Tensor out;          // [N, tokens, heads·dim]
};

struct GaussianArgs {
  Tensor moments;  // F32 [.., 2·C]: means, then logarithms of variances, clamped to [−30, 20]
  Tensor noise;    // optional F32 [.., C], standard normal; undefined: zeros
  Tensor scale, shift;  // F32 [C]
  Tensor out;           // F32 [.., C]: (mean + noise · √variance) · scale + shift
};

struct TimestepEmbeddingArgs {
  Tensor t;  // F32 [N]
  bool flip_sin_to_cos = true;
  double freq_shift = 0;
  double scale = 1;
  double max_period = 10000;
  Tensor out;  // [N, dim]; cos before sin when flipped; zero-padded when dim is odd
};

struct FourierEmbeddingArgs {
  Tensor t;         // F32 [N]
  Tensor weight;    // F32 [dim / 2]
  bool log = true;  // embed ln t
  bool flip_sin_to_cos = false;
  Tensor out;  // [N, dim]: sin, cos of 2π·weight·t
};

struct EmbeddingArgs {
  Tensor table;  // activation dtype or F32 [entries, dim]
  Tensor index;  // I32 [N], each in [0, entries); or F32, rounded to the nearest entry
  Tensor out;    // [N, dim]
};

/// Resampling by two, for blocks whose resampling has no convolution of its own.
enum class Resample : uint8_t {
  kNearestUp,  // to 2n, or to 2n − 1 without the last line
  kAveragePoolDown,
  // With the filter (1, 3, 3, 1) / 8 along each edge, zeros outside: diffusers' upfirdn2d with its
  // gain. Rows and columns of `out`:
  kFirUp,    // out[2i] = (x[i − 1] + 3·x[i]) / 4, out[2i + 1] = (3·x[i] + x[i + 1]) / 4
  kFirDown,  // out[i] = (x[2i − 1] + 3·x[2i] + 3·x[2i + 1] + x[2i + 2]) / 8
};

/// The state of all images in flight: slot s is row s of each tensor.
struct SlotState {
  Tensor x;           // F32 [S, H, W, C]
  Tensor registers;   // F32 [S, kRegisters, H, W, C]
  Tensor x0;          // F32 [S, H, W, C], predicted by the latest evaluation; for previews
  Tensor plans;       // U8 [S, max evaluations · sizeof(DeviceEvaluation)]
  Tensor evaluation;  // I32 [S], index of the next evaluation in the slot's plan
  Tensor nonfinite;  // I32 [S], the first evaluation (1-based) whose predicted x0, before clipping,
                     // or next state has NaN or infinity; 0: none had
  Tensor seed;       // I64 [S], the bits of a uint64
  Tensor guidance;   // F32 [S, kGuidanceNumbers]: step_plan.h's Guidance
  Tensor embedding;  // optional F32 [S, D]: class vector ("identity") or class value ("timestep")
  // For images with a mask; read only if the slot's plan has one.
  Tensor known;  // optional F32 [S, 2, H, W, C]: the init image, and the initial noise
  Tensor mask;   // with `known`: F32 [S, H, W], 1 where the image is drawn anew
  /// Optional F32 [S, H, W, E]: channels that the model reads after those of the state.
  Tensor extra;
};
constexpr int kGuidanceNumbers = sizeof(Guidance) / sizeof(float);

/// One row of an evaluation. Uploaded as I32 [rows, kRowNumbers].
struct EvaluationRow {
  int32_t slot;               // −1: padding, computes zeros and influences nobody
  int32_t label;              // class index, when the model has a table of classes
  int32_t unconditional_row;  // guidance: the row with the unconditional output; −1 without
  int32_t advances;  // 1: this row moves its slot on; 0: it only serves as an unconditional row
  int32_t imageless_row = -1;  // guidance by an image: the unconditional row with no_extra set
  int32_t no_extra = 0;        // 1: zeros in place of the slot's extra channels
};
constexpr int kRowNumbers = sizeof(EvaluationRow) / sizeof(int32_t);

struct BeginSlotArgs {
  SlotState state;
  int slot = 0;
  Tensor source;  // optional F32 [H, W, C] (init image), device memory
  Tensor noise;   // optional F32 [H, W, C] instead of Philox draw kInitialDraw
  float source_scale = 0, noise_scale = 1, churn_scale = 0;
  bool keeps_known = false;  // source and the initial noise go into state.known
  // x = source_scale·source + noise_scale·noise + churn_scale·noise'; registers and x0 zero,
  // evaluation and nonfinite 0. state.seed must hold the slot's seed already.
};

struct GatherArgs {
  SlotState state;
  Tensor rows;       // I32 [R, kRowNumbers]: EvaluationRow
  Tensor x;          // activation dtype [R, H, W, C + E]: input_scale · state, then state.extra
  Tensor condition;  // F32 [R]
  Tensor label;      // optional I32 [R]
  Tensor embedding;  // optional F32 [R, D]; zeros for rows that only serve as unconditional
};

struct RescaleGuidanceArgs {
  SlotState state;
  Tensor rows;          // I32 [R, kRowNumbers]
  Tensor model_output;  // F32 [R, H, W, C] or [R, H, W, 2C]
  /// F32 [R]: of a row that advances and is guided with rescale φ > 0, φ · std(F_c) / std(F) + 1 −
  /// φ, where F is the guided output and std the standard deviation of a whole image, unbiased
  /// (arXiv 2305.08891). 1 for all others, and where std(F) is 0.
  Tensor factor;
};

struct AdvanceArgs {
  SlotState state;
  Tensor rows;             // I32 [R, kRowNumbers]
  Tensor model_output;     // F32 [R, H, W, C], or [R, H, W, 2C] with learned variance
  Tensor guidance_factor;  // optional F32 [R], of RescaleGuidance(): multiplies F
  // F is Guided() of the row's output and its unconditional rows'; a learned variance is the
  // conditional row's. Then step_plan.h's formulas; evaluation += 1.
};

/// A copy to the host under way. Destroying it early is allowed.
class Download {
 public:
  virtual ~Download() = default;
  virtual bool ready() = 0;
  /// Blocks. Returns the host copy, or the device's error.
  virtual absl::StatusOr<Tensor> Wait() = 0;
};

/// A place in the queue of work.
class Marker {
 public:
  virtual ~Marker() = default;
  virtual bool reached() = 0;
  virtual absl::Status Wait() = 0;
  /// Device time between two markers that were reached.
  virtual double SecondsSince(const Marker& earlier) = 0;
};

/// Ops recorded once, to be launched many times.
class Graph {
 public:
  virtual ~Graph() = default;
};

/// How the rows of an evaluation are divided over the threads of a backend.
struct RowSplit {
  int apart = 0;    // rows [0, apart) are computed in parts, the others together by all threads
  int part = 0;     // rows of the largest part
  int workers = 1;  // parts that are computed at one time
};

struct BackendMemory {
  size_t total = 0, free = 0;  // bytes on the device
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;    // "cpu", "cpu:1", "cuda:0"
  virtual std::string description() const = 0;  // for people: chip, cores or SMs, memory
  virtual Device device() const = 0;
  virtual DType activation_dtype() const = 0;
  /// What layers that are not in e4m3 round their operands to, at most.
  virtual DType product_dtype() const { return activation_dtype(); }
  /// Whether layers may have an E4m3Layer::input_scale.
  virtual bool MultipliesE4m3() const { return false; }

  // Memory. Persistent allocations are made at load only.
  /// ResourceExhausted says how much `purpose` needed and how much is free.
  virtual absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype,
                                          std::string_view purpose) = 0;
  virtual BackendMemory memory() const = 0;
  /// Copies `bytes` of host memory into `to` in stream order; `from` may be reused on return.
  virtual void Upload(const void* from, size_t bytes, const Tensor& to) = 0;
  /// Snapshots `from` (contiguous) at this point of the queue and returns at once.
  virtual std::unique_ptr<Download> BeginDownload(const Tensor& from) = 0;
  /// Reserves memory for `count` downloads of up to `bytes` at a time, as long as the result lives.
  /// Other downloads allocate their memory when they begin, and fail if there is none.
  /// ResourceExhausted as Allocate(). Null if the backend's downloads need no memory.
  virtual absl::StatusOr<std::shared_ptr<const void>> ReserveDownloads(size_t /*bytes*/,
                                                                       int /*count*/) {
    return nullptr;
  }
  /// As many elements of the same dtype; `to` may be a Columns() view as wide as `from`.
  virtual void Copy(const Tensor& from, const Tensor& to) = 0;

  // Weights: host tensors as in the file, of any float dtype. Several linears become one with their
  // outputs side by side (fused QKV); either all have a bias or none has.
  /// `upsample2x` must be that of every Prologue; `gated`: of one weight, values, then gates.
  virtual absl::StatusOr<std::unique_ptr<PackedConv2d>> PackConv2d(const Tensor& weight_oihw,
                                                                   const Tensor& bias,
                                                                   bool upsample2x,
                                                                   const E4m3Layer& e4m3 = {}) = 0;
  virtual absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(
      const std::vector<Tensor>& weights_oi, const std::vector<Tensor>& biases,
      const E4m3Layer& e4m3 = {}, bool gated = false) = 0;
  /// A parameter of any other kind, on the device in fp32.
  virtual absl::StatusOr<Tensor> PackVector(const Tensor& values) = 0;

  // Ops.
  virtual void Conv2d(const Conv2dArgs& args) = 0;
  virtual void Linear(const LinearArgs& args) = 0;
  /// out = value · gelu(gate) of the result of a Linear() with weights that were packed for it.
  virtual void Gate(const Tensor& values_and_gates, const Tensor& out) = 0;
  virtual void GroupNorm(const GroupNormArgs& args) = 0;
  virtual void LayerNorm(const LayerNormArgs& args) = 0;
  virtual void Attention(const AttentionArgs& args) = 0;
  /// out[p] = the row of `codebook` F32 [K, C] that is closest to x[p], the first of equals. x is
  /// F32 [.., C], out [.., C]. Distances are sums of squared differences in F32.
  virtual void NearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out) = 0;
  virtual void Gaussian(const GaussianArgs& args) = 0;
  virtual void TimestepEmbedding(const TimestepEmbeddingArgs& args) = 0;
  virtual void FourierEmbedding(const FourierEmbeddingArgs& args) = 0;
  virtual void Embedding(const EmbeddingArgs& args) = 0;
  virtual void Resample2x(Resample kind, const Tensor& x, const Tensor& out) = 0;
  /// out = act(a·scale + b + shift); b may be undefined; a and b may differ in dtype from out.
  virtual void Add(const Tensor& a, float scale, const Tensor& b, float shift,
                   Activation activation, const Tensor& out) = 0;
  /// out[n] = x[n] / divisor[n]; divisor F32 [N].
  virtual void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) = 0;
  virtual void BeginSlot(const BeginSlotArgs& args) = 0;
  virtual void Gather(const GatherArgs& args) = 0;
  virtual void RescaleGuidance(const RescaleGuidanceArgs& args) = 0;
  virtual void Advance(const AdvanceArgs& args) = 0;

  // Rows. A CPU is fastest when each thread takes rows of its own through all ops: the rows stay in
  // the core's cache, and threads wait for each other once an evaluation instead of once an op.
  /// How an evaluation of `rows` rows should be divided. A row has the same bits either way.
  virtual RowSplit SplitRows(int /*rows*/) const { return {}; }
  /// Calls body(begin, count, worker) for parts of at most split.part rows that make up rows
  /// [0, split.apart), in any order, from up to split.workers threads, each with its own `worker`
  /// < split.workers. The body may call ops that write memory of its rows or its worker. Returns
  /// when all calls have returned.
  virtual void ForEachPart(const RowSplit& split,
                           const std::function<void(int begin, int count, int worker)>& body) {
    if (split.apart > 0) body(0, split.apart, 0);
  }

  // Order.
  /// Runs `body` and records its ops instead of executing them. Tensors must outlive the graph. The
  /// CPU has no graphs: its ops are only checked now and `body` runs again at each Launch(), so all
  /// that it refers to must outlive the graph too. `body` may be run twice now, and what its ops
  /// write, except slots, may be overwritten: see BackendOptions::autotune.
  virtual absl::StatusOr<std::unique_ptr<Graph>> Capture(const std::function<void()>& body) = 0;
  virtual void Launch(Graph& graph) = 0;
  virtual std::unique_ptr<Marker> Mark() = 0;
  /// Waits for all work. Returns the first error since construction, which is final.
  virtual absl::Status Synchronize() = 0;
  /// The same without waiting.
  virtual absl::Status status() const = 0;
};

struct BackendOptions {
  std::string device = "auto";  // "auto" (CUDA when there is one), "cpu", "cuda"
  int number = 0;               // CUDA's device number; on the CPU only a part of the name
  /// CPU: the dtype in which convolutions and linears over tokens multiply, F32 or BF16; sums and
  /// activations are F32. BF16 needs AVX512-BF16 or AMX.
  DType cpu_dtype = DType::kF32;
  bool fp32 = false;  // CUDA: activations and arithmetic in fp32, for debugging
  /// CUDA: only the kernels for any GPU from compute capability 8.0 on, even if others are faster.
  bool generic_kernels = false;
  /// CUDA: packed weights are written again between ops, so no op may read them before the ops
  /// before it have ended.
  bool weights_change = false;
  /// CUDA: for shapes that were not measured before, Capture() first measures which of the kernels
  /// that give the same bits is the fastest.
  bool autotune = false;
  std::string autotune_cache;   // directory for measured results; empty: they are not kept
  Notify notify;                // called on the thread that uses the backend; may be empty
  InputObserver observe_input;  // CPU; may be empty
};

/// InvalidArgument for an unknown name; FailedPrecondition, with the remedy, when the device is not
/// there or this build has no CUDA.
absl::StatusOr<std::unique_ptr<Backend>> OpenBackend(const BackendOptions& options);

}  // namespace denoised
