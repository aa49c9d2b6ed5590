// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_port.h"

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http.hpp>
#include <ctime>
#include <deque>
#include <set>
#include <sstream>
#include <thread>
#include <type_traits>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "server/http/tls_context.h"
#include "server/security/acceptor.h"
#include "server/status/quote.h"
#include "server/telemetry/metrics.h"

namespace denoised {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr size_t kHeadRead = 4096, kPieceBytes = HttpPort::kPieceBytes;
/// A body up to this size counts as part of its connection and not as an upload.
constexpr int64_t kSmallBody = 16 << 10;
/// What a client may send ahead of a reply, before it is no longer read.
constexpr size_t kMaxAhead = 16 << 10;
/// After a reply to a request that was not read: so long and so much is thrown away, since closing
/// at once could take the reply from the client too.
constexpr std::chrono::seconds kLinger{2};
constexpr size_t kMaxLingerBytes = 4 << 20;

/// An address of IPv4 as such, also where a socket of IPv6 has it.
asio::ip::address AddressOf(const tcp::endpoint& endpoint) {
  asio::ip::address address = endpoint.address();
  if (address.is_v4() || !address.to_v6().is_v4_mapped()) return address;
  return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
}

/// As gRPC writes it.
std::string Peer(const tcp::endpoint& endpoint) {
  const asio::ip::address address = AddressOf(endpoint);
  return fmt::format(
      "{}:{}",
      address.is_v4() ? "ipv4:" + address.to_string() : "ipv6:%5B" + address.to_string() + "%5D",
      endpoint.port());
}

/// As a Host header names it.
std::string Authority(const tcp::endpoint& endpoint) {
  const asio::ip::address address = AddressOf(endpoint);
  return fmt::format("{}:{}",
                     address.is_v4() ? address.to_string() : "[" + address.to_string() + "]",
                     endpoint.port());
}

/// "Sun, 06 Nov 1994 08:49:37 GMT" (RFC 9110, section 5.6.7).
std::string Now() {
  const std::time_t now = std::time(nullptr);
  std::tm time{};
  gmtime_r(&now, &time);
  std::array<char, 32> text{};
  return {text.data(), std::strftime(text.data(), text.size(), "%a, %d %b %Y %H:%M:%S GMT", &time)};
}

/// A body that grows with what arrives. Beast's string_body takes what Content-Length announces at
/// once.
struct GrowingBody : http::string_body {
  struct reader : http::string_body::reader {
    using http::string_body::reader::reader;
    void init(const boost::optional<uint64_t>&, error_code& error) { error = {}; }
  };
};

class Connection;

/// What connections share.
struct Shared {
  HttpPortOptions options;
  HttpHandler* handler;
  MemoryBudget* bodies;
  Metrics* metrics;
  asio::io_context io{2};
  std::atomic<bool> draining{false};

