// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/cuda_backend.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <map>
#include <optional>

#include "engine/backend/check.h"
#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/device.h"
#include "engine/backend/cuda/group_norm.h"
#include "engine/backend/cuda/launch.h"
#include "engine/backend/cuda/transfer.h"
#include "engine/backend/cuda/tuner.h"
#include "engine/backend/cuda/weights.h"
#include "engine/backend/decompose.h"

/// backend.h on CUDA: validates the arguments, turns tensors into pointers and sizes, and enqueues
/// the kernels of launch.h on one stream.

namespace denoised {
namespace cuda {
namespace {

static_assert(kMaxHeadDim >= denoised::kMaxHeadDim);
static_assert(kMaxNormChannels >= denoised::kMaxNormChannels);

/// Partial moments of group norms, for 256 images of 32 groups at a time.
constexpr size_t kNormWorkspaceBytes = size_t{8} << 20;

/// Identifies this build of the kernels: measurements are kept for one build.
constexpr const char* kKernels = DENOISED_KERNELS;

Element ElementOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return Element::kBf16;
    case DType::kF16:
      return Element::kF16;
    default:
      return Element::kF32;
  }
}

bool Aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0; }

Rows View(const Tensor& tensor) {
  if (!tensor) return {};
  const size_t stride_bytes = tensor.row_stride() * SizeOf(tensor.dtype());
  return {tensor.data(), tensor.row_stride(), ElementOf(tensor.dtype()),
          Aligned(tensor) && stride_bytes % 16 == 0};
}

int Extent(const Tensor& tensor, int dimension) { return static_cast<int>(tensor.dim(dimension)); }

float* Floats(const Tensor& tensor) { return tensor ? tensor.as<float>() : nullptr; }
OutputFactors* Factors(const Tensor& tensor) {
  return reinterpret_cast<OutputFactors*>(Floats(tensor));
}

/// `images`: those of an evaluation; they must be aligned like the slots'.
SlotsLaunch View(const SlotState& state, const Tensor& images = Tensor()) {
  SlotsLaunch slots;
  slots.x = Floats(state.x);
  slots.registers = Floats(state.registers);
  slots.x0 = Floats(state.x0);
  slots.plans = static_cast<const DeviceEvaluation*>(state.plans.data());
  slots.plan_bytes = state.plans.dim(1);
  slots.max_evaluations = static_cast<int>(slots.plan_bytes / sizeof(DeviceEvaluation));
  slots.evaluation = state.evaluation.as<int32_t>();
  slots.nonfinite = state.nonfinite.as<int32_t>();
  slots.seed = state.seed.as<int64_t>();
  slots.guidance = reinterpret_cast<const Guidance*>(state.guidance.data());
  if (state.embedding) {
    slots.embedding = Floats(state.embedding);
    slots.embedding_dim = Extent(state.embedding, 1);
  }
  slots.known = Floats(state.known);
  slots.mask = Floats(state.mask);
  if (state.extra) {
    slots.extra = Floats(state.extra);
    slots.extra_channels = Extent(state.extra, 3);
  }
  slots.elements = state.x.elements() / state.x.dim(0);
  slots.channels = Extent(state.x, 3);
  slots.vector = slots.elements % 4 == 0 && Aligned(state.x) && Aligned(state.registers) &&
                 Aligned(state.x0) && (!state.known || Aligned(state.known)) && Aligned(images);
  return slots;
}

/// What makes the input of a layer in e4m3: enqueued before the layer, from these operands.
struct Input {
  std::function<cudaError_t()> enqueue;  // empty: the layer reads its input as it is
  std::vector<Operand> operands;

  cudaError_t Enqueue() const { return enqueue ? enqueue() : cudaSuccess; }
};

template <typename Packed>
bool IsE4m3(const Packed& weight) {
  return weight.e4m3.input_scale != 0;
}

constexpr int kMostObserved = 1 << 14;  // layers; SDXL's UNet has 800

class CudaMarker final : public Marker {
 public:
  CudaMarker(std::shared_ptr<Context> context, Event event)
      : context_(std::move(context)), event_(std::move(event)) {}

  bool reached() override {
    context_->Use();
    return !context_->status().ok() || context_->Reached(event_.get(), "marker");
  }
  absl::Status Wait() override {
    context_->Use();
    if (event_) context_->Record(cudaEventSynchronize(event_.get()), "marker");
    return context_->status();
  }
  double SecondsSince(const Marker& earlier) override {
    context_->Use();
    const auto& from = static_cast<const CudaMarker&>(earlier);
    float milliseconds = 0;
    if (event_ && from.event_) {
      context_->Record(cudaEventElapsedTime(&milliseconds, from.event_.get(), event_.get()),
                       "marker");
    }
    return milliseconds * 1e-3;
  }

 private:
  const std::shared_ptr<Context> context_;
  const Event event_;  // null if it could not be created; the context has the reason
};

struct CudaGraph final : Graph {
  GraphExec exec;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(std::shared_ptr<Context> context, std::unique_ptr<UploadRing> uploads,
              DeviceMemory norm_memory, DeviceMemory largest_inputs,
              const cudaDeviceProp& properties, int driver, const BackendOptions& options,
              bool hopper)
      : context_(std::move(context)),
        uploads_(std::move(uploads)),
        downloads_(context_),
        norm_memory_(std::move(norm_memory)),
        ranges_(options.input_ranges),
        largest_inputs_(std::move(largest_inputs)),
        queue_{context_->compute(), properties.multiProcessorCount, hopper, properties.major >= 9},
        fp32_(options.fp32),
        multiplies_e4m3_(!options.fp32 && HasE4m3Kernels()),
        name_(fmt::format("cuda:{}", context_->device())),
        description_(fmt::format("{}, {} SMs, {:.1f} GiB, driver for CUDA {}.{}{}", properties.name,
                                 properties.multiProcessorCount,
                                 static_cast<double>(properties.totalGlobalMem) / (1 << 30),
                                 driver / 1000, driver % 1000 / 10,
                                 fp32_                     ? ", fp32"
                                 : options.generic_kernels ? ", generic kernels"
                                                           : "")) {
    if (options.autotune) {
      std::optional<TuningFile> file;
      if (!options.autotune_cache.empty()) {
        std::string name = properties.name;
        std::replace_if(
            name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '-');
        file.emplace(options.autotune_cache + "/" + name + ".json", description_, kKernels);
      }
      tuner_.emplace(queue_, std::move(file), options.notify);
    }
  }

  ~CudaBackend() override {
    static_cast<void>(Synchronize());  // before memory goes
    ReportInputs();
  }

  std::string_view name() const override { return name_; }
  std::string description() const override { return description_; }
  Device device() const override { return Device::kCuda; }
  Capabilities capabilities() const override {
    return {.runs_ahead = true,
            .overlaps_streams = true,
            .gains_from_batches = true,
            .pads_rows = true,
            .may_hang = true,
            .default_rows = 64};
  }
  DType activation_dtype() const override { return fp32_ ? DType::kF32 : DType::kBF16; }
  bool MultipliesE4m3() const override { return multiplies_e4m3_; }

  absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype,
                                  std::string_view purpose) override {
    context_->Use();
    DENOISED_RETURN_IF_ERROR(context_->status());
    DENOISED_ASSIGN_OR_RETURN(DeviceMemory memory,
                              AllocateDevice(shape.elements() * SizeOf(dtype), purpose));
    void* data = memory.get();
    return Tensor(data, shape, dtype, Device::kCuda,
                  std::shared_ptr<const void>(std::shared_ptr<void>(std::move(memory))));
  }

  BackendMemory memory() const override {
    context_->Use();
    BackendMemory memory;
    context_->Record(cudaMemGetInfo(&memory.free, &memory.total), "cudaMemGetInfo");
    return memory;
  }

  void Upload(const void* from, size_t bytes, const Tensor& to) override {
    CheckUpload(bytes, to, rules());
    BeginTransfer("Upload");
    uploads_->Upload(from, bytes, to.data());
  }

  std::unique_ptr<Download> BeginDownload(const Tensor& from) override {
    CheckDownload(from, rules());
    BeginTransfer("BeginDownload");
    return downloads_.Begin(from);
  }

  absl::StatusOr<std::shared_ptr<const void>> ReserveDownloads(size_t bytes, int count) override {
    BeginTransfer("ReserveDownloads");
    return downloads_.Reserve(bytes, count);
  }

  void Copy(const Tensor& from, const Tensor& to) override {
    CheckCopy(from, to, rules());
    context_->Use();
    if (to.contiguous()) {
      context_->Record(cudaMemcpyAsync(to.data(), from.data(), from.bytes(),
                                       cudaMemcpyDeviceToDevice, queue_.stream),
                       "Copy");
      return;
    }
    const size_t element_bytes = SizeOf(from.dtype()), row_bytes = from.dim(-1) * element_bytes;
    context_->Record(
        cudaMemcpy2DAsync(to.data(), to.row_stride() * element_bytes, from.data(), row_bytes,
                          row_bytes, RowCount(from), cudaMemcpyDeviceToDevice, queue_.stream),
        "Copy");
  }

  absl::StatusOr<std::unique_ptr<PackedConv2d>> PackConv2d(const Tensor& weight_oihw,
                                                           const Tensor& bias, bool upsample2x,
                                                           const E4m3Layer& e4m3) override {
    DENOISED_RETURN_IF_ERROR(CheckConv2dWeight(weight_oihw, bias));
    auto packed = std::make_unique<CudaConv2d>();
    packed->out_channels = Extent(weight_oihw, 0);
    packed->in_channels = Extent(weight_oihw, 1);
    packed->kernel = Extent(weight_oihw, 2);
    packed->upsample2x = upsample2x;
    packed->has_bias = bias.defined();
    packed->e4m3 = e4m3;
    const bool in_phases = upsample2x && packed->kernel == 3;
    if (e4m3.input_scale != 0) {
      packed->rounded_bytes = RoundedBytes(packed->in_channels);
      DENOISED_RETURN_IF_ERROR(
          PackE4m3Weights({weight_oihw}, in_phases, "a convolution", packed.get()));
    } else {
      DENOISED_ASSIGN_OR_RETURN(packed->weight,
                                PackWeights({weight_oihw}, in_phases, "a convolution"));
    }
    DENOISED_ASSIGN_OR_RETURN(packed->bias, ToDevice(PackBias({bias}), "a convolution's bias"));
    return packed;
  }

  absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(const std::vector<Tensor>& weights_oi,
                                                           const std::vector<Tensor>& biases,
                                                           const E4m3Layer& e4m3,
                                                           bool gated) override {
    DENOISED_RETURN_IF_ERROR(CheckLinearWeights(weights_oi, biases, gated));
    auto packed = std::make_unique<CudaLinear>();
    for (const Tensor& weight : weights_oi) packed->out_features += Extent(weight, 0);
    packed->in_features = Extent(weights_oi.front(), 1);
    packed->gated = gated;
    packed->e4m3 = e4m3;
    if (e4m3.input_scale != 0) {
      packed->rounded_bytes = RoundedBytes(packed->in_features);
      DENOISED_RETURN_IF_ERROR(
          PackE4m3Weights(weights_oi, /*in_phases=*/false, "a linear layer", packed.get(), gated));
    } else {
      DENOISED_ASSIGN_OR_RETURN(
          packed->weight, PackWeights(weights_oi, /*in_phases=*/false, "a linear layer", gated));
    }
    DENOISED_ASSIGN_OR_RETURN(
        packed->bias,
        ToDevice(gated && !biases.empty() ? PackGatedBias(biases.front()) : PackBias(biases),
                 "a linear layer's bias"));
    return packed;
  }

  absl::StatusOr<Tensor> PackVector(const Tensor& values) override {
    DENOISED_RETURN_IF_ERROR(CheckFloats(values));
    return ToDevice(Tensor::HostF32(values.shape(), values.ToFloats()), "a parameter");
  }

  void Conv2d(const Conv2dArgs& args) override {
    Check(args, rules());
    context_->Use();
    const bool e4m3 = IsE4m3(*args.weight), norms = IsToBeApplied(args.prologue.norm);
    const PackedConv2d* const shortcut = args.epilogue.shortcut.weight;
    const bool observes = Observes(args.weight->e4m3);
    if (shortcut != nullptr && observes) return Conv2d(WithoutShortcut(*this, args));
    if (observes) {
      if (norms) return Conv2d(WithoutNorm(*this, args));
      ObserveInputs(args.weight->e4m3, {args.x, args.prologue.x2});
    }
    if (e4m3) {
      const Conv2dLaunch conv = OfRoundedInput(args);
      if (shortcut != nullptr && !HasHopperKernel(conv))
        return Conv2d(WithoutShortcut(*this, args));
      return EnqueueConvolution(conv, "Conv2d", InputOf(args));
    }
    Conv2dLaunch conv = LaunchOf(norms ? OfNormedInput(args) : args);
    if (!HasHopperKernel(conv) && shortcut != nullptr) return Conv2d(WithoutShortcut(*this, args));
    const GroupNormLaunch before = norms ? LaunchOf(InputNormOf(args)) : GroupNormLaunch();
    if (norms && !CanFuse(before, conv)) return Conv2d(WithoutNorm(*this, args));
    if (Norm* norm = args.epilogue.norm; norm != nullptr && AddOutputNorm(*norm, &conv))
      norm->applied = true;
    if (norms) {
      EnqueueNormed(before, conv);
    } else {
      EnqueueConvolution(conv, "Conv2d");
    }
  }

  void Linear(const LinearArgs& args) override {
    Check(args, rules());
    context_->Use();
    const bool e4m3 = IsE4m3(*args.weight), observes = Observes(args.weight->e4m3);
    if ((!e4m3 || observes) && IsToBeApplied(args.prologue.norm))
      return Linear(WithoutNorm(*this, args));
    if (observes) ObserveInputs(args.weight->e4m3, {args.x});
    const auto launch_of = [&](const LinearArgs& of) {
      return e4m3 ? OfRoundedInput(of) : LaunchOf(of);
    };
    const Input input = e4m3 ? InputOf(args) : Input();
    if (!args.epilogue.ungated) return EnqueueConvolution(launch_of(args), "Linear", input);
    const E4m3Reader& reader = args.epilogue.reader;
    const Conv2dLaunch plain = launch_of(WithoutGate(args));
    Conv2dLaunch gated = plain;
    gated.gated = true;
    gated.out = View(args.out);
    if (!HasHopperKernel(plain) || !SuitsGate(gated)) {
      LinearThenGate(*this, args);
      return RoundFor(reader, args.out);
    }
    Writes(args.out);
    if (e4m3 && MayRoundFor(reader, args.out)) {
      gated.rounded_out = RowsOf(reader);
      return EnqueueGated(gated, plain, input);
    }
    EnqueueGated(gated, plain, input);
    RoundFor(reader, args.out);
  }

  void Gate(const Tensor& values_and_gates, const Tensor& out) override {
    CheckGate(values_and_gates, out, rules());
    Writes(out);
    context_->Use();
    context_->Record(
        LaunchGegluGate(View(values_and_gates), RowCount(out), Extent(out, -1), View(out), queue_),
        "Gate");
  }

  void GroupNorm(const GroupNormArgs& args) override {
    Check(args, rules());
    context_->Use();
    context_->Record(LaunchNorm(LaunchOf(args)), "GroupNorm");
  }

  void LayerNorm(const LayerNormArgs& args) override {
    Check(args, rules());
    Writes(args.out);
    context_->Use();
    context_->Record(LaunchLayerNorm(View(args.x), Floats(args.gamma), Floats(args.beta), args.eps,
                                     RowCount(args.x), Extent(args.x, -1), View(args.out), queue_),
                     "LayerNorm");
  }

  void Attention(const AttentionArgs& args) override {
    Check(args, rules());
    AttentionLaunch attention;
    attention.q = View(args.q);
    attention.k = View(args.k);
    attention.v = View(args.v);
    attention.images = Extent(args.q, 0);
    attention.tokens = Extent(args.q, 1);
    attention.key_tokens = Extent(args.k, 1);
    attention.heads = args.heads;
    attention.dim = Extent(args.q, 2) / args.heads;
    DENOISED_CHECK(attention.dim <= kMaxHeadDim, "head dimension {}", attention.dim);
    attention.scale = args.scale;
    attention.key_sets = Extent(args.k, 0);
    if (args.key_set) attention.key_set = args.key_set.as<int32_t>();
    if (args.key_counts) attention.key_counts = args.key_counts.as<int32_t>();
    attention.causal = args.causal;
    attention.fp32 = fp32_;
    attention.out = View(args.out);
    Writes(args.out);
    context_->Use();
    const bool rounds =
        MayRoundFor(args.reader, args.out) && queue_.hopper && SuitsHopper(attention);
    if (rounds) attention.out = RowsOf(args.reader);
    context_->Record(LaunchAttention(attention, queue_), "Attention");
    if (!rounds) RoundFor(args.reader, args.out);
  }

  void NearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out) override {
    CheckNearestCode(x, codebook, out, rules());
    Writes(out);
    context_->Use();
    context_->Record(LaunchNearestCode(Floats(x), Floats(codebook), Extent(codebook, 0),
                                       RowCount(x), Extent(x, -1), View(out), queue_),
                     "NearestCode");
  }

  void Gaussian(const GaussianArgs& args) override {
    Check(args, rules());
    GaussianLaunch gaussian;
    gaussian.moments = Floats(args.moments);
    gaussian.noise = Floats(args.noise);
    gaussian.scale = Floats(args.scale);
    gaussian.shift = Floats(args.shift);
    gaussian.pixels = RowCount(args.out);
    gaussian.channels = Extent(args.out, -1);
    gaussian.out = Floats(args.out);
    context_->Use();
    context_->Record(LaunchGaussian(gaussian, queue_), "Gaussian");
  }

  void TimestepEmbedding(const TimestepEmbeddingArgs& args) override {
    Check(args, rules());
    TimestepEmbeddingLaunch embedding;
    embedding.t = Floats(args.t);
    embedding.rows = Extent(args.out, 0);
    embedding.dim = Extent(args.out, 1);
    embedding.flip_sin_to_cos = args.flip_sin_to_cos;
    embedding.freq_shift = args.freq_shift;
    embedding.scale = args.scale;
    embedding.max_period = args.max_period;
    embedding.out = View(args.out);
    context_->Use();
    context_->Record(LaunchTimestepEmbedding(embedding, queue_), "TimestepEmbedding");
  }

  void FourierEmbedding(const FourierEmbeddingArgs& args) override {
    Check(args, rules());
    FourierEmbeddingLaunch embedding;
    embedding.t = Floats(args.t);
    embedding.weight = Floats(args.weight);
    embedding.rows = Extent(args.out, 0);
    embedding.dim = Extent(args.out, 1);
    embedding.log = args.log;
    embedding.flip_sin_to_cos = args.flip_sin_to_cos;
    embedding.out = View(args.out);
    context_->Use();
    context_->Record(LaunchFourierEmbedding(embedding, queue_), "FourierEmbedding");
  }

  void Embedding(const EmbeddingArgs& args) override {
    Check(args, rules());
    context_->Use();
    const bool number = args.index.dtype() == DType::kF32;
    context_->Record(LaunchEmbedding(View(args.table), Extent(args.table, 0), Extent(args.table, 1),
                                     number ? nullptr : args.index.as<int32_t>(),
                                     number ? Floats(args.index) : nullptr, Extent(args.index, 0),
                                     View(args.out), queue_),
                     "Embedding");
  }

  void Resample2x(Resample kind, const Tensor& x, const Tensor& out) override {
    CheckResample2x(kind, x, out, rules());
    Writes(out);
    context_->Use();
    const int images = Extent(x, 0), height = Extent(x, 1), width = Extent(x, 2),
              channels = Extent(x, 3);
    const auto launch = [&] {
      switch (kind) {
        case Resample::kNearestUp:
          return LaunchUpsample2x(View(x), images, Extent(out, 1), Extent(out, 2), channels,
                                  View(out), queue_);
        case Resample::kAveragePoolDown:
          return LaunchAveragePool2x(View(x), images, height, width, channels, View(out), queue_);
        case Resample::kFirUp:
        case Resample::kFirDown:
          return LaunchFir2x(View(x), images, height, width, channels, kind == Resample::kFirUp,
                             View(out), queue_);
      }
      return cudaErrorInvalidValue;
    };
    context_->Record(launch(), "Resample2x");
  }

  void Add(const Tensor& a, float scale, const Tensor& b, float shift, Activation activation,
           const Tensor& out) override {
    CheckAdd(a, b, out, rules());
    Writes(out);
    context_->Use();
    context_->Record(LaunchAdd(View(a), scale, View(b), shift, activation, RowCount(out),
                               Extent(out, -1), View(out), queue_),
                     "Add");
  }

  void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) override {
    CheckDivideRows(x, divisor, out, rules());
    context_->Use();
    context_->Record(LaunchDivideRows(View(x), Floats(divisor), Extent(x, 0),
                                      x.elements() / x.dim(0), View(out), queue_),
                     "DivideRows");
  }

  void BeginSlot(const BeginSlotArgs& args) override {
    Check(args, rules());
    context_->Use();
    context_->Record(LaunchBeginSlot(View(args.state), args.slot, Floats(args.source),
                                     Floats(args.noise), args.source_scale, args.noise_scale,
                                     args.churn_scale, args.shift, args.keeps_known, queue_),
                     "BeginSlot");
  }

  void Gather(const GatherArgs& args) override {
    Check(args, rules());
    Rows x = View(args.x);
    x.stride = args.x.elements() / args.x.dim(0);  // an image is a row
    Writes(args.x);
    context_->Use();
    context_->Record(
        LaunchGather(View(args.state, args.x), args.rows.as<int32_t>(), Extent(args.rows, 0), x,
                     Floats(args.condition), args.label ? args.label.as<int32_t>() : nullptr,
                     Floats(args.embedding), queue_),
        "Gather");
  }

  void MeasureOutputs(const MeasureOutputsArgs& args) override {
    Check(args, rules());
    context_->Use();
    context_->Record(
        LaunchMeasureOutputs(View(args.state), args.rows.as<int32_t>(), Extent(args.rows, 0),
                             Floats(args.model_output), Extent(args.model_output, 3),
                             Factors(args.factors), queue_),
        "MeasureOutputs");
  }

  void Advance(const AdvanceArgs& args) override {
    Check(args, rules());
    context_->Use();
    context_->Record(LaunchAdvance(View(args.state, args.model_output), args.rows.as<int32_t>(),
                                   Extent(args.rows, 0), Floats(args.model_output),
                                   Extent(args.model_output, 3), Factors(args.factors), queue_),
                     "Advance");
  }

  absl::StatusOr<std::unique_ptr<Graph>> Capture(const std::function<void()>& body) override {
    BeginTransfer("Capture");
    DENOISED_RETURN_IF_ERROR(context_->status());
    DENOISED_ASSIGN_OR_RETURN(RecordedGraph recorded, Record(body));
    if (tuner_ && tuner_->has_unknown()) {
      DENOISED_RETURN_IF_ERROR(tuner_->Measure());
      DENOISED_ASSIGN_OR_RETURN(recorded, Record(body));
    }
    auto graph = std::make_unique<CudaGraph>();
    DENOISED_ASSIGN_OR_RETURN(graph->exec, Instantiate(recorded.get()));
    DENOISED_RETURN_IF_ERROR(
        ToStatus(cudaGraphUpload(graph->exec.get(), queue_.stream), "uploading a CUDA graph"));
    return graph;
  }

  void Launch(Graph& graph) override {
    BeginTransfer("Launch");
    ForgetWarmUp();
    context_->Record(cudaGraphLaunch(static_cast<CudaGraph&>(graph).exec.get(), queue_.stream),
                     "Launch");
  }

  std::unique_ptr<Marker> Mark() override {
    BeginTransfer("Mark");
    absl::StatusOr<Event> event = NewEvent(/*timing=*/true);
    if (!event.ok()) {
      context_->Record(event.status());
      return std::make_unique<CudaMarker>(context_, nullptr);
    }
    context_->Record(cudaEventRecord(event->get(), queue_.stream), "Mark");
    return std::make_unique<CudaMarker>(context_, *std::move(event));
  }

  absl::Status Synchronize() override {
    context_->Use();
    context_->Record(cudaStreamSynchronize(context_->compute()), "device");
    context_->Record(cudaStreamSynchronize(context_->downloads()), "device");
    return context_->status();
  }

  absl::Status status() const override { return context_->status(); }
  const Queue& queue() const { return queue_; }

 private:
  TensorRules rules() const { return {Device::kCuda, activation_dtype()}; }

  absl::StatusOr<RecordedGraph> Record(const std::function<void()>& body) {
    capturing_ = true;
    written_.clear();
    absl::StatusOr<RecordedGraph> recorded = RecordGraph(queue_.stream, body);
    capturing_ = false;
    context_->Record(recorded.status());  // an earlier error of an op, which says more, is kept
    DENOISED_RETURN_IF_ERROR(context_->status());
    return recorded;
  }

  bool Observes(const E4m3Layer& layer) const { return ranges_ != nullptr && !layer.name.empty(); }

  void ObserveInputs(const E4m3Layer& layer, std::initializer_list<Tensor> inputs) {
    ForgetWarmUp();
    const int place =
        places_.try_emplace(layer.name, static_cast<int>(places_.size())).first->second;
    DENOISED_CHECK(place < kMostObserved, "{} layers", place);
    for (const Tensor& x : inputs) {
      if (!x) continue;
      DENOISED_CHECK(!IsRounded(x), "the range of an input in e4m3");
      context_->Record(
          LaunchLargest(View(x), Extent(x, -1), RowCount(x), LargestInputs() + place, queue_),
          "the range of an input");
    }
  }
  /// InputRanges count from Start() on.
  void ForgetWarmUp() {
    if (ranges_ == nullptr || counts_inputs_ || capturing_ || !ranges_->started()) return;
    counts_inputs_ = true;
    context_->Record(
        cudaMemsetAsync(LargestInputs(), 0, kMostObserved * sizeof(uint32_t), queue_.stream),
        "the ranges of inputs");
  }
  void ReportInputs() {
    if (!counts_inputs_) return;
    std::vector<uint32_t> largest(places_.size());
    context_->Record(cudaMemcpy(largest.data(), LargestInputs(), largest.size() * sizeof(uint32_t),
                                cudaMemcpyDeviceToHost),
                     "the ranges of inputs");
    if (!context_->status().ok()) return ranges_->Fail(context_->status());
    for (const auto& [layer, place] : places_)
      ranges_->Add(layer, std::bit_cast<float>(largest[place]));
  }
  uint32_t* LargestInputs() const { return static_cast<uint32_t*>(largest_inputs_.get()); }

  /// Enqueues the candidate that was measured to be the fastest, else the first. Outside a graph
  /// nothing is measured, because a caller waits for the result.
  void EnqueueFastest(const std::string& what, const Candidates& candidates,
                      std::vector<Operand> operands, const char* op) {
    DENOISED_CHECK(!candidates.empty(), "{}: nothing computes {}", op, what);
    const Candidate& candidate = tuner_ && capturing_
                                     ? tuner_->Choose(what, candidates, std::move(operands))
                                     : candidates.front();
    context_->Record(candidate.enqueue(), op);
  }

  /// `out` is written by the graph that is being captured, so measuring may overwrite it.
  void Writes(const Tensor& out) {
    if (!capturing_ || !tuner_) return;
    const auto* begin = static_cast<const std::byte*>(out.data());
    written_.emplace_back(begin, begin +
                                     (RowCount(out) - 1) * out.row_stride() * SizeOf(out.dtype()) +
                                     out.dim(-1) * SizeOf(out.dtype()));
  }
  void AddOperand(std::vector<Operand>* operands, const Rows& values, int64_t rows,
                  int columns) const {
    if (values.data == nullptr || rows == 0) return;
    const int64_t element_bytes = values.element == Element::kF32 ? 4 : 2;
    const auto* begin = static_cast<const std::byte*>(values.data);
    const auto* end = begin + ((rows - 1) * values.stride + columns) * element_bytes;
    const bool may_overwrite = std::any_of(
        written_.begin(), written_.end(),
        [&](const auto& written) { return written.first <= begin && end <= written.second; });
    if (may_overwrite) operands->push_back({values, rows, columns});
  }
  /// The operands of a convolution that measuring may overwrite. `input`: what makes conv.x.
  std::vector<Operand> OperandsOf(const Conv2dLaunch& conv, const Input& input = {}) const {
    if (!capturing_ || !tuner_) return {};
    const int64_t out_pixels = int64_t{conv.images} * conv.out_height * conv.out_width;
    std::vector<Operand> operands = input.enqueue ? input.operands : InputsOf(conv);
    AddOperand(&operands, conv.shortcut.x, out_pixels, conv.shortcut.channels);
    AddOperand(&operands, conv.shortcut.x2, out_pixels, conv.shortcut.channels2);
    AddOperand(&operands, conv.add, conv.images, conv.outputs);
    AddOperand(&operands, conv.residual, out_pixels, conv.outputs);
    return operands;
  }

  std::vector<Operand> InputsOf(const Conv2dLaunch& conv) const {
    std::vector<Operand> operands;
    const int64_t pixels = int64_t{conv.images} * conv.height * conv.width;
    AddOperand(&operands, conv.x, pixels, conv.channels);
    AddOperand(&operands, conv.x2, pixels, conv.channels2);
    return operands;
  }

  /// For ops that cannot be captured: they use host memory or events that change with each call.
  void BeginTransfer(const char* op) {
    DENOISED_CHECK(!capturing_, "{} inside Capture", op);
    context_->Use();
  }

  /// Number of rows of the last dimension.
  static int RowCount(const Tensor& tensor) {
    const int64_t rows = tensor.dim(-1) > 0 ? tensor.elements() / tensor.dim(-1) : 0;
    DENOISED_CHECK(rows <= INT32_MAX, "{} rows", rows);
    return static_cast<int>(rows);
  }

  Conv2dLaunch LaunchOf(const Conv2dArgs& args) {
    const auto& weight = static_cast<const CudaConv2d&>(*args.weight);
    const Tensor& x2 = args.prologue.x2;
    Conv2dLaunch conv;
    conv.x = View(args.x);
    conv.x2 = View(x2);
    conv.channels = Extent(args.x, 3);
    conv.channels2 = x2 ? Extent(x2, 3) : 0;
    conv.images = Extent(args.x, 0);
    conv.height = Extent(args.x, 1);
    conv.width = Extent(args.x, 2);
    conv.out_height = Extent(args.out, 1);
    conv.out_width = Extent(args.out, 2);
    conv.kernel = weight.kernel;
    conv.stride = args.stride;
    conv.pad_top = args.pad_top;
    conv.pad_left = args.pad_left;
    conv.upsample2x = args.prologue.upsample2x;
    conv.zero_taps = weight.zero_taps;
    conv.outputs = weight.out_channels;
    conv.add = View(args.epilogue.add);
    if (const Conv2dShortcut& shortcut = args.epilogue.shortcut; shortcut.weight != nullptr) {
      const Tensor& matrix = static_cast<const CudaConv2d&>(*shortcut.weight).weight;
      conv.shortcut.x = View(shortcut.x);
      conv.shortcut.x2 = View(shortcut.x2);
      conv.shortcut.channels = Extent(shortcut.x, 3);
      conv.shortcut.channels2 = shortcut.x2 ? Extent(shortcut.x2, 3) : 0;
      conv.shortcut.weight = matrix.data();
      conv.shortcut.weight_stride = Extent(matrix, 1);
    }
    AddLayer(&conv, weight, args.epilogue, args.out);
    return conv;
  }

  /// A 1×1 convolution over images of as many pixels as a row has tokens.
  Conv2dLaunch LaunchOf(const LinearArgs& args) {
    const auto& weight = static_cast<const CudaLinear&>(*args.weight);
    Conv2dLaunch conv;
    conv.x = View(args.x);
    conv.channels = weight.in_features;
    const RowShape shape = denoised::RowsOf(args.x.shape());
    DENOISED_CHECK(shape.rows * shape.tokens <= INT32_MAX, "{} rows of {} tokens", shape.rows,
                   shape.tokens);
    conv.images = static_cast<int>(shape.rows);
    conv.height = conv.out_height = 1;
    conv.width = conv.out_width = static_cast<int>(shape.tokens);
    conv.outputs = weight.out_features;
    AddLayer(&conv, weight, args.epilogue, args.out);
    return conv;
  }

  /// Shared by convolutions and linears.
  template <typename Packed>
  void AddLayer(Conv2dLaunch* conv, const Packed& weight, const Epilogue& epilogue,
                const Tensor& out) {
    const bool e4m3 = IsE4m3(weight);
    conv->weight = weight.weight.data();
    conv->weight_stride = Extent(weight.weight, 1) / (e4m3 ? 2 : 1);  // in pairs
    conv->weight_element = e4m3 ? Element::kE4m3x2 : fp32_ ? Element::kF32 : Element::kBf16;
    conv->scales = Floats(weight.scales);
    conv->bias = Floats(weight.bias);
    conv->residual = View(epilogue.residual);
    conv->scale = epilogue.scale;
    conv->activation = epilogue.activation;
    conv->out = View(out);
    Writes(out);
    const int64_t images = conv->images;
    DENOISED_CHECK(images * conv->height * conv->width <= INT32_MAX &&
                       images * conv->out_height * conv->out_width <= INT32_MAX - 128,
                   "{} images of {}×{} to {}×{}", images, conv->height, conv->width,
                   conv->out_height, conv->out_width);
  }

  static Rows RoundedView(const Tensor& rounded, float scale) {
    DENOISED_CHECK(Aligned(rounded), "an input in e4m3 at {}", rounded.data());
    return {rounded.data(), rounded.dim(-1) / 2, Element::kE4m3x2, true, scale};
  }
  /// A layer's input in e4m3, or the memory for it.
  template <typename Args>
  static Rows RoundedOf(const Args& args) {
    return RoundedView(IsRounded(args.x) ? args.x : args.prologue.rounded,
                       args.weight->e4m3.input_scale);
  }
  /// Whether kernels that write e4m3 may write what the reader needs: they write no padding.
  static bool MayRoundFor(const E4m3Reader& reader, const Tensor& out) {
    return reader.rounded && reader.rounded.dim(-1) == out.dim(-1);
  }
  Rows RowsOf(const E4m3Reader& reader) {
    Writes(reader.rounded);
    return RoundedView(reader.rounded, reader.scale);
  }
  /// Rounds an op's result for its reader, if there is one and the op's kernel did not.
  void RoundFor(const E4m3Reader& reader, const Tensor& out) {
    if (!reader.rounded) return;
    context_->Record(
        LaunchRoundToE4m3(View(out), Extent(out, -1), {}, 0, RowCount(out), RowsOf(reader), queue_),
        "rounding for a reader");
  }
  /// A norm before the layer rounds its own result; other inputs are rounded by a kernel of their
  /// own, unless the op before left them in e4m3.
  template <typename Args>
  Input InputOf(const Args& args) {
    if (IsRounded(args.x)) return {};
    const Rows rounded = RoundedOf(args);
    const Conv2dLaunch conv = LaunchOf(args);
    const int64_t pixels = int64_t{conv.images} * conv.height * conv.width;
    Input input;
    input.operands = InputsOf(conv);
    if (!IsToBeApplied(args.prologue.norm)) {
      input.enqueue = [=, this] {
        return LaunchRoundToE4m3(conv.x, conv.channels, conv.x2, conv.channels2, pixels, rounded,
                                 queue_);
      };
      return input;
    }
    if (IsLayerNorm(args.prologue.norm)) {
      const Norm& norm = args.prologue.norm;
      const float *gamma = Floats(norm.gamma), *beta = Floats(norm.beta);
      const float eps = norm.eps;
      const Rows normed = View(args.prologue.normed);
      Writes(args.prologue.normed);
      input.enqueue = [=, this] {
        const bool rounds = LayerNormRounds(conv.x, conv.channels);
        const cudaError_t error = LaunchLayerNorm(conv.x, gamma, beta, eps, pixels, conv.channels,
                                                  rounds ? rounded : normed, queue_);
        return rounds || error != cudaSuccess
                   ? error
                   : LaunchRoundToE4m3(normed, conv.channels, {}, 0, pixels, rounded, queue_);
      };
      return input;
    }
    const GroupNormLaunch norm = LaunchOf(InputNormOf(args));
    AddOperand(&input.operands, norm.scale_shift, norm.images,
               2 * (norm.channels + norm.channels2));
    input.enqueue = [=, this] { return LaunchNormE4m3(norm, rounded, NormFactors(), queue_); };
    return input;
  }
  /// The launch that reads it.
  template <typename Args>
  Conv2dLaunch OfRoundedInput(const Args& args) {
    Conv2dLaunch conv = LaunchOf(args);
    conv.x = RoundedOf(args);
    conv.x2 = {};
    conv.channels = static_cast<int>(conv.x.stride);
    conv.channels2 = 0;
    return conv;
  }

  /// Whether a kernel for Hopper supports the layer.
  bool HasHopperKernel(const ConvLayer& conv) const {
    return queue_.hopper && !SuitsRowLinear(conv) && !SuitsFewInputs(conv) &&
           !SuitsFewOutputs(conv) && SuitsHopper(conv);
  }

  GroupNormLaunch LaunchOf(const GroupNormArgs& args) {
    GroupNormLaunch norm;
    norm.x = View(args.x);
    norm.x2 = View(args.x2);
    norm.channels = Extent(args.x, -1);
    norm.channels2 = args.x2 ? Extent(args.x2, -1) : 0;
    DENOISED_CHECK(norm.channels + norm.channels2 <= kMaxNormChannels, "{} + {} channels",
                   norm.channels, norm.channels2);
    const RowShape shape = denoised::RowsOf(args.x.shape());
    norm.images = static_cast<int>(shape.rows);
    norm.pixels = static_cast<int>(shape.tokens);
    norm.gamma = Floats(args.norm.gamma);
    norm.beta = Floats(args.norm.beta);
    norm.groups = args.norm.groups;
    norm.eps = args.norm.eps;
    norm.scale_shift = View(args.norm.scale_shift);
    norm.activation = args.norm.activation;
    norm.out = View(args.out);
    Writes(args.out);
    norm.workspace = norm_memory_.get();
    norm.workspace_bytes = kNormWorkspaceBytes;
    norm.semaphores = Semaphores();
    norm.flags = Semaphores() + kSemaphores;
    return norm;
  }

  /// Whether `conv` can fuse the norm of its input.
  bool CanFuse(const GroupNormLaunch& norm, const Conv2dLaunch& conv) const {
    return HasHopperKernel(conv) && HasNormFactors(norm, queue_) &&
           norm.images <= NormImagesAtOnce(norm) && norm.activation == Activation::kSilu &&
           SuitsHaloTile(conv) &&
           // Steps along k over x and x2 must be the steps over the normalised tensor.
           (norm.channels2 == 0 || norm.channels % kStep == 0);
  }

  cudaError_t LaunchNorm(const GroupNormLaunch& norm) const {
    return cuda::LaunchNorm(norm, NormFactors(), queue_);
  }

  /// Norms and convolutions share the workspace: they never run at the same time.
  Conv2dLaunch WithWorkspace(Conv2dLaunch conv) const {
    conv.workspace = norm_memory_.get();
    conv.workspace_bytes = kNormWorkspaceBytes;
    conv.semaphores = Semaphores();
    return conv;
  }
  float* NormFactors() const {
    return reinterpret_cast<float*>(static_cast<std::byte*>(norm_memory_.get()) +
                                    kNormWorkspaceBytes);
  }
  int* Semaphores() const {
    return reinterpret_cast<int*>(static_cast<std::byte*>(norm_memory_.get()) +
                                  kNormWorkspaceBytes + kNormFactorBytes);
  }

  /// Makes SiLU of the norm of its result a part of `conv`, if the bits are those of the norm's own
  /// kernel and the fastest tile supports it.
  bool AddOutputNorm(const Norm& norm, Conv2dLaunch* conv) const {
    if (norm.activation != Activation::kSilu || norm.scale_shift || !HasHopperKernel(*conv) ||
        conv->shortcut.x.data != nullptr) {
      return false;
    }
    GroupNormLaunch alone;
    alone.x = alone.out = conv->out;
    alone.channels = conv->outputs;
    alone.images = conv->images;
    alone.pixels = conv->out_height * conv->out_width;
    alone.groups = norm.groups;
    alone.activation = norm.activation;
    Conv2dLaunch fused = *conv;
    fused.output_norm = {Floats(norm.gamma), Floats(norm.beta), norm.groups, norm.eps};
    if (!SuitsOutputNorm(fused) || !SuitsGroupNormCluster(alone, queue_) ||
        !SpecOf(HopperCandidates(*conv, queue_).front().plan.tile).FusesOutputNorm()) {
      return false;
    }
    *conv = fused;
    return true;
  }

  /// Candidates: tiles that normalise their input in shared memory, and the norm's kernel followed
  /// by any tile. Of equals, the former come first.
  void EnqueueNormed(const GroupNormLaunch& norm, const Conv2dLaunch& conv) {
    GroupNormLaunch factors = norm;
    factors.factors = NormFactors();
    Conv2dLaunch fused = conv;
    fused.x = norm.x;
    fused.x2 = norm.x2;
    fused.channels = norm.channels;
    fused.channels2 = norm.channels2;
    fused.input_factors = factors.factors;
    Candidates candidates;
    for (const HopperCandidate& candidate : HopperCandidates(fused, queue_)) {
      candidates.push_back(
          {"fused norm, " + NameOf(candidate.plan), candidate.microseconds, [=, this] {
             const cudaError_t error = LaunchNormFactors(factors, queue_);
             return error == cudaSuccess ? LaunchConv2dHopper(fused, candidate.plan, queue_)
                                         : error;
           }});
    }
    for (const HopperCandidate& candidate : HopperCandidates(conv, queue_)) {
      candidates.push_back({NameOf(candidate.plan), candidate.microseconds, [=, this] {
                              const cudaError_t error = LaunchNorm(norm);
                              return error == cudaSuccess
                                         ? LaunchConv2dHopper(conv, candidate.plan, queue_)
                                         : error;
                            }});
    }
    std::vector<Operand> operands = OperandsOf(fused);
    AddOperand(&operands, norm.scale_shift, norm.images, 2 * (norm.channels + norm.channels2));
    EnqueueFastest(
        fmt::format("{} groups{} of {}", norm.groups,
                    norm.scale_shift.data != nullptr ? ", scaled," : "", Describe(fused)),
        CheapestFirst(std::move(candidates)), std::move(operands), "Conv2d");
  }

  /// Launches a convolution on Hopper after its input.
  cudaError_t LaunchHopper(const Input& input, const Conv2dLaunch& conv,
                           const HopperPlan& plan) const {
    const cudaError_t error = input.Enqueue();
    return error == cudaSuccess ? LaunchConv2dHopper(conv, plan, queue_) : error;
  }

  /// The tuner's key. A launch that rounds its input first is measured with that.
  static std::string KeyOf(const Conv2dLaunch& conv, const Input& input) {
    const bool is_rounded = conv.x.element == Element::kE4m3x2 && !input.enqueue;
    return Describe(conv) + (is_rounded ? ", rounded input" : "");
  }

  /// Candidates: tiles that have a gate in their epilogue, and any tile followed by the gate's
  /// kernel, and by the one that rounds, if the layer has a rounded_out.
  void EnqueueGated(const Conv2dLaunch& gated, const Conv2dLaunch& plain, const Input& input) {
    const int features = gated.outputs / 2;
    const int rows = gated.images * gated.width;
    Candidates candidates;
    for (const HopperCandidate& candidate : HopperCandidates(gated, queue_)) {
      candidates.push_back({"gated, " + NameOf(candidate.plan), candidate.microseconds,
                            [=, this] { return LaunchHopper(input, gated, candidate.plan); }});
    }
    // The gate's pass reads two features and writes one, of two bytes; rounding reads that and
    // writes one byte.
    constexpr double kPassLaunch = 2.5, kPassBytesPerMicrosecond = 3.6e6;
    const bool rounds = gated.rounded_out.data != nullptr;
    const double pass = (rounds ? 2 : 1) * kPassLaunch + (rounds ? 9.0 : 6.0) *
                                                             static_cast<double>(rows) * features /
                                                             kPassBytesPerMicrosecond;
    for (const HopperCandidate& candidate : HopperCandidates(plain, queue_)) {
      candidates.push_back({NameOf(candidate.plan), candidate.microseconds + pass, [=, this] {
                              cudaError_t error = LaunchHopper(input, plain, candidate.plan);
                              if (error == cudaSuccess)
                                error =
                                    LaunchGegluGate(plain.out, rows, features, gated.out, queue_);
                              return error != cudaSuccess || !rounds
                                         ? error
                                         : LaunchRoundToE4m3(gated.out, features, {}, 0, rows,
                                                             gated.rounded_out, queue_);
                            }});
    }
    EnqueueFastest(KeyOf(gated, input), CheapestFirst(std::move(candidates)),
                   OperandsOf(plain, input), "Linear");
  }

  void EnqueueConvolution(const Conv2dLaunch& conv, const char* op, const Input& input = {}) {
    if (HasHopperKernel(conv)) {
      Candidates candidates;
      for (const HopperCandidate& candidate : HopperCandidates(conv, queue_)) {
        candidates.push_back({NameOf(candidate.plan), candidate.microseconds,
                              [=, this] { return LaunchHopper(input, conv, candidate.plan); }});
      }
      EnqueueFastest(KeyOf(conv, input), candidates, OperandsOf(conv, input), op);
    } else if (SuitsRowLinear(conv)) {
      context_->Record(LaunchRowLinear(conv, queue_), op);
    } else if (SuitsFewInputs(conv)) {
      context_->Record(LaunchConv2dFewInputs(conv, queue_), op);
    } else if (SuitsFewOutputs(conv)) {
      context_->Record(LaunchConv2dFewOutputs(conv, queue_), op);
    } else if (fp32_) {
      context_->Record(LaunchConv2dFp32(conv, queue_), op);
    } else {
      const Conv2dLaunch launch = WithWorkspace(conv);
      Candidates candidates;
      for (const ConvCandidate& candidate : SuitsConv3x3(launch)
                                                ? Conv3x3Candidates(launch, queue_)
                                                : Conv2dCandidates(launch, queue_)) {
        candidates.push_back({candidate.name, candidate.microseconds, [=, this] {
                                const cudaError_t error = input.Enqueue();
                                return error == cudaSuccess ? candidate.launch(launch, queue_)
                                                            : error;
                              }});
      }
      EnqueueFastest(KeyOf(conv, input), candidates, OperandsOf(conv, input), op);
    }
  }

  /// Packs weights [outputs, channels, kernel, kernel] or [outputs, inputs], in the layout of the
  /// file, one below the other into the layout of weights.h. `in_phases`: one 3×3 convolution.
  absl::StatusOr<Tensor> PackWeights(const std::vector<Tensor>& weights, bool in_phases,
                                     std::string_view purpose, bool gated = false) {
    const Shape& shape = weights.front().shape();
    const int channels = static_cast<int>(shape[1]);
    const int taps = shape.rank() == 4 ? static_cast<int>(shape[2] * shape[3]) : 1;
    const int64_t outputs = OutputsOf(weights);
    DENOISED_ASSIGN_OR_RETURN(
        const Tensor packed,
        Allocate({in_phases ? 4 * outputs : outputs,
                  RoundUp(int64_t{in_phases ? 4 : taps} * channels, kDepthPadding)},
                 activation_dtype(), purpose));
    context_->Record(cudaMemsetAsync(packed.data(), 0, packed.bytes(), queue_.stream), purpose);
    UploadWeights(weights, gated, [&](PackWeightLaunch pack, int64_t first_output) {
      pack.phase_outputs = in_phases ? outputs : 0;
      pack.to = View(packed.Slice(first_output, packed.dim(0) - first_output));
      return LaunchPackWeight(pack, queue_);
    });
    DENOISED_RETURN_IF_ERROR(context_->status());
    return packed;
  }

  /// The same in e4m3, with the scales of its outputs.
  template <typename Packed>
  absl::Status PackE4m3Weights(const std::vector<Tensor>& weights, bool in_phases,
                               std::string_view purpose, Packed* packed, bool gated = false) {
    DENOISED_CHECK(MultipliesE4m3(), "what MultipliesE4m3() denies");
    const Shape& shape = weights.front().shape();
    const int64_t taps = in_phases ? 4 : shape.rank() == 4 ? shape[2] * shape[3] : 1;
    const int64_t outputs = OutputsOf(weights),
                  row_bytes = RoundUp(taps * packed->rounded_bytes, 2 * kDepthPadding);
    const float input_scale = packed->e4m3.input_scale;
    DENOISED_ASSIGN_OR_RETURN(
        packed->weight,
        Allocate({in_phases ? 4 * outputs : outputs, row_bytes}, DType::kU8, purpose));
    DENOISED_ASSIGN_OR_RETURN(packed->scales,
                              Allocate({outputs + kBiasPadding}, DType::kF32, purpose));
    for (const Tensor& zeroed : {packed->weight, packed->scales})
      context_->Record(cudaMemsetAsync(zeroed.data(), 0, zeroed.bytes(), queue_.stream), purpose);
    const auto upload = [&](const auto& launch) {
      UploadWeights(weights, gated, [&](PackWeightLaunch pack, int64_t first_output) {
        pack.phase_outputs = in_phases ? outputs : 0;
        pack.to = {static_cast<std::byte*>(packed->weight.data()) + first_output * row_bytes,
                   row_bytes / 2, Element::kE4m3x2, true};
        pack.scales = Floats(packed->scales) + first_output;
        pack.input_scale = input_scale;
        return launch(pack, queue_);
      });
    };
    upload(LaunchLargestWeights);
    context_->Record(
        LaunchE4m3Scales(Floats(packed->scales), static_cast<int>(outputs), input_scale, queue_),
        purpose);
    upload(LaunchPackWeight);
    return context_->status();
  }

  static int64_t OutputsOf(const std::vector<Tensor>& weights) {
    int64_t outputs = 0;
    for (const Tensor& weight : weights) outputs += weight.dim(0);
    return outputs;
  }
  /// Uploads weights in pieces and calls launch(pack, first_output) for each: the piece, without
  /// what is to be done with it, and the first output of its weight.
  template <typename Launch>
  void UploadWeights(const std::vector<Tensor>& weights, bool gated, const Launch& launch) {
    int64_t first_output = 0;
    for (const Tensor& weight : weights) {
      const Shape& shape = weight.shape();
      const int taps = shape.rank() == 4 ? static_cast<int>(shape[2] * shape[3]) : 1;
      const size_t pair_bytes = taps * SizeOf(weight.dtype());
      uploads_->UploadThrough(weight.data(), weight.bytes(), pair_bytes,
                              [&](const void* piece, size_t offset, size_t bytes) {
                                PackWeightLaunch pack;
                                pack.from = piece;
                                pack.from_element = ElementOf(weight.dtype());
                                pack.first_pair = static_cast<int64_t>(offset / pair_bytes);
                                pack.pairs = static_cast<int64_t>(bytes / pair_bytes);
                                pack.channels = static_cast<int>(shape[1]);
                                pack.taps = taps;
                                pack.gated_outputs = gated ? weight.dim(0) : 0;
                                return launch(pack, first_output);
                              });
      first_output += weight.dim(0);
    }
  }

  /// Copies a host tensor to its own device memory; undefined stays undefined.
  absl::StatusOr<Tensor> ToDevice(const Tensor& host, std::string_view purpose) {
    if (!host) return Tensor();
    DENOISED_ASSIGN_OR_RETURN(Tensor on_device, Allocate(host.shape(), host.dtype(), purpose));
    Upload(host.data(), host.bytes(), on_device);
    DENOISED_RETURN_IF_ERROR(context_->status());
    return on_device;
  }

  const std::shared_ptr<Context> context_;
  const std::unique_ptr<UploadRing> uploads_;
  DownloadPool downloads_;
  /// kNormWorkspaceBytes, kNormFactorBytes, kSemaphores, and kFlagBytes.
  const DeviceMemory norm_memory_;
  const std::shared_ptr<InputRanges> ranges_;  // null: inputs are not observed
  const DeviceMemory largest_inputs_;          // uint32_t [kMostObserved], by place
  std::map<std::string, int> places_;          // of layers
  bool counts_inputs_ = false;
  const Queue queue_;
  const bool fp32_, multiplies_e4m3_;
  const std::string name_, description_;
  std::optional<Tuner> tuner_;
  bool capturing_ = false;
  /// Memory that ops of the current capture write: [begin, end).
  std::vector<std::pair<const std::byte*, const std::byte*>> written_;
};

