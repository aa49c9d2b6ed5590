// SPDX-License-Identifier: Apache-2.0
// Runs of a text-to-image network and of its autoencoder: the same bits whatever the passes, ranks
// and interruptions; what they learn; latents of an autoencoder.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "engine/core/config_reader.h"
#include "engine/io/safetensors.h"
#include "engine/training/autoencoder_kl.h"
#include "engine/training/latents.h"
#include "engine/training/trainer.h"
#include "tests/models/golden.h"
#include "tests/training/backends.h"
#include "tests/training/finite_differences.h"
#include "tests/training/gpu_double.h"
#include "tests/training/trained.h"

namespace denoised::training {
namespace {

constexpr int kPictures = 11;

std::string Part(const std::string& name) {
  return DENOISED_SOURCE_DIR "/tests/models/latent/sd2/" + name;
}

nlohmann::json Config(const std::string& name) {
  auto json = ReadJsonFile(Part(name) + "/config.json");
  EXPECT_TRUE(json.ok()) << json.status();
  return *json;
}

TextToImageConfig TextToImage(bool train_text = true) {
  const auto unet = UNet2DConditionConfig::Parse(Config("unet"), "unet");
  const auto text = ClipTextConfig::Parse(Config("text_encoder"), "text", "CLIPTextModel");
  EXPECT_TRUE(unet.ok() && text.ok());
  return {*unet, *text, train_text};
}

AutoencoderConfig Autoencoder() {
  const auto vae = AutoencoderKLConfig::Parse(Config("vae"), "vae");
  EXPECT_TRUE(vae.ok()) << vae.status();
  return {.vae = *vae, .sample_height = 16, .sample_width = 16};
}

/// Latents that their caption tells apart; picture i has one or two captions.
Dataset Captioned() {
  Dataset dataset;
  dataset.posteriors = Tensor::HostF32({2 * kPictures, 8, 8, 8}, std::vector<float>(22 * 512));
  for (int i = 0; i < 2 * kPictures; ++i) {
    for (int p = 0; p < 64; ++p) {
      float* pixel = dataset.posteriors.as<float>() + (i * 64 + p) * 8;
      for (int c = 0; c < 4; ++c) {
        pixel[c] = (i + c) % 2 == 0 ? 1.5f : -1.5f;
        pixel[4 + c] = 0.1f;
      }
    }
  }
  std::vector<int32_t> tokens;
  const auto add = [&](int32_t word) {
    for (int t = 0; t < 12; ++t) tokens.push_back(t == 0 ? 638 : t == 1 ? word : 639);
  };
  for (int i = 0; i < kPictures; ++i) {
    dataset.first_caption.push_back(static_cast<int32_t>(tokens.size() / 12));
    add(100 + i % 2);
    if (i % 3 == 0) add(200 + i % 2);
  }
  dataset.first_caption.push_back(static_cast<int32_t>(tokens.size() / 12));
  add(639);
  dataset.tokens = Tensor::Host({static_cast<int64_t>(tokens.size()) / 12, 12}, DType::kI32);
  std::memcpy(dataset.tokens.data(), tokens.data(), dataset.tokens.bytes());
  return dataset;
}

Dataset Pictures() {
  Dataset dataset;
  dataset.images = Tensor::Host({kPictures, 20, 20, 3}, DType::kU8);
  for (int64_t i = 0; i < dataset.images.elements(); ++i) {
    const int64_t c = i % 3, x = i / 3 % 20, y = i / 60 % 20, n = i / 1200;
    dataset.images.as<uint8_t>()[i] =
        static_cast<uint8_t>((c == n % 3 ? x : y) * 11 + (n * 37 + c * 20) % 40);
  }
  return dataset;
}

TrainerOptions Options() {
  TrainerOptions options;
  options.steps = 100;
  options.batch = 16;
  options.seed = 5;
  options.rate.rate = 2e-3;
  options.objective.kind = ObjectiveOptions::Kind::kV;
  options.objective.cap_snr = 5;
  options.class_dropout = 0.2;
  options.flip = true;
  return options;
}

TrainerOptions PictureOptions() {
  TrainerOptions options = Options();
  options.class_dropout = 0;
  return options;
}

/// Cases of each backend.
class TextToImageTrainer : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() != "cpu") DENOISED_NEEDS_GPU();
  }
  static Trained Train(const NetworkConfig& config, const TrainerOptions& options,
                       const Dataset& dataset, int steps, Exchange& exchange,
                       const TrainerState* from = nullptr) {
    return training::Train(*OpenForTest(GetParam()), exchange, config, options, dataset, steps,
                           from);
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, TextToImageTrainer, testing::ValuesIn(kBackends),
                         [](const auto& instance) { return instance.param; });

