// SPDX-License-Identifier: Apache-2.0
#include "command/image_hashes.h"

#include <fmt/format.h>

#include <charconv>
#include <functional>
#include <string_view>

namespace denoised::command {

uint64_t HashOf(const client::Image& image) {
  const auto* tensor = std::get_if<client::Tensor>(&image.content);
  const std::string_view bytes = tensor ? tensor->data : std::get<std::string>(image.content);
  return std::hash<std::string_view>()(bytes);  // the same in every process, unlike absl::Hash
}

std::string ImageKey(const client::EffectiveParams& params, const client::Image& image) {
  return fmt::format(
      "{} seed={} label={} sampler={} schedule={} steps={} guidance={} {}x{} {}", params.model,
      image.seed, image.class_label ? fmt::format("{}", *image.class_label) : "none",
      client::Name(params.sampler), client::Name(params.noise_schedule), params.steps,
      params.guidance_scale, image.width, image.height, image.mime_type);
}

void ImageHashes::Add(const std::string& key, uint64_t hash) {
  const auto [found, added] = hashes_.emplace(key, hash);
  if (!added && found->second != hash) differences_.insert(key);
}

int64_t ImageHashes::CompareWith(const ImageHashes& earlier) {
  int64_t compared = 0;
  for (const auto& [key, hash] : earlier.hashes_) {
    if (!hashes_.count(key)) continue;
    ++compared;
    Add(key, hash);
  }
  return compared;
}

nlohmann::json ImageHashes::ToJson() const {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [key, hash] : hashes_) json[key] = fmt::format("{:016x}", hash);
  return json;
}

absl::StatusOr<ImageHashes> ImageHashes::FromJson(const nlohmann::json& json) {
  ImageHashes hashes;
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        "it holds no image_hashes; use a file of denoise bench --json");
  }
  for (const auto& [key, value] : json.items()) {
    const std::string text = value.is_string() ? value.get<std::string>() : "";
    uint64_t hash = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), hash, 16);
    if (error != std::errc() || end != text.data() + text.size()) {
      return absl::InvalidArgumentError(
          fmt::format("image_hashes: \"{}\" has no hash of hexadecimal digits", key));
    }
    hashes.Add(key, hash);
  }
  return hashes;
}

}  // namespace denoised::command
