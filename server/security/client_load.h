// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <map>
#include <string>

#include "engine/core/mutex.h"
#include "engine/core/status.h"
#include "server/security/clients.h"

namespace denoised {

/// What each client has under way, so that none takes all places. Callers without a name are told
/// apart by their host. Thread-safe; must outlive its leases.
class ClientLoad {
 public:
  enum Kind {
    kStream,  // a call that waits for images
    kQueued,  // a request that waits for the device
  };

  /// One more of its kind, until destruction or until another is assigned.
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

  /// For every client; its own limits may be lower.
  explicit ClientLoad(int max_streams) : max_streams_(max_streams) {}

  /// `peer` as gRPC writes addresses, "ipv4:192.0.2.7:34152". ResourceExhausted names the limit.
  absl::StatusOr<Lease> Admit(Kind kind, const Caller& caller, const std::string& peer);

 private:
  const int max_streams_;
  Mutex mutex_;
  /// By kind and client, > 0.
  std::array<std::map<std::string, int>, 2> counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace denoised
