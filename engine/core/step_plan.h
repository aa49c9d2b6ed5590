// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/core/host_device.h"

namespace denoised {

/// A sampler and a noise schedule, compiled: what each evaluation of the model feeds it and how the
/// state moves on. All samplers are linear in {state, model output, clipped x0, noise, what earlier
/// evaluations left behind}, so an evaluation is a small matrix and one kernel runs every sampler.

/// Scratch images that one evaluation leaves to the next: earlier x0, derivatives, saved states.
/// Five is what PNDM's Runge-Kutta start needs (three outputs, the saved state, the running sum).
constexpr int kRegisters = 5;

/// Columns of Evaluation::weights.
enum PlanInput : int {
  kInputX = 0,      // the state x
  kInputModel = 1,  // the model's output F, after guidance
  kInputX0 = 2,     // predicted x0, after clipping
  kInputNoise = 3,  // standard normal noise of this evaluation
  kInputRegister = 4,
};
constexpr int kPlanInputs = kInputRegister + kRegisters;

/// Rows of Evaluation::weights.
enum PlanOutput : int {
  kOutputX = 0,  // the next state
  kOutputRegister = 1,
};
constexpr int kPlanOutputs = kOutputRegister + kRegisters;

enum class NoiseScale : int32_t {
  kFixed = 0,         // the noise column of weights, as it stands
  kLearned = 1,       // × sqrt(max(v, 0)), v the model's second half of channels (DDPM "learned")
  kLearnedRange = 2,  // × exp(½(f·log_max + (1−f)·log_min)), f = (v + 1)/2   ("learned_range")
  kNormRatio = 3,  // × r, and the model column × r², where r = ‖noise‖ / ‖F‖ of the whole image
                   // (the corrector of arXiv 2011.13456, algorithm 4)
};

/// One evaluation of the model, which is told `condition`: a timestep, EDM's c_noise = ln σ / 4, or
/// σ. `Real` is double in plans, float on devices.
///
///   input = input_scale · x + input_shift
///   x0    = x0_from_x · x + x0_from_model · F, then clipped to ±clip when clip > 0
///   {x, registers} ← weights · {x, F, x0, noise, registers}, all outputs from the old values
///
/// An image with a mask m, 1 where it is drawn anew, is put back where it is kept, at the noise
/// level of the next evaluation:
///
///   x ← m · x + (1 − m) · (known_image · image + known_noise · initial noise)
template <typename Real>
struct Evaluation {
  Real input_scale = 1;
  Real input_shift = 0;
  Real condition = 0;
  Real x0_from_x = 0;
  Real x0_from_model = 0;
  Real clip = 0;
  NoiseScale noise_scale = NoiseScale::kFixed;
  Real log_variance_min = 0;
  Real log_variance_max = 0;
  Real known_image = 0, known_noise = 0;  // both 0: there is no mask
  Real weights[kPlanOutputs][kPlanInputs] = {};
};

using DeviceEvaluation = Evaluation<float>;
static_assert(sizeof(DeviceEvaluation) == 4 * (11 + kPlanOutputs * kPlanInputs));

// What the formulas above leave open at the edges. Host and device share these functions, so that
// they agree there too; NaN stays NaN and is reported (SlotState::nonfinite).

/// The factor of the noise column. `variance` is the model's, and is read for kLearned and
/// kLearnedRange. `norm_ratio` is read for kNormRatio.
DENOISED_HOST_DEVICE inline float NoiseFactor(const DeviceEvaluation& plan, float variance,
                                              float norm_ratio) {
  switch (plan.noise_scale) {
    case NoiseScale::kFixed:
      return 1.0f;
    case NoiseScale::kLearned:
      // A network can predict a variance below zero. It means no noise.
      return variance < 0 ? 0.0f : sqrtf(variance);
    case NoiseScale::kLearnedRange: {
      const float f = 0.5f * (variance + 1.0f);
      return expf(0.5f * (f * plan.log_variance_max + (1.0f - f) * plan.log_variance_min));
    }
    case NoiseScale::kNormRatio:
      return norm_ratio;
  }
  return 1.0f;
}

/// The factor of the model column.
DENOISED_HOST_DEVICE inline float ModelFactor(const DeviceEvaluation& plan, float norm_ratio) {
  return plan.noise_scale == NoiseScale::kNormRatio ? norm_ratio * norm_ratio : 1.0f;
}

/// What Advance() needs of a row's whole output. Made by SamplerOps::MeasureOutputs().
struct OutputFactors {
  float guidance = 1;    // × F: guidance that is rescaled (Guidance::rescale)
  float norm_ratio = 1;  // r of NoiseScale::kNormRatio
};

/// Whether the evaluation puts back what a mask keeps.
DENOISED_HOST_DEVICE inline bool HasMask(const DeviceEvaluation& plan) {
  return plan.known_image != 0 || plan.known_noise != 0;
}

/// The next state where there is a mask.
DENOISED_HOST_DEVICE inline float Masked(const DeviceEvaluation& plan, float mask, float x,
                                         float image, float noise) {
  return mask * x + (1.0f - mask) * (plan.known_image * image + plan.known_noise * noise);
}

/// How the outputs of an image's rows become one. With a second row, the output without the
/// condition: u + scale · (c − u). With a third (InstructPix2Pix), u is without condition and
/// image, and i without the condition alone: u + scale · (c − i) + image_scale · (i − u). Then the
/// result may be scaled, see SamplerOps::MeasureOutputs().
struct Guidance {
  float scale = 1;
  float image_scale = 1;
  float rescale = 0;  // in [0, 1]
};
DENOISED_HOST_DEVICE inline float Guided(const Guidance& guidance, float c, float u) {
  return u + guidance.scale * (c - u);
}
DENOISED_HOST_DEVICE inline float Guided(const Guidance& guidance, float c, float i, float u) {
  return u + guidance.scale * (c - i) + guidance.image_scale * (i - u);
}

/// The predicted x0, clipped to ±clip when clip > 0.
DENOISED_HOST_DEVICE inline float ClippedX0(const DeviceEvaluation& plan, float x0) {
  if (!(plan.clip > 0)) return x0;
  return x0 < -plan.clip ? -plan.clip : x0 > plan.clip ? plan.clip : x0;
}

struct StepPlan {
  std::vector<Evaluation<double>> evaluations;
  /// For every evaluation: the step (0-based) it belongs to. A Heun step has two evaluations.
  std::vector<int> step;
  /// For every evaluation: 1/√(α² + σ²), where the state before it is x = α·x0 + σ·noise. Previews
  /// of the state are scaled by it, so that they have about the contrast of the image. The model's
  /// input_scale is another number: EDM's doubles an image whose deviation, sigma_data, is ½.
  std::vector<double> preview_scale;
  int steps = 0;

  /// The state before the first evaluation:
  ///   x = initial_source_scale · source + initial_noise_scale · noise + initial_churn_scale ·
  ///       noise' + initial_shift
  /// where `source` is the init image in [−1, 1] (scale 0 when drawing from noise alone) and
  /// `noise` is Philox draw kInitialDraw or the noise tensor of the request, noise'
  /// kInitialChurnDraw.
  double initial_source_scale = 0;
  double initial_noise_scale = 1;
  double initial_churn_scale = 0;
  double initial_shift = 0;
};

/// The plan's coefficients in the form devices read. `masked`: the image has a mask.
std::vector<DeviceEvaluation> ToDevice(const StepPlan& plan, bool masked = false);

}  // namespace denoised
