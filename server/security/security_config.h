// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

namespace denoised {

/// Who may connect. Empty paths: not asked for.
struct SecurityConfig {
  std::string tls_cert, tls_key;              // PEM; both or none
  std::string tls_client_ca;                  // clients must show a certificate of it
  std::string clients;                        // the file of clients
  bool plaintext_tokens = false;              // it may be used without TLS, from this host alone
  std::chrono::milliseconds refresh{10'000};  // how often these files are looked at

  bool tls() const { return !tls_cert.empty(); }
};

}  // namespace denoised
