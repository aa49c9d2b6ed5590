// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/client_context.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "denoised/connection.h"

namespace denoised::client {

/// What every attempt of a call sends beside its message.
struct CallHeaders {
  std::vector<std::pair<std::string, std::string>> metadata;
  std::string token_file;  // empty: no token

  /// Reads the token for each attempt, so that it can be replaced while calls run. Errors of
  /// ReadToken: no attempt can be made.
  absl::Status AddTo(grpc::ClientContext* context) const;
};

/// The metadata and traceparent of `options`, checked, with keys in lower case. INVALID_ARGUMENT
/// for what gRPC would end the program for or drop silently.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> MetadataOf(
    const CallOptions& options);

}  // namespace denoised::client
