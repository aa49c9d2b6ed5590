// SPDX-License-Identifier: Apache-2.0
#include "engine/training/latents.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "engine/core/mutex.h"
#include "engine/training/task.h"

namespace denoised::training {
namespace {

/// Pictures per pass. Fixed, so that the bits do not depend on the number of threads.
int64_t RowsOfPass(const Backend& backend) {
  return backend.device() == denoised::Device::kCpu ? 8 : 64;
}

absl::Status CheckEdges(const AutoencoderKLConfig& config, const Shape& pictures) {
  const int64_t height = pictures[1], width = pictures[2], factor = config.vae.factor();
  if (height % factor == 0 && width % factor == 0) return absl::OkStatus();
  return InvalidArgument(
      "the pictures are {} × {}, but the autoencoder needs multiples of {}; set sample_size", width,
      height, factor);
}

Tensor Encode(Backend& backend, const AutoencoderKL& model, const Parameters& parameters,
              const Tensor& weights, Arena& arena, const Tensor& x) {
  Pass pass{.backend = backend,
            .arena = arena,
            .parameters = parameters,
            .trained = {},
            .fixed = weights,
            .recompute_norms = true,  // drops a norm's output within a module, too
            .forward_only = true};
  AutoencoderKL::Kept kept;
  return model.Encode(pass, x, &kept);
}

/// The memory of a pass over pictures of shape [rows, H, W, C], by counting.
struct EncodingCount {
  size_t activation_bytes = 0;
  int64_t elements = 0;  // of the weights
  Cost cost;
};
absl::StatusOr<EncodingCount> CountEncoding(const Backend& backend,
                                            const AutoencoderKLConfig& config, const Shape& shape) {
  EncodingCount count;
  Parameters parameters;
  const std::unique_ptr<Backend> counting =
      NewCountingBackend(backend.activation_dtype(), &count.cost);
  DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<AutoencoderKL> model,
                            AutoencoderKL::Make(Declare(*counting, parameters).Frozen(), config));
  count.elements = parameters.fixed_elements();
  DENOISED_ASSIGN_OR_RETURN(const Tensor weights,
                            counting->Allocate({count.elements}, DType::kF32, ""));
  DENOISED_ASSIGN_OR_RETURN(const Tensor x,
                            counting->Allocate(shape, backend.activation_dtype(), ""));
  Arena arena = Arena::Measuring(backend.device());
  Encode(*counting, *model, parameters, weights, arena, x);
  count.activation_bytes = arena.peak();
  return count;
}

/// Moments [M, h, w, 2C] of pictures: mean, then the logarithm of the variance.
absl::StatusOr<Tensor> Moments(Backend& backend, const AutoencoderKLConfig& config,
                               const AutoencoderWeights& weights, const Tensor& pictures,
                               bool mirrored, const std::atomic<bool>* stop) {
  const int64_t count = pictures.dim(0), height = pictures.dim(1), width = pictures.dim(2),
                channels = pictures.dim(3), factor = config.vae.factor();
  DENOISED_RETURN_IF_ERROR(CheckEdges(config, pictures.shape()));
  Parameters parameters;
  DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<AutoencoderKL> model,
                            AutoencoderKL::Make(Declare(backend, parameters).Frozen(), config));
  DENOISED_ASSIGN_OR_RETURN(const Tensor fixed, backend.Allocate({parameters.fixed_elements()},
                                                                 DType::kF32, "the autoencoder"));
  for (size_t i = 0; i < parameters.all().size(); ++i) {
    const Parameter& parameter = parameters[static_cast<int>(i)];
    const Tensor& from = weights.at(parameter.name);
    DENOISED_CHECK(from.shape() == parameter.shape, "{}", parameter.name);
    backend.Upload(from.data(), from.bytes(), parameters.Part(fixed, static_cast<int>(i)));
  }
  model->Pack({backend, parameters, {}, fixed});
  const int64_t pass_rows = RowsOfPass(backend);

  const Shape shape{pass_rows, height, width, channels};
  DENOISED_ASSIGN_OR_RETURN(const EncodingCount counted, CountEncoding(backend, config, shape));

