// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <utility>

#include "engine/training/backend.h"

namespace denoised::training {

/// What a trainer does on a GPU, computed by the CPU: a pass has all chunks of a micro-batch, the
/// next step's passes are enqueued early, and memory ends.
class GpuDouble final : public Backend {
 public:
  explicit GpuDouble(std::unique_ptr<Backend> cpu, DType activation = DType::kF32)
      : cpu_(std::move(cpu)), activation_(activation) {}

  /// Allocate() then refuses what does not fit.
  void SetMemory(size_t bytes) { memory_ = bytes; }
  /// Of tensors, without packed weights and scratch memory.
  size_t allocated() const { return *allocated_; }
  size_t peak() const { return peak_; }

  std::string_view name() const override { return "double"; }
  std::string description() const override { return "a GPU that the CPU plays"; }
  denoised::Device device() const override { return denoised::Device::kCuda; }
  DType activation_dtype() const override { return activation_; }
  int64_t PassChunks(int64_t chunks) const override { return chunks; }
  int workers() const override { return 1; }
  void ForEachPass(int64_t count, const std::function<void(int64_t, int)>& body) override {
    for (int64_t pass = 0; pass < count; ++pass) body(pass, 0);
  }
  absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype,
                                  std::string_view purpose) override {
    const size_t bytes = static_cast<size_t>(shape.elements()) * SizeOf(dtype);
    if (*allocated_ + bytes > memory_)
      return ResourceExhausted("{} needs {} bytes of {}", purpose, bytes, memory_);
    // Zeros that take no memory until they are written, however much is asked for.
    void* const data = mmap(nullptr, std::max<size_t>(1, bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return Internal("mmap: errno {}", errno);
    *allocated_ += bytes;
    peak_ = std::max(peak_, allocated());
    std::shared_ptr<void> storage(data, [bytes, count = allocated_](void* at) {
      munmap(at, std::max<size_t>(1, bytes));
      *count -= bytes;
    });
    return Tensor(data, shape, dtype, denoised::Device::kCpu, std::move(storage));
  }

  // The rest is the CPU's.
  void SetChunkRows(int64_t rows) override { cpu_->SetChunkRows(rows); }
  int64_t chunk_rows() const override { return cpu_->chunk_rows(); }
  void Upload(const void* from, size_t bytes, const Tensor& to) override {
    cpu_->Upload(from, bytes, to);
  }
  absl::StatusOr<Tensor> Download(const Tensor& from) override { return cpu_->Download(from); }
  absl::Status status() override { return cpu_->status(); }
  std::unique_ptr<PackedConv2d> NewConv2d(int in, int out, int kernel, bool upsample2x,
                                          const Conv2dGeometry& geometry) override {
    return cpu_->NewConv2d(in, out, kernel, upsample2x, geometry);
  }
  std::unique_ptr<PackedLinear> NewLinear(int in, const std::vector<int>& parts) override {
    return cpu_->NewLinear(in, parts);
  }
  void PackConv2d(const Tensor& weight, const Tensor& bias, PackedConv2d* packed) override {
    cpu_->PackConv2d(weight, bias, packed);
  }
  void PackLinear(const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                  PackedLinear* packed) override {
    cpu_->PackLinear(weights, biases, packed);
  }
  void Conv2d(const Conv2dArgs& args) override { cpu_->Conv2d(args); }
  void Conv2dBackward(const Conv2dBackwardArgs& args) override { cpu_->Conv2dBackward(args); }
  void Linear(const LinearArgs& args) override { cpu_->Linear(args); }
  void LinearBackward(const LinearBackwardArgs& args) override { cpu_->LinearBackward(args); }
  void GroupNorm(const GroupNormArgs& args) override { cpu_->GroupNorm(args); }
  void GroupNormBackward(const GroupNormBackwardArgs& args) override {
    cpu_->GroupNormBackward(args);
  }
  void Attention(const AttentionArgs& args) override { cpu_->Attention(args); }
  void AttentionBackward(const AttentionBackwardArgs& args) override {
    cpu_->AttentionBackward(args);
  }
  void LayerNorm(const LayerNormArgs& args) override { cpu_->LayerNorm(args); }
  void LayerNormBackward(const LayerNormBackwardArgs& args) override {
    cpu_->LayerNormBackward(args);
  }
  void Geglu(const Tensor& x, const Tensor& out) override { cpu_->Geglu(x, out); }
  void GegluBackward(const Tensor& x, const Tensor& dout, const Tensor& dx) override {
    cpu_->GegluBackward(x, dout, dx);
  }
  void Activate(Activation activation, const Tensor& x, const Tensor& out) override {
    cpu_->Activate(activation, x, out);
  }
  void ActivateBackward(Activation activation, const Tensor& x, const Tensor& dout,
                        const Tensor& dx) override {
    cpu_->ActivateBackward(activation, x, dout, dx);
  }
  void Resample2x(Resample kind, const Tensor& x, float scale, const Tensor& out) override {
    cpu_->Resample2x(kind, x, scale, out);
  }
  void Concat(const Tensor& a, const Tensor& b, const Tensor& out) override {
    cpu_->Concat(a, b, out);
  }
  void Add(const Tensor& a, float scale_a, const Tensor& b, float scale_b, float shift,
           const Tensor& out) override {
    cpu_->Add(a, scale_a, b, scale_b, shift, out);
  }
  void SumPixels(const Tensor& x, const Tensor& out) override { cpu_->SumPixels(x, out); }
  void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) override {
    cpu_->DivideRows(x, divisor, out);
  }
  void TimestepEmbedding(const Tensor& t, bool flip_sin_to_cos, double freq_shift,
                         const Tensor& out) override {
    cpu_->TimestepEmbedding(t, flip_sin_to_cos, freq_shift, out);
  }
  void FourierEmbedding(const Tensor& t, const Tensor& weight, const Tensor& out) override {
    cpu_->FourierEmbedding(t, weight, out);
  }
  void Embedding(const Tensor& table, const Tensor& index, const Tensor& out) override {
    cpu_->Embedding(table, index, out);
  }
  void EmbeddingBackward(const Tensor& index, const Tensor& dout, const Tensor& dtable) override {
    cpu_->EmbeddingBackward(index, dout, dtable);
  }
  void Dropout(const DropoutArgs& args) override { cpu_->Dropout(args); }
  void MakeSamples(const SamplesArgs& args) override { cpu_->MakeSamples(args); }
  void Noise(uint64_t seed, const Tensor& step, const Tensor& rows, const Tensor& out) override {
    cpu_->Noise(seed, step, rows, out);
  }
  void Loss(const LossArgs& args) override { cpu_->Loss(args); }
  void VarianceLoss(const VarianceLossArgs& args) override { cpu_->VarianceLoss(args); }
  void Gaussian(const GaussianArgs& args) override { cpu_->Gaussian(args); }
  void GaussianBackward(const GaussianBackwardArgs& args) override { cpu_->GaussianBackward(args); }
  void ReconstructionLoss(const ReconstructionLossArgs& args) override {
    cpu_->ReconstructionLoss(args);
  }
  void SquaredNorm(const Tensor& x, const Tensor& out) override { cpu_->SquaredNorm(x, out); }
  void Accumulate(const Tensor& a, const Tensor& b) override { cpu_->Accumulate(a, b); }
  void Update(const UpdateArgs& args) override { cpu_->Update(args); }

 private:
  const std::unique_ptr<Backend> cpu_;
  const DType activation_;
  size_t memory_ = SIZE_MAX, peak_ = 0;
  /// Tensors may outlive the backend.
  const std::shared_ptr<std::atomic<size_t>> allocated_ = std::make_shared<std::atomic<size_t>>(0);
};

}  // namespace denoised::training
