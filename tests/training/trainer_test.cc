// SPDX-License-Identifier: Apache-2.0
#include "engine/training/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <thread>

#include "engine/core/config_reader.h"
#include "engine/sampling/sampler.h"
#include "engine/training/augment.h"
#include "engine/training/nccl.h"
#include "engine/training/prefetcher.h"
#include "engine/training/random.h"
#include "engine/training/unet2d.h"
#include "tests/training/backends.h"
#include "tests/training/free_port.h"
#include "tests/training/gpu_double.h"
#include "tests/training/trained.h"

namespace denoised::training {
namespace {

UNet2DConfig TinyConfig() {
  const nlohmann::json json = {{"sample_size", 8},
                               {"in_channels", 1},
                               {"out_channels", 1},
                               {"block_out_channels", {8, 16}},
                               {"layers_per_block", 1},
                               {"norm_num_groups", 4},
                               {"attention_head_dim", 8},
                               {"down_block_types", {"DownBlock2D", "AttnDownBlock2D"}},
                               {"up_block_types", {"AttnUpBlock2D", "UpBlock2D"}},
                               {"num_class_embeds", 4}};
  auto config = UNet2DConfig::Parse(json, "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

/// Pictures of 10×10: three classes of stripes.
Dataset Stripes() {
  Dataset dataset;
  dataset.images = Tensor::Host({21, 10, 10, 1}, DType::kU8);
  for (int i = 0; i < 21; ++i) {
    dataset.labels.push_back(i % 3);
    for (int p = 0; p < 100; ++p) {
      const int h = p / 10, w = p % 10, at = i % 3 == 0 ? h : i % 3 == 1 ? w : h + w;
      dataset.images.as<uint8_t>()[i * 100 + p] = (at + i / 3) % 4 < 2 ? 230 : 20;
    }
  }
  return dataset;
}

TrainerOptions Options() {
  TrainerOptions options;
  options.steps = 100;
  options.batch = 16;
  options.seed = 5;
  options.rate.rate = 2e-3;
  options.averages = {{}, {AverageOptions::Kind::kPower, 0.1}};
  options.dropout = 0.1;
  options.class_dropout = 0.2;
  options.null_class = 3;
  options.flip = true;
  return options;
}

/// The name of a backend.
struct On {
  std::string name = "cpu";
};

Trained Train(const On& on, const TrainerOptions& options, int steps, Exchange& exchange,
              const TrainerState* from = nullptr, const UNet2DConfig& config = TinyConfig(),
              const Dataset& dataset = Stripes()) {
  return Train(*OpenForTest(on.name), exchange, config, options, dataset, steps, from);
}

Trained Train(const On& on, const TrainerOptions& options, int steps,
              const TrainerState* from = nullptr) {
  return Train(on, options, steps, *NewSoleExchange(), from);
}
Trained Train(const TrainerOptions& options, int steps) { return Train(On{}, options, steps); }

class TrainerBits : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() != "cpu") DENOISED_NEEDS_GPU();
  }
  On on() const { return {GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Backends, TrainerBits, testing::ValuesIn(kBackends),
                         [](const auto& instance) { return instance.param; });

TEST_P(TrainerBits, RepeatsItsBits) {
  const Trained first = Train(on(), Options(), 6);
  ExpectSameBits(first, Train(on(), Options(), 6));
  TrainerOptions other = Options();
  other.seed = 6;
  EXPECT_NE(Train(on(), other, 6).reports.back().loss, first.reports.back().loss);
}

TEST_P(TrainerBits, AccumulationAndRecomputationDoNotChangeBits) {
  const Trained first = Train(on(), Options(), 4);
  for (const int accumulation : {2, 4, 8}) {
    TrainerOptions options = Options();
    options.accumulation = accumulation;
    ExpectSameBits(first, Train(on(), options, 4));
  }
  TrainerOptions options = Options();
  options.recompute_norms = true;
  ExpectSameBits(first, Train(on(), options, 4));
}

TEST_P(TrainerBits, RanksDoNotChangeBits) {
  const Trained alone = Train(on(), Options(), 4);
  for (const int ranks : {2, 4, 8}) {
    for (const Trained& run :
         TrainOnRanks(ranks, GetParam(), TinyConfig(), Options(), Stripes(), 4))
      ExpectSameBits(alone, run);
  }
}

TEST_P(TrainerBits, ContinuesFromAStateWithTheSameBits) {
  const Trained whole = Train(on(), Options(), 7);
  const Trained first = Train(on(), Options(), 3);
  ExpectSameBits(whole, Train(on(), Options(), 4, &first.state));
}

/// What a network reads of a sample, and how an objective plans it.
struct BitsCase {
  const char* name;
  UNet2DConfig config = TinyConfig();
  TrainerOptions options = Options();
  Dataset dataset = Stripes();
};
std::vector<BitsCase> BitsCases() {
  using Kind = ObjectiveOptions::Kind;
  std::vector<BitsCase> cases;
  const auto add = [&](const char* name, Kind kind) -> BitsCase& {
    cases.push_back({.name = name});
    cases.back().options.objective.kind = kind;
    return cases.back();
  };
  add("labels, edm", Kind::kEdm);
  add("labels, flow", Kind::kFlow);
  add("labels, x0", Kind::kX0).options.objective.min_snr = 5;
  BitsCase& score = add("fourier, score", Kind::kScore);
  score.config.time_embedding_type = UNet2DConfig::Time::kFourier;
  score.options.objective.score_sigma_max = 5;
  BitsCase& variance = add("labels, epsilon with its variance", Kind::kEpsilon);
  variance.config.out_channels = 2;
  variance.options.objective.learned_variance = true;
  BitsCase& learned = add("learned timesteps, v", Kind::kV);
  learned.config.time_embedding_type = UNet2DConfig::Time::kLearned;
  learned.config.num_train_timesteps = learned.options.objective.timesteps = 50;
  for (const auto& [name, condition] : {std::pair{"class vectors, edm", ClassCondition::kVector},
                                        {"class numbers, edm", ClassCondition::kValue}}) {
    BitsCase& vectors = add(name, Kind::kEdm);
    vectors.config.condition = condition;
    vectors.options.class_dropout = 0;
    const int64_t size =
        condition == ClassCondition::kVector ? vectors.config.time_embedding_dim : 1;
    std::vector<float> values(21 * size);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 17) / 8 - 1;
    vectors.dataset.vectors = Tensor::HostF32({21, size}, values);
  }
  BitsCase& augmented = add("labels and augmentation, edm", Kind::kEdm);
  augmented.options.flip = false;
  augmented.options.augment = 0.5;
  BitsCase& weighted = add("weighted pictures, v", Kind::kV);
  for (int i = 0; i < 21; ++i) weighted.dataset.weights.push_back(1 + i % 4);
  return cases;
}

TEST_P(TrainerBits, DependOnTheRunAloneForEveryNetworkAndObjective) {
  for (const BitsCase& of : BitsCases()) {
    SCOPED_TRACE(of.name);
    ExpectBitsOfTheRunAlone(GetParam(), of.config, of.options, of.dataset);
  }
}

/// A GPU has begun the next step when one is reported, except the last.
TEST_P(TrainerBits, AStateIsThatOfTheReportedStep) {
  for (const int prefetch_threads : {0, 2}) {
    SCOPED_TRACE(prefetch_threads);
    TrainerOptions options = Options();
    options.prefetch_threads = prefetch_threads;
    options.steps = 4;
    const Trained last = Train(on(), options, 4);
    options.steps = 7;
    const auto backend = OpenForTest(GetParam());
    const auto exchange = NewSoleExchange();
    auto trainer = Trainer::Make(*backend, *exchange, TinyConfig(), options, Stripes());
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    Trained run;
    const auto advance = [&](int steps) {
      for (int i = 0; i < steps; ++i) {
        const auto report = (*trainer)->Step();
        ASSERT_TRUE(report.ok()) << report.status();
        run.reports.push_back(*report);
      }
      const auto state = (*trainer)->State();
      ASSERT_TRUE(state.ok()) << state.status();
      run.state = *state;
    };
    advance(4);
    ExpectSameBits(last, run);
    const TrainerState fourth = run.state;
    advance(2);
    const Trained sixth = run;
    ASSERT_TRUE((*trainer)->Restore(fourth).ok());
    run.reports.resize(4);
    advance(2);
    ExpectSameBits(sixth, run);
    // A trainer may go while the passes of its next step run.
    ASSERT_TRUE((*trainer)->Restore(fourth).ok());
    ASSERT_TRUE((*trainer)->Step().ok());
  }
}

TEST(Trainer, RanksOverTcpDoNotChangeBits) {
  const Trained alone = Train(Options(), 3);
  for (const int ranks : {2, 4, 8}) {
    SCOPED_TRACE(ranks);
    const std::string address = fmt::format("127.0.0.1:{}", FreePort());
    std::vector<Trained> runs(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
      threads.emplace_back([&, rank] {
        auto exchange = ConnectExchange(rank, ranks, address, 30);
        ASSERT_TRUE(exchange.ok()) << exchange.status();
        runs[rank] = Train(On{}, Options(), 3, **exchange);
      });
    for (std::thread& thread : threads) thread.join();
    if (HasFailure()) return;
    for (const Trained& run : runs) ExpectSameBits(alone, run);
  }
}

/// A GPU and a thread for each rank, and the choice that denoise-train makes.
TEST(TrainerGpus, RanksOverNcclDoNotChangeBits) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs a GPU beside another";
  if (const auto nccl = Nccl::Open(); !nccl.ok()) GTEST_SKIP() << nccl.status().message();
  constexpr int kRanks = 2;
  for (const bool fp32 : {true, false}) {
    const Trained alone = Train({fp32 ? "cuda_fp32" : "cuda_bf16"}, Options(), 6);
    const std::string address = fmt::format("127.0.0.1:{}", FreePort());
    std::vector<Trained> runs(kRanks);
    // NCCL frees the memory of one process with its last rank.
    std::vector<std::unique_ptr<Backend>> backends(kRanks);
    std::vector<std::unique_ptr<Exchange>> exchanges(kRanks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank)
      threads.emplace_back([&, rank] {
        auto backend = OpenCudaBackend({.number = rank, .fp32 = fp32});
        ASSERT_TRUE(backend.ok()) << backend.status();
        backends[rank] = *std::move(backend);
        auto tcp = ConnectExchange(rank, kRanks, address, 60);
        ASSERT_TRUE(tcp.ok()) << tcp.status();
        auto chosen = ChooseExchange(ExchangeKind::kNccl, *backends[rank], *std::move(tcp), 60);
        ASSERT_TRUE(chosen.ok()) << chosen.status();
        EXPECT_EQ(chosen->description.substr(0, 5), "NCCL ");
        exchanges[rank] = std::move(chosen->exchange);
        runs[rank] =
            Train(*backends[rank], *exchanges[rank], TinyConfig(), Options(), Stripes(), 6);
      });
    for (std::thread& thread : threads) thread.join();
    if (HasFatalFailure()) return;
    for (const Trained& run : runs) ExpectSameBits(alone, run);
  }
}

TEST(TrainerGpus, ARankThatHangsUnderNcclIsNamed) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs a GPU beside another";
  if (const auto nccl = Nccl::Open(); !nccl.ok()) GTEST_SKIP() << nccl.status().message();
  const std::string address = fmt::format("127.0.0.1:{}", FreePort());
  std::vector<std::unique_ptr<Backend>> backends(2);
  std::vector<std::unique_ptr<Exchange>> exchanges(2);
  const auto swap = [&](int rank) {
    const Tensor mine = OnDevice(*backends[rank], {4}, std::vector<float>(4, rank), DType::kF32),
                 theirs = OnDevice(*backends[rank], {4}, std::vector<float>(4, 7), DType::kF32);
    const absl::Status status = exchanges[rank]->Swap(mine, theirs, 1 - rank);
    if (status.ok()) {
      EXPECT_EQ(OnHost(*backends[rank], theirs), std::vector<float>(4, 1 - rank));
    }
    return status;
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      backends[rank] = *OpenCudaBackend({.number = rank});
      auto chosen = ChooseExchange(ExchangeKind::kNccl, *backends[rank],
                                   *ConnectExchange(rank, 2, address, 60), 20);
      ASSERT_TRUE(chosen.ok()) << chosen.status();
      exchanges[rank] = std::move(chosen->exchange);
      EXPECT_TRUE(swap(rank).ok());
    });
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(exchanges[0] && exchanges[1]);
  EXPECT_EQ(swap(0).message(), "rank 1 has exchanged nothing for 20 s");
  // The kernel that waited has ended, and the GPU can be used.
  EXPECT_TRUE(backends[0]->status().ok()) << backends[0]->status();
}

