// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace denoised {

struct HttpAnswer {
  int code = 0;                                // 0: the connection ended before an answer
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;

  std::string Header(const std::string& name) const {
    const auto it = headers.find(name);
    return it == headers.end() ? "" : it->second;
  }
  nlohmann::json Json() const { return nlohmann::json::parse(body, nullptr, false); }
  /// Of {"error": …}.
  std::string Error(const char* field = "message") const {
    const nlohmann::json json = Json();
    if (!json.is_object() || !json.contains("error")) return "no error in " + body.substr(0, 200);
    const nlohmann::json& value = json["error"][field];
    return value.is_string() ? value.get<std::string>() : value.dump();
  }
};

struct HttpEvent {
  std::string id, name, data;
  nlohmann::json Json() const { return nlohmann::json::parse(data, nullptr, false); }
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

/// How a client is to connect with TLS. Empty: without.
struct HttpTls {
  std::string authority;         // PEM; what the server's certificate must be of
  std::string certificate, key;  // PEM; what the client shows
};

/// A connection to 127.0.0.1, for one request after the other.
class HttpClient {
 public:
  /// `receive_buffer`: of the socket, bytes; 0: as the system has it.
  explicit HttpClient(int port, std::optional<HttpTls> tls = std::nullopt, int receive_buffer = 0);
  ~HttpClient();
  HttpClient(HttpClient&&) noexcept;
  HttpClient& operator=(HttpClient&&) noexcept;

  bool connected() const;
  /// Bytes as they are. False when the server has closed.
  bool Send(const std::string& bytes);
  static std::string Request(const std::string& method, const std::string& target,
                             const std::string& body = "", const HttpHeaders& headers = {});
  /// `head_alone`: of a HEAD request.
  HttpAnswer Read(bool head_alone = false);
  HttpAnswer Ask(const std::string& method, const std::string& target, const std::string& body = "",
                 const HttpHeaders& headers = {}) {
    Send(Request(method, target, body, headers));
    return Read();
  }

  /// The head of an event stream, without its events; or a whole answer that is none.
  HttpAnswer ReadHead();
  /// Nothing at the end of the stream.
  std::optional<HttpEvent> ReadEvent();
  /// Whether the stream ended as it should, with its last chunk.
  bool ended() const;

  /// Whether the server closes within the time; what comes before is thrown away.
  bool IsClosedWithin(std::chrono::milliseconds time);
  void Close();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// One request on a connection of its own. With a body it is JSON.
HttpAnswer Ask(int port, const std::string& method, const std::string& target,
               const std::string& body = "", const HttpHeaders& headers = {});

/// RFC 4648 as protobuf prints it.
std::string Decode64(const std::string& text);
std::string Encode64(const std::string& bytes);

}  // namespace denoised
