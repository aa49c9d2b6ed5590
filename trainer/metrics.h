// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/core/status.h"
#include "engine/training/trainer.h"

namespace denoised::trainer {

/// The numbers of a run for Prometheus, at /metrics. docs/training.md lists them. Thread-safe.
class RunMetrics {
 public:
  /// Answers on `address` (host:port) until destruction; port 0 picks a free one. `steps` is where
  /// the run ends. Unavailable names --metrics-listen.
  static absl::StatusOr<std::unique_ptr<RunMetrics>> Listen(const std::string& address,
                                                            int64_t steps);
  ~RunMetrics();

  /// The run goes on after `step`, which is 0 or that of a checkpoint.
  void Began(int64_t step);
  /// A step of `pictures` was made in `seconds`.
  void Stepped(const training::StepReport& report, int64_t pictures, double seconds);
  void Saved(int64_t step);

  int port() const;

 private:
  struct State;
  explicit RunMetrics(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace denoised::trainer
