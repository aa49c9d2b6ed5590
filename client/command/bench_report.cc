// SPDX-License-Identifier: Apache-2.0
#include "command/bench_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "denoised/error.h"
#include "flags/printable.h"

namespace denoised::command {
namespace {

constexpr size_t kDifferencesShown = 5;

std::string ErrorName(const absl::Status& status) {
  const std::string reason = client::Details(status).reason;
  return absl::StatusCodeToString(status.code()) + (reason.empty() ? "" : " " + reason);
}

Summary Summarise(const std::vector<const Outcome*>& outcomes) {
  Summary summary;
  std::vector<double> latency, queued, first_preview, sent_late;
  for (const Outcome* outcome : outcomes) {
    ++summary.requests;
    sent_late.push_back(outcome->sent_late_seconds);
    if (outcome->first_preview_seconds) first_preview.push_back(*outcome->first_preview_seconds);
    if (outcome->cancelled) {
      ++summary.cancelled;
    } else if (outcome->status.ok()) {
      ++summary.succeeded;
      summary.in_time += IsInTime(*outcome);
      latency.push_back(outcome->latency_seconds);
      if (outcome->queued_seconds) queued.push_back(*outcome->queued_seconds);
    } else {
      ++summary.failed;
      const std::string name = ErrorName(outcome->status);
      ++summary.errors[name];
      summary.messages.emplace(name, outcome->status.message());
    }
  }
  summary.latency = DistributionOf(std::move(latency));
  summary.queued = DistributionOf(std::move(queued));
  summary.first_preview = DistributionOf(std::move(first_preview));
  summary.sent_late = DistributionOf(std::move(sent_late));
  return summary;
}

double PerSecond(int64_t count, const LoadResult& load) {
  return load.window_seconds > 0 ? static_cast<double>(count) / load.window_seconds : 0;
}

std::string Row(const std::string& name, const std::optional<Distribution>& times) {
  if (!times) return "";
  std::string line = fmt::format("{:<15}", name);
  for (const double seconds :
       {times->mean, times->p50, times->p90, times->p95, times->p99, times->max}) {
    line += fmt::format("{:>11.1f}", seconds * 1e3);
  }
  return line + "\n";
}

std::string Rows(const std::string& title, const Summary& summary) {
  if (!summary.latency && !summary.first_preview) return "\n";
  return fmt::format("\n{:<15}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}\n", title, "mean", "p50", "p90",
                     "p95", "p99", "max") +
         Row("latency", summary.latency) + Row("queue", summary.queued) +
         Row("first preview", summary.first_preview);
}

std::string Counts(const Summary& summary) {
  std::string text = fmt::format("{} requests: {} succeeded, {} failed", summary.requests,
                                 summary.succeeded, summary.failed);
  if (summary.cancelled > 0) text += fmt::format(", {} cancelled", summary.cancelled);
  return text;
}

nlohmann::json ToJson(const std::optional<Distribution>& times) {
  if (!times) return nullptr;
  return {{"count", times->count}, {"mean", times->mean}, {"p50", times->p50}, {"p90", times->p90},
          {"p95", times->p95},     {"p99", times->p99},   {"max", times->max}};
}

nlohmann::json ToJson(const Summary& summary) {
  nlohmann::json errors = nlohmann::json::array();
  for (const auto& [name, count] : summary.errors) {
    errors.push_back({{"error", name}, {"count", count}, {"message", summary.messages.at(name)}});
  }
  return {{"requests", summary.requests},
          {"succeeded", summary.succeeded},
          {"failed", summary.failed},
          {"cancelled", summary.cancelled},
          {"in_time", summary.in_time},
          {"latency_seconds", ToJson(summary.latency)},
          {"queued_seconds", ToJson(summary.queued)},
          {"first_preview_seconds", ToJson(summary.first_preview)},
          {"sent_late_seconds", ToJson(summary.sent_late)},
          {"errors", errors}};
}

}  // namespace

std::optional<Distribution> DistributionOf(std::vector<double> seconds) {
  if (seconds.empty()) return std::nullopt;
  std::sort(seconds.begin(), seconds.end());
  const auto count = static_cast<double>(seconds.size());
  const auto percentile = [&](double percent) {
    return seconds[static_cast<size_t>(std::max(std::ceil(percent / 100 * count), 1.0)) - 1];
  };
  return Distribution{.count = static_cast<int64_t>(seconds.size()),
                      .mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / count,
                      .p50 = percentile(50),
                      .p90 = percentile(90),
                      .p95 = percentile(95),
                      .p99 = percentile(99),
                      .max = seconds.back()};
}

BenchReport MakeReport(LoadResult load) {
  BenchReport report = {.load = std::move(load)};
  std::vector<const Outcome*> all;
  std::map<std::string, std::vector<const Outcome*>> kinds;
  for (const Outcome& outcome : report.load.outcomes) {
    all.push_back(&outcome);
    kinds[outcome.kind].push_back(&outcome);
  }
  report.all = Summarise(all);
  for (const auto& [name, outcomes] : kinds) report.kinds.emplace(name, Summarise(outcomes));
  return report;
}

std::string Describe(const BenchReport& report) {
  const LoadResult& load = report.load;
  std::string text = fmt::format("{} in {:.1f} s\n", Counts(report.all), load.window_seconds);
  text += Rows("milliseconds", report.all);
  if (report.kinds.size() > 1) {
    for (const auto& [name, summary] : report.kinds) {
      text += "\n" + Printable(name) + "  " + Counts(summary) + Rows("", summary);
    }
  }
  text += fmt::format("\nthroughput     {:.2f} images/s, {:.2f} requests/s\n",
                      PerSecond(load.window_images, load), PerSecond(load.window_requests, load));
  text += fmt::format(
      "goodput        {:.2f} requests/s in time, {:.1f} % of all\n",
      PerSecond(load.window_in_time, load),
      100.0 * static_cast<double>(report.all.in_time) /
          static_cast<double>(std::max<int64_t>(report.all.requests - report.all.cancelled, 1)));
  for (const auto& [name, count] : report.all.errors) {
    text += fmt::format("error          {} x {}: {}\n", count, name,
                        Printable(report.all.messages.at(name)));
  }
  if (report.all.sent_late && report.all.sent_late->p99 > 0.01) {
    text += fmt::format(
        "warning        requests were sent late (p99 {:.0f} ms): this machine is too busy to send "
        "so many\n",
        report.all.sent_late->p99 * 1e3);
  }
  const auto& differences = load.hashes.differences();
  if (report.images_compared) {
    text += fmt::format("images         {} compared with the earlier run, {} differ\n",
                        *report.images_compared, differences.size());
  } else if (!differences.empty()) {
    text += fmt::format("images         {} came twice with different bytes\n", differences.size());
  }
  size_t shown = 0;
  for (const std::string& key : differences) {
    if (shown++ == kDifferencesShown) break;
    text += "  differs: " + Printable(key) + "\n";
  }
  return text;
}

nlohmann::json ToJson(const BenchReport& report) {
  const LoadResult& load = report.load;
  nlohmann::json json = ToJson(report.all);
  json["window_seconds"] = load.window_seconds;
  json["images"] = load.images;
  json["images_per_second"] = PerSecond(load.window_images, load);
  json["requests_per_second"] = PerSecond(load.window_requests, load);
  json["goodput_per_second"] = PerSecond(load.window_in_time, load);
  json["client_cpu_seconds"] = load.cpu_seconds;
  json["kinds"] = nlohmann::json::object();
  for (const auto& [name, summary] : report.kinds) json["kinds"][name] = ToJson(summary);
  if (report.images_compared) json["images_compared"] = *report.images_compared;
  json["image_differences"] = load.hashes.differences();
  json["image_hashes"] = load.hashes.ToJson();
  return json;
}

}  // namespace denoised::command
