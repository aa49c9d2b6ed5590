// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "denoised/generation.h"

/// NumPy's array files (NEP 1), so that arrays come from and go to Python.

namespace denoised::command {

/// Reads float32 or uint8 in C order; anything else is INVALID_ARGUMENT.
absl::StatusOr<client::Tensor> ReadNpy(const std::string& file);

/// The file that numpy.save would write.
std::string WriteNpy(const client::Tensor& tensor);

}  // namespace denoised::command
