// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <map>
#include <string>

#include "engine/core/mutex.h"
#include "engine/core/status.h"
#include "server/security/clients.h"

namespace denoised {

/// Tells clients apart: the name, or the host of a caller without one. `peer` as gRPC writes
/// addresses, "ipv4:192.0.2.7:34152".
std::string ClientKey(const Caller& caller, const std::string& peer);

/// Counts the streams and queued requests of each client, so that no client can take all of them.
/// Callers without a name are counted by host. Thread-safe; must outlive its leases.
class ClientLoad {
 public:
  enum Kind {
    kStream,  // a call that waits for images
    kQueued,  // a request that waits for the device
  };

  /// Counts as one of its kind until it is destroyed or another lease is assigned.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();

   private:
    friend class ClientLoad;
    Lease(ClientLoad* load, Kind kind, std::string key)
        : load_(load), kind_(kind), key_(std::move(key)) {}

    ClientLoad* load_ = nullptr;
    Kind kind_ = kStream;
    std::string key_;
  };

  /// Limits for every client, 0 for none; a client's own limits can be lower.
  ClientLoad(int max_streams, int max_queued_requests)
      : max_streams_(max_streams), max_queued_requests_(max_queued_requests) {}

  /// `peer` as gRPC writes addresses, "ipv4:192.0.2.7:34152". ResourceExhausted names the limit.
  absl::StatusOr<Lease> Admit(Kind kind, const Caller& caller, const std::string& peer);

 private:
  const int max_streams_, max_queued_requests_;
  Mutex mutex_;
  /// By kind and client; all > 0.
  std::array<std::map<std::string, int>, 2> counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace denoised
