// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <boost/asio/ssl/context.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/core/mutex.h"
#include "engine/core/status.h"
#include "server/security/security_config.h"

namespace denoised {

/// TLS of the HTTP port with the files of SecurityConfig. New connections get new files, which are
/// looked for every `refresh`; files that are wrong are logged and change nothing. Thread-safe.
class TlsContext {
 public:
  /// InvalidArgument and NotFound name the flag and the file.
  static absl::StatusOr<std::unique_ptr<TlsContext>> Open(const SecurityConfig& config);

  std::shared_ptr<boost::asio::ssl::context> Current();

 private:
  explicit TlsContext(SecurityConfig config) : config_(std::move(config)) {}
  absl::StatusOr<std::shared_ptr<boost::asio::ssl::context>> Read() const;

  const SecurityConfig config_;
  Mutex mutex_;
  std::shared_ptr<boost::asio::ssl::context> context_ ABSL_GUARDED_BY(mutex_);
  std::string version_ ABSL_GUARDED_BY(mutex_);         // which state of the files was read
  std::string failed_version_ ABSL_GUARDED_BY(mutex_);  // which could not be, and was told
  std::chrono::steady_clock::time_point checked_ ABSL_GUARDED_BY(mutex_);
};

/// The names in the client's certificate of a connection whose handshake has verified it, as gRPC
/// takes them: the subject's alternative names, or else its common name.
std::vector<std::string> CertificateNames(SSL* connection);

}  // namespace denoised
