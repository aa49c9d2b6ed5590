// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/check.h"

namespace denoised {

/// Work of a sequence of ops. A multiply-add is two FLOPs; cheap elementwise arithmetic counts
/// none. Bytes are what the ops would read and write if nothing stayed in a cache: operands,
/// weights once for each op, results.
struct Work {
  double flops = 0;
  double bytes = 0;
  int64_t ops = 0;
};

/// Computes nothing and touches no tensor memory. It checks every op as the real backends do and
/// counts its work: norms of inputs as separate ops, shortcuts and gates as parts of the product.
/// With Arena::Measuring() it computes how much memory a model needs before any is allocated.
/// Packed weights hold sizes only.
class CountingBackend : public Backend {
 public:
  CountingBackend(Device device, DType activation_dtype);
  /// Counts instead of `real`, with the same device, dtype and capabilities.
  explicit CountingBackend(const Backend& real);

  /// Since construction or ResetWork(). Ops inside Capture() count at each Launch().
  const Work& work() const { return work_; }
  void ResetWork() { work_ = {}; }
  /// Persistent bytes that were allocated, and bytes of packed weights as the backend keeps them:
  /// convolutions and linears in the activation dtype (those in e4m3, on CUDA, in one byte and a
  /// scale for each output), biases and vectors in F32, without padding.
  size_t allocated_bytes() const { return allocated_bytes_; }
  size_t weight_bytes() const { return weight_bytes_; }

  std::string_view name() const override { return "counting"; }
  std::string description() const override;
  Device device() const override { return rules_.device; }
  Capabilities capabilities() const override { return capabilities_; }
  DType activation_dtype() const override { return rules_.activation; }
  bool MultipliesE4m3() const override { return multiplies_e4m3_; }

  /// Addresses that must not be touched, aligned as Arena's.
  absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype,
                                  std::string_view purpose) override;
  BackendMemory memory() const override { return {}; }
  void Upload(const void* from, size_t bytes, const Tensor& to) override;
  /// Its Wait() is FailedPrecondition: there is nothing to read.
  std::unique_ptr<Download> BeginDownload(const Tensor& from) override;
  void Copy(const Tensor& from, const Tensor& to) override;

  absl::StatusOr<std::unique_ptr<PackedConv2d>> PackConv2d(const Tensor& weight_oihw,
                                                           const Tensor& bias, bool upsample2x,
                                                           const E4m3Layer& e4m3 = {}) override;
  absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(const std::vector<Tensor>& weights_oi,
                                                           const std::vector<Tensor>& biases,
                                                           const E4m3Layer& e4m3 = {},
                                                           bool gated = false) override;
  absl::StatusOr<Tensor> PackVector(const Tensor& values) override;

  void Conv2d(const Conv2dArgs& args) override;
  void Linear(const LinearArgs& args) override;
  void Gate(const Tensor& values_and_gates, const Tensor& out) override;
  void GroupNorm(const GroupNormArgs& args) override;
  void LayerNorm(const LayerNormArgs& args) override;
  void Attention(const AttentionArgs& args) override;
  void NearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out) override;
  void Gaussian(const GaussianArgs& args) override;
  void TimestepEmbedding(const TimestepEmbeddingArgs& args) override;
  void FourierEmbedding(const FourierEmbeddingArgs& args) override;
  void Embedding(const EmbeddingArgs& args) override;
  void Resample2x(Resample kind, const Tensor& x, const Tensor& out) override;
  void Add(const Tensor& a, float scale, const Tensor& b, float shift, Activation activation,
           const Tensor& out) override;
  void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) override;
  void BeginSlot(const BeginSlotArgs& args) override;
  void Gather(const GatherArgs& args) override;
  void MeasureOutputs(const MeasureOutputsArgs& args) override;
  void Advance(const AdvanceArgs& args) override;

  absl::StatusOr<std::unique_ptr<Graph>> Capture(const std::function<void()>& body) override;
  void Launch(Graph& graph) override;
  /// Reached at once; no time passes between markers.
  std::unique_ptr<Marker> Mark() override;
  absl::Status Synchronize() override { return absl::OkStatus(); }
  absl::Status status() const override { return absl::OkStatus(); }

 private:
  void Count(double flops, double weight_bytes, std::initializer_list<const Tensor*> operands);
  /// Whether the layer's input in e4m3 needs Prologue::rounded, as on CUDA.
  bool RoundsIntoMemory(const E4m3Layer& e4m3) const;
  /// Bytes of `elements` weights of `outputs` outputs.
  size_t WeightBytes(int64_t elements, int outputs, const E4m3Layer& e4m3) const;
  Tensor Nowhere(const Shape& shape, DType dtype) const;

  const TensorRules rules_;
  const Capabilities capabilities_;
  const bool multiplies_e4m3_ = true;
  Work work_;
  size_t allocated_bytes_ = 0;
  size_t weight_bytes_ = 0;
};

}  // namespace denoised
