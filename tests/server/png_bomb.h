// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <zlib.h>

#include <cstdint>
#include <string>

namespace denoised {

/// A grey PNG of zeros that says it is so large; its data are for `rows` of them.
inline std::string PngBomb(uint32_t width, uint32_t height, size_t rows) {
  const auto big_endian = [](uint32_t value) {
    std::string bytes;
    for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(value >> shift);
    return bytes;
  };
  const auto chunk = [&](const std::string& type, const std::string& data) {
    const std::string body = type + data;
    const auto sum = static_cast<uint32_t>(
        crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size())));
    return big_endian(static_cast<uint32_t>(data.size())) + body + big_endian(sum);
  };
  const std::string pixels((size_t{width} + 1) * rows, '\0');
  uLongf size = compressBound(pixels.size());
  std::string packed(size, '\0');
  compress2(reinterpret_cast<Bytef*>(packed.data()), &size,
            reinterpret_cast<const Bytef*>(pixels.data()), pixels.size(), 9);
  packed.resize(size);
  return "\x89PNG\r\n\x1a\n" +
         chunk("IHDR",
               big_endian(width) + big_endian(height) + std::string("\x08\x00\x00\x00\x00", 5)) +
         chunk("IDAT", packed) + chunk("IEND", "");
}

}  // namespace denoised
