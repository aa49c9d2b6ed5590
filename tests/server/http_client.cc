// SPDX-License-Identifier: Apache-2.0
#include "tests/server/http_client.h"

#include <absl/strings/escaping.h>
#include <netinet/in.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http.hpp>
#include <cctype>
#include <cerrno>

namespace denoised {
namespace {

namespace http = boost::beast::http;

struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};

BIO* ReadOnly(const std::string& text) {
  return BIO_new_mem_buf(text.data(), static_cast<int>(text.size()));
}

std::unique_ptr<SSL_CTX, FreeSsl> Context(const HttpTls& tls) {
  std::unique_ptr<SSL_CTX, FreeSsl> context(SSL_CTX_new(TLS_client_method()));
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  BIO* bio = ReadOnly(tls.authority);
  X509* authority = PEM_read_bio_X509(bio, nullptr, nullptr, nullptr);
  X509_STORE_add_cert(SSL_CTX_get_cert_store(context.get()), authority);
  X509_free(authority);
  BIO_free(bio);
  if (tls.certificate.empty()) return context;
  bio = ReadOnly(tls.certificate);
  X509* certificate = PEM_read_bio_X509(bio, nullptr, nullptr, nullptr);
  SSL_CTX_use_certificate(context.get(), certificate);
  X509_free(certificate);
  BIO_free(bio);
  bio = ReadOnly(tls.key);
  EVP_PKEY* key = PEM_read_bio_PrivateKey(bio, nullptr, nullptr, nullptr);
  SSL_CTX_use_PrivateKey(context.get(), key);
  EVP_PKEY_free(key);
  BIO_free(bio);
  return context;
}

}  // namespace

struct HttpClient::State {
  int fd = -1;
  bool connected = false;
  std::unique_ptr<SSL_CTX, FreeSsl> context;
  std::unique_ptr<SSL, FreeSsl> ssl;
  std::string buffer;  // read and not used
  std::optional<http::response_parser<http::string_body>> parser;
  std::string events;  // of the stream, read and not used

  ~State() {
    ssl.reset();
    if (fd >= 0) close(fd);
  }

  /// False at the end.
  bool ReadMore() {
    char bytes[65536];
    ssize_t size;
    do {  // a process that was stopped reads again: recv with a limit is not restarted
      errno = 0;
      size = ssl ? SSL_read(ssl.get(), bytes, sizeof(bytes)) : recv(fd, bytes, sizeof(bytes), 0);
    } while (size < 0 && errno == EINTR);
    if (size <= 0) return false;
    buffer.append(bytes, static_cast<size_t>(size));
    return true;
  }

  /// Parses what is there.
  void Parse() {
    boost::system::error_code error;
    while (!buffer.empty() && !parser->is_done()) {
      const size_t used = parser->put(boost::asio::buffer(buffer), error);
      buffer.erase(0, used);
      if (error || used == 0) break;
    }
  }

