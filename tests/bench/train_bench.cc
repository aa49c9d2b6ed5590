// SPDX-License-Identifier: Apache-2.0
// Steps of training a network as denoise-train makes them: clipping, AdamW, one average, on random
// pictures. A UNet2DModel with EDM; or of a StableDiffusionPipeline its autoencoder, or its UNet
// (v-prediction) with the text encoder.
//
//   train-bench --config=DIR/config.json --batch=128 [--device=cuda] [--chunks=8]
//               [--norms=keep|recompute] [--autotune=DIRECTORY] [--steps=3] [--turns]
//   train-bench --pipeline=models/emoji-64 --stage=diffusion|vae --batch=256 …
//
// Prints one line of JSON for each of --steps. A step's time is the host's, from its plan to its
// loss. The first prepares kernels, the second measures and records them; a profiler sees most in
// the first. --turns measures when its standard input says so (turns.h).

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
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
  std::string config, pipeline, stage = "diffusion", device = "cuda", autotune;
  int64_t batch = 0, chunks = 8, steps = 3;
  std::optional<bool> recompute_norms;
  bool turns = false;
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
    } else if (flag == "--pipeline") {
      options.pipeline = value;
    } else if (flag == "--stage") {
      options.stage = value;
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
    } else if (flag == "--norms" && (value == "keep" || value == "recompute")) {
      options.recompute_norms = value == "recompute";
    } else if (flag == "--turns") {
      options.turns = true;
    } else {
      return InvalidArgument("unknown flag '{}'; see the head of train_bench.cc", argument);
    }
  }
  if (options.config.empty() == options.pipeline.empty() || options.batch < 1)
    return InvalidArgument("give --batch, and --config or --pipeline");
  if (options.stage != "diffusion" && options.stage != "vae")
    return InvalidArgument("--stage is '{}'; use diffusion or vae", options.stage);
  if (options.device != "cuda" && options.device != "cpu")
    return InvalidArgument("--device is '{}'; use cuda or cpu", options.device);
  return options;
}

absl::StatusOr<NetworkConfig> ReadNetwork(const Options& options) {
  const auto read = [&](const std::string& part) {
    return ReadJsonFile(options.pipeline + "/" + part + "/config.json");
  };
  if (options.pipeline.empty()) {
    DENOISED_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(options.config));
    return UNet2DConfig::Parse(json, options.config);
  }
  DENOISED_ASSIGN_OR_RETURN(const nlohmann::json vae_json, read("vae"));
  DENOISED_ASSIGN_OR_RETURN(const nlohmann::json unet_json, read("unet"));
  DENOISED_ASSIGN_OR_RETURN(const nlohmann::json text_json, read("text_encoder"));
  TextToImageConfig network;
  DENOISED_ASSIGN_OR_RETURN(network.unet, UNet2DConditionConfig::Parse(unet_json, "unet"));
  DENOISED_ASSIGN_OR_RETURN(network.text,
                            ClipTextConfig::Parse(text_json, "text_encoder", "CLIPTextModel"));
  if (options.stage == "diffusion") return network;
  AutoencoderConfig autoencoder;
  DENOISED_ASSIGN_OR_RETURN(autoencoder.vae, AutoencoderKLConfig::Parse(vae_json, "vae"));
  autoencoder.sample_height = network.unet.sample_height * autoencoder.vae.vae.factor();
  autoencoder.sample_width = network.unet.sample_width * autoencoder.vae.vae.factor();
  return autoencoder;
}

/// Noise: what pictures show does not matter for speed. Captions are of four words, behind which
/// they are padded.
Dataset RandomPictures(const NetworkConfig& config) {
  constexpr int64_t kPictures = 2048;
  const Shape sample = SampleShape(config);
  Dataset dataset;
  std::mt19937 random(0);
  if (const auto* const text_to_image = std::get_if<TextToImageConfig>(&config)) {
    const ClipTextConfig& text = text_to_image->text;
    dataset.posteriors =
        Tensor::Host({kPictures, sample[0], sample[1], 2 * sample[2]}, DType::kF32);
    for (float& value : dataset.posteriors.span<float>())
      value = static_cast<float>(random() % 1024) / 1024;
    const int64_t width = text.max_position_embeddings;
    dataset.tokens = Tensor::Host({kPictures + 1, width}, DType::kI32);
    for (int64_t i = 0; i < dataset.tokens.elements(); ++i)
      dataset.tokens.as<int32_t>()[i] =
          i % width < 5 ? static_cast<int32_t>(random() % text.vocab_size) : text.vocab_size - 1;
    for (int32_t i = 0; i <= kPictures; ++i) dataset.first_caption.push_back(i);
    return dataset;
  }
  dataset.images = Tensor::Host({kPictures, sample[0], sample[1], sample[2]}, DType::kU8);
  for (size_t i = 0; i < dataset.images.bytes(); ++i)
    dataset.images.as<uint8_t>()[i] = static_cast<uint8_t>(random());
  const auto* const pixels = std::get_if<UNet2DConfig>(&config);
  if (pixels != nullptr && pixels->condition == ClassCondition::kLabel) {
    for (int64_t i = 0; i < kPictures; ++i)
      dataset.labels.push_back(static_cast<int32_t>(random() % pixels->num_class_embeds));
  }
  return dataset;
}

class Bench {
 public:
  static absl::StatusOr<std::unique_ptr<Bench>> Open(const Options& options) {
    std::unique_ptr<Bench> bench(new Bench);
    DENOISED_ASSIGN_OR_RETURN(bench->config_, ReadNetwork(options));
    bench->dataset_ = RandomPictures(bench->config_);
    DENOISED_ASSIGN_OR_RETURN(bench->backend_,
                              options.device == "cuda"
                                  ? OpenCudaBackend({.autotune_cache = options.autotune})
                                  : OpenCpuBackend());
    bench->options_.batch = options.batch;
    bench->options_.chunks = options.chunks;
    bench->options_.recompute_norms = options.recompute_norms;
    bench->options_.rate.rate = 1e-4;
    if (!options.pipeline.empty()) bench->options_.objective.kind = ObjectiveOptions::Kind::kV;
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
  NetworkConfig config_;
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
