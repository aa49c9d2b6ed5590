// SPDX-License-Identifier: Apache-2.0
// Images per second of the bare engine, without a server: what denoise bench is compared with.
//
//   engine-throughput --model=DIR[,DIR…] [--device=auto|cpu|cuda] [--devices=0,1] [--fp32]
//                     [--cpu-dtype=bf16] [--max-rows=N]
//                     [--steps=N] [--previews=N] [--in-flight=N] [--warm-up=SECONDS]
//                     [--seconds=SECONDS]
//
// Keeps N jobs of one image in the engine, as denoise bench -c N does, with a preview after every
// --previews evaluations if at all, and prints a JSON object of the window after the warm-up:
// images per second, this process's CPU seconds per image, and of an evaluation its rows, the
// device's milliseconds and those that passed.

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>

#include "engine/engine.h"

namespace denoised {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  EngineOptions engine;
  std::vector<std::string> models;
  int steps = 0;     // 0: the model's own
  int previews = 0;  // 0: none
  int in_flight = 1;
  double warm_up = 2, seconds = 10;
};

absl::Status ParseFlags(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&](const char* name) -> const char* {
      const size_t length = std::strlen(name);
      return flag.compare(0, length, name) == 0 ? argv[i] + length : nullptr;
    };
    if (const char* models = value("--model=")) {
      std::istringstream list(models);
      for (std::string model; std::getline(list, model, ',');) options->models.push_back(model);
    } else if (const char* device = value("--device=")) {
      options->engine.device = device;
    } else if (const char* numbers = value("--devices=")) {
      options->engine.devices.clear();
      std::istringstream list(numbers);
      for (std::string number; std::getline(list, number, ',');)
        options->engine.devices.push_back(std::atoi(number.c_str()));
    } else if (flag == "--cpu-dtype=bf16") {
      options->engine.cpu_dtype = DType::kBF16;
    } else if (flag == "--fp32") {
      options->engine.fp32 = true;
    } else if (const char* rows = value("--max-rows=")) {
      options->engine.max_rows = std::atoi(rows);
    } else if (const char* steps = value("--steps=")) {
      options->steps = std::atoi(steps);
    } else if (const char* previews = value("--previews=")) {
      options->previews = std::atoi(previews);
    } else if (const char* in_flight = value("--in-flight=")) {
      options->in_flight = std::atoi(in_flight);
    } else if (const char* warm_up = value("--warm-up=")) {
      options->warm_up = std::atof(warm_up);
    } else if (const char* seconds = value("--seconds=")) {
      options->seconds = std::atof(seconds);
    } else {
      return InvalidArgument("unknown flag '{}'; see the head of tests/bench/engine_throughput.cc",
                             flag);
    }
  }
  if (options->models.empty()) return InvalidArgument("--model=DIR is missing");
  if (options->in_flight < 1) return InvalidArgument("--in-flight is below 1");
  if (!(options->seconds > 0)) return InvalidArgument("--seconds is not above 0");
  return absl::OkStatus();
}

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Counts the images, and the places of jobs that have ended.
class Places : public JobListener {
 public:
  void OnImage(ImageResult) override { ++images_; }
  void OnDone(const absl::Status& status, const JobTiming&) override {
    std::lock_guard lock(mutex_);
    ++free_;
    if (status_.ok()) status_ = status;
    wake_.notify_one();
  }

  int64_t images() const { return images_; }
  absl::Status status() {
    std::lock_guard lock(mutex_);
    return status_;
  }
  /// Takes a place; false when none is free until `until`.
  bool Take(Clock::time_point until) {
    std::unique_lock lock(mutex_);
    if (!wake_.wait_until(lock, until, [this] { return free_ > 0; })) return false;
    --free_;
    return true;
  }

 private:
  std::atomic<int64_t> images_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  int free_ = 0;
  absl::Status status_;
};

class Evaluations : public EngineObserver {
 public:
  struct Totals {
    int64_t evaluations = 0, rows = 0;
    double seconds = 0;
  };
  void OnEvaluation(const std::string& /*model*/, const std::string& /*device*/, int rows,
                    int /*bucket*/, double seconds) override {
    std::lock_guard lock(mutex_);
    ++totals_.evaluations;
    totals_.rows += rows;
    totals_.seconds += seconds;
  }
  Totals totals() const {
    std::lock_guard lock(mutex_);
    return totals_;
  }

