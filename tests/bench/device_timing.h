// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "engine/backend/backend.h"

namespace denoised {

struct Samples {
  size_t least = 9, most = 9;
  double longest_seconds = 0;    // beyond `least`
  double warm_up_seconds = 0.1;  // a chip that idled clocks down; 0: one run
};

/// Median device seconds of each of `works`, which enqueue something on `backend`, in turns. The
/// host is one ahead, as in the engine: so none of its time counts, and the device neither idles
/// nor falls below its power limit. Not thread-safe.
inline absl::StatusOr<std::vector<double>> MedianDeviceSeconds(
    Backend& backend, const std::vector<std::function<absl::Status()>>& works,
    const Samples& samples) {
  std::vector<std::vector<double>> seconds(works.size());
  double sum = 0;
  const auto enough = [&] {
    const size_t count = seconds.back().size();
    return count >= samples.most || (count >= samples.least && sum >= samples.longest_seconds);
  };

  std::unique_ptr<Marker> begin = backend.Mark(), end;
  bool warm = false;
  for (size_t enqueued = 0; !enough(); ++enqueued) {
    DENOISED_RETURN_IF_ERROR(works[enqueued % works.size()]());
    std::unique_ptr<Marker> next = backend.Mark();
    if (end) {
      DENOISED_RETURN_IF_ERROR(end->Wait());
      const size_t done = (enqueued - 1) % works.size();
      const double elapsed = end->SecondsSince(*begin);
      if (done == 0) warm = sum > samples.warm_up_seconds;
      if (warm) seconds[done].push_back(elapsed);
      sum += elapsed;
      begin = std::move(end);
    }
    end = std::move(next);
  }
  DENOISED_RETURN_IF_ERROR(end->Wait());

  std::vector<double> medians;
  for (std::vector<double>& each : seconds) {
    const auto median = each.begin() + static_cast<std::ptrdiff_t>(each.size() / 2);
    std::nth_element(each.begin(), median, each.end());
    medians.push_back(*median);
  }
  return medians;
}

}  // namespace denoised
