// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "engine/core/host_device.h"
#include "engine/training/device_data.h"

namespace denoised::training {

/// L of VarianceLossArgs at one pixel, in nats, and its slope over v.
struct Divergence {
  double value, slope;
};
DENOISED_HOST_DEVICE inline Divergence DivergenceOf(const SampleRow& row, double difference,
                                                    double v, double y) {
  const double low = row.log_variance_min, high = row.log_variance_max;
  const double log_variance = 0.5 * ((1 + v) * high + (1 - v) * low);
  const double slope_of_log = 0.5 * (high - low);
  const double distance = row.mean_factor * difference;
  if (row.condition != 0) {
    const double variances = exp(low - log_variance);
    const double squares = distance * distance * exp(-log_variance);
    return {0.5 * (log_variance - low - 1 + variances + squares),
            0.5 * (1 - variances - squares) * slope_of_log};
  }
  // The mass of the normal distribution between the borders of y's level; the first and the last
  // level reach to infinity. Tails are taken where they are small, so nothing cancels.
  constexpr double kHalf = 1.0 / 255, kLeast = 1e-12;
  constexpr double kRootOfHalf = 0.70710678118654752440, kPeak = 0.39894228040143267794;
  const double inverse = exp(-0.5 * log_variance);
  const double sign = distance > 0 ? 1 : -1;  // mirrored: the level lies above the mean
  const bool open_below = y<-0.999, open_above = y> 0.999;
  const bool open_low = sign > 0 ? open_below : open_above,
             open_high = sign > 0 ? open_above : open_below;
  const double from = (sign * distance - kHalf) * inverse, to = (sign * distance + kHalf) * inverse;
  const auto above = [](double z) { return 0.5 * erfc(z * kRootOfHalf); };
  const auto density = [](double z) { return exp(-0.5 * z * z) * kPeak; };
  const double mass = (open_low ? 1 : above(from)) - (open_high ? 0 : above(to));
  if (!(mass > kLeast)) return {-log(kLeast), 0};
  // dz/d(ln Σ) = −z/2
  const double slope_of_mass =
      -0.5 * ((open_high ? 0 : density(to) * to) - (open_low ? 0 : density(from) * from));
  return {-log(mass), -slope_of_mass / mass * slope_of_log};
}

}  // namespace denoised::training
