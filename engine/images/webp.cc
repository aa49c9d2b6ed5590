// SPDX-License-Identifier: Apache-2.0
#include "engine/images/webp.h"

#include <webp/decode.h>
#include <webp/encode.h>

#include <utility>

#include "engine/images/exif.h"

namespace denoised {
namespace {

/// The EXIF of a file, a RIFF container as the WebP specification has it; empty if there is none.
/// By hand: libwebp itself hands out no chunks.
std::string_view ExifOf(std::string_view file) {
  constexpr size_t kFileHeader = 12, kChunkHeader = 8, kFlags = 20;
  constexpr unsigned char kHasExif = 0x08;
  if (file.size() <= kFlags || file.substr(kFileHeader, 4) != "VP8X" ||
      (static_cast<unsigned char>(file[kFlags]) & kHasExif) == 0) {
    return {};
  }
  for (size_t at = kFileHeader; at + kChunkHeader <= file.size();) {
    size_t size = 0;
    for (size_t i = 0; i < 4; ++i) {
      size |= size_t{static_cast<unsigned char>(file[at + 4 + i])} << 8 * i;
    }
    if (file.substr(at, 4) == "EXIF") return file.substr(at + kChunkHeader, size);
    at += kChunkHeader + size + size % 2;
  }
  return {};
}

}  // namespace

absl::StatusOr<std::string> EncodeWebp(const Pixels& pixels, int quality) {
  std::vector<uint8_t> rgb;
  const uint8_t* samples = pixels.samples.data();
  if (pixels.channels == 1) {  // libwebp has no grey input
    rgb.reserve(pixels.samples.size() * 3);
    for (const uint8_t grey : pixels.samples) rgb.insert(rgb.end(), 3, grey);
    samples = rgb.data();
  }
  uint8_t* output = nullptr;
  const size_t size =
      WebPEncodeRGB(samples, pixels.width, pixels.height, pixels.width * 3, quality, &output);
  if (size == 0) {
    return Internal("cannot encode {}×{} pixels as WebP", pixels.width, pixels.height);
  }
  std::string file(reinterpret_cast<char*>(output), size);
  WebPFree(output);
  return file;
}

absl::StatusOr<Pixels> DecodeWebp(std::string_view file, int64_t max_pixels,
                                  const ReserveMemory& reserve, Alpha alpha) {
  const auto* data = reinterpret_cast<const uint8_t*>(file.data());
  WebPBitstreamFeatures features;
  if (WebPGetFeatures(data, file.size(), &features) != VP8_STATUS_OK) {
    return InvalidArgument("the WebP cannot be read; use an intact file");
  }
  if (features.has_animation) {
    return InvalidArgument("the WebP is animated; use a single picture");
  }
  const int64_t count = int64_t{features.width} * features.height;
  // RGBA, then RGB, and within libwebp the frame as YUV or, when it is lossless, as 32 bits.
  DENOISED_RETURN_IF_ERROR(
      CheckSize("WebP", features.width, features.height, max_pixels, 4 + 3 + 4, reserve));
  const bool blend = alpha == Alpha::kOverWhite;
  const int channels = blend ? 4 : 3;
  std::vector<uint8_t> samples(count * channels);
  const auto decode = blend ? WebPDecodeRGBAInto : WebPDecodeRGBInto;
  if (decode(data, file.size(), samples.data(), samples.size(), features.width * channels) ==
      nullptr) {
    return InvalidArgument("the WebP is damaged; use an intact file");
  }
  if (blend) samples = OverWhite(samples, 3);
  Pixels pixels{features.width, features.height, 3, std::move(samples)};
  return Upright(std::move(pixels), ReadOrientation(ExifOf(file)));
}

}  // namespace denoised
