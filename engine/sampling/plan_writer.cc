// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling/plan_writer.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace denoised {

Preconditioning PreconditioningAt(const NoiseLevel& level, const SchedulerConfig::Fields& fields) {
  const double alpha = level.alpha, sigma = level.sigma;
  const double data = fields.sigma_data, data_norm = std::hypot(sigma, data);
  switch (fields.training) {
    case Training::kEdm: {  // arXiv 2206.00364, table 1; diffusers' "v_prediction" is −F
      const double c_out = sigma * data / data_norm;
      return {1 / data_norm, data * data / (data_norm * data_norm),
              fields.prediction == Prediction::kV ? -c_out : c_out};
    }
    case Training::kFlow:  // the model predicts noise − x0
      return {1, 1, -sigma};
    case Training::kConsistency: {  // arXiv 2303.01469, appendix C: the identity at sigma_min
      const double above = sigma - *fields.sigma_min;
      return {1 / data_norm, data * data / (above * above + data * data), above * data / data_norm};
    }
    case Training::kScore:  // images in [0, 1] as (x + 1)/2, with half of our σ
      return {0.5, 1, sigma * sigma / 2, 0.5};
    case Training::kBetas:
      break;
  }
  // The model was trained on α² + σ² = 1; `norm` takes any other scale there.
  const double norm = std::hypot(alpha, sigma);
  switch (fields.prediction) {
    case Prediction::kEpsilon:
      return {1 / norm, 1 / alpha, -sigma / alpha};
    case Prediction::kV:  // arXiv 2202.00512, appendix D
      return {1 / norm, alpha / (norm * norm), -sigma / norm};
    case Prediction::kSample:
      break;
  }
  return {1 / norm, 0, 1};
}

PlanWriter::PlanWriter(const SchedulerConfig::Fields& fields, double clip)
    : fields_(fields), clip_(clip) {}

void PlanWriter::StartFromNoise(double scale) {
  plan_.initial_source_scale = 0;
  // The noise of images in [0, 1] is around 0, which is −1 here.
  plan_.initial_shift = fields_.training == Training::kScore ? -1 : 0;
  plan_.initial_noise_scale = scale;
}

void PlanWriter::StartFromImage(const NoiseLevel& level) {
  plan_.initial_source_scale = level.alpha;
  plan_.initial_shift = 0;
  plan_.initial_noise_scale = level.sigma;
}

void PlanWriter::ChurnStart(double scale) { plan_.initial_churn_scale = scale; }

Combination PlanWriter::Evaluate(int step, const NoiseLevel& level) {
  level_ = level;
  if (!plan_.evaluations.empty()) {
    plan_.evaluations.back().known_image = level.alpha;
    plan_.evaluations.back().known_noise = level.sigma;
  }
  const Preconditioning model = PreconditioningAt(level, fields_);
  Evaluation<double> evaluation;
  evaluation.input_scale = model.input_scale;
  evaluation.input_shift = model.input_shift;
  evaluation.condition = level.condition;
  evaluation.x0_from_x = model.x0_from_x;
  evaluation.x0_from_model = model.x0_from_model;
  evaluation.clip = clip_;
  evaluation.known_image = 1;  // unless another evaluation follows
  plan_.evaluations.push_back(evaluation);
  plan_.step.push_back(step);
  plan_.preview_scale.push_back(1 / std::hypot(level.alpha, level.sigma));
  // Unclipped, x0 is spelled out: (x − x0)/σ then reduces in double what floats would cancel.
  return clip_ > 0 ? Combination(kInputX0) : model.x0_from_x * X() + model.x0_from_model * Model();
}

Combination PlanWriter::Epsilon() const {
  if (fields_.training == Training::kBetas && fields_.prediction == Prediction::kEpsilon)
    return Model();
  const Evaluation<double>& now = plan_.evaluations.back();
  const Combination x0 = now.x0_from_x * X() + now.x0_from_model * Model();
  return 1 / level_.sigma * (X() - level_.alpha * x0);
}

void PlanWriter::Write(int output, const Combination& value) {
  std::copy(value.weights().begin(), value.weights().end(),
            plan_.evaluations.back().weights[output]);
}

void PlanWriter::Next(const Combination& x) { Write(kOutputX, x); }

void PlanWriter::Keep(int reg, const Combination& value) {
  DENOISED_CHECK(reg >= 0 && reg < kRegisters, "register {}", reg);
  Write(kOutputRegister + reg, value);
}

void PlanWriter::ScaleByNorms() { plan_.evaluations.back().noise_scale = NoiseScale::kNormRatio; }

void PlanWriter::LearnedNoise(NoiseScale scale, double log_variance_min, double log_variance_max) {
  Evaluation<double>& now = plan_.evaluations.back();
  now.noise_scale = scale;
  now.log_variance_min = log_variance_min;
  now.log_variance_max = log_variance_max;
}

StepPlan PlanWriter::Finish(int steps) {
  plan_.steps = steps;
  return std::move(plan_);
}

}  // namespace denoised
