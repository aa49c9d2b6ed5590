// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "engine/core/step_plan.h"

/// Runs step plans in double on the host, on the model and noise of make_sampler_goldens.py.

namespace denoised {

using State = std::vector<double>;

/// The model's output for one element of its scaled input.
inline double FakeModel(double u, double condition, size_t element) {
  return std::tanh(0.7 * u + 0.3 * std::sin(0.013 * condition + static_cast<double>(element)));
}

inline double FakeVariance(double u, double condition, size_t element) {
  return 0.5 + 0.4 * std::sin(u + 0.02 * condition + static_cast<double>(element));
}

struct Trajectory {
  std::vector<State> states, x0s;  // after, and predicted by, every evaluation
};

/// The model's output for element e of the state, of which it sees row.input_scale·x.
using Model = std::function<double(const Evaluation<double>& row, double x, size_t e)>;

inline double FakeModelOf(const Evaluation<double>& row, double x, size_t e) {
  return FakeModel(row.input_scale * x + row.input_shift, row.condition, e);
}

/// `draw(i)` is the noise of evaluation i.
inline Trajectory Execute(const StepPlan& plan, const State& source, const State& initial,
                          const State& churn, const std::function<State(size_t)>& draw,
                          const Model& denoiser = FakeModelOf) {
  const size_t elements = initial.size();
  State x(elements);
  for (size_t e = 0; e < elements; ++e)
    x[e] = plan.initial_source_scale * source[e] + plan.initial_noise_scale * initial[e] +
           plan.initial_churn_scale * churn[e] + plan.initial_shift;
  std::vector<State> registers(kRegisters, State(elements, 0));
  Trajectory trajectory;
  for (size_t i = 0; i < plan.evaluations.size(); ++i) {
    const Evaluation<double>& row = plan.evaluations[i];
    const State noise = draw(i);
    State x0s(elements), outputs_of_model(elements);
    double of_noise = 0, of_output = 0;
    for (size_t e = 0; e < elements; ++e) {
      outputs_of_model[e] = denoiser(row, x[e], e);
      of_noise += noise[e] * noise[e];
      of_output += outputs_of_model[e] * outputs_of_model[e];
    }
    const double ratio =
        row.noise_scale == NoiseScale::kNormRatio ? std::sqrt(of_noise / of_output) : 1;
    for (size_t e = 0; e < elements; ++e) {
      const double u = row.input_scale * x[e] + row.input_shift;
      const double model = outputs_of_model[e];
      double x0 = row.x0_from_x * x[e] + row.x0_from_model * model;
      if (row.clip > 0) x0 = std::clamp(x0, -row.clip, row.clip);
      double n = ratio * noise[e];
      const double v = FakeVariance(u, row.condition, e), f = (v + 1) / 2;
      if (row.noise_scale == NoiseScale::kLearned) n *= std::sqrt(v);
      if (row.noise_scale == NoiseScale::kLearnedRange)
        n *= std::exp(0.5 * (f * row.log_variance_max + (1 - f) * row.log_variance_min));
      double inputs[kPlanInputs] = {x[e], ratio * ratio * model, x0, n};
      for (int r = 0; r < kRegisters; ++r) inputs[kInputRegister + r] = registers[r][e];
      double outputs[kPlanOutputs] = {};
      for (int o = 0; o < kPlanOutputs; ++o)
        for (int k = 0; k < kPlanInputs; ++k) outputs[o] += row.weights[o][k] * inputs[k];
      x0s[e] = x0;
      x[e] = outputs[kOutputX];
      for (int r = 0; r < kRegisters; ++r) registers[r][e] = outputs[kOutputRegister + r];
    }
    trajectory.states.push_back(x);
    trajectory.x0s.push_back(x0s);
  }
  return trajectory;
}

}  // namespace denoised
