// SPDX-License-Identifier: Apache-2.0
#include "command/interrupt.h"

#include <ctime>

namespace denoised::command {

Interrupt::Interrupt() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  waiter_ = std::jthread([this](const std::stop_token& done) {
    const timespec pause = {.tv_sec = 0, .tv_nsec = 50'000'000};  // how long the end may take
    while (!done.stop_requested()) {
      if (sigtimedwait(&signals_, nullptr, &pause) > 0) source_.request_stop();
    }
  });
}

}  // namespace denoised::command
