// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace denoised {

/// /openapi.json: OpenAPI 3.1 of Routes(), with the schemas of the proto's messages as their
/// descriptors say them.
std::string OpenApiJson();

}  // namespace denoised
