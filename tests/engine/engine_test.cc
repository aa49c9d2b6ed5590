// SPDX-License-Identifier: Apache-2.0
// The engine through its public interface, on the model that ships with the project.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "engine/core/config_reader.h"
#include "engine/device_engine.h"
#include "engine/io/safetensors.h"
#include "tests/batching/simulated_backend.h"
#include "tests/engine/submit.h"
#include "tests/models/golden.h"
#include "tests/needs_gpu.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

const fs::path kDigits = DENOISED_SOURCE_DIR "/models/mnist-32";

class EngineTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "cuda") DENOISED_NEEDS_GPU();
  }
  std::unique_ptr<Engine> Open(EngineOptions options = {}, const fs::path& model = kDigits) {
    options.device = GetParam();
    auto engine = Engine::Create(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    const absl::Status opened = (*engine)->Open("digits", model);
    EXPECT_TRUE(opened.ok()) << opened;
    return *std::move(engine);
  }
};

TEST_P(EngineTest, DrawsWhatWasAsked) {
  const auto engine = Open();
  const auto model = engine->Find("digits");
  ASSERT_NE(model, nullptr);
  EXPECT_EQ(model->state, ModelState::kReady);
  EXPECT_EQ(model->num_classes, 10);
  EXPECT_EQ(model->labels[3], "three");
  JobSpec spec{.model = "digits", .seed = 5, .count = 3, .class_labels = {1, 2, 3}};
  spec.sampler.steps = 4;
  spec.previews = true;
  const auto job = Submit(*engine, spec);
  ASSERT_TRUE(job->Wait().ok());
  EXPECT_EQ(job->images().size(), 3u);
  EXPECT_EQ(job->labels()[2], 3);
  EXPECT_EQ(job->previews(), 3 * 3);
  EXPECT_GT(job->timing().total_seconds, 0);
  for (const auto& [index, pixels] : job->images()) {
    ASSERT_EQ(pixels.size(), 32u * 32u);
    double sum = 0;
    for (const float value : pixels) {
      ASSERT_TRUE(std::isfinite(value));
      sum += value;
    }
    EXPECT_LT(sum / 1024, -0.3) << "a digit is mostly background";
    EXPECT_GT(*std::max_element(pixels.begin(), pixels.end()), 0.5f);
  }
}

/// The last preview of the state is nearly the image. EDM's input scale would double it.
TEST_P(EngineTest, PreviewsOfTheStateHaveTheContrastOfTheImage) {
  const auto engine = Open();
  JobSpec spec{.model = "digits", .seed = 3, .count = 1, .class_labels = {7}};
  spec.sampler.steps = 8;
  spec.previews = true;
  spec.preview_kind = PreviewKind::kNoisyState;
  const auto job = Submit(*engine, spec);
  ASSERT_TRUE(job->Wait().ok());
  ASSERT_EQ(job->previews(), 7);
  const auto norm = [](const std::vector<float>& pixels) {
    double squares = 0;
    for (const float pixel : pixels) squares += double{pixel} * pixel;
    return std::sqrt(squares);
  };
  EXPECT_NEAR(norm(job->preview_pixels().back().ToFloats()) / norm(job->images().at(0)), 1, 0.05);
}

// Images of half the size have layers of other kernels, whose memory is planned like theirs.
TEST_P(EngineTest, DrawsOtherSizes) {
  const auto engine = Open();
  JobSpec spec{.model = "digits", .seed = 5, .count = 2};
  spec.width = spec.height = 16;
  spec.sampler.steps = 2;
  const auto job = Submit(*engine, spec);
  ASSERT_TRUE(job->Wait().ok());
  const std::vector<float> image = job->images()[1];
  ASSERT_EQ(image.size(), 16u * 16u);
  EXPECT_NE(image, job->images()[0]);
  // Alone on the CPU the same image; bf16 is up to 5e-2 away after ten evaluations.
  auto cpu = Engine::Create({.device = "cpu"});
  ASSERT_TRUE(cpu.ok() && (*cpu)->Open("digits", kDigits).ok());
  spec.count = 1;
  spec.seed = 6;
  const auto alone = Submit(**cpu, spec);
  ASSERT_TRUE(alone->Wait().ok());
  EXPECT_LE(RelativeError(image, alone->images()[0]), GetParam() == "cpu" ? 0 : 5e-2);
}

TEST_P(EngineTest, SameBytesAloneAndInCompany) {
  const auto engine = Open({.max_rows = 12});
  std::vector<JobSpec> specs;
  for (int i = 0; i < 6; ++i) {
    JobSpec spec{.model = "digits", .seed = 100 + i, .class_labels = {i}};
    spec.guidance_scale = i % 2 ? 1.0 : 2.5;
    spec.sampler.steps = 2 + i;
    spec.sampler.sampler = i % 3 == 0   ? Sampler::kEdmEuler
                           : i % 3 == 1 ? Sampler::kHeun
                                        : Sampler::kEdmDpmSolver;
    specs.push_back(spec);
  }
  std::vector<std::vector<float>> alone;
  for (const JobSpec& spec : specs) {
    const auto job = Submit(*engine, spec);
    ASSERT_TRUE(job->Wait().ok());
    alone.push_back(job->images()[0]);
  }
  std::mt19937 random(3);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::pair<size_t, std::shared_ptr<Collector>>> jobs;
    for (int i = 0; i < 10; ++i) {
      const size_t which = random() % specs.size();
      jobs.emplace_back(which, Submit(*engine, specs[which]));
      if (i % 3 == 2) {  // company that leaves early
        JobId id = 0;
        Submit(*engine, {.model = "digits", .seed = random()}, &id);
        engine->Cancel(id);
      }
    }
    for (const auto& [which, job] : jobs) {
      ASSERT_TRUE(job->Wait().ok());
      const std::vector<float> pixels = job->images()[0];
      EXPECT_EQ(std::memcmp(pixels.data(), alone[which].data(), pixels.size() * sizeof(float)), 0)
          << "request " << which;
    }
  }
}

/// Adds up what evaluations took.
class Seconds : public EngineObserver {
 public:
  void OnEvaluation(const std::string&, const std::string&, int, int, double seconds) override {
    std::lock_guard lock(mutex_);
    sum_ += seconds;
  }
  double sum() {
    std::lock_guard lock(mutex_);
    return sum_;
  }

