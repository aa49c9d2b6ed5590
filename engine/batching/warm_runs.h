// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

namespace denoised {

/// A run that takes this many seconds fills the device: with more rows, or images, the time of each
/// stays the same.
inline constexpr double kFillsDevice = 0.03;

/// Counts the runs of one graph at warm-up. The first is not measured, because caches are cold. Of
/// those that follow the shortest counts, because what else runs on the machine makes some of them
/// longer.
class WarmRuns {
 public:
  /// A run took `seconds`. Returns the shortest when enough have been measured; what follows are
  /// runs of another graph.
  std::optional<double> Add(double seconds) {
    if (runs_++ > 0) measured_.push_back(seconds);
    if (runs_ <= kMeasured &&
        std::accumulate(measured_.begin(), measured_.end(), 0.0) < kEnoughSeconds)
      return std::nullopt;
    const double shortest = *std::min_element(measured_.begin(), measured_.end());
    *this = {};
    return shortest;
  }

 private:
  static constexpr int kMeasured = 3;
  static constexpr double kEnoughSeconds = 1;  // so that models that take long still load soon

  int runs_ = 0;
  std::vector<double> measured_;
};

}  // namespace denoised
