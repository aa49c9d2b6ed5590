#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/status.h"
#include "server/security/limits.h"

namespace denoised {

/// The lower of two limits of which 0 is none.
int LowerLimit(int a, int b);

/// What one client may ask, within what the server allows everybody. 0: no bound of its own.
struct ClientLimits {
  int max_streams = 0;          // calls under way that wait for images
  int max_queued_requests = 0;  // that wait for the device
  int max_count = 0;            // images of one request
  int max_steps = 0;
};

/// What a client of `client` may ask of a server of `server`.
RequestLimits Within(const ClientLimits& client, RequestLimits server);

/// Who makes a call.
struct Caller {
  std::string name = "anonymous";  // in logs and metrics
  bool admin = false;              // may change models and see the jobs of all clients
  double weight = 1;               // share of the device beside other clients
  ClientLimits limits;

  bool anonymous() const { return name == "anonymous"; }
};

/// How a call says who makes it.
struct Credentials {
  std::string_view authorization;             // the header, "Bearer …"; empty: none
  std::vector<std::string_view> certificate;  // names in the client's verified certificate
};

/// Who may call. With a file: those named there, by a token or a certificate; without: everybody
/// who can connect, by the first name in the certificate if there is one. The file is an object of
/// clients by name:
///
///   {"studio": {"token_sha256": ["9f86…"], "weight": 2, "max_streams": 64},
///    "ops": {"certificates": ["ops.example.org"], "admin": true}}
///
/// It is read again when it changed; one that is wrong then is an error in the log, and the former
/// stays. Thread-safe.
class Clients {
 public:
  /// `path` empty: no file. InvalidArgument and NotFound name the client and field at fault.
  static absl::StatusOr<std::unique_ptr<Clients>> Open(const std::string& path,
                                                       std::chrono::milliseconds refresh);

  /// Whether clients are told apart: there is a file.
  bool known() const { return !path_.empty(); }
  /// Whether the caller may do what is for admins: where clients are not told apart, all may.
  bool IsAdmin(const Caller& caller) const { return !known() || caller.admin; }

  /// Never null. Unauthenticated says what would be needed, and repeats nothing of what was sent.
  absl::StatusOr<std::shared_ptr<const Caller>> Identify(const Credentials& credentials) const;

 private:
  struct Entry {
    std::shared_ptr<const Caller> caller;
    std::vector<std::string> token_digests;  // 32 bytes each; two while a token is being replaced
    std::vector<std::string> certificates;
  };
  using Entries = std::vector<Entry>;

  Clients(std::string path, std::chrono::milliseconds refresh)
      : path_(std::move(path)), refresh_(refresh) {}
  static absl::StatusOr<std::shared_ptr<const Entries>> Read(const std::string& path);
  /// The entries, as of at most `refresh_` ago. Null without a file.
  std::shared_ptr<const Entries> Current() const;

  const std::string path_;
  const std::chrono::milliseconds refresh_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Entries> entries_;         // guarded by mutex_
  mutable std::chrono::steady_clock::time_point checked_;  // guarded by mutex_
  mutable std::string version_;  // guarded by mutex_; which state of the file was read
};

/// A new bearer token and what the file of clients says of it, as text for a person: `denoised
/// --make-token studio`. InvalidArgument when no client can have that name. The token has 256
/// random bits, so that a hash without salt keeps it secret.
absl::StatusOr<std::string> MakeToken(const std::string& client);

}  // namespace denoised
