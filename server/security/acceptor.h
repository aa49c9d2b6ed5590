// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/core/status.h"

namespace denoised {

class Metrics;

/// Accepts connections and hands them to gRPC or to the HTTP port. gRPC's own listener gives up for
/// good when the process runs out of file descriptors (gRPC 1.51, "Failed accept4: Too many open
/// files"), which any client can bring about by connecting often enough. This one closes what is
/// too much and goes on.
class Acceptor {
 public:
  /// Listens on every address of "host:port"; port 0 picks one that is free. Connections beyond
  /// `max_connections`, or beyond what the process may open, are closed at once. This port may use
  /// `reserve` more of the descriptors that are kept for other purposes, at most 64. `metrics`
  /// counts both kinds and outlives the acceptor. Errors name `flag`, "--listen", and what the
  /// system says: InvalidArgument if there is no such address, Unavailable if it cannot be bound,
  /// ResourceExhausted without a free descriptor.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const std::string& flag,
                                                          const std::string& address,
                                                          int max_connections, Metrics* metrics,
                                                          int reserve = 0);
  /// Stops.
  ~Acceptor();

  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  int port() const { return port_; }

  /// Takes a connection, which it owns from then on. On the acceptor's thread.
  using Handler = std::function<void(int listener, int connection)>;
  /// Begins to accept.
  void Start(Handler handler);
  /// Closes the port. Existing connections stay open.
  void Stop();

 private:
  Acceptor(int max_connections, int reserve, Metrics* metrics);
  void Run();
  void AcceptFrom(int listener);

  Metrics* const metrics_;
  /// A new descriptor gets the lowest free number, so its number tells how many are in use.
  int highest_ = 0;
  int port_ = 0;
  std::vector<int> listeners_;
  int stop_pipe_[2] = {-1, -1};
  Handler handler_;
  std::thread thread_;
};

}  // namespace denoised
