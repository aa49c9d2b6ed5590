// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <csignal>
#include <optional>
#include <stop_token>
#include <thread>

namespace denoised::command {

/// Turns Ctrl-C, SIGTERM and SIGHUP into a stop request while it exists. The next Ctrl-C or SIGTERM
/// ends the process; so does SIGHUP if the process is still there half a minute later. What ends or
/// stops the process shows the cursor that a view hides. Create it before any other thread: they
/// inherit its mask, so that the signal comes here. Destroy it on the same thread.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  std::stop_token token() const { return source_.get_token(); }

 private:
  void Handle(int signal);
  void Raise(int signal);

  sigset_t signals_, mask_before_;
  std::optional<std::chrono::steady_clock::time_point> hung_up_;  // used by the waiter alone
  std::stop_source source_;
  std::jthread waiter_;  // last: it uses the others
};

}  // namespace denoised::command
