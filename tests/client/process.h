// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace denoised {

/// What a program did.
struct ProcessResult {
  int exit_code = 0;  // as a shell has it: 128 + the signal that ended it
  std::string out, err;
};

/// Runs a program to its end, at most a minute; `environment` as "NAME=value" on top of this one's.
ProcessResult RunProcess(const std::vector<std::string>& command,
                         const std::vector<std::string>& environment = {});

/// Runs it on a pseudo terminal of 80 x 24; both its streams are in `out`.
ProcessResult RunOnTerminal(const std::vector<std::string>& command,
                            const std::vector<std::string>& environment = {});

/// A program that runs on; ended with SIGKILL when this is destroyed first.
class Process {
 public:
  Process(const std::vector<std::string>& command, const std::vector<std::string>& environment,
          bool on_terminal);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void Signal(int signal);
  ProcessResult Wait();

 private:
  int pid_ = -1;
  int out_ = -1, err_ = -1;
};

}  // namespace denoised
