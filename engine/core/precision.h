// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace denoised {

/// In what the layers of a denoiser multiply. kDefault: in the device's own type (bf16 on CUDA,
/// fp32 or bf16 on the CPU); kFp8: in e4m3 where the model's calibration has a scale.
enum class Precision : uint8_t { kDefault, kFp8 };

constexpr const char* kPrecisions = "\"default\" or \"fp8\"";

/// Nothing for an unknown name.
inline std::optional<Precision> PrecisionFromName(std::string_view name) {
  if (name == "default") return Precision::kDefault;
  if (name == "fp8") return Precision::kFp8;
  return std::nullopt;
}

}  // namespace denoised