  Mutex mutex;
  ConditionVariable unused;
  std::set<Connection*> connections ABSL_GUARDED_BY(mutex);
  int exchanges ABSL_GUARDED_BY(mutex) = 0;
  bool stopped ABSL_GUARDED_BY(mutex) = false;
};

/// One connection, plain or with TLS. All of it but the constructor runs on the strand.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  virtual ~Connection() {
    shared_->metrics->HttpConnectionClosed();
    MutexLock lock(&shared_->mutex);
    shared_->connections.erase(this);
  }

  asio::any_io_executor executor() const { return strand_; }
  Shared& shared() const { return *shared_; }
  virtual void Start() = 0;

  void Reply(HttpReply reply, Exchange::Done done);
  void Begin(const HttpReply& head, std::string keep_alive);
  void Write(std::string part, Exchange::Done done);
  void End(Exchange::Done done);
  void Close();
  void CloseIfIdle() {
    if (state_ == State::kHead && !head_begun_) Close();
  }

 protected:
  Connection(Shared* shared, const tcp::socket::executor_type& strand, const tcp::endpoint& peer,
             bool tls)
      : shared_(shared),
        strand_(strand),
        peer_(Peer(peer)),
        tls_(tls),
        read_timer_(strand),
        write_timer_(strand),
        quiet_timer_(strand) {
    shared_->metrics->HttpConnectionOpened();
  }

  using Handler = std::function<void(error_code, size_t)>;
  virtual void ReadSome(asio::mutable_buffer buffer, Handler handler) = 0;
  /// Calls `progress` with what was written so far, before each piece.
  virtual void WriteAll(const std::vector<asio::const_buffer>& buffers,
                        std::function<void(size_t)> progress, Handler handler) = 0;
  virtual tcp::socket& socket() = 0;
  virtual std::vector<std::string> Certificate() = 0;

  void NextRequest();
  void ReadBy(Clock::time_point deadline);
  bool closed() const { return closed_; }

  Shared* const shared_;
  const asio::any_io_executor strand_;

 private:
  enum class State {
    kHead,     // waits for a request and reads its headers
    kBody,     // reads its body
    kServing,  // the handler replies
    kLinger,   // closes
  };
  struct Outgoing {
    std::string head, body;
    std::string_view lasting;           // as HttpReply has it
    std::shared_ptr<const void> owner;  // of `lasting`
    std::string tail;                   // all sent one after the other
    Exchange::Done done;
    bool last;  // of the reply
  };

  void Read();
  void OnRead(error_code error, size_t bytes);
  void Process();
  void ProcessHead();
  void OnHead();
  void ProcessBody();
  bool GrowBody();
  void Serve();
  void Refuse(HttpReply reply);
  void RefuseBody();
  /// Of a reply that is sent now; counts it. `whole`: its body is `reply.content()`.
  std::string HeadOf(const HttpReply& reply, bool whole);
  void Send(Outgoing outgoing);
  void SendNext();
  void OnSent(error_code error);
  void Finish();
  void Linger();
  void Await(asio::steady_timer* timer, Clock::time_point deadline, std::function<void()> late);
  static void Disarm(asio::steady_timer* timer) { timer->expires_at(Clock::time_point::max()); }
  void KeepQuietAlive();

  const std::string peer_;
  const bool tls_;
  asio::steady_timer read_timer_, write_timer_, quiet_timer_;
  /// What was read and not used yet; and where the read that is under way writes to, since the
  /// former changes meanwhile.
  std::string buffer_, incoming_;
  std::optional<http::request_parser<GrowingBody>> parser_;
  State state_ = State::kHead;
  bool head_begun_ = false, reading_ = false, closed_ = false, keep_alive_ = true;
  bool no_body_ = false;  // the request is HEAD
  bool chunked_ = false;
  bool first_ = true;  // no request was served yet
  size_t body_bytes_ = 0, lingered_ = 0;
  size_t timed_bytes_ = 0;  // of the body, when its timer was set
  MemoryBudget::Lease body_memory_;
  int64_t body_reserved_ = 0;
  HttpRequest request_;
  std::string quiet_part_;
  std::deque<Outgoing> outgoing_;  // the first is being sent
  class ConnectionExchange;
  std::shared_ptr<ConnectionExchange> exchange_;
};

class Connection::ConnectionExchange final : public Exchange {
 public:
  ConnectionExchange(std::shared_ptr<Connection> connection, HttpRequest request,
                     MemoryBudget::Lease memory)
      : Exchange(std::move(request)),
        use_(&connection->shared()),
        connection_(std::move(connection)),
        memory_(std::move(memory)),
        deadline_(connection_->executor()) {}

  std::string TakeBody(MemoryBudget::Lease* memory) override {
    *memory = std::move(memory_);
    return std::exchange(request_.body, {});
  }
  void Reply(HttpReply reply, Done done) override {
    Post([reply = std::move(reply), done = std::move(done)](Connection& connection) mutable {
      connection.Reply(std::move(reply), std::move(done));
    });
  }
  void Begin(HttpReply head, std::string keep_alive) override {
    Post([head = std::move(head), text = std::move(keep_alive)](Connection& connection) mutable {
      connection.Begin(head, std::move(text));
    });
  }
  void Write(std::string part, Done done) override {
    Post([part = std::move(part), done = std::move(done)](Connection& connection) mutable {
      connection.Write(std::move(part), std::move(done));
    });
  }
  void End(Done done) override {
    Post([done = std::move(done)](Connection& connection) mutable {
      connection.End(std::move(done));
    });
  }

