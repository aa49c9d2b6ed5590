// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/codec_stage.h"

#include <algorithm>

#include "engine/backend/counting.h"

namespace denoised {
namespace {

// Twice as many images side by side must save this share of the time per image.
constexpr double kGain = 0.05;
// Several images count as taking the time of one image if they take at most this much longer.
constexpr double kOneImage = 1.1;

}  // namespace

CodecStage::CodecStage(Backend& backend, Network network, const Shape& image)
    : backend_(backend), network_(std::move(network)), image_(image) {}

Tensor CodecStage::NewInput(Arena& arena, int images) const {
  return arena.New({images, image_[0], image_[1], image_[2]}, DType::kF32);
}

size_t CodecStage::Bytes(int images) const {
  CountingBackend counting(backend_);
  Arena measuring = Arena::Measuring(backend_.device());
  nn::Context context{counting, measuring};
  network_(context, NewInput(measuring, images));
  return measuring.peak();
}

void CodecStage::Use(const Tensor& activations, int most) {
  activations_ = activations;
  runs_[1];
  for (int images = 2; images <= most && Bytes(images) <= activations.bytes(); images *= 2)
    runs_[images];
}

std::vector<int> CodecStage::Runs(int images, double seconds) const {
  std::vector<int> sizes;
  double allowed = std::max(seconds, kOneImage * runs_.at(1).seconds);
  while (images > 0) {
    int size = sizes.empty() ? 1 : 0;
    for (const auto& [count, run] : runs_) {
      if (count > images || run.seconds < 0) break;
      if (run.seconds <= allowed) size = count;
    }
    if (size == 0) break;
    sizes.push_back(size);
    const double took = runs_.at(size).seconds;
    if (took < 0) break;
    images -= size;
    seconds -= took;
    allowed = seconds;
  }
  return sizes;
}

absl::StatusOr<Tensor> CodecStage::Input(int images) {
  const auto found = runs_.find(images);
  DENOISED_CHECK(found != runs_.end(), "{} images side by side", images);
  Side& side = found->second;
  if (side.arena) return side.input;
  side.arena.emplace(activations_);
  side.input = NewInput(*side.arena, images);
  absl::StatusOr<std::unique_ptr<Graph>> graph = backend_.Capture([this, &side] {
    // Nothing else is in this arena, so the output has the same address each time.
    side.output = Tensor();
    nn::Context context{backend_, *side.arena};
    side.output = network_(context, side.input);
  });
  if (graph.ok()) {
    side.graph = *std::move(graph);
  } else if (!absl::IsResourceExhausted(graph.status())) {
    return graph.status();
  }
  return side.input;
}

absl::StatusOr<Tensor> CodecStage::Run(int images) {
  DENOISED_RETURN_IF_ERROR(Input(images).status());
  Side& side = runs_.at(images);
  if (side.graph) {
    backend_.Launch(*side.graph);
  } else {  // slower, with the same bits
    side.output = Tensor();
    nn::Context context{backend_, *side.arena};
    side.output = network_(context, side.input);
  }
  DENOISED_RETURN_IF_ERROR(backend_.status());
  return side.output;
}

absl::StatusOr<CodecStage::Warmed> CodecStage::WarmUp() {
  const int images = warming_;
  const auto run = runs_.find(images);
  const bool fresh = !run->second.arena;
  DENOISED_ASSIGN_OR_RETURN(const Tensor input, Input(images));
  if (fresh) {  // a CPU is slow with the denormal numbers that may lie there
    const std::vector<float> zeros(input.elements());
    backend_.Upload(zeros.data(), input.bytes(), input);
  }
  const auto begin = backend_.Mark();
  DENOISED_RETURN_IF_ERROR(Run(images).status());
  const auto end = backend_.Mark();
  DENOISED_RETURN_IF_ERROR(end->Wait());
  Warmed warmed{.images = images};
  const auto measured = warm_runs_.Add(end->SecondsSince(*begin));
  if (!measured) return warmed;
  run->second.seconds = warmed.seconds = *measured;
  // Half as many images, twice.
  const bool gains = images == 1 || *measured <= (1 - kGain) * 2 * std::prev(run)->second.seconds;
  if (!gains) warmed.seconds = -1;
  if (!gains || *measured >= kFillsDevice) runs_.erase(gains ? std::next(run) : run, runs_.end());
  warming_ = runs_.contains(2 * images) ? 2 * images : 0;
  return warmed;
}

}  // namespace denoised
