// SPDX-License-Identifier: Apache-2.0
#include "server/security/acceptor.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "server/telemetry/metrics.h"

namespace denoised {
namespace {

/// For models, certificates, the metrics port and whatever else is not a client.
constexpr int kReservedDescriptors = 128;

/// The port of a bound socket.
int PortOf(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

void SetPort(sockaddr* address, int port) {
  const auto number = htons(static_cast<uint16_t>(port));
  if (address->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = number;
  } else {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = number;
  }
}

/// A listening socket, or −1 with errno.
int ListenOn(const addrinfo& info, int port) {
  const int fd = socket(info.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  // A port whose last connections are still in TIME_WAIT can be had; one that another listens on
  // cannot.
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  // Inherited by the connections, as gRPC does it.
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // "[::]" stands for both families.
  if (info.ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  sockaddr_storage address{};
  std::memcpy(&address, info.ai_addr, info.ai_addrlen);
  SetPort(reinterpret_cast<sockaddr*>(&address), port);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), info.ai_addrlen) != 0 ||
      listen(fd, SOMAXCONN) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

}  // namespace

Acceptor::Acceptor(int max_connections, int reserve, Metrics* metrics) : metrics_(metrics) {
  // The soft limit is 1024 on most systems, for programs that use select(); this is none.
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    getrlimit(RLIMIT_NOFILE, &limit);
  }
  const auto allowed = static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, INT32_MAX));
  highest_ = static_cast<int>(std::min<int64_t>(int64_t{max_connections} + kReservedDescriptors,
                                                allowed - kReservedDescriptors) +
                              reserve);
}

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(const std::string& flag,
                                                           const std::string& address,
                                                           int max_connections, Metrics* metrics,
                                                           int reserve) {
  std::string host = address.substr(0, address.rfind(':'));
  const std::string port = address.substr(address.rfind(':') + 1);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return InvalidArgument("{} {}: {}; use an address of this machine", flag, address,
                           gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);

  std::unique_ptr<Acceptor> acceptor(new Acceptor(max_connections, reserve, metrics));
  acceptor->port_ = std::atoi(port.c_str());
  int error = 0;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    const int fd = ListenOn(*info, acceptor->port_);
    if (fd < 0) {
      error = errno;
      // "localhost" is ::1 too, also where there is no IPv6.
      if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) continue;
      break;
    }
    acceptor->listeners_.push_back(fd);
    acceptor->port_ = PortOf(fd);
  }
  if (acceptor->listeners_.empty() || error == EADDRINUSE || error == EACCES) {
    return Unavailable(
        "{} {}: cannot listen there: {}; choose another address, or port 0 for a free port", flag,
        address, std::strerror(error));
  }
  if (pipe2(acceptor->stop_pipe_, O_CLOEXEC) != 0) {
    return ResourceExhausted("{} {}: no pipe: {}", flag, address, std::strerror(errno));
  }
  return acceptor;
}

Acceptor::~Acceptor() {
  Stop();
  for (const int fd : stop_pipe_) {
    if (fd >= 0) close(fd);
  }
}

void Acceptor::Start(Handler handler) {
  handler_ = std::move(handler);
  thread_ = std::thread([this] { Run(); });
}

void Acceptor::Stop() {
  if (thread_.joinable()) {
    close(std::exchange(stop_pipe_[1], -1));
    thread_.join();
  }
  for (const int fd : std::exchange(listeners_, {})) close(fd);
}

void Acceptor::Run() {
  std::vector<pollfd> polled = {{stop_pipe_[0], POLLIN, 0}};
  for (const int fd : listeners_) polled.push_back({fd, POLLIN, 0});
  while (true) {
    if (poll(polled.data(), polled.size(), -1) < 0) continue;  // EINTR
    if (polled[0].revents != 0) return;
    for (size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents != 0) AcceptFrom(polled[i].fd);
    }
  }
}

void Acceptor::AcceptFrom(int listener) {
  while (true) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        // The connection stays in the system's queue until something is free.
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      return;
    }
    if (fd >= highest_) {
      close(fd);
      metrics_->ConnectionRefused();
      continue;
    }
    metrics_->ConnectionAccepted();
    handler_(listener, fd);
  }
}

}  // namespace denoised
