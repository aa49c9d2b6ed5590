// One evaluation of a UNet2DModel, sampler step included, by rows: milliseconds and FLOP/s.
//
//   denoised-bench [--device=cpu|cuda] [--fp32] [--generic] [--autotune=off|DIRECTORY]
//                  --config=DIR/config.json --rows=1,16,64
//                  [Google Benchmark's flags, e.g. --benchmark_out=FILE]
//
// Weights are synthetic: speed does not depend on them. Times are the device's own, between markers
// around each evaluation, and the figure is their median; FLOPs are counted by the dry run that
// plans memory. MiB_device is what the model, its activations, images and graph took of the device;
// s_first the seconds of the first evaluation, with what was measured to choose kernels and the
// capture. Kernels are chosen as by the server; --autotune=DIRECTORY keeps what was measured there.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "engine/batching/evaluator.h"
#include "engine/core/config_reader.h"
#include "engine/models/unet2d.h"
#include "engine/sampling/sampler.h"

namespace denoised {
namespace {

struct Options {
  BackendOptions backend = {.autotune = true};
  std::string config;
  std::vector<int> rows;
};

absl::Status ParseFlags(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&](const char* name) -> const char* {
      const size_t length = std::strlen(name);
      return flag.compare(0, length, name) == 0 ? argv[i] + length : nullptr;
    };
    if (const char* device = value("--device=")) {
      options->backend.device = device;
    } else if (flag == "--fp32") {
      options->backend.fp32 = true;
    } else if (flag == "--generic") {
      options->backend.generic_kernels = true;
    } else if (flag == "--autotune=off") {
      options->backend.autotune = false;
    } else if (const char* directory = value("--autotune=")) {
      options->backend.autotune_cache = directory;
    } else if (const char* config = value("--config=")) {
      options->config = config;
    } else if (const char* rows = value("--rows=")) {
      for (char* at = const_cast<char*>(rows); *at;) {
        options->rows.push_back(static_cast<int>(std::strtol(at, &at, 10)));
        if (options->rows.back() < 1) return InvalidArgument("{}: rows are numbers ≥ 1", flag);
        if (*at == ',') ++at;
      }
    } else {
      return InvalidArgument("unknown flag '{}'; see the head of tests/bench/model_bench.cc", flag);
    }
  }
  if (options->config.empty()) return InvalidArgument("--config=FILE is missing");
  if (options->rows.empty()) options->rows = {1, 16};
  return absl::OkStatus();
}

constexpr size_t kLeastSamples = 9, kMostSamples = 99;
constexpr double kWarmUpSeconds = 0.1, kLongestSeconds = 2;  // an idle chip clocks down

absl::Status Measure(Backend& backend, size_t free_before, std::shared_ptr<const Denoiser> model,
                     int rows, benchmark::State& state) {
  const DenoiserTraits& traits = model->traits();
  constexpr int kLongestPlan = 1000;
  DENOISED_ASSIGN_OR_RETURN(auto evaluator, Evaluator::Create(backend, model,
                                                              {.height = traits.height,
                                                               .width = traits.width,
                                                               .max_rows = rows,
                                                               .slots = rows,
                                                               .max_evaluations = kLongestPlan}));
  DENOISED_ASSIGN_OR_RETURN(
      const SchedulerConfig scheduler,
      SchedulerConfig::Parse(nlohmann::json{{"_class_name", "DDIMScheduler"}}, "scheduler"));
  DENOISED_ASSIGN_OR_RETURN(const StepPlan plan, scheduler.Compile({.steps = kLongestPlan}));
  const std::vector<DeviceEvaluation> evaluations = ToDevice(plan);
  std::vector<EvaluationRow> table;
  int done = kLongestPlan;
  const auto begin_all = [&] {
    for (int slot = 0; slot < rows; ++slot)
      evaluator->Begin(slot, {.plan = &evaluations, .seed = static_cast<uint64_t>(slot)});
    done = 0;
  };
  for (int slot = 0; slot < rows; ++slot)
    table.push_back({.slot = slot, .label = 0, .unconditional_row = -1, .advances = 1});
  begin_all();
  DENOISED_RETURN_IF_ERROR(backend.Synchronize());
  const auto before_first = std::chrono::steady_clock::now();
  for (int warm = 0; warm < 3; ++warm, ++done) {
    DENOISED_RETURN_IF_ERROR(evaluator->Evaluate(table).status());
    DENOISED_RETURN_IF_ERROR(backend.Synchronize());
    if (warm == 0) {
      state.counters["s_first"] =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - before_first).count();
    }
  }
  for (auto _ : state) {
    std::vector<double> seconds;
    double sum = 0;
    while (seconds.size() < kLeastSamples ||
           (seconds.size() < kMostSamples && sum < kLongestSeconds)) {
      if (done++ >= kLongestPlan - 1) begin_all();
      const auto begin = backend.Mark();
      DENOISED_RETURN_IF_ERROR(evaluator->Evaluate(table).status());
      const auto end = backend.Mark();
      DENOISED_RETURN_IF_ERROR(end->Wait());
      const double elapsed = end->SecondsSince(*begin);
      if (sum > kWarmUpSeconds) seconds.push_back(elapsed);
      sum += elapsed;
    }
    const auto median = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
    std::nth_element(seconds.begin(), median, seconds.end());
    state.SetIterationTime(*median);
  }
  state.counters["FLOP/s"] = benchmark::Counter(evaluator->flops_per_row() * rows,
                                                benchmark::Counter::kIsIterationInvariantRate);
  state.counters["MiB_activations"] =
      static_cast<double>(evaluator->activation_bytes()) / (1 << 20);
  if (backend.device() == Device::kCuda) {
    state.counters["MiB_device"] =
        static_cast<double>(free_before - backend.memory().free) / (1 << 20);
  }
  state.SetItemsProcessed(state.iterations() * rows);
  return absl::OkStatus();
}

absl::Status Run(const Options& options) {
  DENOISED_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, OpenBackend(options.backend));
  const size_t free_before = backend->memory().free;
  DENOISED_ASSIGN_OR_RETURN(const auto json, ReadJsonFile(options.config));
  DENOISED_ASSIGN_OR_RETURN(const UNet2DConfig config, UNet2DConfig::Parse(json, options.config));
  DENOISED_ASSIGN_OR_RETURN(std::shared_ptr<const Denoiser> model,
                            LoadUNet2D(*backend, config, Weights::Synthetic(1)));
  benchmark::AddCustomContext("device", backend->description());
  for (const int rows : options.rows)
    benchmark::RegisterBenchmark(fmt::format("{}/rows:{}", options.config, rows).c_str(),
                                 [&backend, free_before, model, rows](benchmark::State& state) {
                                   const absl::Status status =
                                       Measure(*backend, free_before, model, rows, state);
                                   if (!status.ok())
                                     state.SkipWithError(std::string(status.message()).c_str());
                                 })
        ->Iterations(1)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  benchmark::RunSpecifiedBenchmarks();
  return absl::OkStatus();
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  denoised::Options options;
  absl::Status status = denoised::ParseFlags(argc, argv, &options);
  if (status.ok()) status = denoised::Run(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}
