// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <iosfwd>
#include <memory>

#include "engine/core/status.h"
#include "engine/engine.h"
#include "server/config.h"

namespace denoised {

/// Tries what Server::Start and the loading of models need, with the same code: certificates, the
/// file of clients, the addresses, the device, the state directory, and every model of the
/// configuration or of the state directory. A line for each goes to `report` as soon as it is
/// known, and no failure ends it early:
///
///   ok      listen 127.0.0.1:50051
///   failed  model cats@1: data/cats/unet/config.json: no such file; …
///
/// Nothing is made or changed on disk. `engine` is what Engine::Create said; it is left with the
/// models. Whether nothing failed.
bool Check(const Config& config, const absl::StatusOr<std::unique_ptr<Engine>>& engine,
           std::ostream& report);

}  // namespace denoised
