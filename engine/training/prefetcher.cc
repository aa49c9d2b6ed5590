// SPDX-License-Identifier: Apache-2.0
#include "engine/training/prefetcher.h"

#include <algorithm>

namespace denoised::training {
namespace {

/// How many samples a thread takes at a time.
constexpr int64_t kBlock = 8;

}  // namespace

Prefetcher::Prefetcher(int threads, int64_t samples, int64_t bytes, Prepare prepare)
    : samples_(samples), bytes_(bytes), prepare_(std::move(prepare)) {
  for (std::vector<uint8_t>& batch : batches_) batch.resize(static_cast<size_t>(samples * bytes));
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

const uint8_t* Prefetcher::Take(int64_t step) {
  std::unique_lock lock(mutex_);
  if (paused_ || step != taken_ + 1) {
    paused_ = true;
    progress_.wait(lock, [this] { return busy_ == 0; });
    std::fill(std::begin(prepared_), std::end(prepared_), 0);
    next_step_ = step;
    next_sample_ = 0;
    paused_ = false;
  } else {
    prepared_[taken_ % kBatches] = 0;
  }
  taken_ = step;
  work_.notify_all();
  progress_.wait(lock, [&] { return prepared_[step % kBatches] == samples_; });
  return batches_[step % kBatches].data();
}

void Prefetcher::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stop_ || (!paused_ && next_step_ < taken_ + kBatches); });
    if (stop_) return;
    const int64_t step = next_step_, begin = next_sample_;
    const int64_t end = std::min(begin + kBlock, samples_);
    next_sample_ = end;
    if (end == samples_) {
      ++next_step_;
      next_sample_ = 0;
    }
    ++busy_;
    lock.unlock();
    uint8_t* const batch = batches_[step % kBatches].data();
    for (int64_t sample = begin; sample < end; ++sample)
      prepare_(step, sample, batch + sample * bytes_);
    lock.lock();
    --busy_;
    prepared_[step % kBatches] += end - begin;
    progress_.notify_all();
  }
}

}  // namespace denoised::training
