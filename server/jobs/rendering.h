// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "engine/images/png.h"

/// Converts the engine's images to messages.

namespace denoised {

/// How images are sent.
struct Rendering {
  v1::ImageFormat format = v1::IMAGE_FORMAT_PNG;
  int quality = 90;
  bool metadata = true;  // in the text chunks of a PNG
  int max_edge = 0;      // pixels; larger images are scaled down; 0: any size
};

/// Whether this is a file format and not a raw tensor.
bool IsFile(v1::ImageFormat format);
/// "png", "jpeg", "webp" or "raw", for metrics.
const char* FormatLabel(v1::ImageFormat format);

/// The metadata of a PNG: everything that determines the picture, and nothing else. The same
/// request therefore gives the same file, whatever its id.
TextEntries Metadata(const EffectiveJob& job, const ImageResult& image);

/// `image` as a message. Takes milliseconds: for worker threads. `parallel_for`: as EncodeFile's.
absl::StatusOr<v1::Image> Render(const ImageResult& image, const Rendering& rendering,
                                 const TextEntries& texts,
                                 const ParallelFor& parallel_for = OneByOne);

}  // namespace denoised