TEST(Trainer, ALostRankIsAnError) {
  const std::string address = fmt::format("127.0.0.1:{}", FreePort());
  std::thread other([&] { ASSERT_TRUE(ConnectExchange(1, 2, address, 30).ok()); });
  auto exchange = ConnectExchange(0, 2, address, 30);
  other.join();
  ASSERT_TRUE(exchange.ok()) << exchange.status();
  const Tensor tensor = Tensor::HostF32({4}, std::vector<float>(4));
  const absl::Status status = (*exchange)->Swap(tensor, tensor, 1);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  const auto alone = ConnectExchange(0, 2, address, 0.2);
  EXPECT_TRUE(absl::IsUnavailable(alone.status())) << alone.status();
}

TEST_P(TrainerBits, LossFalls) {
  TrainerOptions options = Options();
  options.dropout = 0;
  ExpectLearned(Train(on(), options, StepsToLearn(100)), 0.75);
}

TEST(Trainer, EveryObjectiveLearns) {
  using Kind = ObjectiveOptions::Kind;
  for (const Kind kind : {Kind::kEpsilon, Kind::kV, Kind::kX0, Kind::kFlow}) {
    SCOPED_TRACE(Name(kind));
    TrainerOptions options = Options();
    options.objective.kind = kind;
    if (kind != Kind::kFlow) options.objective.min_snr = 5;
    ExpectLearned(Train(options, StepsToLearn(60)), 0.95);
  }
}

TEST_P(TrainerBits, TheScoreIsLearned) {
  UNet2DConfig config = TinyConfig();
  config.time_embedding_type = UNet2DConfig::Time::kFourier;
  TrainerOptions options = Options();
  options.objective.kind = ObjectiveOptions::Kind::kScore;
  options.objective.score_sigma_max = 5;
  options.dropout = 0;
  ExpectLearned(Train(on(), options, StepsToLearn(60), *NewSoleExchange(), nullptr, config), 0.95);
}

TEST_P(TrainerBits, ALearnedVarianceLearns) {
  UNet2DConfig config = TinyConfig();
  config.out_channels = 2;
  TrainerOptions options = Options();
  options.objective.kind = ObjectiveOptions::Kind::kEpsilon;
  options.objective.learned_variance = true;
  const auto train = [&](int steps) {
    return Train(on(), options, steps, *NewSoleExchange(), nullptr, config);
  };
  const int steps = StepsToLearn(60);
  const Trained run = train(steps);
  ExpectLearned(run, 0.95);
  const Trained few = train(4);
  options.accumulation = 4;
  ExpectSameBits(few, train(4));
  // Of the bound alone, too: what the variance's half of conv_out learns.
  options.objective.variance_weight = 1;
  const Trained bound = train(steps);
  EXPECT_GT(FirstAndLastLoss(bound).first, FirstAndLastLoss(run).first);
  ExpectLearned(bound, 0.95);
}

TEST(Random, PicturesAreDrawnAsOftenAsTheirWeightsSay) {
  const std::vector<double> cumulative = {0, 1, 1, 4, 4.5, 8};  // weights 0, 1, 0, 3, 0.5, 3.5
  std::vector<int> drawn(cumulative.size());
  for (uint32_t step = 0; step < 100; ++step)
    for (uint32_t sample = 0; sample < 80; ++sample)
      ++drawn[DrawWeighted(3, step, sample, cumulative)];
  EXPECT_EQ(drawn[0], 0);
  EXPECT_EQ(drawn[2], 0);
  EXPECT_NEAR(drawn[1], 1000, 100);
  EXPECT_NEAR(drawn[3], 3000, 130);
  EXPECT_NEAR(drawn[4], 500, 70);
  EXPECT_NEAR(drawn[5], 3500, 140);
  for (uint32_t step = 0; step < 1000; ++step)
    ASSERT_LT(DrawWeighted(3, step, 0, {kLeastWeights / 2, kLeastWeights}), 2);
}

