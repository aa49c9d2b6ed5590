// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "engine/core/status.h"

namespace denoised {

/// A launch, in words, and the name of the candidate that was the fastest.
using TunedChoices = std::map<std::string, std::string>;

/// What was measured on a kind of device with a build of the kernels, kept for the next process:
/// {"version": 2, "device": …, "kernels": …, "choices": {…}}. Processes and threads may share the
/// file: it is replaced as a whole; a measurement that another process overwrites is only measured
/// again.
class TuningFile {
 public:
  TuningFile(std::string path, std::string device, std::string kernels)
      : path_(std::move(path)), device_(std::move(device)), kernels_(std::move(kernels)) {}

  const std::string& path() const { return path_; }

  /// Empty when there is no file, or one of another version, device or build. InvalidArgument when
  /// the file does not have the form above; the message says that it will be replaced.
  absl::StatusOr<TunedChoices> Read() const;
  /// Adds to what the file holds; makes its directory. FailedPrecondition says why it cannot be.
  absl::Status Add(const TunedChoices& choices) const;

 private:
  std::string path_, device_, kernels_;
};

}  // namespace denoised
