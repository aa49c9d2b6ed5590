// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"

namespace denoised {

v1::Stage ToWire(Stage stage);

/// The timestamps of a request, for include_timings. It keeps every tenth evaluation and the last
/// one; if these become too many, every twentieth, and so on, so that timelines of long requests
/// stay short. Not synchronised.
class Timeline {
 public:
  void Add(v1::TimelineEntry::Milestone milestone, double seconds);
  void AddImage(v1::TimelineEntry::Milestone milestone, double seconds, int index);
  void AddEvaluation(double seconds, int done, int total);
  /// `device_seconds` < 0: unknown.
  void AddStage(double seconds, int index, Stage stage, double device_seconds);

  v1::Timeline ToProto() const;

 private:
  v1::TimelineEntry& New(v1::TimelineEntry::Milestone milestone, double seconds);

  static constexpr int kMaxEvaluations = 100;

  std::vector<v1::TimelineEntry> entries_;
  int stride_ = 10, evaluations_ = 0;  // number of evaluation entries
  int last_ = 0;                       // the last evaluation with an entry
};

}  // namespace denoised
