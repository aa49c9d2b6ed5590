// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "engine/core/status.h"

class CivetServer;

namespace denoised {

/// The reply of a page.
struct PageReply {
  int code = 200;
  std::string body;
};

/// A small HTTP server for monitoring: Prometheus and probes. Thread-safe.
class HttpServer {
 public:
  /// Pages by path, such as "/metrics". Several threads call them concurrently.
  using Pages = std::map<std::string, std::function<PageReply()>>;

  /// Answers GET and HEAD on `address` (host:port) until destruction; port 0 picks a free port.
  /// Unavailable names --metrics-listen if the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Listen(const std::string& address,
                                                            const Pages& pages);
  /// Waits for replies in progress. Takes a second or two.
  ~HttpServer();

  int port() const { return port_; }

 private:
  class Page;
  HttpServer();

  std::map<std::string, std::unique_ptr<Page>> pages_;  // outlives server_
  std::unique_ptr<CivetServer> server_;
  int port_ = 0;
};

}  // namespace denoised
