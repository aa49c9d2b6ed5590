// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "engine/backend/backend.h"
#include "engine/engine.h"

namespace denoised {

using BackendOpener =
    std::function<absl::StatusOr<std::unique_ptr<Backend>>(const BackendOptions&)>;

/// Engine::Create with `open` in place of OpenBackend. `open` is called on the thread of each
/// device, and on the threads that load a model.
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options,
                                                     BackendOpener open);

}  // namespace denoised
