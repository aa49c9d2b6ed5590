// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/engine.h"

namespace denoised {

/// The images of a job, by number.
class Images final : public JobListener {
 public:
  void OnImage(ImageResult image) override {
    std::lock_guard lock(mutex_);
    pixels_[image.index] = image.pixels;
  }
  void OnDone(const absl::Status& status, const JobTiming& /*timing*/) override {
    std::lock_guard lock(mutex_);
    status_ = status;
    done_ = true;
    changed_.notify_all();
  }
  absl::StatusOr<std::vector<float>> Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    DENOISED_RETURN_IF_ERROR(status_);
    std::vector<float> all;
    for (const auto& [index, pixels] : pixels_) {
      const auto values = pixels.span<float>();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  absl::Status status_;
  std::map<int, Tensor> pixels_;
};

/// Draws a request: the pixels of its images, one after the other.
inline absl::StatusOr<std::vector<float>> DrawImages(Engine& engine, const JobSpec& spec) {
  std::vector<FieldViolation> violations;
  DENOISED_ASSIGN_OR_RETURN(const EffectiveJob job, engine.Resolve(spec, &violations));
  if (!violations.empty())
    return InvalidArgument("{} {}", violations[0].field, violations[0].description);
  const auto images = std::make_shared<Images>();
  DENOISED_RETURN_IF_ERROR(engine.Submit(job, images).status());
  return images->Wait();
}

}  // namespace denoised
