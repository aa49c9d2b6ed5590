// SPDX-License-Identifier: Apache-2.0
#include "engine/core/step_plan.h"

namespace denoised {

std::vector<DeviceEvaluation> ToDevice(const StepPlan& plan, bool masked) {
  std::vector<DeviceEvaluation> rows;
  rows.reserve(plan.evaluations.size());
  for (const Evaluation<double>& from : plan.evaluations) {
    DeviceEvaluation to;
    to.input_scale = static_cast<float>(from.input_scale);
    to.input_shift = static_cast<float>(from.input_shift);
    to.condition = static_cast<float>(from.condition);
    to.x0_from_x = static_cast<float>(from.x0_from_x);
    to.x0_from_model = static_cast<float>(from.x0_from_model);
    to.clip = static_cast<float>(from.clip);
    to.noise_scale = from.noise_scale;
    to.log_variance_min = static_cast<float>(from.log_variance_min);
    to.log_variance_max = static_cast<float>(from.log_variance_max);
    if (masked) {
      to.known_image = static_cast<float>(from.known_image);
      to.known_noise = static_cast<float>(from.known_noise);
    }
    for (int o = 0; o < kPlanOutputs; ++o)
      for (int i = 0; i < kPlanInputs; ++i)
        to.weights[o][i] = static_cast<float>(from.weights[o][i]);
    rows.push_back(to);
  }
  return rows;
}

}  // namespace denoised
