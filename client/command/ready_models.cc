// SPDX-License-Identifier: Apache-2.0
#include "command/ready_models.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "denoised/backoff.h"
#include "denoised/retry.h"

namespace denoised::command {
namespace {

using Models = std::vector<client::Model>;
using std::chrono::steady_clock;

absl::Status CheckReady(const client::Model& model) {
  switch (model.state) {
    case client::ModelState::kLoading:
      return absl::FailedPreconditionError(fmt::format(
          "model {} is still loading; wait for it with denoise health --wait 600, or name another "
          "one that is available",
          model.name));
    case client::ModelState::kFailed:
      return absl::FailedPreconditionError(
          fmt::format("model {} could not be loaded: {}", model.name, model.error));
    case client::ModelState::kUnloading:
      return absl::FailedPreconditionError(
          fmt::format("model {} is being unloaded; name another one", model.name));
    case client::ModelState::kUnknown:  // of a newer server
    case client::ModelState::kAvailable:
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

/// False when a stop was requested before the end.
bool Pause(std::chrono::nanoseconds delay, const std::stop_token& stop) {
  constexpr std::chrono::milliseconds kStopLatency{20};
  const auto end = steady_clock::now() + delay;
  while (!stop.stop_requested() && steady_clock::now() < end) {
    std::this_thread::sleep_for(
        std::min<steady_clock::duration>(end - steady_clock::now(), kStopLatency));
  }
  return !stop.stop_requested();
}

/// What `ask` returns once none of it is loading.
absl::StatusOr<Models> AskUntilLoaded(
    client::CallOptions options,
    const std::function<absl::StatusOr<Models>(const client::CallOptions&)>& ask) {
  const client::RetryPolicy policy = {.max_attempts = client::RetryPolicy().restart_attempts};
  std::optional<std::chrono::system_clock::time_point> deadline;
  if (options.timeout) deadline = client::DeadlineAfter(*options.timeout);
  for (int attempt = 1;; ++attempt) {
    auto models = ask(options);
    if (!models.ok()) return models;
    const auto loading = std::find_if(models->begin(), models->end(), [](const auto& model) {
      return model.state == client::ModelState::kLoading;
    });
    if (loading == models->end()) return models;
    options.timeout = client::Remaining(deadline);
    // A failure that is always retried.
    const auto delay = policy.NextDelay(absl::UnavailableError(""), attempt,
                                        client::RandomFraction(), options.timeout);
    if (!delay) return CheckReady(*loading);
    if (!Pause(*delay, options.stop)) return absl::CancelledError("cancelled by the caller");
    options.timeout = client::Remaining(deadline);
  }
}

}  // namespace

absl::StatusOr<client::Model> GetReadyModel(const client::Client& client, const std::string& name,
                                            const client::CallOptions& options) {
  auto models = AskUntilLoaded(options, [&](const client::CallOptions& call) {
    auto model = client.GetModel(name, call);
    return model.ok() ? absl::StatusOr<Models>(Models{*std::move(model)}) : model.status();
  });
  if (!models.ok()) return models.status();
  if (absl::Status status = CheckReady(models->front()); !status.ok()) return status;
  return std::move(models->front());
}

absl::StatusOr<Models> ListReadyModels(const client::Client& client,
                                       const client::CallOptions& options) {
  auto models = AskUntilLoaded(options, [&](const client::CallOptions& call) {
    auto all = client.ListModels(call);
    if (all.ok()) std::erase_if(*all, [](const client::Model& model) { return !model.current; });
    return all;
  });
  if (!models.ok() || models->empty()) return models;
  const absl::Status first = CheckReady(models->front());
  std::erase_if(*models, [](const client::Model& model) { return !CheckReady(model).ok(); });
  if (models->empty()) return first;
  return models;
}

}  // namespace denoised::command
