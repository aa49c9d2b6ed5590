// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace denoised {

/// How a model takes its class condition.
enum class ClassCondition : uint8_t {
  kNone,
  kLabel,   // an index into num_class_embeds
  kValue,   // class_embed_type "timestep": a number
  kVector,  // class_embed_type "identity": a vector
};

}  // namespace denoised
