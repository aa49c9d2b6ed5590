// SPDX-License-Identifier: Apache-2.0
#include "server/jobs/worker_pool.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "engine/core/available_cores.h"

namespace denoised {
namespace {

/// How far a task moves its queue back (stride scheduling): the inverse of the queue's weight.
constexpr std::array<int64_t, kPriorities> kStrides = {1, 4, 16};

}  // namespace

void WorkerPool::Queue::Push(const std::string& client, std::function<void()> task) {
  auto& line = tasks[client];
  if (line.empty()) clients.push_back(client);
  line.push_back(std::move(task));
}

std::function<void()> WorkerPool::Queue::Pop() {
  const auto line = tasks.find(clients.front());
  std::function<void()> task = std::move(line->second.front());
  line->second.pop_front();
  if (line->second.empty()) {
    tasks.erase(line);
  } else {
    clients.push_back(clients.front());
  }
  clients.pop_front();
  return task;
}

WorkerPool::WorkerPool(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

WorkerPool::~WorkerPool() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Post(Priority priority, const std::string& client, std::function<void()> task) {
  {
    MutexLock lock(&mutex_);
    Queue& queue = queues_[static_cast<size_t>(priority)];
    // An empty queue does not accumulate turns.
    if (queue.empty()) queue.turn = std::max(queue.turn, turn_);
    queue.Push(client, std::move(task));
    ++waiting_;
  }
  wake_.NotifyOne();
}

/// A call of ForEach(). Helpers that come when all is taken outlive the call, and `task`.
struct WorkerPool::Parts {
  const std::function<void(int)>* task;
  int count;
  std::atomic<int> taken = 0;
  Mutex mutex;
  ConditionVariable all;
  int returned ABSL_GUARDED_BY(mutex) = 0;

  /// False if none was left.
  bool RunOne() {
    const int part = taken++;
    if (part >= count) return false;
    (*task)(part);
    MutexLock lock(&mutex);
    if (++returned == count) all.NotifyAll();
    return true;
  }
};

void WorkerPool::ForEach(Priority priority, const std::string& client, int count,
                         const std::function<void(int)>& task) {
  const auto parts = std::make_shared<Parts>();
  parts->task = &task;
  parts->count = count;
  int helpers = 0;
  {
    MutexLock lock(&mutex_);
    helpers = std::min(idle_ - waiting_, count - 1);
  }
  for (int i = 0; i < helpers; ++i) PostHelper(priority, client, parts);
  while (parts->RunOne()) {
  }
  MutexLock lock(&parts->mutex);
  while (parts->returned < count) parts->all.Wait(&parts->mutex);
}

void WorkerPool::PostHelper(Priority priority, const std::string& client,
                            std::shared_ptr<Parts> parts) {
  // One part at a time, so that what has come since takes its turn.
  Post(priority, client, [this, priority, client, parts = std::move(parts)] {
    if (parts->RunOne()) PostHelper(priority, client, parts);
  });
}

bool WorkerPool::HasTask() const {
  return std::any_of(queues_.begin(), queues_.end(),
                     [](const Queue& queue) { return !queue.empty(); });
}

std::function<void()> WorkerPool::Take() {
  MutexLock lock(&mutex_);
  ++idle_;
  while (!stopping_ && !HasTask()) wake_.Wait(&mutex_);
  --idle_;
  if (!HasTask()) return nullptr;
  size_t next = kPriorities;
  for (size_t i = 0; i < kPriorities; ++i) {
    if (queues_[i].empty()) continue;
    if (next == kPriorities || queues_[i].turn < queues_[next].turn) next = i;
  }
  Queue& queue = queues_[next];
  turn_ = queue.turn;
  queue.turn += kStrides[next];
  --waiting_;
  return queue.Pop();
}

void WorkerPool::Run() {
  while (const std::function<void()> task = Take()) task();
}

int WorkerThreads(int asked) { return asked > 0 ? asked : std::max(2, AvailableCores() / 2); }

}  // namespace denoised
