// SPDX-License-Identifier: Apache-2.0
#include "engine/images/jpeg.h"

#include <turbojpeg.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace denoised {
namespace {

using Codec = std::unique_ptr<void, int (*)(tjhandle)>;

Codec Own(tjhandle codec) { return {codec, tjDestroy}; }

absl::Status Damaged(const Codec& codec) {
  return InvalidArgument("the JPEG cannot be read: {}; send an intact RGB or grey file",
                         tjGetErrorStr2(codec.get()));
}

/// A progressive file may hold any number of scans, each over all pixels. Encoders write about ten.
constexpr int kMaxScans = 64;

unsigned Byte(std::string_view text, size_t at) { return static_cast<unsigned char>(text[at]); }

/// The Orientation of EXIF in the content of an APP1 segment, 1 to 8; 1, upright, where there is
/// none. By hand: TurboJPEG does not hand out segments, and libexif unpacks all other tags too,
/// those of camera makers among them.
int ReadOrientation(std::string_view segment) {
  constexpr std::string_view kExif("Exif\0\0", 6);
  constexpr size_t kEntryBytes = 12;
  constexpr unsigned kOrientation = 0x0112, kShort = 3;
  if (segment.substr(0, kExif.size()) != kExif) return 1;
  const std::string_view tiff = segment.substr(kExif.size());
  const bool little_endian = tiff.substr(0, 2) == "II";
  const auto number = [&](size_t at, size_t size) {
    unsigned value = 0;
    if (at + size > tiff.size()) return value;
    for (size_t i = 0; i < size; ++i) {
      value = value << 8 | Byte(tiff, at + (little_endian ? size - 1 - i : i));
    }
    return value;
  };
  const size_t directory = number(4, 4), entries = number(directory, 2);
  for (size_t i = 0; i < entries; ++i) {
    const size_t entry = directory + 2 + i * kEntryBytes;
    if (number(entry, 2) != kOrientation || number(entry + 2, 2) != kShort) continue;
    const unsigned value = number(entry + 8, 2);
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

struct Segments {
  int scans = 0;
  int orientation = 1;
};

/// Reads the segments of a file, by their lengths, as a thumbnail in one of them is a JPEG too.
/// What follows the end of the image is not read by libjpeg either.
Segments ReadSegments(std::string_view file) {
  constexpr unsigned kSos = 0xda, kEoi = 0xd9, kApp1 = 0xe1;
  Segments segments;
  size_t at = 0;
  while ((at = file.find('\xff', at)) != std::string_view::npos && at + 3 < file.size()) {
    const unsigned marker = Byte(file, at + 1);
    if (marker == kEoi) break;
    if (marker == 0xff) {
      ++at;  // padding before a marker
    } else if (marker <= 0x01 || (marker >= 0xd0 && marker <= 0xd8)) {
      at += 2;  // data of a scan, or a marker without a segment
    } else {
      const size_t size = size_t{Byte(file, at + 2)} * 256 + Byte(file, at + 3);
      if (marker == kSos) ++segments.scans;
      if (marker == kApp1 && size > 2 && segments.orientation == 1) {
        segments.orientation = ReadOrientation(file.substr(at + 4, size - 2));
      }
      at += 2 + size;
    }
  }
  return segments;
}

/// The picture as it is to be seen.
Pixels Upright(Pixels stored, int orientation) {
  if (orientation == 1) return stored;
  const bool turned = orientation >= 5;  // what is stored as rows are columns
  const bool from_right =
      orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool from_bottom =
      orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  Pixels seen{turned ? stored.height : stored.width, turned ? stored.width : stored.height,
              stored.channels, std::vector<uint8_t>(stored.samples.size())};
  uint8_t* out = seen.samples.data();
  for (int y = 0; y < seen.height; ++y) {
    for (int x = 0; x < seen.width; ++x) {
      int row = turned ? x : y, column = turned ? y : x;
      if (from_bottom) row = stored.height - 1 - row;
      if (from_right) column = stored.width - 1 - column;
      const size_t at = (size_t(row) * stored.width + column) * stored.channels;
      out = std::copy_n(stored.samples.data() + at, stored.channels, out);
    }
  }
  return seen;
}

}  // namespace

absl::StatusOr<std::string> EncodeJpeg(const Pixels& pixels, int quality) {
  const Codec codec = Own(tjInitCompress());
  const bool grey = pixels.channels == 1;
  unsigned char* data = nullptr;
  unsigned long size = 0;
  const bool written =
      codec != nullptr &&
      tjCompress2(codec.get(), pixels.samples.data(), pixels.width, /*pitch=*/0, pixels.height,
                  grey ? TJPF_GRAY : TJPF_RGB, &data, &size, grey ? TJSAMP_GRAY : TJSAMP_420,
                  quality, TJFLAG_ACCURATEDCT) == 0;
  const std::unique_ptr<unsigned char, void (*)(unsigned char*)> owned(data, tjFree);
  if (!written) {
    return Internal("cannot encode {}×{} pixels as JPEG: {}", pixels.width, pixels.height,
                    tjGetErrorStr2(codec.get()));
  }
  return std::string(reinterpret_cast<char*>(data), size);
}

absl::StatusOr<Pixels> DecodeJpeg(std::string_view file, int64_t max_pixels,
                                  const ReserveMemory& reserve) {
  const Codec codec = Own(tjInitDecompress());
  if (codec == nullptr) return ResourceExhausted("no memory for a JPEG decoder");
  const auto* const data = reinterpret_cast<const unsigned char*>(file.data());
  Pixels pixels;
  int sampling = 0, colours = 0;
  if (tjDecompressHeader3(codec.get(), data, file.size(), &pixels.width, &pixels.height, &sampling,
                          &colours) != 0) {
    return Damaged(codec);
  }
  if (colours == TJCS_CMYK || colours == TJCS_YCCK) {
    return InvalidArgument("the JPEG is CMYK; send an RGB or grey file");
  }
  const Segments segments = ReadSegments(file);
  if (segments.scans > kMaxScans) {
    return InvalidArgument("the JPEG has {} scans, and {} are allowed; save it as a baseline JPEG",
                           segments.scans, kMaxScans);
  }
  // Samples, and of a progressive file all coefficients, which are gone when samples are turned.
  DENOISED_RETURN_IF_ERROR(
      CheckSize("JPEG", pixels.width, pixels.height, max_pixels, 3 + 6, reserve));
  pixels.channels = colours == TJCS_GRAY ? 1 : 3;
  pixels.samples.resize(size_t(pixels.width) * pixels.height * pixels.channels);
  // A file that is cut off is only a warning to libjpeg, which fills the rest with grey.
  if (tjDecompress2(codec.get(), data, file.size(), pixels.samples.data(), pixels.width,
                    /*pitch=*/0, pixels.height, pixels.channels == 1 ? TJPF_GRAY : TJPF_RGB,
                    TJFLAG_STOPONWARNING | TJFLAG_ACCURATEDCT) != 0) {
    return Damaged(codec);
  }
  return Upright(std::move(pixels), segments.orientation);
}

}  // namespace denoised
