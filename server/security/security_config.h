// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

namespace denoised {

/// Who may connect. Empty path: not used.
struct SecurityConfig {
  std::string tls_cert, tls_key;              // PEM; both or none
  std::string tls_client_ca;                  // clients must have a certificate that it signed
  std::string clients;                        // the file of clients
  bool plaintext_tokens = false;              // allow tokens without TLS, from this host only
  std::chrono::milliseconds refresh{10'000};  // how often to check these files for changes

  bool tls() const { return !tls_cert.empty(); }
};

}  // namespace denoised
