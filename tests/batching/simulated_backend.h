// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/backend/backend.h"

namespace denoised {

/// Time that passes only when something takes it.
struct FakeClock {
  using TimePoint = std::chrono::steady_clock::time_point;
  TimePoint now{std::chrono::hours(1)};

  void Advance(double seconds) {
    now += std::chrono::duration_cast<TimePoint::duration>(std::chrono::duration<double>(seconds));
  }
};

inline double Seconds(FakeClock::TimePoint from, FakeClock::TimePoint to) {
  return std::chrono::duration<double>(to - from).count();
}

/// The CPU's results, and whatever times and faults a test asks for: an evaluation of `rows` takes
/// cost(rows) of the clock, decoding and encoding (tests/batching/fake_codec.h)
/// decode_cost(images) and encode_cost(images), and `fault`, when set, is asked before every
/// launch.
class SimulatedBackend final : public Backend {
 public:
  SimulatedBackend(std::unique_ptr<Backend> cpu, FakeClock* clock,
                   std::function<double(int rows)> cost, std::string name = "simulated")
      : cpu_(std::move(cpu)), clock_(clock), cost_(std::move(cost)), name_(std::move(name)) {}

  /// May block; an error is the device's, and final.
  std::function<absl::Status()> fault;
  /// When set, called by Synchronize, as before a model's memory is freed. May block.
  std::function<void()> wait;
  /// When set, called before a convolution's weights are packed. May block.
  std::function<void()> pack;
  /// False: rows are computed together, as on a GPU, so that memory does not depend on the cores.
  bool splits_rows = true;
  /// Those of the CPU, unless a test says otherwise. But it may hang, as tests of the watchdog
  /// need.
  Capabilities can{.may_hang = true};
  /// False: Capture() finds no memory. What then runs without a graph takes no time.
  bool graphs = true;
  /// Of each Capture().
  double capture_seconds = 0;
  int captures = 0;  // so far, with memory or without
  /// The times of the markers that were waited for.
  std::vector<FakeClock::TimePoint> waited;
  /// Null: they take no time.
  std::function<double(int images)> decode_cost, encode_cost;
  /// Allocate refuses more than this.
  size_t memory_limit = ~size_t{0};
  size_t allocated() const { return *allocated_; }

  std::string_view name() const override { return name_; }
  std::string description() const override { return "a device that is made up"; }
  Device device() const override { return cpu_->device(); }
  Capabilities capabilities() const override { return can; }
  DType activation_dtype() const override { return cpu_->activation_dtype(); }

  absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype,
                                  std::string_view purpose) override {
    const size_t bytes = shape.elements() * SizeOf(dtype);
    if (*allocated_ + bytes > memory_limit)
      return ResourceExhausted("{} needs {} bytes, {} are free", purpose, bytes,
                               memory_limit - *allocated_);
    DENOISED_ASSIGN_OR_RETURN(const Tensor tensor, cpu_->Allocate(shape, dtype, purpose));
    *allocated_ += bytes;
    // Counted back when the last view of it goes.
    return Tensor(const_cast<Tensor&>(tensor).data(), shape, dtype, device(),
                  std::shared_ptr<const void>(tensor.data(), [tensor, bytes, all = allocated_](
                                                                 const void*) { *all -= bytes; }));
  }
  BackendMemory memory() const override {
    return {.total = memory_limit, .free = memory_limit - *allocated_};
  }
  void Upload(const void* from, size_t bytes, const Tensor& to) override {
    cpu_->Upload(from, bytes, to);
  }
  std::unique_ptr<Download> BeginDownload(const Tensor& from) override {
    return cpu_->BeginDownload(from);
  }
  void Copy(const Tensor& from, const Tensor& to) override { cpu_->Copy(from, to); }

  absl::StatusOr<std::unique_ptr<PackedConv2d>> PackConv2d(const Tensor& weight_oihw,
                                                           const Tensor& bias, bool upsample2x,
                                                           const E4m3Layer& e4m3) override {
    if (pack) pack();
    return cpu_->PackConv2d(weight_oihw, bias, upsample2x, e4m3);
  }
  absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(const std::vector<Tensor>& weights_oi,
                                                           const std::vector<Tensor>& biases,
                                                           const E4m3Layer& e4m3,
                                                           bool gated) override {
    return cpu_->PackLinear(weights_oi, biases, e4m3, gated);
  }
  absl::StatusOr<Tensor> PackVector(const Tensor& values) override {
    return cpu_->PackVector(values);
  }

