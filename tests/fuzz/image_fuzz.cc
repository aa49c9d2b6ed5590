// SPDX-License-Identifier: Apache-2.0
#include <zlib.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "engine/images/formats.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

constexpr int64_t kMaxPixels = 1 << 14;

uint32_t BigEndian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

/// Makes the checksum of every chunk right, or no mutation would get past the first.
void RepairPng(uint8_t* data, size_t size) {
  constexpr size_t kSignature = 8, kFraming = 12;  // length, type, checksum
  if (std::string_view(reinterpret_cast<char*>(data), size).substr(0, 4) != "\x89PNG") return;
  for (size_t at = kSignature; at + kFraming <= size;) {
    const size_t length = BigEndian(data + at);
    if (length > size - at - kFraming) return;
    const uint32_t sum =
        static_cast<uint32_t>(crc32(0, data + at + 4, static_cast<unsigned>(length + 4)));
    uint8_t* const checksum = data + at + 8 + length;
    for (int i = 0; i < 4; ++i) checksum[i] = static_cast<uint8_t>(sum >> (24 - 8 * i));
    at += kFraming + length;
  }
}

}  // namespace

/// Any bytes are refused with a message that a reply can hold, or are a picture within the bound
/// whose samples all can be read and used as an init image.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  const auto transparency = denoised::DecodePngTransparency(file, kMaxPixels);
  if (transparency.ok() && transparency->samples.size() !=
                               static_cast<size_t>(transparency->width) * transparency->height)
    std::abort();
  const auto pixels = denoised::DecodeFile(file, kMaxPixels);
  if (!pixels.ok()) {
    if (pixels.status().code() != absl::StatusCode::kInvalidArgument) std::abort();
    const auto message = pixels.status().message();
    if (message.empty()) std::abort();
    for (const char c : message)
      if (static_cast<unsigned char>(c) < ' ') std::abort();
    return 0;
  }
  if (pixels->width < 1 || pixels->height < 1 ||
      int64_t{pixels->width} * pixels->height > kMaxPixels)
    std::abort();
  if (pixels->channels != 1 && pixels->channels != 3) std::abort();
  if (pixels->samples.size() !=
      static_cast<size_t>(pixels->width) * pixels->height * pixels->channels)
    std::abort();
  const auto colours = denoised::DecodeFile(file, kMaxPixels, nullptr, denoised::Alpha::kIgnored);
  if (colours.ok() && (colours->width != pixels->width || colours->height != pixels->height ||
                       colours->samples.size() != pixels->samples.size()))
    std::abort();
  for (const int channels : {1, 3}) {
    for (const auto filter :
         {denoised::ResizeFilter::kTriangle, denoised::ResizeFilter::kLanczos}) {
      const denoised::Tensor image =
          denoised::Resize(denoised::FromPixels(*pixels, channels), 8, 12, filter);
      if (image.shape() != denoised::Shape({8, 12, channels})) std::abort();
      for (const float value : image.span<float>())
        if (!(std::abs(value) <= 1 + 1e-5f)) std::abort();
    }
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 16 != 0) RepairPng(data, size);
  return size;
}
