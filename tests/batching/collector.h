// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "engine/job.h"

namespace denoised {

/// Collects what a job tells from other threads, and holds it against the contract.
class Collector : public JobListener {
 public:
  void OnQueued(const Estimate&) override {
    std::lock_guard lock(mutex_);
    EXPECT_FALSE(started_ || status_) << "it does not wait any more";
  }
  void OnStarted() override {
    std::lock_guard lock(mutex_);
    EXPECT_FALSE(started_ || status_);
    started_ = true;
  }
  void OnProgress(int done, int total) override {
    std::lock_guard lock(mutex_);
    EXPECT_GT(done, progress_);
    EXPECT_LE(done, total);
    EXPECT_FALSE(status_.has_value()) << "nothing follows OnDone";
    progress_ = done;
  }
  void OnStage(int image, Stage stage, double seconds) override {
    std::lock_guard lock(mutex_);
    EXPECT_FALSE(status_.has_value()) << "nothing follows OnDone";
    stages_.emplace_back(image, stage, seconds);
  }
  void OnPreview(const ImageResult& image, int) override {
    std::lock_guard lock(mutex_);
    preview_pixels_.push_back(image.pixels);
    preview_images_.push_back(image.index);
    ++previews_;
    preview_shapes_.push_back(image.pixels.shape());
  }
  void OnImage(ImageResult image) override {
    std::lock_guard lock(mutex_);
    EXPECT_TRUE(images_.emplace(image.index, image.pixels.ToFloats()).second)
        << "an image comes once";
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
    EXPECT_TRUE(
        done_.wait_for(lock, std::chrono::minutes(10), [&] { return status_.has_value(); }));
    return status_.value_or(Internal("the job never ended"));
  }
  std::optional<absl::Status> done() {
    std::lock_guard lock(mutex_);
    return status_;
  }
  std::map<int, std::vector<float>> images() {
    std::lock_guard lock(mutex_);
    return images_;
  }
  std::map<int, int> labels() {
    std::lock_guard lock(mutex_);
    return labels_;
  }
  /// Of each preview: what it shows, and the image that it is of.
  std::vector<Tensor> preview_pixels() {
    std::lock_guard lock(mutex_);
    return preview_pixels_;
  }
  std::vector<int> preview_images() {
    std::lock_guard lock(mutex_);
    return preview_images_;
  }
  /// Image, stage, seconds.
  std::vector<std::tuple<int, Stage, double>> stages() {
    std::lock_guard lock(mutex_);
    return stages_;
  }
  JobTiming timing() {
    std::lock_guard lock(mutex_);
    return timing_;
  }
  int progress() {
    std::lock_guard lock(mutex_);
    return progress_;
  }
  int previews() {
    std::lock_guard lock(mutex_);
    return previews_;
  }
  std::vector<Shape> preview_shapes() {
    std::lock_guard lock(mutex_);
    return preview_shapes_;
  }

 private:
  std::mutex mutex_;
  std::vector<Shape> preview_shapes_;
  std::condition_variable done_;
  std::vector<Tensor> preview_pixels_;
  std::vector<int> preview_images_;
  std::vector<std::tuple<int, Stage, double>> stages_;
  std::map<int, std::vector<float>> images_;
  std::map<int, int> labels_;
  std::optional<absl::Status> status_;
  JobTiming timing_;
  int progress_ = 0, previews_ = 0;
  bool started_ = false;
};

}  // namespace denoised