  HttpAnswer Answer() {
    HttpAnswer answer;
    if (!parser->is_header_done()) return answer;
    answer.code = static_cast<int>(parser->get().result_int());
    for (const auto& field : parser->get()) {
      std::string name(field.name_string());
      std::transform(name.begin(), name.end(), name.begin(),
                     [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      answer.headers.emplace(name, std::string(field.value()));
    }
    answer.body = parser->get().body();
    return answer;
  }

  void Begin(bool head_alone = false) {
    parser.emplace();
    parser->eager(true);
    parser->skip(head_alone);
    parser->body_limit(uint64_t{1} << 32);
    Parse();
  }
};

HttpClient::HttpClient(int port, std::optional<HttpTls> tls, int receive_buffer)
    : state_(std::make_unique<State>()) {
  state_->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval patience{.tv_sec = 60};
  setsockopt(state_->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  if (receive_buffer > 0) {
    setsockopt(state_->fd, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  state_->connected =
      connect(state_->fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  if (!tls || !state_->connected) return;
  state_->context = Context(*tls);
  state_->ssl.reset(SSL_new(state_->context.get()));
  SSL_set_fd(state_->ssl.get(), state_->fd);
  state_->connected = SSL_connect(state_->ssl.get()) == 1;
}

HttpClient::~HttpClient() = default;
HttpClient::HttpClient(HttpClient&&) noexcept = default;
HttpClient& HttpClient::operator=(HttpClient&&) noexcept = default;

bool HttpClient::connected() const { return state_->connected; }
void HttpClient::Close() { state_ = std::make_unique<State>(); }

bool HttpClient::Send(const std::string& bytes) {
  if (state_->ssl) {
    return SSL_write(state_->ssl.get(), bytes.data(), static_cast<int>(bytes.size())) > 0;
  }
  return send(state_->fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

std::string HttpClient::Request(const std::string& method, const std::string& target,
                                const std::string& body, const HttpHeaders& headers) {
  std::string text = method + " " + target + " HTTP/1.1\r\n";
  bool host = false, type = false;
  for (const auto& [name, value] : headers) {
    text += name + ": " + value + "\r\n";
    host = host || name == "Host";
    type = type || name == "Content-Type";
  }
  if (!host) text += "Host: localhost\r\n";
  if (!body.empty()) {
    if (!type) text += "Content-Type: application/json\r\n";
    text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
  }
  return text + "\r\n" + body;
}

HttpAnswer HttpClient::Read(bool head_alone) {
  state_->Begin(head_alone);
  while (!state_->parser->is_done() && state_->ReadMore()) state_->Parse();
  return state_->Answer();
}

HttpAnswer HttpClient::ReadHead() {
  state_->Begin();
  while (!state_->parser->is_header_done() && state_->ReadMore()) state_->Parse();
  HttpAnswer answer = state_->Answer();
  if (answer.Header("content-type") == "text/event-stream") return answer;
  while (!state_->parser->is_done() && state_->ReadMore()) state_->Parse();
  return state_->Answer();
}

std::optional<HttpEvent> HttpClient::ReadEvent() {
  while (true) {
    std::string& body = state_->parser->get().body();
    state_->events += std::exchange(body, {});
    const size_t end = state_->events.find("\n\n");
    if (end == std::string::npos) {
      if (state_->parser->is_done() || !state_->ReadMore()) return std::nullopt;
      state_->Parse();
      continue;
    }
    const std::string text = state_->events.substr(0, end + 1);
    state_->events.erase(0, end + 2);
    HttpEvent event;
    for (size_t begin = 0; begin < text.size();) {
      const size_t line_end = text.find('\n', begin);
      const std::string line = text.substr(begin, line_end - begin);
      begin = line_end + 1;
      const size_t colon = line.find(": ");
      if (colon == std::string::npos) continue;
      const std::string field = line.substr(0, colon), value = line.substr(colon + 2);
      if (field == "id") event.id = value;
      if (field == "event") event.name = value;
      if (field == "data") event.data = value;
    }
    if (!event.name.empty()) return event;
  }
}

bool HttpClient::ended() const { return state_->parser && state_->parser->is_done(); }

bool HttpClient::IsClosedWithin(std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd polled{state_->fd, POLLIN, 0};
    const int ready = poll(&polled, 1, static_cast<int>(left.count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    if (!state_->ReadMore()) return true;
  }
}

HttpAnswer Ask(int port, const std::string& method, const std::string& target,
               const std::string& body, const HttpHeaders& headers) {
  return HttpClient(port).Ask(method, target, body, headers);
}

std::string Decode64(const std::string& text) {
  std::string bytes;
  return absl::Base64Unescape(absl::string_view(text.data(), text.size()), &bytes) ? bytes : "";
}
std::string Encode64(const std::string& bytes) {
  std::string text;
  absl::Base64Escape(absl::string_view(bytes.data(), bytes.size()), &text);
  return text;
}

}  // namespace denoised
