// SPDX-License-Identifier: Apache-2.0
#include "server/api/write_watch.h"

#include <algorithm>
#include <utility>

namespace denoised {

WriteWatch::WriteWatch(std::chrono::milliseconds timeout, std::function<void()> on_stall)
    : timeout_(timeout), on_stall_(std::move(on_stall)), thread_([this] { Run(); }) {}

WriteWatch::~WriteWatch() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  thread_.join();
}

void WriteWatch::Arm(grpc::CallbackServerContext* context) {
  MutexLock lock(&mutex_);
  deadlines_[context] = std::chrono::steady_clock::now() + timeout_;
}

void WriteWatch::Disarm(grpc::CallbackServerContext* context) {
  MutexLock lock(&mutex_);
  deadlines_.erase(context);
}

bool WriteWatch::WaitForNextLook() {
  const auto period = std::clamp<std::chrono::milliseconds>(
      timeout_ / 4, std::chrono::milliseconds(1), std::chrono::seconds(1));
  const auto next = std::chrono::steady_clock::now() + period;
  while (!stopping_ && std::chrono::steady_clock::now() < next) wake_.WaitUntil(&mutex_, next);
  return !stopping_;
}

int WriteWatch::CancelLate() {
  const auto now = std::chrono::steady_clock::now();
  int cancelled = 0;
  for (auto it = deadlines_.begin(); it != deadlines_.end();) {
    if (it->second > now) {
      ++it;
      continue;
    }
    // Under the lock: the context is alive only until Disarm. gRPC reports the failed write on
    // another thread.
    it->first->TryCancel();
    it = deadlines_.erase(it);
    ++cancelled;
  }
  return cancelled;
}

void WriteWatch::Run() {
  while (true) {
    int cancelled = 0;
    {
      MutexLock lock(&mutex_);
      if (!WaitForNextLook()) return;
      cancelled = CancelLate();
    }
    for (; cancelled > 0; --cancelled) on_stall_();
  }
}

void WatchedReactor::Send(const grpc::Status& status) {
  watch_->Arm(context_);
  Finish(status);
}

void WatchedReactor::OnDone() {
  watch_->Disarm(context_);
  Done();
}

}  // namespace denoised
