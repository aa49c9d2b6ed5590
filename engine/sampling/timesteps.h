// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/sampling/plan_writer.h"
#include "engine/sampling/registry.h"

/// For the samplers that visit whole training timesteps: DDPM, DDIM, PNDM, LCM and TCD.

namespace denoised {

/// The level of training timestep `t`.
inline NoiseLevel LevelAt(const SchedulerConfig::Fields& fields, int t) {
  const double alpha_cumprod = fields.alphas_cumprod[t];
  return {std::sqrt(alpha_cumprod), std::sqrt(1 - alpha_cumprod), static_cast<double>(t)};
}

/// The level that the last step reaches: the image, or what is left at timestep 0.
inline NoiseLevel FinalLevel(const SchedulerConfig::Fields& fields, bool alpha_to_one) {
  return alpha_to_one ? NoiseLevel{1, 0, 0} : LevelAt(fields, 0);
}

/// The request's whole timesteps, descending.
inline std::vector<int> WholeTimesteps(const SchedulerConfig::Fields& fields,
                                       const Request& request) {
  const std::vector<double> spaced =
      Rounded(SpacedTimesteps(SpacingOf(fields, request.sampler), fields.train_timesteps,
                              request.steps, fields.steps_offset));
  return {spaced.begin(), spaced.end()};
}

/// `steps` of the timesteps that LCM and TCD models were distilled at, descending.
inline std::vector<int> DistilledTimesteps(const SchedulerConfig::Fields& fields, int steps) {
  const int count = fields.original_inference_steps, stride = fields.train_timesteps / count;
  std::vector<int> timesteps;
  for (int i = 0; i < steps; ++i) {
    const int skipped = static_cast<int>(i * (static_cast<double>(count) / steps));
    timesteps.push_back((count - skipped) * stride - 1);
  }
  return timesteps;
}

/// The bound of x0, or 0 for none. If the config does not say whether x0 is clipped, diffusers'
/// classes have different defaults.
inline double ClipOf(const SchedulerConfig::Fields& fields, bool by_default) {
  return fields.clip_sample.value_or(by_default) ? fields.clip_sample_range : 0;
}

}  // namespace denoised
