// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace denoised {

/// A certificate and its private key, PEM.
struct KeyPair {
  std::string certificate, key;
};

/// A certificate authority that lives as long as its test.
class TestAuthority {
 public:
  TestAuthority();
  ~TestAuthority();

  /// The authority's own certificate, PEM: what peers are told to trust.
  const std::string& certificate() const;
  /// Valid for `time` from now; `names` as OpenSSL writes alternative names: "DNS:localhost",
  /// "IP:127.0.0.1".
  KeyPair Issue(const std::string& common_name, const std::string& names,
                std::chrono::seconds time = std::chrono::hours(1)) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace denoised
