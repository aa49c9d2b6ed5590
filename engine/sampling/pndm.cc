// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "engine/sampling/timesteps.h"

namespace denoised {
namespace {

// Registers: the three model outputs before this one, newest first; the state that a step of
// several evaluations started from; the running sum of its outputs.
constexpr int kOutputs = 3, kSaved = 3, kSum = 4;

struct PndmWriter {
  const SchedulerConfig::Fields& fields;
  PlanWriter plan;

  void Evaluate(int step, int timestep) { plan.Evaluate(step, LevelAt(fields, timestep)); }

  /// Transfers `x` from one timestep to another along `output`: arXiv 2202.09778, equation 9.
  Combination Transfer(const Combination& x, int from, int to, const Combination& output) const {
    const NoiseLevel now = LevelAt(fields, std::min(from, fields.train_timesteps - 1));
    const NoiseLevel next =
        to >= 0 ? LevelAt(fields, to) : FinalLevel(fields, fields.set_alpha_to_one.value_or(false));
    const Combination epsilon =
        fields.prediction == Prediction::kV ? now.alpha * output + now.sigma * x : output;
    const double slope = (next.alpha * next.alpha - now.alpha * now.alpha) /
                         (now.alpha * (now.alpha * next.sigma + now.sigma * next.alpha));
    return next.alpha / now.alpha * x - slope * epsilon;
  }

  /// Puts this evaluation's output at the head of the history.
  void PushOutput() {
    plan.Keep(0, Model());
    for (int i = 1; i < kOutputs; ++i) plan.Keep(i, Register(i - 1));
  }
  void KeepHistory() {
    for (int i = 0; i < kOutputs; ++i) plan.Keep(i, Register(i));
  }
};

/// Adams-Bashforth over this output and `known` earlier ones, equation 12 of the same paper.
Combination LinearMultistep(int known) {
  switch (known) {
    case 0:
      return Model();
    case 1:
      return 1 / 2.0 * (3 * Model() - Register(0));
    case 2:
      return 1 / 12.0 * (23 * Model() - 16 * Register(0) + 5 * Register(1));
    default:
      return 1 / 24.0 * (55 * Model() - 59 * Register(0) + 37 * Register(1) - 9 * Register(2));
  }
}

/// One step of four evaluations from timestep `from` to `to`, equation 13.
void RungeKuttaStep(PndmWriter& writer, int step, int from, int to, int half) {
  PlanWriter& plan = writer.plan;
  writer.Evaluate(step, from);
  writer.PushOutput();
  plan.Keep(kSaved, X());
  plan.Keep(kSum, 1 / 6.0 * Model());
  plan.Next(writer.Transfer(X(), from, from - half, Model()));

  for (const int target : {to + half, to}) {
    writer.Evaluate(step, to + half);
    writer.KeepHistory();
    plan.Keep(kSaved, Register(kSaved));
    plan.Keep(kSum, Register(kSum) + 1 / 3.0 * Model());
    plan.Next(writer.Transfer(Register(kSaved), from, target, Model()));
  }
  writer.Evaluate(step, to);
  writer.KeepHistory();
  plan.Next(writer.Transfer(Register(kSaved), from, to, Register(kSum) + 1 / 6.0 * Model()));
}

}  // namespace

std::optional<ParamViolation> CheckPndm(const SchedulerConfig::Fields& fields,
                                        const Request& request) {
  if (fields.skip_prk_steps) return std::nullopt;
  if (request.steps < 4)
    return ParamViolation{"steps", fmt::format("is {}; pndm starts with Runge-Kutta and needs at "
                                               "least 4, or skip_prk_steps in its config",
                                               request.steps)};
  if (request.from_image())
    return ParamViolation{"strength", fmt::format("is {}; pndm with Runge-Kutta starts from noise "
                                                  "alone: use 1, or another sampler",
                                                  request.strength)};
  return std::nullopt;
}

/// Pseudo numerical methods, arXiv 2202.09778: linear multistep, started by three Runge-Kutta steps
/// or (skip_prk_steps) by evaluating the second timestep twice.
StepPlan CompilePndm(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr int kRungeKuttaSteps = 3;
  const std::vector<int> timesteps = WholeTimesteps(fields, request);
  const int stride = fields.train_timesteps / request.steps;
  const int first = request.FirstStep(request.steps);
  PndmWriter writer = {fields, PlanWriter(fields, /*clip=*/0)};
  PlanWriter& plan = writer.plan;
  if (request.from_image()) plan.StartFromImage(LevelAt(fields, timesteps[first]));

  int i = first, known = 0;
  if (!fields.skip_prk_steps) {
    for (; i < kRungeKuttaSteps; ++i)
      RungeKuttaStep(writer, i, timesteps[i], timesteps[i + 1], stride / 2);
    known = kRungeKuttaSteps;
  }
  for (; i < request.steps; ++i) {
    const int now = timesteps[i];
    writer.Evaluate(i - first, now);
    writer.PushOutput();
    plan.Keep(kSaved, X());
    plan.Next(writer.Transfer(X(), now, now - stride, LinearMultistep(known)));
    // Without Runge-Kutta the first step is done again with the slope at its end averaged in. (From
    // an image diffusers may skip this timestep or repeat it once more; here it is as from noise.)
    if (known++ == 0 && i + 1 < request.steps) {
      const int end = timesteps[i + 1];
      writer.Evaluate(i - first, end);
      writer.KeepHistory();
      plan.Next(
          writer.Transfer(Register(kSaved), end + stride, end, 1 / 2.0 * (Model() + Register(0))));
    }
  }
  return plan.Finish(request.steps - first);
}

}  // namespace denoised
