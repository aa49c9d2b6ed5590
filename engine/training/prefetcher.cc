// SPDX-License-Identifier: Apache-2.0
#include "engine/training/prefetcher.h"

#include <algorithm>

namespace denoised::training {
namespace {

/// Samples that a thread takes at a time.
constexpr int64_t kBlock = 8;

}  // namespace

Prefetcher::Prefetcher(int threads, int64_t samples, int64_t bytes, Prepare prepare)
    : samples_(samples), bytes_(bytes), prepare_(std::move(prepare)) {
  for (std::vector<uint8_t>& batch : batches_) batch.resize(static_cast<size_t>(samples * bytes));
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  } catch (...) {  // the system starts no further thread
    Stop();
    throw;
  }
}

Prefetcher::~Prefetcher() { Stop(); }

void Prefetcher::Stop() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
  }
  work_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

const uint8_t* Prefetcher::Take(int64_t step) {
  MutexLock lock(&mutex_);
  if (paused_ || step != taken_ + 1) {
    paused_ = true;
    while (busy_ > 0) progress_.Wait(&mutex_);
    std::fill(std::begin(prepared_), std::end(prepared_), 0);
    next_step_ = step;
    next_sample_ = 0;
    paused_ = false;
  } else {
    prepared_[taken_ % kBatches] = 0;
  }
  taken_ = step;
  work_.NotifyAll();
  while (prepared_[step % kBatches] < samples_) progress_.Wait(&mutex_);
  return batches_[step % kBatches].data();
}

void Prefetcher::Work() {
  Block block;
  while (Begin(&block)) {
    uint8_t* const batch = batches_[block.step % kBatches].data();
    for (int64_t sample = block.begin; sample < block.end; ++sample)
      prepare_(block.step, sample, batch + sample * bytes_);
    End(block);
  }
}

bool Prefetcher::Begin(Block* block) {
  MutexLock lock(&mutex_);
  while (!stop_ && (paused_ || next_step_ >= taken_ + kBatches)) work_.Wait(&mutex_);
  if (stop_) return false;
  *block = {next_step_, next_sample_, std::min(next_sample_ + kBlock, samples_)};
  next_sample_ = block->end;
  if (block->end == samples_) {
    ++next_step_;
    next_sample_ = 0;
  }
  ++busy_;
  return true;
}

void Prefetcher::End(const Block& block) {
  MutexLock lock(&mutex_);
  --busy_;
  prepared_[block.step % kBatches] += block.end - block.begin;
  progress_.NotifyAll();
}

}  // namespace denoised::training
