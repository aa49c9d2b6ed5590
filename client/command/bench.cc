// SPDX-License-Identifier: Apache-2.0
#include "command/bench.h"

#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "command/bench_report.h"
#include "command/call_options.h"
#include "command/completion.h"
#include "command/files.h"
#include "command/generate_request.h"
#include "command/json.h"
#include "command/live_view.h"
#include "command/load_generator.h"
#include "command/progress.h"
#include "command/ready_models.h"
#include "command/workload.h"
#include "flags/flags.h"

namespace denoised::command {
namespace {

constexpr double kDefaultSeconds = 10;

absl::StatusOr<ImageHashes> ReadHashes(const std::string& path) {
  const auto file = ReadFile(path);
  if (!file.ok()) return file.status();
  const auto json = ParseJson(*file);
  if (!json.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("--compare {}: {}", path, std::string(json.status().message())));
  }
  auto hashes = ImageHashes::FromJson(
      json->is_object() ? json->value("image_hashes", nlohmann::json()) : nlohmann::json());
  if (hashes.ok()) return hashes;
  return absl::InvalidArgumentError(
      fmt::format("--compare {}: {}", path, std::string(hashes.status().message())));
}

LoadOptions ToOptions(const BenchFlags& flags, const client::CallOptions& call) {
  LoadOptions options = {.duration_seconds = flags.duration_seconds,
                         .requests = flags.requests,
                         .unary = flags.unary,
                         .metadata = call.metadata,
                         .traceparent = call.traceparent};
  const bool traced = !flags.trace.empty();
  if (!flags.rate && !traced) options.concurrency = flags.concurrency.value_or(1);
  if (!traced && !flags.duration_seconds && !flags.requests) {
    options.duration_seconds = kDefaultSeconds;
  }
  options.warm_up_seconds = flags.warm_up_seconds.value_or(traced ? 0 : 1);
  return options;
}

std::string ProgressLine(const LoadProgress& progress, double images_per_second) {
  return fmt::format("{}  {} sent, {} under way, {} succeeded, {} failed  {:.1f} images/s",
                     HumanDuration(std::chrono::duration<double>(progress.elapsed_seconds)),
                     progress.sent, progress.under_way, progress.succeeded, progress.failed,
                     images_per_second);
}

/// The load's progress in a line of the terminal.
class ProgressView {
 public:
  explicit ProgressView(std::FILE* terminal) : view_(terminal, TerminalColours::kGreys) {}
  ~ProgressView() { view_.Finish(nullptr); }

  void Show(const LoadProgress& progress) {
    constexpr double kSmoothing = 0.1;  // of four looks a second: an average over some seconds
    const double seconds = progress.elapsed_seconds - last_.elapsed_seconds;
    if (seconds > 0) {
      const double now = static_cast<double>(progress.images - last_.images) / seconds;
      images_per_second_ += (last_.images > 0 ? kSmoothing : 1) * (now - images_per_second_);
    }
    last_ = progress;
    view_.Draw(nullptr, ProgressLine(progress, images_per_second_));
  }

 private:
  LiveView view_;
  LoadProgress last_;
  double images_per_second_ = 0;
};

ExitCode ExitCodeOf(const BenchReport& report, const std::stop_token& stop) {
  if (stop.stop_requested()) return kInterrupted;
  if (report.images_compared == 0) {
    std::fputs("error: the earlier run has none of these images; use the same --seed and --mix\n",
               stderr);
    return kError;
  }
  return report.all.succeeded > 0 && report.load.hashes.differences().empty() ? kOk : kError;
}

}  // namespace