 private:
  std::mutex mutex_;
  double sum_ = 0;
};

// On a GPU each model has a queue of its own, and their evaluations overlap.
TEST_P(EngineTest, SameBytesBesideAnotherModel) {
  Seconds evaluating;
  const auto engine = Open({.max_rows = 8});
  ASSERT_TRUE(engine->Open("other digits", kDigits).ok());
  const auto spec = [](const std::string& model, int i) {
    JobSpec spec{.model = model, .seed = i, .class_labels = {i % 10}};
    spec.sampler.steps = 3 + 7 * i % 11;
    return spec;
  };
  constexpr int kJobs = 12;
  std::vector<std::vector<float>> alone;
  for (int i = 0; i < kJobs; ++i) {
    const auto job = Submit(*engine, spec("digits", i));
    ASSERT_TRUE(job->Wait().ok());
    alone.push_back(job->images()[0]);
  }
  engine->SetObserver(&evaluating);
  const auto begin = Clock::now();
  std::vector<std::shared_ptr<Collector>> jobs;
  for (int i = 0; i < kJobs; ++i)
    for (const char* model : {"digits", "other digits"})
      jobs.push_back(Submit(*engine, spec(model, i)));
  for (size_t i = 0; i < jobs.size(); ++i) {
    ASSERT_TRUE(jobs[i]->Wait().ok());
    EXPECT_EQ(jobs[i]->images()[0], alone[i / 2]) << "job " << i;
  }
  const double passed = std::chrono::duration<double>(Clock::now() - begin).count();
  EXPECT_GT(evaluating.sum(), 0);
  EXPECT_LE(evaluating.sum(), passed) << "what overlaps counts once";
}

/// A copy of the shipped model.
class ModelCopy {
 public:
  ModelCopy() {
    static int count = 0;
    path_ = fs::temp_directory_path() / fmt::format("denoised-model-{}-{}", getpid(), count++);
    fs::copy(kDigits, path_, fs::copy_options::recursive);
  }
  ~ModelCopy() { fs::remove_all(path_); }
  ModelCopy(const ModelCopy&) = delete;
  ModelCopy& operator=(const ModelCopy&) = delete;

  const fs::path& path() const { return path_; }

  /// The embedding of class `label` becomes NaN.
  void BreakClass(int label) {
    const fs::path file = path_ / "unet/diffusion_pytorch_model.safetensors";
    const auto weights = Safetensors::Open(file);
    ASSERT_TRUE(weights.ok()) << weights.status();
    std::map<std::string, Tensor> tensors = weights->tensors();
    Tensor& table = tensors.at("class_embedding.weight");
    std::vector<float> values = table.ToFloats();
    const int64_t features = table.dim(1);
    std::fill_n(values.begin() + label * features, features, NAN);
    table = Tensor::HostF32(table.shape(), values);
    const absl::Status written = WriteSafetensors(file, tensors, weights->metadata());
    ASSERT_TRUE(written.ok()) << written;
  }

 private:
  fs::path path_;
};

/// Counts images that were not finite.
class NonfiniteImages : public EngineObserver {
 public:
  void OnEvaluation(const std::string&, const std::string&, int, int, double) override {}
  void OnNonfiniteImage(const std::string& model, const std::string&) override {
    EXPECT_EQ(model, "digits");
    ++count;
  }
  std::atomic<int> count{0};
};

/// What --check asks: too few steps for a sampler are its own number instead.
TEST_P(EngineTest, DrawsAtDefaults) {
  ModelCopy model;
  model.BreakClass(5);
  auto engine = Open({.max_rows = 8}, model.path());
  EXPECT_EQ(DrawAtDefaults(*engine, "digits", 1, 4), absl::OkStatus()) << "class 0 alone";
  EXPECT_TRUE(absl::IsDataLoss(DrawAtDefaults(*engine, "digits", 2, 4))) << "classes 0 and 5";
  EXPECT_TRUE(absl::IsNotFound(DrawAtDefaults(*engine, "faces", 1)));

  std::ofstream(model.path() / "scheduler/scheduler_config.json")
      << R"({"_class_name": "PNDMScheduler", "num_train_timesteps": 20})";
  ASSERT_TRUE(engine->Open("pndm", model.path()).ok());
  EXPECT_EQ(DrawAtDefaults(*engine, "pndm", 1, 3), absl::OkStatus());
}

TEST_P(EngineTest, AnImageThatIsNotFiniteEndsItsJobAlone) {
  constexpr int kBroken = 3;
  ModelCopy model;
  model.BreakClass(kBroken);
  NonfiniteImages observer;
  auto engine = Open({.max_rows = 8}, model.path());
  engine->SetObserver(&observer);
  JobSpec good{.model = "digits", .seed = 5, .count = 2, .class_labels = {1, 2}};
  good.sampler.steps = 20;
  const auto alone = Submit(*engine, good);
  ASSERT_TRUE(alone->Wait().ok());

  // The second image of the bad job, beside two good jobs in the same evaluations.
  JobSpec bad{.model = "digits", .seed = 70, .count = 2, .class_labels = {1, kBroken}};
  bad.guidance_scale = 1;
  bad.sampler.steps = 6;
  const auto before = Submit(*engine, good), broken = Submit(*engine, bad),
             after = Submit(*engine, good);
  const absl::Status status = broken->Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("model 'digits' drew an image that is not finite: image 1 (seed 71, class "
                        "label 3) has NaN or infinity since evaluation 1 of 6"));
  EXPECT_EQ(broken->images().count(1), 0u);
  EXPECT_EQ(observer.count, 1);
  for (const auto& job : {before, after}) {
    ASSERT_TRUE(job->Wait().ok());
    EXPECT_EQ(job->images(), alone->images());
  }
  const EngineStats stats = engine->Stats()[0];
  EXPECT_EQ(stats.active_images + stats.queued_images, 0);
  EXPECT_GT(stats.wasted_rows[static_cast<size_t>(EndReason::kFailed)], 0u);

  // A preview would show it, so the job ends there.
  bad.previews = true;
  bad.preview_every = 2;
  const auto previewed = Submit(*engine, bad);
  EXPECT_EQ(previewed->Wait().code(), absl::StatusCode::kDataLoss);
  EXPECT_LT(previewed->progress(), 2 * 6);
  EXPECT_TRUE(previewed->images().empty());
}

