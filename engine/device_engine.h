#pragma once

#include <functional>
#include <memory>

#include "engine/backend/backend.h"
#include "engine/engine.h"

namespace denoised {

using BackendOpener =
    std::function<absl::StatusOr<std::unique_ptr<Backend>>(const BackendOptions&)>;

/// Engine::Create with another way to open devices: called on the thread of each device, and for
/// every model on threads that load it.
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options,
                                                     BackendOpener open);

}  // namespace denoised
