// SPDX-License-Identifier: Apache-2.0
// What the scheduler makes of a trace: latency, throughput and time to first preview with batching
// by step and by request, and the host's work for an evaluation by length of the queue. No GPU: the
// device is simulated, its results computed on the CPU, its time counted and not waited for.
//
//   OMP_NUM_THREADS=1 scheduling-bench [--jobs=4000] [--rows=64] [--ms-fixed=1] [--ms-row=0.05]
//                                      [--seed=1] [--json=FILE]
//
// An evaluation takes ms-fixed + ms-row · rows. Arrivals are Poisson; a request is one image of 4
// to 50 evaluations, of one of 8 clients; a fifth are interactive with previews, a fifth are batch.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/batching/simulation.h"

namespace denoised {
namespace {

struct Options {
  int jobs = 4000, rows = 64, seed = 1;
  double ms_fixed = 1, ms_row = 0.05;
  std::string json;

  double Seconds(int rows_at_work) const { return 1e-3 * (ms_fixed + ms_row * rows_at_work); }
};

struct Arrival {
  double seconds = 0;
  Simulation::Request request;
};

/// A trace that brings so many images a second.
std::vector<Arrival> MakeTrace(const Options& options, double images_per_second) {
  std::mt19937_64 random(options.seed);
  std::exponential_distribution<double> gap(images_per_second);
  std::uniform_int_distribution<int> steps(4, 50), fifth(0, 4), client(0, 7);
  std::vector<Arrival> trace;
  double now = 0;
  for (int i = 0; i < options.jobs; ++i) {
    Arrival arrival{.seconds = now += gap(random)};
    arrival.request.steps = steps(random);
    arrival.request.seed = static_cast<uint64_t>(i);
    const int kind = fifth(random);
    arrival.request.priority = kind == 0   ? Priority::kInteractive
                               : kind == 1 ? Priority::kBatch
                                           : Priority::kNormal;
    arrival.request.previews = kind == 0;
    arrival.request.client = fmt::format("client {}", client(random));
    trace.push_back(std::move(arrival));
  }
  return trace;
}

double Quantile(std::vector<double> values, double quantile) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double last = static_cast<double>(values.size() - 1);
  return values[static_cast<size_t>(std::ceil(quantile * last))];
}

struct Outcome {
  double p50 = 0, p99 = 0, throughput = 0;              // seconds, images a second
  double first_preview_p50 = 0, first_preview_p99 = 0;  // evaluations of all rows
  double queue_p99 = 0;                                 // of the interactive ones, as the last
  double parks = 0;                                     // of an image, on average
};

Outcome Play(const Options& options, const std::vector<Arrival>& trace, Batching batching) {
  Simulation simulation(
      {.max_rows = options.rows,
       .cost = [&](int rows) { return options.Seconds(rows); },
       .limits = {.requests = 1 << 24, .images = 1 << 24, .bytes = size_t{1} << 40},
       .batching = batching});
  const FakeClock::TimePoint start = simulation.clock.now;
  const auto since_start = [&](FakeClock::TimePoint time) {
    return std::chrono::duration<double>(time - start).count();
  };
  std::vector<std::shared_ptr<Heard>> jobs;
  while (jobs.size() < trace.size() || simulation.busy()) {
    while (jobs.size() < trace.size() &&
           trace[jobs.size()].seconds <= since_start(simulation.clock.now))
      jobs.push_back(simulation.Submit(trace[jobs.size()].request));
    if (simulation.busy()) {
      simulation.Step();
    } else if (jobs.size() < trace.size()) {
      simulation.clock.Advance(trace[jobs.size()].seconds - since_start(simulation.clock.now) +
                               1e-9);
    }
  }
  const double evaluation = options.Seconds(options.rows);
  std::vector<double> latencies, previews, queues;
  for (size_t i = 0; i < jobs.size(); ++i) {
    DENOISED_CHECK(jobs[i]->done->ok(), "{}", jobs[i]->done->ToString());
    latencies.push_back(since_start(*jobs[i]->ended) - trace[i].seconds);
    if (!jobs[i]->first_preview) continue;
    previews.push_back((since_start(*jobs[i]->first_preview) - trace[i].seconds) / evaluation);
    queues.push_back(*jobs[i]->started_at - jobs[i]->submitted_at);
  }
  return {.p50 = Quantile(latencies, 0.5),
          .p99 = Quantile(latencies, 0.99),
          .throughput = static_cast<double>(jobs.size()) / since_start(simulation.clock.now),
          .first_preview_p50 = Quantile(previews, 0.5),
          .first_preview_p99 = Quantile(previews, 0.99),
          .queue_p99 = Quantile(queues, 0.99),
          .parks = static_cast<double>(simulation.Totals().parked_images) /
                   static_cast<double>(jobs.size())};
}

/// Images a second when there is always work.
double Capacity(const Options& options, Batching batching) {
  return Play(options, MakeTrace(options, 1e9), batching).throughput;
}

nlohmann::json ToJson(const Outcome& outcome) {
  return {{"p50_seconds", outcome.p50},
          {"p99_seconds", outcome.p99},
          {"images_per_second", outcome.throughput},
          {"first_preview_p50_evaluations", outcome.first_preview_p50},
          {"first_preview_p99_evaluations", outcome.first_preview_p99},
          {"interactive_queue_p99_evaluations", outcome.queue_p99},
          {"parks_per_image", outcome.parks}};
}

nlohmann::json Compare(const Options& options, const char* of_whom, double images_per_second) {
  const std::vector<Arrival> trace = MakeTrace(options, images_per_second);
  const Outcome step = Play(options, trace, Batching::kStep);
  const Outcome request = Play(options, trace, Batching::kRequest);
  fmt::print("\n80 % of what {} batching can do: {:.1f} images/s arrive\n", of_whom,
             images_per_second);
  fmt::print("{:<10}{:>10}{:>10}{:>12}{:>24}{:>14}{:>14}\n", "batching", "p50 ms", "p99 ms",
             "images/s", "first preview p50/p99*", "queue p99*", "parks/image");
  const auto row = [](const char* name, const Outcome& outcome) {
    fmt::print("{:<10}{:>10.1f}{:>10.1f}{:>12.1f}{:>16.2f} / {:>5.2f}{:>14.0f}{:>14.2f}\n", name,
               1e3 * outcome.p50, 1e3 * outcome.p99, outcome.throughput, outcome.first_preview_p50,
               outcome.first_preview_p99, outcome.queue_p99, outcome.parks);
  };
  row("step", step);
  row("request", request);
  fmt::print("step/request: p50 {:.2f}, p99 {:.2f}, throughput {:.2f}\n", step.p50 / request.p50,
             step.p99 / request.p99, step.throughput / request.throughput);
  return {{"capacity_of", of_whom},
          {"arrivals_per_second", images_per_second},
          {"step", ToJson(step)},
          {"request", ToJson(request)}};
}

/// Rows a second when `in_flight` requests of these kinds, in turns, are always under way, and the
/// share of rows that were padding. An evaluation of SDXL at 1024x1024 takes about so long on an
/// H200 (docs/benchmarks.md: 2 and 16 rows); sizes do not mix, and have about equal pixels.
std::pair<double, double> KeepBusy(const std::vector<Simulation::Request>& kinds, int in_flight) {
  Simulation simulation(
      {.max_rows = 16,
       .cost = [](int rows) { return 0.0023 + 0.01136 * rows; },
       .limits = {.requests = 1 << 24, .images = 1 << 24, .bytes = size_t{1} << 40},
       .pads_rows = true,
       .warm_up = true});
  simulation.Add("any size", 0);
  std::vector<std::shared_ptr<Heard>> jobs;
  int sent = 0;
  const FakeClock::TimePoint start = simulation.clock.now;
  while (simulation.evaluations < 2000) {
    std::erase_if(jobs, [](const auto& job) { return job->done.has_value(); });
    for (; static_cast<int>(jobs.size()) < in_flight; ++sent) {
      Simulation::Request request = kinds[sent % kinds.size()];
      request.model = "any size";
      request.seed = static_cast<uint64_t>(sent);
      jobs.push_back(simulation.Submit(request));
    }
    simulation.Step();
  }
  const auto totals = simulation.Totals("any size");
  const double rows = static_cast<double>(totals.rows),
               padding = static_cast<double>(totals.padding_rows);
  return {rows / std::chrono::duration<double>(simulation.clock.now - start).count(),
          padding / (rows + padding)};
}

/// A queue of six sizes, as tests/bench/pipelines.py sends it to SDXL, over a uniform one.
nlohmann::json CompareMixed() {
  const std::vector<Simulation::Request> mixed = {
      {.steps = 20, .guidance = 5, .size = 4, .width = 4},
      {.steps = 30, .guidance = 7, .size = 2, .width = 8},
      {.steps = 26, .guidance = 5, .size = 8, .width = 2},
      {.steps = 25, .guidance = 1, .size = 3, .width = 5},
      {.steps = 10, .guidance = 4, .size = 5, .width = 3},
      {.steps = 20, .guidance = 6, .size = 1, .width = 16}};
  const auto [uniform, uniform_padding] = KeepBusy({mixed[0]}, 16);
  nlohmann::json figures = nlohmann::json::array();
  for (const int in_flight : {32, 64}) {
    const auto [rows, padding] = KeepBusy(mixed, in_flight);
    fmt::print(
        "six sizes, {} in flight: {:.1f} % of a uniform queue's rows a second, {:.1f} % of "
        "rows padding\n",
        in_flight, 100 * rows / uniform, 100 * padding);
    figures.push_back({{"in_flight", in_flight},
                       {"rows_per_second", rows},
                       {"uniform_rows_per_second", uniform},
                       {"padding", padding}});
  }
  return figures;
}

/// Median host time of an evaluation, of which the scheduler's part is what grows, if any does.
nlohmann::json MeasureHost(const Options& options) {
  nlohmann::json figures = nlohmann::json::array();
  fmt::print("\n{:<18}{:>24}\n", "jobs that wait", "host µs an evaluation");
  for (const int waiting : {0, 1000, 10'000, 100'000}) {
    Simulation simulation(
        {.max_rows = options.rows,
         .cost = [&](int rows) { return options.Seconds(rows); },
         .limits = {.requests = 1 << 24, .images = 1 << 24, .bytes = size_t{1} << 40}});
    simulation.Submit({.steps = 1000, .count = options.rows, .priority = Priority::kInteractive});
    for (int i = 0; i < waiting; ++i)
      simulation.Submit({.steps = 900, .priority = Priority::kBatch});
    for (int i = 0; i < 100; ++i) simulation.Step();
    std::vector<double> spent;
    for (int i = 0; i < 500; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      simulation.Step();
      spent.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
              .count());
    }
    fmt::print("{:<18}{:>24.1f}\n", waiting, Quantile(spent, 0.5));
    figures.push_back({{"waiting", waiting}, {"host_us", Quantile(spent, 0.5)}});
  }
  return figures;
}

