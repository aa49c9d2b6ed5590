// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "server/encoding/png.h"

/// The engine's images as messages.

namespace denoised {

/// How images leave.
struct Rendering {
  v1::ImageFormat format = v1::IMAGE_FORMAT_PNG;
  int quality = 90;
  bool metadata = true;  // in the text chunks of a PNG
  int max_edge = 0;      // pixels; larger images are scaled down; 0: any size
};

/// Whether it is one of the formats of files, and not a raw tensor.
bool IsFile(v1::ImageFormat format);
/// "png", "jpeg", "webp" or "raw", for metrics.
const char* FormatLabel(v1::ImageFormat format);

/// What a PNG says of its making: what decides the picture, and nothing else. So the same request
/// gives the same file, whatever its id.
TextEntries Metadata(const EffectiveJob& job, const ImageResult& image);

/// `image` as a message. Takes milliseconds: for worker threads.
absl::StatusOr<v1::Image> Render(const ImageResult& image, const Rendering& rendering,
                                 const TextEntries& texts);

}  // namespace denoised