struct Case {
  const char* name;
  NetworkConfig config;
  TrainerOptions options;
  Dataset dataset;
};
std::vector<Case> Cases() {
  return {{"text to image", TextToImage(), Options(), Captioned()},
          {"frozen text", TextToImage(false), Options(), Captioned()},
          {"autoencoder", Autoencoder(), PictureOptions(), Pictures()}};
}

TEST_P(TextToImageTrainer, BitsDependOnTheRunAlone) {
  for (const Case& of : Cases()) {
    SCOPED_TRACE(of.name);
    const auto sole = NewSoleExchange();
    const auto train = [&](const TrainerOptions& options, int steps,
                           const TrainerState* from = nullptr) {
      return Train(of.config, options, of.dataset, steps, *sole, from);
    };
    const Trained whole = train(of.options, 3);
    TrainerOptions options = of.options;
    options.accumulation = 4;
    options.recompute_norms = true;
    ExpectSameBits(whole, train(options, 3));
    const Trained first = train(of.options, 1);
    ExpectSameBits(whole, train(of.options, 2, &first.state));
    options = of.options;
    options.seed = 6;
    EXPECT_NE(train(options, 3).reports.back().loss, whole.reports.back().loss);
    for (const Trained& run : TrainOnRanks(8, GetParam(), of.config, of.options, of.dataset, 3))
      ExpectSameBits(whole, run);
    ExpectBitsOfTheRunAlone(GetParam(), of.config, of.options, of.dataset);
  }
}

/// The loss of a task over two samples, and its gradient.
class TaskLoss {
 public:
  explicit TaskLoss(const Case& of) : backend_(OpenForTest("cpu")) {
    auto task = Task::Make(*backend_, parameters_, of.config, /*augment_labels=*/0);
    EXPECT_TRUE(task.ok()) << task.status();
    task_ = *std::move(task);
    trained_ = Zeros(parameters_.trained_elements());
    fixed_ = Zeros(parameters_.fixed_elements() + 16);
    gradient_ = Zeros(trained_.elements());
    loss_ = Zeros(1);
    parameters_.Initialize(3, trained_, fixed_);
    std::vector<SampleRow> plan(kRows);
    for (uint32_t i = 0; i < kRows; ++i)
      plan[i] = {.image = i,
                 .sample = i,
                 .signal = 0.8f,
                 .noise = 0.6f,
                 .target_signal = -0.6f,
                 .target_noise = 0.8f,
                 .condition = 300.0f + 50 * static_cast<float>(i)};
    if (of.dataset.images)
      for (SampleRow& row : plan)
        row.noise = row.target_noise = 0, row.signal = row.target_signal = 1;
    rows_ = Tensor::Host({kRows, kSampleNumbers}, DType::kI32);
    std::memcpy(rows_.data(), plan.data(), rows_.bytes());
    step_ = Tensor::Host({1}, DType::kI32);
    step_.as<int32_t>()[0] = 0;
    input_ = {.images = of.dataset.images ? of.dataset.images : of.dataset.posteriors,
              .samples = {.rows = rows_},
              .scale = 1.0f / kRows,
              .loss = loss_};
    if (of.dataset.tokens) {
      input_.samples.tokens = of.dataset.tokens.Slice(0, kRows);
      const Tensor positions = input_.samples.positions =
          Tensor::Host(input_.samples.tokens.shape(), DType::kI32);
      for (int64_t i = 0; i < positions.elements(); ++i)
        positions.as<int32_t>()[i] = static_cast<int32_t>(i % 12);
    }
    backend_->SetChunkRows(kRows);
  }

  double Run() {
    // What is not written stays NaN.
    for (size_t i = 0; i < parameters_.all().size(); ++i) {
      if (!parameters_[static_cast<int>(i)].trained) continue;
      const Tensor part = parameters_.Part(gradient_, static_cast<int>(i));
      std::fill_n(part.as<float>(), part.elements(), std::nanf(""));
    }
    task_->Pack({*backend_, parameters_, trained_, fixed_});
    Arena arena(memory_);
    Pass pass{.backend = *backend_,
              .arena = arena,
              .parameters = parameters_,
              .trained = trained_,
              .fixed = fixed_,
              .gradient = gradient_,
              .rows = rows_,
              .step = step_,
              .seed = 1};
    task_->Run(pass, input_);
    return loss_.as<float>()[0];
  }

