// SPDX-License-Identifier: Apache-2.0
#include "server/security/clients.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "engine/core/config_reader.h"
#include "server/security/file_version.h"
#include "server/status/name.h"
#include "server/telemetry/log.h"

namespace denoised {
namespace {

using Digest = std::array<unsigned char, SHA256_DIGEST_LENGTH>;

Digest Sha256(std::string_view text) {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

std::string ToHex(const unsigned char* bytes, size_t size) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes), size});
}

/// 64 hexadecimal digits as 32 bytes; empty if `text` is anything else.
std::string FromHex(const std::string& text) {
  const bool valid = text.size() == 2 * SHA256_DIGEST_LENGTH &&
                     std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
  return valid ? absl::HexStringToBytes(text) : "";  // checks nothing itself
}

void ReadBound(ConfigReader* reader, const char* field, int* value) {
  reader->Read(field, value);
  if (*value < 0) reader->Complain(field, "use 1 or more, or leave it out for no bound");
}

/// Whether a name of a certificate, which can be a host, an e-mail address or a URI, tells its
/// owner from others: one that cannot be seen does not.
bool IsVisible(std::string_view name) {
  return std::none_of(name.begin(), name.end(), absl::ascii_iscntrl) &&
         !std::all_of(name.begin(), name.end(), absl::ascii_isspace);
}

absl::Status Unauthenticated(const char* message) {
  return absl::Status(absl::StatusCode::kUnauthenticated, message);
}

}  // namespace

int LowerLimit(int a, int b) { return a == 0 || b == 0 ? std::max(a, b) : std::min(a, b); }

RequestLimits Within(const ClientLimits& client, RequestLimits server) {
  server.max_count = LowerLimit(client.max_count, server.max_count);
  server.max_steps = LowerLimit(client.max_steps, server.max_steps);
  return server;
}

absl::StatusOr<std::unique_ptr<Clients>> Clients::Open(const std::string& path,
                                                       std::chrono::milliseconds refresh,
                                                       bool everybody_is_admin) {
  std::unique_ptr<Clients> clients(new Clients(path, refresh, everybody_is_admin));
  if (path.empty()) return clients;
  MutexLock lock(&clients->mutex_);
  clients->version_ = FileVersion(path);
  auto entries = Read(path);
  if (!entries.ok()) return Annotate(entries.status(), "--clients");
  clients->entries_ = *std::move(entries);
  clients->checked_ = std::chrono::steady_clock::now();
  return clients;
}

absl::StatusOr<std::shared_ptr<const Clients::Entries>> Clients::Read(const std::string& path) {
  DENOISED_ASSIGN_OR_RETURN(const nlohmann::json file, ReadJsonFile(path));
  auto entries = std::make_shared<Entries>();
  std::set<std::string> keys;  // tokens and certificates; each belongs to one client
  for (const auto& [name, object] : file.items()) {
    const std::string where = fmt::format("{}: client \"{}\"", path, name);
    if (!IsName(name)) return InvalidArgument("{}: {}", where, kNameRule);
    if (name == kAnonymous) {
      return InvalidArgument("{}: callers without a name have this one; choose another", where);
    }
    if (!object.is_object()) {
      return InvalidArgument("{} is not an object, such as {{\"token_sha256\": [\"9f86…\"]}}",
                             where);
    }
    auto caller = std::make_shared<Caller>();
    caller->name = name;
    Entry entry;
    ConfigReader reader(object, where);
    std::vector<std::string> digests;
    reader.Read("token_sha256", &digests);
    reader.Read("certificates", &entry.certificates);
    reader.Read("admin", &caller->admin);
    reader.Read("weight", &caller->weight);
    ReadBound(&reader, "max_streams", &caller->limits.max_streams);
    ReadBound(&reader, "max_queued_requests", &caller->limits.max_queued_requests);
    ReadBound(&reader, "max_count", &caller->limits.max_count);
    ReadBound(&reader, "max_steps", &caller->limits.max_steps);
    if (!(caller->weight >= 0.01 && caller->weight <= 100)) {
      reader.Complain("weight", "use 0.01 to 100");
    }
    for (const std::string& text : digests) {
      entry.token_digests.push_back(FromHex(text));
      if (entry.token_digests.back().empty()) {
        reader.Complain("token_sha256",
                        "use the 64 hexadecimal digits that denoised --make-token prints");
      } else if (!keys.insert("token " + entry.token_digests.back()).second) {
        reader.Complain("token_sha256", "another client has this token");
      }
    }
    for (const std::string& certificate : entry.certificates) {
      if (certificate.empty() || !keys.insert("certificate " + certificate).second) {
        reader.Complain("certificates", "use names that no other client has");
      }
    }
    DENOISED_RETURN_IF_ERROR(reader.Finish());
    if (entry.token_digests.empty() && entry.certificates.empty()) {
      return InvalidArgument(
          "{} has neither token_sha256 nor certificates; denoised --make-token {} makes a token",
          where, name);
    }
    entry.caller = std::move(caller);
    entries->push_back(std::move(entry));
  }
  return entries;
}

