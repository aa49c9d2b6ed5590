// SPDX-License-Identifier: Apache-2.0
#include "trainer/ranks.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <optional>
#include <utility>

namespace denoised::trainer {
namespace {

using Clock = std::chrono::steady_clock;
using training::Exchange;

/// Between two looks at a flag that a signal sets.
constexpr auto kInterval = std::chrono::milliseconds(100);

/// A thread that is not told to stop: a signal would interrupt what it waits for.
template <typename Function>
std::thread WithoutSignals(Function function) {
  struct Blocked {
    Blocked() {
      sigset_t stops;
      sigemptyset(&stops);
      for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&stops, signal);
      pthread_sigmask(SIG_BLOCK, &stops, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before = {};
  } blocked;
  return std::thread(std::move(function));
}

struct Connection {
  Mutex mutex;
  ConditionVariable changed;
  std::optional<absl::StatusOr<std::unique_ptr<Exchange>>> made ABSL_GUARDED_BY(mutex);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Exchange>> ConnectRanks(int rank, int ranks,
                                                       const std::string& address,
                                                       double timeout_seconds,
                                                       const std::atomic<bool>& stop) {
  if (ranks == 1) return training::NewSoleExchange();
  // A thread, because looking up a name cannot be interrupted.
  const auto connection = std::make_shared<Connection>();
  WithoutSignals([=] {
    auto made = training::ConnectExchange(rank, ranks, address, timeout_seconds);
    MutexLock lock(&connection->mutex);
    connection->made = std::move(made);
    connection->changed.NotifyAll();
  }).detach();
  MutexLock lock(&connection->mutex);
  while (!connection->made) {
    if (stop) return Cancelled("stopped by a signal before all {} ranks were there", ranks);
    connection->changed.WaitUntil(&connection->mutex, Clock::now() + kInterval);
  }
  return *std::move(connection->made);
}

Pulse::Pulse(Exchange& host, const std::atomic<bool>& stop) : host_(host), stop_(stop) {
  thread_ = WithoutSignals([this] {
    status_ = Beat();
    if (!status_.ok()) ended_ = true;
  });
}

Pulse::~Pulse() {
  {
    MutexLock lock(&mutex_);
    gone_ = true;
  }
  changed_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

absl::Status Pulse::WaitForAll() {
  {
    MutexLock lock(&mutex_);
    ready_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
  return status_;
}

absl::Status Pulse::Beat() {
  const int ranks = host_.ranks();
  const Tensor all = Tensor::Host({ranks, 2}, DType::kI32);
  int32_t* const flags = all.as<int32_t>();  // of each rank: ready, told to stop
  while (true) {
    {
      MutexLock lock(&mutex_);
      const auto until = Clock::now() + kInterval;
      while (!ready_ && !gone_ && Clock::now() < until) changed_.WaitUntil(&mutex_, until);
      if (gone_) return absl::OkStatus();
      flags[2 * host_.rank()] = ready_ ? 1 : 0;
    }
    flags[2 * host_.rank() + 1] = stop_ ? 1 : 0;
    DENOISED_RETURN_IF_ERROR(training::GatherRows(all, host_));
    // All ranks see the same flags, so all end after the same round.
    bool ready = true, stopped = false;
    for (int rank = 0; rank < ranks; ++rank) {
      ready = ready && flags[2 * rank] != 0;
      stopped = stopped || flags[2 * rank + 1] != 0;
    }
    if (stopped) return Cancelled("stopped by a signal before a step; nothing was changed");
    if (ready) return absl::OkStatus();
  }
}

}  // namespace denoised::trainer
