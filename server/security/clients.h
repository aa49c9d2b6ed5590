// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/mutex.h"
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

/// The name of all callers who have none. No client of the file has it.
inline constexpr char kAnonymous[] = "anonymous";

/// Who makes a call. Jobs belong to the name: a client with a name finds its own jobs alone. All
/// anonymous callers share one name, so each of them finds a job by its id: an id made by the
/// server is 128 random bits (MakeJobId) and so a secret of the callers who were told it. Listing
/// jobs would tell the ids, so anonymous callers may not, unless they are admins.
struct Caller {
  std::string name = kAnonymous;  // in logs and metrics
  bool admin = false;             // may change models and see the jobs of all clients
  double weight = 1;              // share of the device beside other clients
  ClientLimits limits;

  bool anonymous() const { return name == kAnonymous; }
};

/// How a call says who makes it.
struct Credentials {
  std::string_view authorization;             // the header, "Bearer …"; empty: none
  std::vector<std::string_view> certificate;  // names in the client's verified certificate
  bool forwarded = false;                     // a proxy says that it passes the call on
};

/// Who may call, and who is an admin.
///
/// With a file, those named there may call, by a token or a certificate; those with "admin": true
/// are admins. The file is an object of clients by name:
///
///   {"studio": {"token_sha256": ["9f86…"], "weight": 2, "max_streams": 64},
///    "ops": {"certificates": ["ops.example.org"], "admin": true}}
///
/// The file is read again when it has changed. If the new one is wrong, an error is logged and the
/// old one stays in force.
///
/// Without a file, everybody who can connect may call, under the first name in the certificate if
/// there is one. Then nobody is an admin, unless `everybody_is_admin`. The server sets that only
/// where it listens on loopback alone and asks for no certificates: a caller then has a login on
/// this machine. The peer address of a call decides nothing, since behind a proxy on the same
/// machine (a sidecar) every caller of the network has a loopback address. Most proxies say in a
/// header that they pass a call on (x-forwarded-for, forwarded, via); whoever makes such a call is
/// no admin. A proxy that adds none of them cannot be seen: a server behind it needs --admin=off or
/// a file.
///
/// Thread-safe.
class Clients {
 public:
  /// `path` empty: no file. `everybody_is_admin` has no effect with a file. InvalidArgument and
  /// NotFound name the client and field at fault.
  static absl::StatusOr<std::unique_ptr<Clients>> Open(const std::string& path,
                                                       std::chrono::milliseconds refresh,
                                                       bool everybody_is_admin = false);

  /// Never null. Unauthenticated says what is needed and repeats nothing of what was sent.
  absl::StatusOr<std::shared_ptr<const Caller>> Identify(const Credentials& credentials) const;

 private:
  struct Entry {
    std::shared_ptr<const Caller> caller;
    std::vector<std::string> token_digests;  // 32 bytes each; two while a token is being replaced
    std::vector<std::string> certificates;
  };
  using Entries = std::vector<Entry>;

  Clients(std::string path, std::chrono::milliseconds refresh, bool everybody_is_admin)
      : path_(std::move(path)), refresh_(refresh), everybody_is_admin_(everybody_is_admin) {}
  static absl::StatusOr<std::shared_ptr<const Entries>> Read(const std::string& path);
  /// The entries, as of at most `refresh_` ago. Null without a file.
  std::shared_ptr<const Entries> Current() const;

  const std::string path_;
  const std::chrono::milliseconds refresh_;
  const bool everybody_is_admin_;
  mutable Mutex mutex_;
  mutable std::shared_ptr<const Entries> entries_ ABSL_GUARDED_BY(mutex_);
  mutable std::chrono::steady_clock::time_point checked_ ABSL_GUARDED_BY(mutex_);
  /// Which state of the file was read.
  mutable std::string version_ ABSL_GUARDED_BY(mutex_);
};

/// A new bearer token and what the file of clients says of it, as text for a person: `denoised
/// --make-token studio`. InvalidArgument when no client can have that name. The token has 256
/// random bits, so that a hash without salt keeps it secret.
absl::StatusOr<std::string> MakeToken(const std::string& client);

}  // namespace denoised
