// SPDX-License-Identifier: Apache-2.0
#include "engine/training/exchange.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"

namespace denoised::training {
namespace {

class SoleExchange final : public Exchange {
 public:
  int rank() const override { return 0; }
  int ranks() const override { return 1; }
  absl::Status Swap(const Tensor&, const Tensor&, int partner) override {
    return Internal("there is no rank {} to exchange with", partner);
  }
  absl::Status WaitForFirst() override { return absl::OkStatus(); }
};

/// Two threads exchange tensors: each leaves its own and takes the other's.
class LoopbackMeeting {
 public:
  void Swap(int side, const Tensor& mine, const Tensor& theirs) {
    MutexLock lock(&mutex_);
    while (left_[side].defined()) changed_.Wait(&mutex_);
    left_[side] = mine;
    changed_.NotifyAll();
    while (!left_[1 - side].defined()) changed_.Wait(&mutex_);
    std::memcpy(theirs.data(), left_[1 - side].data(), theirs.bytes());
    // `mine` may be overwritten when Swap returns, so wait until the other has read it too.
    ++taken_;
    changed_.NotifyAll();
    const uint64_t both = (taken_ + 1) / 2 * 2;
    while (taken_ < both) changed_.Wait(&mutex_);
    left_[1 - side] = {};
    changed_.NotifyAll();
  }

 private:
  Mutex mutex_;
  ConditionVariable changed_;
  Tensor left_[2] ABSL_GUARDED_BY(mutex_);
  uint64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
};

class LoopbackExchange final : public Exchange {
 public:
  using Meetings = std::vector<std::unique_ptr<LoopbackMeeting>>;  // [low · ranks + high]
  LoopbackExchange(int rank, int ranks, std::shared_ptr<Meetings> meetings)
      : rank_(rank), ranks_(ranks), meetings_(std::move(meetings)) {}
  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  absl::Status Swap(const Tensor& mine, const Tensor& theirs, int partner) override {
    const int low = std::min(rank_, partner), high = std::max(rank_, partner);
    (*meetings_)[low * ranks_ + high]->Swap(rank_ == low ? 0 : 1, mine, theirs);
    return absl::OkStatus();
  }
  absl::Status WaitForFirst() override {
    const Tensor mine = Tensor::HostF32({1}, std::vector<float>(1)),
                 theirs = Tensor::Host({1}, DType::kF32);
    if (rank_ != 0) return Swap(mine, theirs, 0);
    for (int other = 1; other < ranks_; ++other)
      DENOISED_RETURN_IF_ERROR(Swap(mine, theirs, other));
    return absl::OkStatus();
  }

 private:
  const int rank_, ranks_;
  std::shared_ptr<Meetings> meetings_;
};

using Clock = std::chrono::steady_clock;

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// A rank says at once who it is; what connects and says nothing is another program.
constexpr auto kHelloTime = std::chrono::seconds(5);

std::string LastError() { return std::generic_category().message(errno); }

int MillisecondsUntil(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::max<int64_t>(0, left.count()));
}

/// No delays, since ranks wait for each other. A rank whose machine is gone sends nothing, not even
/// an end: without data the connection then fails after 60 + 8 · 30 s.
void SetOptions(const Socket& socket) {
  const auto set = [&](int level, int option, int value) {
    setsockopt(socket.fd(), level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 60);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 30);
  set(IPPROTO_TCP, TCP_KEEPCNT, 8);
}

class TcpExchange final : public Exchange {
 public:
  TcpExchange(int rank, int ranks, double timeout)
      : rank_(rank), ranks_(ranks), timeout_(timeout), peers_(ranks) {}
  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }

  absl::Status Swap(const Tensor& mine, const Tensor& theirs, int partner) override {
    return Transfer(mine.data(), mine.bytes(), theirs.data(), theirs.bytes(), partner,
                    static_cast<int>(timeout_ * 1000));
  }

  absl::Status WaitForFirst() override {
    char byte = 0;
    if (rank_ != 0) return Transfer(nullptr, 0, &byte, 1, 0, /*milliseconds=*/-1);
    for (int other = 1; other < ranks_; ++other)
      DENOISED_RETURN_IF_ERROR(
          Transfer(&byte, 1, nullptr, 0, other, static_cast<int>(timeout_ * 1000)));
    return absl::OkStatus();
  }

  absl::Status CheckRank(int other) override {
    char byte;
    const ssize_t got = recv(peers_[other].fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got == 0) return Unavailable("rank {} has ended", other);
    if (got < 0 && errno != EAGAIN && errno != EINTR)
      return Unavailable("rank {} is lost: {}", other, LastError());
    return absl::OkStatus();
  }

  absl::Status Connect(const std::string& host, const std::string& port);