void AddBenchFlags(CLI::App& command, BenchFlags& flags) {
  constexpr char kWhen[] = "When requests are sent";
  auto* rate = command
                   .add_option("-r,--rate", flags.rate,
                               "Open loop: send this many requests per second at random times "
                               "(Poisson), whether or not the server keeps up")
                   ->check(flags::Between(1e-3, 1e6))
                   ->group(kWhen);
  auto* trace =
      command
          .add_option("--trace", flags.trace,
                      "Send the requests in this file at its times: JSON Lines, see below")
          ->type_name(kFile)
          ->group(kWhen);
  auto* concurrency =
      command
          .add_option("-c,--concurrency", flags.concurrency,
                      "Closed loop: keep this many requests in flight, to measure the "
                      "highest throughput. Default: 1")
          ->check(flags::Between(1, 1'000'000))
          ->group(kWhen);
  rate->excludes(trace)->excludes(concurrency);
  trace->excludes(concurrency);
  command
      .add_option("--speed", flags.speed, "Replay the trace this many times as fast. Default: 1")
      ->check(flags::Between(1e-3, 1e6))
      ->needs(trace)
      ->group(kWhen);
  command
      .add_option("-d,--duration", flags.duration_seconds,
                  "Measure for this many seconds. Default: 10, or the whole trace")
      ->check(flags::Between(1e-3, 1e7))
      ->group(kWhen);
  command.add_option("-n,--requests", flags.requests, "Measure this many requests")
      ->check(flags::Between(int64_t{1}, int64_t{1} << 40))
      ->group(kWhen);
  command
      .add_option(
          "--warm-up", flags.warm_up_seconds,
          "Send requests for this many seconds before measuring; a closed loop adds its requests "
          "one by one meanwhile. Default: 1, with --trace 0")
      ->check(flags::Between(0.0, 1e6))
      ->group(kWhen);

  constexpr char kWhat[] = "What is requested";
  command
      .add_option(
          "-x,--mix", flags.mix,
          "A kind of request: steps=4..50,weight=2 (keys below). Repeat the option for a mix. "
          "Default: the model's defaults")
      ->excludes(trace)
      ->take_all()
      ->group(kWhat);
  command
      .add_option(
          "-s,--seed", flags.seed,
          "Seed of the send times, the mix and the images: request i of two runs is the same")
      ->capture_default_str()
      ->group(kWhat);
  command.add_option("--format", flags.format, "File format of the images; raw: float32")
      ->check(flags::OneOf({"png", "jpeg", "webp", "raw"}))
      ->capture_default_str()
      ->group(kWhat);
  command
      .add_flag("--unary", flags.unary,
                "Call Generate, with a thread for each request, instead of StreamGenerate")
      ->group(kWhat);
  command
      .add_option("--connections", flags.connections,
                  "Spread the requests over this many connections")
      ->check(flags::Between(1, 10'000))
      ->capture_default_str()
      ->group(kWhat);

  constexpr char kResults[] = "Results";
  command.add_option("--json", flags.json, "Write the results to this file as JSON; - is stdout")
      ->type_name(kFile)
      ->group(kResults);
  command
      .add_option(
          "--compare", flags.compare,
          "Compare the images with those of an earlier run's --json file: equal requests must "
          "give equal bytes")
      ->check(CLI::ExistingFile)
      ->group(kResults);
  command
      .add_option("--save-trace", flags.save_trace,
                  "Write the requests and their times to this file, for --trace")
      ->type_name(kFile)
      ->group(kResults);

  command.footer(R"(Keys of --mix:
  weight     share of the mix; default 1               name      name in the report
  model      needed if the server holds several        steps     a number, or a range: 4..50
  words      a prompt of so many words for each        prompt    one for all, without a comma
             request, or a range; default 8..20        negative  what no image shows, likewise
  count      number of images, or a range              size      pixels: 64 or 64x48
  sampler    a name, as in denoise generate            guidance  guidance scale
  priority   interactive, normal or batch              previews  a preview every N evaluations
  deadline   seconds until the call times out
  cancel     seconds until the client cancels the request, or a range: 0..1.5

A line of --trace is a JSON object with these keys, "at_seconds" (when to send it) and "seed":
  {"at_seconds": 0.25, "seed": 7, "steps": 20, "priority": "interactive"}

Latency is measured from the intended send time, so a stalled server cannot hide its queue. Requests
that failed or were cancelled are counted, but have no latency.

Examples:
  denoise bench                                      one request at a time, for ten seconds
  denoise bench -c 64 -d 30 --warm-up 5              the highest throughput
  denoise bench -r 20 -d 60 -x steps=4..50,previews=4,priority=interactive,deadline=2 \
                            -x steps=50,count=4,priority=batch,weight=0.2
  denoise bench -n 100 --json before.json            then, with a new build of the server:
  denoise bench -n 100 --compare before.json
  denoise bench --trace day.jsonl --speed 10)");
}

ExitCode Bench(const std::vector<client::Client>& clients, const BenchFlags& flags,
               const client::CallOptions& call) {
  std::optional<ImageHashes> earlier;
  if (!flags.compare.empty()) {
    auto hashes = ReadHashes(flags.compare);
    if (!hashes.ok()) return Report(hashes.status(), false);
    earlier = *std::move(hashes);
  }
  for (const std::string& path : {flags.json, flags.save_trace}) {
    if (path.empty()) continue;
    if (absl::Status status = CheckWritable(path); !status.ok()) return Report(status, false);
  }
  auto workload = flags.trace.empty()
                      ? Workload::FromMix(flags.mix, flags.rate.value_or(0), flags.seed)
                      : Workload::FromTrace(flags.trace, flags.speed, flags.seed);
  if (!workload.ok()) return Report(workload.status(), false);
  workload->set_format(FormatOf(flags.format));
  // On every connection, so that none is yet to be made when the load begins.
  for (const client::Client& client : clients) {
    const absl::Status status = workload->Learn(client, WithTimeout(call, kLoadingWait));
    if (!status.ok()) return Report(status, false);
  }

  std::string trace;
  std::function<void(const Arrival&)> on_sent;
  if (!flags.save_trace.empty()) {
    on_sent = [&trace](const Arrival& arrival) { trace += PrintableJson(ToTrace(arrival)) + "\n"; };
  }
  std::optional<ProgressView> view;
  if (IsTerminal(STDERR_FILENO)) view.emplace(stderr);
  // By default malloc gives the memory of an image back when the image is gone, and the next image
  // would wait for new pages.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  BenchReport report = MakeReport(RunLoad(
      clients, *std::move(workload), ToOptions(flags, call), on_sent,
      [&view](const LoadProgress& progress) {
        if (view) view->Show(progress);
      },
      call.stop));
  view.reset();

  if (earlier) report.images_compared = report.load.hashes.CompareWith(*earlier);
  if (flags.json != "-") std::fputs(Describe(report).c_str(), stdout);
  if (!flags.json.empty()) {
    const std::string text = PrintableJson(ToJson(report), 1) + "\n";
    if (absl::Status status = WriteFile(flags.json, text); !status.ok()) {
      return Report(status, false);
    }
  }
  if (!flags.save_trace.empty()) {
    if (absl::Status status = WriteFile(flags.save_trace, trace); !status.ok()) {
      return Report(status, false);
    }
  }
  return ExitCodeOf(report, call.stop);
}

}  // namespace denoised::command
