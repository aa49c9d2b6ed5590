// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "server/config.h"

namespace denoised {

/// The whole server: gRPC port, HTTP port, health, reflection, metrics port, and an engine whose
/// models load in the background.
///
///   auto server = Server::Start(config, std::move(engine));
///   ... (*server)->port() ...
///   (*server)->Drain(config.grace);
///
/// Thread-safe, except for the destructor.
class Server {
 public:
  /// Opens the ports, then starts to load `config.models`. Until they are ready, health is
  /// NOT_SERVING and requests get FAILED_PRECONDITION. Unavailable if an address cannot be bound;
  /// InvalidArgument if a setting is wrong.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Config& config,
                                                       std::unique_ptr<Engine> engine);
  /// Drains with no grace period, unless Drain was called.
  ~Server();

  /// Where it listens, also when port 0 was asked for. The last two are 0 when there is none.
  int port() const;
  int http_port() const;
  int metrics_port() const;

  /// Waits at most `timeout` for all models. Nothing: still loading. OK: the server is serving,
  /// though some models may have failed. An error: no model could be loaded; it is that of the
  /// first.
  std::optional<absl::Status> Loaded(std::chrono::milliseconds timeout);

  /// OK while a device works. An error is final: health becomes NOT_SERVING and the process should
  /// end. Logs each lost device. Call it periodically, from one thread.
  absl::Status CheckDevices();
  /// Whether the destructor would block, on a lost device whose thread may hang for ever or on a
  /// model that is loading. If so, end the process without it.
  bool DestructorWaits() const;

  /// Says NOT_SERVING; after `lame_duck` takes no new work; gives what runs `grace` from then, ends
  /// the rest with UNAVAILABLE and closes the ports. The second call has nothing to do.
  void Drain(std::chrono::milliseconds grace, std::chrono::milliseconds lame_duck = {});

 private:
  struct State;
  explicit Server(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace denoised