TEST_P(EngineTest, AnImageThatIsNotFiniteIsDeliveredWhereThatIsAllowed) {
  ModelCopy model;
  model.BreakClass(3);
  NonfiniteImages observer;
  auto engine = Open({.max_rows = 4, .allow_nonfinite = true}, model.path());
  engine->SetObserver(&observer);
  JobSpec bad{.model = "digits", .seed = 70, .class_labels = {3}};
  bad.previews = true;
  bad.sampler.steps = 4;
  const auto job = Submit(*engine, bad);
  ASSERT_TRUE(job->Wait().ok());
  EXPECT_EQ(job->previews(), 3);
  EXPECT_TRUE(std::isnan(job->images().at(0)[0]));
  EXPECT_EQ(observer.count, 1);
}

TEST_P(EngineTest, CancelDeadlineAndQueueLimit) {
  const auto engine = Open({.max_rows = 2, .max_queued_images = 5});
  JobSpec slow{.model = "digits", .count = 4};
  slow.sampler.steps = 200;
  JobId id = 0;
  const auto cancelled = Submit(*engine, slow, &id);
  std::vector<FieldViolation> violations;
  const auto more = engine->Resolve(slow, &violations);
  EXPECT_EQ(engine->Submit(*more, std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kResourceExhausted);
  engine->Cancel(id);
  EXPECT_EQ(cancelled->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(engine->QueuedImages("digits"), 0) << "its place in the queue is free at once";
  slow.count = 1;
  const auto other = Submit(*engine, slow, &id);  // an engine without jobs would try
  slow.deadline = Clock::now() + std::chrono::milliseconds(50);
  Estimate estimate;
  const absl::Status refused =
      engine->Submit(*engine->Resolve(slow, &violations), std::make_shared<Collector>(), &estimate)
          .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDeadlineExceeded) << refused;
  EXPECT_GT(estimate.total_seconds.value(), 0.05) << "as measured at warm-up";
}

TEST_P(EngineTest, NoRequestIsLargerThanWhatMayWait) {
  const auto engine = Open({.max_rows = 2, .max_queued_images = 5});
  EXPECT_EQ(engine->Find("digits")->max_count, 5);
  std::vector<FieldViolation> violations;
  engine->Resolve({.model = "digits", .count = 6}, &violations).IgnoreError();
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "count");
  EXPECT_EQ(violations[0].description, "is 6; use 1 to 5");
}

TEST_P(EngineTest, StatsTellWhatIsThere) {
  const auto engine = Open({.max_rows = 2});
  JobSpec spec{.model = "digits", .count = 3, .guidance_scale = 1};
  spec.sampler.steps = 100;
  spec.priority = Priority::kBatch;
  JobId id = 0;
  const auto job = Submit(*engine, spec, &id);
  while (engine->Stats()[0].evaluations < 2) std::this_thread::yield();
  EngineStats stats = engine->Stats()[0];
  EXPECT_EQ(stats.active_images, 2);
  EXPECT_EQ(stats.queued_requests[static_cast<size_t>(Priority::kBatch)], 1);
  EXPECT_EQ(stats.queued_images_by_priority[static_cast<size_t>(Priority::kBatch)], 1);
  EXPECT_EQ(stats.oldest_wait_seconds, 0) << "it has started";
  EXPECT_EQ(stats.rows, 2 * stats.evaluations);
  engine->Cancel(id, EndReason::kDisconnected);
  EXPECT_EQ(job->Wait().code(), absl::StatusCode::kCancelled);
  stats = engine->Stats()[0];
  EXPECT_EQ(stats.active_images + stats.queued_images, 0);
  EXPECT_EQ(stats.wasted_rows[static_cast<size_t>(EndReason::kDisconnected)], stats.rows);
}

TEST_P(EngineTest, StatsTellOfAModelUntilItIsUnloaded) {
  const auto engine = Open({.max_rows = 2});
  JobSpec spec{.model = "digits", .count = 3, .guidance_scale = 1};
  spec.sampler.steps = 100;
  JobId id = 0;
  const auto job = Submit(*engine, spec, &id);
  while (engine->Stats()[0].evaluations < 2) std::this_thread::yield();
  std::thread closing([&] { EXPECT_TRUE(engine->Close("digits").ok()); });
  while (engine->Find("digits")->state != ModelState::kUnloading) std::this_thread::yield();
  const std::vector<EngineStats> stats = engine->Stats();
  engine->Cancel(id, EndReason::kCancelled);
  EXPECT_EQ(job->Wait().code(), absl::StatusCode::kCancelled) << "it ended before the look at it";
  closing.join();
  ASSERT_EQ(stats.size(), 1u);
  EXPECT_EQ(stats[0].active_images, 2);
  EXPECT_EQ(stats[0].queued_images, 1);
  EXPECT_GT(stats[0].slots, 0);
  EXPECT_TRUE(engine->Stats().empty());
}