TEST(Trainer, WeightsChooseThePicturesAndKeepTheBits) {
  const auto train = [](const TrainerOptions& options, const Dataset& dataset, int steps,
                        const TrainerState* from = nullptr) {
    return Train(On{}, options, steps, *NewSoleExchange(), from, TinyConfig(), dataset);
  };
  // One picture alone has a weight: as if all were that one.
  Dataset one = Stripes(), copies = Stripes();
  one.weights.assign(21, 0);
  one.weights[4] = 0.25;
  for (int i = 0; i < 21; ++i) {
    copies.labels[i] = copies.labels[4];
    std::copy_n(copies.images.as<uint8_t>() + 400, 100, copies.images.as<uint8_t>() + i * 100);
  }
  ExpectSameBits(train(Options(), one, 3), train(Options(), copies, 3));

  Dataset weighted = Stripes();
  for (int i = 0; i < 21; ++i) weighted.weights.push_back(1 + i % 4);
  const Trained whole = train(Options(), weighted, 4);
  EXPECT_NE(whole.reports.back().loss, train(Options(), Stripes(), 4).reports.back().loss);
  const Trained begun = train(Options(), weighted, 2);
  ExpectSameBits(whole, train(Options(), weighted, 2, &begun.state));
  TrainerOptions options = Options();
  options.accumulation = 4;
  options.prefetch_threads = 2;
  ExpectSameBits(whole, train(options, weighted, 4));
  for (const Trained& run : TrainOnRanks(2, "cpu", TinyConfig(), Options(), weighted, 4))
    ExpectSameBits(whole, run);
}

/// Stripes() after what(pixels of 10×10) of each picture.
Dataset ChangedStripes(const std::function<void(uint8_t*)>& what) {
  Dataset dataset = Stripes();
  for (int i = 0; i < 21; ++i) what(dataset.images.as<uint8_t>() + i * 100);
  return dataset;
}

/// With the stripes and other numbers of Options().
Trained TrainOn(const Dataset& dataset, const TrainerOptions& options) {
  return Train(On{}, options, 3, *NewSoleExchange(), nullptr, TinyConfig(), dataset);
}

TEST(Trainer, DroppedClassesAreTheNullClass) {
  TrainerOptions options = Options();
  options.class_dropout = 1;
  const Trained dropped = TrainOn(Stripes(), options);
  options.class_dropout = 0;
  Dataset null = Stripes();
  null.labels.assign(21, options.null_class);
  ExpectSameBits(dropped, TrainOn(null, options));
  const Trained labelled = TrainOn(Stripes(), options);
  EXPECT_NE(labelled.reports[0].loss, dropped.reports[0].loss);
  // A share of the samples: neither all nor none.
  options.class_dropout = 0.5;
  const double some = TrainOn(Stripes(), options).reports[0].loss;
  EXPECT_NE(some, labelled.reports[0].loss);
  EXPECT_NE(some, dropped.reports[0].loss);
}

TEST(Trainer, SomeSamplesAreMirrored) {
  const auto mirror = [](uint8_t* picture) {
    for (int y = 0; y < 10; ++y) std::reverse(picture + 10 * y, picture + 10 * y + 10);
  };
  // A canvas as large as a sample, so that a picture has one crop.
  UNet2DConfig config = TinyConfig();
  config.sample_height = config.sample_width = 10;
  const auto train = [&](const Dataset& dataset, bool flip) {
    TrainerOptions options = Options();
    options.flip = flip;
    return Train(On{}, options, 3, *NewSoleExchange(), nullptr, config, dataset);
  };
  const double mirrored = train(Stripes(), true).reports[0].loss;
  EXPECT_NE(mirrored, train(Stripes(), false).reports[0].loss);
  EXPECT_NE(mirrored, train(ChangedStripes(mirror), false).reports[0].loss) << "all are";
  const Dataset symmetric = ChangedStripes([](uint8_t* picture) {
    for (int p = 0; p < 100; ++p)
      if (p % 10 >= 5) picture[p] = picture[p / 10 * 10 + 9 - p % 10];
  });
  ExpectSameBits(train(symmetric, true), train(symmetric, false));
}

TEST(Trainer, CropsReachEveryEdgeOfTheCanvas) {
  TrainerOptions options = Options();
  options.flip = false;
  const double loss = TrainOn(Stripes(), options).reports[0].loss;
  for (const auto& [name, first, step] :
       {std::tuple{"top", 0, 1}, {"bottom", 90, 1}, {"left", 0, 10}, {"right", 9, 10}}) {
    const Dataset changed = ChangedStripes([first = first, step = step](uint8_t* picture) {
      for (int i = 0; i < 10; ++i) picture[first + i * step] ^= 255;
    });
    EXPECT_NE(TrainOn(changed, options).reports[0].loss, loss) << name;
  }
}

TEST(Trainer, PrefetchedPicturesHaveTheBitsOfResidentOnes) {
  const Trained resident = Train(Options(), 5);
  for (const int threads : {1, 3}) {
    TrainerOptions options = Options();
    options.prefetch_threads = threads;
    ExpectSameBits(resident, Train(options, 5));
    // From the middle, and with ranks that each read their own.
    const Trained first = Train(options, 2);
    ExpectSameBits(resident, Train(On{}, options, 3, &first.state));
    for (const Trained& run : TrainOnRanks(2, "cpu", TinyConfig(), options, Stripes(), 5))
      ExpectSameBits(resident, run);
  }
}

/// Each rank has a GPU with this much memory. `held`: what the first allocates for the run.
std::vector<Trained> TrainInMemory(size_t memory, int ranks, int steps, size_t* held,
                                   const TrainerState* from = nullptr) {
  const auto exchanges = NewLoopbackExchanges(ranks);
  std::vector<Trained> runs(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      GpuDouble gpu(OpenForTest("cpu"));
      gpu.SetMemory(memory);
      const auto trainer = Trainer::Make(gpu, *exchanges[rank], TinyConfig(), Options(), Stripes());
      EXPECT_TRUE(trainer.ok()) << trainer.status();
      if (!trainer.ok()) return;
      if (rank == 0) *held = gpu.allocated();
      runs[rank] = Train(**trainer, steps, from);
    });
  for (std::thread& thread : threads) thread.join();
  return runs;
}

TEST(Trainer, PicturesThatDoNotFitAGpuAreFetchedAhead) {
  const size_t pictures = Stripes().images.bytes(), margin = 256 << 20;
  const Trained alone = Train(Options(), 5);
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    const size_t of_a_step = 1600 / ranks;
    ASSERT_LT(of_a_step, pictures);
    size_t all = 0, held = 0;
    for (const Trained& run : TrainInMemory(SIZE_MAX, ranks, 5, &all)) ExpectSameBits(alone, run);
    TrainInMemory(all + margin, ranks, 1, &held);
    EXPECT_EQ(held, all) << "they fit, and so does the scratch memory of ops";
    const size_t ahead = all - pictures + of_a_step;
    // No room for the pictures; or for them, but then neither for the scratch memory nor for the
    // pictures of a step beside them.
    for (const size_t memory : {all - 1, all + margin - 1, all + of_a_step - 1}) {
      SCOPED_TRACE(memory);
      const std::vector<Trained> whole = TrainInMemory(memory, ranks, 5, &held);
      EXPECT_EQ(held, ahead);
      for (const Trained& run : whole) ExpectSameBits(alone, run);
      // A resumed run may have more memory, or less.
      const std::vector<Trained> begun = TrainInMemory(memory, ranks, 3, &held);
      for (const size_t then : {memory, SIZE_MAX})
        for (const Trained& run : TrainInMemory(then, ranks, 2, &held, &begun[0].state))
          ExpectSameBits(alone, run);
      const std::vector<Trained> fit = TrainInMemory(SIZE_MAX, ranks, 3, &held);
      for (const Trained& run : TrainInMemory(memory, ranks, 2, &held, &fit[0].state))
        ExpectSameBits(alone, run);
    }
  }
  GpuDouble gpu(OpenForTest("cpu"));
  gpu.SetMemory(1 << 20);
  const auto exchange = NewSoleExchange();
  const auto status = Trainer::Make(gpu, *exchange, TinyConfig(), Options(), Stripes()).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
}

TEST(Prefetcher, GivesEveryStepItsOwnBatch) {
  std::atomic<int> prepared = 0;
  Prefetcher prefetcher(3, 21, 2, [&](int64_t step, int64_t sample, uint8_t* to) {
    ++prepared;
    if (sample % 5 == 0) std::this_thread::yield();
    to[0] = static_cast<uint8_t>(step);
    to[1] = static_cast<uint8_t>(sample);
  });
  // Onwards, back, and far ahead: as after a restored state.
  for (const int64_t step : {0, 1, 2, 3, 2, 3, 100, 101, 102}) {
    const uint8_t* batch = prefetcher.Take(step);
    for (int sample = 0; sample < 21; ++sample) {
      ASSERT_EQ(batch[2 * sample], step);
      ASSERT_EQ(batch[2 * sample + 1], sample);
    }
  }
  // The batch in use and the next one: no more is prepared.
  EXPECT_LE(prepared, 21 * (9 + 3));
}

