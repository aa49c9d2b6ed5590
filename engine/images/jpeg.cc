// SPDX-License-Identifier: Apache-2.0
#include "engine/images/jpeg.h"

#include <turbojpeg.h>

#include <memory>

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

/// The scans of a file: its SOS markers. Segments are stepped over by their length, as a thumbnail
/// in one of them is a JPEG too; what follows the end of the image is not read by libjpeg either.
int CountScans(std::string_view file) {
  const auto byte = [&](size_t at) { return static_cast<unsigned char>(file[at]); };
  constexpr int kSos = 0xda, kEoi = 0xd9;
  int scans = 0;
  size_t at = 0;
  while ((at = file.find('\xff', at)) != std::string_view::npos && at + 3 < file.size()) {
    const int marker = byte(at + 1);
    if (marker == kEoi) break;
    if (marker == 0xff) {
      ++at;  // padding before a marker
    } else if (marker <= 0x01 || (marker >= 0xd0 && marker <= 0xd8)) {
      at += 2;  // data of a scan, or a marker without a segment
    } else {
      if (marker == kSos) ++scans;
      at += 2 + size_t{byte(at + 2)} * 256 + byte(at + 3);
    }
  }
  return scans;
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
  if (const int scans = CountScans(file); scans > kMaxScans) {
    return InvalidArgument("the JPEG has {} scans, and {} are allowed; save it as a baseline JPEG",
                           scans, kMaxScans);
  }
  // Samples, and of a progressive file all coefficients.
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
  return pixels;
}

}  // namespace denoised
