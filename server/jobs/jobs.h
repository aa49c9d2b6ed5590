// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "engine/core/mutex.h"
#include "server/jobs/generation.h"
#include "server/jobs/job_request.h"
#include "server/jobs/retention.h"

namespace denoised {

/// All running generations, and the finished ones whose results are kept, by client and request_id.
/// A result is kept if someone can ask for it: the client chose the id, or asked for the job to
/// survive. JobRetention limits how long and how many bytes. Thread-safe.
class Jobs {
 public:
  using Clock = std::chrono::steady_clock;

  Jobs(const JobContext& context, const JobRetention& retention)
      : context_(context), retention_(retention) {}

  /// Returns the job of this client and request_id if it is running or kept; otherwise starts a new
  /// one. `watcher` watches it. Returns null and sets `refusal` to ALREADY_EXISTS, naming the
  /// field, if the existing job is of a different request, and to INTERNAL if the system gives no
  /// id. Any other error becomes the final status of the new job. Call on a worker thread.
  std::shared_ptr<Generation> Begin(const JobRequest& request,
                                    const std::shared_ptr<GenerationWatcher>& watcher,
                                    grpc::Status* refusal);

  /// Returns null and sets `refusal` if there is no such job (NOT_FOUND) or no id
  /// (INVALID_ARGUMENT).
  std::shared_ptr<Generation> Find(const std::string& client, const std::string& request_id,
                                   grpc::Status* refusal) const;
  /// The reply of GetJob.
  v1::Job Describe(const Generation& generation) const;
  /// The jobs of `client`, or of all clients: the latest `size` among those that started before job
  /// number `before`; fewer, but at least one, if they would exceed `max_bytes`. The page token is
  /// the number of the last one listed.
  v1::ListJobsResponse List(const std::optional<std::string>& client, size_t size, uint64_t before,
                            int64_t max_bytes) const;

  /// A generation calls this once, when it has ended.
  void Ended(const std::shared_ptr<Generation>& generation);
  /// Drops expired results, then the oldest until the rest fits the byte limit. Events of running
  /// jobs count towards it.
  void Expire();

  /// Bytes of what is kept, and of the events of all generations: also of those that have ended and
  /// live only as long as calls read them.
  size_t bytes() const;
  /// Counts the events of all generations. They must not outlive it.
  std::atomic<size_t>* event_bytes() { return &event_bytes_; }
  /// Their number by model name and state.
  std::map<std::pair<std::string, v1::JobState>, int> CountByState() const;

 private:
  using Key = std::pair<std::string, std::string>;  // client, request_id
  struct Entry {
    std::shared_ptr<Generation> generation;
    uint64_t number = 0;  // counts up in the order of their starts
    std::shared_ptr<const v1::StreamGenerateRequest> asked;  // empty unless the client chose the id
    size_t asked_bytes = 0;
    std::optional<std::chrono::system_clock::time_point> expires;
  };
  struct Kept {
    std::shared_ptr<Generation> generation;
    size_t bytes;
    Clock::time_point expires;
  };

  static Key KeyOf(const Generation& generation);
  size_t RunningBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Drops the kept result of `generation`, because a retry replaces it.
  void Forget(const Generation& generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const JobContext context_;
  const JobRetention retention_;
  std::atomic<size_t> event_bytes_{0};  // before entries_, which hold generations
  mutable Mutex mutex_;
  std::map<Key, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;  // of all that began
  std::deque<Kept> kept_ ABSL_GUARDED_BY(mutex_);     // in the order of their ends
  size_t kept_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace denoised
