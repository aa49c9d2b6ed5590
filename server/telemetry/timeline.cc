// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/timeline.h"

#include <algorithm>

namespace denoised {

v1::TimelineEntry& Timeline::New(v1::TimelineEntry::Milestone milestone, double seconds) {
  v1::TimelineEntry& entry = entries_.emplace_back();
  entry.set_milestone(milestone);
  entry.set_seconds(seconds);
  return entry;
}

void Timeline::Add(v1::TimelineEntry::Milestone milestone, double seconds) {
  New(milestone, seconds);
}

void Timeline::AddImage(v1::TimelineEntry::Milestone milestone, double seconds, int index) {
  New(milestone, seconds).set_image_index(index);
}

void Timeline::AddEvaluation(double seconds, int done, int total) {
  // Rows of one evaluation are reported together, so `done` may step over a multiple.
  if (done < total && done / stride_ <= last_ / stride_) return;
  last_ = done;
  New(v1::TimelineEntry::MILESTONE_EVALUATION, seconds).set_evaluations(done);
  if (++evaluations_ < kMaxEvaluations) return;
  stride_ *= 2;
  int previous = 0;
  std::erase_if(entries_, [&](const v1::TimelineEntry& entry) {
    if (!entry.has_evaluations() || entry.evaluations() == total) return false;
    if (entry.evaluations() / stride_ <= previous / stride_) {
      --evaluations_;
      return true;
    }
    previous = entry.evaluations();
    return false;
  });
}

v1::Timeline Timeline::ToProto() const {
  v1::Timeline timeline;
  timeline.mutable_entries()->Assign(entries_.begin(), entries_.end());
  return timeline;
}

}  // namespace denoised
