// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "engine/backend/backend.h"

namespace denoised {

/// The host's cores, on oneDNN and OpenMP; activations are F32. An op has run when its call
/// returns. The number of threads is OMP_NUM_THREADS, or else AvailableCores(). options.number is
/// only a part of the name.
absl::StatusOr<std::unique_ptr<Backend>> OpenCpuBackend(const BackendOptions& options);

}  // namespace denoised
