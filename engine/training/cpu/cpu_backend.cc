// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numbers>

#include "engine/backend/cpu/host.h"
#include "engine/backend/cpu/onednn.h"
#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/backend/cpu/vector_ops.h"
#include "engine/training/cpu/loops.h"
#include "engine/training/cpu/ops.h"
#include "engine/training/random.h"
#include "engine/training/variance.h"

namespace denoised::training {
namespace cpu {

using denoised::cpu::ParallelFor;
using denoised::cpu::Workers;

float* ThreadScratch(int slot, size_t count) {
  thread_local std::shared_ptr<void> blocks[3];
  thread_local size_t sizes[3] = {};
  if (sizes[slot] < count) {
    constexpr std::align_val_t kLine{64};
    blocks[slot].reset();
    sizes[slot] = 0;
    blocks[slot] = std::shared_ptr<void>(::operator new(count * sizeof(float), kLine),
                                         [](void* block) { ::operator delete(block, kLine); });
    sizes[slot] = count;
  }
  return static_cast<float*>(blocks[slot].get());
}

void EmbeddingBackward(const Tensor& index, const Tensor& dout, const Tensor& dtable,
                       int64_t chunk_rows) {
  const int64_t dim = dtable.dim(1), tokens = index.elements() / index.dim(0);
  SumChunks(index.dim(0), chunk_rows, dtable.elements(), dtable.as<float>(),
            [&](int64_t begin, int64_t rows, float* to) {
              std::fill_n(to, dtable.elements(), 0.0f);
              for (int64_t n = begin * tokens; n < (begin + rows) * tokens; ++n)
                AddTo(to + index.as<int32_t>()[n] * dim, dout.as<float>() + n * dim, dim);
            });
}

namespace {

/// Loops over all weights are cut into blocks of this many, so that the order of sums does not
/// depend on the number of threads.
constexpr int64_t kBlock = 1 << 16;

template <typename Body>
void ForEachBlock(int64_t count, const Body& body) {
  ParallelFor((count + kBlock - 1) / kBlock, [&](int64_t block, int) {
    const int64_t begin = block * kBlock;
    body(block, begin, std::min(kBlock, count - begin));
  });
}

const SampleRow* RowsIn(const Tensor& rows) {
  return reinterpret_cast<const SampleRow*>(rows.as<int32_t>());
}

class CpuBackend final : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  std::string description() const override {
    return fmt::format("{} threads, {}", Workers(), denoised::cpu::DescribeOneDnn());
  }
  std::string arithmetic() const override { return "CPU, " + denoised::cpu::DescribeOneDnn(); }
  denoised::Device device() const override { return denoised::Device::kCpu; }
  DType activation_dtype() const override { return DType::kF32; }

  void SetChunkRows(int64_t rows) override { chunk_rows_ = rows; }
  int64_t chunk_rows() const override { return chunk_rows_; }
  int64_t PassChunks(int64_t) const override { return 1; }
  int workers() const override { return Workers(); }
  void ForEachPass(int64_t count, const std::function<void(int64_t, int)>& body) override {
    Guard([&] { ParallelFor(count, [&](int64_t pass, int worker) { body(pass, worker); }); });
  }

  absl::StatusOr<Tensor> Allocate(const Shape& shape, DType dtype,
                                  std::string_view purpose) override {
    try {
      Tensor tensor = Tensor::Host(shape, dtype);
      std::memset(tensor.data(), 0, tensor.bytes());
      return tensor;
    } catch (const std::bad_alloc&) {
      return ResourceExhausted(
          "{} needs {} MiB, which the system does not have; use a smaller batch", purpose,
          shape.elements() * SizeOf(dtype) >> 20);
    }
  }
  void Upload(const void* from, size_t bytes, const Tensor& to) override {
    DENOISED_CHECK(bytes <= to.bytes());
    std::memcpy(to.data(), from, bytes);
  }
  absl::StatusOr<Tensor> Download(const Tensor& from) override {
    DENOISED_RETURN_IF_ERROR(status());
    Tensor to = Tensor::Host(from.shape(), from.dtype());
    std::memcpy(to.data(), from.data(), from.bytes());
    return to;
  }
  absl::Status status() override {
    MutexLock lock(&mutex_);
    return status_;
  }

