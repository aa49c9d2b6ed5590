// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "engine/core/status.h"
#include "engine/training/exchange.h"

/// How the ranks of a run come together, before the first step.

namespace denoised::trainer {

/// training::ConnectExchange(), but Cancelled as soon as `stop` is true: no thread is then waited
/// for, so the process should end.
absl::StatusOr<std::unique_ptr<training::Exchange>> ConnectRanks(int rank, int ranks,
                                                                 const std::string& address,
                                                                 double timeout_seconds,
                                                                 const std::atomic<bool>& stop);

/// Ranks read and encode pictures in times of their own, which may be longer than a rank may be
/// silent in Exchange::Swap(). Meanwhile a thread of each tells the others that its rank lives, and
/// whether it was told to stop.
class Pulse {
 public:
  /// All ranks make one. Until it is gone, nothing else may use `host`, which must outlive it.
  Pulse(training::Exchange& host, const std::atomic<bool>& stop);
  /// The others then see this rank's connections close, if WaitForAll() has not returned.
  ~Pulse();

  /// Whether to end at once what this rank does: some rank was told to stop, or is lost.
  const std::atomic<bool>& ended() const { return ended_; }
  /// Waits until all ranks call this, without a limit. Cancelled if one of them was told to stop,
  /// Unavailable if one is lost.
  absl::Status WaitForAll();

 private:
  absl::Status Beat();

  training::Exchange& host_;
  const std::atomic<bool>& stop_;
  std::atomic<bool> ended_ = false;
  Mutex mutex_;
  ConditionVariable changed_;
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;  // this rank
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_;  // of the thread, once it has ended
  std::thread thread_;   // the last: it uses the others
};

}  // namespace denoised::trainer
