#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace denoised::client {

/// The same code and message; the google.rpc details of `status` become payloads under their type
/// URLs, which Details() decodes. Details that cannot be parsed are dropped.
absl::Status FromGrpc(const grpc::Status& status);

/// For a call that nobody here cancelled: CANCELLED becomes UNAVAILABLE when it is not the server's
/// word on a job. gRPC says it for calls of a server which shuts down.
absl::Status WithoutStrangeCancel(absl::Status status);

}  // namespace denoised::client
