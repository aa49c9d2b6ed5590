// SPDX-License-Identifier: Apache-2.0
#pragma once

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

/// The generations that run and those whose results are kept, each by the client it belongs to and
/// its request_id. A result is kept for the time and within the bytes of JobRetention when somebody
/// can ask for it: its client chose the id, or wanted it to survive. Thread-safe.
class Jobs {
 public:
  using Clock = std::chrono::steady_clock;

  Jobs(const JobContext& context, const JobRetention& retention)
      : context_(context), retention_(retention) {}

  /// The generation that the request asks for, watched by `watcher`: a new one, which was started,
  /// or the one of this client and request_id that runs or is kept. Null with `refusal` set when
  /// that one was asked for something else: ALREADY_EXISTS names what differs. Whatever else is
  /// wrong is the end of the new one. On a worker thread.
  std::shared_ptr<Generation> Begin(const JobRequest& request,
                                    const std::shared_ptr<GenerationWatcher>& watcher,
                                    grpc::Status* refusal);

  /// Null with `refusal` set: NOT_FOUND, or INVALID_ARGUMENT without an id.
  std::shared_ptr<Generation> Find(const std::string& client, const std::string& request_id,
                                   grpc::Status* refusal) const;
  /// What GetJob replies.
  v1::Job Describe(const Generation& generation) const;
  /// Those of `client`, or without one of all: the `size` latest of those that began before the one
  /// with the number `before`. The token of the next page is the number of the last.
  v1::ListJobsResponse List(const std::optional<std::string>& client, size_t size,
                            uint64_t before) const;

  /// Called by a generation, once, when it has ended.
  void Ended(const std::shared_ptr<Generation>& generation);
  /// Drops results that were kept long enough, and the oldest while there are too many bytes: those
  /// of jobs that still run count too.
  void Expire();

  /// Generations that run or are kept, and the bytes of their events.
  size_t size() const;
  size_t bytes() const;
  /// How many there are by the model's name and their state.
  std::map<std::pair<std::string, v1::JobState>, int> CountByState() const;

 private:
  using Key = std::pair<std::string, std::string>;  // client, request_id
  struct Entry {
    std::shared_ptr<Generation> generation;
    uint64_t number = 0;              // in the order of their beginnings
    v1::StreamGenerateRequest asked;  // only of requests whose client chose the id
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
  /// Drops the kept result of `generation`, whose place a retry takes.
  void Forget(const Generation& generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const JobContext context_;
  const JobRetention retention_;
  mutable Mutex mutex_;
  std::map<Key, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;  // of all that began
  std::deque<Kept> kept_ ABSL_GUARDED_BY(mutex_);     // in the order of their ends
  size_t kept_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace denoised