  void OnStop(std::function<void()> stop) override {
    {
      MutexLock lock(&mutex_);
      if (ended_) return;
      if (!stopped_) {
        stop_ = std::move(stop);
        return;
      }
    }
    stop();
  }
  bool late() const override { return late_; }

  /// On the strand: the client has gone.
  void Stop() {
    std::function<void()> stop;
    {
      MutexLock lock(&mutex_);
      stopped_ = true;
      stop = std::exchange(stop_, nullptr);
    }
    if (stop) stop();
  }
  /// On the strand.
  void WatchDeadline(const std::shared_ptr<ConnectionExchange>& self) {
    if (!request_.deadline) return;
    deadline_.expires_at(*request_.deadline);
    deadline_.async_wait(asio::bind_executor(connection_->executor(),
                                             [weak = std::weak_ptr(self)](error_code error) {
                                               const auto exchange = weak.lock();
                                               if (error || !exchange) return;
                                               exchange->late_ = true;
                                               exchange->Stop();
                                             }));
  }
  /// On the strand: the reply was sent.
  void Ended() {
    deadline_.cancel();
    std::function<void()> stop;  // destroyed without the lock, as it may hold the last of the call
    MutexLock lock(&mutex_);
    ended_ = true;
    stop = std::exchange(stop_, nullptr);
  }

 private:
  void Post(std::function<void(Connection&)> task) {
    asio::post(connection_->executor(),
               [connection = connection_, task = std::move(task)] { task(*connection); });
  }

  /// Keeps the port. The first member, as it is destroyed after the others.
  class Use {
   public:
    explicit Use(Shared* shared) : shared_(shared) {
      MutexLock lock(&shared_->mutex);
      ++shared_->exchanges;
    }
    ~Use() {
      MutexLock lock(&shared_->mutex);
      if (--shared_->exchanges == 0) shared_->unused.NotifyAll();
    }

   private:
    Shared* const shared_;
  };

  const Use use_;
  const std::shared_ptr<Connection> connection_;
  MemoryBudget::Lease memory_;  // of the body
  asio::steady_timer deadline_;
  std::atomic<bool> late_{false};
  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::function<void()> stop_ ABSL_GUARDED_BY(mutex_);
};

void Connection::Await(asio::steady_timer* timer, Clock::time_point deadline,
                       std::function<void()> late) {
  timer->expires_at(deadline);
  timer->async_wait(asio::bind_executor(
      strand_, [self = weak_from_this(), timer, late = std::move(late)](error_code error) {
        const auto connection = self.lock();
        // A handler that was on its way when the timer was set again, or disarmed: not late.
        if (error || !connection || connection->closed_ || timer->expiry() > Clock::now()) return;
        late();
      }));
}

void Connection::ReadBy(Clock::time_point deadline) {
  Await(&read_timer_, deadline, [this] { Close(); });
}

void Connection::NextRequest() {
  parser_.emplace();
  parser_->header_limit(HttpPort::kMaxHeadBytes);
  parser_->body_limit(static_cast<uint64_t>(shared_->options.max_body_bytes));
  parser_->eager(false);
  request_ = {};
  state_ = State::kHead;
  head_begun_ = no_body_ = chunked_ = false;
  keep_alive_ = true;
  body_bytes_ = 0;
  if (buffer_.empty()) buffer_.shrink_to_fit();
  ReadBy(Clock::now() + (first_ ? shared_->options.handshake : shared_->options.idle));
  if (shared_->draining && !first_ && buffer_.empty()) return Close();
  Process();
}

void Connection::Read() {
  if (reading_ || closed_) return;
  reading_ = true;
  const size_t size = state_ == State::kBody || state_ == State::kLinger ? kPieceBytes : kHeadRead;
  incoming_.resize(size);
  ReadSome(asio::buffer(incoming_), [self = shared_from_this()](error_code error, size_t bytes) {
    self->OnRead(error, bytes);
  });
}

