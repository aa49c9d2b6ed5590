// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/latent_preview.h"

#include "engine/backend/counting.h"
#include "engine/core/arena.h"

namespace denoised {
namespace {

// Edge of the flat latents. Their middle is read, away from the padding.
constexpr int64_t kEdge = 8;

}  // namespace

absl::StatusOr<LatentPreview> LatentPreview::Fit(Backend& backend, const Codec& codec) {
  const CodecTraits& traits = codec.traits();
  const int channels = traits.latent_channels;
  LatentPreview preview;
  preview.colours.resize(channels);
  DENOISED_ASSIGN_OR_RETURN(
      const Tensor latents,
      backend.Allocate({1, kEdge, kEdge, channels}, DType::kF32, "latents for a preview"));
  CountingBackend counting(backend);
  Arena measuring = Arena::Measuring(backend.device());
  {
    nn::Context context{counting, measuring};
    codec.Decode(context, latents);
  }
  DENOISED_ASSIGN_OR_RETURN(Tensor block,
                            backend.Allocate({static_cast<int64_t>(measuring.peak())}, DType::kU8,
                                             "activations for a preview"));
  Arena arena(std::move(block));
  const auto colour = [&](int channel, float value) -> absl::StatusOr<std::vector<float>> {
    std::vector<float> flat(latents.elements());
    for (int64_t i = channel; channel >= 0 && i < latents.elements(); i += channels)
      flat[i] = value;
    backend.Upload(flat.data(), latents.bytes(), latents);
    nn::Context context{backend, arena};
    const Tensor decoded = codec.Decode(context, latents);
    DENOISED_ASSIGN_OR_RETURN(const Tensor pixels, backend.BeginDownload(decoded)->Wait());
    const int64_t edge = pixels.dim(1), first = edge / 4, last = edge - first;
    const int64_t image_channels = pixels.dim(3);
    std::vector<double> sums(image_channels);
    for (int64_t y = first; y < last; ++y)
      for (int64_t x = first; x < last; ++x)
        for (int64_t c = 0; c < image_channels; ++c)
          sums[c] += pixels.as<float>()[(y * edge + x) * image_channels + c];
    std::vector<float> mean(image_channels);
    for (int64_t c = 0; c < image_channels; ++c)
      mean[c] = static_cast<float>(sums[c] / static_cast<double>((last - first) * (last - first)));
    return mean;
  };
  DENOISED_ASSIGN_OR_RETURN(preview.grey, colour(-1, 0));
  for (int channel = 0; channel < channels; ++channel) {
    DENOISED_ASSIGN_OR_RETURN(const auto above, colour(channel, 1));
    DENOISED_ASSIGN_OR_RETURN(const auto below, colour(channel, -1));
    for (size_t c = 0; c < above.size(); ++c)
      preview.colours[channel].push_back((above[c] - below[c]) / 2);
  }
  return preview;
}

Tensor LatentPreview::Draw(const Tensor& latents) const {
  const int64_t pixels = latents.dim(0) * latents.dim(1), channels = latents.dim(2);
  const auto image_channels = static_cast<int64_t>(grey.size());
  Tensor picture = Tensor::Host({latents.dim(0), latents.dim(1), image_channels}, DType::kF32);
  for (int64_t p = 0; p < pixels; ++p) {
    const float* from = latents.as<float>() + p * channels;
    float* to = picture.as<float>() + p * image_channels;
    for (int64_t c = 0; c < image_channels; ++c) {
      float value = grey[c];
      for (int64_t l = 0; l < channels; ++l) value += from[l] * colours[l][c];
      to[c] = value;
    }
  }
  return picture;
}

}  // namespace denoised
