// SPDX-License-Identifier: Apache-2.0
#include "server/encoding/jpeg.h"

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
  // Samples, and of a progressive file all coefficients.
  DENOISED_RETURN_IF_ERROR(
      CheckSize("JPEG", pixels.width, pixels.height, max_pixels, 3 + 6, reserve));
  pixels.channels = colours == TJCS_GRAY ? 1 : 3;
  pixels.samples.resize(size_t(pixels.width) * pixels.height * pixels.channels);
  // A file that is cut off is only a warning to libjpeg, which fills the rest with grey. A
  // progressive file may hold any number of scans over all pixels; honest encoders write about ten.
  constexpr int kStrict = TJFLAG_STOPONWARNING | TJFLAG_LIMITSCANS;
  if (tjDecompress2(codec.get(), data, file.size(), pixels.samples.data(), pixels.width,
                    /*pitch=*/0, pixels.height, pixels.channels == 1 ? TJPF_GRAY : TJPF_RGB,
                    kStrict | TJFLAG_ACCURATEDCT) != 0) {
    return Damaged(codec);
  }
  return pixels;
}

}  // namespace denoised
