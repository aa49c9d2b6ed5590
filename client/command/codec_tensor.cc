// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "command/codec.h"
#include "command/codec_files.h"

namespace denoised::command {
namespace {

absl::StatusOr<Pixels> DecodeTensor(const client::Tensor& tensor) {
  const auto& shape = tensor.shape;
  const bool sane = shape.size() == 3 && shape[0] >= 1 && shape[0] <= 1 << 16 && shape[1] >= 1 &&
                    shape[1] <= 1 << 16 && (shape[2] == 1 || shape[2] == 3);
  const bool is_float = tensor.type == client::Tensor::Type::kFloat32;
  const size_t elements = sane ? shape[0] * shape[1] * shape[2] : 0;
  if (!sane || tensor.data.size() != elements * (is_float ? sizeof(float) : 1)) {
    return absl::DataLossError(
        fmt::format("an image came as an array of shape [{}] in {} bytes, which cannot be shown; "
                    "use --format npy to look at it",
                    fmt::join(shape, ", "), tensor.data.size()));
  }
  Pixels pixels =
      Blank(static_cast<int>(shape[1]), static_cast<int>(shape[0]), static_cast<int>(shape[2]));
  for (size_t i = 0; i < elements; ++i) {
    if (!is_float) {
      pixels.data[i] = static_cast<uint8_t>(tensor.data[i]);
      continue;
    }
    float value;
    std::memcpy(&value, tensor.data.data() + i * sizeof value, sizeof value);
    // max(-1, NaN) is -1: what is not a number shows black.
    value = std::min(std::max(-1.0f, value), 1.0f);
    pixels.data[i] = static_cast<uint8_t>(std::lround((value + 1) * 127.5f));
  }
  return pixels;
}

}  // namespace

absl::StatusOr<Pixels> Decode(const client::Image& image) {
  if (const auto* tensor = std::get_if<client::Tensor>(&image.content)) {
    return DecodeTensor(*tensor);
  }
  const std::string& file = std::get<std::string>(image.content);
  if (image.mime_type == "image/png") return DecodePng(file);
  if (image.mime_type == "image/jpeg") return DecodeJpeg(file);
  if (image.mime_type == "image/webp") return DecodeWebp(file);
  return absl::UnimplementedError(
      fmt::format("images of type {} cannot be shown; use --format png", image.mime_type));
}

}  // namespace denoised::command
