// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/tuner.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace denoised::cuda {
namespace {

/// In a model, long launches reach the device's power limit, which slows them down; a measurement
/// is too short for that. So the more candidates are measured, and the less they must gain, the
/// more likely one is chosen that is slower in a model (docs/kernels-measured.md).
struct Attempts {
  size_t most;     // candidates
  double cost;     // expected, as a multiple of the cheapest candidate's
  double clearly;  // another is chosen if it takes less than this part of the first one's time
  int rounds;      // of which the best counts
};
constexpr Attempts kShort = {10, 2.0, 0.985, 8}, kLong = {4, 1.5, 0.96, 3};
constexpr double kLongMicroseconds = 30;
Attempts AttemptsFor(double microseconds) {
  return microseconds < kLongMicroseconds ? kShort : kLong;
}
/// A candidate is launched repeatedly in a graph, so that only the device's time counts and
/// launches overlap as they do in a model. Successive launches use different operands, so that
/// caches hold no more of them than they would in the model.
constexpr double kGraphMicroseconds = 100;

Candidates Contenders(const Candidates& candidates) {
  const Attempts attempts = AttemptsFor(candidates[0].microseconds);
  Candidates contenders;
  for (const Candidate& candidate : candidates) {
    if (contenders.size() < attempts.most &&
        candidate.microseconds <= attempts.cost * candidates[0].microseconds) {
      contenders.push_back(candidate);
    }
  }
  return contenders;
}

bool HaveTheSameNames(const Candidates& some, const Candidates& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(),
                    [](const Candidate& a, const Candidate& b) { return a.name == b.name; });
}

absl::Status NotKept() { return FailedPrecondition("autotune_cache names no directory"); }

}  // namespace

/// The index of the fastest contender for `what`.
absl::StatusOr<size_t> Tuner::Fastest(const std::string& what, const std::vector<Place>& places) {
  uint64_t seed = 0;
  for (const Place& place : places) {
    for (const Operand& operand : place.operands) {
      DENOISED_RETURN_IF_ERROR(ToStatus(
          LaunchNoise(operand.values, operand.rows, operand.columns, seed++, queue_), "tuning"));
    }
  }
  const cudaStream_t stream = queue_.stream;
  const Candidates& contenders = places[0].contenders;
  const Attempts attempts = AttemptsFor(contenders[0].microseconds);
  struct Runner {
    GraphExec graph;
    Event begin, end;
    float best = INFINITY;  // ms per launch
  };
  const int launches =
      static_cast<int>(std::clamp(kGraphMicroseconds / contenders[0].microseconds, 2.0, 16.0));
  std::vector<Runner> runners(contenders.size());
  for (size_t i = 0; i < runners.size(); ++i) {
    Runner& runner = runners[i];
    cudaError_t error = cudaSuccess;
    DENOISED_ASSIGN_OR_RETURN(const RecordedGraph recorded, RecordGraph(stream, [&] {
                                for (int n = 0; n < launches && error == cudaSuccess; ++n)
                                  error = places[n % places.size()].contenders[i].enqueue();
                              }));
    DENOISED_RETURN_IF_ERROR(
        ToStatus(error, fmt::format("tuning {} by {}", what, contenders[i].name)));
    DENOISED_ASSIGN_OR_RETURN(runner.graph, Instantiate(recorded.get()));
    DENOISED_ASSIGN_OR_RETURN(runner.begin, NewEvent(/*timing=*/true));
    DENOISED_ASSIGN_OR_RETURN(runner.end, NewEvent(/*timing=*/true));
  }
  // In alternation, because the clock changes.
  for (int round = 0; round < attempts.rounds; ++round) {
    for (const Runner& runner : runners) {
      DENOISED_RETURN_IF_ERROR(ToStatus(cudaEventRecord(runner.begin.get(), stream), "tuning"));
      DENOISED_RETURN_IF_ERROR(ToStatus(cudaGraphLaunch(runner.graph.get(), stream), "tuning"));
      DENOISED_RETURN_IF_ERROR(ToStatus(cudaEventRecord(runner.end.get(), stream), "tuning"));
    }
    DENOISED_RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(stream), "tuning"));
    for (Runner& runner : runners) {
      float milliseconds = 0;
      DENOISED_RETURN_IF_ERROR(ToStatus(
          cudaEventElapsedTime(&milliseconds, runner.begin.get(), runner.end.get()), "tuning"));
      runner.best = std::min(runner.best, milliseconds / static_cast<float>(launches));
    }
  }
  const auto fastest =
      std::min_element(runners.begin(), runners.end(),
                       [](const Runner& a, const Runner& b) { return a.best < b.best; });
  const bool clearly = fastest->best < attempts.clearly * runners[0].best;
  return clearly ? static_cast<size_t>(fastest - runners.begin()) : 0;
}

const Candidate& Tuner::Choose(const std::string& what, const Candidates& candidates,
                               std::vector<Operand> operands) {
  if (!read_) ReadFile();
  if (const auto known = known_.find(what); known != known_.end()) {
    for (const Candidate& candidate : candidates) {
      if (candidate.name == known->second) return candidate;
    }
  }
  if (auto contenders = Contenders(candidates); contenders.size() > 1) {
    std::vector<Place>& places = unknown_[what];
    // Fastest() takes a contender of every place by its index.
    DENOISED_CHECK(places.empty() || HaveTheSameNames(places[0].contenders, contenders),
                   "other candidates of {}", what);
    places.push_back({std::move(contenders), std::move(operands)});
  }
  return candidates.front();
}

absl::Status Tuner::Measure() {
  // Operands may be freed before the next call, so nothing is kept even if this one fails.
  const auto unknown = std::exchange(unknown_, {});
  // Evaluations of other models would disturb the measurement.
  DENOISED_RETURN_IF_ERROR(ToStatus(cudaDeviceSynchronize(), "tuning"));
  TunedChoices measured;
  for (const auto& [what, places] : unknown) {
    DENOISED_ASSIGN_OR_RETURN(const size_t fastest, Fastest(what, places));
    measured[what] = places[0].contenders[fastest].name;
  }
  for (const auto& [what, candidate] : measured) known_[what] = candidate;
  if (absl::Status kept = file_ ? file_->Add(measured) : NotKept(); !kept.ok() && !notified_) {
    notified_ = true;
    if (notify_) {
      notify_(Severity::kInfo,
              fmt::format("the fastest kernels are measured again at every start: {}; "
                          "set autotune_cache to a writable directory",
                          std::string(kept.message())));
    }
  }
  return absl::OkStatus();
}

/// Created at the first use, because a backend that only packs weights does not need it.
void Tuner::ReadFile() {
  read_ = true;
  if (!file_) return;
  auto read = file_->Read();
  if (read.ok()) {
    known_ = *std::move(read);
  } else if (notify_) {
    notify_(Severity::kWarning, std::string(read.status().message()));
  }
}

}  // namespace denoised::cuda