 private:
  /// The rank that opens a connection, and its own port (in network byte order; 0 for rank 0).
  struct Hello {
    uint32_t magic = 0x64656e31, rank = 0, ranks = 0, port = 0, address = 0;
  };
  /// Waits at most `milliseconds` for a part of the data; -1: without a limit.
  absl::Status Transfer(const void* mine, size_t to_send, void* theirs, size_t to_receive,
                        int partner, int milliseconds) const;
  absl::StatusOr<sockaddr_in> Resolve(const std::string& host, const std::string& port) const;
  bool ConnectInTime(const Socket& socket, const sockaddr_in& address) const;
  absl::Status Send(const Socket& socket, const void* data, size_t size) const;
  absl::Status WaitFor(const Socket& socket, Clock::time_point deadline) const;
  absl::Status Receive(const Socket& socket, void* data, size_t size,
                       Clock::time_point deadline) const;
  absl::StatusOr<Socket> Listen(const sockaddr_in& address, sockaddr_in* bound) const;
  absl::StatusOr<Socket> Dial(const sockaddr_in& address, const std::string& whom) const;
  absl::StatusOr<Socket> Accept(const Socket& listener, Hello* hello, sockaddr_in* from) const;

  const int rank_, ranks_;
  const double timeout_;
  Clock::time_point deadline_;
  std::vector<Socket> peers_;
};

absl::Status TcpExchange::Transfer(const void* mine, size_t to_send, void* theirs,
                                   size_t to_receive, int partner, int milliseconds) const {
  const auto* out = static_cast<const char*>(mine);
  auto* in = static_cast<char*>(theirs);
  const int fd = peers_[partner].fd();
  while (to_send > 0 || to_receive > 0) {
    pollfd poll_for{
        fd, static_cast<short>((to_send > 0 ? POLLOUT : 0) | (to_receive > 0 ? POLLIN : 0)), 0};
    const int ready = poll(&poll_for, 1, milliseconds);
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) return Unavailable("rank {} has sent nothing for {} s", partner, timeout_);
    if (poll_for.revents & POLLOUT) {
      const ssize_t sent = send(fd, out, to_send, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) out += sent, to_send -= static_cast<size_t>(sent);
      if (sent < 0 && errno != EAGAIN && errno != EINTR)
        return Unavailable("rank {} is lost: {}", partner, LastError());
    }
    if (poll_for.revents & (POLLIN | POLLHUP | POLLERR)) {
      const ssize_t got = recv(fd, in, to_receive, MSG_DONTWAIT);
      if (got == 0) return Unavailable("rank {} has ended", partner);
      if (got > 0) in += got, to_receive -= static_cast<size_t>(got);
      if (got < 0 && errno != EAGAIN && errno != EINTR)
        return Unavailable("rank {} is lost: {}", partner, LastError());
    }
  }
  return absl::OkStatus();
}

absl::Status TcpExchange::Send(const Socket& socket, const void* data, size_t size) const {
  const auto* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t sent = send(socket.fd(), at, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return Unavailable("a rank is lost while connecting: {}", LastError());
    at += sent, size -= static_cast<size_t>(sent);
  }
  return absl::OkStatus();
}

absl::Status TcpExchange::WaitFor(const Socket& socket, Clock::time_point deadline) const {
  pollfd poll_for{socket.fd(), POLLIN, 0};
  const int ready = poll(&poll_for, 1, MillisecondsUntil(deadline));
  if (ready > 0) return absl::OkStatus();
  if (ready < 0 && errno == EINTR)
    return Unavailable("a signal came before all {} ranks were there", ranks_);
  // The first rank alone knows which.
  std::vector<int> missing;
  for (int rank = 1; rank_ == 0 && rank < ranks_; ++rank)
    if (!peers_[rank].open()) missing.push_back(rank);
  return Unavailable(
      "not all {} ranks were there within {} s{}; see that each was started and reaches rank 0, or "
      "raise --rank-seconds",
      ranks_, timeout_,
      missing.empty() ? "" : fmt::format(" (missing: {})", fmt::join(missing, ", ")));
}

