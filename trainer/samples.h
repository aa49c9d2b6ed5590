// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "engine/training/backend.h"

namespace denoised::trainer {

/// A PNG file of samples, and its size.
struct Grid {
  std::string png;
  int width = 0, height = 0, channels = 0;
};

/// Draws `count` pictures with the model in `directory`, as the server would, always from the same
/// seeds (and, with classes, of one class after another; of `prompts` likewise), and lays them out
/// as a square. A model that reads class vectors has them one after another in `class_values`. On
/// `gpu`, or on the CPU without one. Cancelled soon after `stop` becomes true.
absl::StatusOr<Grid> DrawGrid(const std::string& directory,
                              const std::optional<training::CudaOptions>& gpu, int count,
                              std::vector<float> class_values,
                              const std::vector<std::string>& prompts,
                              const std::atomic<bool>& stop);

}  // namespace denoised::trainer