  struct Worker {
    Arena arena;
    Tensor pictures, rows, step, x, target, condition;
  };
  const auto open = [&]() -> absl::StatusOr<Worker> {
    const auto allocate = [&](const Shape& of, DType dtype) {
      return backend.Allocate(of, dtype, "the pictures of a pass");
    };
    DENOISED_ASSIGN_OR_RETURN(
        Tensor block, backend.Allocate({static_cast<int64_t>(counted.activation_bytes)}, DType::kU8,
                                       "activations of the autoencoder"));
    Worker worker{Arena(std::move(block)), {}, {}, {}, {}, {}, {}};
    DENOISED_ASSIGN_OR_RETURN(worker.pictures, allocate(shape, DType::kU8));
    DENOISED_ASSIGN_OR_RETURN(worker.rows, allocate({pass_rows, kSampleNumbers}, DType::kI32));
    DENOISED_ASSIGN_OR_RETURN(worker.step, allocate({1}, DType::kI32));
    DENOISED_ASSIGN_OR_RETURN(worker.x, allocate(shape, backend.activation_dtype()));
    DENOISED_ASSIGN_OR_RETURN(worker.target, allocate(shape, DType::kF32));
    DENOISED_ASSIGN_OR_RETURN(worker.condition, allocate({pass_rows}, DType::kF32));
    return worker;
  };
  std::vector<std::optional<Worker>> workers(backend.workers());
  const int64_t total = mirrored ? 2 * count : count, passes = (total + pass_rows - 1) / pass_rows;
  const int64_t latent = height / factor * (width / factor) * 2 * config.vae.latent_channels;
  Tensor moments = Tensor::Host(
      {total, height / factor, width / factor, 2 * int64_t{config.vae.latent_channels}},
      DType::kF32);
  Mutex mutex;
  absl::Status failure;
  const auto pass = [&](int64_t index, int worker) -> absl::Status {
    if (stop != nullptr && *stop) return Cancelled("stopped while pictures were encoded");
    std::optional<Worker>& at = workers[worker];
    if (!at) {
      DENOISED_ASSIGN_OR_RETURN(at, open());
    }
    // Samples without noise; rows after the last picture repeat it.
    const size_t each = pictures.bytes() / static_cast<size_t>(count);
    std::vector<uint8_t> pixels(static_cast<size_t>(pass_rows) * each);
    std::vector<SampleRow> plan(static_cast<size_t>(pass_rows));
    for (int64_t n = 0; n < pass_rows; ++n) {
      const int64_t row = std::min(index * pass_rows + n, total - 1);
      std::copy_n(pictures.as<uint8_t>() + row % count * static_cast<int64_t>(each), each,
                  pixels.data() + n * static_cast<int64_t>(each));
      plan[n] = {.image = n, .flip = row < count ? 0 : 1, .signal = 1, .noise = 0};
    }
    backend.Upload(pixels.data(), pixels.size(), at->pictures);
    backend.Upload(plan.data(), plan.size() * sizeof(SampleRow), at->rows);
    backend.MakeSamples({.images = at->pictures,
                         .rows = at->rows,
                         .step = at->step,
                         .x = at->x,
                         .target = at->target,
                         .condition = at->condition});
    DENOISED_ASSIGN_OR_RETURN(
        const Tensor done,
        backend.Download(Encode(backend, *model, parameters, fixed, at->arena, at->x)));
    std::copy_n(done.as<float>(), std::min(pass_rows, total - index * pass_rows) * latent,
                moments.as<float>() + index * pass_rows * latent);
    return absl::OkStatus();
  };
  const int64_t chunk_rows = backend.chunk_rows();  // restored afterwards for the caller's run
  backend.SetChunkRows(pass_rows);
  backend.ForEachPass(passes, [&](int64_t index, int worker) {
    const absl::Status status = pass(index, worker);
    MutexLock lock(&mutex);
    failure.Update(status);
  });
  backend.SetChunkRows(chunk_rows);
  DENOISED_RETURN_IF_ERROR(failure);
  DENOISED_RETURN_IF_ERROR(backend.status());
  return moments;
}

/// diffusers clamps the logarithm to these bounds.
double DeviationOf(float log_variance) {
  return std::exp(0.5 * std::clamp(static_cast<double>(log_variance), -30.0, 20.0));
}

}  // namespace

absl::StatusOr<AutoencoderWeights> ReadAutoencoder(const AutoencoderKLConfig& config,
                                                   const Weights& weights) {
  Cost cost;
  Parameters parameters;
  const std::unique_ptr<Backend> counting = NewCountingBackend(DType::kF32, &cost);
  DENOISED_RETURN_IF_ERROR(
      AutoencoderKL::Make(Declare(*counting, parameters).Frozen(), config).status());
  const Tensor fixed = Tensor::Host({parameters.fixed_elements()}, DType::kF32);
  DENOISED_RETURN_IF_ERROR(parameters.Load(weights, {}, fixed));
  AutoencoderWeights named;
  for (const auto& [name, part] : parameters.Named({}, fixed))
    named[name] = Tensor::HostF32(part.shape(), part.ToFloats());
  return named;
}

