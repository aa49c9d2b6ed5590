// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/timeline.h"

#include <algorithm>

namespace denoised {

v1::Stage ToWire(Stage stage) {
  switch (stage) {
    case Stage::kCondition:
      return v1::STAGE_CONDITION;
    case Stage::kEncode:
      return v1::STAGE_ENCODE;
    case Stage::kDenoise:
      return v1::STAGE_DENOISE;
    case Stage::kDecode:
      return v1::STAGE_DECODE;
  }
  return v1::STAGE_UNSPECIFIED;
}

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
  // All rows of an evaluation are reported at once, so `done` can skip a multiple.
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

void Timeline::AddStage(double seconds, int index, Stage stage, double device_seconds) {
  v1::TimelineEntry& entry = New(v1::TimelineEntry::MILESTONE_STAGE, seconds);
  entry.set_image_index(index);
  entry.set_stage(ToWire(stage));
  if (device_seconds >= 0) entry.set_device_seconds(device_seconds);
}

v1::Timeline Timeline::ToProto() const {
  v1::Timeline timeline;
  timeline.mutable_entries()->Assign(entries_.begin(), entries_.end());
  return timeline;
}

}  // namespace denoised
