#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace denoised::client {

/// What a connection leads to.
struct Target {
  std::string uri;        // as gRPC wants it
  std::string authority;  // of HTTP/2; empty: what gRPC makes of the uri
  bool list = false;      // of addresses
  bool replicas = false;  // servers that are asked in turn, not a single one
  bool direct = false;    // never through a proxy of the environment
};

/// Understands what Connect does: see denoised/connection.h. INVALID_ARGUMENT names what of a list
/// is not an address.
absl::StatusOr<Target> ParseTarget(const std::string& text);

}  // namespace denoised::client
