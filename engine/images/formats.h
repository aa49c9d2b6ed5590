// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/core/status.h"
#include "engine/core/tensor.h"
#include "engine/images/png.h"

namespace denoised {

enum class FileFormat { kPng, kJpeg, kWebp };

/// "image/png"
const char* MimeType(FileFormat format);

/// `image` is F32 [H, W, 1 or 3] on the host; `quality` (1 to 100) is for JPEG and WebP, `texts`
/// for PNG. `parallel_for` converts pixels and encodes the parts of a large PNG or JPEG; how it
/// does so does not affect the bytes.
absl::StatusOr<std::string> EncodeFile(const Tensor& image, FileFormat format, int quality,
                                       const TextEntries& texts,
                                       const ParallelFor& parallel_for = OneByOne);

/// Decodes a PNG, JPEG or WebP file, recognised by its first bytes. InvalidArgument if it is none
/// of them, damaged, or larger than `max_pixels`; or the error of `reserve`.
absl::StatusOr<Pixels> DecodeFile(std::string_view file, int64_t max_pixels,
                                  const ReserveMemory& reserve = nullptr,
                                  Alpha alpha = Alpha::kOverWhite);

}  // namespace denoised
