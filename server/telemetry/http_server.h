// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "engine/core/status.h"

class CivetServer;

namespace denoised {

/// What a page answers.
struct HttpReply {
  int code = 200;
  std::string body;
};

/// A small HTTP port for programs that watch the server: Prometheus and probes. Thread-safe.
class HttpServer {
 public:
  /// By path, such as "/metrics". Called from several threads at once.
  using Pages = std::map<std::string, std::function<HttpReply()>>;

  /// Answers GET and HEAD on `address`, a host:port, until destruction; port 0 picks one that is
  /// free. Unavailable names --metrics-listen when the address cannot be had.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Listen(const std::string& address,
                                                            Pages pages);
  /// Waits for the pages that are being made. Takes a second or two.
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
