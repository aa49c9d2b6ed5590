// SPDX-License-Identifier: Apache-2.0
#include "server/security/client_load.h"

#include <utility>

namespace denoised {

std::string ClientKey(const Caller& caller, const std::string& peer) {
  if (!caller.anonymous()) return caller.name;
  return peer.substr(0, peer.rfind(':'));  // a host may use any number of ports
}

ClientLoad::Lease::~Lease() {
  if (load_ == nullptr) return;
  MutexLock lock(&load_->mutex_);
  auto& counts = load_->counts_[kind_];
  const auto it = counts.find(key_);
  if (--it->second == 0) counts.erase(it);
}

ClientLoad::Lease& ClientLoad::Lease::operator=(Lease&& other) noexcept {
  std::swap(load_, other.load_);
  std::swap(kind_, other.kind_);
  std::swap(key_, other.key_);
  Lease former(std::exchange(other.load_, nullptr), other.kind_, std::move(other.key_));
  return *this;
}

absl::StatusOr<ClientLoad::Lease> ClientLoad::Admit(Kind kind, const Caller& caller,
                                                    const std::string& peer) {
  const int limit = kind == kStream
                        ? LowerLimit(caller.limits.max_streams, max_streams_)
                        : LowerLimit(caller.limits.max_queued_requests, max_queued_requests_);
  std::string key = ClientKey(caller, peer);
  MutexLock lock(&mutex_);
  const auto it = counts_[kind].find(key);
  const int count = it == counts_[kind].end() ? 0 : it->second;
  if (limit > 0 && count >= limit) {
    return ResourceExhausted("client {} has {} {}, and may have {}; wait for one to {}", key, count,
                             kind == kStream ? "calls under way" : "requests in the queue", limit,
                             kind == kStream ? "end" : "start");
  }
  ++counts_[kind][key];
  return Lease(this, kind, std::move(key));
}

}  // namespace denoised
