// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "denoised/client.h"

/// What a load test asks for, and when.

namespace denoised::command {

/// From `low` to `high`, both included.
template <typename T>
struct Range {
  T low, high;
};

/// One kind of request: what is fixed for all of them, and the ranges that each draws from.
struct RequestKind {
  std::string name;  // in the report
  double weight = 1;
  std::string model;
  std::optional<Range<int>> steps, count;
  std::optional<std::string> prompt;  // of all
  std::optional<Range<int>> words;    // of a prompt of each request's own
  std::optional<std::string> negative;
  std::optional<std::pair<int, int>> size;  // pixels: width, height
  std::optional<client::Sampler> sampler;
  std::optional<double> guidance;
  std::optional<client::Priority> priority;
  std::optional<int> previews;          // every so many evaluations; unset: none
  std::optional<double> deadline;       // seconds after the arrival
  std::optional<Range<double>> cancel;  // seconds after the arrival
  std::optional<uint64_t> seed;         // a trace's; unset: drawn
};

/// "steps=4..50,priority=interactive,weight=3" as a kind; `--mix` in a message that names the key.
absl::StatusOr<RequestKind> ParseMix(const std::string& text);

/// One request.
struct Arrival {
  std::string kind;
  double at_seconds = 0;  // after the start; in a closed loop, when a place became free
  client::Generation generation;
  std::optional<client::PreviewOptions> preview;
  std::optional<double> deadline_seconds, cancel_seconds;  // after the arrival
};

/// The arrival as a line of a trace that gives the same arrival again.
nlohmann::json ToTrace(const Arrival& arrival);

/// A sequence of requests. Request i depends on the seed and on i alone, so two runs ask for the
/// same images whatever their speed. Not thread-safe.
class Workload {
 public:
  /// An endless draw from `mix`, as ParseMix reads it; empty: the model's defaults. They arrive at
  /// random, `rate` a second on average (a Poisson process); 0: when a place is free.
  static absl::StatusOr<Workload> FromMix(const std::vector<std::string>& mix, double rate,
                                          uint64_t seed);
  /// JSON objects, one a line, in the order of their at_seconds, which are divided by `speed`; the
  /// other keys are those of a mix, and "seed".
  static absl::StatusOr<Workload> FromTrace(const std::string& path, double speed, uint64_t seed);

  /// Asks the server what the models are. Images of models with labels then get the label that
  /// their seed stands for: a server draws it at random. Requests to models that read text get a
  /// prompt of 8 to 20 words where the mix names none. Errors: the server's,
  /// FAILED_PRECONDITION for a model that is not ready, and INVALID_ARGUMENT for a prompt to one
  /// that reads no text.
  absl::Status Learn(const client::Client& client, const client::CallOptions& options);
  void set_format(client::ImageFormat format) { format_ = format; }

  /// The next one; nullopt at the end of a trace.
  std::optional<Arrival> Next();

 private:
  Workload(double rate, uint64_t seed) : rate_(rate), seed_(seed) {}

  const double rate_;
  const uint64_t seed_;
  std::vector<RequestKind> kinds_;         // of a mix; of a trace, one a line
  std::optional<std::vector<double>> at_;  // of a trace
  struct Known {
    int classes = 0;
    bool reads_text = false;
  };
  std::map<std::string, Known> known_;  // by model
  std::optional<client::ImageFormat> format_;
  uint64_t next_ = 0;
  double now_ = 0;
};

}  // namespace denoised::command