  /// The gradients of trained parameters by name, of the last Run().
  std::map<std::string, std::vector<float>> Gradients() const {
    std::map<std::string, std::vector<float>> gradients;
    for (size_t i = 0; i < parameters_.all().size(); ++i)
      if (const Parameter& parameter = parameters_[static_cast<int>(i)]; parameter.trained)
        gradients[parameter.name] = parameters_.Part(gradient_, static_cast<int>(i)).ToFloats();
    return gradients;
  }

  Parameters parameters_;
  Tensor trained_, gradient_;

 private:
  static Tensor Zeros(int64_t elements) {
    return Tensor::HostF32({elements}, std::vector<float>(elements));
  }

  static constexpr int64_t kRows = 2;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Task> task_;
  Tensor fixed_, loss_, rows_, step_;
  const Tensor memory_ = Tensor::Host({16 << 20}, DType::kU8);
  TaskInput input_;
};

/// Of a whole task. On a thread each, as in model_test.cc.
TEST(TaskGradients, AgreeWithFiniteDifferences) {
  const Case text_to_image = Cases()[0], autoencoder = Cases()[2];
  // Steps are as long as curvature allows, since the slopes along many weights of an initial
  // network are a millionth of the loss. 0.1 is off by 2 % at most, and by 9e-7 where that is more.
  const SlopeOptions smooth{.length = 0.1, .tolerance = 0.03, .noise = 1e-6, .is_flat = IsKeysBias};
  // The loss of pictures is made of |d|. A step takes some d over 0, so it must be short, and
  // rounding is more. 3e-3 is off by 6 % at most, 3e-2 by 9 %; rounding alone makes 3e-5.
  const SlopeOptions with_kinks{
      .length = 3e-3, .tolerance = 0.1, .noise = 3e-5, .is_flat = IsKeysBias};
  OpenForTest("cpu")->ForEachPass(2, [&](int64_t i, int) {
    const Case& of = i == 0 ? text_to_image : autoencoder;
    SCOPED_TRACE(of.name);
    TaskLoss task(of);
    task.Run();
    const std::vector<float> gradient = task.gradient_.ToFloats();
    ExpectSlopes(
        task.parameters_, task.trained_, gradient, [&] { return task.Run(); },
        i == 0 ? smooth : with_kinks);
  });
}

/// The network does not see whether its text encoder is trained, too.
TEST(TaskGradients, AreTheSameBesideAFrozenTextEncoder) {
  TaskLoss both(Cases()[0]), frozen(Cases()[1]);
  EXPECT_EQ(both.Run(), frozen.Run());
  auto gradients = both.Gradients();
  std::erase_if(gradients, [](const auto& of) { return !of.first.starts_with("unet."); });
  EXPECT_EQ(gradients, frozen.Gradients());
}

TEST_P(TextToImageTrainer, LossFalls) {
  for (Case& of : Cases()) {
    SCOPED_TRACE(of.name);
    const auto sole = NewSoleExchange();
    of.options.class_dropout = 0;
    of.options.rate.rate = 4e-3;
    ExpectLearned(Train(of.config, of.options, of.dataset, StepsToLearn(40), *sole), 0.8);
  }
}

TEST_P(TextToImageTrainer, AFrozenTextEncoderStaysAsItIs) {
  const auto sole = NewSoleExchange();
  const Trained one = Train(TextToImage(false), Options(), Captioned(), 1, *sole),
                two = Train(TextToImage(false), Options(), Captioned(), 2, *sole),
                both = Train(TextToImage(true), Options(), Captioned(), 1, *sole);
  EXPECT_EQ(one.state.fixed.ToFloats(), two.state.fixed.ToFloats());
  EXPECT_GT(one.state.fixed.elements(), 16);
  EXPECT_EQ(one.state.trained.elements() + one.state.fixed.elements(),
            both.state.trained.elements());
}

TEST_P(TextToImageTrainer, EmptyCaptionsAreSharedByAll) {
  // With every caption empty, other captions change nothing.
  const auto sole = NewSoleExchange();
  TrainerOptions options = Options();
  options.class_dropout = 1;
  Dataset dataset = Captioned();
  const Trained before = Train(TextToImage(), options, dataset, 1, *sole);
  dataset.tokens = Tensor::Host(dataset.tokens.shape(), DType::kI32);
  std::memcpy(dataset.tokens.data(), Captioned().tokens.data(), dataset.tokens.bytes());
  dataset.tokens.as<int32_t>()[1] = 50;
  ExpectSameBits(before, Train(TextToImage(), options, dataset, 1, *sole));
  options.class_dropout = 0;
  const Trained with = Train(TextToImage(), options, dataset, 1, *sole);
  EXPECT_NE(with.reports[0].loss, before.reports[0].loss);
}

