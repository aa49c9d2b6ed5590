// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <google/protobuf/descriptor.h>
#include <grpcpp/security/auth_context.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/string_ref.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engine/core/status.h"
#include "server/security/security_config.h"

namespace denoised {

class Clients;
class Metrics;
struct Caller;

/// What the port asks of a connection: TLS when `config` names a certificate, read again when its
/// files change, and then of every call but health checks that `clients` knows who makes it. A call
/// that is refused ends with UNAUTHENTICATED before its message is read. Without TLS, nothing.
///
/// InvalidArgument and NotFound name the flag and the file. `clients` and `metrics` must outlive
/// the server.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const SecurityConfig& config, const Clients* clients, Metrics* metrics);

/// Whether --tls-cert and --tls-key can be read and belong together; only with TLS.
absl::Status CheckCertificate(const SecurityConfig& config);
/// Whether --tls-client-ca, which must be given, can be read.
absl::Status CheckClientAuthority(const SecurityConfig& config);

/// When the certificate that is on disk now expires; nothing without TLS or when it cannot be read.
std::optional<std::chrono::system_clock::time_point> CertificateExpiry(
    const SecurityConfig& config);

/// Who makes a call with this metadata on a connection of these properties, null when it has none.
absl::StatusOr<std::shared_ptr<const Caller>> IdentifyCaller(
    const Clients& clients, const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
    const grpc::AuthContext* connection);

/// The value of `key`, or empty.
std::string_view MetadataValue(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                               const char* key);

}  // namespace denoised
