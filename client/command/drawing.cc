// SPDX-License-Identifier: Apache-2.0
#include "command/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "command/codec.h"
#include "command/progress.h"

namespace denoised::command {
namespace {

using std::chrono::steady_clock;

// More often, a terminal shows nothing more and slows the stream down.
constexpr auto kRedrawInterval = std::chrono::milliseconds(50);

}  // namespace

void Drawing::OnEvent(const client::Event& event) {
  std::visit([this](const auto& concrete) { On(concrete); }, event);
}

void Drawing::On(const client::Queued& queued) {
  params_ = queued.params;
  if (options_.pictures && !timeline_) {
    const int columns = options_.columns > 0
                            ? options_.columns
                            : static_cast<int>(std::ceil(std::sqrt(std::max(params_.count, 1))));
    const double scale =
        std::min(1.0, 1.0 * options_.max_edge / std::max({params_.width, params_.height, 1}));
    timeline_.emplace(std::max(params_.count, 1), columns,
                      std::max(1, static_cast<int>(params_.width * scale)),
                      std::max(1, static_cast<int>(params_.height * scale)));
  }
  line_ = "accepted";
  if (const int ahead = queued.images_ahead; ahead > 0) {
    line_ = fmt::format("queued: {} {} in front", ahead, ahead == 1 ? "image is" : "images are");
    if (const auto start = queued.estimated_start_seconds)
      line_ += ", starts in " + HumanDuration(std::chrono::duration<double>(*start));
  }
  Redraw(true);
}

void Drawing::On(const client::Started&) {
  started_ = steady_clock::now();
  line_ = "started";
  Redraw(true);
}

void Drawing::On(const client::Progress& progress) {
  progress_ = progress;
  Redraw(progress.evaluations_done == progress.evaluations_total);
}

void Drawing::On(const client::Preview& preview) { Show(preview.image, preview.evaluation); }

void Drawing::On(const client::Image& image) {
  images_.push_back(image);
  Show(image, params_.evaluations);  // the picture itself instead of its last preview
}

void Drawing::On(const client::Completed& completed) {
  completed_ = completed;
  params_ = completed.params;
}

void Drawing::Show(const client::Image& image, int evaluation) {
  if (!timeline_) return;
  // A preview that cannot be shown is no reason to lose the images.
  if (const auto pixels = Decode(image); pixels.ok()) {
    timeline_->Add(image.index, evaluation, *pixels, options_.animate);
    is_drawn_ = false;
  }
  Redraw(false);
}

void Drawing::Redraw(bool now) {
  if (view_ == nullptr || (!now && steady_clock::now() - drawn_ < kRedrawInterval)) return;
  drawn_ = steady_clock::now();
  if (progress_.evaluations_total > 0) {
    line_ = ProgressBar(progress_.evaluations_done, progress_.evaluations_total, drawn_ - started_,
                        view_->columns());
  }
  if (!timeline_ || !options_.show) return view_->Draw(nullptr, line_);
  if (std::exchange(is_drawn_, true)) return view_->DrawLine(line_);
  const Pixels picture = timeline_->Latest();
  view_->Draw(&picture, line_);
}

void Drawing::Finish() {
  if (view_ == nullptr) return;
  if (!timeline_ || !options_.show) return view_->Finish(nullptr);
  const Pixels picture = timeline_->Latest();
  view_->Finish(&picture);
}

std::vector<Pixels> Drawing::Frames() const {
  return timeline_ ? timeline_->Frames() : std::vector<Pixels>();
}

}  // namespace denoised::command
