// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "engine/core/tensor.h"
#include "engine/io/model_directory.h"

namespace denoised {

/// Writes the directory `to`, which the engine can open: the configs and tokenizers of `directory`,
/// weights of Weights::Synthetic(1) in `dtype`, and a DDIM scheduler where a lone model has none
/// beside it. The weights of `directory` need not be there. All cores draw them.
absl::Status WriteSynthetic(ModelDirectory directory, const std::string& to, DType dtype);

}  // namespace denoised