  std::unique_ptr<PackedConv2d> NewConv2d(int in, int out, int kernel, bool upsample2x,
                                          const Conv2dGeometry& /*geometry*/) override {
    return std::make_unique<CpuConv2d>(engine_, in, out, kernel, upsample2x);
  }
  std::unique_ptr<PackedLinear> NewLinear(int in, const std::vector<int>& parts) override {
    auto linear = std::make_unique<CpuLinear>();
    linear->in_features = in;
    linear->parts = parts;
    for (const int part : parts) linear->out_features += part;
    return linear;
  }
  void PackConv2d(const Tensor& weight, const Tensor& bias, PackedConv2d* packed) override {
    Guard([&] {
      static_cast<CpuConv2d*>(packed)->Pack(weight.as<float>(), bias ? bias.as<float>() : nullptr);
    });
  }
  void PackLinear(const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                  PackedLinear* packed) override {
    auto* linear = static_cast<CpuLinear*>(packed);
    linear->weights.clear();
    linear->biases.clear();
    for (const Tensor& weight : weights) linear->weights.push_back(weight.as<float>());
    for (const Tensor& bias : biases) linear->biases.push_back(bias.as<float>());
  }

  void Conv2d(const Conv2dArgs& args) override { cpu::Conv2d(args, chunk_rows_); }
  void Conv2dBackward(const Conv2dBackwardArgs& args) override {
    cpu::Conv2dBackward(args, chunk_rows_);
  }
  void Linear(const LinearArgs& args) override { cpu::Linear(args); }
  void LinearBackward(const LinearBackwardArgs& args) override {
    cpu::LinearBackward(args, chunk_rows_);
  }
  void GroupNorm(const GroupNormArgs& args) override { cpu::GroupNorm(args); }
  void GroupNormBackward(const GroupNormBackwardArgs& args) override {
    DENOISED_CHECK(!args.dx_sums || (!args.add && !args.dx_rest));
    cpu::GroupNormBackward(args, chunk_rows_);
    if (args.dx_sums) SumPixels(args.dx, args.dx_sums);
  }
  void Attention(const AttentionArgs& args) override { cpu::Attention(args); }
  void AttentionBackward(const AttentionBackwardArgs& args) override {
    cpu::AttentionBackward(args);
  }
  void LayerNorm(const LayerNormArgs& args) override { cpu::LayerNorm(args); }
  void LayerNormBackward(const LayerNormBackwardArgs& args) override {
    cpu::LayerNormBackward(args, chunk_rows_);
  }
  void Geglu(const Tensor& x, const Tensor& out) override { cpu::Geglu(x, out); }
  void GegluBackward(const Tensor& x, const Tensor& dout, const Tensor& dx) override {
    cpu::GegluBackward(x, dout, dx);
  }

  void Activate(Activation activation, const Tensor& x, const Tensor& out) override {
    if (out.data() != x.data()) std::memcpy(out.data(), x.data(), x.bytes());
    denoised::cpu::Activate(activation, out.as<float>(), out.elements());
  }
  void ActivateBackward(Activation activation, const Tensor& x, const Tensor& dout,
                        const Tensor& dx) override {
    if (dx.data() != dout.data()) std::memcpy(dx.data(), dout.data(), dout.bytes());
    MultiplyByDerivative(activation, x.as<float>(), dx.as<float>(), dx.elements());
  }

  void Resample2x(Resample kind, const Tensor& x, float scale, const Tensor& out) override {
    switch (kind) {
      case Resample::kNearestUp:
        return Spread(x, scale, out);
      case Resample::kAveragePoolDown:
        return Pool(x, 0.25f * scale, out);
      case Resample::kFirUp:
      case Resample::kFirDown:
        denoised::cpu::Resample2x(kind, x, out);
        if (scale != 1) Add(out, scale, Tensor(), 0, 0, out);
    }
  }

