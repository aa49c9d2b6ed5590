// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <vector>

#include "command/pixels.h"

namespace denoised::command {

/// The pictures of a denoising as they came, for the live view and for the animation. All pictures
/// of one image are shown at the size of its cell, whatever size they came in. Not thread-safe.
class Timeline {
 public:
  /// For `count` images, in rows of `columns`; cells of `width` x `height` pixels.
  Timeline(int count, int columns, int width, int height);

  /// With `keep`, earlier pictures stay for Frames. An index out of range is ignored.
  void Add(int index, int evaluation, const Pixels& picture, bool keep);

  /// The latest of every image.
  Pixels Latest() const;

  /// One sheet for every evaluation of which a picture came, in order: each image as it was then.
  std::vector<Pixels> Frames() const;

 private:
  const int columns_;
  const int width_, height_;
  std::vector<std::map<int, Pixels>> pictures_;  // by evaluation, for each image
};

}  // namespace denoised::command
