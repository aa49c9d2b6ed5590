// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <set>

#include "denoised/generation.h"

namespace denoised::client {

/// The events of a request that its listener has received. A stream that is retried repeats them;
/// the listener must not receive them twice.
class SeenEvents {
 public:
  /// Whether `event` is new; it is seen from then on. Progress and previews of a second server are
  /// not new until it is further than the first one was.
  bool Add(const Event& event);

 private:
  bool queued_ = false, started_ = false;
  int evaluations_done_ = -1;
  std::map<int, int> previews_;  // latest evaluation by image
  std::set<int> images_;
};

}  // namespace denoised::client
