// SPDX-License-Identifier: Apache-2.0
#include "server/jobs/event_log.h"

#include <utility>

namespace denoised {

void EventLog::Push(Event event) {
  event.set_sequence(++sequence_);
  event.set_request_id(request_id_);
  uint64_t replaced = 0;
  if (event.has_queued()) {
    replaced = std::exchange(queued_, sequence_);
  } else if (event.has_progress()) {
    replaced = std::exchange(progress_, sequence_);
  } else if (event.has_preview()) {
    replaced = std::exchange(previews_[event.preview().image().index()], sequence_);
  } else if (event.has_image()) {
    replaced = std::exchange(previews_[event.image().image().index()], 0);
  }
  if (const auto old = events_.find(replaced); old != events_.end()) Drop(old);
  const size_t bytes = event.ByteSizeLong();
  bytes_ += bytes;
  *all_ += bytes;
  events_.emplace_hint(events_.end(), sequence_, std::make_shared<const Event>(std::move(event)));
}

std::shared_ptr<const EventLog::Event> EventLog::After(uint64_t sequence) const {
  const auto event = events_.upper_bound(sequence);
  return event == events_.end() ? nullptr : event->second;
}

void EventLog::Forget(uint64_t sequence) {
  while (!events_.empty() && events_.begin()->first <= sequence) Drop(events_.begin());
}

void EventLog::Drop(Events::iterator event) {
  const size_t bytes = event->second->ByteSizeLong();
  bytes_ -= bytes;
  *all_ -= bytes;
  events_.erase(event);
}

}  // namespace denoised
