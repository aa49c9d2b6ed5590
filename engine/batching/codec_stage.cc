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
  batches_.try_emplace(1);
  for (int images = 2; images <= most && Bytes(images) <= activations.bytes(); images *= 2)
    batches_.try_emplace(images);
}

std::vector<int> CodecStage::NextRuns(int images, double seconds) const {
  std::vector<int> sizes;
  double allowed = std::max(seconds, kOneImage * batches_.at(1).seconds);
  while (images > 0) {
    int size = sizes.empty() ? 1 : 0;
    for (const auto& [count, batch] : batches_) {
      if (count > images || batch.seconds < 0) break;
      if (batch.seconds <= allowed) size = count;
    }
    if (size == 0) break;
    sizes.push_back(size);
    const double took = batches_.at(size).seconds;
    if (took < 0) break;
    images -= size;
    seconds -= took;
    allowed = seconds;
  }
  return sizes;
}

void CodecStage::Forward(Batch& batch) {
  // Nothing else is in this arena, so the output has the same address each time.
  batch.output = Tensor();
  nn::Context context{backend_, *batch.arena};
  batch.output = network_(context, batch.input);
}

absl::StatusOr<Tensor> CodecStage::Input(int images) {
  const auto found = batches_.find(images);
  DENOISED_CHECK(found != batches_.end(), "{} images side by side", images);
  Batch& batch = found->second;
  if (!batch.arena) {
    batch.arena.emplace(activations_);
    batch.input = NewInput(*batch.arena, images);
    batch.run.emplace(backend_, [this, &batch] { Forward(batch); });
  }
  DENOISED_RETURN_IF_ERROR(batch.run->Capture());
  return batch.input;
}

absl::StatusOr<CapturedRun::Ran> CodecStage::Run(int images) {
  Batch& batch = batches_.at(images);
  DENOISED_CHECK(batch.run.has_value(), "no input of {} images", images);
  return batch.run->Run();
}

absl::StatusOr<CodecStage::Warmed> CodecStage::WarmUp() {
  const int images = warming_;
  const auto batch = batches_.find(images);
  const bool fresh = !batch->second.arena;
  DENOISED_ASSIGN_OR_RETURN(const Tensor input, Input(images));
  if (fresh) {  // a CPU is slow with the denormal numbers that may lie there
    const std::vector<float> zeros(input.elements());
    backend_.Upload(zeros.data(), input.bytes(), input);
  }
  DENOISED_ASSIGN_OR_RETURN(const CapturedRun::Ran ran, Run(images));
  DENOISED_RETURN_IF_ERROR(ran.end->Wait());
  Warmed warmed{.images = images};
  const auto measured = warm_runs_.Add(ran.end->SecondsSince(*ran.begin));
  if (!measured) return warmed;
  batch->second.seconds = *measured;
  // Half as many images, twice.
  const bool gains = images == 1 || *measured <= (1 - kGain) * 2 * std::prev(batch)->second.seconds;
  if (gains) warmed.seconds = *measured;
  if (!gains) {
    batches_.erase(batch, batches_.end());
  } else if (*measured >= kFillsDevice) {
    batches_.erase(std::next(batch), batches_.end());
  }
  warming_ = batches_.contains(2 * images) ? 2 * images : 0;
  return warmed;
}

}  // namespace denoised
