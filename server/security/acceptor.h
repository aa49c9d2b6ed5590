// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_builder.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/core/status.h"

namespace denoised {

class Metrics;

/// Accepts connections and hands them to gRPC. gRPC's own listener gives up for good when the
/// process runs out of file descriptors (gRPC 1.51, "Failed accept4: Too many open files"), which
/// any client can bring about by connecting often enough. This one closes what is too much and goes
/// on.
class Acceptor {
 public:
  /// Listens on every address of "host:port"; port 0 picks one that is free. Connections beyond
  /// `max_connections`, or beyond what the process may open, are closed at once. `metrics` counts
  /// both kinds and outlives the acceptor. InvalidArgument names --listen and what the system says.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const std::string& address,
                                                          int max_connections, Metrics* metrics);
  /// Stops.
  ~Acceptor();

  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  int port() const { return port_; }

  /// Begins to accept, once the server that `handler` came with is started.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> handler);
  /// Closes the port; connections that are there live on.
  void Stop();

 private:
  Acceptor(int max_connections, Metrics* metrics);
  void Run();
  void AcceptFrom(int listener);

  Metrics* const metrics_;
  /// Descriptors are the lowest that are free, so the number of a new one tells how many are taken.
  int highest_ = 0;
  int port_ = 0;
  std::vector<int> listeners_;
  int stop_pipe_[2] = {-1, -1};
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> handler_;
  std::thread thread_;
};

}  // namespace denoised