TEST(Trainer, ClassVectorsAreLearned) {
  for (const bool identity : {true, false}) {
    UNet2DConfig config = TinyConfig();
    config.condition = identity ? ClassCondition::kVector : ClassCondition::kValue;
    TrainerOptions options = Options();
    options.class_dropout = 0;
    options.rate.rate = 3e-3;
    Dataset dataset = Stripes();
    const int64_t size = identity ? config.time_embedding_dim : 1;
    std::vector<float> vectors(21 * size);
    for (int64_t i = 0; i < 21; ++i)
      for (int64_t j = 0; j < size; ++j)
        vectors[i * size + j] = static_cast<float>(identity ? j % 3 == i % 3 : i % 3);
    dataset.vectors = Tensor::HostF32({21, size}, vectors);
    SCOPED_TRACE(identity);
    const auto train = [&](int steps) {
      return Train(On{}, options, steps, *NewSoleExchange(), nullptr, config, dataset);
    };
    ExpectLearned(train(StepsToLearn(60)), 0.9);
    // What the vectors say matters, and prefetching and accumulation do not.
    const Trained few = train(3);
    options.prefetch_threads = 2;
    options.accumulation = 2;
    ExpectSameBits(few, train(3));
    const double loss = few.reports.back().loss;
    if (!identity) {  // a label is the number
      Dataset labels = Stripes();
      EXPECT_EQ(
          Train(On{}, options, 3, *NewSoleExchange(), nullptr, config, labels).reports.back().loss,
          loss);
    }
    dataset.vectors.as<float>()[0] += 1;
    for (int i = 0; i < 21; ++i) dataset.vectors.as<float>()[i * size] *= -2;
    EXPECT_NE(train(3).reports.back().loss, loss);
  }
}

TEST(Trainer, ALearnedTimeEmbeddingIsLearned) {
  UNet2DConfig config = TinyConfig();
  config.time_embedding_type = UNet2DConfig::Time::kLearned;
  config.num_train_timesteps = 50;
  TrainerOptions options = Options();
  options.objective.kind = ObjectiveOptions::Kind::kV;
  options.objective.timesteps = 50;
  ExpectLearned(Train(On{}, options, StepsToLearn(60), *NewSoleExchange(), nullptr, config), 0.95);
}

TEST(Trainer, AugmentationRepeatsItsBitsAndIsNotServed) {
  TrainerOptions options = Options();
  options.flip = false;
  options.augment = 0.5;
  ExpectLearned(Train(options, StepsToLearn(40)), 1);
  const Trained run = Train(options, 4);
  options.prefetch_threads = 3;
  options.accumulation = 2;
  ExpectSameBits(run, Train(options, 4));
  options.augment = 0;
  EXPECT_NE(Train(options, 1).reports[0].loss, run.reports[0].loss);

  auto backend = OpenCpuBackend();
  ASSERT_TRUE(backend.ok());
  Parameters parameters;
  ASSERT_TRUE(UNet2D::Make(**backend, parameters, TinyConfig(), kAugmentLabels).ok());
  const auto named = parameters.Named(run.state.trained, run.state.fixed);
  EXPECT_EQ(named.size() + 1, parameters.all().size());
  EXPECT_EQ(named.count("map_augment.weight"), 0u);
}

TEST(Augment, FlipsCopyPixelsAndLabelsSayWhatWasDone) {
  const std::vector<uint8_t> from = {1, 2, 3, 4, 5, 6};  // 2 × 3
  std::vector<uint8_t> to(6);
  int flipped = 0, turned = 0, changed = 0;
  for (uint32_t sample = 0; sample < 400; ++sample) {
    const Augmentation plan = PlanAugmentation(3, 5, sample, 0.3, 2, 3);
    const auto& m = plan.inverse;
    flipped += plan.labels[0] == 1;
    turned += plan.labels[4] != 0;
    const bool geometric = std::any_of(plan.labels + 2, plan.labels + kAugmentLabels,
                                       [](float label) { return label != 0; });
    changed += geometric;
    // Areas change by the scale alone: what its label says.
    const double area = m[0][0] * m[1][1] - m[0][1] * m[1][0];
    EXPECT_NEAR(std::abs(area), std::exp2(-0.4 * plan.labels[2]), 1e-5);
    EXPECT_EQ(area < 0, plan.labels[0] != plan.labels[1]);
    if (geometric) continue;
    Augment(plan, from.data(), 2, 3, 1, to.data());
    for (int y = 0; y < 2; ++y)
      for (int x = 0; x < 3; ++x)
        EXPECT_EQ(to[y * 3 + x],
                  from[(plan.labels[1] == 1 ? 1 - y : y) * 3 + (plan.labels[0] == 1 ? 2 - x : x)]);
  }
  EXPECT_NEAR(flipped, 200, 40);
  EXPECT_NEAR(turned, 120, 30);
  EXPECT_NEAR(changed, 400 * (1 - std::pow(0.7, 4)), 40);
  const Augmentation none = PlanAugmentation(3, 5, 1, 0, 2, 3);
  EXPECT_TRUE(std::all_of(none.labels + 1, none.labels + kAugmentLabels,
                          [](float label) { return label == 0; }));
}

TEST(Augment, MapsPicturesSmoothly) {
  // A quarter turn of a square picture moves every pixel to another one: what is supersampled is
  // smooth there, so a slope stays a slope.
  constexpr int kEdge = 9;
  std::vector<uint8_t> from(kEdge * kEdge), to(kEdge * kEdge);
  for (int y = 0; y < kEdge; ++y)
    for (int x = 0; x < kEdge; ++x) from[y * kEdge + x] = static_cast<uint8_t>(20 * x + 3 * y);
  Augmentation turn;
  turn.labels[3] = -1, turn.labels[4] = 1;
  const double quarter[2][3] = {{0, -1, 0}, {1, 0, 0}};
  std::copy(&quarter[0][0], &quarter[0][0] + 6, &turn.inverse[0][0]);
  Augment(turn, from.data(), kEdge, kEdge, 1, to.data());
  for (int y = 1; y < kEdge - 1; ++y)
    for (int x = 1; x < kEdge - 1; ++x)
      EXPECT_NEAR(to[y * kEdge + x], from[x * kEdge + (kEdge - 1 - y)], 1) << y << " " << x;
  // Half a pixel to the right, and twice the size.
  Augmentation shift;
  shift.labels[7] = 1;
  shift.inverse[0][2] = -0.5;
  Augment(shift, from.data(), kEdge, kEdge, 1, to.data());
  EXPECT_NEAR(to[4 * kEdge + 4], (from[4 * kEdge + 3] + from[4 * kEdge + 4]) / 2, 1);
  Augmentation larger;
  larger.labels[2] = 5;
  larger.inverse[0][0] = larger.inverse[1][1] = 0.5;
  Augment(larger, from.data(), kEdge, kEdge, 1, to.data());
  EXPECT_EQ(to[4 * kEdge + 4], from[4 * kEdge + 4]);
  EXPECT_NEAR(to[4 * kEdge + 6], from[4 * kEdge + 5], 1);
}

TEST_P(TrainerBits, SkipsAndCountsWhatIsNotFinite) {
  const auto backend = OpenForTest(GetParam());
  const auto exchange = NewSoleExchange();
  auto trainer = Trainer::Make(*backend, *exchange, TinyConfig(), Options(), Stripes());
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  ASSERT_TRUE((*trainer)->Step().ok());
  const auto before = (*trainer)->State();
  (*trainer)->ScaleNextGradient(NAN);
  const auto report = (*trainer)->Step();
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(report->skipped);
  const auto after = (*trainer)->State();
  ExpectSameBits(before->trained, after->trained, "weights");
  ExpectSameBits(before->m, after->m, "m");
  EXPECT_EQ(after->skipped, 1);
  EXPECT_EQ(after->skipped_in_row, 1);
  EXPECT_FALSE((*trainer)->Step()->skipped);
  EXPECT_EQ((*trainer)->State()->skipped_in_row, 0);
}