  void Concat(const Tensor& a, const Tensor& b, const Tensor& out) override {
    const int64_t ca = a.dim(-1), cb = b.dim(-1), pixels = a.elements() / ca;
    for (int64_t p = 0; p < pixels; ++p) {
      float* to = out.as<float>() + p * (ca + cb);
      std::memcpy(to, a.as<float>() + p * ca, ca * sizeof(float));
      std::memcpy(to + ca, b.as<float>() + p * cb, cb * sizeof(float));
    }
  }
  void Add(const Tensor& a, float scale_a, const Tensor& b, float scale_b, float shift,
           const Tensor& out) override {
    const int64_t count = out.elements();
    const float* x = a.as<float>();
    float* to = out.as<float>();
    if (b) {
      const float* y = b.as<float>();
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) to[i] = x[i] * scale_a + y[i] * scale_b + shift;
    } else {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) to[i] = x[i] * scale_a + shift;
    }
  }
  void SumPixels(const Tensor& x, const Tensor& out) override {
    const int64_t rows = x.dim(0), channels = x.dim(-1), pixels = x.elements() / rows / channels;
    std::vector<double> sums(channels);
    for (int64_t n = 0; n < rows; ++n) {
      std::fill(sums.begin(), sums.end(), 0.0);
      SumColumns(x.as<float>() + n * pixels * channels, pixels, channels, channels, sums.data());
      for (int64_t c = 0; c < channels; ++c)
        out.as<float>()[n * channels + c] = static_cast<float>(sums[c]);
    }
  }
  void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) override {
    const int64_t rows = x.dim(0), count = x.elements() / rows;
    for (int64_t i = 0; i < x.elements(); ++i)
      out.as<float>()[i] = x.as<float>()[i] / divisor.as<float>()[i / count];
  }
  void TimestepEmbedding(const Tensor& t, bool flip_sin_to_cos, double freq_shift,
                         const Tensor& out) override {
    const int64_t dim = out.dim(1), half = dim / 2;
    const int64_t sin_at = flip_sin_to_cos ? half : 0, cos_at = half - sin_at;
    for (int64_t n = 0; n < out.dim(0); ++n) {
      float* to = out.as<float>() + n * dim;
      for (int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(t.as<float>()[n]) *
                             std::exp(-std::log(10000.0) * static_cast<double>(i) /
                                      (static_cast<double>(half) - freq_shift));
        to[sin_at + i] = static_cast<float>(std::sin(angle));
        to[cos_at + i] = static_cast<float>(std::cos(angle));
      }
      if (dim % 2 != 0) to[dim - 1] = 0;
    }
  }
  void FourierEmbedding(const Tensor& t, const Tensor& weight, const Tensor& out) override {
    const int64_t half = weight.dim(0);
    for (int64_t n = 0; n < out.dim(0); ++n) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle = 2 * std::numbers::pi * weight.as<float>()[i] *
                             std::log(static_cast<double>(t.as<float>()[n]));
        out.as<float>()[n * 2 * half + i] = static_cast<float>(std::sin(angle));
        out.as<float>()[n * 2 * half + half + i] = static_cast<float>(std::cos(angle));
      }
    }
  }
  void Embedding(const Tensor& table, const Tensor& index, const Tensor& out) override {
    const int64_t dim = table.dim(1);
    for (int64_t n = 0; n < index.elements(); ++n) {
      const int32_t entry = index.as<int32_t>()[n];
      DENOISED_CHECK(entry >= 0 && entry < table.dim(0), "entry {} of {}", entry, table.dim(0));
      std::memcpy(out.as<float>() + n * dim, table.as<float>() + entry * dim, dim * sizeof(float));
    }
  }
  void EmbeddingBackward(const Tensor& index, const Tensor& dout, const Tensor& dtable) override {
    cpu::EmbeddingBackward(index, dout, dtable, chunk_rows_);
  }
  void Dropout(const DropoutArgs& args) override {
    const int64_t rows = args.x.dim(0), count = args.x.elements() / rows;
    const float keep = 1 / (1 - args.probability);
    const auto step = static_cast<uint32_t>(args.step.as<int32_t>()[0]);
    for (int64_t n = 0; n < rows; ++n) {
      const float* x = args.x.as<float>() + n * count;
      float* out = args.out.as<float>() + n * count;
      for (int64_t i = 0; i < count; i += 4) {
        const Philox4 bits = Draw(args.seed, Purpose::kDropout, step, RowsIn(args.rows)[n].sample,
                                  static_cast<uint32_t>(i / 4), args.layer);
        for (int64_t j = i; j < std::min(i + 4, count); ++j)
          out[j] = UniformOf(bits.v[j - i]) >= args.probability ? x[j] * keep : 0.0f;
      }
    }
  }

  void MakeSamples(const SamplesArgs& args) override {
    if (args.posteriors) return MakeLatents(args);
    const int64_t height = args.x.dim(1), width = args.x.dim(2), channels = args.x.dim(3);
    const int64_t from_height = args.images.dim(1), from_width = args.images.dim(2);
    const auto step = static_cast<uint32_t>(args.step.as<int32_t>()[0]);
    for (int64_t n = 0; n < args.x.dim(0); ++n) {
      const SampleRow& row = RowsIn(args.rows)[n];
      DENOISED_CHECK(row.image >= 0 && row.image < args.images.dim(0) && row.top >= 0 &&
                     row.left >= 0 && row.top + height <= from_height &&
                     row.left + width <= from_width);
      const auto* image =
          args.images.as<uint8_t>() + row.image * from_height * from_width * channels;
      const int64_t at = n * height * width * channels;
      Normal4 normal{};
      for (int64_t i = 0; i < height * width * channels; ++i) {
        if (i % 4 == 0)
          normal = NormalOfBits(
              Draw(args.seed, Purpose::kNoise, step, row.sample, static_cast<uint32_t>(i / 4)));
        const int64_t c = i % channels, w = i / channels % width, h = i / channels / width;
        const int64_t column = row.left + (row.flip != 0 ? width - 1 - w : w);
        const float y =
            static_cast<float>(image[((row.top + h) * from_width + column) * channels + c]) /
                127.5f -
            1.0f;
        const float noise = normal.v[i % 4];
        if (args.image) args.image.as<float>()[at + i] = y;
        args.x.as<float>()[at + i] = row.signal * y + row.noise * noise + row.shift;
        args.target.as<float>()[at + i] = row.target_signal * y + row.target_noise * noise;
      }
      args.condition.as<float>()[n] = row.condition;
      if (args.label) args.label.as<int32_t>()[n] = row.label;
    }
  }
  void Noise(uint64_t seed, const Tensor& step, const Tensor& rows, const Tensor& out) override {
    const int64_t count = out.elements() / out.dim(0);
    for (int64_t n = 0; n < out.dim(0); ++n)
      FillNormal(seed, Purpose::kPosterior, step, RowsIn(rows)[n].sample, count,
                 out.as<float>() + n * count);
  }
  void Gaussian(const GaussianArgs& args) override { cpu::Gaussian(args); }
  void GaussianBackward(const GaussianBackwardArgs& args) override { cpu::GaussianBackward(args); }
  void ReconstructionLoss(const ReconstructionLossArgs& args) override {
    cpu::ReconstructionLoss(args);
    SumLoss(args.loss, args.scale, args.sum);
  }
  void Loss(const LossArgs& args) override {
    const int64_t rows = args.output.dim(0), count = args.output.elements() / rows;
    for (int64_t n = 0; n < rows; ++n) {
      const float* output = args.output.as<float>() + n * count;
      const float* target = args.target.as<float>() + n * count;
      float* gradient = args.doutput.as<float>() + n * count;
      const float weight = RowsIn(args.rows)[n].weight;
      const float factor = 2.0f * weight * args.scale / static_cast<float>(count);
      double sum = 0;
      for (int64_t i = 0; i < count; ++i) {
        const float difference = output[i] - target[i];
        sum += static_cast<double>(difference) * difference;
        gradient[i] = factor * difference;
      }
      args.loss.as<float>()[n] = static_cast<float>(weight * sum / static_cast<double>(count));
    }
    SumLoss(args.loss, args.scale, args.sum);
  }
  void VarianceLoss(const VarianceLossArgs& args) override {
    const int64_t rows = args.target.dim(0), channels = args.target.dim(3),
                  count = args.target.elements() / rows;
    for (int64_t n = 0; n < rows; ++n) {
      const SampleRow& row = RowsIn(args.rows)[n];
      const float* output = args.output.as<float>() + 2 * n * count;
      const float* target = args.target.as<float>() + n * count;
      const float* image = args.image.as<float>() + n * count;
      float* gradient = args.doutput.as<float>() + 2 * n * count;
      const float factor = 2.0f * row.weight * args.scale / static_cast<float>(count);
      const double variance_factor = args.weight * args.scale / static_cast<double>(count);
      double squares = 0, divergences = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = i / channels * 2 * channels + i % channels;
        const float difference = output[at] - target[i];
        squares += static_cast<double>(difference) * difference;
        gradient[at] = factor * difference;
        const Divergence of =
            DivergenceOf(row, difference, output[at + channels], static_cast<double>(image[i]));
        divergences += of.value;
        gradient[at + channels] = static_cast<float>(variance_factor * of.slope);
      }
      args.loss.as<float>()[n] = static_cast<float>(
          (row.weight * squares + args.weight * divergences) / static_cast<double>(count));
    }
    SumLoss(args.loss, args.scale, args.sum);
  }
  void SquaredNorm(const Tensor& x, const Tensor& out) override {
    std::vector<double> sums((x.elements() + kBlock - 1) / kBlock);
    ForEachBlock(x.elements(), [&](int64_t block, int64_t begin, int64_t count) {
      sums[block] = SquareSum(x.as<float>() + begin, count);
    });
    double sum = 0;
    for (const double part : sums) sum += part;
    out.as<float>()[0] = static_cast<float>(sum);
  }
  void Accumulate(const Tensor& a, const Tensor& b) override {
    // Inside a pass this runs on the pass's thread alone (ParallelFor).
    ForEachBlock(a.elements(), [&](int64_t, int64_t begin, int64_t count) {
      AddTo(a.as<float>() + begin, b.as<float>() + begin, count);
    });
  }
  void Update(const UpdateArgs& args) override {
    const float squared = args.squared_norm.as<float>()[0];
    if (!std::isfinite(squared)) return;
    const auto& scalars = *reinterpret_cast<const UpdateScalars*>(args.scalars.as<float>());
    const float norm = std::sqrt(squared);
    const AdamW adamw = {
        .gradient_scale = args.clip > 0 ? std::min(1.0f, args.clip / (norm + 1e-6f)) : 1.0f,
        .decay = scalars.rate * args.weight_decay,
        .m_share = static_cast<float>(1 - args.beta1),
        .v_share = static_cast<float>(1 - args.beta2),
        .step_size = scalars.rate / scalars.correction1,
        .root_correction2 = std::sqrt(scalars.correction2),
        .eps = args.eps};
    ForEachBlock(args.master.elements(), [&](int64_t, int64_t begin, int64_t count) {
      float* master = args.master.as<float>() + begin;
      UpdateWeights(adamw, args.gradient.as<float>() + begin, master, args.m.as<float>() + begin,
                    args.v.as<float>() + begin, count);
      for (size_t i = 0; i < args.averages.size(); ++i)
        MoveAverage(scalars.average_share[i], master, args.averages[i].as<float>() + begin, count);
    });
  }

 private:
  /// sum = scale · Σ loss, in the order of gradients.
  void SumLoss(const Tensor& loss, float scale, const Tensor& to_sum) const {
    if (!to_sum) return;
    SumChunks(loss.dim(0), chunk_rows_, 1, to_sum.as<float>(),
              [&](int64_t begin, int64_t in, float* to) {
                double sum = 0;
                for (int64_t n = begin; n < begin + in; ++n) sum += loss.as<float>()[n];
                *to = static_cast<float>(sum * scale);
              });
  }
  static void FillNormal(uint64_t seed, Purpose purpose, const Tensor& step, uint32_t sample,
                         int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += 4) {
      const Normal4 normal =
          NormalOfBits(Draw(seed, purpose, static_cast<uint32_t>(step.as<int32_t>()[0]), sample,
                            static_cast<uint32_t>(i / 4)));
      std::copy_n(normal.v, std::min<int64_t>(4, count - i), to + i);
    }
  }
  /// MakeSamples() with posteriors instead of images.
  static void MakeLatents(const SamplesArgs& args) {
    const int64_t channels = args.x.dim(3), count = args.x.elements() / args.x.dim(0);
    std::vector<float> draw(count), noise(count);
    for (int64_t n = 0; n < args.x.dim(0); ++n) {
      const SampleRow& row = RowsIn(args.rows)[n];
      DENOISED_CHECK(row.image >= 0 && row.image < args.posteriors.dim(0) && row.flip == 0);
      FillNormal(args.seed, Purpose::kPosterior, args.step, row.sample, count, draw.data());
      FillNormal(args.seed, Purpose::kNoise, args.step, row.sample, count, noise.data());
      const float* from = args.posteriors.as<float>() + row.image * 2 * count;
      for (int64_t i = 0; i < count; ++i) {
        const float* pixel = from + i / channels * 2 * channels + i % channels;
        const float y = pixel[0] + pixel[channels] * draw[i];
        args.x.as<float>()[n * count + i] = row.signal * y + row.noise * noise[i] + row.shift;
        args.target.as<float>()[n * count + i] =
            row.target_signal * y + row.target_noise * noise[i];
        if (args.image) args.image.as<float>()[n * count + i] = y;
      }
      args.condition.as<float>()[n] = row.condition;
      if (args.label) args.label.as<int32_t>()[n] = row.label;
    }
  }

  template <typename Body>
  void Guard(const Body& body) {
    absl::Status failure;
    try {
      body();
      return;
    } catch (const dnnl::error& error) {
      failure = Internal("oneDNN failed ({}): {}", static_cast<int>(error.status), error.what());
    } catch (const std::bad_alloc&) {
      failure = ResourceExhausted("out of memory in a training step; use a smaller batch");
    }
    MutexLock lock(&mutex_);
    if (status_.ok()) status_ = failure;
  }

  /// Between [N, H, W, C] and [N, 2H, 2W, C].
  static void Spread(const Tensor& small, float scale, const Tensor& large) {
    Double(small.as<float>(), scale, small.dim(0) * small.dim(1), small.dim(2), small.dim(3),
           large.as<float>());
  }
  static void Pool(const Tensor& large, float scale, const Tensor& small) {
    SumFours(large.as<float>(), scale, small.dim(0) * small.dim(1), small.dim(2), small.dim(3),
             small.as<float>());
  }

  const dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  int64_t chunk_rows_ = 0;
  Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace
}  // namespace cpu

void OnCpuThreads(int count, const std::function<void(int)>& task) {
  denoised::cpu::ParallelFor(count, [&](int64_t i, int) { task(static_cast<int>(i)); });
}

size_t FreeHostMemory() { return denoised::cpu::ReadMemory().free; }

absl::StatusOr<std::unique_ptr<Backend>> OpenCpuBackend() {
  try {
    return std::make_unique<cpu::CpuBackend>();
  } catch (const dnnl::error& error) {
    return Unavailable("oneDNN does not start on this machine: {}", error.what());
  }
}

}  // namespace denoised::training
