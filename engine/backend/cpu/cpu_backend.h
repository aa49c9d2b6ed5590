#pragma once

#include <memory>

#include "engine/backend/backend.h"

namespace denoised {

/// The host's cores in fp32, on oneDNN and OpenMP; ops have run when their call returns. Uses as
/// many threads as OpenMP allows the calling thread: OMP_NUM_THREADS, or else the cores of the
/// process's affinity, bounded by the CPU quota of its control groups.
/// options.number only tells backends apart by their names.
absl::StatusOr<std::unique_ptr<Backend>> OpenCpuBackend(const BackendOptions& options);

}  // namespace denoised