absl::Status TcpExchange::Receive(const Socket& socket, void* data, size_t size,
                                  Clock::time_point deadline) const {
  auto* at = static_cast<char*>(data);
  while (size > 0) {
    DENOISED_RETURN_IF_ERROR(WaitFor(socket, deadline));
    const ssize_t got = recv(socket.fd(), at, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return Unavailable("a rank is lost while connecting");
    at += got, size -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<Socket> TcpExchange::Listen(const sockaddr_in& address, sockaddr_in* bound) const {
  Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  socklen_t size = sizeof *bound;
  if (bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(socket.fd(), ranks_) != 0 ||
      getsockname(socket.fd(), reinterpret_cast<sockaddr*>(bound), &size) != 0)
    return Unavailable("rank {} cannot listen on port {}: {}", rank_, ntohs(address.sin_port),
                       LastError());
  return socket;
}

/// connect() alone would wait minutes for a machine that does not answer. Else errno says why.
bool TcpExchange::ConnectInTime(const Socket& socket, const sockaddr_in& address) const {
  const int flags = fcntl(socket.fd(), F_GETFL);
  fcntl(socket.fd(), F_SETFL, flags | O_NONBLOCK);
  if (connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (errno != EINPROGRESS) return false;
    pollfd poll_for{socket.fd(), POLLOUT, 0};
    const int ready = poll(&poll_for, 1, MillisecondsUntil(deadline_));
    if (ready < 0) return false;
    int error = ETIMEDOUT;
    socklen_t size = sizeof error;
    if (ready > 0) getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      errno = error;
      return false;
    }
  }
  fcntl(socket.fd(), F_SETFL, flags);
  return true;
}

absl::StatusOr<Socket> TcpExchange::Dial(const sockaddr_in& address,
                                         const std::string& whom) const {
  while (true) {
    Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (ConnectInTime(socket, address) && !ReachesItself(socket.fd())) {
      SetOptions(socket);
      return socket;
    }
    if (Clock::now() >= deadline_)
      return Unavailable("{} does not answer within {} s: {}", whom, timeout_, LastError());
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

absl::StatusOr<Socket> TcpExchange::Accept(const Socket& listener, Hello* hello,
                                           sockaddr_in* from) const {
  while (true) {
    DENOISED_RETURN_IF_ERROR(WaitFor(listener, deadline_));
    socklen_t size = sizeof *from;
    Socket socket(accept4(listener.fd(), reinterpret_cast<sockaddr*>(from), &size, SOCK_CLOEXEC));
    if (!socket.open()) continue;
    SetOptions(socket);
    const Clock::time_point soon = std::min(deadline_, Clock::now() + kHelloTime);
    if (!Receive(socket, hello, sizeof *hello, soon).ok() || hello->magic != Hello().magic)
      continue;  // not a rank of this run
    // Each rank waits for those above it.
    if (hello->ranks != static_cast<uint32_t>(ranks_) ||
        hello->rank <= static_cast<uint32_t>(rank_) ||
        hello->rank >= static_cast<uint32_t>(ranks_) || peers_[hello->rank].open())
      return InvalidArgument(
          "rank {} of {} connected, but this run has {} ranks, each once; check RANK and "
          "WORLD_SIZE",
          hello->rank, hello->ranks, ranks_);
    return socket;
  }
}

absl::StatusOr<sockaddr_in> TcpExchange::Resolve(const std::string& host,
                                                 const std::string& port) const {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  while (true) {
    addrinfo* found = nullptr;
    const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
    if (error == 0) {
      const sockaddr_in address = *reinterpret_cast<sockaddr_in*>(found->ai_addr);
      freeaddrinfo(found);
      return address;
    }
    // In a cluster, a name is known only when its pod has started.
    if (error != EAI_AGAIN && error != EAI_NONAME && error != EAI_NODATA)
      return InvalidArgument("{}:{} is no address: {}", host, port, gai_strerror(error));
    if (Clock::now() >= deadline_)
      return Unavailable("the host of rank 0, {}, is not known within {} s: {}; check MASTER_ADDR",
                         host, timeout_, gai_strerror(error));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

absl::Status TcpExchange::Connect(const std::string& host, const std::string& port) {
  deadline_ = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(timeout_ * 1000));
  DENOISED_ASSIGN_OR_RETURN(const sockaddr_in first, Resolve(host, port));
  sockaddr_in bound{}, from{};
  // MASTER_ADDR may be a name that this machine resolves otherwise than the others do, or a service
  // in front of it. If it is the loopback address, the other ranks come from this machine alone.
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr =
      first.sin_addr.s_addr == htonl(INADDR_LOOPBACK) ? htonl(INADDR_LOOPBACK) : htonl(INADDR_ANY);
  Hello hello{.rank = static_cast<uint32_t>(rank_), .ranks = static_cast<uint32_t>(ranks_)};
  std::vector<Hello> all(ranks_);
  if (rank_ == 0) {
    here.sin_port = first.sin_port;
    DENOISED_ASSIGN_OR_RETURN(const Socket listener, Listen(here, &bound));
    for (int i = 1; i < ranks_; ++i) {
      Hello theirs;
      DENOISED_ASSIGN_OR_RETURN(Socket socket, Accept(listener, &theirs, &from));
      theirs.address = from.sin_addr.s_addr;
      all[theirs.rank] = theirs;
      peers_[theirs.rank] = std::move(socket);
    }
    for (int i = 1; i < ranks_; ++i)
      DENOISED_RETURN_IF_ERROR(Send(peers_[i], all.data(), all.size() * sizeof(Hello)));
    return absl::OkStatus();
  }
  DENOISED_ASSIGN_OR_RETURN(const Socket listener, Listen(here, &bound));
  hello.port = bound.sin_port;
  DENOISED_ASSIGN_OR_RETURN(peers_[0], Dial(first, fmt::format("rank 0 at {}:{}", host, port)));
  DENOISED_RETURN_IF_ERROR(Send(peers_[0], &hello, sizeof hello));
  DENOISED_RETURN_IF_ERROR(Receive(peers_[0], all.data(), all.size() * sizeof(Hello), deadline_));
  for (int other = 1; other < rank_; ++other) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    // A rank beside rank 0 that reached it over the loopback interface is where rank 0 is.
    const bool beside = ntohl(all[other].address) >> 24 == IN_LOOPBACKNET;
    address.sin_addr.s_addr = beside ? first.sin_addr.s_addr : all[other].address;
    address.sin_port = static_cast<in_port_t>(all[other].port);
    DENOISED_ASSIGN_OR_RETURN(peers_[other], Dial(address, fmt::format("rank {}", other)));
    DENOISED_RETURN_IF_ERROR(Send(peers_[other], &hello, sizeof hello));
  }
  for (int other = rank_ + 1; other < ranks_; ++other) {
    Hello theirs;
    DENOISED_ASSIGN_OR_RETURN(Socket socket, Accept(listener, &theirs, &from));
    peers_[theirs.rank] = std::move(socket);
  }
  return absl::OkStatus();
}

}  // namespace

bool ReachesItself(int socket) {
  sockaddr_in own{}, peer{};
  socklen_t own_size = sizeof own, peer_size = sizeof peer;
  return getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
         own.sin_port == peer.sin_port && own.sin_addr.s_addr == peer.sin_addr.s_addr;
}

absl::Status GatherRows(const Tensor& all, Exchange& host) {
  const int rank = host.rank(), ranks = host.ranks();
  DENOISED_CHECK(std::has_single_bit(static_cast<unsigned>(ranks)), "{} ranks", ranks);
  // As gradients are exchanged: after a level, each has the rows of twice as many ranks.
  for (int width = 1; width < ranks; width *= 2) {
    const int partner = rank ^ width, group = ~(width - 1);
    DENOISED_RETURN_IF_ERROR(
        host.Swap(all.Slice(rank & group, width), all.Slice(partner & group, width), partner));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> GatherTexts(const std::string& mine, Exchange& host) {
  const Tensor sizes = Tensor::Host({host.ranks()}, DType::kI64);
  auto* const size = sizes.as<int64_t>();
  size[host.rank()] = static_cast<int64_t>(mine.size());
  DENOISED_RETURN_IF_ERROR(GatherRows(sizes, host));
  const int64_t longest = *std::max_element(size, size + host.ranks());
  const Tensor all = Tensor::Host({host.ranks(), longest}, DType::kU8);
  std::memset(all.data(), 0, all.bytes());
  std::copy_n(mine.data(), mine.size(), all.as<char>() + host.rank() * longest);
  DENOISED_RETURN_IF_ERROR(GatherRows(all, host));
  std::vector<std::string> texts;
  texts.reserve(host.ranks());
  for (int rank = 0; rank < host.ranks(); ++rank)
    texts.emplace_back(all.as<char>() + rank * longest, static_cast<size_t>(size[rank]));
  return texts;
}

std::unique_ptr<Exchange> NewSoleExchange() { return std::make_unique<SoleExchange>(); }

std::vector<std::unique_ptr<Exchange>> NewLoopbackExchanges(int ranks) {
  auto meetings = std::make_shared<LoopbackExchange::Meetings>();
  for (int i = 0; i < ranks * ranks; ++i) meetings->push_back(std::make_unique<LoopbackMeeting>());
  std::vector<std::unique_ptr<Exchange>> exchanges;
  exchanges.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank)
    exchanges.push_back(std::make_unique<LoopbackExchange>(rank, ranks, meetings));
  return exchanges;
}

absl::StatusOr<std::unique_ptr<Exchange>> ConnectExchange(int rank, int ranks,
                                                          const std::string& address,
                                                          double timeout_seconds) {
  if (ranks < 1 || rank < 0 || rank >= ranks)
    return InvalidArgument("rank {} of {}: ranks count from 0", rank, ranks);
  if (ranks == 1) return NewSoleExchange();
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos)
    return InvalidArgument("the address of rank 0 is \"{}\"; use host:port", address);
  auto exchange = std::make_unique<TcpExchange>(rank, ranks, timeout_seconds);
  DENOISED_RETURN_IF_ERROR(exchange->Connect(address.substr(0, colon), address.substr(colon + 1)));
  return exchange;
}

}  // namespace denoised::training
