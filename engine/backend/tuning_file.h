#pragma once

#include <map>
#include <string>

#include "engine/core/status.h"

namespace denoised {

/// What was computed, in words, and the name of the way that was fastest.
using TunedWays = std::map<std::string, std::string>;

/// What was measured on a kind of device with a build of the kernels, kept for the next process:
/// {"device": …, "kernels": …, "ways": {…}}. Processes and threads may share the file: it is
/// replaced as a whole; a measurement that another process overwrites is only measured again.
class TuningFile {
 public:
  TuningFile(std::string path, std::string device, std::string kernels)
      : path_(std::move(path)), device_(std::move(device)), kernels_(std::move(kernels)) {}

  const std::string& path() const { return path_; }

  /// Empty if there is no file, or if it is of another device or other kernels. InvalidArgument,
  /// with the remedy, if it is not a tuning file.
  absl::StatusOr<TunedWays> Read() const;
  /// Adds to what the file holds; makes its directory. FailedPrecondition says why it cannot be.
  absl::Status Add(const TunedWays& ways) const;

 private:
  std::string path_, device_, kernels_;
};

}  // namespace denoised