void Connection::OnRead(error_code error, size_t bytes) {
  reading_ = false;
  if (closed_) return;
  if (error) return Close();
  buffer_.append(incoming_, 0, bytes);
  Process();
}

void Connection::Process() {
  switch (state_) {
    case State::kHead:
      return ProcessHead();
    case State::kBody:
      return ProcessBody();
    case State::kServing:  // ahead of the reply; reading also tells when the client goes
      // Whoever sends so much ahead could go away unnoticed.
      if (buffer_.size() >= kMaxAhead) return Close();
      return Read();
    case State::kLinger:
      lingered_ += buffer_.size();
      buffer_.clear();
      if (lingered_ > kMaxLingerBytes) return Close();
      return Read();
  }
}

void Connection::ProcessHead() {
  if (buffer_.empty()) return Read();
  if (!std::exchange(head_begun_, true)) ReadBy(Clock::now() + shared_->options.handshake);
  error_code error;
  buffer_.erase(0, parser_->put(asio::buffer(buffer_), error));
  if (error == http::error::need_more) return Read();
  if (error == http::error::header_limit) {
    return Refuse(shared_->handler->Malformed(
        431, "the headers are larger than 16 KiB; send fewer or shorter ones"));
  }
  if (error == http::error::body_limit) {
    return RefuseBody();
  }
  if (error) {
    return Refuse(
        shared_->handler->Malformed(400, "this is no request of HTTP/1.1: " + error.message()));
  }
  if (!parser_->is_header_done()) return Read();
  OnHead();
}

void Connection::OnHead() {
  const auto& head = parser_->get();
  const auto text = [](boost::beast::string_view view) { return std::string(view); };
  request_.method = text(head.method_string());
  const size_t hosts = head.count(http::field::host);
  if (hosts > 1 || (hosts == 0 && head.version() >= 11)) {
    return Refuse(shared_->handler->Malformed(
        400, fmt::format("the request has {} Host headers; send one", hosts)));
  }
  // Else nobody knows where the body ends, and the next request begins (RFC 9112, section 6.3).
  if (head.count(http::field::transfer_encoding) > 0 && !parser_->chunked()) {
    return Refuse(shared_->handler->Malformed(
        400, fmt::format("the Transfer-Encoding is {}; use chunked, or Content-Length",
                         Quote(text(head[http::field::transfer_encoding])))));
  }
  std::string target = text(head.target());
  // As proxies are asked; the Host header counts for nothing then (RFC 9112, section 3.2.2).
  for (const std::string scheme : {"http://", "https://"}) {
    if (!absl::StartsWithIgnoreCase(target, scheme)) continue;
    const size_t path = std::min(target.find_first_of("/?", scheme.size()), target.size());
    request_.headers["host"] = target.substr(scheme.size(), path - scheme.size());
    target = target.substr(path);
    if (target.empty() || target[0] == '?') target.insert(0, "/");
    break;
  }
  if (!target.starts_with('/')) {
    return Refuse(shared_->handler->Malformed(400, "the target is no path; begin it with /"));
  }
  const size_t question = target.find('?');
  request_.path = target.substr(0, question);
  if (question != std::string::npos) request_.query = target.substr(question + 1);
  // HTTP/1.0 need not name a host: it means the one that it reached (RFC 9112, section 3.3).
  if (hosts == 0) {
    error_code error;
    request_.headers.emplace("host", Authority(socket().local_endpoint(error)));
  }
  for (const auto& field : head) {
    request_.headers.emplace(absl::AsciiStrToLower(text(field.name_string())), text(field.value()));
  }
  request_.peer = peer_;
  request_.tls = tls_;
  request_.certificate = Certificate();
  keep_alive_ = parser_->keep_alive() && head.version() >= 11;
  no_body_ = head.method() == http::verb::head;
  chunked_ = head.version() >= 11;
  if (auto refusal = shared_->handler->Admit(&request_)) {
    if (parser_->is_done()) {
      state_ = State::kServing;
      Disarm(&read_timer_);
      return Reply(*std::move(refusal), {});
    }
    return Refuse(*std::move(refusal));
  }
  if (parser_->is_done()) return Serve();
  if (request_.max_body_bytes) {
    // The parser checks a length before the headers are known, and chunks as they come.
    const auto length = parser_->content_length();
    if (length && *length > *request_.max_body_bytes) return RefuseBody();
    parser_->body_limit(*request_.max_body_bytes);
  }
  state_ = State::kBody;
  parser_->eager(true);
  body_reserved_ = 0;
  timed_bytes_ = 0;
  ReadBy(Clock::now() + shared_->options.handshake);
  body_memory_ = {};
  // Of HTTP/1.0 it means nothing (RFC 9110, section 10.1.1).
  if (parser_->get().version() >= 11 && request_.Header("expect") == "100-continue") {
    Send({.head = "HTTP/1.1 100 Continue\r\n\r\n", .last = false});
  }
  Process();
}

