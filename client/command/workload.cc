// SPDX-License-Identifier: Apache-2.0
#include "command/workload.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <sstream>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "command/files.h"
#include "command/generate_request.h"
#include "command/json.h"
#include "command/ready_models.h"

namespace denoised::command {
namespace {

/// SplitMix64 (Steele, Lea, Flood 2014). The standard's distributions differ between libraries.
class Random {
 public:
  Random(uint64_t seed, uint64_t index) : state_(seed) {
    state_ = Bits() + index * 0xd1342543de82ef95u;  // an odd factor: each index has its own state
  }
  uint64_t Bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double Fraction() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }  // [0, 1)
  int In(Range<int> range) {
    const auto values = static_cast<uint64_t>(int64_t{range.high} - range.low + 1);
    return static_cast<int>(range.low + static_cast<int64_t>(Bits() % values));
  }
  double In(Range<double> range) { return range.low + Fraction() * (range.high - range.low); }

 private:
  uint64_t state_;
};

// Of prompts. Five bits a word: eight words in a row are hardly ever drawn twice.
constexpr std::string_view kWords[] = {
    "a",      "the",      "red",    "small",  "old",    "golden", "quiet", "wooden",
    "cat",    "mountain", "river",  "city",   "apple",  "robot",  "bird",  "garden",
    "under",  "beside",   "with",   "in",     "of",     "above",  "light", "shadow",
    "winter", "evening",  "bright", "detail", "sketch", "photo",  "oil",   "colour",
};
static_assert(std::size(kWords) == 32);
constexpr Range<int> kDefaultWords = {8, 20};

template <typename T>
std::optional<T> ParseNumber(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) return std::nullopt;
  }
  return value;
}

/// "4..50", or "4" for 4..4.
template <typename T>
std::optional<Range<T>> ParseRange(std::string_view text) {
  const size_t dots = text.find("..");
  const auto low = ParseNumber<T>(text.substr(0, dots));
  const auto high = dots == std::string_view::npos ? low : ParseNumber<T>(text.substr(dots + 2));
  if (!low || !high || *high < *low) return std::nullopt;
  return Range<T>{*low, *high};
}

template <typename Enum>
std::string Names(const std::vector<Enum>& values) {
  std::vector<std::string_view> names;
  names.reserve(values.size());
  for (const Enum value : values) names.push_back(client::Name(value));
  return fmt::format("{}", fmt::join(names, ", "));
}

/// Sets one key of a kind. The message names the key, its value and the remedy.
absl::Status Set(const std::string& key, const std::string& value, RequestKind* kind) {
  const auto refuse = [&](const std::string& remedy) {
    return absl::InvalidArgumentError(fmt::format("{} is \"{}\"; use {}", key, value, remedy));
  };
  const auto positive = [&](std::optional<Range<int>>* range) {
    *range = ParseRange<int>(value);
    return *range && (*range)->low >= 1 ? absl::OkStatus()
                                        : refuse("a number of 1 or more, or a range such as 4..50");
  };
  if (key == "name" || key == "model") {
    (key == "name" ? kind->name : kind->model) = value;
    return value.empty() ? refuse("a name") : absl::OkStatus();
  }
  if (key == "prompt" || key == "negative") {
    (key == "prompt" ? kind->prompt : kind->negative) = value;
    return absl::OkStatus();
  }
  if (key == "words") return positive(&kind->words);
  if (key == "steps") return positive(&kind->steps);
  if (key == "count") return positive(&kind->count);
  if (key == "weight") {
    const auto weight = ParseNumber<double>(value);
    if (!weight || *weight <= 0) return refuse("a number above 0");
    kind->weight = *weight;
    return absl::OkStatus();
  }
  if (key == "size") {
    const auto size = ParseExtents(
        key, value.find('x') == std::string::npos ? fmt::format("{}x{}", value, value) : value);
    if (!size.ok()) return refuse("pixels, such as 64 or 64x48");
    kind->size = *size;
    return absl::OkStatus();
  }
  if (key == "sampler") {
    kind->sampler = client::SamplerFromName(value);
    return kind->sampler ? absl::OkStatus() : refuse("one of " + Names(client::AllSamplers()));
  }
  if (key == "guidance") {
    kind->guidance = ParseNumber<double>(value);
    return kind->guidance ? absl::OkStatus() : refuse("a number, such as 1.5");
  }
  if (key == "priority") {
    kind->priority = client::PriorityFromName(value);
    return kind->priority ? absl::OkStatus() : refuse("one of " + Names(client::AllPriorities()));
  }
  if (key == "previews") {
    kind->previews = ParseNumber<int>(value);
    return kind->previews && *kind->previews >= 1
               ? absl::OkStatus()
               : refuse("the evaluations from one preview to the next, 1 or more");
  }
  if (key == "deadline") {
    kind->deadline = ParseNumber<double>(value);
    return kind->deadline && *kind->deadline > 0 ? absl::OkStatus() : refuse("seconds, above 0");
  }
  if (key == "cancel") {
    kind->cancel = ParseRange<double>(value);
    return kind->cancel && kind->cancel->low >= 0 ? absl::OkStatus()
                                                  : refuse("seconds, or a range such as 0..1.5");
  }
  return absl::InvalidArgumentError(fmt::format(
      "there is no key \"{}\"; use name, weight, model, prompt, words, negative, steps, "
      "count, size, sampler, guidance, priority, previews, deadline or cancel",
      key));
}

