#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "denoised/v1/image_generation.pb.h"

namespace denoised {

/// Events that wait for a stream's reader. A slow reader is sent only the latest progress and the
/// latest preview of each image, but every other event, in order; numbers are given on the way out,
/// so they have no gaps. Not synchronised.
class Outbox {
 public:
  /// `request_id` goes into every event.
  explicit Outbox(std::string request_id = "") : request_id_(std::move(request_id)) {}

  void set_request_id(std::string id) { request_id_ = std::move(id); }

  void Push(v1::StreamGenerateResponse event);
  /// The next event, numbered; nothing when there is none.
  std::optional<v1::StreamGenerateResponse> Pop();
  void Clear() { events_.clear(); }
  bool empty() const { return events_.empty(); }

 private:
  std::string request_id_;
  uint64_t sequence_ = 0;  // of the last event that left
  std::deque<v1::StreamGenerateResponse> events_;
};

}  // namespace denoised
