// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "engine/core/status.h"

namespace denoised {

/// The reply of a page.
struct PageReply {
  int code = 200;
  std::string body;
};

/// The port for monitoring: Prometheus and probes. It needs no login, and no client can keep the
/// others waiting: one that sends or reads too slowly is cut off, and some descriptors are kept for
/// this port when clients have all others. Thread-safe.
class MetricsPort {
 public:
  /// Pages by path, such as "/metrics". Two threads call them concurrently.
  using Pages = std::map<std::string, std::function<PageReply()>>;

  /// Answers GET and HEAD on `address` (host:port) until destruction; port 0 picks a free port.
  /// `max_connections` is the process's, see Acceptor. Errors name --metrics-listen.
  static absl::StatusOr<std::unique_ptr<MetricsPort>> Listen(const std::string& address,
                                                             int max_connections, Pages pages);
  /// Waits for pages that are being made, and closes connections.
  ~MetricsPort();

  int port() const;

 private:
  struct State;
  explicit MetricsPort(std::unique_ptr<State> state);
  const std::unique_ptr<State> state_;
};

}  // namespace denoised
