// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/cuda_backend.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/backend/check.h"
#include "engine/backend/cuda/device.h"
#include "engine/backend/cuda/weights.h"
#include "engine/core/mutex.h"
#include "engine/training/backend.h"
#include "engine/training/cuda/launch.h"
#include "engine/training/peak.h"

/// training/backend.h on CUDA. Convolutions and linears, forward and for the gradient of their
/// input, are ops of serving's backend; LaunchPacks() rewrites their packed weights after every
/// update. Other ops that serving has are its too. The rest are kernels of launch.h on the same
/// stream.
///
/// A pass has all chunks of a micro-batch. The trainer owns its activations. Temporary memory of
/// ops is scratch here; ops share it, because they run one after another.

namespace denoised::training {
namespace cuda {
namespace {

using denoised::cuda::AllocateDevice;
using denoised::cuda::CudaConv2d;
using denoised::cuda::CudaLinear;
using denoised::cuda::DeviceMemory;
using denoised::cuda::kBiasPadding;
using denoised::cuda::kDepthPadding;
using denoised::cuda::kMaxHeadDim;
using denoised::cuda::RoundUp;
using denoised::cuda::ToStatus;

/// The gradient of the input is a convolution of dout with `backward`: [in, rotated taps, out].
/// With stride 2 it has four phases, like a convolution after doubling: `strided`, if the padding
/// is `pad_top` and `pad_left`. With no more than 32 channels, it is a convolution of pairs of
/// neighbouring pixels: `paired`. Half of its weights are zero, but so is half of a step of 64
/// channels in `backward`, and products with twice as many outputs read shared memory less often.
struct TrainingConv2d final : PackedConv2d {
  CudaConv2d forward, backward, strided, paired;
  int pad_top = 0, pad_left = 0;
};
struct TrainingLinear final : PackedLinear {
  CudaLinear forward, backward;
};

struct CudaRecording final : Recording {
  int runs = 0;
  std::unique_ptr<denoised::Graph> graph;
};

Element ElementOf(DType dtype) { return dtype == DType::kBF16 ? Element::kBf16 : Element::kF32; }
int64_t BytesOf(Element element) { return element == Element::kBf16 ? 2 : 4; }

/// Narrower images have pairs that serving's halo tiles do not cover.
constexpr int64_t kLeastPairedWidth = 16;

/// CudaConv2d::zero_taps of `strided`.
uint16_t ZeroTaps(bool pad_top, bool pad_left) {
  const auto exists = [](int tap) { return tap >= 0 && tap < 3; };
  uint32_t zeros = 0;
  for (int i = 0; i < 16; ++i) {
    const int phase = i / 4, tap = i % 4;
    if (!exists(StridedTap(pad_top, phase / 2, tap / 2)) ||
        !exists(StridedTap(pad_left, phase % 2, tap % 2))) {
      zeros |= 1u << i;
    }
  }
  return static_cast<uint16_t>(zeros);
}

/// The tensor as lines of its last dimension.
Rows View(const Tensor& tensor) {
  if (!tensor) return {};
  DENOISED_CHECK(tensor.device() == denoised::Device::kCuda, "a tensor of the host");
  DENOISED_CHECK(tensor.dtype() == DType::kF32 || tensor.dtype() == DType::kBF16, "a tensor of {}",
                 Name(tensor.dtype()));
  const int64_t line_bytes = tensor.row_stride() * static_cast<int64_t>(SizeOf(tensor.dtype()));
  return {tensor.data(), tensor.row_stride(), ElementOf(tensor.dtype()),
          reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0 && line_bytes % 16 == 0};
}
/// The elements of a contiguous tensor as one line.
Rows Flat(const Tensor& tensor) {
  Rows rows = View(tensor);
  if (!tensor) return rows;
  DENOISED_CHECK(tensor.contiguous());
  rows.vector = reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0;
  return rows;
}
float* Floats(const Tensor& tensor) { return tensor ? tensor.as<float>() : nullptr; }
const SampleRow* SamplesOf(const Tensor& rows) {
  return reinterpret_cast<const SampleRow*>(rows.as<int32_t>());
}
int64_t LinesOf(const Tensor& tensor) { return tensor.elements() / tensor.dim(-1); }
int Extent(const Tensor& tensor, int dimension) { return static_cast<int>(tensor.dim(dimension)); }

class CudaBackend final : public Backend {
 public:
  CudaBackend(std::unique_ptr<denoised::Backend> ops, DType dtype, int number)
      : ops_(std::move(ops)),
        dtype_(dtype),
        number_(number),
        queue_(*QueueOf(*ops_)),
        stream_(queue_.stream) {}
  ~CudaBackend() override { static_cast<void>(ops_->Synchronize()); }  // before memory goes

  std::string_view name() const override { return ops_->name(); }
  std::string description() const override { return ops_->description(); }
  denoised::Device device() const override { return denoised::Device::kCuda; }
  DType activation_dtype() const override { return dtype_; }
  std::string arithmetic() const override {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, number_) != cudaSuccess) return "unknown GPU";
    return fmt::format("{}, compute capability {}.{}", properties.name, properties.major,
                       properties.minor);
  }
  double peak_flops() const override {
    cudaDeviceProp properties;
    int kilohertz = 0;
    if (cudaGetDeviceProperties(&properties, number_) != cudaSuccess ||
        cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, number_) != cudaSuccess)
      return 0;
    return PeakFlops({.name = properties.name,
                      .major = properties.major,
                      .minor = properties.minor,
                      .multiprocessors = properties.multiProcessorCount,
                      .hertz = 1e3 * kilohertz},
                     dtype_);
  }

  // Passes.
  void SetChunkRows(int64_t rows) override { chunk_rows_ = rows; }
  int64_t chunk_rows() const override { return chunk_rows_; }
  int64_t PassChunks(int64_t chunks) const override { return chunks; }
  int workers() const override { return 1; }
  void ForEachPass(int64_t count, const std::function<void(int64_t, int)>& body) override {
    for (int64_t pass = 0; pass < count; ++pass) body(pass, 0);
  }

