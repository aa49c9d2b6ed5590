// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "command/live_view.h"
#include "command/timeline.h"
#include "denoised/client.h"

namespace denoised::command {

/// A generation under way: keeps what came and shows it. Told on one thread at a time; read when
/// the call is done.
class Drawing {
 public:
  struct Options {
    int columns = 0;        // of the contact sheet; 0: as square as the count allows
    int max_edge = 128;     // of the pictures it shows and keeps, pixels
    bool pictures = false;  // previews are shown or saved
    bool show = false;      // in the view, and not only progress
    bool animate = false;   // earlier pictures are kept
  };
  /// `view`, which may be null, outlives this.
  Drawing(const Options& options, LiveView* view) : options_(options), view_(view) {}

  void OnEvent(const client::Event& event);
  /// Leaves the last picture in the view.
  void Finish();

  const client::EffectiveParams& params() const { return params_; }
  const std::optional<client::Completed>& completed() const { return completed_; }
  const std::vector<client::Image>& images() const { return images_; }  // in the order they came
  std::vector<Pixels> Frames() const;                                   // of the animation

 private:
  void On(const client::Queued& queued);
  void On(const client::Started& started);
  void On(const client::Progress& progress);
  void On(const client::Preview& preview);
  void On(const client::Image& image);
  void On(const client::Completed& completed);
  void Show(const client::Image& image, int evaluation);
  void Redraw(bool now);

  const Options options_;
  LiveView* const view_;
  client::EffectiveParams params_;
  std::optional<client::Completed> completed_;
  std::vector<client::Image> images_;
  std::optional<Timeline> timeline_;
  bool is_drawn_ = false;  // the view has the latest pictures
  std::string line_ = "sent";
  client::Progress progress_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point drawn_;
};

}  // namespace denoised::command
