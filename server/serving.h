#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "server/config.h"

namespace denoised {

class ActiveCalls;
class Catalog;
class ClientLoad;
class Clients;
class Engine;
class Jobs;
class MemoryBudget;
class Metrics;
class WorkerPool;
class WriteWatch;

/// How far the end of the server is: asked to go elsewhere, clients may still come; then not.
enum class DrainState { kNone, kLameDuck, kDraining };

/// What every call works with. Everything pointed to outlives the calls.
struct Serving {
  const Config* config = nullptr;
  Engine* engine = nullptr;
  Catalog* catalog = nullptr;
  Jobs* jobs = nullptr;
  ActiveCalls* active = nullptr;
  WorkerPool* workers = nullptr;
  MemoryBudget* decoding = nullptr;
  Metrics* metrics = nullptr;
  const Clients* clients = nullptr;
  ClientLoad* client_load = nullptr;
  WriteWatch* write_watch = nullptr;
  RequestLimits limits;
  std::atomic<DrainState> drain{DrainState::kNone};
  /// By when the drain should be over, in seconds since 1970; 0 before it.
  std::atomic<double> drain_deadline{0};
  /// How long the job that started last had waited.
  std::atomic<double> recent_queue_seconds{0};

  /// New work is refused.
  bool draining() const { return drain == DrainState::kDraining; }

  /// When a client should try again after a full queue: a tenth of the present wait, in which about
  /// a tenth of the queue has moved on.
  std::chrono::milliseconds RetryDelay() const {
    const double seconds = recent_queue_seconds.load() / 10;
    return std::chrono::milliseconds(static_cast<int64_t>(1000 * (seconds < 0.25 ? 0.25
                                                                  : seconds > 30 ? 30
                                                                                 : seconds)));
  }
};

}  // namespace denoised
