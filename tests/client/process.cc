// SPDX-License-Identifier: Apache-2.0
#include "tests/client/process.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>

namespace denoised {
namespace {

[[noreturn]] void Execute(const std::vector<std::string>& command,
                          const std::vector<std::string>& environment) {
  for (const std::string& variable : environment) putenv(const_cast<char*>(variable.c_str()));
  std::vector<char*> arguments;
  for (const std::string& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  execv(arguments[0], arguments.data());
  _exit(127);
}

/// Appends what is there; false at the end. A terminal whose other side is gone gives EIO.
bool ReadSome(int descriptor, std::string& text) {
  char buffer[4096];
  const ssize_t count = read(descriptor, buffer, sizeof buffer);
  if (count > 0) text.append(buffer, count);
  return count > 0;
}

}  // namespace

Process::Process(const std::vector<std::string>& command,
                 const std::vector<std::string>& environment, bool on_terminal) {
  if (on_terminal) {
    winsize size = {};
    size.ws_col = 80;
    size.ws_row = 24;
    pid_ = forkpty(&out_, nullptr, nullptr, &size);
    if (pid_ == 0) Execute(command, environment);
    return;
  }
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) std::abort();
  pid_ = fork();
  if (pid_ == 0) {
    dup2(out[1], STDOUT_FILENO);
    dup2(err[1], STDERR_FILENO);
    Execute(command, environment);
  }
  close(out[1]);
  close(err[1]);
  out_ = out[0];
  err_ = err[0];
}

Process::~Process() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (const int descriptor : {out_, err_}) {
    if (descriptor >= 0) close(descriptor);
  }
}

void Process::Signal(int signal) { kill(pid_, signal); }

ProcessResult Process::Wait() {
  ProcessResult result;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  pollfd descriptors[] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
  std::string* texts[] = {&result.out, &result.err};
  // poll skips a negative descriptor: one that ended, or is not there.
  while (descriptors[0].fd >= 0 || descriptors[1].fd >= 0) {
    if (std::chrono::steady_clock::now() > deadline) kill(pid_, SIGKILL);
    if (poll(descriptors, 2, 1000) <= 0) continue;
    for (int i = 0; i < 2; ++i) {
      if (descriptors[i].revents != 0 && !ReadSome(descriptors[i].fd, *texts[i])) {
        descriptors[i].fd = -1;
      }
    }
  }
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

ProcessResult RunProcess(const std::vector<std::string>& command,
                         const std::vector<std::string>& environment) {
  return Process(command, environment, false).Wait();
}

ProcessResult RunOnTerminal(const std::vector<std::string>& command,
                            const std::vector<std::string>& environment) {
  return Process(command, environment, true).Wait();
}

}  // namespace denoised