/// Makes room for what was read of a body, and counts it first. False if there is no room. It
/// doubles, so a client that announces much and sends little takes little.
bool Connection::GrowBody() {
  std::string& body = parser_->get().body();
  const uint64_t most = parser_->content_length().value_or(shared_->options.max_body_bytes);
  uint64_t room = std::min(most, uint64_t{body.size() + buffer_.size()});
  if (room <= body.capacity()) return true;
  room = std::min(most, std::max(room, uint64_t{2 * body.capacity()}));
  if (const auto bytes = static_cast<int64_t>(room); bytes > kSmallBody) {
    if (!shared_->bodies->Reserve(bytes - body_reserved_, &body_memory_).ok()) return false;
    body_reserved_ = bytes;
  }
  std::string grown;
  grown.reserve(room);  // of an empty string: of another it may take more
  body.swap(grown.append(body));
  return true;
}

void Connection::ProcessBody() {
  if (!GrowBody()) {
    return Refuse(shared_->handler->Malformed(
        503, "other uploads take all the memory for requests; try again (--max-buffered-bytes)"));
  }
  error_code error;
  while (!buffer_.empty() && !parser_->is_done()) {
    const size_t used = parser_->put(asio::buffer(buffer_), error);
    buffer_.erase(0, used);
    body_bytes_ += used;
    if (error == http::error::need_more || used == 0) break;
    if (error) break;
  }
  if (error == http::error::body_limit) {
    return RefuseBody();
  }
  if (error && error != http::error::need_more) {
    return Refuse(shared_->handler->Malformed(400, "the body is broken: " + error.message()));
  }
  // The parser takes all of a body, but keeps a chunk's extensions and trailers waiting for their
  // end.
  if (!parser_->is_done() && buffer_.size() > HttpPort::kMaxHeadBytes + kPieceBytes) {
    return Refuse(shared_->handler->Malformed(
        400, "the body's chunks have more than 16 KiB of extensions or trailers"));
  }
  if (parser_->is_done()) return Serve();
  if (body_bytes_ - timed_bytes_ >= kPieceBytes) {
    timed_bytes_ = body_bytes_;
    ReadBy(Clock::now() + shared_->options.handshake);
  }
  Read();
}

void Connection::Serve() {
  Disarm(&read_timer_);
  state_ = State::kServing;
  request_.body = std::move(parser_->get().body());
  if (!reading_) incoming_ = std::string();  // a body's may be large
  exchange_ = std::make_shared<ConnectionExchange>(shared_from_this(), std::move(request_),
                                                   std::move(body_memory_));
  request_ = {};
  exchange_->WatchDeadline(exchange_);
  const std::shared_ptr<Exchange> exchange = exchange_;
  shared_->handler->Serve(exchange);
  Process();
}

/// Replies to a request that is not read to its end.
void Connection::Refuse(HttpReply reply) {
  keep_alive_ = false;
  state_ = State::kServing;
  ReadBy(Clock::now() + shared_->options.handshake);
  Reply(std::move(reply), {});
}

