#pragma once

#include <functional>
#include <memory>

#include "engine/backend/backend.h"
#include "engine/engine.h"

namespace denoised {

using BackendOpener =
    std::function<absl::StatusOr<std::unique_ptr<Backend>>(const BackendOptions&)>;

/// Engine::Create with another way to open the device: called on the device's thread, and for every
/// model on the thread that loads it.
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options,
                                                     BackendOpener open);

}  // namespace denoised