  std::unique_ptr<Recording> NewRecording() override { return std::make_unique<CudaRecording>(); }
  /// The first run is not captured, because it allocates memory and loads kernels.
  void Run(Recording* recording, const std::function<void()>& body) override {
    auto& recorded = static_cast<CudaRecording&>(*recording);
    if (recorded.runs++ == 0) return body();
    if (!ok()) return;
    if (recorded.graph == nullptr) {
      // Capture() may wait for the whole device, which fails while another rank of this process
      // captures.
      static Mutex one_at_a_time;
      MutexLock lock(&one_at_a_time);
      recording_ = true;
      absl::StatusOr<std::unique_ptr<denoised::Graph>> graph = ops_->Capture(body);
      recording_ = false;
      if (!graph.ok()) return Keep(graph.status());
      recorded.graph = *std::move(graph);
    }
    ops_->Launch(*recorded.graph);
  }

  // Memory.
  absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype,
                                  std::string_view purpose) override {
    DENOISED_CHECK(!recording_, "memory for {} inside a recording", purpose);
    DENOISED_RETURN_IF_ERROR(status_);
    DENOISED_ASSIGN_OR_RETURN(Tensor tensor, ops_->Allocate(shape, dtype, purpose));
    DENOISED_RETURN_IF_ERROR(
        ToStatus(cudaMemsetAsync(tensor.data(), 0, tensor.bytes(), stream_), "clearing memory"));
    return tensor;
  }
  void Upload(const void* from, size_t bytes, const Tensor& to) override {
    if (ok()) ops_->Upload(from, bytes, to);
  }
  absl::StatusOr<Tensor> Download(const Tensor& from) override {
    DENOISED_RETURN_IF_ERROR(status());
    DENOISED_CHECK(from.contiguous());
    Tensor to = Tensor::Host(from.shape(), from.dtype());
    DENOISED_RETURN_IF_ERROR(ToStatus(
        cudaMemcpy(to.data(), from.data(), from.bytes(), cudaMemcpyDeviceToHost), "a download"));
    return to;
  }
  std::unique_ptr<denoised::Download> BeginDownload(const Tensor& from) override {
    if (!ok()) return std::make_unique<denoised::ReadyDownload>(status_);
    return ops_->BeginDownload(from);
  }
  absl::Status status() override {
    Keep(ops_->Synchronize());
    return status_;
  }
  size_t MemoryInUse() const override {
    const BackendMemory memory = ops_->memory();
    return memory.total - memory.free;
  }

  CUstream_st* Stream() override {
    Record(cudaSetDevice(number_), "cudaSetDevice");
    return stream_;
  }
  absl::StatusOr<bool> Done() override {
    const cudaError_t error = cudaStreamQuery(stream_);
    if (error == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // an answer, not a launch's error
      return false;
    }
    Record(error, "device");
    DENOISED_RETURN_IF_ERROR(status_);
    return true;
  }
  std::string uuid() const override {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, number_) != cudaSuccess) return "";
    std::string text = "GPU-";
    for (const char byte : properties.uuid.bytes)
      text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    return text;
  }

  // Weights.
  std::unique_ptr<PackedConv2d> NewConv2d(int in, int out, int kernel, bool upsample2x,
                                          const Conv2dGeometry& geometry) override {
    auto conv = std::make_unique<TrainingConv2d>();
    conv->in_channels = in;
    conv->out_channels = out;
    conv->kernel = kernel;
    conv->upsample2x = upsample2x;
    const auto prepare = [&](CudaConv2d* to, int inputs, int outputs, bool doubled) {
      to->in_channels = inputs;
      to->out_channels = outputs;
      to->kernel = kernel;
      to->upsample2x = doubled;
      const int64_t phases = doubled ? 4 : 1, taps = doubled ? 4 : kernel * kernel;
      to->weight = Take({phases * outputs, RoundUp(taps * inputs, kDepthPadding)}, dtype_);
    };
    prepare(&conv->forward, in, out, upsample2x);
    prepare(&conv->backward, out, in, false);
    conv->pad_top = geometry.pad_top;
    conv->pad_left = geometry.pad_left;
    if (PacksPhases(geometry, kernel, upsample2x)) {
      prepare(&conv->strided, out, in, /*doubled=*/true);
      conv->strided.zero_taps = ZeroTaps(geometry.pad_top == 1, geometry.pad_left == 1);
    }
    if (queue_.hopper && dtype_ == DType::kBF16 &&
        PacksPairs(in, out, geometry, kernel, upsample2x))
      prepare(&conv->paired, 2 * out, 2 * in, false);
    return conv;
  }
  std::unique_ptr<PackedLinear> NewLinear(int in, const std::vector<int>& parts) override {
    auto linear = std::make_unique<TrainingLinear>();
    linear->in_features = in;
    linear->parts = parts;
    for (const int part : parts) linear->out_features += part;
    const auto prepare = [&](CudaLinear* to, int inputs, int outputs) {
      to->in_features = inputs;
      to->out_features = outputs;
      to->weight = Take({outputs, RoundUp(inputs, kDepthPadding)}, dtype_);
    };
    prepare(&linear->forward, in, linear->out_features);
    prepare(&linear->backward, linear->out_features, in);
    return linear;
  }
  void PackConv2d(const Tensor& weight, const Tensor& bias, PackedConv2d* packed) override {
    auto& conv = static_cast<TrainingConv2d&>(*packed);
    PackBias(bias.defined(), conv.out_channels, &conv.forward.bias);
    conv.forward.has_bias = bias.defined();
    Pack({.weight = Floats(weight),
          .bias = Floats(bias),
          .outputs = conv.out_channels,
          .channels = conv.in_channels,
          .taps = conv.kernel * conv.kernel,
          .all_outputs = conv.out_channels,
          .phases = conv.upsample2x},
         conv.forward.weight, conv.forward.bias, conv.backward.weight);
    PackLaunch backward = {.weight = Floats(weight),
                           .outputs = conv.out_channels,
                           .channels = conv.in_channels,
                           .taps = conv.kernel * conv.kernel,
                           .all_outputs = conv.out_channels};
    if (conv.strided.weight) {
      backward.backward_form = BackwardForm::kPhases;
      backward.pad_top = conv.pad_top == 1, backward.pad_left = conv.pad_left == 1;
      Pack(backward, Tensor(), Tensor(), conv.strided.weight);
    }
    if (conv.paired.weight) {
      backward.backward_form = BackwardForm::kPairs;
      Pack(backward, Tensor(), Tensor(), conv.paired.weight);
    }
  }
  void PackLinear(const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                  PackedLinear* packed) override {
    auto& linear = static_cast<TrainingLinear&>(*packed);
    PackBias(!biases.empty(), linear.out_features, &linear.forward.bias);
    int first = 0;
    for (size_t i = 0; i < weights.size(); first += linear.parts[i++])
      Pack({.weight = Floats(weights[i]),
            .bias = biases.empty() ? nullptr : Floats(biases[i]),
            .outputs = linear.parts[i],
            .channels = linear.in_features,
            .first_output = first,
            .all_outputs = linear.out_features},
           linear.forward.weight, linear.forward.bias, linear.backward.weight);
  }
  void PackTogether(const std::function<void()>& packs) override {
    packs_together_ = true;
    packs();
    packs_together_ = false;
    LaunchPacks();
  }

  // Convolutions and linears.
  void Conv2d(const Conv2dArgs& args) override {
    if (!ok()) return;
    const auto& conv = static_cast<const TrainingConv2d&>(*args.weight);
    const Conv2dGeometry& g = args.geometry;
    ops_->Conv2d({.x = args.x,
                  .weight = &conv.forward,
                  .stride = g.stride,
                  .pad_top = g.pad_top,
                  .pad_left = g.pad_left,
                  .pad_bottom = g.pad_bottom,
                  .pad_right = g.pad_right,
                  .prologue = {.upsample2x = conv.upsample2x},
                  .epilogue = {.add = args.add, .residual = args.residual, .scale = args.scale},
                  .out = args.out});
  }

  void Conv2dBackward(const Conv2dBackwardArgs& args) override {
    if (!ok()) return;
    const auto& conv = static_cast<const TrainingConv2d&>(*args.weight);
    Scratch scratch(this);
    const Tensor dout = InActivationType(args.dout, &scratch);
    DENOISED_CHECK(args.dweight || !args.dbias, "a bias's gradient comes with the weights'");
    if (args.dweight) {
      const Patches patches = {.height = Extent(args.x, 1),
                               .width = Extent(args.x, 2),
                               .out_height = Extent(dout, 1),
                               .out_width = Extent(dout, 2),
                               .kernel = conv.kernel,
                               .stride = args.geometry.stride,
                               .pad_top = args.geometry.pad_top,
                               .pad_left = args.geometry.pad_left,
                               .upsample2x = conv.upsample2x};
      ParameterGradients(dout, 0, args.x, &patches, args.dweight, args.dbias);
    }
    if (args.dx) InputGradient(conv, args.geometry, dout, args.dx);
  }

  void Linear(const LinearArgs& args) override {
    if (!ok()) return;
    ops_->Linear({.x = args.x,
                  .weight = &static_cast<const TrainingLinear&>(*args.weight).forward,
                  .epilogue = {.residual = args.residual, .scale = args.scale},
                  .out = args.out});
  }

  void LinearBackward(const LinearBackwardArgs& args) override {
    if (!ok()) return;
    const auto& linear = static_cast<const TrainingLinear&>(*args.weight);
    Scratch scratch(this);
    const Tensor dout = InActivationType(args.dout, &scratch);
    int first = 0;
    for (size_t i = 0; i < linear.parts.size(); first += linear.parts[i++]) {
      const Tensor dbias = args.dbiases.empty() ? Tensor() : args.dbiases[i];
      if (!args.dweights.empty()) {
        ParameterGradients(dout, first, args.x, nullptr, args.dweights[i], dbias);
      } else if (dbias) {
        BiasGradient(dout, first, dbias);
      }
    }
    if (args.dx)
      ops_->Linear({.x = dout,
                    .weight = &linear.backward,
                    .epilogue = {.residual = args.add},
                    .out = args.dx});
  }

  // Norms and attention.
  void GroupNorm(const GroupNormArgs& args) override {
    if (!ok()) return;
    Scratch scratch(this);
    NormLaunch norm = LaunchOf(args, &scratch);
    norm.out = View(args.out);
    if (ok()) Record(LaunchNorm(norm, queue_), "GroupNorm");
  }

  void GroupNormBackward(const GroupNormBackwardArgs& args) override {
    if (!ok()) return;
    DENOISED_CHECK(!args.dx_sums || (!args.add && !args.dx_rest));
    Scratch scratch(this);
    NormBackwardLaunch norm;
    norm.forward = LaunchOf(args.forward, &scratch);
    norm.dout = View(args.dout);
    norm.add = View(args.add);
    norm.dx = View(args.dx);
    norm.dx_rest = View(args.dx_rest);
    norm.dx_channels = Extent(args.dx, -1);
    norm.dscale_shift = View(args.dscale_shift);
    const bool sums_here = SuitsNormBackwardHopper(norm, queue_);
    if (sums_here) norm.dx_sums = View(args.dx_sums);
    const int64_t rows = norm.forward.rows, channels = norm.forward.channels;
    norm.coefficients = scratch.Floats(rows * channels * 2);
    norm.parameters = scratch.Floats(rows * channels * 2);
    if (!ok()) return;
    Record(LaunchNormBackward(norm, queue_), "GroupNormBackward");
    const int64_t chunk = ChunkOf(rows);
    Record(LaunchTreeSum({.in = norm.parameters,
                          .in_stride = 2 * channels,
                          .groups = 2,
                          .in_group = channels,
                          .chunks = rows / chunk,
                          .splits = chunk,
                          .count = channels,
                          .out = Floats(args.dgamma),
                          .out_stride = Floats(args.dbeta) - Floats(args.dgamma)},
                         queue_),
           "GroupNormBackward");
    if (args.dx_sums && !sums_here) SumPixels(args.dx, args.dx_sums);
  }

  void LayerNorm(const LayerNormArgs& args) override {
    if (!ok()) return;
    LayerNormLaunch norm = LaunchOf(args);
    norm.out = View(args.out);
    Record(LaunchLayerNorm(norm, queue_), "LayerNorm");
  }

  void LayerNormBackward(const LayerNormBackwardArgs& args) override {
    if (!ok()) return;
    LayerNormBackwardLaunch norm;
    norm.forward = LaunchOf(args.forward);
    norm.dout = View(args.dout);
    norm.add = View(args.add);
    norm.dx = View(args.dx);
    const int64_t rows = args.dx.dim(0), chunk = ChunkOf(rows), channels = norm.forward.channels;
    norm.chunk_tokens = norm.forward.tokens / rows * chunk;
    const int parts = PartsOf(norm.chunk_tokens);
    Scratch scratch(this);
    if (args.dgamma) norm.parameters = scratch.Floats(rows / chunk * parts * 2 * channels);
    if (!ok()) return;
    Record(LaunchLayerNormBackward(norm, queue_), "LayerNormBackward");
    if (!args.dgamma) return;
    Record(LaunchTreeSum({.in = norm.parameters,
                          .in_stride = 2 * channels,
                          .groups = 2,
                          .in_group = channels,
                          .chunks = rows / chunk,
                          .splits = parts,
                          .count = channels,
                          .out = Floats(args.dgamma),
                          .out_stride = Floats(args.dbeta) - Floats(args.dgamma)},
                         queue_),
           "LayerNormBackward");
  }

  void Attention(const AttentionArgs& args) override {
    if (!ok()) return;
    Record(denoised::cuda::LaunchAttention(LaunchOf(args), queue_), "Attention");
  }

  void AttentionBackward(const AttentionBackwardArgs& args) override {
    if (!ok()) return;
    const AttentionLaunch forward = LaunchOf(args.forward);
    Scratch scratch(this);
    float* const delta = scratch.Floats(int64_t{forward.images} * forward.heads * forward.tokens);
    if (!ok()) return;
    Record(LaunchAttentionBackward({.forward = forward,
                                    .dout = View(args.dout),
                                    .delta = delta,
                                    .dq = View(args.dq),
                                    .dk = View(args.dk),
                                    .dv = View(args.dv)},
                                   queue_),
           "AttentionBackward");
  }

  // Pointwise, resampling, embeddings.
  void Activate(Activation activation, const Tensor& x, const Tensor& out) override {
    if (ok()) ops_->Add(x, 1, Tensor(), 0, activation, out);
  }
  void ActivateBackward(Activation activation, const Tensor& x, const Tensor& dout,
                        const Tensor& dx) override {
    if (!ok()) return;
    Record(LaunchActivateBackward(activation, Flat(x), Flat(dout), dx.elements(), Flat(dx), queue_),
           "ActivateBackward");
  }
  void Geglu(const Tensor& x, const Tensor& out) override {
    if (!ok()) return;
    Record(LaunchGeglu(View(x), LinesOf(out), Extent(out, -1), View(out), queue_), "Geglu");
  }
  void GegluBackward(const Tensor& x, const Tensor& dout, const Tensor& dx) override {
    if (!ok()) return;
    Record(
        LaunchGegluBackward(View(x), View(dout), LinesOf(dout), Extent(dout, -1), View(dx), queue_),
        "GegluBackward");
  }
  void Resample2x(Resample kind, const Tensor& x, float scale, const Tensor& out) override {
    switch (kind) {
      case Resample::kNearestUp:
        return Spread(x, scale, out);
      case Resample::kAveragePoolDown:
        return Pool(x, 0.25f * scale, out);
      case Resample::kFirUp:
      case Resample::kFirDown:
        if (ok()) ops_->Resample2x(kind, x, out);
        if (scale != 1) Add(out, scale, Tensor(), 0, 0, out);
    }
  }
  void Concat(const Tensor& a, const Tensor& b, const Tensor& out) override {
    const int64_t columns = a.dim(-1);
    CopyColumns(a, out.Columns(0, columns));
    CopyColumns(b, out.Columns(columns, b.dim(-1)));
  }
  void Add(const Tensor& a, float scale_a, const Tensor& b, float scale_b, float shift,
           const Tensor& out) override {
    if (!ok()) return;
    Record(LaunchScaledSum(Flat(a), scale_a, Flat(b), scale_b, shift, out.elements(), Flat(out),
                           queue_),
           "Add");
  }
  void SumPixels(const Tensor& x, const Tensor& out) override {
    if (!ok()) return;
    const int64_t rows = x.dim(0), channels = x.dim(-1), pixels = x.elements() / rows / channels;
    Scratch scratch(this);
    float* const partial = scratch.Floats(rows * PartsOf(pixels) * channels);
    if (!ok()) return;
    Record(LaunchColumnSums(View(x), rows, pixels, static_cast<int>(channels), partial, queue_),
           "SumPixels");
    Record(LaunchTreeSum({.in = partial,
                          .in_stride = channels,
                          .groups = rows,
                          .splits = PartsOf(pixels),
                          .count = channels,
                          .out = out.data(),
                          .out_element = ElementOf(out.dtype()),
                          .out_stride = channels},
                         queue_),
           "SumPixels");
  }
  void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) override {
    if (ok()) ops_->DivideRows(x, divisor, out);
  }
  void TimestepEmbedding(const Tensor& t, bool flip_sin_to_cos, double freq_shift,
                         const Tensor& out) override {
    if (!ok()) return;
    ops_->TimestepEmbedding(
        {.t = t, .flip_sin_to_cos = flip_sin_to_cos, .freq_shift = freq_shift, .out = out});
  }
  void FourierEmbedding(const Tensor& t, const Tensor& weight, const Tensor& out) override {
    if (ok()) ops_->FourierEmbedding({.t = t, .weight = weight, .out = out});
  }
  void Embedding(const Tensor& table, const Tensor& index, const Tensor& out) override {
    if (!ok()) return;
    constexpr int64_t kMost = 65535;  // rows per launch
    const int64_t lines = index.elements();
    const Tensor from = index.Reshape({lines}), to = out.Reshape({lines, table.dim(1)});
    for (int64_t first = 0; first < lines; first += kMost) {
      const int64_t count = std::min(kMost, lines - first);
      ops_->Embedding(
          {.table = table, .index = from.Slice(first, count), .out = to.Slice(first, count)});
    }
  }
  void EmbeddingBackward(const Tensor& index, const Tensor& dout, const Tensor& dtable) override {
    if (!ok()) return;
    const int64_t lines = index.elements(), dim = dtable.dim(1);
    Scratch scratch(this);
    EmbeddingBackwardLaunch embedding = {
        .index = index.as<int32_t>(),
        .dout = View(dout),
        .lines = lines,
        .chunk_lines = lines / index.dim(0) * ChunkOf(index.dim(0)),
        .entries = Extent(dtable, 0),
        .dim = static_cast<int>(dim),
        .sorted = static_cast<int2*>(scratch.Elements(2 * lines, DType::kI32)),
        .sums = scratch.Floats(lines * dim),
        .dtable = Floats(dtable)};
    DENOISED_CHECK(lines <= INT32_MAX);
    if (ok()) Record(LaunchEmbeddingBackward(embedding, queue_), "EmbeddingBackward");
  }
  void Dropout(const DropoutArgs& args) override {
    if (!ok()) return;
    const int64_t rows = args.x.dim(0);
    Record(LaunchDropout(Flat(args.x), rows, args.x.elements() / rows, args.probability, args.seed,
                         args.step.as<int32_t>(), SamplesOf(args.rows), args.layer, Flat(args.out),
                         queue_),
           "Dropout");
  }

  // Objective and optimizer.
  void MakeSamples(const SamplesArgs& args) override {
    if (!ok()) return;
    SamplesLaunch samples;
    if (args.posteriors) {
      samples.posteriors = Floats(args.posteriors);
    } else {
      samples.images = args.images.as<uint8_t>();
      samples.from_height = Extent(args.images, 1);
      samples.from_width = Extent(args.images, 2);
    }
    samples.rows = SamplesOf(args.rows);
    samples.count = args.x.dim(0);
    samples.height = Extent(args.x, 1);
    samples.width = Extent(args.x, 2);
    samples.channels = Extent(args.x, 3);
    samples.seed = args.seed;
    samples.step = args.step.as<int32_t>();
    samples.x = Flat(args.x);
    samples.target = Floats(args.target);
    samples.condition = Floats(args.condition);
    if (args.label) samples.label = args.label.as<int32_t>();
    samples.image = Floats(args.image);
    Record(LaunchMakeSamples(samples, queue_), "MakeSamples");
  }
  void Noise(uint64_t seed, const Tensor& step, const Tensor& rows, const Tensor& out) override {
    if (!ok()) return;
    Record(LaunchNoise(seed, step.as<int32_t>(), SamplesOf(rows), out.dim(0),
                       out.elements() / out.dim(0), Floats(out), queue_),
           "Noise");
  }
  void Loss(const LossArgs& args) override {
    if (!ok()) return;
    const int64_t rows = args.output.dim(0);
    Record(LaunchLoss(Floats(args.output), Floats(args.target), SamplesOf(args.rows), rows,
                      args.output.elements() / rows, args.scale, Floats(args.loss),
                      Floats(args.doutput), queue_),
           "Loss");
    SumLoss(args.loss, args.scale, args.sum);
  }
  void VarianceLoss(const VarianceLossArgs& args) override {
    if (!ok()) return;
    const int64_t rows = args.target.dim(0);
    Record(LaunchVarianceLoss({.output = Floats(args.output),
                               .target = Floats(args.target),
                               .image = Floats(args.image),
                               .samples = SamplesOf(args.rows),
                               .rows = rows,
                               .elements = args.target.elements() / rows,
                               .channels = Extent(args.target, -1),
                               .scale = args.scale,
                               .weight = args.weight,
                               .loss = Floats(args.loss),
                               .doutput = Floats(args.doutput)},
                              queue_),
           "VarianceLoss");
    SumLoss(args.loss, args.scale, args.sum);
  }
  void Gaussian(const GaussianArgs& args) override {
    if (!ok()) return;
    GaussianLaunch gaussian = LaunchOf(args);
    gaussian.latents = Flat(args.latents);
    gaussian.kl = Floats(args.kl);
    Record(LaunchGaussian(gaussian, queue_), "Gaussian");
  }
  void GaussianBackward(const GaussianBackwardArgs& args) override {
    if (!ok()) return;
    Record(LaunchGaussianBackward({.forward = LaunchOf(args.forward),
                                   .dlatents = Flat(args.dlatents),
                                   .scale = args.scale,
                                   .dmoments = Floats(args.dmoments)},
                                  queue_),
           "GaussianBackward");
  }
  void ReconstructionLoss(const ReconstructionLossArgs& args) override {
    if (!ok()) return;
    const int64_t rows = args.output.dim(0);
    const ReconstructionScratch needed = ReconstructionScratchOf(args.output.elements() / rows);
    Scratch scratch(this);
    ReconstructionLaunch of = {.output = Floats(args.output),
                               .target = Floats(args.target),
                               .rows = rows,
                               .height = Extent(args.output, 1),
                               .width = Extent(args.output, 2),
                               .channels = Extent(args.output, 3),
                               .edges = args.edges,
                               .add = Floats(args.add),
                               .scale = args.scale,
                               .loss = Floats(args.loss),
                               .doutput = Floats(args.doutput),
                               .halved = scratch.Doubles(rows * needed.halved),
                               .partial = scratch.Doubles(rows * needed.parts)};
    if (!ok()) return;
    Record(LaunchReconstruction(of, queue_), "ReconstructionLoss");
    SumLoss(args.loss, args.scale, args.sum);
  }
  void SquaredNorm(const Tensor& x, const Tensor& out) override {
    if (!ok()) return;
    Scratch scratch(this);
    float* const partial = scratch.Floats(SquaredNormParts(x.elements()));
    if (!ok()) return;
    Record(LaunchSquaredNorm(Floats(x), x.elements(), partial, Floats(out), queue_), "SquaredNorm");
  }
  void Accumulate(const Tensor& a, const Tensor& b) override {
    if (ok()) Record(LaunchAccumulate(Floats(a), Floats(b), a.elements(), queue_), "Accumulate");
  }
  void Update(const UpdateArgs& args) override {
    if (!ok()) return;
    UpdateLaunch update = {.master = Floats(args.master),
                           .m = Floats(args.m),
                           .v = Floats(args.v),
                           .gradient = Floats(args.gradient),
                           .count = args.master.elements(),
                           .squared_norm = Floats(args.squared_norm),
                           .scalars = reinterpret_cast<const UpdateScalars*>(Floats(args.scalars)),
                           .m_share = static_cast<float>(1 - args.beta1),
                           .v_share = static_cast<float>(1 - args.beta2),
                           .eps = args.eps,
                           .weight_decay = args.weight_decay,
                           .clip = args.clip};
    DENOISED_CHECK(args.averages.size() <= std::size(update.averages));
    for (const Tensor& average : args.averages)
      update.averages[update.average_count++] = Floats(average);
    Record(LaunchUpdate(update, queue_), "Update");
  }

 private:
  /// Temporary memory of one op. It begins where the scratch of the calling op ends.
  class Scratch {
   public:
    explicit Scratch(CudaBackend* backend) : backend_(backend), begin_(backend->scratch_used_) {}
    ~Scratch() { backend_->scratch_used_ = begin_; }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    void* Elements(int64_t count, DType dtype) {
      return backend_->TakeScratch(count * static_cast<int64_t>(SizeOf(dtype)));
    }
    float* Floats(int64_t count) { return static_cast<float*>(Elements(count, DType::kF32)); }
    double* Doubles(int64_t count) {
      return static_cast<double*>(backend_->TakeScratch(count * int64_t{sizeof(double)}));
    }
    Tensor New(const Shape& shape, DType dtype) {
      void* data = Elements(shape.elements(), dtype);
      return data == nullptr ? Tensor()
                             : Tensor(data, shape, dtype, denoised::Device::kCuda, nullptr);
    }

   private:
    CudaBackend* const backend_;
    const int64_t begin_;
  };

  /// Null after an error. Blocks are never freed, so addresses in captured graphs stay valid. A
  /// capture needs no more scratch than the run before it.
  void* TakeScratch(int64_t bytes) {
    bytes = RoundUp(std::max<int64_t>(bytes, 1), 256);
    int64_t begin = 0;
    for (const ScratchBlock& block : scratch_) {
      const int64_t at = std::max(begin, scratch_used_);
      if (at + bytes <= begin + block.bytes) {
        scratch_used_ = at + bytes;
        return static_cast<char*>(block.memory.get()) + (at - begin);
      }
      begin += block.bytes;
    }
    DENOISED_CHECK(!recording_, "scratch memory inside a recording");
    const int64_t size = RoundUp(bytes, int64_t{4} << 20);
    absl::StatusOr<DeviceMemory> memory =
        AllocateDevice(static_cast<size_t>(size), "scratch memory of an op");
    if (!memory.ok()) {
      Keep(memory.status());
      return nullptr;
    }
    scratch_.push_back({*std::move(memory), size});
    scratch_used_ = begin + bytes;
    return scratch_.back().memory.get();
  }

  bool ok() const { return status_.ok(); }
  void Keep(const absl::Status& status) {
    if (status_.ok()) status_ = status;
  }
  void Record(cudaError_t error, const char* op) {
    if (error != cudaSuccess) Keep(ToStatus(error, op));
  }
  /// Rows per chunk in an op on `rows` rows.
  int64_t ChunkOf(int64_t rows) const {
    const int64_t chunk = chunk_rows_ == 0 ? rows : chunk_rows_;
    DENOISED_CHECK(rows % chunk == 0, "{} rows in chunks of {}", rows, chunk);
    return chunk;
  }
  Tensor Take(const Shape& shape, DType dtype) {
    absl::StatusOr<Tensor> tensor = Allocate(shape, dtype, "weights for the kernels");
    if (tensor.ok()) return *std::move(tensor);
    Keep(tensor.status());
    return Tensor();
  }
  void PackBias(bool wanted, int outputs, Tensor* packed) {
    if (wanted && !*packed) *packed = Take({outputs + kBiasPadding}, DType::kF32);
  }
  void Pack(PackLaunch pack, const Tensor& forward, const Tensor& bias, const Tensor& backward) {
    if (!ok()) return;
    pack.forward = View(forward);
    pack.backward = View(backward);
    pack.packed_bias = Floats(bias);
    packs_.push_back(pack);
    if (!packs_together_) LaunchPacks();
  }
  void LaunchPacks() {
    if (ok()) Record(cuda::LaunchPacks(packs_, queue_), "packing weights");
    packs_.clear();
  }
  /// dout of the last convolution is F32; products take the activations' type.
  Tensor InActivationType(const Tensor& tensor, Scratch* scratch) {
    if (tensor.dtype() == dtype_) return tensor;
    const Tensor rounded = scratch->New(tensor.shape(), dtype_);
    if (rounded) Add(tensor, 1, Tensor(), 0, 0, rounded);
    return rounded;
  }
  /// `tensor` as tensor cores read it: channels padded with zeros to a multiple of eight.
  Tensor InVectors(const Tensor& tensor, Scratch* scratch) {
    if (dtype_ != DType::kBF16 || tensor.dim(-1) % 8 == 0) return tensor;
    const Tensor padded = scratch->New({LinesOf(tensor), RoundUp(tensor.dim(-1), 8)}, dtype_);
    if (padded) CopyColumns(tensor, padded);
    return padded;
  }

  /// Of the layer whose outputs are columns [first_output, …) of dout: dweight [outputs, channels,
  /// taps] = doutᵀ · x, or · im2col of x; and dbias unless undefined.
  void ParameterGradients(const Tensor& dout, int first_output, const Tensor& x,
                          const Patches* patches, const Tensor& dweight, const Tensor& dbias) {
    if (!ok() || ParameterGradientsHopper(dout, first_output, x, patches, dweight, dbias)) return;
    WeightGradient(dout, first_output, x, patches, dweight);
    if (dbias) BiasGradient(dout, first_output, dbias);
  }

  void WeightGradient(const Tensor& dout, int first_output, const Tensor& x, const Patches* patches,
                      const Tensor& dweight) {
    if (!ok()) return;
    const int64_t rows = dout.dim(0), chunk = ChunkOf(rows), chunks = rows / chunk;
    const int64_t lines = dout.elements() / dout.dim(-1) / rows * chunk;  // per chunk
    const int taps = patches == nullptr ? 1 : patches->kernel * patches->kernel;
    DENOISED_CHECK(dout.contiguous() && x.contiguous() && lines * chunks <= INT32_MAX);
    Scratch scratch(this);
    const Tensor a = InVectors(dout, &scratch), b = InVectors(x, &scratch);
    if (!ok()) return;
    const bool whole = dweight.dim(0) == dout.dim(-1);
    const int64_t all_outputs = a.dim(-1), outputs = whole ? all_outputs : dweight.dim(0);
    const int64_t channels = b.dim(-1), columns = taps * channels;
    const int splits = SplitsOfK(outputs, columns, lines);
    GemmLaunch gemm;
    gemm.element = ElementOf(dtype_);
    gemm.m = outputs;
    gemm.n = channels;
    gemm.k = lines;
    gemm.k_part = RoundUp((lines + splits - 1) / splits, 32);
    gemm.outer = static_cast<int>(chunks);
    gemm.inner = splits;
    gemm.a = {static_cast<char*>(a.data()) + first_output * BytesOf(gemm.element), all_outputs,
              lines * all_outputs, 0};
    gemm.b = {b.data(), channels, patches != nullptr ? lines : lines * channels, 0};
    gemm.patches = patches;
    gemm.out_stride = columns;
    gemm.out_inner = outputs * columns;
    gemm.out_outer = splits * gemm.out_inner;
    float* const partial = scratch.Floats(chunks * gemm.out_outer);
    if (!ok()) return;
    gemm.out = partial;
    Record(LaunchGemm(gemm, queue_), "the gradient of a weight");
    Record(LaunchTreeSum({.in = partial,
                          .in_stride = gemm.out_inner,
                          .chunks = chunks,
                          .splits = splits,
                          .count = dweight.dim(0) * columns,
                          .taps = taps,
                          .channels = Extent(x, -1),
                          .in_channels = static_cast<int>(channels),
                          .out = Floats(dweight)},
                         queue_),
           "the gradient of a weight");
  }

  /// By weight_gradient_sm90.cu. False if it does not support this layer or device.
  bool ParameterGradientsHopper(const Tensor& dout, int first_output, const Tensor& x,
                                const Patches* patches, const Tensor& dweight,
                                const Tensor& dbias) {
    WeightGradientLaunch gradient = {.images = dout.dim(0),
                                     .height = dout.elements() / dout.dim(-1) / dout.dim(0)};
    bool doubled = false;
    if (patches != nullptr) {
      const Patches& of = *patches;
      doubled = of.upsample2x;
      const int up = doubled ? 2 : 1;
      gradient.height = of.out_height;
      gradient.width = of.out_width;
      gradient.taps = of.kernel * of.kernel;
      gradient.x_height = up * of.height;
      gradient.x_width = up * of.width;
      gradient.stride = of.stride;
      gradient.pad_top = of.pad_top;
      gradient.pad_left = of.pad_left;
      const bool lines = of.kernel == 1 && of.stride == 1 && of.pad_top == 0 && of.pad_left == 0 &&
                         of.out_height == gradient.x_height && of.out_width == gradient.x_width;
      // Of a tensor map, each stride must be a multiple of the one before (cuTensorMapEncodeTiled),
      // and lines of a plane are `stride` lines apart.
      const bool window = of.kernel == 3 && of.stride <= 2 && gradient.x_width >= of.stride &&
                          gradient.x_height % of.stride == 0;
      if (!lines && !window) return false;
    }
    if (!queue_.hopper || first_output % 8 != 0) return false;
    DENOISED_CHECK(dout.contiguous() && x.contiguous());
    Scratch scratch(this);
    const Tensor a = InVectors(dout, &scratch), b = InVectors(x, &scratch);
    if (!ok()) return true;
    gradient.dout = View(a);
    gradient.dout.data = a.as<uint16_t>() + first_output;
    gradient.x = View(b);
    if (doubled) {
      const Tensor spread =
          scratch.New({gradient.images, gradient.height, gradient.width, b.dim(-1)}, b.dtype());
      if (!ok()) return true;
      Record(LaunchSpread(Flat(b), gradient.images, patches->height, patches->width, Extent(b, -1),
                          1, Flat(spread), queue_),
             "the gradient of a weight");
      gradient.x = View(spread);
    }
    gradient.outputs = Extent(dweight, 0);
    gradient.channels = Extent(x, -1);
    gradient.chunks = gradient.images / ChunkOf(gradient.images);
    gradient.out = Floats(dweight);
    gradient.bias = Floats(dbias);
    gradient.partial = scratch.Floats(WeightGradientPartials(gradient));
    if (ok()) Record(LaunchWeightGradient(gradient, queue_), "the gradient of a weight");
    return true;
  }

  /// The sum of columns [first_output, …) of dout.
  void BiasGradient(const Tensor& dout, int first_output, const Tensor& dbias) {
    if (!ok()) return;
    const int64_t rows = dout.dim(0), chunk = ChunkOf(rows), outputs = dbias.elements();
    const int64_t lines = LinesOf(dout) / rows * chunk;
    Scratch scratch(this);
    float* const partial = scratch.Floats(rows / chunk * PartsOf(lines) * outputs);
    if (!ok()) return;
    Record(LaunchColumnSums(View(dout.Columns(first_output, outputs)), rows / chunk, lines,
                            static_cast<int>(outputs), partial, queue_),
           "the gradient of a bias");
    Record(LaunchTreeSum({.in = partial,
                          .in_stride = outputs,
                          .chunks = rows / chunk,
                          .splits = PartsOf(lines),
                          .count = outputs,
                          .out = Floats(dbias)},
                         queue_),
           "the gradient of a bias");
  }

  /// dx = dout convolved with the rotated weights. With stride 2, each pixel of dout has four of
  /// dx, which read different taps: four phases, if dx has exactly twice the edges. Otherwise zeros
  /// are first inserted between the pixels of dout (a transposed convolution). If the input is
  /// doubled, the gradients of each four pixels are added.
  void InputGradient(const TrainingConv2d& conv, const Conv2dGeometry& g, Tensor dout,
                     const Tensor& dx) {
    if (!ok()) return;
    const int edge = (conv.kernel - 1) / 2, up = conv.upsample2x ? 2 : 1;
    const int64_t height = up * dx.dim(1), width = up * dx.dim(2);
    DENOISED_CHECK(conv.kernel % 2 == 1 && g.pad_top <= edge && g.pad_left <= edge &&
                       g.pad_bottom <= edge && g.pad_right <= edge,
                   "the gradient of a convolution with kernel {} and padding {}", conv.kernel,
                   g.pad_top);
    if (conv.strided.weight && g.stride == 2 && g.pad_top == conv.pad_top &&
        g.pad_left == conv.pad_left && height == 2 * dout.dim(1) && width == 2 * dout.dim(2)) {
      ops_->Conv2d({.x = dout,
                    .weight = &conv.strided,
                    .pad_top = edge,
                    .pad_left = edge,
                    .pad_bottom = edge,
                    .pad_right = edge,
                    .prologue = {.upsample2x = true},
                    .out = dx});
      return;
    }
    if (conv.paired.weight && dout.dim(1) == height && dout.dim(2) == width &&
        width >= kLeastPairedWidth && width % 2 == 0 && dout.contiguous() && dx.contiguous()) {
      const auto in_pairs = [](const Tensor& of) {
        return of.Reshape({of.dim(0), of.dim(1), of.dim(2) / 2, 2 * of.dim(3)});
      };
      ops_->Conv2d({.x = in_pairs(dout),
                    .weight = &conv.paired,
                    .pad_top = 1,
                    .pad_left = 1,
                    .pad_bottom = 1,
                    .pad_right = 1,
                    .out = in_pairs(dx)});
      return;
    }
    Scratch scratch(this);
    if (dout.dim(1) != height || dout.dim(2) != width) {
      const Tensor spread = scratch.New({dout.dim(0), height, width, dout.dim(3)}, dout.dtype());
      if (!spread) return;
      Record(LaunchDilate({.x = Flat(dout),
                           .images = dout.dim(0),
                           .in_height = Extent(dout, 1),
                           .in_width = Extent(dout, 2),
                           .height = static_cast<int>(height),
                           .width = static_cast<int>(width),
                           .channels = Extent(dout, 3),
                           .stride = g.stride,
                           .offset_top = edge - g.pad_top,
                           .offset_left = edge - g.pad_left,
                           .out = Flat(spread)},
                          queue_),
             "Conv2dBackward");
      dout = spread;
    }
    Tensor to = dx;
    if (conv.upsample2x) to = scratch.New({dx.dim(0), height, width, dx.dim(3)}, dtype_);
    if (!to) return;
    ops_->Conv2d({.x = dout,
                  .weight = &conv.backward,
                  .pad_top = edge,
                  .pad_left = edge,
                  .pad_bottom = edge,
                  .pad_right = edge,
                  .out = to});
    if (conv.upsample2x) Pool(to, 1, dx);
  }

  NormLaunch LaunchOf(const GroupNormArgs& args, Scratch* scratch) {
    NormLaunch norm;
    norm.x = View(args.x);
    norm.rows = args.x.dim(0);
    norm.channels = Extent(args.x, -1);
    norm.pixels = args.x.elements() / norm.rows / norm.channels;
    DENOISED_CHECK(norm.rows <= 65535 && norm.channels % args.groups == 0, "{} rows, {} groups",
                   norm.rows, args.groups);
    norm.groups = args.groups;
    norm.gamma = Floats(args.gamma);
    norm.beta = Floats(args.beta);
    norm.eps = args.eps;
    norm.scale_shift = View(args.scale_shift);
    norm.activation = args.activation;
    norm.statistics = Floats(args.statistics);
    norm.partial = scratch->Floats(norm.rows * PartsOf(norm.pixels) * norm.channels * 2);
    return norm;
  }

  AttentionLaunch LaunchOf(const AttentionArgs& args) const {
    AttentionLaunch attention;
    attention.q = View(args.q);
    attention.k = View(args.k);
    attention.v = View(args.v);
    attention.images = attention.key_sets = Extent(args.q, 0);
    attention.tokens = Extent(args.q, 1);
    attention.key_tokens = Extent(args.k, 1);
    attention.heads = args.heads;
    attention.dim = Extent(args.q, 2) / args.heads;
    attention.scale = args.scale;
    attention.causal = args.causal;
    attention.fp32 = dtype_ == DType::kF32;
    attention.out = View(args.out);
    attention.log_sum_exp = Floats(args.log_sum_exp);
    DENOISED_CHECK(attention.dim <= kMaxHeadDim, "a head dimension of {}", attention.dim);
    DENOISED_CHECK(!args.causal || attention.tokens == attention.key_tokens,
                   "{} causal queries of {} keys", attention.tokens, attention.key_tokens);
    return attention;
  }
  static LayerNormLaunch LaunchOf(const LayerNormArgs& args) {
    return {.x = View(args.x),
            .tokens = LinesOf(args.x),
            .channels = Extent(args.x, -1),
            .gamma = Floats(args.gamma),
            .beta = Floats(args.beta),
            .eps = args.eps,
            .statistics = Floats(args.statistics)};
  }
  static GaussianLaunch LaunchOf(const GaussianArgs& args) {
    const int64_t rows = args.noise.dim(0);
    return {.moments = Floats(args.moments),
            .noise = Floats(args.noise),
            .rows = rows,
            .elements = args.noise.elements() / rows,
            .channels = Extent(args.noise, -1),
            .weight = args.weight};
  }
  /// sum = scale · Σ loss; chunks are added as for gradients.
  void SumLoss(const Tensor& loss, float scale, const Tensor& sum) {
    if (!sum || !ok()) return;
    const int64_t rows = loss.dim(0), chunk = ChunkOf(rows);
    Record(LaunchTreeSum({.in = Floats(loss),
                          .in_stride = 1,
                          .chunks = rows / chunk,
                          .splits = chunk,
                          .count = 1,
                          .scale = scale,
                          .out = Floats(sum)},
                         queue_),
           "Loss");
  }

  void Pool(const Tensor& large, float scale, const Tensor& small) {
    if (!ok()) return;
    Record(LaunchPool(Flat(large), small.dim(0), Extent(small, 1), Extent(small, 2),
                      Extent(small, 3), scale, Flat(small), queue_),
           "pooling");
  }
  void Spread(const Tensor& small, float scale, const Tensor& large) {
    if (!ok()) return;
    Record(LaunchSpread(Flat(small), small.dim(0), Extent(small, 1), Extent(small, 2),
                        Extent(small, 3), scale, Flat(large), queue_),
           "doubling");
  }
  /// Further columns of `to` become zeros.
  void CopyColumns(const Tensor& from, const Tensor& to) {
    if (!ok()) return;
    Record(LaunchCopyColumns(View(from), Extent(from, -1), LinesOf(from), View(to), Extent(to, -1),
                             queue_),
           "copying columns");
  }

  struct ScratchBlock {
    DeviceMemory memory;
    int64_t bytes;
  };

  const std::unique_ptr<denoised::Backend> ops_;
  const DType dtype_;
  const int number_;  // of the device
  const Queue queue_;
  const cudaStream_t stream_;
  absl::Status status_;  // the first error of a kernel of launch.h
  int64_t chunk_rows_ = 0;
  bool recording_ = false;
  bool packs_together_ = false;
  std::vector<PackLaunch> packs_;  // not launched yet
  std::vector<ScratchBlock> scratch_;
  int64_t scratch_used_ = 0;  // bytes, counted through all blocks
};

}  // namespace
}  // namespace cuda

absl::Status CheckCuda(const CudaOptions& options) {
  return denoised::cuda::Context::Open(options.number).status();
}

absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(const CudaOptions& options) {
  DENOISED_ASSIGN_OR_RETURN(std::unique_ptr<denoised::Backend> ops,
                            denoised::OpenCudaBackend({.number = options.number,
                                                       .fp32 = options.fp32,
                                                       .autotune = !options.fp32,
                                                       .autotune_cache = options.autotune_cache}));
  const DType dtype = ops->activation_dtype();
  return std::make_unique<cuda::CudaBackend>(std::move(ops), dtype, options.number);
}

}  // namespace denoised::training