void Connection::RefuseBody() {
  const auto& bound = request_.max_body_bytes;
  Refuse(shared_->handler->Malformed(
      413, bound ? fmt::format("the body is larger than {} bytes; send less", *bound)
                 : fmt::format("the body is larger than {} bytes; see --max-request-bytes and "
                               "--max-buffered-bytes",
                               shared_->options.max_body_bytes)));
}

std::string Connection::HeadOf(const HttpReply& reply, bool whole) {
  if (!closed_) shared_->metrics->HttpReplied(reply.code);
  http::response_header<> head;
  head.version(11);
  head.result(static_cast<unsigned>(reply.code));
  if (reply.code == 499) head.reason("Client Closed Request");
  head.set(http::field::date, Now());
  for (const auto& [name, value] : reply.headers) head.insert(name, value);
  if (exchange_) {
    for (const auto& [name, value] : exchange_->request().reply_headers) head.insert(name, value);
  }
  for (const auto& [name, value] : request_.reply_headers) head.insert(name, value);
  if (whole) {
    if (reply.code != 204 && reply.code != 304) {
      head.set(http::field::content_length, std::to_string(reply.content().size()));
    }
  } else if (chunked_) {
    head.set(http::field::transfer_encoding, "chunked");
  }
  if (shared_->draining) keep_alive_ = false;
  if (!whole && !chunked_) keep_alive_ = false;
  if (!keep_alive_) head.set(http::field::connection, "close");
  std::ostringstream text;
  text << head;
  return text.str();
}

void Connection::Reply(HttpReply reply, Exchange::Done done) {
  std::string head = HeadOf(reply, true);
  Outgoing outgoing{.head = std::move(head), .done = std::move(done), .last = true};
  if (!no_body_ && reply.lasting.empty()) outgoing.body = std::move(reply.body);
  if (!no_body_ && !reply.lasting.empty()) {
    outgoing.lasting = reply.lasting;
    outgoing.owner = std::move(reply.owner);
  }
  Send(std::move(outgoing));
}

void Connection::Begin(const HttpReply& head, std::string keep_alive) {
  quiet_part_ = std::move(keep_alive);
  Send({.head = HeadOf(head, false), .last = false});
}

void Connection::Write(std::string part, Exchange::Done done) {
  Outgoing outgoing{.body = std::move(part), .done = std::move(done), .last = false};
  if (chunked_) {
    outgoing.head = fmt::format("{:x}\r\n", outgoing.body.size());
    outgoing.tail = "\r\n";
  }
  Send(std::move(outgoing));
}

void Connection::End(Exchange::Done done) {
  Send({.head = chunked_ ? "0\r\n\r\n" : "", .done = std::move(done), .last = true});
}

void Connection::Send(Outgoing outgoing) {
  if (closed_) {
    if (outgoing.done) outgoing.done(false);
    return;
  }
  outgoing_.push_back(std::move(outgoing));
  if (outgoing_.size() == 1) SendNext();
}

void Connection::SendNext() {
  const Outgoing& next = outgoing_.front();
  Disarm(&quiet_timer_);
  std::vector<asio::const_buffer> buffers;
  for (const std::string_view text : {std::string_view(next.head), std::string_view(next.body),
                                      next.lasting, std::string_view(next.tail)}) {
    if (!text.empty()) buffers.push_back(asio::buffer(text));
  }
  WriteAll(
      buffers,
      [this, timed = size_t{0}](size_t sent) mutable {
        if (sent > 0 && sent - timed < kPieceBytes) return;
        timed = sent;
        Await(&write_timer_, Clock::now() + shared_->options.write_timeout, [this] {
          shared_->metrics->ReaderStalled();
          Close();
        });
      },
      [self = shared_from_this()](error_code error, size_t) { self->OnSent(error); });
}

