// SPDX-License-Identifier: Apache-2.0
#include "engine/training/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace denoised::training {

double RateSchedule::At(int64_t step, int64_t steps) const {
  const auto now = static_cast<double>(step);
  double factor = 1;
  switch (kind) {
    case Kind::kConstant:
      break;
    case Kind::kCosine: {
      const auto warm = static_cast<double>(warmup_steps), end = static_cast<double>(steps);
      const double progress = end > warm ? std::clamp((now - warm) / (end - warm), 0.0, 1.0) : 0;
      factor = 0.5 * (1 + std::cos(std::numbers::pi * progress));
      break;
    }
    case Kind::kInverseSqrt:
      factor = 1 / std::sqrt(std::max(1.0, now / static_cast<double>(reference_steps)));
      break;
  }
  if (step < warmup_steps) factor *= (now + 1) / static_cast<double>(warmup_steps);
  return rate * factor;
}

std::string AverageOptions::Name() const {
  const char* const names[] = {"decay", "warmup", "power"};
  return fmt::format("{}_{}", names[static_cast<int>(kind)], value);
}

absl::Status AverageOptions::Check() const {
  if (kind == Kind::kPower) {
    if (value > 0 && value < 0.28) return absl::OkStatus();
    return InvalidArgument(
        "the relative width of a power average is {}; use more than 0 and less than 0.28", value);
  }
  if (value >= 0 && value < 1) return absl::OkStatus();
  return InvalidArgument("the decay of an average is {}; use 0 to less than 1", value);
}

double AverageOptions::DecayAt(int64_t update) const {
  const auto t = static_cast<double>(update);
  switch (kind) {
    case Kind::kDecay:
      return value;
    case Kind::kWarmup:
      return std::min(value, 1 - std::pow(t, -0.75));
    case Kind::kPower:
      return std::pow(1 - 1 / t, PowerOfWidth(value) + 1);
  }
  return 0;
}

double PowerOfWidth(double width) {
  // The width falls as γ rises.
  double low = 0, high = 1e6;
  for (int i = 0; i < 200; ++i) {
    const double gamma = (low + high) / 2;
    const double at = std::sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2);
    (at > width ? low : high) = gamma;
  }
  return (low + high) / 2;
}

}  // namespace denoised::training
