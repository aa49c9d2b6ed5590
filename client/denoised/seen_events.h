// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <set>
#include <utility>

#include "denoised/generation.h"

namespace denoised::client {

/// The events of a request that its listener has received. A stream that is retried repeats them;
/// the listener must not receive them twice.
class SeenEvents {
 public:
  enum class News {
    kNone,     // it is known
    kPlace,    // another place in the queue, but none further in front than any before
    kFurther,  // the request has come further
  };
  /// What `event` says that was not known; it is known from then on. Progress and previews of a
  /// second server are not new until it is further than the first one was.
  News Add(const Event& event);

 private:
  bool IsFurther(const Event& event);

  using Place = std::pair<int, int>;  // requests and images in front
  std::optional<Place> place_, foremost_;
  bool started_ = false;
  int evaluations_done_ = -1;
  std::map<int, int> previews_;  // latest evaluation by image
  std::set<int> images_;
};

}  // namespace denoised::client
