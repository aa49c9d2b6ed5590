// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "denoised/v1/image_generation.pb.h"

namespace denoised {

/// The events of a job, for readers at different paces. The log keeps only the latest place in
/// the queue, the latest progress and the latest preview of each image, so a slow or late reader
/// skips what is outdated. Other events stay until Forget. All readers see the same sequence
/// numbers. A gap in the numbers means that a newer event replaced an older one. Not synchronised.
class EventLog {
 public:
  using Event = v1::StreamGenerateResponse;

  /// `request_id` goes into every event. `all` counts the bytes of all logs and outlives them.
  EventLog(std::string request_id, std::atomic<size_t>* all)
      : request_id_(std::move(request_id)), all_(all) {}
  ~EventLog() { *all_ -= bytes_; }

  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  void Push(Event event);
  /// The first event after `sequence`; null when there is none.
  std::shared_ptr<const Event> After(uint64_t sequence) const;
  /// Drops events up to `sequence`.
  void Forget(uint64_t sequence);

  /// The number of the last event, 0 before the first.
  uint64_t last_sequence() const { return sequence_; }
  /// Bytes of all events that are kept.
  size_t bytes() const { return bytes_; }

 private:
  using Events = std::map<uint64_t, std::shared_ptr<const Event>>;
  void Drop(Events::iterator event);

  const std::string request_id_;
  std::atomic<size_t>* const all_;
  Events events_;
  uint64_t sequence_ = 0;
  uint64_t queued_ = 0;               // number of the latest; 0: none
  uint64_t progress_ = 0;             // likewise
  std::map<int, uint64_t> previews_;  // numbers of the latest, by image
  size_t bytes_ = 0;
};

}  // namespace denoised
