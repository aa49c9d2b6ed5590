// SPDX-License-Identifier: Apache-2.0
#include "engine/images/formats.h"

#include "engine/images/jpeg.h"
#include "engine/images/webp.h"

namespace denoised {

const char* MimeType(FileFormat format) {
  switch (format) {
    case FileFormat::kPng:
      return "image/png";
    case FileFormat::kJpeg:
      return "image/jpeg";
    case FileFormat::kWebp:
      return "image/webp";
  }
  DENOISED_CHECK(false, "format {}", static_cast<int>(format));
  return "";
}

absl::StatusOr<std::string> EncodeFile(const Tensor& image, FileFormat format, int quality,
                                       const TextEntries& texts, const ParallelFor& parallel_for) {
  const Pixels pixels = ToPixels(image, parallel_for);
  switch (format) {
    case FileFormat::kPng:
      return EncodePng(pixels, texts, parallel_for);
    case FileFormat::kJpeg:
      return EncodeJpeg(pixels, quality, parallel_for);
    case FileFormat::kWebp:
      return EncodeWebp(pixels, quality);
  }
  return Internal("image format {}", static_cast<int>(format));
}

absl::StatusOr<Pixels> DecodeFile(std::string_view file, int64_t max_pixels,
                                  const ReserveMemory& reserve, Alpha alpha) {
  if (file.empty()) return InvalidArgument("the image is empty; use a PNG, JPEG or WebP file");
  if (file.substr(0, 8) == "\x89PNG\r\n\x1a\n") {
    return DecodePng(file, max_pixels, reserve, alpha);
  }
  if (file.substr(0, 3) == "\xff\xd8\xff") return DecodeJpeg(file, max_pixels, reserve);
  if (file.substr(0, 4) == "RIFF" && file.size() >= 12 && file.substr(8, 4) == "WEBP") {
    return DecodeWebp(file, max_pixels, reserve, alpha);
  }
  return InvalidArgument("the image is neither PNG, JPEG nor WebP; convert it to one of them");
}

}  // namespace denoised
