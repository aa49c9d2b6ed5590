// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "engine/backend/backend.h"

namespace denoised {

/// Waits until one of the markers is reached and returns its index; the lowest index if several
/// are. They may belong to different queues of a device. A marker of a failed queue counts as
/// reached. CUDA cannot wait for the first of several events, so this polls, and sleeps in between
/// to free its core.
size_t FirstReached(std::span<Marker* const> markers);

}  // namespace denoised
