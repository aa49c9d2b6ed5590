// SPDX-License-Identifier: Apache-2.0
#include "engine/models/unet_levels.h"

#include <utility>

namespace denoised {

UNetLevels LevelsOf(const std::vector<int>& block_out_channels,
                    const std::vector<int>& layers_per_block) {
  const int levels = static_cast<int>(block_out_channels.size());
  UNetLevels all;
  int in = block_out_channels[0];
  std::vector<int> skips = {in};  // channels of what the way up takes back
  for (int i = 0; i < levels; ++i) {
    UNetLevel level{.resolution = i, .outputs = block_out_channels[i], .resamples = i < levels - 1};
    for (int layer = 0; layer < layers_per_block[i]; ++layer) {
      level.inputs.push_back(in);
      skips.push_back(in = level.outputs);
    }
    if (level.resamples) skips.push_back(level.outputs);
    all.down.push_back(std::move(level));
  }
  for (int i = levels - 1; i >= 0; --i) {
    UNetLevel level{.resolution = i, .outputs = block_out_channels[i], .resamples = i > 0};
    for (int layer = 0; layer <= layers_per_block[i]; ++layer) {
      level.inputs.push_back(in + skips.back());
      skips.pop_back();
      in = level.outputs;
    }
    all.up.push_back(std::move(level));
  }
  return all;
}

}  // namespace denoised
