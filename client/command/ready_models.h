// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "denoised/client.h"

/// Models that can draw. Of one that is loading a server tells neither what it reads nor its
/// classes and limits. So these ask each second until it has loaded, for kLoadingWait within the
/// timeout. FAILED_PRECONDITION if it is not ready then.

namespace denoised::command {

constexpr auto kLoadingWait = std::chrono::seconds(30);

/// As Client::GetModel.
absl::StatusOr<client::Model> GetReadyModel(const client::Client& client, const std::string& name,
                                            const client::CallOptions& options);

/// The current version of each model that can draw and for which `fits` is true. Waits only while
/// there is none and one is loading. FAILED_PRECONDITION also if no model can draw.
absl::StatusOr<std::vector<client::Model>> ListReadyModels(
    const client::Client& client, const std::function<bool(const client::Model&)>& fits,
    const client::CallOptions& options);

}  // namespace denoised::command
