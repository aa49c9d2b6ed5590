// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/busy_gpu.h"

namespace denoised {

BusyGpu::BusyGpu(int) {}
BusyGpu::~BusyGpu() = default;

}  // namespace denoised
