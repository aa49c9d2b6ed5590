// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace denoised::client {

/// Where a connection goes, in the terms of gRPC.
struct Target {
  std::string uri;        // for grpc::CreateChannel
  std::string authority;  // ":authority" of HTTP/2; empty: gRPC derives it from the uri
  bool list = false;      // a list of addresses
  bool replicas = false;  // several servers, called in turn
  bool direct = false;    // never through a proxy of the environment
};

/// Parses the target of Connect: see denoised/connection.h. INVALID_ARGUMENT names the part of a
/// list that is not an address.
absl::StatusOr<Target> ParseTarget(const std::string& text);

}  // namespace denoised::client
