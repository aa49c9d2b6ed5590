// SPDX-License-Identifier: Apache-2.0
// The fake service as a program: runs COMMAND with {server} replaced by its address, or without one
// prints the address and serves until its stdin ends. DENOISED_FAKE_EVALUATION_MS slows it down.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/client/fake_service.h"
#include "tests/client/process.h"

int main(int argc, char** argv) {
  denoised::client::FakeServer server;
  if (const char* time = std::getenv("DENOISED_FAKE_EVALUATION_MS")) {
    server.SetEvaluationTime(std::chrono::milliseconds(std::atoi(time)));
  }
  if (argc == 1) {
    std::puts(server.address().c_str());
    std::fflush(stdout);
    while (std::getchar() != EOF) continue;
    return 0;
  }
  std::vector<std::string> command(argv + 1, argv + argc);
  for (std::string& argument : command) {
    if (argument == "{server}") argument = server.address();
  }
  const denoised::ProcessResult result = denoised::RunProcess(command);
  std::fputs(result.out.c_str(), stdout);
  std::fputs(result.err.c_str(), stderr);
  return result.exit_code;
}
