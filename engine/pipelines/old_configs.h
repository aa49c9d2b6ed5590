// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/io/model_directory.h"

namespace denoised {

/// Files of 2022 lack a field or have a wrong value. The constructors of diffusers' Stable
/// Diffusion pipelines correct them, and so does this: latents are not clipped, timesteps begin at
/// 1, PNDM inpaints without Runge-Kutta steps, images have 512 pixels.
///
/// Where the file has no such field, diffusers changes what the pipeline's own scheduler reads, and
/// not what others do. Here they all read the same.
void CorrectOldConfigs(ModelDirectory* directory);

}  // namespace denoised