TEST(TextToImage, RefusesWhatDoesNotBelongTogether) {
  auto backend = OpenCpuBackend();
  ASSERT_TRUE(backend.ok());
  const auto exchange = NewSoleExchange();
  const auto refused = [&](const NetworkConfig& config, const TrainerOptions& options,
                           const Dataset& dataset, const std::string& message) {
    const auto trainer = Trainer::Make(**backend, *exchange, config, options, dataset);
    ASSERT_FALSE(trainer.ok()) << message;
    EXPECT_NE(trainer.status().message().find(message), std::string::npos) << trainer.status();
  };
  TextToImageConfig config = TextToImage();
  config.unet.cross_attention_dim = 24;
  refused(config, Options(), Captioned(), "cross_attention_dim is 24");
  config = TextToImage();
  config.unet.sample_height = 16;
  refused(config, Options(), Captioned(), "but the network reads 8 × 16 × 4 (sample_size");
  config = TextToImage();
  config.unet.in_channels = config.unet.out_channels = 5;
  refused(config, Options(), Captioned(), "but the network reads 8 × 8 × 5 (sample_size");
  config = TextToImage();
  config.text.vocab_size = 600;
  refused(config, Options(), Captioned(), "vocab_size is 600");
  config.text.max_position_embeddings = 8;
  refused(config, Options(), Captioned(), "max_position_embeddings is 8");
  TrainerOptions options = Options();
  options.dropout = 0.1;
  refused(TextToImage(), options, Captioned(), "dropout");
  refused(Autoencoder(), Options(), Pictures(), "no classes");
  AutoencoderConfig vae = Autoencoder();
  vae.sample_height = 20;
  refused(vae, PictureOptions(), Pictures(), "edge of 20");
}

TEST(TextToImage, PlanCountsAFrozenTextEncoder) {
  const auto backend = OpenCpuBackend();
  ASSERT_TRUE(backend.ok());
  const auto bytes = [&](const TextToImageConfig& config) {
    const auto plan = Trainer::Plan(**backend, config, Options(), Captioned(), 1);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan->weight_bytes;
  };
  TextToImageConfig larger = TextToImage(false);
  larger.text.vocab_size += 64;
  EXPECT_EQ(bytes(larger) - bytes(TextToImage(false)),
            4 * 64 * static_cast<size_t>(larger.text.hidden_size));
}

absl::StatusOr<AutoencoderWeights> VaeWeights() {
  DENOISED_ASSIGN_OR_RETURN(Safetensors tensors,
                            Safetensors::OpenDirectory(Part("vae"), "diffusion_pytorch_model"));
  return ReadAutoencoder(Autoencoder().vae, Weights(std::move(tensors), "vae"));
}

class Latents : public TextToImageTrainer {
 protected:
  bool bf16() const { return GetParam() == "cuda_bf16"; }
};
INSTANTIATE_TEST_SUITE_P(Backends, Latents, testing::ValuesIn(kBackends),
                         [](const auto& instance) { return instance.param; });

/// The golden's picture has other values than 256 levels; these are the nearest.
TEST_P(Latents, AreThoseOfDiffusers) {
  const auto io =
      Safetensors::Open(DENOISED_SOURCE_DIR "/tests/models/latent/sd2/goldens.safetensors");
  ASSERT_TRUE(io.ok()) << io.status();
  const Tensor image = ToNhwc(io->tensors().at("vae.image")),
               moments = ToNhwc(io->tensors().at("vae.moments"));
  const Tensor pictures = Tensor::Host(image.shape(), DType::kU8);
  for (int64_t i = 0; i < image.elements(); ++i)
    pictures.as<uint8_t>()[i] = static_cast<uint8_t>(
        std::lround(std::clamp((image.as<float>()[i] + 1) * 127.5f, 0.0f, 255.0f)));
  const auto backend = OpenForTest(GetParam());
  const auto weights = VaeWeights();
  ASSERT_TRUE(weights.ok()) << weights.status();
  const auto posteriors =
      EncodePosteriors(*backend, Autoencoder().vae, *weights, pictures, /*mirrored=*/true);
  ASSERT_TRUE(posteriors.ok()) << posteriors.status();
  ASSERT_EQ(posteriors->shape(), Shape({2 * image.dim(0), 8, 8, 8}));
  std::vector<float> mean, deviation, expected_mean, expected_deviation;
  for (int64_t i = 0; i < moments.elements(); ++i) {
    const bool is_mean = i % 8 < 4;
    (is_mean ? mean : deviation).push_back(posteriors->as<float>()[i]);
    const float value = moments.as<float>()[i];
    if (is_mean) {
      expected_mean.push_back(value * 0.18215f);
    } else {
      expected_deviation.push_back(std::exp(0.5f * value) * 0.18215f);
    }
  }
  // The autoencoder in bf16 is about as far off as the levels.
  const double tolerance = bf16() ? 0.04 : 0.02;
  EXPECT_LE(RelativeError(mean, expected_mean), tolerance);
  EXPECT_LE(RelativeError(deviation, expected_deviation), tolerance);
  // Mirrored pictures have other latents.
  const Tensor other = posteriors->Slice(image.dim(0), image.dim(0));
  EXPECT_GT(RelativeError(other.span<float>(), posteriors->Slice(0, image.dim(0)).ToFloats()), 0.1);
}

