// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "command/pixels.h"

namespace denoised::command {

/// One decoder for each library; DATA_LOSS when the file is damaged.
absl::StatusOr<Pixels> DecodePng(const std::string& file);
absl::StatusOr<Pixels> DecodeJpeg(const std::string& file);
absl::StatusOr<Pixels> DecodeWebp(const std::string& file);

}  // namespace denoised::command
