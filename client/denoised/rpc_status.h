// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/status.h>

#include <cstddef>

#include "absl/status/status.h"

namespace denoised::client {

/// The same code and message; the google.rpc details of `status` become payloads under their type
/// URLs, which Details() decodes. Details that cannot be parsed are dropped.
absl::Status FromGrpc(const grpc::Status& status);

/// For a call whose request has so many bytes: INVALID_ARGUMENT, with sizes and the remedy, when
/// gRPC refused the request for its size, on either side; anything else as it is.
grpc::Status ExplainTooLarge(const grpc::Status& status, size_t request_bytes);

/// For a call that this side did not cancel: CANCELLED without details becomes UNAVAILABLE. gRPC
/// ends the calls of a server that shuts down with it; a job that was cancelled has details.
absl::Status WithoutShutdownCancel(absl::Status status);

}  // namespace denoised::client
