// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/sampling/registry.h"
#include "engine/sampling/sigma_path.h"

namespace denoised {
namespace {

using Fields = SchedulerConfig::Fields;

template <typename Value>
std::string NamesOf(const std::vector<Value>& values) {
  std::string names;
  for (const Value value : values) {
    if (!names.empty()) names += ", ";
    names += Name(value);
  }
  return names;
}

/// "use native", or "use one of ddim, tcd"
template <typename Value>
std::string UseOneOf(const std::vector<Value>& values) {
  return (values.size() == 1 ? "use " : "use one of ") + NamesOf(values);
}

template <typename Value>
bool Contains(const std::vector<Value>& values, Value value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

std::string_view Name(Training training) {
  switch (training) {
    case Training::kBetas:
      return "timestep";
    case Training::kEdm:
      return "EDM";
    case Training::kFlow:
      return "flow matching";
    case Training::kConsistency:
      return "consistency";
    case Training::kScore:
      return "score";
  }
  return "unknown";
}

/// Devices compute in float: a double beyond its range becomes infinite there. False for NaN.
bool IsFloat(double value) { return std::abs(value) <= std::numeric_limits<float>::max(); }

bool IsFinite(const StepPlan& plan) {
  for (const Evaluation<double>& row : plan.evaluations) {
    const double scalars[] = {row.input_scale,      row.input_shift,   row.condition,
                              row.x0_from_x,        row.x0_from_model, row.log_variance_min,
                              row.log_variance_max, row.known_image,   row.known_noise};
    for (const double value : scalars)
      if (!IsFloat(value)) return false;
    for (const auto& weights : row.weights)
      for (const double weight : weights)
        if (!IsFloat(weight)) return false;
  }
  return IsFloat(plan.initial_source_scale) && IsFloat(plan.initial_noise_scale) &&
         IsFloat(plan.initial_churn_scale) && IsFloat(plan.initial_shift);
}

/// Turns one request into a plan and collects the errors in it.
class Compilation {
 public:
  Compilation(const SchedulerConfig& config, const Fields& fields, const SamplerParams& params)
      : config_(config), fields_(fields), params_(params) {}

  /// Fills in the request.
  void Resolve() {
    ResolveSampler();
    ResolveNumbers();
  }

  StepPlan Run() {
    Resolve();
    if (violations.empty()) CheckSteps();
    if (!violations.empty()) return {};
    StepPlan plan = TraitsOf(request_.sampler).compile(fields_, request_);
    if (!IsFinite(plan) && params_.s_noise)
      Violate("s_noise", fmt::format("is {}, which takes the noise beyond float32; use about 1",
                                     *params_.s_noise));
    else if (!IsFinite(plan))
      Violate("sampler",
              fmt::format("{} cannot run this model's schedule: a coefficient is not finite; {}",
                          Name(request_.sampler),
                          Contains(config_.samplers(), Sampler::kEuler)
                              ? "use euler"
                              : "correct the scheduler's config"));
    return plan;
  }

  /// The resolved parameters, all set.
  SamplerParams Resolved() const {
    SamplerParams params = params_;
    params.sampler = request_.sampler;
    params.schedule = request_.schedule;
    const SamplerTraits& traits = TraitsOf(request_.sampler);
    if (traits.eta) params.eta = request_.eta;
    if (traits.churn) {
      params.s_churn = request_.churn.amount;
      params.s_tmin = request_.churn.min;
      params.s_tmax = request_.churn.max;
      params.s_noise = request_.churn.noise;
    }
    if (traits.solver_order) params.solver_order = request_.solver_order;
    return params;
  }

  std::vector<ParamViolation> violations;

 private:
  void Violate(const char* field, std::string description) {
    violations.push_back({field, std::move(description)});
  }

  /// Of a parameter that the sampler does not read; names those that do.
  std::string HasNoEffect(bool (*reads)(const SamplerTraits& traits)) const {
    std::vector<Sampler> others = config_.samplers();
    std::erase_if(others, [&](Sampler sampler) { return !reads(TraitsOf(sampler)); });
    return fmt::format("has no effect on {}; leave it unset{}{}", Name(request_.sampler),
                       others.empty() ? "" : ", or ", others.empty() ? "" : UseOneOf(others));
  }

  void ResolveSampler() {
    request_.sampler = params_.sampler.value_or(fields_.default_sampler);
    const Sampler sampler = request_.sampler;
    if (!Contains(config_.samplers(), sampler))
      Violate("sampler", fmt::format("{} cannot sample this {} model; {}", Name(sampler),
                                     Name(fields_.training), UseOneOf(config_.samplers())));
    request_.schedule = params_.schedule.value_or(DefaultSchedule(fields_, sampler));
    if (!Contains(config_.schedules(sampler), request_.schedule))
      Violate("schedule", fmt::format("{} is not for {}; {}", Name(request_.schedule),
                                      Name(sampler), UseOneOf(config_.schedules(sampler))));
    const SamplerTraits& traits = TraitsOf(sampler);
    request_.stochastic = traits.sde == SolvesSde::kAlways ||
                          (traits.sde == SolvesSde::kAsConfigured && fields_.stochastic);
    request_.solver_order = params_.solver_order.value_or(fields_.solver_order);
    if (!params_.solver_order) {
      // The class' default may not suit the solver that a request swaps in.
      if (request_.stochastic && !fields_.data_prediction)
        request_.solver_order = std::min(request_.solver_order, 2);
    } else if (!traits.solver_order) {
      Violate("solver_order",
              HasNoEffect([](const SamplerTraits& other) { return other.solver_order; }));
    } else if (request_.solver_order < 1 || request_.solver_order > 3) {
      Violate("solver_order", fmt::format("is {}; use 1, 2 or 3", request_.solver_order));
    } else if (request_.stochastic && !fields_.data_prediction && request_.solver_order == 3) {
      Violate("solver_order", "is 3, which sde-dpmsolver does not have; use 1 or 2");
    }
  }

  void ResolveNumbers() {
    const Sampler sampler = request_.sampler;
    const SamplerTraits& traits = TraitsOf(sampler);
    request_.steps = params_.steps;
    if (params_.steps < 1 || params_.steps > config_.max_steps(sampler))
      Violate("steps", fmt::format("is {}; use 1 to {} with {}", params_.steps,
                                   config_.max_steps(sampler, request_.schedule), Name(sampler)));
    request_.strength = params_.strength;
    if (!(params_.strength > 0 && params_.strength <= 1))
      Violate("strength", fmt::format("is {}; use a number above 0 and up to 1", params_.strength));

    request_.eta = params_.eta.value_or(traits.eta.value_or(0));
    if (params_.eta && !traits.eta)
      Violate("eta", HasNoEffect([](const SamplerTraits& other) { return other.eta.has_value(); }));
    else if (!(request_.eta >= 0 && request_.eta <= 1))
      Violate("eta", fmt::format("is {}; use 0 to 1", request_.eta));

    const auto churn = [&](const char* field, const std::optional<double>& given, double* value,
                           bool may_be_infinite) {
      if (!given) return;
      *value = *given;
      if (!traits.churn)
        Violate(field, HasNoEffect([](const SamplerTraits& other) { return other.churn; }));
      else if (!(*given >= 0 && (may_be_infinite || std::isfinite(*given))))
        Violate(field, fmt::format("is {}; use a number of at least 0", *given));
    };
    churn("s_churn", params_.s_churn, &request_.churn.amount, false);
    churn("s_tmin", params_.s_tmin, &request_.churn.min, false);
    churn("s_tmax", params_.s_tmax, &request_.churn.max, true);
    churn("s_noise", params_.s_noise, &request_.churn.noise, false);
    if (request_.churn.max >= 0 && request_.churn.min > request_.churn.max)
      Violate("s_tmin", fmt::format("is {}, above s_tmax = {}; swap them", request_.churn.min,
                                    request_.churn.max));
  }

  /// Conditions on a request that is right field by field.
  void CheckSteps() {
    const Sampler sampler = request_.sampler;
    const SamplerTraits& traits = TraitsOf(sampler);
    const bool distilled = traits.levels == Levels::kDistilled;
    if (distilled && fields_.original_inference_steps > fields_.train_timesteps)
      return Violate(
          "sampler",
          fmt::format("{} needs original_inference_steps = {} of {} training timesteps; "
                      "use another sampler",
                      Name(sampler), fields_.original_inference_steps, fields_.train_timesteps));
    if (traits.check != nullptr) {
      if (auto violation = traits.check(fields_, request_))
        return violations.push_back(*std::move(violation));
    }
    CheckLeadingTimesteps();
    if (violations.empty() && traits.walks_sigmas()) CheckSigmasDescend();
  }

  void CheckLeadingTimesteps() {
    const int trained = fields_.train_timesteps;
    const auto highest = [&](int steps) {
      return HighestTimestep(fields_, request_.sampler, request_.schedule, steps);
    };
    if (highest(request_.steps) < trained) return;
    int fewer = request_.steps - 1;
    while (fewer > 1 && highest(fewer) >= trained) --fewer;
    Violate("steps",
            fmt::format("is {}; with steps_offset {} the first timestep would be {} of {}, "
                        "use at most {}",
                        request_.steps, fields_.steps_offset, highest(request_.steps), trained,
                        std::max(1, fewer)));
  }

  void CheckSigmasDescend() {
    const SigmaPath path = SigmaPathOf(fields_, request_);
    if (path.steps() < 1)
      return Violate("steps", "leaves no timesteps below lambda_min_clipped; use more");
    for (int i = 1; i < path.steps(); ++i)
      if (!(path.sigmas[i] < path.sigmas[i - 1]))
        return Violate("steps", fmt::format("is {}; steps {} and {} would share a noise level, use "
                                            "fewer",
                                            request_.steps, i - 1, i));
  }

  const SchedulerConfig& config_;
  const Fields& fields_;
  const SamplerParams& params_;
  Request request_;
};

}  // namespace

SamplerParams SchedulerConfig::WithDefaults(const SamplerParams& params) const {
  Compilation compilation(*this, *fields_, params);
  compilation.Resolve();
  return compilation.Resolved();
}

absl::StatusOr<StepPlan> SchedulerConfig::Compile(const SamplerParams& params,
                                                  std::vector<ParamViolation>* violations) const {
  Compilation compilation(*this, *fields_, params);
  StepPlan plan = compilation.Run();
  if (violations != nullptr) *violations = compilation.violations;
  if (compilation.violations.empty()) return plan;
  std::string message;
  for (const ParamViolation& violation : compilation.violations)
    message +=
        fmt::format("{}{} {}", message.empty() ? "" : "\n", violation.field, violation.description);
  return InvalidArgument("{}", message);
}

}  // namespace denoised
