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

/// One of several ways to enqueue the same, all of which give the same bits.
struct Way {
  std::string name;
  double microseconds = 0;  // that it should take
  std::function<cudaError_t()> enqueue;
};

using Ways = std::vector<Way>;

/// A matrix that a launch reads, in memory that may be overwritten while it is measured.
struct Operand {
  Rows values;
  int64_t rows = 0;
  int columns = 0;
};

/// Chooses ways by measuring them, once for each kind of device. Of the thread that owns the
/// device.
class Tuner {
 public:
  /// Without a file what was measured is forgotten in the end. `notify` may be empty.
  Tuner(const Queue& queue, std::optional<TuningFile> file, Notify notify)
      : queue_(queue), file_(std::move(file)), notify_(std::move(notify)) {}

  /// The one of `ways`, of which the first should be the fastest, that was the fastest when `what`
  /// was measured; the first when it was not, and then Measure() will. Everywhere the same `what`
  /// has the same ways, but for their operands.
  const Way& Choose(const std::string& what, const Ways& ways, std::vector<Operand> operands);

  bool has_unknown() const { return !unknown_.empty(); }
  /// Measures what Choose() did not know, in the stream and at all places where it was asked, one
  /// after another. Operands are filled with normal noise of unit size first: multiplying zeros
  /// takes less power, and so less time, than what a model multiplies. Operands and what the ways
  /// write are undefined afterwards.
  absl::Status Measure();

 private:
  /// Where Choose() was asked.
  struct Place {
    Ways contenders;
    std::vector<Operand> operands;
  };

  void ReadFile();
  absl::StatusOr<size_t> Fastest(const std::string& what, const std::vector<Place>& places);

  const Queue queue_;
  const std::optional<TuningFile> file_;
  const Notify notify_;
  bool read_ = false, said_ = false;
  TunedWays known_;
  std::map<std::string, std::vector<Place>> unknown_;
};

}  // namespace denoised::cuda