  void Conv2d(const Conv2dArgs& args) override { cpu_->Conv2d(args); }
  void Linear(const LinearArgs& args) override { cpu_->Linear(args); }
  void Gate(const Tensor& values_and_gates, const Tensor& out) override {
    cpu_->Gate(values_and_gates, out);
  }
  void GroupNorm(const GroupNormArgs& args) override { cpu_->GroupNorm(args); }
  void LayerNorm(const LayerNormArgs& args) override { cpu_->LayerNorm(args); }
  void Attention(const AttentionArgs& args) override { cpu_->Attention(args); }
  void NearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out) override {
    cpu_->NearestCode(x, codebook, out);
  }
  void Gaussian(const GaussianArgs& args) override { cpu_->Gaussian(args); }
  void TimestepEmbedding(const TimestepEmbeddingArgs& args) override {
    cpu_->TimestepEmbedding(args);
  }
  void FourierEmbedding(const FourierEmbeddingArgs& args) override { cpu_->FourierEmbedding(args); }
  void Embedding(const EmbeddingArgs& args) override { cpu_->Embedding(args); }
  void Resample2x(Resample kind, const Tensor& x, const Tensor& out) override {
    cpu_->Resample2x(kind, x, out);
    const auto& cost = kind == Resample::kNearestUp ? decode_cost : encode_cost;
    if (launching_ && cost) clock_->Advance(cost(static_cast<int>(x.dim(0))));
  }
  void Add(const Tensor& a, float scale, const Tensor& b, float shift, Activation activation,
           const Tensor& out) override {
    cpu_->Add(a, scale, b, shift, activation, out);
  }
  void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) override {
    cpu_->DivideRows(x, divisor, out);
  }
  void BeginSlot(const BeginSlotArgs& args) override { cpu_->BeginSlot(args); }
  void Gather(const GatherArgs& args) override { cpu_->Gather(args); }
  void MeasureOutputs(const MeasureOutputsArgs& args) override { cpu_->MeasureOutputs(args); }
  void Advance(const AdvanceArgs& args) override {
    cpu_->Advance(args);
    if (launching_) clock_->Advance(cost_(static_cast<int>(args.rows.dim(0))));
  }

  RowSplit SplitRows(int rows) const override {
    return splits_rows ? cpu_->SplitRows(rows) : RowSplit{};
  }
  void ForEachPart(const RowSplit& split,
                   const std::function<void(int begin, int count, int worker)>& body) override {
    cpu_->ForEachPart(split, body);
  }

  absl::StatusOr<std::unique_ptr<Graph>> Capture(const std::function<void()>& body) override {
    ++captures;
    clock_->Advance(capture_seconds);
    if (!graphs) return ResourceExhausted("there is no memory for a graph");
    return cpu_->Capture(body);
  }
  void Launch(Graph& graph) override {
    if (fault && status_.ok()) status_ = fault();
    if (!status_.ok()) return;
    launching_ = true;
    cpu_->Launch(graph);
    launching_ = false;
  }
  std::unique_ptr<Marker> Mark() override {
    return std::make_unique<SimulatedMarker>(clock_->now, status(), &waited);
  }
  absl::Status Synchronize() override {
    if (wait) wait();
    return status();
  }
  absl::Status status() const override { return status_.ok() ? cpu_->status() : status_; }

 private:
  class SimulatedMarker final : public Marker {
   public:
    SimulatedMarker(FakeClock::TimePoint time, absl::Status status,
                    std::vector<FakeClock::TimePoint>* waited)
        : time_(time), status_(std::move(status)), waited_(waited) {}
    bool reached() override { return true; }
    absl::Status Wait() override {
      waited_->push_back(time_);
      return status_;
    }
    double SecondsSince(const Marker& earlier) override {
      return std::chrono::duration<double>(time_ -
                                           static_cast<const SimulatedMarker&>(earlier).time_)
          .count();
    }

   private:
    const FakeClock::TimePoint time_;
    const absl::Status status_;
    std::vector<FakeClock::TimePoint>* const waited_;
  };

  const std::unique_ptr<Backend> cpu_;
  FakeClock* const clock_;
  const std::function<double(int)> cost_;
  const std::string name_;
  const std::shared_ptr<size_t> allocated_ = std::make_shared<size_t>(0);
  absl::Status status_;
  bool launching_ = false;
};

}  // namespace denoised