TEST_P(TrainerBits, SkippedStepsDoNotAgeTheMoments) {
  const TrainerOptions options = Options();
  const auto backend = OpenForTest(GetParam());
  const auto exchange = NewSoleExchange();
  auto trainer = Trainer::Make(*backend, *exchange, TinyConfig(), options, Stripes());
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  (*trainer)->ScaleNextGradient(NAN);
  ASSERT_TRUE((*trainer)->Step()->skipped);
  const TrainerState before = *(*trainer)->State();
  const double rate = (*trainer)->Step()->rate;
  const TrainerState after = *(*trainer)->State();
  // Adam's first update.
  double error = 0, moved = 0;
  for (int64_t i = 0; i < after.trained.elements(); ++i) {
    const double w = before.trained.as<float>()[i], m = after.m.as<float>()[i],
                 v = after.v.as<float>()[i];
    const double expected =
        -rate * (options.weight_decay * w +
                 m / (1 - options.beta1) / (std::sqrt(v / (1 - options.beta2)) + options.eps));
    error += std::pow(after.trained.as<float>()[i] - w - expected, 2);
    moved += std::pow(expected, 2);
  }
  EXPECT_GT(moved, 0);
  EXPECT_LT(std::sqrt(error / moved), 1e-3);
  // A resumed run counts alike.
  ASSERT_TRUE((*trainer)->Step().ok());
  const Trained resumed = Train(on(), options, 1, &after);
  ExpectSameBits((*trainer)->State()->trained, resumed.state.trained, "weights");
}

TEST(Trainer, RefusesWhatDoesNotBelongTogether) {
  auto backend = OpenCpuBackend();
  ASSERT_TRUE(backend.ok());
  const auto exchange = NewSoleExchange();
  const auto refused = [&](const UNet2DConfig& config, const TrainerOptions& options,
                           const Dataset& dataset, const std::string& message) {
    const auto trainer = Trainer::Make(**backend, *exchange, config, options, dataset);
    ASSERT_FALSE(trainer.ok()) << message;
    EXPECT_NE(trainer.status().message().find(message), std::string::npos) << trainer.status();
  };
  TrainerOptions options = Options();
  options.chunks = 3;
  refused(TinyConfig(), options, Stripes(), "--chunks is 3");
  options = Options();
  options.accumulation = 3;
  refused(TinyConfig(), options, Stripes(), "--accumulation is 3");
  options = Options();
  options.null_class = 4;
  refused(TinyConfig(), options, Stripes(), "--null-class");
  options.null_class = 2;
  refused(TinyConfig(), options, Stripes(), "which is the class of a picture too");
  options = Options();
  options.rate.rate = NAN;
  refused(TinyConfig(), options, Stripes(), "--learning-rate is nan");
  Dataset dataset = Stripes();
  dataset.labels[3] = 9;
  refused(TinyConfig(), Options(), dataset, "label 9");
  dataset.labels.clear();
  refused(TinyConfig(), Options(), dataset, "no labels");
  UNet2DConfig config = TinyConfig();
  config.sample_height = 16;
  refused(config, Options(), Stripes(), "smaller than sample_size");
  config = TinyConfig();
  config.in_channels = config.out_channels = 3;
  refused(config, Options(), Stripes(), "in_channels is 3");
  config = TinyConfig();
  config.out_channels = 2;
  refused(config, Options(), Stripes(), "learned variance");
  options = Options();
  options.objective.learned_variance = true;
  refused(config, options, Stripes(), "objective epsilon, v or x0");
  options.objective.kind = ObjectiveOptions::Kind::kEpsilon;
  refused(TinyConfig(), options, Stripes(), "out_channels is 1");
  options.objective.variance_weight = 0;
  refused(config, options, Stripes(), "--variance-weight is 0");
  config = TinyConfig();
  config.time_embedding_type = UNet2DConfig::Time::kLearned;
  config.num_train_timesteps = 10;
  refused(config, Options(), Stripes(), "a table of whole timesteps");
  options = Options();
  options.objective.kind = ObjectiveOptions::Kind::kEpsilon;
  refused(config, options, Stripes(), "num_train_timesteps 10; use at most as many");
  config = TinyConfig();
  config.condition = ClassCondition::kVector;
  refused(config, Options(), Stripes(), "no null class");
  options = Options();
  options.class_dropout = 0;
  refused(config, options, Stripes(), "no class vectors");
  dataset = Stripes();
  dataset.vectors = Tensor::HostF32({21, 2}, std::vector<float>(42));
  refused(config, options, dataset,
          "vectors of 2 numbers, but the network reads 32 (its time_embedding_dim); give as many");
  dataset = Stripes();
  dataset.weights.assign(21, 0);
  refused(TinyConfig(), Options(), dataset, "weights of the pictures sum up to 0");
  dataset.weights.assign(21, 5e-324);
  refused(TinyConfig(), Options(), dataset, "use weights with a finite sum of at least 1e-300");
  options = Options();
  options.augment = 1.5;
  refused(TinyConfig(), options, Stripes(), "augment is 1.5");
  options.augment = 0.5;
  refused(TinyConfig(), options, Stripes(), "--flip cannot be given with --augment");
  options.flip = false;
  EXPECT_TRUE(Trainer::Make(**backend, *exchange, TinyConfig(), options, Stripes()).ok());
}

TEST(Trainer, RefusesPassesThatNoGridOfCudaHolds) {
  EXPECT_TRUE(CheckPassRows(denoised::Device::kCpu, 1 << 24).ok());
  EXPECT_TRUE(CheckPassRows(denoised::Device::kCuda, 65535).ok());
  const std::string message(CheckPassRows(denoised::Device::kCuda, 65536).message());
  EXPECT_NE(message.find("65536 samples"), std::string::npos) << message;
  EXPECT_NE(message.find("--batch, or a larger --accumulation"), std::string::npos) << message;
}

TEST_P(TrainerBits, PassesAreCheckedWhereTheyArePlanned) {
  const auto backend = OpenForTest(GetParam());
  TrainerOptions options = Options();
  options.batch = 1 << 17;
  EXPECT_EQ(Trainer::CheckPasses(*backend, options, 1).ok(), GetParam() == "cpu");
  EXPECT_EQ(Trainer::Plan(*backend, TinyConfig(), options, Stripes(), 1).ok(), GetParam() == "cpu");
  options.accumulation = 4;
  EXPECT_TRUE(Trainer::CheckPasses(*backend, options, 1).ok());
  EXPECT_TRUE(Trainer::Plan(*backend, TinyConfig(), options, Stripes(), 1).ok());
}

TEST(Trainer, PlanCountsTheWork) {
  const auto backend = OpenCpuBackend();
  ASSERT_TRUE(backend.ok());
  const auto plan = Trainer::Plan(**backend, TinyConfig(), Options(), Stripes(), 1);
  ASSERT_TRUE(plan.ok()) << plan.status();
  TrainerOptions twice = Options();
  twice.batch *= 2;
  const auto larger = Trainer::Plan(**backend, TinyConfig(), twice, Stripes(), 1);
  ASSERT_TRUE(larger.ok());
  EXPECT_NEAR(larger->step_flops / plan->step_flops, 2, 1e-6);
  EXPECT_GT(larger->activation_bytes, plan->activation_bytes);
  twice.recompute_norms = true;
  EXPECT_LT(Trainer::Plan(**backend, TinyConfig(), twice, Stripes(), 1)->activation_bytes,
            larger->activation_bytes);
}

TEST(Trainer, PlanCountsTheGradientsOfARank) {
  const auto backend = OpenCpuBackend();
  ASSERT_TRUE(backend.ok());
  TrainerOptions options = Options();
  const auto bytes = [&](int ranks) {
    const auto plan = Trainer::Plan(**backend, TinyConfig(), options, Stripes(), ranks);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return static_cast<int64_t>(plan->weight_bytes);
  };
  ASSERT_EQ(options.chunks, 8);
  const int64_t one = bytes(1), eight = bytes(8), workers = std::min((*backend)->workers(), 8);
  options.averages.pop_back();
  const int64_t copy = one - bytes(1);
  // One rank of one sums eight chunks, four levels and a gradient in each other worker's hands; one
  // of eight has its own sum and another rank's.
  EXPECT_EQ(one - eight, (4 + workers - 1 - 2) * copy);
}

