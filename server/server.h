// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "server/config.h"

namespace denoised {

/// The whole server: gRPC port, health, reflection, metrics port, and an engine whose models load
/// in the background.
///
///   auto server = Server::Start(config, std::move(engine));
///   ... (*server)->port() ...
///   (*server)->Drain(config.grace);
///
/// Thread-safe, but for the destructor.
class Server {
 public:
  /// Opens the ports, then begins to load `config.models`: until they are ready, health says
  /// NOT_SERVING and requests get FAILED_PRECONDITION. InvalidArgument when an address cannot be
  /// bound.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Config& config,
                                                       std::unique_ptr<Engine> engine);
  /// Drains without grace, unless Drain was called.
  ~Server();

  /// Where it listens, also when port 0 was asked for. metrics_port is 0 when there is none.
  int port() const;
  int metrics_port() const;

  /// Waits at most `timeout` for all models. Nothing: they still load. OK: the server is serving,
  /// though some may have FAILED. Else what is wrong with the first, since none could be loaded.
  std::optional<absl::Status> Loaded(std::chrono::milliseconds timeout);

  /// OK while a device is left. An error is final: health becomes NOT_SERVING and the process
  /// should end. Logs each device that is lost; to be called now and then, by one thread.
  absl::Status CheckDevices();
  /// Whether the destructor would wait: for a device that is lost and may hold its thread for ever,
  /// or for a model that loads. A process that ends should end without it.
  bool DestructorWaits() const;

  /// Says NOT_SERVING; after `lame_duck` takes no new work; gives what runs `grace` from then, ends
  /// the rest with UNAVAILABLE and closes the port. The second call has nothing to do.
  void Drain(std::chrono::milliseconds grace, std::chrono::milliseconds lame_duck = {});

 private:
  struct State;
  explicit Server(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace denoised
