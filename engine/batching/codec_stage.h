// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/batching/captured_run.h"
#include "engine/batching/warm_runs.h"
#include "engine/core/arena.h"
#include "engine/nn/layers.h"

namespace denoised {

/// Encoding or decoding, for several images side by side: a captured graph for each power of two.
/// Inputs and outputs lie in the memory of activations: they last until anything else that uses it
/// is enqueued. Used by the thread that owns the device. Calls enqueue work and do not wait, unless
/// they say so.
class CodecStage {
 public:
  /// F32 [N, …] to [N, …], whose rows do not depend on each other.
  using Network = std::function<Tensor(nn::Context& context, const Tensor& input)>;

  /// `image`: the shape of one image's input. `backend` must outlive the stage.
  CodecStage(Backend& backend, Network network, const Shape& image);

  /// Bytes of activations that so many images need side by side, by a dry run.
  size_t Bytes(int images) const;
  /// Before the runs: the memory of activations, at least Bytes(1), and how many images may run
  /// side by side. There are fewer if they do not fit.
  void Use(const Tensor& activations, int most);

  /// The sizes of the next runs for `images` images: each as large as is fastest per image.
  /// Together they take at most `seconds`, but one image, or as many as take no longer than one,
  /// may always run. One run if none was measured.
  std::vector<int> NextRuns(int images, double seconds) const;

  /// Where the input of a run of so many images goes: [images, …]. Captures the graph unless there
  /// is one; its kernels may overwrite the memory of activations.
  absl::StatusOr<Tensor> Input(int images);
  /// Runs the network on what was put into Input(images) since.
  absl::StatusOr<CapturedRun::Ran> Run(int images);
  /// What Run(images) made. It must not be held until the next run.
  const Tensor& output(int images) const { return batches_.at(images).output; }

  struct Warmed {
    int images = 0;
    double seconds = -1;  // of one run; negative: not measured
  };
  /// One run, of no particular images: first one that captures the graph, then a few that are
  /// measured (WarmRuns); then twice as many images, for as long as that is faster for each and
  /// does not fill the device. Waits for the device. Call it until warm().
  absl::StatusOr<Warmed> WarmUp();
  bool warm() const { return warming_ == 0; }

 private:
  struct Batch {
    std::optional<Arena> arena;  // in the memory of activations
    Tensor input, output;
    std::optional<CapturedRun> run;
    double seconds = -1;  // not measured
  };
  Tensor NewInput(Arena& arena, int images) const;
  void Forward(Batch& batch);

  Backend& backend_;
  const Network network_;
  const Shape image_;
  Tensor activations_;
  std::map<int, Batch> batches_;  // by images side by side
  int warming_ = 1;               // images side by side; 0: all are warm
  WarmRuns warm_runs_;
};

}  // namespace denoised