TEST(Trainer, CountsWeightsThatAGpuPacksInPhasesAndPairs) {
  Cost cost;
  const auto backend = NewCountingBackend(DType::kBF16, &cost);
  const auto more = [&](int kernel, bool upsample2x, const Conv2dGeometry& geometry) {
    const int64_t before = cost.more_weights;
    backend->NewConv2d(4, 8, kernel, upsample2x, geometry);
    return cost.more_weights - before;
  };
  const auto more_of = [&](int in, int out) {
    const int64_t before = cost.more_weights;
    backend->NewConv2d(in, out, 3, false, {1, 1, 1, 1, 1});
    return cost.more_weights - before;
  };
  EXPECT_EQ(more(3, false, {1, 0, 0, 1, 1}), 0);
  EXPECT_EQ(more(1, false, {2, 0, 0, 0, 0}), 0);
  // Four phases of 2×2 taps: beside the 3×3 for a stride, instead of it for a doubled input.
  EXPECT_EQ(more(3, false, {2, 1, 1, 1, 1}), 4 * 8 * 16);
  EXPECT_EQ(more(3, false, {2, 0, 0, 1, 1}), 4 * 8 * 16);
  EXPECT_EQ(more(3, true, {1, 1, 1, 1, 1}), 4 * 8 * (16 - 9));
  // Pairs: of two pixels by two.
  EXPECT_EQ(more(3, false, {1, 1, 1, 1, 1}), 2 * 4 * 2 * 8 * 9);
  EXPECT_EQ(more_of(32, 32), 2 * 32 * 2 * 32 * 9);
  EXPECT_EQ(more_of(36, 32), 0);
  EXPECT_EQ(more_of(32, 36), 0);
  EXPECT_EQ(more_of(6, 32), 0);
}

TEST(Trainer, PlanCountsTheMemory) {
  const auto backend = OpenCpuBackend();
  ASSERT_TRUE(backend.ok());
  TrainerOptions options = Options();
  options.flip = false;
  const Dataset dataset = Stripes();
  Parameters parameters;
  ASSERT_TRUE(UNet2D::Make(**backend, parameters, TinyConfig(), 0).ok());
  // oneDNN has kernels of its own layout, for both directions. 1×1 convolutions are linear layers.
  int64_t kernels = 0;
  for (const Parameter& parameter : parameters.all())
    if (parameter.shape.rank() == 4 && parameter.shape[2] > 1)
      kernels += parameter.shape.elements();
  ASSERT_GT(kernels, 0);
  // Weights, two moments, two averages; the gradients of each worker and of four levels of sums.
  const int64_t copies = 5 + std::min((*backend)->workers(), 8) - 1 + 4;
  const auto plan = Trainer::Plan(**backend, TinyConfig(), options, dataset, 1);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->weight_bytes, 4 * (parameters.trained_elements() * copies +
                                     parameters.fixed_elements() + 2 * kernels));
  EXPECT_EQ(plan->dataset_bytes, dataset.images.bytes());

  // Augmented, they stay in memory beside the batches of three steps: in use, ready, and next.
  options.augment = 0.5;
  const size_t batches = 3 * 16 * 100;
  const auto augmented = Trainer::Plan(**backend, TinyConfig(), options, dataset, 1);
  ASSERT_TRUE(augmented.ok()) << augmented.status();
  EXPECT_EQ(augmented->dataset_bytes, dataset.images.bytes() + batches);
  Dataset on_disk = dataset;
  on_disk.on_disk = true;
  EXPECT_EQ(Trainer::Plan(**backend, TinyConfig(), options, on_disk, 1)->dataset_bytes, batches);
}

/// What is allocated but for packed weights, which the backend holds. Beside it are the plan of a
/// batch and numbers of a step: below 4 KiB here.
TEST(Trainer, ThePlanIsWhatATrainerAllocates) {
  Cost cost;
  const auto counting = NewCountingBackend(DType::kF32, &cost);
  Parameters parameters;
  ASSERT_TRUE(UNet2D::Make(*counting, parameters, TinyConfig(), 0).ok());
  const int64_t packed =
      4 * (2 * (parameters.trained_elements() + parameters.fixed_elements()) + cost.more_weights);
  for (const auto& [ranks, accumulation, prefetch_threads] :
       {std::tuple{1, 1, 0}, {1, 4, 0}, {1, 1, 2}, {2, 1, 0}, {4, 2, 1}}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks, accumulation " << accumulation << ", "
                                    << prefetch_threads << " threads");
    TrainerOptions options = Options();
    options.accumulation = accumulation;
    options.prefetch_threads = prefetch_threads;
    GpuDouble gpu(OpenForTest("cpu"));
    const auto plan = Trainer::Plan(gpu, TinyConfig(), options, Stripes(), ranks);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto exchanges = NewLoopbackExchanges(ranks);
    const auto trainer = Trainer::Make(gpu, *exchanges[0], TinyConfig(), options, Stripes());
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    const auto planned =
        static_cast<int64_t>(plan->weight_bytes + plan->activation_bytes + plan->dataset_bytes) -
        packed;
    EXPECT_NEAR(static_cast<double>(gpu.allocated()), static_cast<double>(planned + 2048), 2048);
    const auto state = (*trainer)->State();
    ASSERT_TRUE(state.ok()) << state.status();
    size_t saved =
        state->trained.bytes() + state->fixed.bytes() + state->m.bytes() + state->v.bytes();
    for (const Tensor& average : state->averages) saved += average.bytes();
    EXPECT_EQ(plan->state_bytes, saved);
    if (ranks > 1) continue;
    const size_t before = gpu.allocated();
    EXPECT_TRUE((*trainer)->Step().ok());
    EXPECT_EQ(gpu.allocated(), before) << "a step keeps nothing more";
  }
}

/// docs/benchmarks/train.json has what an H200 took for a run, context excluded.
TEST(Trainer, ThePlanIsNearWhatAGpuTook) {
  const auto record = ReadJsonFile(DENOISED_SOURCE_DIR "/docs/benchmarks/train.json");
  ASSERT_TRUE(record.ok()) << record.status();
  int compared = 0;
  for (const nlohmann::json& row : (*record)["rows"]) {
    const auto name = row["name"].get<std::string>();
    SCOPED_TRACE(name);
    const std::string network = name.substr(0, name.find('/'));
    const std::string file =
        network == "mnist-32"
            ? DENOISED_SOURCE_DIR "/models/mnist-32/unet/config.json"
            : DENOISED_SOURCE_DIR "/tests/models/configs/" + network + "/config.json";
    const auto json = ReadJsonFile(file);
    ASSERT_TRUE(json.ok()) << json.status();
    const auto config = UNet2DConfig::Parse(*json, file);
    ASSERT_TRUE(config.ok()) << config.status();
    // As train_bench.cc has them.
    TrainerOptions options;
    options.batch = std::stoll(name.substr(name.rfind(':') + 1));
    Dataset dataset;
    const Shape sample = SampleShape(*config);
    dataset.images = Tensor::Host({2048, sample[0], sample[1], sample[2]}, DType::kU8);
    dataset.labels.assign(2048, 0);
    const GpuDouble gpu(OpenForTest("cpu"), DType::kBF16);
    const auto plan = Trainer::Plan(gpu, *config, options, dataset, 1);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const double planned =
        static_cast<double>(plan->weight_bytes + plan->activation_bytes + plan->dataset_bytes) /
        (1 << 20);
    const double took = row["ours"]["MiB_device"];
    EXPECT_LE(planned, took);
    EXPECT_GT(planned, 0.9 * took);
    ++compared;
  }
  EXPECT_EQ(compared, 3);
}

TEST(Schedule, Rates) {
  RateSchedule schedule{.kind = RateSchedule::Kind::kCosine, .rate = 2, .warmup_steps = 4};
  EXPECT_DOUBLE_EQ(schedule.At(0, 104), 0.5);
  EXPECT_DOUBLE_EQ(schedule.At(4, 104), 2);
  EXPECT_NEAR(schedule.At(54, 104), 1, 1e-12);
  EXPECT_NEAR(schedule.At(104, 104), 0, 1e-12);
  schedule = {.kind = RateSchedule::Kind::kInverseSqrt, .rate = 2, .reference_steps = 100};
  EXPECT_DOUBLE_EQ(schedule.At(50, 1000), 2);
  EXPECT_DOUBLE_EQ(schedule.At(400, 1000), 1);
}

