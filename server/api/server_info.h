// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "server/api/health.h"
#include "server/security/clients.h"

namespace denoised {

/// What the server reports about itself. Thread-safe; all pointers must outlive it.
class ServerInfo {
 public:
  /// `settings`: the part that the configuration alone determines, such as features and limits.
  ServerInfo(v1::GetServerInfoResponse settings, const Engine* engine, const Health* health)
      : settings_(std::move(settings)), engine_(engine), health_(health) {}

  /// The names of the engine's devices, including lost ones: "cuda:0,cuda:1".
  std::string DeviceNames() const;
  const Health& health() const { return *health_; }
  /// The reply of GetServerInfo to this caller.
  v1::GetServerInfoResponse Describe(const Caller& caller) const;

 private:
  const v1::GetServerInfoResponse settings_;
  const Engine* const engine_;
  const Health* const health_;
};

}  // namespace denoised
