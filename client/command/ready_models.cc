// SPDX-License-Identifier: Apache-2.0
#include "command/ready_models.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>
#include <variant>

#include "denoised/backoff.h"

namespace denoised::command {
namespace {

using Models = std::vector<client::Model>;
using std::chrono::steady_clock;

constexpr auto kInterval = std::chrono::seconds(1);

bool IsLoading(const client::Model& model) { return model.state == client::ModelState::kLoading; }

absl::Status CheckReady(const client::Model& model) {
  switch (model.state) {
    case client::ModelState::kLoading:
      return absl::FailedPreconditionError(
          fmt::format("model {} is still loading; try again when denoise models shows it as "
                      "available, or name another one",
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

/// What is ready, or the model that is loading.
using Answer = std::variant<Models, client::Model>;

/// What `ask` finds ready, within kLoadingWait and the timeout.
absl::StatusOr<Models> AskUntilReady(
    client::CallOptions options,
    const std::function<absl::StatusOr<Answer>(const client::CallOptions&)>& ask) {
  constexpr std::chrono::milliseconds kLast{50};  // too short for another question
  std::optional<std::chrono::system_clock::time_point> deadline;
  if (options.timeout) deadline = client::DeadlineAfter(*options.timeout);
  const auto end = client::DeadlineAfter(kLoadingWait);
  std::optional<client::Model> loading;
  for (;;) {
    auto answer = ask(options);
    if (!answer.ok()) {
      return loading && absl::IsDeadlineExceeded(answer.status()) ? CheckReady(*loading)
                                                                  : answer.status();
    }
    if (auto* ready = std::get_if<Models>(&*answer)) return std::move(*ready);
    loading = std::get<client::Model>(*std::move(answer));
    const auto left = *client::Remaining(deadline ? std::min(end, *deadline) : end);
    if (left <= kLast) return CheckReady(*loading);
    // Near the end more often, so that one that becomes ready then is seen.
    if (!Pause(std::min<std::chrono::nanoseconds>(kInterval, left / 2), options.stop)) {
      return absl::CancelledError("cancelled by the caller");
    }
    options.timeout = client::Remaining(deadline);
  }
}

}  // namespace

absl::StatusOr<client::Model> GetReadyModel(const client::Client& client, const std::string& name,
                                            const client::CallOptions& options) {
  auto models =
      AskUntilReady(options, [&](const client::CallOptions& call) -> absl::StatusOr<Answer> {
        auto model = client.GetModel(name, call);
        if (!model.ok()) return model.status();
        if (IsLoading(*model)) return *std::move(model);
        if (absl::Status status = CheckReady(*model); !status.ok()) return status;
        return Models{*std::move(model)};
      });
  if (!models.ok()) return models.status();
  return std::move(models->front());
}

absl::StatusOr<Models> ListReadyModels(const client::Client& client,
                                       const std::function<bool(const client::Model&)>& fits,
                                       const client::CallOptions& options) {
  return AskUntilReady(options, [&](const client::CallOptions& call) -> absl::StatusOr<Answer> {
    auto all = client.ListModels(call);
    if (!all.ok()) return all.status();
    std::erase_if(*all, [](const client::Model& model) { return !model.current; });
    Models ready = *all;
    std::erase_if(ready, [](const client::Model& model) { return !CheckReady(model).ok(); });
    const bool none_ready = ready.empty();
    std::erase_if(ready, std::not_fn(fits));
    if (!ready.empty()) return ready;
    const auto loading = std::find_if(all->begin(), all->end(), IsLoading);
    if (loading != all->end()) return std::move(*loading);
    if (none_ready && !all->empty()) return CheckReady(all->front());
    return ready;
  });
}

}  // namespace denoised::command
