// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <type_traits>

#include "engine/backend/check.h"
#include "engine/backend/cpu/host.h"
#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/backend/cpu/row_parts.h"
#include "engine/backend/decompose.h"
#include "engine/core/mutex.h"

namespace denoised {
namespace {

using Clock = std::chrono::steady_clock;

/// Ops have run when they return, so a marker is reached from the start.
class CpuMarker final : public Marker {
 public:
  explicit CpuMarker(absl::Status status) : status_(std::move(status)) {}
  bool reached() override { return true; }
  absl::Status Wait() override { return status_; }
  double SecondsSince(const Marker& earlier) override {
    return std::chrono::duration<double>(time_ - static_cast<const CpuMarker&>(earlier).time_)
        .count();
  }

 private:
  Clock::time_point time_ = Clock::now();
  absl::Status status_;
};

/// A recording would save nothing on a CPU: the graph keeps the function and calls it.
struct CpuGraph final : Graph {
  std::function<void()> body;
};

std::vector<float> Concatenated(const std::vector<Tensor>& tensors) {
  std::vector<float> values;
  for (const Tensor& tensor : tensors) {
    const std::vector<float> part = tensor.ToFloats();
    values.insert(values.end(), part.begin(), part.end());
  }
  return values;
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const BackendOptions& options)
      : name_(options.number == 0 ? "cpu" : fmt::format("cpu:{}", options.number)),
        dtype_(options.cpu_dtype),
        ranges_(options.input_ranges) {}

  std::string_view name() const override { return name_; }
  std::string description() const override {
    return fmt::format("{}, {} threads, {:.1f} GiB, {}{}", cpu::ReadModelName(), workers(),
                       static_cast<double>(memory().total) / (1 << 30), cpu::DescribeOneDnn(),
                       dtype_ == DType::kBF16 ? ", bf16 products" : "");
  }
  Device device() const override { return Device::kCpu; }
  DType activation_dtype() const override { return DType::kF32; }
  DType product_dtype() const override { return dtype_; }
  bool MultipliesE4m3() const override { return true; }
  BackendMemory memory() const override { return cpu::ReadMemory(); }

  absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype,
                                  std::string_view purpose) override {
    constexpr std::align_val_t kAlignment{64};
    const size_t bytes = std::max<size_t>(1, shape.elements() * SizeOf(dtype));
    const size_t free = memory().free;
    void* data = bytes <= free ? ::operator new(bytes, kAlignment, std::nothrow) : nullptr;
    if (data == nullptr) {
      return ResourceExhausted(
          "{} needs {} bytes of host memory, {} are free; choose a smaller model or batch, or "
          "raise "
          "the memory limit",
          purpose, bytes, free);
    }
    return Tensor(data, shape, dtype, Device::kCpu,
                  std::shared_ptr<const void>(data, [](const void* p) {
                    ::operator delete(const_cast<void*>(p), kAlignment);
                  }));
  }

  void Upload(const void* from, size_t bytes, const Tensor& to) override {
    CheckUpload(bytes, to, kRules);
    Enqueue([&] { std::memcpy(to.data(), from, bytes); });
  }

  std::unique_ptr<Download> BeginDownload(const Tensor& from) override {
    CheckDownload(from, kRules);
    Tensor copy;
    Enqueue([&] {
      copy = Tensor::Host(from.shape(), from.dtype());
      std::memcpy(copy.data(), from.data(), from.bytes());
    });
    if (failed_) return std::make_unique<ReadyDownload>(status());
    return std::make_unique<ReadyDownload>(std::move(copy));
  }

  void Copy(const Tensor& from, const Tensor& to) override {
    CheckCopy(from, to, kRules);
    Enqueue([&] { cpu::Copy(from, to); });
  }

