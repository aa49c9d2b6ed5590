// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <iosfwd>
#include <memory>

#include "engine/core/status.h"
#include "engine/engine.h"
#include "server/config.h"

namespace denoised {

/// Checks everything that serving needs, with the code that serving uses: certificates, the clients
/// file, addresses, the device, the state directory, and every configured or saved model. Writes a
/// line for each to `report` as soon as it is known, and continues after failures:
///
///   ok      listen 127.0.0.1:50051
///   failed  model cats@1: data/cats/unet/config.json: no such file; …
///
/// Changes nothing on disk. `engine` is the result of Engine::Create; the models stay loaded in it.
/// Returns true if nothing failed.
bool Check(const Config& config, const absl::StatusOr<std::unique_ptr<Engine>>& engine,
           std::ostream& report);

}  // namespace denoised
