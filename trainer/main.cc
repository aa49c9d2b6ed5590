// SPDX-License-Identifier: Apache-2.0
// The process of denoise-train: signals and exit codes. Everything else is in run.h.

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <system_error>

#include "flags/printable.h"
#include "trainer/config.h"
#include "trainer/run.h"

namespace {

std::atomic<bool> stop = false;

/// The first signal ends the run after its step; the same again ends the process, but for SIGHUP:
/// a terminal that closes sends it twice, by the shell and by the kernel. Not by SIG_DFL, to which
/// process 1 of a container does not listen.
void OnSignal(int signal) {
  static volatile std::sig_atomic_t seen[NSIG];
  stop = true;
  if (seen[signal] != 0 && signal != SIGHUP) _exit(128 + signal);
  seen[signal] = 1;
}

/// 2 if settings or files need a correction, 1 for anything else, which may succeed if repeated.
int Fail(const absl::Status& status) {
  std::fprintf(stderr, "denoise-train: %s\n",
               denoised::PrintableLines(std::string(status.message())).c_str());
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ||
                 absl::IsUnimplemented(status)
             ? 2
             : 1;
}

}  // namespace

int main(int argc, char** argv) {
  // Before settings are read, which may take long: process 1 of a container would not hear them.
  std::signal(SIGTERM, OnSignal);
  std::signal(SIGINT, OnSignal);
  // nohup ignores it, so that the run outlives its terminal.
  if (std::signal(SIGHUP, OnSignal) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
  std::optional<std::string> print;
  const auto config = denoised::trainer::ParseCommandLine(argc, argv, &print);
  if (print) {
    if (std::fputs(print->c_str(), stdout) >= 0 && std::fflush(stdout) == 0) return 0;
    return Fail(denoised::Internal("stdout cannot be written"));
  }
  if (!config.ok()) return Fail(config.status());
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is then an error of write()
  // Ctrl-C also ends a "tee" that reads what the run says; there is still a checkpoint to write.
  if (!config->dry_run) std::signal(SIGPIPE, SIG_IGN);
  // Libraries and containers throw what Run() does not expect, above all when memory runs out.
  try {
    const absl::Status status = denoised::trainer::Run(*config, stop);
    if (absl::IsCancelled(status)) {
      std::fprintf(stderr, "%s\n", denoised::PrintableLines(std::string(status.message())).c_str());
      return config->stop_exit_code;
    }
    return status.ok() ? 0 : Fail(status);
  } catch (const std::bad_alloc&) {
    return Fail(denoised::ResourceExhausted(
        "the memory of this machine does not suffice; lower --batch or --data-memory"));
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::resource_unavailable_try_again)
      return Fail(denoised::Internal("{}", error.what()));
    return Fail(denoised::ResourceExhausted(
        "no further thread can be started; lower --prefetch-threads or OMP_NUM_THREADS, or raise "
        "the limit of processes (ulimit -u, pids.max) or of memory (ulimit -v)"));
  } catch (const std::exception& error) {
    return Fail(denoised::Internal("{}", error.what()));
  }
}
