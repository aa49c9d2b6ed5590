// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "denoised/v1/image_generation.pb.h"
#include "server/config.h"

namespace denoised {

/// What GetServerInfo says that follows from the configuration alone: features, limits, batching.
v1::GetServerInfoResponse DescribeSettings(const Config& config);

}  // namespace denoised
