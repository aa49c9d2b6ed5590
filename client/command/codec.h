// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "command/pixels.h"
#include "denoised/generation.h"

/// Between what travels and pixels.

namespace denoised::command {

/// PNG, JPEG and WebP files and tensors; a float32 tensor is clipped to [-1, 1]. Transparency is
/// laid on black.
absl::StatusOr<Pixels> Decode(const client::Image& image);

/// Keyword and text of a PNG's tEXt chunks.
using PngText = std::vector<std::pair<std::string, std::string>>;

/// A PNG file.
absl::StatusOr<std::string> EncodePng(const Pixels& image, const PngText& text);

/// An animated WebP file that loops, lossless. Every frame shows for `frame_ms`, the last for
/// `last_frame_ms`. At least one frame, all of one size.
absl::StatusOr<std::string> EncodeAnimation(const std::vector<Pixels>& frames, int frame_ms,
                                            int last_frame_ms);

}  // namespace denoised::command
