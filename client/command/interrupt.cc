// SPDX-License-Identifier: Apache-2.0
#include "command/interrupt.h"

#include <ctime>

#include "command/live_view.h"

namespace denoised::command {
namespace {

using std::chrono::steady_clock;

// From SIGHUP to the end of a process that goes on, such as one that reads from a pipe: of a
// terminal that has closed, no other signal comes.
constexpr std::chrono::seconds kHangUpPatience(30);

}  // namespace

Interrupt::Interrupt() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  for (const int signal : {SIGHUP, SIGQUIT, SIGTSTP}) {
    // Ignored ones stay so, as SIGHUP under nohup. A blocked signal waits even if it is ignored.
    struct sigaction action = {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&signals_, signal);
  }
  pthread_sigmask(SIG_BLOCK, &signals_, &mask_before_);
  waiter_ = std::jthread([this](const std::stop_token& done) {
    const timespec pause = {.tv_sec = 0, .tv_nsec = 50'000'000};  // how long the end may take
    while (!done.stop_requested()) {
      if (const int signal = sigtimedwait(&signals_, nullptr, &pause); signal > 0) Handle(signal);
      if (hung_up_ && steady_clock::now() - *hung_up_ > kHangUpPatience) Raise(SIGHUP);
    }
  });
}

Interrupt::~Interrupt() {
  waiter_.request_stop();
  waiter_.join();
  // The work is done, so what was to stop it is dropped. What comes later does what it does by
  // default: stdout may be a pipe that nobody reads, and is flushed after this.
  const timespec none = {};
  while (sigtimedwait(&signals_, nullptr, &none) > 0) continue;
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
}

void Interrupt::Handle(int signal) {
  if (signal == SIGHUP && !hung_up_) hung_up_ = steady_clock::now();
  const bool stops = signal == SIGINT || signal == SIGTERM || signal == SIGHUP;
  if (stops && source_.request_stop()) return;
  // A terminal that closes sends it twice, by the shell and by the kernel.
  if (signal == SIGHUP) return;
  Raise(signal);
}

void Interrupt::Raise(int signal) {
  // Files may be read from a pipe without an end and written to a disk that hangs, where nobody
  // looks at the token.
  WithCursorShown([&] {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, signal);
    pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
    raise(signal);                              // does what it does by default
    pthread_sigmask(SIG_BLOCK, &one, nullptr);  // after SIGTSTP and SIGCONT
  });
}

}  // namespace denoised::command
