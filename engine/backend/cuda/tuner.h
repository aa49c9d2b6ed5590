#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/backend/cuda/device.h"
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

/// Chooses ways by measuring them, once for each kind of device. Of the thread that owns the
/// device.
class Tuner {
 public:
  /// Without a file what was measured is forgotten in the end. `notify` may be empty.
  Tuner(cudaStream_t stream, std::optional<TuningFile> file, Notify notify)
      : stream_(stream), file_(std::move(file)), notify_(std::move(notify)) {}

  /// The one of `ways`, of which the first should be the fastest, that was the fastest when `what`
  /// was measured; the first when it was not, and then Measure() will. Everywhere the same `what`
  /// has the same ways, but for their operands.
  const Way& Choose(const std::string& what, const Ways& ways);

  bool has_unknown() const { return !unknown_.empty(); }
  /// Measures what Choose() did not know, in the stream and on the ways' own operands, those of one
  /// place after another where it was asked: what they write is undefined after it.
  absl::Status Measure();

 private:
  void ReadFile();

  const cudaStream_t stream_;
  const std::optional<TuningFile> file_;
  const Notify notify_;
  bool read_ = false, said_ = false;
  TunedWays known_;
  std::map<std::string, std::vector<Ways>> unknown_;  // of each place
};

}  // namespace denoised::cuda
