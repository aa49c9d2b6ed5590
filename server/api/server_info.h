// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "server/jobs/drain.h"
#include "server/models/catalog.h"
#include "server/security/clients.h"

namespace denoised {

/// What the server says of itself. Thread-safe; what is pointed to must outlive it.
class ServerInfo {
 public:
  /// `settings`: what follows from the configuration alone, such as features and limits.
  ServerInfo(v1::GetServerInfoResponse settings, const Engine* engine, const Catalog* catalog,
             const DrainProgress* drain)
      : settings_(std::move(settings)), engine_(engine), catalog_(catalog), drain_(drain) {}

  /// The names of the engine's devices with commas, lost ones too: "cuda:0,cuda:1".
  std::string DeviceNames() const;
  /// Whether the server takes requests now.
  v1::ServerState State() const;
  /// What GetServerInfo replies to this caller.
  v1::GetServerInfoResponse Describe(const Caller& caller) const;

 private:
  const v1::GetServerInfoResponse settings_;
  const Engine* const engine_;
  const Catalog* const catalog_;
  const DrainProgress* const drain_;
};

}  // namespace denoised
