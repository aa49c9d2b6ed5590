#include "server/client_load.h"

#include <utility>

namespace denoised {
namespace {

/// A host may use any number of ports.
std::string KeyOf(const Caller& caller, const std::string& peer) {
  if (caller.name != Caller{}.name) return caller.name;
  return peer.substr(0, peer.rfind(':'));
}

}  // namespace

ClientLoad::Lease& ClientLoad::Lease::operator=(Lease&& other) noexcept {
  Release();
  load_ = std::exchange(other.load_, nullptr);
  key_ = std::move(other.key_);
  queued_ = other.queued_;
  return *this;
}

void ClientLoad::Lease::Started() {
  if (load_ == nullptr || !queued_) return;
  queued_ = false;
  std::lock_guard lock(load_->mutex_);
  --load_->loads_[key_].queued;
}

void ClientLoad::Lease::Release() {
  if (load_ == nullptr) return;
  std::lock_guard lock(load_->mutex_);
  const auto it = load_->loads_.find(key_);
  if (queued_) --it->second.queued;
  if (--it->second.streams == 0) load_->loads_.erase(it);
  load_ = nullptr;
}

absl::StatusOr<ClientLoad::Lease> ClientLoad::Admit(const Caller& caller, const std::string& peer) {
  std::string key = KeyOf(caller, peer);
  const int max_streams = LowerLimit(caller.limits.max_streams, max_streams_);
  const int max_queued = LowerLimit(caller.limits.max_queued_requests, max_queued_);
  std::lock_guard lock(mutex_);
  const auto it = loads_.find(key);
  const Load load = it == loads_.end() ? Load{} : it->second;
  if (max_streams > 0 && load.streams >= max_streams) {
    return ResourceExhausted(
        "client {} has {} requests under way, and may have {} at a time; wait for one to end", key,
        load.streams, max_streams);
  }
  if (max_queued > 0 && load.queued >= max_queued) {
    return ResourceExhausted(
        "client {} has {} requests in the queue, and may have {}; wait for one to start", key,
        load.queued, max_queued);
  }
  Load& now = loads_[key];
  ++now.streams;
  ++now.queued;
  return Lease(this, std::move(key));
}

}  // namespace denoised
