// SPDX-License-Identifier: Apache-2.0
#include "server/jobs/rendering.h"

#include <algorithm>
#include <vector>

#include "engine/images/formats.h"
#include "server/status/model_name.h"
#include "server/version.h"

namespace denoised {
namespace {

FileFormat ToFileFormat(v1::ImageFormat format) {
  DENOISED_CHECK(IsFile(format), "format {}", static_cast<int>(format));
  return format == v1::IMAGE_FORMAT_PNG    ? FileFormat::kPng
         : format == v1::IMAGE_FORMAT_JPEG ? FileFormat::kJpeg
                                           : FileFormat::kWebp;
}

}  // namespace

bool IsFile(v1::ImageFormat format) {
  return format == v1::IMAGE_FORMAT_PNG || format == v1::IMAGE_FORMAT_JPEG ||
         format == v1::IMAGE_FORMAT_WEBP;
}

const char* FormatLabel(v1::ImageFormat format) {
  switch (format) {
    case v1::IMAGE_FORMAT_PNG:
      return "png";
    case v1::IMAGE_FORMAT_JPEG:
      return "jpeg";
    case v1::IMAGE_FORMAT_WEBP:
      return "webp";
    default:
      return "raw";
  }
}

TextEntries Metadata(const EffectiveJob& job, const ImageResult& image) {
  const SamplerParams& sampler = job.spec.sampler;
  TextEntries texts = {
      {"Software", std::string("denoised ") + kVersion},
      {"model", ModelOf(job.spec.model)},
      {"precision", job.precision},
      {"seed", fmt::format("{}", image.seed)},
      // As requested: with an init image fewer are run.
      {"steps", fmt::format("{}", sampler.steps)},
      {"evaluations", fmt::format("{}", job.evaluations)},
      {"guidance_scale", fmt::format("{}", job.spec.guidance_scale.value_or(1.0))},
      {"strength", fmt::format("{}", sampler.strength)},
  };
  for (const auto& [name, value] :
       {std::pair{"image_guidance_scale", job.spec.image_guidance_scale},
        std::pair{"guidance_rescale", job.spec.guidance_rescale},
        std::pair{"guidance_start", job.spec.guidance_start},
        std::pair{"guidance_stop", job.spec.guidance_stop}, std::pair{"eta", sampler.eta},
        std::pair{"s_churn", sampler.s_churn}, std::pair{"s_tmin", sampler.s_tmin},
        std::pair{"s_tmax", sampler.s_tmax}, std::pair{"s_noise", sampler.s_noise}}) {
    if (value) texts.push_back({name, fmt::format("{}", *value)});
  }
  if (sampler.sampler) texts.push_back({"sampler", std::string(Name(*sampler.sampler))});
  if (sampler.schedule) texts.push_back({"noise_schedule", std::string(Name(*sampler.schedule))});
  if (sampler.solver_order) {
    texts.push_back({"solver_order", fmt::format("{}", *sampler.solver_order)});
  }
  if (image.label >= 0) texts.push_back({"class_label", fmt::format("{}", image.label)});
  if (const auto& prompts = job.spec.prompts; !prompts.empty()) {
    // Under the names of diffusers' arguments.
    const TextPrompt& prompt = prompts[prompts.size() == 1 ? 0 : image.index];
    texts.push_back({"prompt", prompt.text});
    for (const auto& [name, text] :
         {std::pair{"negative_prompt", &prompt.negative}, std::pair{"prompt_2", &prompt.text_2},
          std::pair{"negative_prompt_2", &prompt.negative_2}}) {
      if (*text) texts.push_back({name, **text});
    }
    if (job.spec.clip_skip > 0) {
      texts.push_back({"clip_skip", fmt::format("{}", job.spec.clip_skip)});
    }
    texts.push_back({"max_chunks", fmt::format("{}", job.spec.max_chunks)});
  }
  for (const auto& [name, pair] : {std::pair{"original_size", job.spec.sizes.original_size},
                                   std::pair{"crops_coords_top_left", job.spec.sizes.crop},
                                   std::pair{"target_size", job.spec.sizes.target_size}}) {
    if (pair) texts.push_back({name, fmt::format("({}, {})", (*pair)[0], (*pair)[1])});
  }
  return texts;
}

absl::StatusOr<v1::Image> Render(const ImageResult& result, const Rendering& rendering,
                                 const TextEntries& texts, const ParallelFor& parallel_for) {
  const Tensor pixels = rendering.max_edge > 0
                            ? FitWithin(result.pixels, rendering.max_edge, parallel_for)
                            : result.pixels;
  v1::Image image;
  image.set_index(result.index);
  image.set_seed(result.seed);
  if (result.label >= 0) image.set_class_label(result.label);
  image.set_height(static_cast<int32_t>(pixels.dim(0)));
  image.set_width(static_cast<int32_t>(pixels.dim(1)));
  if (IsFile(rendering.format)) {
    const FileFormat format = ToFileFormat(rendering.format);
    DENOISED_ASSIGN_OR_RETURN(std::string file,
                              EncodeFile(pixels, format, rendering.quality, texts, parallel_for));
    image.set_mime_type(MimeType(format));
    image.set_encoded(std::move(file));
    return image;
  }
  image.set_mime_type("application/octet-stream");
  v1::Tensor& tensor = *image.mutable_tensor();
  for (int i = 0; i < 3; ++i) tensor.add_shape(pixels.dim(i));
  if (rendering.format == v1::IMAGE_FORMAT_RAW_FLOAT32) {
    tensor.set_data_type(v1::DATA_TYPE_FLOAT32);
    tensor.set_data(pixels.data(), pixels.bytes());
  } else {
    tensor.set_data_type(v1::DATA_TYPE_UINT8);
    const std::vector<uint8_t> bytes = ToBytes(pixels, parallel_for);
    tensor.set_data(bytes.data(), bytes.size());
  }
  return image;
}

}  // namespace denoised