absl::StatusOr<Tensor> EncodePosteriors(Backend& backend, const AutoencoderKLConfig& config,
                                        const AutoencoderWeights& weights, const Tensor& pictures,
                                        bool mirrored, const std::atomic<bool>* stop) {
  DENOISED_ASSIGN_OR_RETURN(Tensor moments,
                            Moments(backend, config, weights, pictures, mirrored, stop));
  const int64_t channels = config.vae.latent_channels;
  for (int64_t i = 0; i < moments.elements(); i += 2 * channels) {
    for (int64_t c = 0; c < channels; ++c) {
      float* mean = moments.as<float>() + i + c;
      const double shift =
          config.latents_mean.empty() ? config.shift_factor : config.latents_mean[c];
      const double scale =
          config.vae.scaling_factor / (config.latents_std.empty() ? 1 : config.latents_std[c]);
      mean[0] = static_cast<float>((mean[0] - shift) * scale);
      mean[channels] = static_cast<float>(DeviationOf(mean[channels]) * scale);
    }
  }
  return moments;
}

absl::StatusOr<size_t> EncodingBytes(const Backend& backend, const AutoencoderKLConfig& config,
                                     const Shape& pictures, bool mirrored) {
  DENOISED_RETURN_IF_ERROR(CheckEdges(config, pictures));
  const int64_t pass_rows = RowsOfPass(backend);
  const Shape shape{pass_rows, pictures[1], pictures[2], pictures[3]};
  DENOISED_ASSIGN_OR_RETURN(const EncodingCount counted, CountEncoding(backend, config, shape));
  const int64_t total = (mirrored ? 2 : 1) * pictures[0],
                workers = std::min<int64_t>(backend.workers(), (total + pass_rows - 1) / pass_rows);
  // A picture as it is, as the network reads it, and as MakeSamples()'s target.
  const size_t pixel = SizeOf(DType::kU8) + SizeOf(backend.activation_dtype()) + sizeof(float);
  const size_t of_worker = counted.activation_bytes + static_cast<size_t>(shape.elements()) * pixel;
  return static_cast<size_t>(workers) * of_worker +
         static_cast<size_t>(counted.elements) * sizeof(float) +
         PackedBytes(backend, counted.elements, counted.cost);
}

absl::Status StandardizeLatents(Backend& backend, const AutoencoderKLConfig& config,
                                const Tensor& pictures, AutoencoderWeights* weights) {
  if (!config.use_quant_conv || !config.use_post_quant_conv)
    return InvalidArgument(
        "use_quant_conv and use_post_quant_conv must be true: what latents are scaled by is put "
        "into these convolutions");
  DENOISED_ASSIGN_OR_RETURN(const Tensor moments, Moments(backend, config, *weights, pictures,
                                                          /*mirrored=*/false, /*stop=*/nullptr));
  const int64_t n = config.vae.latent_channels, pixels = moments.elements() / (2 * n);
  std::vector<double> center(n), scale(n);
  for (int64_t c = 0; c < n; ++c) {
    double sum = 0, square = 0, variance = 0;
    for (int64_t p = 0; p < pixels; ++p) {
      const float* at = moments.as<float>() + p * 2 * n + c;
      sum += at[0];
      square += static_cast<double>(at[0]) * at[0];
      variance += std::pow(DeviationOf(at[n]), 2);
    }
    const auto count = static_cast<double>(pixels);
    center[c] = sum / count;
    scale[c] = std::sqrt(std::max(0.0, square / count - center[c] * center[c]) + variance / count);
    // Of an infinite mean, std::max() above takes 0 for the NaN.
    if (!(scale[c] > 0) || !std::isfinite(scale[c]) || !std::isfinite(center[c]))
      return FailedPrecondition(
          "latent channel {} has a mean of {} and a deviation of {}, so it cannot be scaled to 0 "
          "and 1; lower --learning-rate, or start from other weights",
          c, center[c], scale[c]);
  }
  // Copies, since the map's tensors may be views of a run's state.
  const auto copy = [&](const char* name) {
    Tensor& tensor = weights->at(name);
    tensor = Tensor::HostF32(tensor.shape(), tensor.ToFloats());
    return tensor.as<float>();
  };
  float* const outward = copy("quant_conv.weight");
  float* const outward_bias = copy("quant_conv.bias");
  float* const inward = copy("post_quant_conv.weight");
  float* const inward_bias = copy("post_quant_conv.bias");
  for (int64_t c = 0; c < n; ++c) {
    for (int64_t i = 0; i < 2 * n; ++i)
      outward[c * 2 * n + i] = static_cast<float>(outward[c * 2 * n + i] / scale[c]);
    outward_bias[c] = static_cast<float>((outward_bias[c] - center[c]) / scale[c]);
    outward_bias[n + c] -= static_cast<float>(2 * std::log(scale[c]));
  }
  for (int64_t o = 0; o < n; ++o) {
    double bias = inward_bias[o];
    for (int64_t c = 0; c < n; ++c) {
      bias += inward[o * n + c] * center[c];
      inward[o * n + c] = static_cast<float>(inward[o * n + c] * scale[c]);
    }
    inward_bias[o] = static_cast<float>(bias);
  }
  return absl::OkStatus();
}

}  // namespace denoised::training
