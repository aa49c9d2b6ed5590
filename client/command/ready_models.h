// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "denoised/client.h"

/// Models that can draw. Of one that is loading a server tells neither what it reads nor its
/// classes and limits. So these wait for it, as the library does with a request to it: some 16 to
/// 33 s, within the timeout. FAILED_PRECONDITION if it is not ready then.

namespace denoised::command {

/// As Client::GetModel.
absl::StatusOr<client::Model> GetReadyModel(const client::Client& client, const std::string& name,
                                            const client::CallOptions& options);

/// The current version of each model, but for those that cannot draw. FAILED_PRECONDITION also if
/// none can.
absl::StatusOr<std::vector<client::Model>> ListReadyModels(const client::Client& client,
                                                           const client::CallOptions& options);

}  // namespace denoised::command