  absl::StatusOr<std::unique_ptr<PackedConv2d>> PackConv2d(const Tensor& weight_oihw,
                                                           const Tensor& bias, bool upsample2x,
                                                           const E4m3Layer& e4m3) override {
    DENOISED_RETURN_IF_ERROR(CheckConv2dWeight(weight_oihw, bias));
    return Pack([&] {
      auto packed = std::make_unique<cpu::CpuConv2d>();
      packed->out_channels = static_cast<int>(weight_oihw.dim(0));
      packed->in_channels = static_cast<int>(weight_oihw.dim(1));
      packed->kernel = static_cast<int>(weight_oihw.dim(2));
      packed->upsample2x = upsample2x;
      packed->has_bias = bias.defined();
      packed->e4m3 = e4m3;
      std::vector<float> weight = weight_oihw.ToFloats();
      int outputs = packed->out_channels;
      if (e4m3.input_scale != 0 && upsample2x) {
        weight = cpu::PhasesInE4m3(weight, outputs, packed->in_channels, e4m3.input_scale);
        outputs *= 4;
      } else if (e4m3.input_scale != 0) {
        weight = cpu::RoundedToE4m3(std::move(weight), outputs, e4m3.input_scale);
      }
      packed->convolution.emplace(engine_, std::move(weight), outputs, packed->in_channels,
                                  packed->kernel, dtype_, e4m3.input_scale);
      packed->bias = bias ? bias.ToFloats() : std::vector<float>(packed->out_channels);
      return packed;
    });
  }

  absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(const std::vector<Tensor>& weights_oi,
                                                           const std::vector<Tensor>& biases,
                                                           const E4m3Layer& e4m3,
                                                           bool gated) override {
    DENOISED_RETURN_IF_ERROR(CheckLinearWeights(weights_oi, biases, gated));
    return Pack([&] {
      std::vector<float> weight = Concatenated(weights_oi);
      const int in = static_cast<int>(weights_oi[0].dim(1));
      const int out = static_cast<int>(weight.size() / in);
      const bool has_bias = !biases.empty() && biases[0];
      std::vector<float> bias = has_bias ? Concatenated(biases) : std::vector<float>(out);
      auto packed = std::make_unique<cpu::CpuLinear>(engine_, std::move(weight), std::move(bias),
                                                     out, in, dtype_, e4m3);
      packed->gated = gated;
      return packed;
    });
  }

  absl::StatusOr<Tensor> PackVector(const Tensor& values) override {
    DENOISED_RETURN_IF_ERROR(CheckFloats(values));
    return Pack([&] { return Tensor::HostF32(values.shape(), values.ToFloats()); });
  }

