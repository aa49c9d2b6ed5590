// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <iosfwd>
#include <memory>

#include "engine/core/status.h"
#include "engine/engine.h"
#include "server/config.h"

namespace denoised {

/// Whether no later attempt can succeed: then the process exits with 2, else with 1. It could when
/// a port is in use or a device is missing.
bool IsWrongSetting(const absl::Status& status);

/// Checks everything that serving needs, with the code that serving uses: certificates, the clients
/// file, addresses, the device, the state directory, and every configured or saved model, which
/// draws one image. Writes a line for each to `report` as soon as it is known, and continues after
/// failures:
///
///   ok      listen 127.0.0.1:50051
///   failed  model cats@1: data/cats/unet/config.json: no such file; …
///
/// Changes nothing on disk. `engine` is the result of Engine::Create; the models stay loaded in it.
/// Returns OK if nothing failed, else the first wrong setting, or else the first failure. A model
/// that does not load is no wrong setting, because a server with other models starts.
absl::Status Check(const Config& config, const absl::StatusOr<std::unique_ptr<Engine>>& engine,
                   std::ostream& report);

}  // namespace denoised
