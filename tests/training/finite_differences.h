// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "engine/training/parameters.h"
#include "tests/training/golden.h"

namespace denoised::training {

/// One or two may happen to be nearly flat.
inline constexpr int kDirections = 3;

struct SlopeOptions {
  double length = 0;     // of a step
  double tolerance = 0;  // of the slopes of one parameter, as a share of their size
  /// What rounding makes of a slope. A slope must be five times that, or it would say nothing,
  /// unless the function `is_flat` along this parameter.
  double noise = 0;
  bool (*is_flat)(const std::string& parameter) = nullptr;
};

/// Softmax does not see what is added to all scores of a query.
inline bool IsKeysBias(const std::string& parameter) {
  return parameter.ends_with("to_k.bias") || parameter.ends_with("k_proj.bias");
}

/// Slopes of a function of weights against its gradient, a parameter at a time. A direction moves
/// all elements of one parameter by plus or minus the same, and the signs know nothing of the
/// gradient: along a gradient, a part of it that is wrongly zero does not move and is not missed.
///
/// `trained` is on the host; `value` packs it and computes the function.
inline void ExpectSlopes(const Parameters& parameters, const Tensor& trained,
                         const std::vector<float>& gradient, const std::function<double()>& value,
                         const SlopeOptions& options) {
  for (size_t index = 0; index < parameters.all().size(); ++index) {
    const Parameter& parameter = parameters[static_cast<int>(index)];
    if (!parameter.trained) continue;
    const Tensor part = parameters.Part(trained, static_cast<int>(index));
    const std::vector<float> start = part.ToFloats();
    double error = 0, size = 0;
    for (int direction = 1; direction <= kDirections; ++direction) {
      const auto each = options.length / std::sqrt(static_cast<double>(start.size()));
      const auto at = [&](double distance) {
        for (size_t i = 0; i < start.size(); ++i)
          part.as<float>()[i] = start[i] + static_cast<float>(distance) * Sign(i, direction);
        return value();
      };
      double expected = 0;
      for (size_t i = 0; i < start.size(); ++i)
        expected += static_cast<double>(gradient[parameter.offset + i]) * Sign(i, direction);
      expected /= std::sqrt(static_cast<double>(start.size()));
      const double slope = (at(each) - at(-each)) / (2 * options.length);
      error += std::pow(slope - expected, 2);
      size += slope * slope;
    }
    std::copy(start.begin(), start.end(), part.as<float>());
    error = std::sqrt(error), size = std::sqrt(size);
    EXPECT_LE(error, options.tolerance * size + options.noise)
        << parameter.name << " has slopes of " << size;
    const bool flat = options.is_flat != nullptr && options.is_flat(parameter.name);
    EXPECT_EQ(size < 5 * options.noise, flat) << parameter.name << " has slopes of " << size;
  }
}

}  // namespace denoised::training
