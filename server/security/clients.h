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

/// The lower of two limits; 0 means no limit.
int LowerLimit(int a, int b);

/// Limits of one client, below those of the server. 0: only the server's limit.
struct ClientLimits {
  int max_streams = 0;          // concurrent calls that wait for images
  int max_queued_requests = 0;  // requests that wait for the device
  int max_count = 0;            // images of one request
  int max_steps = 0;
};

/// The limits of a client on a server: the lower of both.
RequestLimits Within(const ClientLimits& client, RequestLimits server);

/// The name of all callers without one. No client in the file can have it.
inline constexpr char kAnonymous[] = "anonymous";

/// Who makes a call. Jobs belong to a name: a client with a name finds only its own jobs. All
/// anonymous callers share one name, so whoever knows the id of an anonymous job can access it. Ids
/// made by the server are 128 random bits (MakeJobId) and cannot be guessed. Listing jobs would
/// reveal the ids, so anonymous callers may not list them unless they are admins.
struct Caller {
  std::string name = kAnonymous;  // in logs and metrics
  bool admin = false;             // may change models and list the jobs of all clients
  double weight = 1;              // share of the device relative to other clients
  ClientLimits limits;

  bool anonymous() const { return name == kAnonymous; }
};

/// What a call says about its caller.
struct Credentials {
  std::string_view authorization;             // the header, "Bearer …"; empty: none
  std::vector<std::string_view> certificate;  // names in the client's verified certificate
  bool forwarded = false;                     // a header says that a proxy forwarded the call
};

/// Who may call, and who is an admin.
///
/// With a file, only the clients in it may call, with a token or a certificate; those with
/// "admin": true are admins. The file maps names to clients:
///
///   {"studio": {"token_sha256": ["9f86…"], "weight": 2, "max_streams": 64},
///    "ops": {"certificates": ["ops.example.org"], "admin": true}}
///
/// A changed file is read again. If it is invalid, an error is logged and the old content stays in
/// force.
///
/// Without a file, everyone who can connect may call. The caller's name is the first name in its
/// certificate; callers without one are anonymous, and so are those whose name is empty, all spaces
/// or has control characters. Nobody is an admin unless `everybody_is_admin`, which the server
/// sets only if it listens on loopback alone and asks for no certificates: then every caller has a
/// login on this machine. The peer address is not used, because behind a proxy on the same machine
/// (a sidecar) every caller has a loopback address. Most proxies mark forwarded calls with a header
/// (x-forwarded-for, forwarded, via), and the caller of such a call is never an admin. A proxy that
/// adds no header cannot be detected: a server behind it needs --admin=off or a file.
///
/// Thread-safe.
class Clients {
 public:
  /// Empty `path`: no file. `everybody_is_admin` has no effect with a file. InvalidArgument and
  /// NotFound name the client and the field.
  static absl::StatusOr<std::unique_ptr<Clients>> Open(const std::string& path,
                                                       std::chrono::milliseconds refresh,
                                                       bool everybody_is_admin = false);

  /// Never null. Unauthenticated says what is needed, without repeating what was sent.
  absl::StatusOr<std::shared_ptr<const Caller>> Identify(const Credentials& credentials) const;
  /// As Identify, for a call that it let in a moment ago: a client that has been taken out of the
  /// file since is still known.
  absl::StatusOr<std::shared_ptr<const Caller>> IdentifyAdmitted(
      const Credentials& credentials) const;

 private:
  struct Entry {
    std::shared_ptr<const Caller> caller;
    std::vector<std::string> token_digests;  // 32 bytes each; two while one replaces the other
    std::vector<std::string> certificates;
  };
  using Entries = std::vector<Entry>;

  Clients(std::string path, std::chrono::milliseconds refresh, bool everybody_is_admin)
      : path_(std::move(path)), refresh_(refresh), everybody_is_admin_(everybody_is_admin) {}
  static absl::StatusOr<std::shared_ptr<const Entries>> Read(const std::string& path);
  /// The entries, at most `refresh_` old. Null without a file.
  std::shared_ptr<const Entries> Current() const;
  static absl::StatusOr<std::shared_ptr<const Caller>> Find(const Entries& entries,
                                                            const Credentials& credentials);

  const std::string path_;
  const std::chrono::milliseconds refresh_;
  const bool everybody_is_admin_;
  mutable Mutex mutex_;
  mutable std::shared_ptr<const Entries> entries_ ABSL_GUARDED_BY(mutex_);
  mutable std::shared_ptr<const Entries> former_ ABSL_GUARDED_BY(mutex_);  // null: none before
  mutable std::chrono::steady_clock::time_point checked_ ABSL_GUARDED_BY(mutex_);
  /// Identify states of the file.
  mutable std::string version_ ABSL_GUARDED_BY(mutex_);         // of `entries_`
  mutable std::string failed_version_ ABSL_GUARDED_BY(mutex_);  // the last that could not be read
};

/// The output of `denoised --make-token studio`: a new bearer token and its entry for the clients
/// file. InvalidArgument if the name is not valid. The token has 256 random bits, so an unsalted
/// hash does not reveal it.
absl::StatusOr<std::string> MakeToken(const std::string& client);

}  // namespace denoised