TEST(Schedule, PowerAveragesHaveTheirWidth) {
  // EDM2, section 3.1: γ = 16.97 for 0.05 and 6.94 for 0.10.
  EXPECT_NEAR(PowerOfWidth(0.05), 16.97, 0.01);
  EXPECT_NEAR(PowerOfWidth(0.10), 6.94, 0.01);
  EXPECT_EQ((AverageOptions{AverageOptions::Kind::kPower, 0.1}).DecayAt(1), 0);
  // The relative width is the deviation of the profile t^γ over [0, 1].
  for (const double width : {0.02, 0.05, 0.1, 0.2}) {
    const double gamma = PowerOfWidth(width);
    double sums[3] = {};
    for (int i = 0; i < 200000; ++i) {
      const double t = (i + 0.5) / 200000, profile = std::pow(t, gamma);
      for (int power = 0; power < 3; ++power) sums[power] += profile * std::pow(t, power);
    }
    const double mean = sums[1] / sums[0];
    EXPECT_NEAR(std::sqrt(sums[2] / sums[0] - mean * mean), width, 1e-5);
  }
  EXPECT_EQ((AverageOptions{AverageOptions::Kind::kWarmup, 0.9999}).DecayAt(1), 0);
}

/// EDM2's average of a run up to step T is Σ θ_t·((t/T)^(γ+1) − ((t−1)/T)^(γ+1)): the integral of
/// its power function (arXiv 2312.02696, equation 14) over weights that stand still between steps.
TEST(Trainer, AveragesAreWhatTheirFormulasSay) {
  TrainerOptions options = Options();
  options.rate.rate = 2e-2;
  using Kind = AverageOptions::Kind;
  options.averages = {{Kind::kPower, 0.05},
                      {Kind::kPower, 0.1},
                      {Kind::kPower, 0.2},
                      {Kind::kDecay, 0.9},
                      {Kind::kWarmup, 0.9999}};
  auto backend = OpenCpuBackend();
  ASSERT_TRUE(backend.ok());
  const auto exchange = NewSoleExchange();
  auto trainer = Trainer::Make(**backend, *exchange, TinyConfig(), options, Stripes());
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  constexpr int kSteps = 12;
  std::vector<std::vector<float>> weights = {(*trainer)->State()->trained.ToFloats()};
  for (int step = 0; step < kSteps; ++step) {
    ASSERT_TRUE((*trainer)->Step().ok());
    weights.push_back((*trainer)->State()->trained.ToFloats());
  }
  const TrainerState state = *(*trainer)->State();
  for (size_t average = 0; average < options.averages.size(); ++average) {
    const auto [kind, value] = options.averages[average];
    // How much of each step's weights the average holds; what is left is that of the first.
    double shares[kSteps + 1] = {}, left = 1;
    for (int t = kSteps; t > 0; --t) {
      if (kind == Kind::kPower) {
        const double power = PowerOfWidth(value) + 1;
        shares[t] = std::pow(t / double{kSteps}, power) - std::pow((t - 1) / double{kSteps}, power);
      } else {
        const double decay = kind == Kind::kDecay ? value : std::min(value, 1 - std::pow(t, -0.75));
        shares[t] = left * (1 - decay);
        left *= decay;
      }
    }
    shares[0] = kind == Kind::kPower ? 0 : left;
    const std::vector<float> actual = state.averages[average].ToFloats();
    double error = 0, moved = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      double expected = 0;
      for (int t = 0; t <= kSteps; ++t) expected += shares[t] * weights[t][i];
      error += std::pow(actual[i] - expected, 2);
      moved += std::pow(weights[kSteps][i] - expected, 2);
    }
    EXPECT_GT(moved, 1e-4) << average;
    EXPECT_LT(std::sqrt(error / moved), 1e-4) << average;
  }
}

/// warmup and power then replace the initial weights by those of the first update.
TEST_P(TrainerBits, SkippedStepsDoNotAgeTheAverages) {
  using Kind = AverageOptions::Kind;
  TrainerOptions options = Options();
  options.averages = {{Kind::kWarmup, 0.999}, {Kind::kPower, 0.05}};
  const auto backend = OpenForTest(GetParam());
  const auto exchange = NewSoleExchange();
  auto trainer = Trainer::Make(*backend, *exchange, TinyConfig(), options, Stripes());
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  (*trainer)->ScaleNextGradient(NAN);
  ASSERT_TRUE((*trainer)->Step()->skipped);
  ASSERT_FALSE((*trainer)->Step()->skipped);
  const TrainerState state = *(*trainer)->State();
  for (const Tensor& average : state.averages)
    for (int64_t i = 0; i < average.elements(); ++i)
      ASSERT_NEAR(average.as<float>()[i], state.trained.as<float>()[i], 1e-6) << i;
}

/// It holds nothing of the initial weights: a short run's model would be these for the most part.
TEST(Trainer, TheDefaultAverageWarmsUp) {
  const std::vector<AverageOptions> averages = TrainerOptions().averages;
  ASSERT_EQ(averages.size(), 1u);
  EXPECT_EQ(averages[0].Name(), "warmup_0.999");
  EXPECT_EQ(averages[0].DecayAt(1), 0);
  EXPECT_EQ(averages[0].DecayAt(1'000'000), 0.999);
}

/// The network output that `row`'s target stands for, turned back into an image.
TEST(Objective, TargetsMeanTheImage) {
  using Kind = ObjectiveOptions::Kind;
  for (const Kind kind :
       {Kind::kEdm, Kind::kEpsilon, Kind::kV, Kind::kX0, Kind::kFlow, Kind::kScore}) {
    ObjectiveOptions options;
    options.kind = kind;
    const auto objective = Objective::Make(options);
    ASSERT_TRUE(objective.ok());
    for (uint32_t sample = 0; sample < 50; ++sample) {
      SampleRow row;
      objective->Plan(1, 0, sample, &row);
      const double y = 0.3, e = -1.1;
      const double x = row.signal * y + row.noise * e + row.shift;
      const double f = row.target_signal * y + row.target_noise * e;
      double image = f;  // kX0
      if (kind == Kind::kEdm) {
        // D = c_skip·x/c_in + c_out·F with σ from c_noise.
        const double sigma = std::exp(4.0 * row.condition), data = 0.5;
        const double root = std::hypot(sigma, data), out = sigma * data / root;
        image = data * data / (root * root) * (x * root) + out * f;
        const double lambda = root * root / std::pow(sigma * data, 2);  // weight of D's error
        EXPECT_NEAR(row.weight, lambda * out * out, 1e-6);
      } else if (kind == Kind::kEpsilon) {
        image = (x - row.noise * f) / row.signal;
      } else if (kind == Kind::kV) {
        image = row.signal * x - row.noise * f;
      } else if (kind == Kind::kFlow) {
        image = x - row.condition / 1000 * f;
      } else if (kind == Kind::kScore) {
        const double sigma = row.condition;
        image = 2 * (x + sigma * sigma * f) - 1;
        EXPECT_NEAR(row.weight * f * f, e * e, 1e-5);  // ‖σ·F + ε‖²
        EXPECT_GE(sigma, 0.01 * (1 - 1e-6));
        EXPECT_LE(sigma, 50 * (1 + 1e-6));
      }
      EXPECT_NEAR(image, y, 2e-4 / row.signal) << Name(kind);
    }
  }
}

TEST(Objective, EdmsNoiseLevelsAreLogNormal) {
  const auto objective = Objective::Make({.log_sigma_mean = -0.7, .log_sigma_deviation = 1.5});
  ASSERT_TRUE(objective.ok()) << objective.status();
  constexpr int kSamples = 10000;
  double sum = 0, squares = 0;
  for (uint32_t sample = 0; sample < kSamples; ++sample) {
    SampleRow row;
    objective->Plan(1, sample / 100, sample % 100, &row);
    const double log_sigma = 4.0 * row.condition;
    sum += log_sigma, squares += log_sigma * log_sigma;
  }
  const double mean = sum / kSamples, deviation = std::sqrt(squares / kSamples - mean * mean);
  // Four standard errors: 1.5 / √10000 and 1.5 / √20000.
  EXPECT_NEAR(mean, -0.7, 0.06);
  EXPECT_NEAR(deviation, 1.5, 0.043);
}

TEST(Objective, IsReadFromAScheduler) {
  using Kind = ObjectiveOptions::Kind;
  ObjectiveOptions options;
  options.timesteps = 40;
  options.sigma_data = 0.7;
  options.score_sigma_max = 9;
  options.beta_schedule = "scaled_linear";
  options.beta_end = 0.012;
  for (const Kind kind :
       {Kind::kEdm, Kind::kEpsilon, Kind::kV, Kind::kX0, Kind::kFlow, Kind::kScore}) {
    options.kind = kind;
    const nlohmann::json config = Objective::Make(options)->SchedulerConfig();
    const auto read = ObjectiveOfScheduler(config, "scheduler");
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->kind, kind);
    EXPECT_EQ(Objective::Make(*read)->SchedulerConfig(), config);
  }
}

