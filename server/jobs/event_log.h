#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "denoised/v1/image_generation.pb.h"

namespace denoised {

/// What happened to a job, for readers that each come when they can. Of progress and of each
/// image's previews it keeps the latest, so a reader that is slow or late is told only what still
/// matters; every other event stays until it is forgotten. An event has the same number for all
/// readers; numbers rise, and those that are missing were replaced by newer ones. Not synchronised.
class EventLog {
 public:
  using Event = v1::StreamGenerateResponse;

  /// `request_id` goes into every event.
  explicit EventLog(std::string request_id) : request_id_(std::move(request_id)) {}

  void Push(Event event);
  /// The first event after `sequence`; null when there is none.
  std::shared_ptr<const Event> After(uint64_t sequence) const;
  /// Drops events up to `sequence`, which nobody will ask for.
  void Forget(uint64_t sequence);

  /// The number of the last event, 0 before the first.
  uint64_t last_sequence() const { return sequence_; }
  /// Of all events that are kept.
  size_t bytes() const { return bytes_; }

 private:
  using Events = std::map<uint64_t, std::shared_ptr<const Event>>;
  void Drop(Events::iterator event);

  const std::string request_id_;
  Events events_;
  uint64_t sequence_ = 0;
  uint64_t progress_ = 0;             // number of the latest; 0: none
  std::map<int, uint64_t> previews_;  // numbers of the latest, by image
  size_t bytes_ = 0;
};

}  // namespace denoised
