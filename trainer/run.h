// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include "trainer/config.h"

namespace denoised::trainer {

/// Trains as `config` says until the last step, or until `stop` is set: then it finishes the step,
/// saves, and returns Cancelled, whose message says where it stopped. What happens is said on
/// stderr, in <output>/log.jsonl and in TensorBoard's event files.
absl::Status Run(const RunConfig& config, const std::atomic<bool>& stop);

}  // namespace denoised::trainer
