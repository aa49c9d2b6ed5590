// SPDX-License-Identifier: Apache-2.0
// Steps of training a UNet2DModel as denoise-train makes them: EDM, clipping, AdamW, one average,
// on random pictures.
//
//   train-bench --config=DIR/config.json --batch=128 [--device=cuda] [--chunks=8]
//               [--recompute-norms] [--autotune=DIRECTORY] [--steps=3] [--turns]
//
// Prints one line of JSON for each of --steps. A step's time is the host's, from its plan to its
// loss. The first prepares kernels, the second measures and records them; a profiler sees most in
// the first. --turns measures when its standard input says so (turns.h).

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "engine/core/config_reader.h"
#include "engine/training/trainer.h"
#include "tests/bench/turns.h"

namespace denoised::training {
namespace {

using Clock = std::chrono::steady_clock;
const Clock::time_point started = Clock::now();

double Since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct Options {
  std::string config, device = "cuda", autotune;
  int64_t batch = 0, chunks = 8, steps = 3;
  bool recompute_norms = false, turns = false;
};

absl::StatusOr<Options> Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = std::min(argument.find('='), argument.size());
    const std::string flag = argument.substr(0, equals),
                      value = argument.substr(std::min(equals + 1, argument.size()));
    if (flag == "--config") {
      options.config = value;
    } else if (flag == "--device") {
      options.device = value;
    } else if (flag == "--autotune") {
      options.autotune = value;
    } else if (flag == "--batch") {
      options.batch = std::atoll(value.c_str());
    } else if (flag == "--chunks") {
      options.chunks = std::atoll(value.c_str());
    } else if (flag == "--steps") {
      options.steps = std::atoll(value.c_str());
    } else if (flag == "--recompute-norms") {
      options.recompute_norms = true;
    } else if (flag == "--turns") {
      options.turns = true;
    } else {
      return InvalidArgument("unknown flag '{}'; see the head of train_bench.cc", argument);
    }
  }
  if (options.config.empty() || options.batch < 1)
    return InvalidArgument("--config or --batch is missing");
  if (options.device != "cuda" && options.device != "cpu")
    return InvalidArgument("--device is '{}'; use cuda or cpu", options.device);
  return options;
}

/// Noise: what pictures show does not matter for speed.
Dataset RandomPictures(const UNet2DConfig& config) {
  constexpr int64_t kPictures = 2048;
  Dataset dataset;
  dataset.images = Tensor::Host(
      {kPictures, config.sample_height, config.sample_width, config.in_channels}, DType::kU8);
  std::mt19937 random(0);
  for (size_t i = 0; i < dataset.images.bytes(); ++i)
    dataset.images.as<uint8_t>()[i] = static_cast<uint8_t>(random());
  if (config.condition == ClassCondition::kLabel) {
    for (int64_t i = 0; i < kPictures; ++i)
      dataset.labels.push_back(static_cast<int32_t>(random() % config.num_class_embeds));
  }
  return dataset;
}

class Bench {
 public:
  static absl::StatusOr<std::unique_ptr<Bench>> Open(const Options& options) {
    std::unique_ptr<Bench> bench(new Bench);
    DENOISED_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(options.config));
    DENOISED_ASSIGN_OR_RETURN(bench->config_, UNet2DConfig::Parse(json, options.config));
    bench->dataset_ = RandomPictures(bench->config_);
    DENOISED_ASSIGN_OR_RETURN(bench->backend_,
                              options.device == "cuda"
                                  ? OpenCudaBackend({.autotune_cache = options.autotune})
                                  : OpenCpuBackend());
    bench->options_.batch = options.batch;
    bench->options_.chunks = options.chunks;
    bench->options_.recompute_norms = options.recompute_norms;
    bench->options_.rate.rate = 1e-4;
    return bench;
  }

  std::string device() const { return std::string(backend_->description()); }

  /// Up to the step that is repeated. Memory is what the device has lost, also to others meanwhile.
  absl::StatusOr<nlohmann::json> Prepare() {
    const size_t before = backend_->MemoryInUse();
    DENOISED_ASSIGN_OR_RETURN(const TrainerPlan plan, Trainer::Plan(*backend_, config_, options_,
                                                                    dataset_, exchange_->ranks()));
    DENOISED_ASSIGN_OR_RETURN(trainer_,
                              Trainer::Make(*backend_, *exchange_, config_, options_, dataset_));
    DENOISED_RETURN_IF_ERROR(trainer_->Step().status());
    const double first = Since(started);
    DENOISED_RETURN_IF_ERROR(trainer_->Step().status());
    const size_t after = backend_->MemoryInUse();
    return nlohmann::json{{"flop", plan.step_flops},
                          {"parameters", plan.parameters},
                          {"MiB_device", static_cast<double>(after - before) / (1 << 20)},
                          {"MiB_activations", plan.activation_bytes >> 20},
                          {"first_step_seconds", first},
                          {"second_step_seconds", Since(started) - first}};
  }

  /// Milliseconds, the median of a second of steps, at least five and at most 99.
  absl::StatusOr<nlohmann::json> Measure() {
    if (!trainer_) return FailedPrecondition("measure before prepare");
    std::vector<double> seconds;
    for (double sum = 0; seconds.size() < 5 || (sum < 1 && seconds.size() < 99);
         sum += seconds.back()) {
      const Clock::time_point begin = Clock::now();
      DENOISED_ASSIGN_OR_RETURN(const StepReport report, trainer_->Step());
      if (report.skipped) return Internal("the gradient of step {} is not finite", report.step);
      seconds.push_back(Since(begin));
    }
    std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
    return nlohmann::json{{"ms", 1e3 * seconds[seconds.size() / 2]}};
  }

  /// One line a step.
  absl::Status Steps(int64_t steps) {
    DENOISED_ASSIGN_OR_RETURN(trainer_,
                              Trainer::Make(*backend_, *exchange_, config_, options_, dataset_));
    for (int64_t i = 0; i < steps; ++i) {
      const Clock::time_point begin = Clock::now();
      DENOISED_ASSIGN_OR_RETURN(const StepReport report, trainer_->Step());
      Answer(nlohmann::json{{"step", report.step},
                            {"ms", 1e3 * Since(begin)},
                            {"loss", report.loss},
                            {"gradient_norm", report.gradient_norm}});
    }
    return absl::OkStatus();
  }

 private:
  UNet2DConfig config_;
  Dataset dataset_;
  TrainerOptions options_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Exchange> exchange_ = NewSoleExchange();
  std::unique_ptr<Trainer> trainer_;
};

absl::Status Run(int argc, char** argv) {
  DENOISED_ASSIGN_OR_RETURN(const Options options, Parse(argc, argv));
  DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<Bench> bench, Bench::Open(options));
  if (!options.turns) return bench->Steps(options.steps);
  Answer(nlohmann::json{{"ready", {{"device", bench->device()}}}});
  for (Request request; ReadRequest(&request);) {
    if (request.verb == "prepare") {
      Answer(bench->Prepare());
    } else if (request.verb == "measure") {
      Answer(bench->Measure());
    } else {
      Answer(InvalidArgument("unknown request '{}'", request.verb));
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace denoised::training

int main(int argc, char** argv) {
  const absl::Status status = denoised::training::Run(argc, argv);
  if (status.ok()) return 0;
  fmt::print(stderr, "{}\n", std::string(status.message()));
  return 1;
}
