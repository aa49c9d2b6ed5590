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
struct Credentials;

/// Credentials for the port. If `config` names a certificate: TLS, whose files are read again when
/// they change; and every call except health checks must be from a client that `clients` knows. A
/// refused call ends with UNAUTHENTICATED before its message is read. Without a certificate: the
/// same check if there are clients (--allow-plaintext-tokens), for connections of this host alone;
/// else none.
///
/// InvalidArgument and NotFound name the flag and the file. `clients` and `metrics` must outlive
/// the server.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const SecurityConfig& config, const Clients* clients, Metrics* metrics);

/// Checks that --tls-cert and --tls-key can be read and belong together. Only with TLS.
absl::Status CheckCertificate(const SecurityConfig& config);
/// Checks that --tls-client-ca, which must be set, can be read.
absl::Status CheckClientAuthority(const SecurityConfig& config);

/// When the certificate on disk expires; nothing without TLS or if it cannot be read.
std::optional<std::chrono::system_clock::time_point> CertificateExpiry(
    const SecurityConfig& config);

/// What a call says of its caller, in its metadata and the properties of its connection (may be
/// null), both of which must outlive the result.
Credentials CredentialsOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                          const grpc::AuthContext* connection);

/// The value of `key`; empty if there is none.
std::string_view MetadataValue(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                               const char* key);

}  // namespace denoised