void Connection::OnSent(error_code error) {
  Disarm(&write_timer_);
  const Outgoing sent = std::move(outgoing_.front());
  outgoing_.pop_front();
  if (error && !closed_) Close();
  if (sent.done) sent.done(!error);
  if (closed_) {
    while (!outgoing_.empty()) {
      const Outgoing lost = std::move(outgoing_.front());
      outgoing_.pop_front();
      if (lost.done) lost.done(false);
    }
    return;
  }
  if (sent.last) return Finish();
  if (!outgoing_.empty()) return SendNext();
  KeepQuietAlive();
}

void Connection::KeepQuietAlive() {
  if (quiet_part_.empty()) return;
  Await(&quiet_timer_, Clock::now() + shared_->options.keep_alive, [this] {
    if (outgoing_.empty() && !quiet_part_.empty()) Write(quiet_part_, {});
  });
}

void Connection::Finish() {
  quiet_part_.clear();
  Disarm(&quiet_timer_);
  if (exchange_) exchange_->Ended();
  exchange_.reset();
  first_ = false;
  if (!keep_alive_) return Linger();
  NextRequest();
}

void Connection::Linger() {
  state_ = State::kLinger;
  error_code ignored;
  socket().shutdown(tcp::socket::shutdown_send, ignored);
  ReadBy(Clock::now() + kLinger);
  Process();
}

void Connection::Close() {
  if (std::exchange(closed_, true)) return;
  Disarm(&read_timer_);
  Disarm(&write_timer_);
  Disarm(&quiet_timer_);
  error_code ignored;
  socket().close(ignored);
  if (const auto exchange = std::exchange(exchange_, nullptr)) exchange->Stop();
}

template <typename Stream>
class ConnectionOf final : public Connection {
 public:
  static constexpr bool kTls = !std::is_same_v<Stream, tcp::socket>;

  /// `context` lives as long as the connection.
  template <typename... Arguments>
  ConnectionOf(Shared* shared, tcp::endpoint peer, tcp::socket socket,
               std::shared_ptr<asio::ssl::context> context, Arguments&&... arguments)
      : Connection(shared, socket.get_executor(), peer, kTls),
        context_(std::move(context)),
        stream_(std::move(socket), std::forward<Arguments>(arguments)...) {}

  void Start() override {
    if constexpr (kTls) {
      ReadBy(Clock::now() + shared_->options.handshake);
      stream_.async_handshake(
          asio::ssl::stream_base::server,
          asio::bind_executor(strand_, [self = shared_from_this(), this](error_code error) {
            if (closed()) return;
            if (error) return Close();
            names_ = CertificateNames(stream_.native_handle());
            NextRequest();
          }));
    } else {
      NextRequest();
    }
  }

 private:
  void ReadSome(asio::mutable_buffer buffer, Handler handler) override {
    stream_.async_read_some(buffer, asio::bind_executor(strand_, std::move(handler)));
  }
  void WriteAll(const std::vector<asio::const_buffer>& buffers,
                std::function<void(size_t)> progress, Handler handler) override {
    asio::async_write(
        stream_, buffers,
        [self = shared_from_this(), progress = std::move(progress)](error_code error,
                                                                    size_t sent) mutable -> size_t {
          if (error) return 0;
          progress(sent);
          return kPieceBytes;
        },
        asio::bind_executor(strand_, std::move(handler)));
  }
  tcp::socket& socket() override {
    if constexpr (kTls) {
      return stream_.next_layer();
    } else {
      return stream_;
    }
  }
  std::vector<std::string> Certificate() override { return names_; }

  const std::shared_ptr<asio::ssl::context> context_;
  Stream stream_;
  std::vector<std::string> names_;
};

}  // namespace

struct HttpPort::State {
  Shared shared;
  std::unique_ptr<TlsContext> tls;  // null: plain
  std::unique_ptr<Acceptor> acceptor;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work;
  std::vector<std::thread> threads;

  void Accept(int fd);
};

