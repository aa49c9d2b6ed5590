#include "server/outbox.h"

#include <algorithm>
#include <utility>

namespace denoised {
namespace {

/// Whether `waiting` need not be sent any more once `next` is.
bool Supersedes(const v1::StreamGenerateResponse& next, const v1::StreamGenerateResponse& waiting) {
  if (waiting.has_progress()) return next.has_progress();
  if (!waiting.has_preview()) return false;
  const int index = waiting.preview().image().index();
  return (next.has_preview() && next.preview().image().index() == index) ||
         (next.has_image() && next.image().image().index() == index);
}

}  // namespace

void Outbox::Push(v1::StreamGenerateResponse event) {
  events_.erase(std::remove_if(events_.begin(), events_.end(),
                               [&](const auto& waiting) { return Supersedes(event, waiting); }),
                events_.end());
  events_.push_back(std::move(event));
}

std::optional<v1::StreamGenerateResponse> Outbox::Pop() {
  if (events_.empty()) return std::nullopt;
  v1::StreamGenerateResponse event = std::move(events_.front());
  events_.pop_front();
  event.set_sequence(++sequence_);
  event.set_request_id(request_id_);
  return event;
}

}  // namespace denoised
