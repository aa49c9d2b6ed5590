#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/engine.h"

namespace denoised {

/// Collects what a job tells, for a test that waits on another thread.
class Collector : public JobListener {
 public:
  void OnProgress(int done, int) override { progress_ = done; }
  void OnPreview(const ImageResult&, int) override { ++previews_; }
  void OnImage(ImageResult image) override {
    std::lock_guard lock(mutex_);
    images_[image.index] = image.pixels.ToFloats();
    labels_[image.index] = image.label;
  }
  void OnDone(const absl::Status& status, const JobTiming& timing) override {
    std::lock_guard lock(mutex_);
    EXPECT_FALSE(status_.has_value()) << "OnDone comes once";
    status_ = status;
    timing_ = timing;
    done_.notify_all();
  }

  absl::Status Wait() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(done_.wait_for(lock, std::chrono::minutes(1), [&] { return status_.has_value(); }));
    return status_.value_or(Internal("the job never ended"));
  }
  std::map<int, std::vector<float>> images() {
    std::lock_guard lock(mutex_);
    return images_;
  }
  std::map<int, int> labels() {
    std::lock_guard lock(mutex_);
    return labels_;
  }
  JobTiming timing() {
    std::lock_guard lock(mutex_);
    return timing_;
  }
  int progress() const { return progress_; }
  int previews() const { return previews_; }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  std::map<int, std::vector<float>> images_;
  std::map<int, int> labels_;
  std::optional<absl::Status> status_;
  JobTiming timing_;
  std::atomic<int> progress_{0}, previews_{0};
};

}  // namespace denoised