TEST_P(EngineTest, DrainFinishesWhatItCanAndRefusesTheRest) {
  auto engine = Open();
  JobSpec spec{.model = "digits"};
  spec.sampler.steps = 3;
  const auto quick = Submit(*engine, spec);
  engine->Drain(Clock::now() + std::chrono::minutes(1));
  EXPECT_TRUE(quick->Wait().ok());
  std::vector<FieldViolation> violations;
  const auto late = engine->Resolve(spec, &violations);
  EXPECT_EQ(engine->Submit(*late, std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kUnavailable);

  engine = Open();
  spec.sampler.steps = 900;
  spec.count = 64;
  const auto endless = Submit(*engine, spec);
  engine->Drain(Clock::now() + std::chrono::milliseconds(100));
  EXPECT_EQ(endless->Wait().code(), absl::StatusCode::kUnavailable);
}

TEST_P(EngineTest, ImagesThatLoseTheirSlotsKeepTheirBits) {
  const auto engine = Open({.max_rows = 2, .keep_evaluations = 0});
  JobSpec slow{.model = "digits", .seed = 8, .count = 2, .class_labels = {4}};
  slow.guidance_scale = 1;
  // Longer than six interruptions, which take a GPU more of its evaluations.
  slow.sampler.steps = GetParam() == "cpu" ? 24 : 400;
  slow.sampler.sampler = Sampler::kEdmDpmSolver;  // multistep: it has registers to lose
  const auto alone = Submit(*engine, slow);
  ASSERT_TRUE(alone->Wait().ok());

  const auto interrupted = Submit(*engine, slow);
  JobSpec quick{.model = "digits", .priority = Priority::kInteractive};
  quick.guidance_scale = 1;
  quick.sampler.steps = 2;
  for (const int count : {1, 2, 1, 2, 1, 2}) {
    const int before = interrupted->progress();
    ASSERT_LT(before + 3, 2 * slow.sampler.steps) << "done before all interruptions";
    while (interrupted->progress() < before + 3) std::this_thread::yield();
    quick.count = count;
    EXPECT_TRUE(Submit(*engine, quick)->Wait().ok());
  }
  ASSERT_TRUE(interrupted->Wait().ok());
  EXPECT_GE(engine->Stats()[0].parked_images, 6u);
  EXPECT_EQ(interrupted->images(), alone->images());
}

TEST_P(EngineTest, AStormOfCancelsLeavesNothingBehind) {
  const auto engine =
      Open({.max_rows = 4, .max_queued_requests = 20'000, .max_queued_images = 40'000});
  std::vector<FieldViolation> violations;
  const auto resolve = [&](uint64_t seed, int count, int steps, double guidance) {
    JobSpec spec{.model = "digits", .seed = seed, .count = count, .class_labels = {2}};
    spec.guidance_scale = guidance;
    spec.sampler.steps = steps;
    return *engine->Resolve(spec, &violations);
  };
  std::vector<EffectiveJob> kept;
  std::vector<std::map<int, std::vector<float>>> idle;
  for (int i = 0; i < 4; ++i) {
    kept.push_back(resolve(i, 1, 2 + i % 2, i % 2 ? 3 : 1));
    const auto alone = std::make_shared<Collector>();
    ASSERT_TRUE(engine->Submit(kept.back(), alone).ok());
    ASSERT_TRUE(alone->Wait().ok());
    idle.push_back(alone->images());
  }
  const EffectiveJob doomed = resolve(99, 2, 40, 1);

  constexpr int kThreads = 4, kCancels = 2500;
  std::mutex mutex;
  std::vector<std::shared_ptr<Collector>> ended;
  std::vector<std::pair<int, std::shared_ptr<Collector>>> survivors;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<JobId> open;
      const auto cancel_one = [&] {
        std::swap(open[random() % open.size()], open.back());
        engine->Cancel(open.back());
        open.pop_back();
      };
      for (int i = 0; i < kCancels; ++i) {
        const auto collector = std::make_shared<Collector>();
        const auto id = engine->Submit(doomed, collector);
        ASSERT_TRUE(id.ok()) << id.status();
        open.push_back(*id);
        if (open.size() > 16 || random() % 2) cancel_one();
        std::lock_guard lock(mutex);
        ended.push_back(collector);
        if (i % 800 != 0) continue;
        const int which = static_cast<int>(random() % kept.size());
        survivors.emplace_back(which, std::make_shared<Collector>());
        ASSERT_TRUE(engine->Submit(kept[which], survivors.back().second).ok());
      }
      while (!open.empty()) cancel_one();
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& collector : ended)
    EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kCancelled);
  for (const auto& [which, collector] : survivors) {
    ASSERT_TRUE(collector->Wait().ok());
    EXPECT_EQ(collector->images(), idle[which]);
  }
  EXPECT_EQ(ended.size(), size_t{kThreads} * kCancels);
  const EngineStats stats = engine->Stats()[0];
  EXPECT_EQ(stats.queued_images, 0);
  EXPECT_EQ(stats.active_images, 0);
  EXPECT_EQ(stats.queued_requests, (std::array<int, kPriorities>{}));
}

TEST_P(EngineTest, LoadingAModelDoesNotStopTheOthers) {
  const auto engine = Open();
  JobSpec spec{.model = "digits", .seed = 1, .class_labels = {3}};
  spec.sampler.steps = 1000;
  JobId id;
  const auto job = Submit(*engine, spec, &id);
  while (job->progress() == 0) std::this_thread::yield();
  const int before = job->progress();
  ASSERT_TRUE(engine->Open("second", kDigits).ok());
  // Taking memory and warming up are parts between which the others have their turns.
  EXPECT_GT(job->progress(), before + 1);
  engine->Cancel(id);
}

