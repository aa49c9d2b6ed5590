// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/jobs/memory_budget.h"
#include "server/security/clients.h"

/// Requests and replies of HTTP, without the library that reads and writes them.

namespace denoised {

struct Route;

struct HttpRequest {
  std::string method;                          // "GET"
  std::string path;                            // as it was sent, without the query
  std::string query;                           // as it was sent, without '?'
  std::map<std::string, std::string> headers;  // names in lower case; a repeated one: the first
  std::string body;
  std::string peer;                      // as gRPC writes addresses
  std::vector<std::string> certificate;  // names in the client's verified certificate
  bool tls = false;

  // What HttpHandler::Admit found.
  const Route* route = nullptr;
  std::map<std::string, std::string> parameters;  // of the query
  std::vector<std::string> arguments;             // the values of the {} in the route's path
  std::shared_ptr<const Caller> caller;
  std::optional<std::chrono::steady_clock::time_point> deadline;
  std::optional<uint64_t> max_body_bytes;                          // below the port's own bound
  std::vector<std::pair<std::string, std::string>> reply_headers;  // of any reply: CORS

  /// The value of a header, whose name is in lower case; empty if there is none.
  std::string_view Header(const std::string& name) const {
    const auto it = headers.find(name);
    return it == headers.end() ? std::string_view() : std::string_view(it->second);
  }
};

struct HttpReply {
  int code = 200;
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::string body = {};
  /// Sent instead of `body`, without a copy for each reader: an image behind a link, a file of the
  /// page. `owner` keeps it; without one it stays as long as the process.
  std::string_view lasting = {};
  std::shared_ptr<const void> owner = {};

  std::string_view content() const { return lasting.empty() ? std::string_view(body) : lasting; }
};

/// One request and its reply. The reply is made once: by Reply, or by Begin, any number of Writes,
/// and End. Parts are sent in the order of the calls and stay in memory until they are sent.
/// Methods may be called from any thread. Callbacks run on the port's threads and must not block.
class Exchange {
 public:
  /// `ok`: the operating system of the client, or ours, has all bytes. False: the client has gone.
  using Done = std::function<void(bool ok)>;

  virtual ~Exchange() = default;

  const HttpRequest& request() const { return request_; }
  /// The body; call it once. It counts as an upload for as long as `memory` lives, which should be
  /// until what was made of it is gone too.
  virtual std::string TakeBody(MemoryBudget::Lease* memory) = 0;

  virtual void Reply(HttpReply reply, Done done = {}) = 0;
  /// A reply in parts. `keep_alive` is sent when nothing else was sent for a while.
  virtual void Begin(HttpReply head, std::string keep_alive) = 0;
  virtual void Write(std::string part, Done done) = 0;
  virtual void End(Done done) = 0;

  /// `stop` is called once if the client goes or the request's deadline passes before the end of
  /// the reply, soon after that. A late request needs a reply all the same.
  virtual void OnStop(std::function<void()> stop) = 0;
  virtual bool late() const = 0;

 protected:
  explicit Exchange(HttpRequest request) : request_(std::move(request)) {}
  HttpRequest request_;
};

/// Answers the requests of a port. Thread-safe.
class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  /// Called when the headers of a request have arrived, and its body has not. If it returns a
  /// reply, the request is refused and its body is not read.
  virtual std::optional<HttpReply> Admit(HttpRequest* head) = 0;
  /// A request that was admitted. Must not block.
  virtual void Serve(std::shared_ptr<Exchange> exchange) = 0;
  /// The reply to bytes that are not a valid request.
  virtual HttpReply Malformed(int code, const std::string& problem) = 0;
};

}  // namespace denoised
