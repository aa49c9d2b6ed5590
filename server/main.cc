// SPDX-License-Identifier: Apache-2.0
// The process: flags, signals, exit codes. Everything else is in server.h.

#include <fmt/format.h>
#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <malloc.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>

#include "absl/synchronization/mutex.h"
#include "server/check.h"
#include "server/config.h"
#include "server/server.h"
#include "server/service_manager.h"
#include "server/telemetry/log.h"

namespace denoised {
namespace {

int ExitCode(const absl::Status& status) {
  if (status.ok()) return 0;
  return IsWrongSetting(status) ? 2 : 1;
}

/// `code`, or 1 if not all that was printed could be written.
int AfterPrinting(int code) {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return code;
  fmt::print(stderr, "denoised: stdout cannot be written, the output is incomplete\n");
  return 1;
}

/// Serves until a signal arrives or the last device is lost. Returns the exit code.
int Serve(const Config& config, std::unique_ptr<Engine> engine, const sigset_t& signals) {
  auto started = Server::Start(config, std::move(engine));
  if (!started.ok()) {
    log::Error(std::string(started.status().message()));
    return ExitCode(started.status());
  }
  Server& server = **started;

  NotifyServiceManager("STATUS=loading models");
  bool ready = false;
  int exit_code = 0;
  while (true) {
    const timespec half_a_second{0, 500'000'000};
    if (sigtimedwait(&signals, nullptr, &half_a_second) > 0) break;
    if (const absl::Status status = server.CheckDevices(); !status.ok()) {
      log::Error("no device is left", {{"error", std::string(status.message())}});
      exit_code = 1;
      break;
    }
    const auto loaded = server.Loaded(std::chrono::milliseconds(0));
    if (loaded && !loaded->ok()) {
      log::Error("no model could be loaded", {{"error", std::string(loaded->message())}});
      exit_code = 1;
      break;
    }
    if (loaded && !ready) {
      ready = true;
      NotifyServiceManager("READY=1\nSTATUS=serving");
    }
  }
  NotifyServiceManager("STOPPING=1\nSTATUS=draining");
  // From here on another signal ends the process at once, but for SIGHUP: a terminal that closes
  // sends it twice, by the shell and by the kernel.
  if (sigismember(&signals, SIGHUP) == 1) std::signal(SIGHUP, SIG_IGN);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  const bool orderly = exit_code == 0;
  log::Info("draining", {{"lame_duck_seconds", config.lame_duck.count() / 1e3},
                         {"grace_seconds", config.grace.count() / 1e3}});
  constexpr std::chrono::milliseconds kNone{0};
  server.Drain(orderly ? config.grace : kNone, orderly ? config.lame_duck : kNone);
  log::Info("stopped");
  if (server.DestructorWaits()) std::_Exit(exit_code);
  return exit_code;
}

void LogOfEngine(Severity severity, const std::string& message) {
  (severity == Severity::kWarning ? log::Warning : log::Info)("engine: " + message, {});
}

/// Forwards gRPC's log to ours. Most of its errors are caused by clients, for example a failed
/// handshake.
void LogOfGrpc(gpr_log_func_args* args) {
  const log::Fields fields = {{"file", args->file}, {"line", args->line}};
  if (args->severity == GPR_LOG_SEVERITY_ERROR) {
    log::Warning(std::string("grpc: ") + args->message, fields);
  } else {
    log::Debug(std::string("grpc: ") + args->message, fields);
  }
}

/// Forwards protobuf's log: about messages of clients that it cannot parse.
void LogOfProtobuf(google::protobuf::LogLevel, const char* file, int line,
                   const std::string& message) {
  log::Debug("protobuf: " + message, {{"file", file}, {"line", line}});
}

/// Lowers the priority of this thread and of those that it starts from now on: gRPC's threads and
/// the workers. The engine's threads exist already and keep theirs, because they wait for each
/// other when one of them loses its core. (On Linux each thread has its own nice value and inherits
/// it.)
void GiveWayToTheEngine() {
  constexpr int kNice = 10;
  setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNice);
}

/// The signals that drain the server.
sigset_t DrainSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  // nohup ignores it, so that the process outlives its terminal. A blocked signal waits even if it
  // is ignored.
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  return signals;
}

int Main(int argc, char** argv) {
  // The distribution's Abseil looks for deadlocks whenever gRPC takes a lock, in a graph of all
  // locks that one spinlock guards.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);

  // Before any thread exists: all threads inherit the mask, and only Serve handles the signals.
  const sigset_t signals = DrainSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

  auto line = ParseCommandLine(argc, argv);
  if (!line.ok()) {
    fmt::print(stderr, "denoised: {}\n", std::string(line.status().message()));
    return 2;
  }
  if (line->print) {
    std::fputs(line->print->c_str(), stdout);  // fmt::print would throw
    return AfterPrinting(0);
  }
  line->config.engine.notify = LogOfEngine;
  const Config& config = line->config;
  log::Configure(config.log_format, config.log_level);
  for (const SkippedFolder& folder : config.skipped_models) {
    log::Warning("folder of --models skipped",
                 {{"directory", folder.directory}, {"reason", folder.reason}});
  }
  gpr_set_log_function(LogOfGrpc);
  google::protobuf::SetLogHandler(LogOfProtobuf);
  if (!config.calibrate.empty()) {
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    const auto path = Calibrate(config.calibrate, config.engine);
    if (path.ok()) {
      std::puts(path->c_str());
      return AfterPrinting(0);
    }
    fmt::print(stderr, "denoised: {}\n", std::string(path.status().message()));
    return ExitCode(path.status());
  }
  auto engine = Engine::Create(config.engine);
  if (config.check) {
    // Nothing to drain: a signal ends the process at once.
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    return AfterPrinting(ExitCode(Check(config, engine, std::cout)));
  }
  if (!engine.ok()) {
    log::Error(std::string(engine.status().message()));
    return ExitCode(engine.status());
  }
  GiveWayToTheEngine();
  return Serve(config, *std::move(engine), signals);
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) {
  // By default malloc has an arena for each thread of gRPC and of the workers. Free memory is then
  // scattered over all of them and resident memory grows by 19 KiB a minute at saturation; with two
  // arenas it stays constant.
  mallopt(M_ARENA_MAX, 2);
  return denoised::Main(argc, argv);
}