 private:
  mutable std::mutex mutex_;
  Totals totals_;
};

/// Keeps jobs of one model in the engine from `start` on, for the warm-up and the window.
absl::Status KeepBusy(Engine& engine, const Options& options, const std::string& model,
                      Clock::time_point start, Places* places) {
  JobSpec spec = {.model = model, .seed = 0};
  spec.sampler.steps = options.steps;
  spec.previews = options.previews > 0;
  if (spec.previews) spec.preview_every = options.previews;
  std::vector<FieldViolation> violations;
  DENOISED_ASSIGN_OR_RETURN(EffectiveJob job, engine.Resolve(spec, &violations));
  if (!violations.empty()) {
    return InvalidArgument("{} {}", violations[0].field, violations[0].description);
  }
  const std::shared_ptr<JobListener> listener(places, [](JobListener*) {});
  const auto submit = [&] {
    ++*job.spec.seed;
    return engine.Submit(job, listener).status();
  };
  const auto after = [start](double seconds) {
    return start +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  };
  // Places open one after another, so that images are not all at the same step of their plans.
  for (int opened = 0; opened < options.in_flight;) {
    if (!places->Take(after(options.warm_up * opened / options.in_flight))) ++opened;
    DENOISED_RETURN_IF_ERROR(submit());
  }
  while (places->Take(after(options.warm_up + options.seconds))) {
    DENOISED_RETURN_IF_ERROR(submit());
  }
  return places->status();
}

absl::Status Run(const Options& options) {
  Evaluations observed;
  std::deque<Places> places(options.models.size());
  EngineOptions engine_options = options.engine;
  engine_options.max_queued_images = std::max(engine_options.max_queued_images,
                                              options.in_flight * static_cast<int>(places.size()));
  DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine, Engine::Create(engine_options));
  engine->SetObserver(&observed);
  const auto name = [](size_t i) { return fmt::format("model {}", i); };
  for (size_t i = 0; i < places.size(); ++i)
    DENOISED_RETURN_IF_ERROR(engine->Open(name(i), options.models[i]));

  const auto start = Clock::now();
  std::vector<absl::Status> ended(places.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < places.size(); ++i)
    threads.emplace_back(
        [&, i] { ended[i] = KeepBusy(*engine, options, name(i), start, &places[i]); });
  struct Counts {
    Clock::time_point time = Clock::now();
    int64_t images = 0;
    double cpu = CpuSeconds();
    Evaluations::Totals evaluations;
  };
  const auto count = [&] {
    Counts counts{.evaluations = observed.totals()};
    for (const Places& each : places) counts.images += each.images();
    return counts;
  };
  std::this_thread::sleep_until(start + std::chrono::duration<double>(options.warm_up));
  const Counts before = count();
  for (std::thread& thread : threads) thread.join();
  const Counts after = count();
  engine->Drain(Clock::now());
  for (const absl::Status& status : ended) DENOISED_RETURN_IF_ERROR(status);

  const double seconds = std::chrono::duration<double>(after.time - before.time).count();
  const auto images = static_cast<double>(after.images - before.images);
  const auto evaluations = std::max(
      1.0, static_cast<double>(after.evaluations.evaluations - before.evaluations.evaluations));
  const auto devices = static_cast<double>(options.engine.devices.size());
  fmt::print(
      "{{\"images_per_second\": {:.4f}, \"cpu_seconds_per_image\": {:.6f}, \"images\": {}, "
      "\"rows_per_evaluation\": {:.2f}, \"device_ms_per_evaluation\": {:.4f}, "
      "\"ms_per_evaluation\": {:.4f}}}\n",
      images / seconds, images > 0 ? (after.cpu - before.cpu) / images : 0, images,
      static_cast<double>(after.evaluations.rows - before.evaluations.rows) / evaluations,
      1e3 * (after.evaluations.seconds - before.evaluations.seconds) / evaluations,
      1e3 * seconds * devices / evaluations);
  return absl::OkStatus();
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) {
  denoised::Options options;
  absl::Status status = denoised::ParseFlags(argc, argv, &options);
  if (status.ok()) status = denoised::Run(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}
