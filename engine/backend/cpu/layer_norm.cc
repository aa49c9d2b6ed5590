// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/backend/cpu/vector_ops.h"

namespace denoised::cpu {

void LayerNorm(const LayerNormArgs& args) {
  constexpr int64_t kChunkTokens = 16;  // a unit; enough to outweigh handing it out
  const int64_t channels = args.x.dim(-1), tokens = args.x.elements() / channels;
  ParallelFor((tokens + kChunkTokens - 1) / kChunkTokens, [&](int64_t chunk, int) {
    const int64_t begin = chunk * kChunkTokens, end = std::min(tokens, begin + kChunkTokens);
    for (int64_t token = begin; token < end; ++token) {
      NormalizeToken(args.x.as<float>() + token * channels, channels, args.gamma.as<float>(),
                     args.beta.as<float>(), args.eps, args.out.as<float>() + token * channels);
    }
  });
}

}  // namespace denoised::cpu
