// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/core/status.h"
#include "engine/core/tensor.h"

/// Converts images between the engine's floats and the bytes of files.

namespace denoised {

/// 8-bit samples [height, width, channels], row-major; 1 channel is grey, 3 are RGB.
struct Pixels {
  int width = 0, height = 0, channels = 0;
  std::vector<uint8_t> samples;
};

/// Calls task(0) … task(count − 1), in any order and on any threads, and returns when all have
/// returned.
using ParallelFor = std::function<void(int count, const std::function<void(int)>& task)>;
/// About as many bytes of a picture are one task.
constexpr int64_t kTaskBytes = 100'000;
/// On the calling thread.
void OneByOne(int count, const std::function<void(int)>& task);

/// Decoders call it after reading a file's header, before unpacking, with the peak memory that they
/// need. If it returns an error, the decoder returns that.
using ReserveMemory = std::function<absl::Status(int64_t bytes)>;

/// The check of every decoder once it knows the size: InvalidArgument if there are more than
/// `max_pixels`, else the result of `reserve` (may be null) for `bytes_per_pixel`. `format` is
/// "PNG", "JPEG" or "WebP".
absl::Status CheckSize(const char* format, int64_t width, int64_t height, int64_t max_pixels,
                       int64_t bytes_per_pixel, const ReserveMemory& reserve);

/// [−1, 1] to [0, 255], rounded, clipped; NaN becomes 0. `image` is F32 [H, W, C] on the host.
std::vector<uint8_t> ToBytes(const Tensor& image, const ParallelFor& parallel_for = OneByOne);

/// The same for images that files can hold. CHECKs that there are 1 or 3 channels.
Pixels ToPixels(const Tensor& image, const ParallelFor& parallel_for = OneByOne);

/// F32 [H, W, channels] in [−1, 1]. Grey becomes RGB by repetition, RGB becomes grey as Rec. 601
/// luma. CHECKs that `channels` is 1 or 3.
Tensor FromPixels(const Pixels& pixels, int channels);

/// What a decoder makes of transparency: it is blended over white, or left out, so that the colours
/// are those of the file.
enum class Alpha { kOverWhite, kIgnored };

/// RGBA samples shown over white, as grey (the red samples) or RGB; `channels` is 1 or 3.
std::vector<uint8_t> OverWhite(const std::vector<uint8_t>& rgba, int channels);

/// Pillow's BILINEAR and LANCZOS. Lanczos is sharper, and overshoots at edges: its results are
/// clipped to [−1, 1], or to [−m, m] where m is the image's largest magnitude.
enum class ResizeFilter { kTriangle, kLanczos };

/// Scales F32 [H, W, C] to [height, width, C] with a filter that is widened when scaling down, so
/// that every source pixel counts. Written by hand: pixels.cc says why no library does it.
Tensor Resize(const Tensor& image, int height, int width,
              ResizeFilter filter = ResizeFilter::kTriangle);

/// Of Resize(image, full_height, full_width), the part [height, width, C] that begins at `top` and
/// `left`, with the same bits. Takes memory for what this part depends on, not for the whole.
Tensor ResizePart(const Tensor& image, int64_t full_height, int64_t full_width, int64_t top,
                  int64_t left, int height, int width, const ParallelFor& parallel_for = OneByOne,
                  ResizeFilter filter = ResizeFilter::kTriangle);

/// `image` itself if no edge exceeds `max_edge`; otherwise scaled down with its aspect kept.
Tensor FitWithin(const Tensor& image, int max_edge, const ParallelFor& parallel_for = OneByOne);

}  // namespace denoised
