// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include "engine/backend/cuda/cuda_backend.h"

/// Skips a case where there is no GPU. Cases that need one are part of every build, so that
/// scripts/test can count what it did not test. scripts/test-gpu runs them on a machine with a GPU;
/// it finds them by name: GPU_CASES in scripts/gpu_record.py.
#define DENOISED_NEEDS_GPU() \
  if (CudaDeviceCount() == 0) GTEST_SKIP() << "needs a GPU"
