// SPDX-License-Identifier: Apache-2.0
#include "trainer/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <chrono>
#include <exception>

namespace denoised::trainer {
namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;

/// Seconds of a step: from a small network on a GPU to a large one on a CPU.
const Histogram::BucketBoundaries kStepSeconds = {0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1,
                                                  2,    5,    10,   20,  50,  100};

}  // namespace

struct RunMetrics::State {
  // Shared, since the exposer keeps a weak pointer.
  const std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  Gauge& NewGauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(*registry).Add({});
  }
  Counter& NewCounter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(*registry).Add({});
  }
  Gauge& step = NewGauge("denoised_train_step", "Steps made");
  Gauge& steps = NewGauge("denoised_train_target_step", "Steps of the whole run");
  Gauge& loss = NewGauge("denoised_train_loss", "Mean loss of the last step");
  Gauge& norm =
      NewGauge("denoised_train_gradient_norm", "Norm of the last gradient, before clipping");
  Gauge& rate = NewGauge("denoised_train_learning_rate", "Learning rate of the last step");
  Gauge& speed = NewGauge("denoised_train_images_per_second", "Pictures per second, last step");
  Gauge& checkpoint = NewGauge("denoised_train_checkpoint_step", "Step of the last checkpoint");
  Gauge& checkpoint_time = NewGauge("denoised_train_checkpoint_time_seconds",
                                    "When this process last saved, Unix time; 0: not yet");
  Counter& images = NewCounter("denoised_train_images_total", "Pictures that steps have shown");
  Counter& skipped =
      NewCounter("denoised_train_skipped_steps_total", "Steps whose gradient was not finite");
  Histogram& seconds = prometheus::BuildHistogram()
                           .Name("denoised_train_step_seconds")
                           .Help("Duration of a step")
                           .Register(*registry)
                           .Add({}, kStepSeconds);
  std::unique_ptr<prometheus::Exposer> exposer;
};

RunMetrics::RunMetrics(std::unique_ptr<State> state) : state_(std::move(state)) {}
RunMetrics::~RunMetrics() = default;

absl::StatusOr<std::unique_ptr<RunMetrics>> RunMetrics::Listen(const std::string& address,
                                                               int64_t steps) {
  auto state = std::make_unique<State>();
  state->steps.Set(static_cast<double>(steps));
  try {
    state->exposer = std::make_unique<prometheus::Exposer>(address);
    state->exposer->RegisterCollectable(state->registry);
  } catch (const std::exception&) {  // civetweb's has no reason
    return Unavailable(
        "--metrics-listen {}: cannot listen there; give a host of this machine and a free port{}",
        address, address.starts_with('[') ? ". As Debian builds it, civetweb has no IPv6" : "");
  }
  return std::unique_ptr<RunMetrics>(new RunMetrics(std::move(state)));
}

void RunMetrics::Began(int64_t step) {
  state_->step.Set(static_cast<double>(step));
  state_->checkpoint.Set(static_cast<double>(step));
}

void RunMetrics::Stepped(const training::StepReport& report, int64_t pictures, double seconds) {
  state_->step.Set(static_cast<double>(report.step));
  state_->loss.Set(report.loss);
  state_->norm.Set(report.gradient_norm);
  state_->rate.Set(report.rate);
  state_->speed.Set(static_cast<double>(pictures) / seconds);
  state_->images.Increment(static_cast<double>(pictures));
  if (report.skipped) state_->skipped.Increment();
  state_->seconds.Observe(seconds);
}

void RunMetrics::Saved(int64_t step) {
  state_->checkpoint.Set(static_cast<double>(step));
  state_->checkpoint_time.Set(
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
}

int RunMetrics::port() const { return state_->exposer->GetListeningPorts().front(); }

}  // namespace denoised::trainer