std::shared_ptr<const Clients::Entries> Clients::Current() const {
  if (path_.empty()) return nullptr;
  MutexLock lock(&mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (now - checked_ < refresh_) return entries_;
  checked_ = now;
  std::string version = FileVersion(path_);
  if (version == version_) return entries_;
  if (auto read = Read(path_); read.ok()) {
    version_ = std::move(version);
    former_ = std::exchange(entries_, *std::move(read));
    log::Info("clients read again", {{"clients", static_cast<int>(entries_->size())}});
  } else if (version != failed_version_) {
    // It is tried again at the next look, since a token may have been withdrawn, but told once.
    failed_version_ = std::move(version);
    log::Error("clients not read again; those known before stay",
               {{"error", std::string(read.status().message())}});
  }
  return entries_;
}

absl::StatusOr<std::shared_ptr<const Caller>> Clients::Identify(
    const Credentials& credentials) const {
  const auto entries = Current();
  if (entries == nullptr) {
    auto caller =
        std::make_shared<Caller>(Caller{.admin = everybody_is_admin_ && !credentials.forwarded});
    if (!credentials.certificate.empty() && IsVisible(credentials.certificate[0])) {
      caller->name = credentials.certificate[0];
    }
    return caller;
  }
  return Find(*entries, credentials);
}

absl::StatusOr<std::shared_ptr<const Caller>> Clients::IdentifyAdmitted(
    const Credentials& credentials) const {
  auto caller = Identify(credentials);
  if (caller.ok()) return caller;
  std::shared_ptr<const Entries> former;
  {
    MutexLock lock(&mutex_);
    former = former_;
  }
  return former == nullptr ? std::move(caller) : Find(*former, credentials);
}

absl::StatusOr<std::shared_ptr<const Caller>> Clients::Find(const Entries& entries,
                                                            const Credentials& credentials) {
  if (!credentials.authorization.empty()) {
    constexpr absl::string_view kScheme = "Bearer ";
    const std::string_view scheme = credentials.authorization.substr(0, kScheme.size());
    if (!absl::EqualsIgnoreCase({scheme.data(), scheme.size()}, kScheme)) {
      return Unauthenticated("authorization is not a bearer token; send \"Bearer TOKEN\"");
    }
    const Digest digest = Sha256(credentials.authorization.substr(kScheme.size()));
    // Compares with all tokens, each in constant time, so that timing reveals nothing about the
    // file.
    std::shared_ptr<const Caller> found;
    for (const Entry& entry : entries) {
      for (const std::string& known : entry.token_digests) {
        if (CRYPTO_memcmp(known.data(), digest.data(), digest.size()) == 0) found = entry.caller;
      }
    }
    if (found) return found;
    return Unauthenticated("this server does not know the token; ask its operator for one");
  }
  for (const std::string_view name : credentials.certificate) {
    for (const Entry& entry : entries) {
      for (const std::string& known : entry.certificates) {
        if (known == name) return entry.caller;
      }
    }
  }
  return Unauthenticated(credentials.certificate.empty()
                             ? "no bearer token was sent; send \"authorization: Bearer TOKEN\""
                             : "the certificate is of no client that this server knows, and no "
                               "bearer token was sent");
}

absl::StatusOr<std::string> MakeToken(const std::string& client) {
  if (!IsName(client)) return InvalidArgument("--make-token: \"{}\": {}", client, kNameRule);
  if (client == kAnonymous) {
    return InvalidArgument("--make-token: callers without a name are \"{}\"; choose another",
                           client);
  }
  std::array<unsigned char, 32> secret;
  if (RAND_bytes(secret.data(), secret.size()) != 1) {
    return Internal("--make-token: the system has no random bytes to give");
  }
  // The prefix lets scanners of source code find tokens that were committed by mistake.
  const std::string token = "denoised_" + ToHex(secret.data(), secret.size());
  const Digest digest = Sha256(token);
  return fmt::format(
      "Token, for the client alone (denoise --token-file FILE):\n  {}\n"
      "Entry for the file of --clients:\n  \"{}\": {{\"token_sha256\": [\"{}\"]}}\n",
      token, client, ToHex(digest.data(), digest.size()));
}

}  // namespace denoised
