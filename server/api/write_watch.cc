#include "server/api/write_watch.h"

#include <algorithm>
#include <utility>

namespace denoised {

WriteWatch::WriteWatch(std::chrono::milliseconds timeout, std::function<void()> on_stall)
    : timeout_(timeout), on_stall_(std::move(on_stall)), thread_([this] { Run(); }) {}

WriteWatch::~WriteWatch() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void WriteWatch::Arm(grpc::CallbackServerContext* context) {
  std::lock_guard lock(mutex_);
  deadlines_[context] = std::chrono::steady_clock::now() + timeout_;
}

void WriteWatch::Disarm(grpc::CallbackServerContext* context) {
  std::lock_guard lock(mutex_);
  deadlines_.erase(context);
}

void WriteWatch::Run() {
  const auto period = std::min<std::chrono::milliseconds>(timeout_ / 4, std::chrono::seconds(1));
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, std::max(period, std::chrono::milliseconds(1)),
                         [this] { return stopping_; })) {
    const auto now = std::chrono::steady_clock::now();
    int stalled = 0;
    for (auto it = deadlines_.begin(); it != deadlines_.end();) {
      if (it->second > now) {
        ++it;
        continue;
      }
      // Under the lock, since Disarm is what keeps the context alive. gRPC delivers the failed
      // write on a thread of its own.
      it->first->TryCancel();
      it = deadlines_.erase(it);
      ++stalled;
    }
    lock.unlock();
    for (; stalled > 0; --stalled) on_stall_();
    lock.lock();
  }
}

}  // namespace denoised
