// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/backend/cuda/device.h"
#include "engine/backend/cuda/launch.h"
#include "engine/backend/tuning_file.h"
#include "engine/core/notify.h"

namespace denoised::cuda {

/// One of several ways to compute a launch that all give the same bits.
struct Candidate {
  std::string name;
  double microseconds = 0;  // expected
  std::function<cudaError_t()> enqueue;
};

using Candidates = std::vector<Candidate>;

/// A matrix that a launch reads, in memory that may be overwritten while it is measured.
struct Operand {
  Rows values;
  int64_t rows = 0;
  int columns = 0;
};

/// Chooses the fastest candidate by measuring, once for each kind of device. Not thread-safe: for
/// the thread that owns the device.
class Tuner {
 public:
  /// Without a file, measurements are lost with the tuner. `notify` may be empty.
  Tuner(const Queue& queue, std::optional<TuningFile> file, Notify notify)
      : queue_(queue), file_(std::move(file)), notify_(std::move(notify)) {}

  /// The fastest candidate if `what` was measured. Otherwise the first one, which the cost model
  /// expects to be the fastest, and the next Measure() measures `what`. The same `what` must always
  /// come with the same candidates; only operands may differ.
  const Candidate& Choose(const std::string& what, const Candidates& candidates,
                          std::vector<Operand> operands);

  bool has_unknown() const { return !unknown_.empty(); }
  /// Measures the launches that Choose() did not know, in the queue's stream, alternating between
  /// the operands of all calls that asked. Fills operands with normal noise of unit size first,
  /// because multiplying zeros takes less power, and so less time, than a model's values. Operands
  /// and results are undefined afterwards.
  absl::Status Measure();

 private:
  /// A launch that Choose() was asked about.
  struct Place {
    Candidates contenders;
    std::vector<Operand> operands;
  };

  void ReadFile();
  absl::StatusOr<size_t> Fastest(const std::string& what, const std::vector<Place>& places);

  const Queue queue_;
  const std::optional<TuningFile> file_;
  const Notify notify_;
  bool read_ = false, notified_ = false;
  TunedChoices known_;
  std::map<std::string, std::vector<Place>> unknown_;
};

}  // namespace denoised::cuda
