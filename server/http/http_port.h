// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/core/status.h"
#include "server/http/message.h"
#include "server/jobs/memory_budget.h"
#include "server/security/security_config.h"

namespace denoised {

class Metrics;

struct HttpPortOptions {
  std::string address;                 // host:port
  SecurityConfig security;             // TLS
  const char* flag = "--http-listen";  // that names the address, for errors
  int max_connections = 10'000;
  int reserve = 0;                              // see Acceptor
  std::chrono::milliseconds handshake{20'000};  // for TLS, and for the headers of a request
  std::chrono::milliseconds idle{75'000};       // between requests of a connection
  std::chrono::milliseconds write_timeout{30'000};
  std::chrono::milliseconds keep_alive{15'000};  // see Exchange::Begin
  int64_t max_body_bytes = 64 << 20;
};

/// Serves HTTP/1.1 on an address, with Boost.Beast: two threads for all connections, none of which
/// waits for a client. A client that sends or takes less than kPieceBytes in the time of
/// `handshake` or `write_timeout` is cut off. Thread-safe.
class HttpPort {
 public:
  static constexpr size_t kPieceBytes = 64 << 10;
  static constexpr int64_t kMaxHeadBytes = 16 << 10;

  /// Opens the port, and answers from Start on. What is pointed to must outlive the port; `bodies`
  /// is the memory for what clients send. Errors name `flag` or the flags of TLS.
  static absl::StatusOr<std::unique_ptr<HttpPort>> Listen(const HttpPortOptions& options,
                                                          HttpHandler* handler,
                                                          MemoryBudget* bodies, Metrics* metrics);
  /// Stop().
  ~HttpPort();

  int port() const;
  void Start();
  /// Closes each connection once it has no request.
  void Drain();
  /// Waits until all replies were written. False if some are still being written at `deadline`.
  bool WaitForReplies(std::chrono::steady_clock::time_point deadline);
  /// Closes the port and all connections; waits until nobody uses their requests.
  void Stop();

 private:
  struct State;
  explicit HttpPort(std::unique_ptr<State> state);
  const std::unique_ptr<State> state_;
};

}  // namespace denoised