/// One line of a trace.
absl::Status ParseLine(const std::string& line, double* at_seconds, RequestKind* kind) {
  const auto json = ParseJson(line);
  if (!json.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("{}; a line is such as {{\"at_seconds\": 0.5, \"steps\": 10}}",
                    std::string(json.status().message())));
  }
  if (!json->is_object()) {
    return absl::InvalidArgumentError(
        "is no JSON object, such as {\"at_seconds\": 0.5, \"steps\": 10}");
  }
  const auto at = json->find("at_seconds");
  if (at == json->end() || !at->is_number() || at->get<double>() < 0) {
    return absl::InvalidArgumentError("at_seconds is missing or no number of 0 or more");
  }
  *at_seconds = at->get<double>();
  for (const auto& [key, value] : json->items()) {
    if (key == "at_seconds") continue;
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    if (key == "seed") {
      kind->seed = ParseNumber<uint64_t>(text);
      if (!kind->seed) {
        return absl::InvalidArgumentError(
            fmt::format("seed is \"{}\"; use a whole number of 0 or more", text));
      }
      continue;
    }
    if (absl::Status status = Set(key, text, kind); !status.ok()) return status;
  }
  if (kind->name.empty()) {
    kind->name = client::Name(kind->priority.value_or(client::Priority::kNormal));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RequestKind> ParseMix(const std::string& text) {
  RequestKind kind;
  std::set<std::string> keys;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = part.find('=');
    if (equals == std::string::npos) {
      return absl::InvalidArgumentError(fmt::format(
          "--mix: \"{}\" has no '='; use keys and values such as steps=4..50,weight=2", part));
    }
    const std::string key = part.substr(0, equals);
    if (!keys.insert(key).second) {
      return absl::InvalidArgumentError(
          fmt::format("--mix: {} is given twice; give it once, or another --mix", key));
    }
    if (absl::Status status = Set(key, part.substr(equals + 1), &kind); !status.ok()) {
      return absl::InvalidArgumentError(fmt::format("--mix: {}", std::string(status.message())));
    }
  }
  if (kind.name.empty()) kind.name = text;
  return kind;
}

nlohmann::json ToTrace(const Arrival& arrival) {
  const client::Generation& generation = arrival.generation;
  nlohmann::json json = {{"at_seconds", arrival.at_seconds}, {"name", arrival.kind}};
  if (!generation.model.empty()) json["model"] = generation.model;
  if (generation.seed) json["seed"] = std::to_string(*generation.seed);
  if (!generation.prompts.empty()) {
    json["prompt"] = generation.prompts[0].text;
    if (generation.prompts[0].negative) json["negative"] = *generation.prompts[0].negative;
  }
  if (generation.steps) json["steps"] = *generation.steps;
  if (generation.count) json["count"] = *generation.count;
  if (generation.width) {
    json["size"] = fmt::format("{}x{}", *generation.width, *generation.height);
  }
  if (generation.sampler) json["sampler"] = std::string(client::Name(*generation.sampler));
  if (generation.guidance_scale) json["guidance"] = *generation.guidance_scale;
  if (generation.priority) json["priority"] = std::string(client::Name(*generation.priority));
  if (arrival.preview) json["previews"] = *arrival.preview->every_evaluations;
  if (arrival.deadline_seconds) json["deadline"] = *arrival.deadline_seconds;
  if (arrival.cancel_seconds) json["cancel"] = *arrival.cancel_seconds;
  return json;
}

absl::StatusOr<Workload> Workload::FromMix(const std::vector<std::string>& mix, double rate,
                                           uint64_t seed) {
  Workload workload(rate, seed);
  for (const std::string& text : mix) {
    auto kind = ParseMix(text);
    if (!kind.ok()) return kind.status();
    workload.kinds_.push_back(*std::move(kind));
  }
  if (mix.empty()) workload.kinds_.push_back({.name = "all"});
  return workload;
}