/// But for packed weights, which the backend holds, and the plan of a pass: below 8 KiB.
TEST(LatentMemory, IsWhatEncodingAllocates) {
  const AutoencoderKLConfig config = Autoencoder().vae;
  Cost cost;
  Parameters parameters;
  const auto counting = NewCountingBackend(DType::kF32, &cost);
  ASSERT_TRUE(AutoencoderKL::Make(Declare(*counting, parameters).Frozen(), config).ok());
  const auto weights = VaeWeights();
  ASSERT_TRUE(weights.ok()) << weights.status();
  GpuDouble gpu(OpenForTest("cpu"));
  const Tensor pictures = Tensor::Host({5, 16, 16, 3}, DType::kU8);
  std::memset(pictures.data(), 9, pictures.bytes());
  const auto told = EncodingBytes(gpu, config, pictures.shape(), /*mirrored=*/false);
  ASSERT_TRUE(told.ok()) << told.status();
  ASSERT_TRUE(EncodePosteriors(gpu, config, *weights, pictures, /*mirrored=*/false).ok());
  const auto allocated =
      static_cast<double>(*told - PackedBytes(gpu, parameters.fixed_elements(), cost));
  EXPECT_NEAR(static_cast<double>(gpu.peak()), allocated + 4096, 4096);
  EXPECT_FALSE(EncodingBytes(gpu, config, {5, 17, 16, 3}, /*mirrored=*/false).ok());
  // A CPU takes eight pictures at a time on each thread.
  const auto cpu = OpenForTest("cpu");
  const int64_t workers = std::min(cpu->workers(), 3);
  const auto of = [&](int64_t count, bool mirrored) {
    const auto bytes = EncodingBytes(*cpu, config, {count, 16, 16, 3}, mirrored);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return static_cast<int64_t>(*bytes);
  };
  EXPECT_EQ(of(9, false), of(8, true));
  const int64_t fixed = 4 * parameters.fixed_elements() +
                        static_cast<int64_t>(PackedBytes(*cpu, parameters.fixed_elements(), cost));
  EXPECT_EQ(of(12, true) - fixed, workers * (of(8, false) - fixed));
}

TEST_P(Latents, AreStandardisedInTheConvolutionsBeside) {
  const auto backend = OpenForTest(GetParam());
  backend->SetChunkRows(3);
  auto weights = VaeWeights();
  ASSERT_TRUE(weights.ok()) << weights.status();
  AutoencoderKLConfig config = Autoencoder().vae;
  const Tensor pictures = Tensor::Host({9, 16, 16, 3}, DType::kU8);
  for (int64_t i = 0; i < pictures.elements(); ++i)
    pictures.as<uint8_t>()[i] = static_cast<uint8_t>(i * i % 251);
  ASSERT_TRUE(StandardizeLatents(*backend, config, pictures, &*weights).ok());
  EXPECT_EQ(backend->chunk_rows(), 3);
  config.vae.scaling_factor = 1;
  const auto posteriors =
      EncodePosteriors(*backend, config, *weights, pictures, /*mirrored=*/false);
  ASSERT_TRUE(posteriors.ok()) << posteriors.status();
  for (int c = 0; c < 4; ++c) {
    double sum = 0, square = 0;
    const int64_t pixels = posteriors->elements() / 8;
    for (int64_t p = 0; p < pixels; ++p) {
      const float* at = posteriors->as<float>() + p * 8 + c;
      sum += at[0];
      square += at[0] * at[0] + at[4] * at[4];
    }
    // The folded weights are rounded anew to bf16.
    EXPECT_NEAR(sum / static_cast<double>(pixels), 0, bf16() ? 2e-2 : 1e-4);
    EXPECT_NEAR(square / static_cast<double>(pixels), 1, bf16() ? 2e-2 : 1e-3);
  }
}

}  // namespace
}  // namespace denoised::training
