// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "engine/sampling/scheduler_fields.h"

namespace denoised {

/// EDM's stochastic churn, arXiv 2206.00364, algorithm 2.
struct Churn {
  double amount = 0, min = 0, max = std::numeric_limits<double>::infinity(), noise = 1;
};

/// SamplerParams with everything filled in.
struct Request {
  Sampler sampler = Sampler::kDdpm;
  NoiseSchedule schedule = NoiseSchedule::kNative;
  int steps = 1;
  double strength = 1;
  double eta = 0;
  Churn churn;
  int solver_order = 2;
  bool stochastic = false;

  bool from_image() const { return strength < 1; }
  /// The first of `count` steps that is run: image to image keeps the last ones, at least one.
  int FirstStep(int count) const {
    return count - std::max(1, std::min(static_cast<int>(count * strength), count));
  }
};

/// One per sampler, each in the file of its name: see registry.cc. They trust their arguments.
StepPlan CompileDdpm(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileDdim(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompilePndm(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileEuler(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileEulerAncestral(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileLms(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileHeun(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileDpmSolver(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileUniPc(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileLcm(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileDpmppSde(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileDeis(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileKdpm2(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileTcd(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileDpmSolverSinglestep(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileFlowMatchEuler(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileConsistency(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileSaSolver(const SchedulerConfig::Fields& fields, const Request& request);
StepPlan CompileScoreSdeVe(const SchedulerConfig::Fields& fields, const Request& request);

/// What a sampler alone asks of a request: SamplerTraits::check.
std::optional<ParamViolation> CheckPndm(const SchedulerConfig::Fields& fields,
                                        const Request& request);
std::optional<ParamViolation> CheckUniPc(const SchedulerConfig::Fields& fields,
                                         const Request& request);

}  // namespace denoised