void HttpPort::State::Accept(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  tcp::endpoint peer;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0 ||
      size > peer.capacity()) {
    close(fd);
    return;
  }
  std::memcpy(peer.data(), &storage, size);
  peer.resize(size);
  const SecurityConfig& security = shared.options.security;
  // Tokens without TLS are for this host alone, as on the port of gRPC.
  if (!security.tls() && !security.clients.empty() && !AddressOf(peer).is_loopback()) {
    close(fd);
    return;
  }
  tcp::socket socket(asio::make_strand(shared.io));
  error_code error;
  socket.assign(storage.ss_family == AF_INET6 ? tcp::v6() : tcp::v4(), fd, error);
  if (error) {
    close(fd);
    return;
  }
  std::shared_ptr<Connection> connection;
  if (tls != nullptr) {
    auto context = tls->Current();
    auto& reference = *context;
    connection = std::make_shared<ConnectionOf<asio::ssl::stream<tcp::socket>>>(
        &shared, peer, std::move(socket), std::move(context), reference);
  } else {
    connection =
        std::make_shared<ConnectionOf<tcp::socket>>(&shared, peer, std::move(socket), nullptr);
  }
  {
    MutexLock lock(&shared.mutex);
    shared.connections.insert(connection.get());
  }
  asio::post(connection->executor(), [connection] { connection->Start(); });
}

HttpPort::HttpPort(std::unique_ptr<State> state) : state_(std::move(state)) {}
HttpPort::~HttpPort() { Stop(); }

absl::StatusOr<std::unique_ptr<HttpPort>> HttpPort::Listen(const HttpPortOptions& options,
                                                           HttpHandler* handler,
                                                           MemoryBudget* bodies, Metrics* metrics) {
  auto state = std::make_unique<State>();
  state->shared.options = options;
  state->shared.handler = handler;
  state->shared.bodies = bodies;
  state->shared.metrics = metrics;
  if (options.security.tls()) {
    DENOISED_ASSIGN_OR_RETURN(state->tls, TlsContext::Open(options.security));
  }
  DENOISED_ASSIGN_OR_RETURN(state->acceptor,
                            Acceptor::Listen(options.flag, options.address, options.max_connections,
                                             metrics, options.reserve));
  return std::unique_ptr<HttpPort>(new HttpPort(std::move(state)));
}

int HttpPort::port() const { return state_->acceptor->port(); }

void HttpPort::Start() {
  state_->work.emplace(state_->shared.io.get_executor());
  for (int i = 0; i < 2; ++i) {
    state_->threads.emplace_back([this] { state_->shared.io.run(); });
  }
  state_->acceptor->Start([this](int, int fd) { state_->Accept(fd); });
}

namespace {

/// Runs `task` on the strand of each connection.
void ForEach(Shared* shared, void (*task)(Connection&)) {
  std::vector<std::shared_ptr<Connection>> connections;
  {
    MutexLock lock(&shared->mutex);
    for (Connection* connection : shared->connections) {
      if (auto held = connection->weak_from_this().lock()) connections.push_back(std::move(held));
    }
  }
  for (auto& connection : connections) {
    asio::post(connection->executor(), [connection, task] { task(*connection); });
  }
}

}  // namespace

void HttpPort::Drain() {
  state_->shared.draining = true;
  ForEach(&state_->shared, [](Connection& connection) { connection.CloseIfIdle(); });
}

bool HttpPort::WaitForReplies(Clock::time_point deadline) {
  MutexLock lock(&state_->shared.mutex);
  while (state_->shared.exchanges > 0 && Clock::now() < deadline) {
    state_->shared.unused.WaitUntil(&state_->shared.mutex, deadline);
  }
  return state_->shared.exchanges == 0;
}

void HttpPort::Stop() {
  {
    MutexLock lock(&state_->shared.mutex);
    if (std::exchange(state_->shared.stopped, true)) return;
  }
  state_->shared.draining = true;
  state_->acceptor->Stop();
  ForEach(&state_->shared, [](Connection& connection) { connection.Close(); });
  {
    // What the handler still does for requests that have lost their clients comes to its end.
    MutexLock lock(&state_->shared.mutex);
    while (state_->shared.exchanges > 0) state_->shared.unused.Wait(&state_->shared.mutex);
  }
  state_->work.reset();
  for (std::thread& thread : state_->threads) thread.join();
}

}  // namespace denoised
