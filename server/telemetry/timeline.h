// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "denoised/v1/image_generation.pb.h"

namespace denoised {

/// The moments of a request, for include_timings. Of the evaluations it keeps every tenth and the
/// last; when those become many, every twentieth, and so on, so that a long request's timeline
/// stays short. Not synchronised.
class Timeline {
 public:
  void Add(v1::TimelineEntry::Milestone milestone, double seconds);
  void AddImage(v1::TimelineEntry::Milestone milestone, double seconds, int index);
  void AddEvaluation(double seconds, int done, int total);

  v1::Timeline ToProto() const;

 private:
  v1::TimelineEntry& New(v1::TimelineEntry::Milestone milestone, double seconds);

  static constexpr int kMaxEvaluations = 100;

  std::vector<v1::TimelineEntry> entries_;
  int stride_ = 10, evaluations_ = 0;  // entries of evaluations
  int last_ = 0;                       // the evaluation entered last
};

}  // namespace denoised