/// Loads every kernel, because loading one during a capture would fail it.
absl::Status LoadKernels(const cudaDeviceProp& properties, bool hopper) {
  for (cudaError_t error : {hopper ? LoadConv2dHopperKernels() : cudaSuccess,
                            LoadRoundToE4m3Kernels(),
                            LoadLargestKernel(),
                            hopper ? LoadGroupNormStreamKernels() : cudaSuccess,
                            hopper ? LoadGroupNormPiecesKernels() : cudaSuccess,
                            hopper ? LoadAttentionHopperKernels() : cudaSuccess,
                            LoadConv2dKernels(),
                            LoadConv3x3Kernels(),
                            LoadConv2dFp32Kernels(),
                            LoadRowLinearKernels(),
                            LoadConv2dNarrowKernels(),
                            LoadGroupNormKernels(),
                            LoadGroupNormClusterKernels(/*clusters=*/hopper),
                            LoadAttentionKernels(),
                            LoadAttentionFp32Kernels(),
                            LoadEmbeddingKernels(),
                            LoadElementwiseKernels(),
                            LoadLayerNormKernels(hopper),
                            LoadNearestCodeKernels(),
                            LoadSamplingKernels(),
                            LoadPackWeightKernels()}) {
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
        error == cudaErrorUnsupportedPtxVersion) {
      return FailedPrecondition(
          "this build has no kernels for the {} (compute capability {}.{}): {}; it must be 8.0 or "
          "later; configure with -DDENOISED_CUDA_ARCHITECTURES={}{} and build again, or choose the "
          "device \"cpu\"",
          properties.name, properties.major, properties.minor, cudaGetErrorString(error),
          properties.major, properties.minor);
    }
    DENOISED_RETURN_IF_ERROR(ToStatus(error, "loading kernels"));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace cuda

absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(const BackendOptions& options) {
  const int device = options.number;
  DENOISED_ASSIGN_OR_RETURN(std::shared_ptr<cuda::Context> context, cuda::Context::Open(device));
  cudaDeviceProp properties;
  DENOISED_RETURN_IF_ERROR(
      cuda::ToStatus(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties"));
  int driver = 0;
  DENOISED_RETURN_IF_ERROR(cuda::ToStatus(cudaDriverGetVersion(&driver), "cudaDriverGetVersion"));
#ifdef DENOISED_SM90A
  const bool hopper =
      properties.major == 9 && properties.minor == 0 && !options.fp32 && !options.generic_kernels;
#else
  const bool hopper = false;
#endif
  DENOISED_RETURN_IF_ERROR(cuda::LoadKernels(properties, hopper));
  DENOISED_ASSIGN_OR_RETURN(std::unique_ptr<cuda::UploadRing> uploads,
                            cuda::UploadRing::Open(context));
  constexpr size_t kNormBytes = cuda::kNormWorkspaceBytes + cuda::kNormFactorBytes;
  constexpr size_t kZeroBytes = cuda::kSemaphores * sizeof(int) + cuda::kFlagBytes;
  DENOISED_ASSIGN_OR_RETURN(
      cuda::DeviceMemory norm_memory,
      cuda::AllocateDevice(kNormBytes + kZeroBytes, "the memory of group norms"));
  DENOISED_RETURN_IF_ERROR(
      cuda::ToStatus(cudaMemsetAsync(static_cast<std::byte*>(norm_memory.get()) + kNormBytes, 0,
                                     kZeroBytes, context->compute()),
                     "clearing the memory of group norms"));
  cuda::DeviceMemory largest_inputs;
  if (options.input_ranges != nullptr) {
    DENOISED_ASSIGN_OR_RETURN(
        largest_inputs,
        cuda::AllocateDevice(cuda::kMostObserved * sizeof(uint32_t), "the ranges of inputs"));
  }
  return std::make_unique<cuda::CudaBackend>(std::move(context), std::move(uploads),
                                             std::move(norm_memory), std::move(largest_inputs),
                                             properties, driver, options, hopper);
}

const cuda::Queue* QueueOf(Backend& cuda_backend) {
  return &static_cast<cuda::CudaBackend&>(cuda_backend).queue();
}

int CudaDeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  static_cast<void>(cudaGetLastError());
  return 0;
}

}  // namespace denoised
