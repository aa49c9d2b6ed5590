// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/security/credentials.h>

#include "absl/status/statusor.h"
#include "denoised/connection.h"

namespace denoised::client {

/// The files of `tls`, as gRPC takes them. INVALID_ARGUMENT if one cannot be read or used: gRPC
/// would connect to nobody, and not say why.
absl::StatusOr<grpc::SslCredentialsOptions> ReadTlsFiles(const TlsOptions& tls);

}  // namespace denoised::client
