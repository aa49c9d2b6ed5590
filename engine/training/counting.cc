// SPDX-License-Identifier: Apache-2.0
#include "engine/training/backend.h"

namespace denoised::training {
namespace {

class CountingBackend final : public Backend {
 public:
  CountingBackend(DType dtype, Cost* cost) : dtype_(dtype), cost_(cost) {}

  std::string_view name() const override { return "counting"; }
  std::string description() const override { return "counts work and does none"; }
  denoised::Device device() const override { return denoised::Device::kCpu; }
  DType activation_dtype() const override { return dtype_; }
  void SetChunkRows(int64_t rows) override { chunk_rows_ = rows; }
  int64_t chunk_rows() const override { return chunk_rows_; }
  int64_t PassChunks(int64_t) const override { return 1; }
  int workers() const override { return 1; }
  void ForEachPass(int64_t count, const std::function<void(int64_t, int)>& body) override {
    for (int64_t pass = 0; pass < count; ++pass) body(pass, 0);
  }

  /// An address that nothing reads or writes.
  absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype, std::string_view) override {
    return Tensor(&nowhere_, shape, dtype, denoised::Device::kCpu, nullptr);
  }
  void Upload(const void*, size_t, const Tensor&) override {}
  absl::StatusOr<Tensor> Download(const Tensor&) override {
    return FailedPrecondition("the counting backend has no values");
  }
  absl::Status status() override { return absl::OkStatus(); }

  std::unique_ptr<PackedConv2d> NewConv2d(int in, int out, int kernel, bool upsample2x,
                                          const Conv2dGeometry& geometry) override {
    auto conv = std::make_unique<PackedConv2d>();
    conv->in_channels = in;
    conv->out_channels = out;
    conv->kernel = kernel;
    conv->upsample2x = upsample2x;
    cost_->conv2d_weights += int64_t{in} * out * kernel * kernel;
    if (PacksPhases(geometry, kernel, upsample2x)) cost_->more_weights += int64_t{in} * out * 16;
    if (dtype_ == DType::kBF16 && PacksPairs(in, out, geometry, kernel, upsample2x))
      cost_->more_weights += int64_t{in} * out * (4 * 9);
    if (upsample2x && kernel == 3) cost_->more_weights += int64_t{in} * out * (16 - 9);
    return conv;
  }
  std::unique_ptr<PackedLinear> NewLinear(int in, const std::vector<int>& parts) override {
    auto linear = std::make_unique<PackedLinear>();
    linear->in_features = in;
    linear->parts = parts;
    for (const int part : parts) linear->out_features += part;
    return linear;
  }
  void PackConv2d(const Tensor&, const Tensor&, PackedConv2d*) override {}
  void PackLinear(const std::vector<Tensor>&, const std::vector<Tensor>&, PackedLinear*) override {}

  void Conv2d(const Conv2dArgs& args) override { Count(args.out, *args.weight); }
  void Conv2dBackward(const Conv2dBackwardArgs& args) override {
    if (args.dweight) Count(args.dout, *args.weight);
    if (args.dx) Count(args.dout, *args.weight);
  }
  void Linear(const LinearArgs& args) override { Count(args.out, *args.weight); }
  void LinearBackward(const LinearBackwardArgs& args) override {
    if (!args.dweights.empty()) Count(args.dout, *args.weight);
    if (args.dx) Count(args.dout, *args.weight);
  }
  void GroupNorm(const GroupNormArgs&) override {}
  void GroupNormBackward(const GroupNormBackwardArgs&) override {}
  void Attention(const AttentionArgs& args) override { Count(args, 2); }
  void AttentionBackward(const AttentionBackwardArgs& args) override { Count(args.forward, 5); }
  void LayerNorm(const LayerNormArgs&) override {}
  void LayerNormBackward(const LayerNormBackwardArgs&) override {}
  void Geglu(const Tensor&, const Tensor&) override {}
  void GegluBackward(const Tensor&, const Tensor&, const Tensor&) override {}
  void Activate(Activation, const Tensor&, const Tensor&) override {}
  void ActivateBackward(Activation, const Tensor&, const Tensor&, const Tensor&) override {}
  void Resample2x(Resample, const Tensor&, float, const Tensor&) override {}
  void Concat(const Tensor&, const Tensor&, const Tensor&) override {}
  void Add(const Tensor&, float, const Tensor&, float, float, const Tensor&) override {}
  void SumPixels(const Tensor&, const Tensor&) override {}
  void DivideRows(const Tensor&, const Tensor&, const Tensor&) override {}
  void TimestepEmbedding(const Tensor&, bool, double, const Tensor&) override {}
  void FourierEmbedding(const Tensor&, const Tensor&, const Tensor&) override {}
  void Embedding(const Tensor&, const Tensor&, const Tensor&) override {}
  void EmbeddingBackward(const Tensor&, const Tensor&, const Tensor&) override {}
  void Dropout(const DropoutArgs&) override {}
  void MakeSamples(const SamplesArgs&) override {}
  void Noise(uint64_t, const Tensor&, const Tensor&, const Tensor&) override {}
  void Loss(const LossArgs&) override {}
  void VarianceLoss(const VarianceLossArgs&) override {}
  void Gaussian(const GaussianArgs&) override {}
  void GaussianBackward(const GaussianBackwardArgs&) override {}
  void ReconstructionLoss(const ReconstructionLossArgs&) override {}
  void SquaredNorm(const Tensor&, const Tensor&) override {}
  void Accumulate(const Tensor&, const Tensor&) override {}
  void Update(const UpdateArgs&) override {}

 private:
  void Count(const Tensor& out, const PackedConv2d& weight) {
    cost_->multiply_adds +=
        static_cast<double>(out.elements()) * weight.in_channels * weight.kernel * weight.kernel;
  }
  void Count(const Tensor& out, const PackedLinear& weight) {
    cost_->multiply_adds += static_cast<double>(out.elements()) * weight.in_features;
  }
  void Count(const AttentionArgs& args, int products) {
    cost_->multiply_adds +=
        products * static_cast<double>(args.q.elements()) * static_cast<double>(args.k.dim(1));
  }

  const DType dtype_;
  Cost* const cost_;
  int64_t chunk_rows_ = 0;
  float nowhere_ = 0;
};

}  // namespace

std::unique_ptr<Backend> NewCountingBackend(DType activation_dtype, Cost* cost) {
  return std::make_unique<CountingBackend>(activation_dtype, cost);
}

size_t PackedBytes(const Backend& backend, int64_t elements, const Cost& cost) {
  const int64_t packed = backend.device() == denoised::Device::kCpu
                             ? 2 * cost.conv2d_weights
                             : 2 * elements + cost.more_weights;
  return static_cast<size_t>(packed) * SizeOf(backend.activation_dtype());
}

}  // namespace denoised::training
