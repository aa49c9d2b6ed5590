// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <random>

namespace denoised::training {

/// A port of loopback that nobody listens on. The system gives none below 32768 to others that ask
/// for any port, so it is still free when the test binds it (as tests/server/free_port.py).
inline int FreePort() {
  std::random_device random;
  while (true) {
    const int port = std::uniform_int_distribution<int>(20000, 32767)(random);
    const sockaddr_in address{.sin_family = AF_INET,
                              .sin_port = htons(static_cast<uint16_t>(port)),
                              .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const int probe = socket(AF_INET, SOCK_STREAM, 0);
    if (probe < 0) {
      ADD_FAILURE() << "no socket: errno " << errno;
      return 0;
    }
    const bool is_free =
        bind(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    close(probe);
    if (is_free) return port;
  }
}

}  // namespace denoised::training