absl::StatusOr<Workload> Workload::FromTrace(const std::string& path, double speed, uint64_t seed) {
  const auto file = ReadFile(path);
  if (!file.ok()) return file.status();
  Workload workload(0, seed);
  workload.at_.emplace();
  std::istringstream lines(*file);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    RequestKind kind;
    double at_seconds = 0;
    absl::Status status = ParseLine(line, &at_seconds, &kind);
    at_seconds /= speed;
    if (status.ok() && !workload.at_->empty() && at_seconds < workload.at_->back()) {
      status =
          absl::InvalidArgumentError("at_seconds is less than the line before; sort the lines");
    }
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          fmt::format("--trace {}, line {}: {}", path, number, std::string(status.message())));
    }
    workload.at_->push_back(at_seconds);
    workload.kinds_.push_back(std::move(kind));
  }
  if (workload.kinds_.empty()) {
    return absl::InvalidArgumentError(fmt::format("--trace {}: there is no line in it", path));
  }
  return workload;
}

absl::Status Workload::Learn(const client::Client& client, const client::CallOptions& options) {
  std::set<std::string> names;
  for (const RequestKind& kind : kinds_) names.insert(kind.model);
  for (const std::string& name : names) {
    const auto model = GetReadyModel(client, name, options);
    if (!model.ok()) {
      // It is said of GetModel's own field.
      constexpr std::string_view kField = "name ";
      const std::string message(model.status().message());
      if (!name.empty() && message.starts_with(kField)) {
        return absl::Status(model.status().code(),
                            fmt::format("{} {}", at_ ? "\"model\" in the trace" : "-x model",
                                        message.substr(kField.size())));
      }
      const auto violations = client::Details(model.status()).field_violations;
      if (!name.empty() || violations.empty()) return model.status();
      return absl::InvalidArgumentError(
          fmt::format("the model {}; give it with {}", violations[0].description,
                      at_ ? "\"model\" in the trace" : "-x model=NAME"));
    }
    known_[name] = {model->limits.num_classes, model->capabilities.text};
    if (model->capabilities.text) continue;
    for (const RequestKind& kind : kinds_) {
      if (kind.model != name || !(kind.prompt || kind.words || kind.negative)) continue;
      return absl::InvalidArgumentError(
          fmt::format("{}: the model {} reads no text; leave prompt, words and negative out",
                      at_ ? "--trace" : "--mix", model->name));
    }
  }
  return absl::OkStatus();
}

std::optional<Arrival> Workload::Next() {
  const uint64_t index = next_++;
  if (at_ && index >= at_->size()) return std::nullopt;
  Random random(seed_, index);
  if (at_) {
    now_ = (*at_)[index];
  } else if (rate_ > 0) {
    now_ += -std::log1p(-random.Fraction()) / rate_;
  }

  const RequestKind* kind = &kinds_[at_ ? index : 0];
  if (!at_) {
    double weight = 0;
    for (const RequestKind& each : kinds_) weight += each.weight;
    double at = random.Fraction() * weight;
    while (at >= kind->weight && kind != &kinds_.back()) at -= (kind++)->weight;
  }
  Arrival arrival = {.kind = kind->name, .at_seconds = now_};
  client::Generation& generation = arrival.generation;
  generation.model = kind->model;
  // 53 bits, so that whoever reads the JSON as doubles reads the seed.
  const uint64_t drawn = random.Bits() >> 11;
  generation.seed = kind->seed.value_or(drawn);
  if (kind->steps) generation.steps = random.In(*kind->steps);
  if (kind->count) generation.count = random.In(*kind->count);
  if (kind->size) std::tie(generation.width, generation.height) = *kind->size;
  generation.sampler = kind->sampler;
  generation.guidance_scale = kind->guidance;
  generation.priority = kind->priority;
  generation.format = format_;
  Known known;
  if (const auto found = known_.find(kind->model); found != known_.end()) known = found->second;
  const bool prompted = kind->prompt || kind->words || kind->negative || known.reads_text;
  if (known.classes > 0 && !prompted) {  // a server refuses both
    const auto classes = static_cast<uint64_t>(known.classes);
    for (int i = 0; i < generation.count.value_or(1); ++i) {
      generation.class_labels.push_back(static_cast<int>((*generation.seed + i) % classes));
    }
  }
  if (kind->previews) arrival.preview = {.every_evaluations = kind->previews};
  arrival.deadline_seconds = kind->deadline;
  if (kind->cancel) arrival.cancel_seconds = random.In(*kind->cancel);
  if (prompted) {
    client::Prompt& prompt = generation.prompts.emplace_back();
    prompt.negative = kind->negative;
    if (kind->prompt) {
      prompt.text = *kind->prompt;
    } else {
      const int words = random.In(kind->words.value_or(kDefaultWords));
      for (int i = 0; i < words; ++i) {
        if (i > 0) prompt.text += ' ';
        prompt.text += kWords[random.Bits() % std::size(kWords)];
      }
    }
  }
  return arrival;
}

}  // namespace denoised::command
