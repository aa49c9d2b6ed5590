// SPDX-License-Identifier: Apache-2.0
#include "command/health.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "command/call_options.h"
#include "command/json.h"
#include "command/progress.h"
#include "flags/printable.h"

namespace denoised::command {
namespace {

using std::chrono::steady_clock;

constexpr auto kProbeTimeout = std::chrono::seconds(3);  // of one question
constexpr auto kInterval = std::chrono::milliseconds(200);

/// An answer, or why there is none, in a form to print.
struct Answer {
  ExitCode code;
  std::string status;   // of the health protocol; UNREACHABLE is ours
  std::string comment;  // what is being waited for
};

/// What a server that answers but does not serve is busy with.
std::string ModelsUnderWay(const client::Client& client, const client::CallOptions& options) {
  const auto models = client.ListModels(options);
  if (!models.ok()) return "it is starting, draining or broken";
  std::vector<std::string> states;
  for (const client::Model& model : *models) {
    if (model.state == client::ModelState::kAvailable) continue;
    states.push_back(fmt::format("model {} is {}{}{}", model.name, client::Name(model.state),
                                 model.error.empty() ? "" : ": ", model.error));
  }
  if (states.empty()) return "no model is loading; it may be draining";
  return fmt::format("{}", fmt::join(states, "; "));
}

/// INVALID_ARGUMENT if the question cannot be asked.
absl::StatusOr<Answer> Ask(const client::Client& client, const HealthFlags& flags,
                           const client::CallOptions& options) {
  const auto health = client.CheckHealth(flags.service, options);
  if (health.ok() && *health == client::ServingStatus::kServing) return Answer{kOk, "SERVING", ""};
  if (health.ok()) return Answer{kError, "NOT_SERVING", ModelsUnderWay(client, options)};
  if (absl::IsInvalidArgument(health.status())) return health.status();
  if (absl::IsCancelled(health.status())) return Answer{kInterrupted, "UNKNOWN", "cancelled"};
  if (absl::IsNotFound(health.status())) {
    return Answer{kError, "SERVICE_UNKNOWN",
                  fmt::format("the server has no service \"{}\"; leave --service out for the "
                              "server itself",
                              flags.service)};
  }
  return Answer{kUnavailable, "UNREACHABLE", std::string(health.status().message())};
}

/// The library speaks of its own argument.
absl::Status WithFlag(const absl::Status& status) {
  const std::string message(status.message());
  return message.starts_with("service ") ? absl::Status(status.code(), "--" + message) : status;
}

}  // namespace

client::RetryPolicy HealthRetries(const HealthFlags& flags) {
  if (flags.wait_seconds == 0) return {.max_attempts = 1};
  constexpr int kUnbounded = std::numeric_limits<int>::max();
  return {.max_attempts = kUnbounded,
          .initial_backoff = kInterval,
          .max_backoff = kInterval,
          .budget = kUnbounded};
}

ExitCode Health(const client::Client& client, const HealthFlags& flags,
                const client::CallOptions& call) {
  const auto begin = steady_clock::now();
  const auto waited = [&begin] {
    return std::chrono::duration<double>(steady_clock::now() - begin);
  };
  const auto timeout = [&]() -> std::chrono::nanoseconds {
    if (flags.wait_seconds == 0) return kProbeTimeout;
    const std::chrono::duration<double> left(flags.wait_seconds - waited().count());
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::clamp<std::chrono::duration<double>>(left, kInterval, kProbeTimeout));
  };
  std::string said;
  Answer answer;
  for (;;) {
    auto asked = Ask(client, flags, WithTimeout(call, timeout()));
    if (!asked.ok()) return Report(WithFlag(asked.status()), flags.json);
    answer = *std::move(asked);
    const bool over = waited().count() + 0.2 >= flags.wait_seconds || call.stop.stop_requested();
    if (answer.code == kOk || over) break;
    if (answer.comment != said) {
      std::fputs(
          fmt::format("waiting for the server ({}): {}\n", answer.status, Printable(answer.comment))
              .c_str(),
          stderr);
      said = answer.comment;
    }
    std::this_thread::sleep_for(kInterval);
  }
  if (call.stop.stop_requested()) answer.code = kInterrupted;
  if (flags.json) {
    std::puts(PrintableJson({{"service", flags.service},
                             {"status", answer.status},
                             {"comment", answer.comment},
                             {"waited_seconds", waited().count()}})
                  .c_str());
  } else {
    std::puts(answer.status.c_str());
  }
  if (answer.code != kOk) {
    const std::string after =
        flags.wait_seconds > 0 ? " after " + HumanDuration(waited()) : std::string();
    std::fputs(
        fmt::format("error: {}{}: {}\n", answer.status, after, Printable(answer.comment)).c_str(),
        stderr);
  }
  return answer.code;
}

}  // namespace denoised::command