absl::Status ParseFlags(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const auto number = [&](const char* name, auto* value) {
      const size_t length = std::strlen(name);
      if (std::strncmp(argv[i], name, length) != 0) return false;
      *value = static_cast<std::decay_t<decltype(*value)>>(std::strtod(argv[i] + length, nullptr));
      return true;
    };
    if (number("--jobs=", &options->jobs) || number("--rows=", &options->rows) ||
        number("--ms-fixed=", &options->ms_fixed) || number("--ms-row=", &options->ms_row) ||
        number("--seed=", &options->seed))
      continue;
    constexpr const char* kJson = "--json=";
    if (std::strncmp(argv[i], kJson, std::strlen(kJson)) == 0) {
      options->json = argv[i] + std::strlen(kJson);
      continue;
    }
    return InvalidArgument("unknown flag '{}'; see the head of tests/bench/scheduling_bench.cc",
                           argv[i]);
  }
  if (options->jobs < 1 || options->rows < 2 || options->ms_fixed < 0 || options->ms_row < 0 ||
      options->ms_fixed + options->ms_row <= 0)
    return InvalidArgument("--jobs is at least 1, --rows at least 2, and an evaluation takes time");
  return absl::OkStatus();
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) {
  using denoised::Batching;
  denoised::Options options;
  if (const absl::Status status = denoised::ParseFlags(argc, argv, &options); !status.ok()) {
    fmt::print(stderr, "{}\n", std::string(status.message()));
    return 1;
  }
  fmt::print("{} jobs, {} rows, {} + {} per row ms an evaluation, seed {}\n", options.jobs,
             options.rows, options.ms_fixed, options.ms_row, options.seed);
  const double step = Capacity(options, Batching::kStep);
  const double request = Capacity(options, Batching::kRequest);
  fmt::print("always work to do: by step {:.1f} images/s, by request {:.1f}: {:.2f}\n", step,
             request, step / request);
  nlohmann::json figures = {{"jobs", options.jobs},         {"rows", options.rows},
                            {"ms_fixed", options.ms_fixed}, {"ms_row", options.ms_row},
                            {"seed", options.seed},         {"capacity_step", step},
                            {"capacity_request", request}};
  figures["comparisons"] = {denoised::Compare(options, "step", 0.8 * step),
                            denoised::Compare(options, "request", 0.8 * request)};
  fmt::print("* of interactive requests; time in evaluations of all rows, queue in evaluations\n");
  figures["mixed"] = denoised::CompareMixed();
  figures["host"] = denoised::MeasureHost(options);
  if (options.json.empty()) return 0;
  std::ofstream out(options.json);
  out << figures.dump(1) << '\n';
  if (out.flush()) return 0;
  fmt::print(stderr, "{} cannot be written\n", options.json);
  return 1;
}
