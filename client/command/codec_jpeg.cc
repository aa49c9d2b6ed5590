// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <turbojpeg.h>

#include <memory>

#include "command/codec_files.h"

namespace denoised::command {

absl::StatusOr<Pixels> DecodeJpeg(const std::string& file) {
  const std::unique_ptr<void, int (*)(tjhandle)> codec(tjInitDecompress(), tjDestroy);
  if (codec == nullptr) return absl::ResourceExhaustedError("no memory for a JPEG decoder");
  const auto damaged = [&] {
    return absl::DataLossError(fmt::format("the JPEG is damaged: {}", tjGetErrorStr2(codec.get())));
  };
  const auto* const data = reinterpret_cast<const unsigned char*>(file.data());
  int width = 0, height = 0, sampling = 0, colours = 0;
  if (tjDecompressHeader3(codec.get(), data, file.size(), &width, &height, &sampling, &colours) !=
      0) {
    return damaged();
  }
  Pixels pixels = Blank(width, height, colours == TJCS_GRAY ? 1 : 3);
  // A file that is cut off is only a warning, after which libjpeg fills the rest with grey.
  if (tjDecompress2(codec.get(), data, file.size(), pixels.data.data(), width, /*pitch=*/0, height,
                    pixels.channels == 1 ? TJPF_GRAY : TJPF_RGB,
                    TJFLAG_STOPONWARNING | TJFLAG_ACCURATEDCT) != 0) {
    return damaged();
  }
  return pixels;
}

}  // namespace denoised::command
