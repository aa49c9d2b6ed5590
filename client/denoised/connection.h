// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "denoised/generation.h"
#include "denoised/retry.h"

namespace denoised::client {

/// How to make one call.
struct CallOptions {
  /// For all attempts together; unset: none. Zero or less is over at once: DEADLINE_EXCEEDED.
  std::optional<std::chrono::nanoseconds> timeout = {};
  std::stop_token stop = {};  // a stop request cancels the call
  /// Sent with every attempt, as gRPC metadata. Keys are case-insensitive. Values are printable
  /// ASCII; those of keys that end in "-bin" are any bytes.
  std::vector<std::pair<std::string, std::string>> metadata = {};
  /// The caller's span, in the form of W3C Trace Context: the server logs the call under its trace.
  /// Empty: none.
  std::string traceparent = {};
};

/// Callbacks of a streaming call, on a thread of gRPC's callback pool. Those of one stream run one
/// at a time and in order; the next event is read when on_event returns, so a slow listener slows
/// down only its own stream. Block only briefly: streams share the pool. Of a call that cannot be
/// made, on_done comes on the caller's thread, before StreamGenerate or WatchJob returns: hold no
/// lock there that it takes. Callbacks must not throw: as in a std::thread, an exception that
/// leaves one ends the process (std::terminate).
struct StreamListener {
  std::function<void(const Event&)> on_event = {};        // may be empty
  std::function<void(const absl::Status&)> on_done = {};  // exactly once, last; may be empty
};

/// A streaming call under way. Thread-safe.
class StreamCall {
 public:
  /// Cancels the call if it still runs and waits until on_done has returned, so a listener may
  /// refer to whatever outlives the StreamCall. Within the call's own listener it cannot wait:
  /// on_done comes later, and until it has returned the Connection must live.
  virtual ~StreamCall() = default;
  /// Cancels the call: on_done gets CANCELLED unless the call has already ended. Does not wait.
  virtual void Cancel() = 0;
  /// Waits for the end of the call, on_done included, and returns how it ended. Within the call's
  /// own listener it cannot wait: FAILED_PRECONDITION.
  virtual absl::Status Wait() = 0;
};

/// The states of gRPC's health service.
enum class ServingStatus { kUnknown = 0, kServing = 1, kNotServing = 2 };

/// The calls that a Client makes to a server, or to several replicas. Implementations are
/// thread-safe. Errors are the server's, with details (denoised/error.h), or, without details,
/// those of this side: INVALID_ARGUMENT for what cannot be sent and for the token file,
/// UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, RESOURCE_EXHAUSTED for a reply above
/// max_message_bytes, and DATA_LOSS for a stream without its last event.
///
/// For tests: denoised/mock_connection.h, or a class of your own. A call that it does not override
/// returns UNIMPLEMENTED, so a new call in a later version breaks no such class.
class Connection {
 public:
  virtual ~Connection() = default;
  virtual absl::StatusOr<GenerationResult> Generate(const Generation& generation,
                                                    const CallOptions& options);
  /// Never null; a call that cannot be made ends with on_done. A stream that breaks is retried with
  /// the same seed and request_id, and its listener gets each event once.
  virtual std::unique_ptr<StreamCall> StreamGenerate(const Generation& generation,
                                                     const std::optional<PreviewOptions>& preview,
                                                     StreamListener listener,
                                                     const CallOptions& options);
  /// The events of a job after `after_sequence` that the server keeps, then as they happen. Never
  /// null.
  virtual std::unique_ptr<StreamCall> WatchJob(const std::string& request_id,
                                               uint64_t after_sequence, StreamListener listener,
                                               const CallOptions& options);
  virtual absl::StatusOr<Job> GetJob(const std::string& request_id, const CallOptions& options);
  virtual absl::StatusOr<std::vector<Job>> ListJobs(const JobQuery& query,
                                                    const CallOptions& options);
  virtual absl::StatusOr<Job> CancelJob(const std::string& request_id, const CallOptions& options);
  virtual absl::StatusOr<ServerInfo> GetServerInfo(const CallOptions& options);
  virtual absl::StatusOr<Model> LoadModel(const ModelLoad& load, const CallOptions& options);
  virtual absl::Status UnloadModel(const std::string& name, const CallOptions& options);
  virtual absl::StatusOr<Model> SetAlias(const std::string& alias, const std::string& target,
                                         const CallOptions& options);
  virtual absl::Status DeleteAlias(const std::string& alias, const CallOptions& options);
  virtual absl::StatusOr<std::vector<Model>> ListModels(const CallOptions& options);
  virtual absl::StatusOr<Model> GetModel(const std::string& name, const CallOptions& options);
  virtual absl::StatusOr<ServingStatus> CheckHealth(const std::string& service,
                                                    const CallOptions& options);
};

/// Files in PEM, read by Connect.
struct TlsOptions {
  std::string ca_file = {};                   // trusted authorities; empty: those of the system
  std::string cert_file = {}, key_file = {};  // of this client, for mutual TLS; both or none
  std::string server_name = {};  // in the server's certificate; empty: the host of the target,
                                 // which a list of servers does not have
};

struct ConnectionOptions {
  RetryPolicy retry = {};
  /// Unset: the connection is not encrypted.
  std::optional<TlsOptions> tls = {};
  /// A file with a bearer token, sent with every call. It is read for each attempt, so the token
  /// can be replaced; a call ends with INVALID_ARGUMENT when it cannot be read or
  /// holds more than one token. Empty: none. Needs TLS or allow_plaintext_token.
  std::string token_file = {};
  /// Sends tokens over a connection that the library does not encrypt. Set it only where something
  /// else encrypts the connection, such as the sidecar of a service mesh: otherwise anyone on the
  /// network can read and use the token.
  bool allow_plaintext_token = false;
  /// Largest message either way. gRPC's own 4 MB is less than one raw 1024 x 1024 image (12 MB); a
  /// unary reply carries all images of a request.
  int max_message_bytes = 256 << 20;
  /// Pings while calls are open: proxies keep the connection of a request that waits for minutes,
  /// and the client notices a server that is gone. At least 20 s: servers close connections that
  /// ping more often. From 24.9 days (INT_MAX ms) on: never.
  std::chrono::milliseconds keepalive_interval{30'000};
  std::chrono::milliseconds keepalive_timeout{10'000};
};

/// A connection over gRPC, which connects with the first call and is shared with nobody. `target`
/// is
///   "host:port"                      one server (or any gRPC target),
///   "dns:///host:port"               replicas: every address of the name is one,
///   "10.0.0.1:50051,10.0.0.2:50051"  replicas, by their IP addresses.
/// Replicas are called in turn while their health is SERVING. If one of them fails a request, it is
/// retried on another. They must have the same models, build and kind of device, so that a
/// retry gives the same images. Calls about jobs and changes of models need one server, by its own
/// address. A loopback target or a list is never reached through a proxy of the environment.
/// INVALID_ARGUMENT when the target or an option is wrong, or a file cannot be read or used.
absl::StatusOr<std::shared_ptr<Connection>> Connect(const std::string& target,
                                                    const ConnectionOptions& options = {});

}  // namespace denoised::client
