// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <stop_token>
#include <thread>

namespace denoised::command {

/// Turns Ctrl-C, SIGTERM and SIGHUP into a stop request while it exists; the next one ends the
/// process. What ends or stops the process shows the cursor that a view hides. Create it before any
/// other thread: they inherit its mask, so that the signal comes here.
/// Destroy it on the same thread.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  std::stop_token token() const { return source_.get_token(); }

 private:
  void Handle(int signal);

  sigset_t signals_, mask_before_;
  std::stop_source source_;
  std::jthread waiter_;  // last: it uses the others
};

}  // namespace denoised::command
