// SPDX-License-Identifier: Apache-2.0
#include "denoised/seen_events.h"

#include <utility>

namespace denoised::client {

bool SeenEvents::Add(const Event& event) {
  if (std::holds_alternative<Queued>(event)) return !std::exchange(queued_, true);
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