// For ThreadSanitizer above all. The server's catalog is tested likewise, on a fake engine.
TEST_P(EngineTest, ModelsComeAndGoWhileOthersDraw) {
  const std::string tiny = DENOISED_SOURCE_DIR "/tests/models/goldens/run_edm_euler";
  const auto engine = Open({.max_rows = 4}, tiny);
  const auto spec_of = [](const std::string& model) {
    JobSpec spec{.model = model, .seed = 5};
    spec.sampler.steps = 3;
    return spec;
  };
  const auto reference = Submit(*engine, spec_of("digits"));
  ASSERT_TRUE(reference->Wait().ok());

  std::atomic<bool> stop{false};
  std::atomic<int> loaded{0}, closed{0}, drawn{0};
  const std::vector<std::string> names = {"digits", "a", "b"};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {  // loads and closes, also what the other thread loads or closes
      for (std::mt19937 random(t); !stop;) {
        const absl::Status opened = engine->Open(random() % 2 ? "a" : "b", tiny);
        EXPECT_TRUE(opened.ok() || absl::IsInvalidArgument(opened)) << opened;  // the name is taken
        loaded += opened.ok();
        const absl::Status gone = engine->Close(random() % 2 ? "a" : "b");
        EXPECT_TRUE(gone.ok() || absl::IsNotFound(gone) || absl::IsFailedPrecondition(gone))
            << gone;
        closed += gone.ok();
      }
    });
    threads.emplace_back([&, t] {
      for (std::mt19937 random(t); !stop;) {
        std::vector<FieldViolation> violations;
        const auto job = engine->Resolve(spec_of(names[random() % names.size()]), &violations);
        if (!job.ok()) continue;  // it is not there, or not ready
        const auto collector = std::make_shared<Collector>();
        const absl::Status queued = engine->Submit(*job, collector).status();
        EXPECT_TRUE(queued.ok() || absl::IsNotFound(queued)) << queued;
        if (!queued.ok()) continue;
        EXPECT_TRUE(collector->Wait().ok()) << "a model that is closed finishes what it has";
        EXPECT_EQ(collector->images(), reference->images());
        ++drawn;
      }
    });
  }
  threads.emplace_back([&] {
    while (!stop) {
      for (const auto& model : engine->Models()) EXPECT_FALSE(model->name.empty());
      for (const EngineStats& stats : engine->Stats()) EXPECT_GE(stats.queued_images, 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  const auto begin = Clock::now();
  const auto enough = [&] { return loaded > 20 && closed > 20 && drawn > 40; };
  while (Clock::now() - begin < std::chrono::seconds(2) ||
         (!enough() && Clock::now() - begin < std::chrono::seconds(60))) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(enough()) << loaded << " " << closed << " " << drawn;
  const auto again = Submit(*engine, spec_of("digits"));
  ASSERT_TRUE(again->Wait().ok());
  EXPECT_EQ(again->images(), reference->images());
}

TEST_P(EngineTest, AnImageWithASeedOfItsOwnIsTheImageOfThatSeed) {
  const auto engine = Open();
  const auto many = Submit(
      *engine, {.model = "digits", .seeds = {40, 3, 40}, .count = 3, .class_labels = {5, 6, 7}});
  const auto alone = Submit(*engine, {.model = "digits", .seed = 3, .class_labels = {6}});
  ASSERT_TRUE(many->Wait().ok());
  ASSERT_TRUE(alone->Wait().ok());
  EXPECT_EQ(many->images().at(1), alone->images().at(0));
  EXPECT_NE(many->images().at(0), many->images().at(2));  // the same noise, another class
}

TEST_P(EngineTest, AModelThatIsClosedFinishesWhatItHas) {
  const auto engine = Open();
  JobSpec spec{.model = "digits", .seed = 7, .count = 3, .class_labels = {5}};
  const auto reference = Submit(*engine, spec);
  ASSERT_TRUE(reference->Wait().ok());

  const auto running = Submit(*engine, spec);
  std::vector<FieldViolation> violations;
  const auto late = engine->Resolve(spec, &violations);
  ASSERT_TRUE(late.ok());
  EXPECT_TRUE(engine->Close("digits").ok());
  ASSERT_TRUE(running->Wait().ok());
  EXPECT_EQ(running->images(), reference->images());
  EXPECT_EQ(engine->Find("digits"), nullptr);
  EXPECT_EQ(engine->Submit(*late, running).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine->Close("digits").code(), absl::StatusCode::kNotFound);

  // What a backend of its own packs computes the same bits.
  ASSERT_TRUE(engine->Open("digits", kDigits).ok());
  EXPECT_EQ(engine->Submit(*late, running).status().code(), absl::StatusCode::kNotFound)
      << "it was resolved for another model of the same name";
  const auto again = Submit(*engine, spec);
  ASSERT_TRUE(again->Wait().ok());
  EXPECT_EQ(again->images(), reference->images());
}

TEST(Memory, AModelThatDoesNotFitIsRefusedWithWhatItNeedsAndWhatIsFree) {
  FakeClock clock;
  const auto engine =
      CreateEngine({}, [&clock](const BackendOptions&) -> absl::StatusOr<std::unique_ptr<Backend>> {
        DENOISED_ASSIGN_OR_RETURN(auto cpu, OpenBackend({.device = "cpu"}));
        auto backend =
            std::make_unique<SimulatedBackend>(std::move(cpu), &clock, [](int) { return 0.001; });
        backend->memory_limit = 10'000'000;
        return backend;
      });
  ASSERT_TRUE(engine.ok()) << engine.status();
  const absl::Status status = (*engine)->Open("digits", kDigits);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("3940801 parameters need 15759748 bytes"), HasSubstr("10000000 are free")));
}

/// The shipped model on a device that fails when told to.
class FailingDevice : public ::testing::Test {
 protected:
  void Open(double watchdog_seconds) {
    auto engine =
        CreateEngine({.max_rows = 2, .watchdog_seconds = watchdog_seconds},
                     [this](const BackendOptions&) -> absl::StatusOr<std::unique_ptr<Backend>> {
                       DENOISED_ASSIGN_OR_RETURN(auto cpu, OpenBackend({.device = "cpu"}));
                       auto backend = std::make_unique<SimulatedBackend>(std::move(cpu), &clock_,
                                                                         [](int) { return 0.001; });
                       backend->fault = [this] { return Fault(); };
                       backend->wait = [this] {
                         std::unique_lock lock(mutex_);
                         released_.wait(lock, [this] { return !hang_wait_; });
                       };
                       backend->pack = [this] {
                         std::unique_lock lock(mutex_);
                         ++packed_;
                         released_.wait(lock, [this] { return !hang_pack_; });
                         const auto delay = pack_delay_;
                         lock.unlock();
                         std::this_thread::sleep_for(delay);
                       };
                       return backend;
                     });
    EXPECT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    const absl::Status opened = engine_->Open("digits", kDigits);
    DENOISED_CHECK(opened.ok(), "{}", opened.ToString());
    std::vector<FieldViolation> violations;
    JobSpec spec{.model = "digits", .count = 2};
    spec.sampler.steps = 900;
    long_job_ = *engine_->Resolve(spec, &violations);
  }
  ~FailingDevice() override { Release(); }

  absl::Status Fault() {
    std::unique_lock lock(mutex_);
    released_.wait(lock, [this] { return !hang_; });
    const auto delay = delay_;
    lock.unlock();
    std::this_thread::sleep_for(delay);
    lock.lock();
    return error_;
  }
  void Release() {
    std::lock_guard lock(mutex_);
    hang_ = hang_wait_ = hang_pack_ = false;
    released_.notify_all();
  }
  std::shared_ptr<Collector> Submit() {
    auto collector = std::make_shared<Collector>();
    EXPECT_TRUE(engine_->Submit(long_job_, collector).ok());
    return collector;
  }
  /// Every job hears of it, new ones are refused, and the engine can be drained.
  void ExpectAllTold(const std::vector<std::shared_ptr<Collector>>& jobs, const char* why) {
    for (const auto& job : jobs) {
      const absl::Status status = job->Wait();
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(std::string(status.message()), HasSubstr(why));
    }
    EXPECT_THAT(std::string(engine_->Health().message()), HasSubstr(why));
    EXPECT_EQ(engine_->Submit(long_job_, std::make_shared<Collector>()).status().code(),
              absl::StatusCode::kUnavailable);
    engine_->Drain(Clock::now());
  }

  FakeClock clock_;
  std::mutex mutex_;
  std::condition_variable released_;
  bool hang_ = false;                   // every launch
  bool hang_wait_ = false;              // waiting for the device
  bool hang_pack_ = false;              // packing weights
  int packed_ = 0;                      // weights
  std::chrono::milliseconds delay_{0};  // before every launch
  std::chrono::milliseconds pack_delay_{0};
  absl::Status error_;
  std::unique_ptr<Engine> engine_;
  EffectiveJob long_job_;
};

TEST_F(FailingDevice, AnErrorIsFinalAndEveryClientIsTold) {
  Open(/*watchdog_seconds=*/60);
  const auto first = Submit(), second = Submit(), third = Submit();
  {
    std::lock_guard lock(mutex_);
    error_ = Internal("an illegal memory access was encountered");
  }
  ExpectAllTold({first, second, third}, "illegal memory access");
}

TEST_F(FailingDevice, AnEvaluationThatDoesNotReturnIsAnError) {
  Open(/*watchdog_seconds=*/4);
  const auto first = Submit(), second = Submit(), third = Submit();
  {
    std::lock_guard lock(mutex_);
    hang_ = true;
  }
  ExpectAllTold({first, second, third}, "did not return within 4 s");
  Release();  // what the device does later, nobody hears: OnDone came already, and once
}

TEST_F(FailingDevice, ALoadThatDoesNotReturnIsAnError) {
  Open(/*watchdog_seconds=*/4);
  {
    std::lock_guard lock(mutex_);
    hang_ = true;  // the warm-up
  }
  const absl::Status opened = engine_->Open("second", kDigits);
  constexpr char kWhy[] = "a part of loading or removing a model did not return within 4 s";
  EXPECT_EQ(opened.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(opened.message()), HasSubstr(kWhy));
  EXPECT_EQ(engine_->Find("second")->state, ModelState::kFailed);
  ExpectAllTold({}, kWhy);
  EXPECT_TRUE(engine_->Close("digits").ok()) << "it asks nothing of a lost device";
}

TEST_F(FailingDevice, PackingThatDoesNotReturnIsAnError) {
  Open(/*watchdog_seconds=*/4);
  {
    std::lock_guard lock(mutex_);
    hang_pack_ = true;
  }
  const absl::Status opened = engine_->Open("second", kDigits);
  constexpr char kWhy[] = "a part of loading or removing a model did not return within 4 s";
  EXPECT_EQ(opened.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(opened.message()), HasSubstr(kWhy));
  EXPECT_EQ(engine_->Find("second")->state, ModelState::kFailed);
  EXPECT_EQ(engine_->Open("third", kDigits).code(), absl::StatusCode::kUnavailable) << "at once";
  ExpectAllTold({}, kWhy);
}

TEST_F(FailingDevice, PackingThatIsSlowButGoesOnIsNone) {
  Open(/*watchdog_seconds=*/4);
  {
    std::lock_guard lock(mutex_);
    pack_delay_ = std::chrono::milliseconds(5000 / packed_ + 1);  // per weight, as the last time
  }
  const auto begin = Clock::now();
  EXPECT_TRUE(engine_->Open("second", kDigits).ok());
  EXPECT_GT(Clock::now() - begin, std::chrono::seconds(5));
  EXPECT_TRUE(engine_->Health().ok()) << engine_->Health();
}

TEST_F(FailingDevice, ARemovalThatDoesNotReturnIsAnError) {
  Open(/*watchdog_seconds=*/4);
  ASSERT_TRUE(engine_->Open("second", kDigits).ok());
  {
    std::lock_guard lock(mutex_);
    hang_wait_ = true;
  }
  const auto job = Submit();
  EXPECT_TRUE(engine_->Close("second").ok()) << "it asks nothing more of a lost device";
  EXPECT_EQ(engine_->Find("second"), nullptr);
  ExpectAllTold({job}, "a part of loading or removing a model did not return within 4 s");
}

TEST_F(FailingDevice, EvaluationsThatAreSlowButReturnAreNone) {
  // Together more than the limit and the quarter of it between two looks, so that a watchdog that
  // took them for one evaluation would see it; each far less.
  Open(/*watchdog_seconds=*/5);
  const auto job = Submit();
  const auto begin = Clock::now();
  for (int i = 0; i < 9; ++i) {
    {
      std::lock_guard lock(mutex_);
      hang_ = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
    Release();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_GT(Clock::now() - begin, std::chrono::seconds(7));
  EXPECT_TRUE(engine_->Health().ok()) << engine_->Health();
}

// Together they take longer than the limit, and than its quarter more in which the watchdog looks;
// each takes far less, so that a machine that stands still for seconds is no hang either.
// Scheduling.NewSizesAreOpenedBetweenEvaluationsOfOthers has what is a part.
TEST_F(FailingDevice, SizesThatComeUpTogetherAreNoHang) {
  Open(/*watchdog_seconds=*/8);
  {
    std::lock_guard lock(mutex_);
    delay_ = std::chrono::milliseconds(500);
  }
  const auto begin = Clock::now();
  std::vector<std::shared_ptr<Collector>> jobs;
  for (int height = 8; height <= 92; height += 4) {
    JobSpec spec{.model = "digits", .seed = 1, .height = height, .width = 16};
    spec.guidance_scale = 1;
    spec.sampler.steps = 1;
    jobs.push_back(denoised::Submit(*engine_, spec));
  }
  for (const auto& job : jobs) EXPECT_TRUE(job->Wait().ok()) << job->Wait();
  EXPECT_GT(Clock::now() - begin, std::chrono::seconds(10));
  EXPECT_TRUE(engine_->Health().ok()) << engine_->Health();
  std::lock_guard lock(mutex_);
  delay_ = {};
}

INSTANTIATE_TEST_SUITE_P(Device, EngineTest, ::testing::Values("cpu", "cuda"),
                         [](const auto& info) { return info.param; });

/// A model directory to be damaged: a copy of the shipped one.
class BadModel : public ::testing::Test {
 protected:
  BadModel() {
    auto engine = Engine::Create({.device = "cpu", .max_rows = 2});
    EXPECT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  void SetField(const fs::path& file, const char* field, const nlohmann::json& value) {
    auto json = ReadJsonFile(root_ / file);
    ASSERT_TRUE(json.ok()) << json.status();
    (*json)[field] = value;
    std::ofstream(root_ / file) << json->dump();
  }
  std::string Refusal() {
    const absl::Status status = engine_->Open("bad", root_);
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(status.code() == absl::StatusCode::kInvalidArgument ||
                status.code() == absl::StatusCode::kNotFound)
        << status;
    EXPECT_EQ(engine_->Find("bad")->state, ModelState::kFailed);
    return std::string(status.message());
  }

  const fs::path kUnet = "unet/config.json", kScheduler = "scheduler/scheduler_config.json",
                 kIndex = "model_index.json", kWeights = "unet/diffusion_pytorch_model.safetensors";
  const ModelCopy copy_;
  const fs::path root_ = copy_.path();
  std::unique_ptr<Engine> engine_;
};

TEST_F(BadModel, MissingPieces) {
  EXPECT_THAT(std::string(engine_->Open("bad", root_ / "nowhere").message()), HasSubstr("nowhere"));
  fs::remove(root_ / kWeights);
  EXPECT_THAT(Refusal(), HasSubstr("diffusion_pytorch_model"));
  fs::remove_all(root_ / "scheduler");
  EXPECT_THAT(Refusal(), HasSubstr("scheduler"));
  fs::remove(root_ / kUnet);
  EXPECT_THAT(Refusal(), HasSubstr("config.json"));
}

TEST_F(BadModel, WeightsThatAreCutShort) {
  fs::resize_file(root_ / kWeights, fs::file_size(root_ / kWeights) - 7);
  EXPECT_THAT(Refusal(), HasSubstr("safetensors"));
  fs::resize_file(root_ / kWeights, 5);
  EXPECT_THAT(Refusal(), HasSubstr("safetensors"));
}

TEST_F(BadModel, WeightsThatDoNotFitTheConfig) {
  SetField(kUnet, "num_class_embeds", 12);
  EXPECT_THAT(Refusal(), HasSubstr("class_embedding.weight"));
  SetField(kUnet, "num_class_embeds", 11);
  SetField(kUnet, "block_out_channels", {32, 64, 64});
  EXPECT_THAT(Refusal(), HasSubstr("down_blocks.2"));
  SetField(kUnet, "block_out_channels", {32, 64, 128});
  SetField(kUnet, "add_attention", false);
  EXPECT_THAT(Refusal(), HasSubstr("mid_block.attentions"));
}

TEST_F(BadModel, ConfigsThatCannotBeHonoured) {
  SetField(kUnet, "act_fn", "tanh");
  EXPECT_THAT(Refusal(), HasSubstr("act_fn"));
  SetField(kUnet, "act_fn", "silu");
  SetField(kIndex, "scheduler", {"diffusers", "DDIMInverseScheduler"});
  EXPECT_THAT(Refusal(), HasSubstr("DDIMInverseScheduler"));
  SetField(kIndex, "scheduler", {"diffusers", "EDMEulerScheduler"});
  SetField(kIndex, "_denoised", {{"null_class", 99}});
  EXPECT_THAT(Refusal(), HasSubstr("model_index.json, _denoised: field 'null_class' is 99, but the "
                                   "model has 11 classes; name one from 0 to 10, or leave it out"));
  SetField(kIndex, "_denoised", {{"default_guidance_scale", 2}});
  EXPECT_THAT(Refusal(), HasSubstr("needs a null_class"));
  SetField(kIndex, "_denoised", {{"null_class", 10}});
  SetField(kIndex, "unet", {"diffusers", "UNet3DConditionModel"});
  EXPECT_THAT(Refusal(), HasSubstr("UNet3DConditionModel"));
}

// It takes the logarithm of a condition: EDM's may be negative, and DDIM's last is 0.
TEST_F(BadModel, AFourierEmbeddingNeedsConditionsAboveZero) {
  fs::remove_all(root_);
  fs::copy(Goldens() / "time_fourier", root_);
  int models = 0;
  const auto violations_with = [&](const nlohmann::json& scheduler) {
    std::ofstream(root_ / "scheduler_config.json") << scheduler.dump();
    const std::string name = fmt::format("fourier-{}", models++);
    const absl::Status opened = engine_->Open(name, root_);
    EXPECT_TRUE(opened.ok()) << opened;
    std::vector<FieldViolation> violations;
    EXPECT_TRUE(engine_->Resolve({.model = name}, &violations).ok());
    return violations;
  };
  for (const char* name : {"EDMEulerScheduler", "DDIMScheduler"}) {
    const auto violations = violations_with({{"_class_name", name}});
    ASSERT_EQ(violations.size(), 1u) << name;
    EXPECT_EQ(violations[0].field, "sampler");
    EXPECT_THAT(violations[0].description, HasSubstr("takes the logarithm"));
  }
  EXPECT_TRUE(violations_with({{"_class_name", "FlowMatchEulerDiscreteScheduler"}}).empty());
  EXPECT_TRUE(violations_with({{"_class_name", "DDIMScheduler"}, {"steps_offset", 1}}).empty());
}

// What a request gets that names no steps must be what it may ask for.
TEST_F(BadModel, DefaultStepsAreThoseThatTheSamplerCanDo) {
  auto engine = Engine::Create({.device = "cpu", .max_rows = 2, .max_evaluations = 50});
  ASSERT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
  const auto scheduler = [&](const char* name, const nlohmann::json& config, int default_steps) {
    SetField(kIndex, "scheduler", {"diffusers", name});
    std::ofstream(root_ / kScheduler) << config.dump();
    nlohmann::json ours = {{"null_class", 10}};
    if (default_steps) ours["default_steps"] = default_steps;
    SetField(kIndex, "_denoised", ours);
  };
  const auto steps_of = [&](const char* name) {
    const absl::Status opened = engine_->Open(name, root_);
    EXPECT_TRUE(opened.ok()) << opened;
    const JobSpec spec{.model = name};
    std::vector<FieldViolation> violations;
    EXPECT_TRUE(engine_->Resolve(spec, &violations).ok());
    for (const auto& [field, description] : violations) ADD_FAILURE() << field << description;
    return engine_->Find(name)->default_steps;
  };
  const nlohmann::json lcm = {{"_class_name", "LCMScheduler"}, {"original_inference_steps", 20}};
  scheduler("LCMScheduler", lcm, 50);
  const std::string refusal = Refusal();
  for (const char* said : {"model_index.json", "default_steps", "is 50", "lcm", "set it to 20"})
    EXPECT_THAT(refusal, HasSubstr(said));
  scheduler("LCMScheduler", lcm, 0);
  EXPECT_EQ(steps_of("lcm"), 20);
  EXPECT_EQ(engine_->Find("lcm")->max_steps, 20);
  // The first of 1000 steps would be at timestep 1000, of 0 to 999.
  scheduler("PNDMScheduler", {{"_class_name", "PNDMScheduler"}, {"steps_offset", 1}}, 0);
  steps_of("pndm");
  EXPECT_EQ(engine_->Find("pndm")->max_steps, 999);

  const nlohmann::json heun = {{"_class_name", "HeunDiscreteScheduler"}};
  scheduler("HeunDiscreteScheduler", heun, 26);
  EXPECT_THAT(Refusal(), HasSubstr("takes 51 evaluations; at most 50 are allowed; set it to 25"));
  // Not every count below is tried, which would take hours.
  const nlohmann::json many = {{"_class_name", "HeunDiscreteScheduler"},
                               {"num_train_timesteps", 20000},
                               {"beta_start", 5e-7},
                               {"beta_end", 1e-3}};
  scheduler("HeunDiscreteScheduler", many, 20000);
  EXPECT_THAT(Refusal(),
              HasSubstr("takes 39999 evaluations; at most 50 are allowed; set it to 25"));
  scheduler("HeunDiscreteScheduler", heun, 0);
  EXPECT_EQ(steps_of("heun"), 25) << "each but the last takes two evaluations";
  scheduler("HeunDiscreteScheduler", heun, 7);
  EXPECT_EQ(steps_of("heun of 7"), 7);
  scheduler("ScoreSdeVeScheduler", {{"_class_name", "ScoreSdeVeScheduler"}, {"correct_steps", 4}},
            0);
  EXPECT_EQ(steps_of("score"), 10) << "each takes five evaluations";
  for (const char* const field : {"sigma_data", "sigma_max"}) {
    scheduler("EDMEulerScheduler", {{"_class_name", "EDMEulerScheduler"}, {field, 1e300}}, 0);
    EXPECT_THAT(Refusal(),
                HasSubstr((root_ / kScheduler).string() + ": no sampler can follow this schedule"))
        << field;
  }
  const fs::path beside = root_ / "scheduler_config.json";
  fs::rename(root_ / kScheduler, beside);
  fs::remove(root_ / "scheduler");
  EXPECT_THAT(Refusal(), HasSubstr(beside.string() + ": no sampler can follow this schedule"));
}

// Its requests may name another sampler, and those that do not are told what is wrong. A default of
// one step would pass, but draw nothing.
TEST_F(BadModel, ASamplerAtFaultIsNotBlamedOnTheSteps) {
  struct Fault {
    const char* name;
    nlohmann::json fields;
    const char* field;
    const char* remedy;
  };
  const Fault faults[] = {
      {"UniPCMultistepScheduler", {{"lower_order_final", false}}, "solver_order", "use 1"},
      {"DDIMScheduler",
       {{"rescale_betas_zero_snr", true}, {"timestep_spacing", "linspace"}},
       "sampler",
       "use euler"}};
  for (const auto& [name, fields, field, remedy] : faults)
    for (const int steps : {0, 2, 2000}) {
      SCOPED_TRACE(fmt::format("{} {}", name, steps));
      nlohmann::json config = fields, ours = {{"null_class", 10}};
      config["_class_name"] = name;
      if (steps) ours["default_steps"] = steps;
      SetField(kIndex, "scheduler", {"diffusers", name});
      SetField(kIndex, "_denoised", ours);
      std::ofstream(root_ / kScheduler) << config.dump();
      const std::string model = fmt::format("{}{}", name, steps);
      const absl::Status opened = engine_->Open(model, root_);
      ASSERT_TRUE(opened.ok()) << opened;
      EXPECT_EQ(engine_->Find(model)->default_steps, steps == 0 ? 50 : std::min(steps, 1000));
      std::vector<FieldViolation> violations;
      EXPECT_TRUE(engine_->Resolve({.model = model}, &violations).ok());
      ASSERT_EQ(violations.size(), 1u);
      EXPECT_EQ(violations[0].field, field);
      EXPECT_THAT(violations[0].description, HasSubstr(remedy));
      JobSpec other{.model = model};
      other.sampler = {.sampler = Sampler::kEuler, .steps = 20};
      EXPECT_TRUE(engine_->Resolve(other, &violations).ok());
      EXPECT_TRUE(violations.empty()) << violations[0].field << " " << violations[0].description;
    }
}

TEST_F(BadModel, AGoodModelLoadsAfterABadOne) {
  SetField(kUnet, "norm_eps", -1);
  EXPECT_THAT(Refusal(), HasSubstr("norm_eps"));
  SetField(kUnet, "norm_eps", 1e-5);
  EXPECT_TRUE(engine_->Open("bad", root_).ok()) << "a failed name may be used again";
  EXPECT_EQ(engine_->Find("bad")->state, ModelState::kReady);
}

TEST(EngineCreate, RefusesWhatIsNotThere) {
  const auto unknown = Engine::Create({.device = "tpu"});
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.status().message()), HasSubstr("tpu"));
  const auto none = Engine::Create({.device = "cuda", .devices = {77}});
  EXPECT_FALSE(none.ok());
  EXPECT_FALSE(Engine::Create({.device = "cpu", .max_rows = 1}).ok());
}

}  // namespace
}  // namespace denoised