  void Conv2d(const Conv2dArgs& args) override {
    Check(args, kRules);
    const Conv2dArgs plain = WithoutShortcut(*this, WithoutNorm(*this, args));
    Enqueue([&] {
      Observe(plain.weight->e4m3, {plain.x, plain.prologue.x2});
      cpu::Conv2d(plain, scratch());
    });
  }
  void Linear(const LinearArgs& args) override {
    Check(args, kRules);
    const LinearArgs plain = WithoutNorm(*this, args);
    if (plain.epilogue.ungated) return LinearThenGate(*this, plain);
    Enqueue([&] {
      Observe(plain.weight->e4m3, {plain.x});
      cpu::Linear(plain, scratch());
    });
  }
  void Gate(const Tensor& values_and_gates, const Tensor& out) override {
    CheckGate(values_and_gates, out, kRules);
    Enqueue([&] { cpu::GegluGate(values_and_gates, out, scratch()); });
  }
  void GroupNorm(const GroupNormArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::GroupNorm(args, scratch()); });
  }
  void LayerNorm(const LayerNormArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::LayerNorm(args); });
  }
  void Attention(const AttentionArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::Attention(args, scratch()); });
  }
  void NearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out) override {
    CheckNearestCode(x, codebook, out, kRules);
    Enqueue([&] { cpu::NearestCode(x, codebook, out); });
  }
  void Gaussian(const GaussianArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::Gaussian(args); });
  }
  void TimestepEmbedding(const TimestepEmbeddingArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::TimestepEmbedding(args); });
  }
  void FourierEmbedding(const FourierEmbeddingArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::FourierEmbedding(args); });
  }
  void Embedding(const EmbeddingArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::Embedding(args); });
  }
  void Resample2x(Resample kind, const Tensor& x, const Tensor& out) override {
    CheckResample2x(kind, x, out, kRules);
    Enqueue([&] { cpu::Resample2x(kind, x, out); });
  }
  void Add(const Tensor& a, float scale, const Tensor& b, float shift, Activation activation,
           const Tensor& out) override {
    CheckAdd(a, b, out, kRules);
    Enqueue([&] { cpu::Add(a, scale, b, shift, activation, out); });
  }
  void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) override {
    CheckDivideRows(x, divisor, out, kRules);
    Enqueue([&] { cpu::DivideRows(x, divisor, out); });
  }
  void BeginSlot(const BeginSlotArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::BeginSlot(args); });
  }
  void Gather(const GatherArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::Gather(args); });
  }
  void MeasureOutputs(const MeasureOutputsArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::MeasureOutputs(args); });
  }
  void Advance(const AdvanceArgs& args) override {
    Check(args, kRules);
    Enqueue([&] { cpu::Advance(args); });
  }

  RowSplit SplitRows(int rows) const override { return cpu::SplitRows(rows, workers()); }
  void ForEachPart(const RowSplit& split,
                   const std::function<void(int begin, int count, int worker)>& body) override {
    const std::vector<cpu::RowPart> parts = cpu::PartsOf(split);
    cpu::ParallelFor(static_cast<int64_t>(parts.size()),
                     [&](int64_t i, int thread) { body(parts[i].begin, parts[i].count, thread); });
  }

  absl::StatusOr<std::unique_ptr<Graph>> Capture(const std::function<void()>& body) override {
    DENOISED_CHECK(!capturing_, "a capture inside a capture");
    DENOISED_RETURN_IF_ERROR(status());
    capturing_ = true;
    body();
    capturing_ = false;
    auto graph = std::make_unique<CpuGraph>();
    graph->body = body;
    return graph;
  }
  void Launch(Graph& graph) override { static_cast<CpuGraph&>(graph).body(); }
  std::unique_ptr<Marker> Mark() override { return std::make_unique<CpuMarker>(status()); }
  absl::Status Synchronize() override { return status(); }
  absl::Status status() const override {
    if (!failed_) return absl::OkStatus();
    MutexLock lock(&mutex_);
    return status_;
  }

 private:
  static constexpr TensorRules kRules{Device::kCpu, DType::kF32};

  /// Returns pack()'s result, or its exception as a status.
  template <typename Function>
  absl::StatusOr<std::invoke_result_t<Function>> Pack(const Function& pack) {
    try {
      return pack();
    } catch (const dnnl::error& error) {
      return Failed(error);
    } catch (const std::bad_alloc&) {
      return ResourceExhausted(
          "out of host memory for weights, {} bytes are free; choose a smaller model, or raise the "
          "memory limit",
          memory().free);
    }
  }

  static absl::Status Failed(const dnnl::error& error) {
    return Internal("oneDNN failed: {} (status {})", error.what(), static_cast<int>(error.status));
  }

  /// Runs `op`, unless a body is being captured (then only its arguments were checked) or an
  /// earlier op failed: like a device's, the first error is final.
  template <typename Op>
  void Enqueue(const Op& op) {
    if (capturing_ || failed_) return;
    try {
      op();
    } catch (const dnnl::error& error) {
      Fail(Failed(error));
    } catch (const std::bad_alloc&) {
      Fail(ResourceExhausted(
          "out of host memory for working buffers; {} bytes are free; choose a smaller batch or "
          "image",
          memory().free));
    }
  }

  void Observe(const E4m3Layer& layer, std::initializer_list<Tensor> inputs) const {
    if (!ranges_ || !ranges_->started() || layer.name.empty()) return;
    float largest = 0;
    for (const Tensor& x : inputs) {
      if (!x) continue;
      for (const float value : x.span<float>()) largest = std::max(largest, std::fabs(value));
    }
    ranges_->Add(layer.name, largest);
  }

  void Fail(absl::Status status) {
    MutexLock lock(&mutex_);
    if (failed_) return;
    status_ = std::move(status);
    failed_ = true;
  }

  int workers() const { return static_cast<int>(scratches_.size()); }

  /// The calling thread's own.
  cpu::Scratch& scratch() { return scratches_[cpu::Worker()]; }

  const std::string name_;
  const DType dtype_;
  const std::shared_ptr<InputRanges> ranges_;
  const dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  std::vector<cpu::Scratch> scratches_ = std::vector<cpu::Scratch>(cpu::Workers());  // by thread
  bool capturing_ = false;
  std::atomic<bool> failed_ = false;
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);  // final once failed_
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> OpenCpuBackend(const BackendOptions& options) {
  DENOISED_CHECK(options.cpu_dtype == DType::kF32 || options.cpu_dtype == DType::kBF16);
  if (options.cpu_dtype == DType::kBF16 && !cpu::MultipliesBf16()) {
    return FailedPrecondition(
        "cpu-dtype is \"bf16\", but this CPU has neither AVX512-BF16 nor AMX; use \"fp32\"");
  }
  try {
    return std::make_unique<CpuBackend>(options);
  } catch (const dnnl::error& error) {
    return Internal("oneDNN has no CPU engine: {}", error.what());
  }
}

}  // namespace denoised
