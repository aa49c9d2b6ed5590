// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace denoised {

/// The channels of one down or up block of a UNet.
struct UNetLevel {
  int resolution = 0;       // index into block_out_channels; 0 has the most pixels
  std::vector<int> inputs;  // of each resnet; on the way up with those of the skip beside it
  int outputs = 0;          // of every resnet
  bool resamples = false;   // halves or doubles its output
};

/// The blocks of diffusers' UNets, in the order in which an image passes them. A resnet on the way
/// up reads, beside the output of the one before, the latest output of the way down that none has
/// read: that of conv_in, a resnet, or a layer that halves. `layers_per_block` is that of the
/// config for each block; on the way up there is one more.
struct UNetLevels {
  std::vector<UNetLevel> down, up;
};
UNetLevels LevelsOf(const std::vector<int>& block_out_channels,
                    const std::vector<int>& layers_per_block);

}  // namespace denoised
