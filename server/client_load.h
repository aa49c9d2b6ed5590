#pragma once

#include <map>
#include <mutex>
#include <string>

#include "engine/core/status.h"
#include "server/clients.h"

namespace denoised {

/// What each client has under way, so that none takes all places. Callers without a name are told
/// apart by their address. Thread-safe; must outlive its leases.
class ClientLoad {
 public:
  /// One request under way, counted until destruction.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept;
    ~Lease() { Release(); }

    /// The request has a slot: it no longer waits.
    void Started();

   private:
    friend class ClientLoad;
    Lease(ClientLoad* load, std::string key) : load_(load), key_(std::move(key)) {}
    void Release();

    ClientLoad* load_ = nullptr;
    std::string key_;
    bool queued_ = true;
  };

  /// What holds for every client; its own limits may be lower. 0: no bound.
  ClientLoad(int max_streams, int max_queued)
      : max_streams_(max_streams), max_queued_(max_queued) {}

  /// `peer` as gRPC writes addresses, "ipv4:192.0.2.7:34152". ResourceExhausted names the limit.
  absl::StatusOr<Lease> Admit(const Caller& caller, const std::string& peer);

 private:
  struct Load {
    int streams = 0, queued = 0;
  };

  const int max_streams_, max_queued_;
  std::mutex mutex_;
  std::map<std::string, Load> loads_;  // guarded by mutex_; those with streams only
};

}  // namespace denoised
