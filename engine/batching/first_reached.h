// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "engine/backend/backend.h"

namespace denoised {

/// Waits until one of the markers, which may belong to different queues of a device, is reached,
/// and returns its index; the lowest if there are several. A marker of a queue that failed counts
/// as reached. The thread sleeps between two looks, so that it leaves its core to others: CUDA can
/// wait for one event, or for all of several, but not for the first of them.
size_t FirstReached(std::span<Marker* const> markers);

}  // namespace denoised
