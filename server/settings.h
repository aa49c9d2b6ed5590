// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "denoised/v1/image_generation.pb.h"
#include "server/config.h"

namespace denoised {

/// The part of GetServerInfo that the configuration alone determines: features, limits, batching.
v1::GetServerInfoResponse DescribeSettings(const Config& config);

}  // namespace denoised
