// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "engine/core/status.h"

namespace denoised::trainer {

/// A PNG file of samples, and its size.
struct Grid {
  std::string png;
  int width = 0, height = 0, channels = 0;
};

/// Draws `count` pictures with the model in `directory`, as the server would, always from the same
/// seeds (and, with classes, of one class after another; of `prompts` likewise), and lays them out
/// as a square. A model that reads class vectors has them one after another in `class_values`.
absl::StatusOr<Grid> DrawGrid(const std::string& directory, int count,
                              std::vector<float> class_values,
                              const std::vector<std::string>& prompts);

}  // namespace denoised::trainer
