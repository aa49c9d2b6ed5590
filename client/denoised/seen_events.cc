// SPDX-License-Identifier: Apache-2.0
#include "denoised/seen_events.h"

#include <utility>

namespace denoised::client {

SeenEvents::News SeenEvents::Add(const Event& event) {
  const auto* queued = std::get_if<Queued>(&event);
  if (queued == nullptr) return IsFurther(event) ? News::kFurther : News::kNone;
  const Place place(queued->position, queued->images_ahead);
  if (started_ || place == place_) return News::kNone;
  place_ = place;
  if (foremost_ && place >= *foremost_) return News::kPlace;
  foremost_ = place;
  return News::kFurther;
}

bool SeenEvents::IsFurther(const Event& event) {
  if (std::holds_alternative<Started>(event)) return !std::exchange(started_, true);
  if (const auto* progress = std::get_if<Progress>(&event)) {
    if (progress->evaluations_done <= evaluations_done_) return false;
    evaluations_done_ = progress->evaluations_done;
  } else if (const auto* preview = std::get_if<Preview>(&event)) {
    const int index = preview->image.index;
    const auto [latest, first] = previews_.try_emplace(index, preview->evaluation);
    if (images_.contains(index) || (!first && preview->evaluation <= latest->second)) return false;
    latest->second = preview->evaluation;
  } else if (const auto* image = std::get_if<Image>(&event)) {
    return images_.insert(image->index).second;
  }
  return true;
}

}  // namespace denoised::client