TEST(Objective, OfASchedulerThatItCannotKeepIsRefused) {
  const auto refused = [](const nlohmann::json& config) {
    return std::string(ObjectiveOfScheduler(config, "scheduler").status().message());
  };
  nlohmann::json config = {{"_class_name", "DDPMScheduler"}, {"predict_epsilon", false}};
  EXPECT_EQ(refused(config),
            "scheduler: field 'predict_epsilon' is false: not supported; remove it, and set "
            "prediction_type to \"sample\"");
  config["predict_epsilon"] = true;
  EXPECT_EQ(refused(config), "");
  config = {{"_class_name", "FlowMatchEulerDiscreteScheduler"}, {"shift", 3.0}};
  EXPECT_EQ(refused(config),
            "scheduler: field 'shift' is 3.0: the scheduler of the trained model has 1; use 1");
  config["shift"] = 1.0;
  EXPECT_EQ(refused(config), "");
}

TEST(Objective, NumbersOfASchedulerAreRefusedAsItsFields) {
  for (const auto& [name, field, value] : {std::tuple{"EDMEulerScheduler", "sigma_data", 0.0},
                                           std::tuple{"EDMEulerScheduler", "sigma_data", 2000.0},
                                           std::tuple{"EDMEulerScheduler", "sigma_min", -1.0},
                                           std::tuple{"EDMEulerScheduler", "sigma_max", 0.001},
                                           std::tuple{"ScoreSdeVeScheduler", "sigma_min", -1.0},
                                           std::tuple{"ScoreSdeVeScheduler", "sigma_max", 20000.0},
                                           std::tuple{"ScoreSdeVeScheduler", "sigma_max", 0.005}}) {
    const auto read = ObjectiveOfScheduler({{"_class_name", name}, {field, value}}, "a/s.json");
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument) << name << " " << value;
    const std::string said(read.status().message());
    EXPECT_TRUE(said.starts_with(fmt::format("a/s.json: field '{}' is", field))) << said;
  }
}

/// As diffusers' classes and the server take fields that a file leaves out.
TEST(Objective, BetasThatASchedulerLeavesOutAreItsClasss) {
  for (const auto& [name, start, end] :
       {std::tuple{"DDIMScheduler", 0.0001, 0.02},
        std::tuple{"DPMSolverMultistepScheduler", 0.0001, 0.02},
        std::tuple{"HeunDiscreteScheduler", 0.00085, 0.012},
        std::tuple{"KDPM2DiscreteScheduler", 0.00085, 0.012},
        std::tuple{"KDPM2AncestralDiscreteScheduler", 0.00085, 0.012},
        std::tuple{"DPMSolverSDEScheduler", 0.00085, 0.012}}) {
    const auto read = ObjectiveOfScheduler({{"_class_name", name}}, "scheduler");
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->kind, ObjectiveOptions::Kind::kEpsilon) << name;
    EXPECT_EQ(read->beta_start, start) << name;
    EXPECT_EQ(read->beta_end, end) << name;
    EXPECT_EQ(read->beta_schedule, "linear") << name;
    const auto given = ObjectiveOfScheduler(
        {{"_class_name", name}, {"beta_start", 0.001}, {"beta_end", 0.03}}, "scheduler");
    EXPECT_EQ(given->beta_start, 0.001) << name;
    EXPECT_EQ(given->beta_end, 0.03) << name;
  }
}

/// With all steps, the server's DDPM sampler reads v as the loss does.
TEST(Objective, ALearnedVarianceIsWhatServingDrawsFrom) {
  using Kind = ObjectiveOptions::Kind;
  for (const Kind kind : {Kind::kEpsilon, Kind::kV, Kind::kX0}) {
    ObjectiveOptions options;
    options.kind = kind;
    options.timesteps = 40;
    options.beta_schedule = "squaredcos_cap_v2";
    options.learned_variance = true;
    const auto objective = Objective::Make(options);
    ASSERT_TRUE(objective.ok()) << objective.status();
    const auto scheduler = SchedulerConfig::Parse(objective->SchedulerConfig(), "scheduler");
    ASSERT_TRUE(scheduler.ok()) << scheduler.status();
    EXPECT_TRUE(scheduler->learns_variance());
    const auto plan = scheduler->Compile({.steps = 40});
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::vector<bool> seen(40);
    for (uint32_t sample = 0; sample < 400; ++sample) {
      SampleRow row;
      objective->Plan(1, 0, sample, &row);
      const auto t = static_cast<size_t>(row.condition);
      seen[t] = true;
      const Evaluation<double>& now = plan->evaluations[39 - t];
      ASSERT_EQ(now.condition, row.condition);
      // x0 has the weight that the posterior's mean gives it, so the error of the mean follows.
      const double of_x0 = now.weights[kOutputX][kInputX0];
      EXPECT_NEAR(row.mean_factor, -of_x0 * now.x0_from_model, 1e-6) << t;
      if (t == 0) continue;  // no noise
      EXPECT_EQ(now.noise_scale, NoiseScale::kLearnedRange);
      EXPECT_NEAR(row.log_variance_min, now.log_variance_min, 1e-5) << t;
      EXPECT_NEAR(row.log_variance_max, now.log_variance_max, 1e-5) << t;
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), false), 0);
  }
}

TEST(Objective, MinSnrCapsTheWeight) {
  using Kind = ObjectiveOptions::Kind;
  for (const Kind kind : {Kind::kEpsilon, Kind::kV, Kind::kX0}) {
    ObjectiveOptions options;
    options.kind = kind;
    options.min_snr = 5;
    const auto objective = Objective::Make(options);
    for (uint32_t sample = 0; sample < 50; ++sample) {
      SampleRow row;
      objective->Plan(1, 0, sample, &row);
      const double snr = std::pow(row.signal / row.noise, 2), capped = std::min(snr, 5.0);
      const double weight = kind == Kind::kEpsilon ? capped / snr
                            : kind == Kind::kV     ? capped / (snr + 1)
                                                   : capped;
      EXPECT_NEAR(row.weight / weight, 1, 1e-4);
    }
  }
}

/// ᾱ of the last timesteps is below what a double holds.
TEST(Objective, NoiseAloneHasFiniteNumbers) {
  using Kind = ObjectiveOptions::Kind;
  for (const Kind kind : {Kind::kEpsilon, Kind::kV, Kind::kX0})
    for (int i = 0; i < 4; ++i) {
      const bool learned = i % 2 != 0;
      const std::optional<double> min_snr = i < 2 ? std::optional<double>() : 5.0;
      ObjectiveOptions options;
      options.kind = kind;
      options.learned_variance = learned;
      options.timesteps = 999;
      options.beta_end = 0.97;
      options.min_snr = min_snr;
      const auto objective = Objective::Make(options);
      ASSERT_TRUE(objective.ok()) << objective.status();
      int noise_alone = 0;
      for (uint32_t sample = 0; sample < 200; ++sample) {
        SampleRow row;
        objective->Plan(1, 0, sample, &row);
        noise_alone += row.signal == 0;
        for (const float number : {row.target_signal, row.target_noise, row.weight, row.mean_factor,
                                   row.log_variance_min, row.log_variance_max})
          ASSERT_TRUE(std::isfinite(number)) << Name(kind) << ", timestep " << row.condition;
        if (kind == Kind::kEpsilon && row.signal == 0) {
          EXPECT_EQ(row.weight, 1);
        }
        if (kind == Kind::kEpsilon && row.signal == 0 && learned) {
          const double beta = std::exp(row.log_variance_max);
          EXPECT_NEAR(row.mean_factor / (beta / std::sqrt(1 - beta)), 1, 1e-5);
        }
      }
      EXPECT_GT(noise_alone, 0);
    }
}

TEST(Objective, CapSnrLimitsTheWeightOfV) {
  ObjectiveOptions options;
  options.kind = ObjectiveOptions::Kind::kV;
  options.cap_snr = 5;
  const auto objective = Objective::Make(options);
  ASSERT_TRUE(objective.ok()) << objective.status();
  for (uint32_t sample = 0; sample < 50; ++sample) {
    SampleRow row;
    objective->Plan(1, 0, sample, &row);
    const double snr = std::pow(row.signal / row.noise, 2);
    EXPECT_NEAR(row.weight, (std::min(snr, 5.0) + 1) / (snr + 1), 1e-4);
  }
  options.kind = ObjectiveOptions::Kind::kEpsilon;
  EXPECT_FALSE(Objective::Make(options).ok());
}

}  // namespace
}  // namespace denoised::training
