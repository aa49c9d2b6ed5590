#pragma once

#include <map>
#include <set>

#include "denoised/generation.h"

namespace denoised::client {

/// What a listener was told of a request, so that a stream which is begun again tells nothing
/// twice.
class Told {
 public:
  /// Whether `event` is news; from then on it no longer is. Progress and previews are none while
  /// another server catches up with the first.
  bool IsNews(const Event& event);

 private:
  bool queued_ = false, started_ = false;
  int evaluations_done_ = -1;
  std::map<int, int> previews_;  // latest evaluation by image
  std::set<int> images_;
};

}  // namespace denoised::client
