// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/step_batcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>

#include "tests/batching/fake_denoiser.h"

namespace denoised {
namespace {

using Clock = JobQueue::Clock;

struct Heard {
  bool started = false;
  std::vector<int> progress;
  std::vector<std::pair<int, int>> previews;  // image, evaluation
  std::map<int, std::vector<float>> images;
  std::optional<absl::Status> done;
};

class Recorder : public JobListener {
 public:
  explicit Recorder(std::shared_ptr<Heard> heard) : heard_(std::move(heard)) {}
  void OnStarted() override { heard_->started = true; }
  void OnProgress(int done, int total) override {
    EXPECT_LE(done, total);
    heard_->progress.push_back(done);
  }
  void OnPreview(const ImageResult& image, int evaluation) override {
    heard_->previews.emplace_back(image.index, evaluation);
  }
  void OnImage(ImageResult image) override {
    EXPECT_FALSE(heard_->done.has_value());
    heard_->images[image.index] = image.pixels.ToFloats();
  }
  void OnDone(const absl::Status& status, const JobTiming&) override {
    EXPECT_FALSE(heard_->done.has_value()) << "OnDone comes once";
    heard_->done = status;
  }

 private:
  std::shared_ptr<Heard> heard_;
};

class Observed : public EngineObserver {
 public:
  void OnEvaluation(const std::string& model, const std::string&, int rows, int bucket,
                    double seconds) override {
    EXPECT_LE(rows, bucket);
    EXPECT_GE(seconds, 0);
    evaluated.emplace_back(model, rows);
  }
  std::vector<std::pair<std::string, int>> evaluated;
};

SchedulerConfig Scheduler(const std::string& json) {
  auto config = SchedulerConfig::Parse(nlohmann::json::parse(json), "scheduler_config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

class StepBatcherTest : public ::testing::Test {
 protected:
  StepBatcherTest() {
    auto backend = OpenBackend({.device = "cpu"});
    EXPECT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    Restart();
  }

  void Restart(int max_rows = 6) {
    MakeBatcher();
    BatchedModel model{.name = "fake",
                       .denoiser = std::make_shared<FakeDenoiser>(6, 3, 5),
                       .null_label = 4,
                       .max_rows = max_rows,
                       .slots = max_rows,
                       .max_evaluations = 100};
    EXPECT_TRUE(batcher_->AddModel(model, 6, 6).ok());
    observed_.evaluated.clear();
  }

  void MakeBatcher() {
    batcher_.reset();
    queue_.reset();
    admission_ = std::make_unique<Admission>(Admission::Limits());
    queue_ = std::make_unique<JobQueue>(*admission_);
    batcher_ =
        std::make_unique<StepBatcher>(*backend_, *admission_, *queue_, &observed_,
                                      StepBatcher::Options{.keep_evaluations = keep_evaluations_});
  }

  EffectiveJob Job(const SchedulerConfig& scheduler, SamplerParams params, uint64_t seed,
                   int count = 1, double guidance = 1) {
    EffectiveJob job;
    auto plan = scheduler.Compile(params);
    EXPECT_TRUE(plan.ok()) << plan.status();
    job.plan = std::make_shared<const StepPlan>(*plan);
    job.steps = plan->steps;
    job.evaluations = static_cast<int>(plan->evaluations.size());
    job.spec = {.model = "fake", .seed = seed, .count = count, .guidance_scale = guidance};
    job.guided = guidance > 1;
    job.spec.height = job.spec.width = 6;
    for (int i = 0; i < count; ++i)
      job.spec.class_labels.push_back(static_cast<int>((seed + i) % 4));
    return job;
  }

  std::shared_ptr<Heard> Submit(const EffectiveJob& job) {
    auto heard = std::make_shared<Heard>();
    const auto id = queue_->Submit(job, std::make_shared<Recorder>(heard));
    EXPECT_TRUE(id.ok()) << id.status();
    last_id_ = *id;
    return heard;
  }

  void Cancel(JobId id) {
    queue_->End(id, Cancelled("the request was cancelled"), EndReason::kCancelled);
    queue_->EndDueJobs();
  }

  void RunAll() {
    for (int turn = 0; batcher_->busy(); ++turn) {
      ASSERT_LT(turn, 10000);
      ASSERT_TRUE(batcher_->Step().ok());
    }
  }

  SchedulerConfig ddpm_ = Scheduler(R"({"_class_name": "DDPMScheduler"})");
  SchedulerConfig edm_ = Scheduler(R"({"_class_name": "EDMEulerScheduler"})");
  std::unique_ptr<Backend> backend_;
  Observed observed_;
  std::unique_ptr<Admission> admission_;
  std::unique_ptr<JobQueue> queue_;
  std::unique_ptr<StepBatcher> batcher_;
  JobId last_id_ = 0;
  int keep_evaluations_ = 4;
};

TEST_F(StepBatcherTest, RunsEveryEvaluationOnceAndReportsInOrder) {
  EffectiveJob job = Job(ddpm_, {.sampler = Sampler::kDdim, .steps = 7}, 3, /*count=*/2);
  job.spec.previews = true;
  job.spec.preview_every = 3;
  const auto heard = Submit(job);
  RunAll();
  ASSERT_TRUE(heard->done.has_value());
  EXPECT_TRUE(heard->done->ok());
  EXPECT_TRUE(heard->started);
  EXPECT_EQ(heard->images.size(), 2u);
  EXPECT_EQ(heard->progress, (std::vector<int>{2, 4, 6, 8, 10, 12, 14}));
  EXPECT_THAT(heard->previews, ::testing::ElementsAre(std::pair(0, 3), std::pair(1, 3),
                                                      std::pair(0, 6), std::pair(1, 6)));
  EXPECT_EQ(observed_.evaluated.size(), 7u);
  EXPECT_EQ(observed_.evaluated[0].second, 2);
}

// Whichever slot the image has that ends the job.
TEST_F(StepBatcherTest, ImagesThatEndTogetherAreDeliveredBeforeAnErrorEndsTheJob) {
  constexpr int kBroken = 3;
  for (const std::vector<int>& labels :
       {std::vector<int>{kBroken, 1, kBroken, 2}, {1, kBroken, 2, kBroken}}) {
    MakeBatcher();
    const auto denoiser = std::make_shared<FakeDenoiser>(6, 3, 5);
    denoiser->BreakClass(kBroken);
    ASSERT_TRUE(batcher_
                    ->AddModel({.name = "fake",
                                .denoiser = denoiser,
                                .null_label = 4,
                                .max_rows = 6,
                                .slots = 6,
                                .max_evaluations = 100},
                               6, 6)
                    .ok());
    EffectiveJob job = Job(edm_, {.sampler = Sampler::kEdmEuler, .steps = 1}, 1, /*count=*/4);
    job.spec.class_labels = labels;
    const auto heard = Submit(job);
    RunAll();
    ASSERT_TRUE(heard->done.has_value());
    EXPECT_EQ(heard->done->code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(heard->done->message()),
                ::testing::HasSubstr(labels[0] == kBroken ? "image 0 " : "image 1 "));
    EXPECT_EQ(heard->images.size(), 2u);
    for (const auto& [index, pixels] : heard->images) EXPECT_NE(labels[index], kBroken);
  }
}

TEST_F(StepBatcherTest, GuidanceTakesTwoRowsAndChangesTheImage) {
  const SamplerParams params{.sampler = Sampler::kEdmEuler, .steps = 4};
  const auto plain = Submit(Job(edm_, params, 1));
  RunAll();
  Restart();
  const auto guided = Submit(Job(edm_, params, 1, 1, 3.0));
  RunAll();
  EXPECT_EQ(observed_.evaluated[0].second, 2);
  EXPECT_NE(plain->images[0], guided->images[0]);
}

TEST_F(StepBatcherTest, MoreImagesThanRowsWaitForSlotsAndTakeTurns) {
  Restart(4);
  const SamplerParams params{.sampler = Sampler::kEdmEuler, .steps = 5};
  const auto large = Submit(Job(edm_, params, 10, 12));
  const auto small = Submit(Job(edm_, params, 99, 1));
  int turns = 0;
  while (!small->done) {
    ASSERT_TRUE(batcher_->Step().ok());
    ASSERT_LT(++turns, 100);
  }
  EXPECT_EQ(turns, 5) << "the small job shares the first slots with the large one";
  RunAll();
  EXPECT_EQ(large->images.size(), 12u);
  for (const auto& [model, rows] : observed_.evaluated) EXPECT_LE(rows, 4);
}

TEST_F(StepBatcherTest, CancelFreesTheSlotAtTheNextEvaluation) {
  Restart(2);
  const SamplerParams params{.sampler = Sampler::kEdmEuler, .steps = 50};
  const auto first = Submit(Job(edm_, params, 1, 2));
  const auto second = Submit(Job(edm_, {.sampler = Sampler::kEdmEuler, .steps = 2}, 5));
  ASSERT_TRUE(batcher_->Step().ok());
  EXPECT_EQ(admission_->Read("fake", Clock::now()).active_images, 2);
  Cancel(1);
  ASSERT_TRUE(first->done.has_value());
  EXPECT_EQ(first->done->code(), absl::StatusCode::kCancelled);
  const Admission::Totals totals = admission_->Read("fake", Clock::now());
  EXPECT_EQ(totals.active_images + totals.queued_images[static_cast<size_t>(Priority::kNormal)], 1);
  RunAll();
  EXPECT_TRUE(second->done->ok());
  EXPECT_TRUE(first->images.empty());
  Cancel(1);  // ids that are over are ignored
}

TEST_F(StepBatcherTest, DeadlineEndsTheJobWithWhatItReached) {
  EffectiveJob job = Job(edm_, {.sampler = Sampler::kEdmEuler, .steps = 50}, 1);
  job.spec.deadline = Clock::now() + std::chrono::milliseconds(50);
  const auto late = Submit(job);
  const auto other = Submit(Job(edm_, {.sampler = Sampler::kEdmEuler, .steps = 3}, 2));
  ASSERT_TRUE(batcher_->Step().ok());
  std::this_thread::sleep_until(*job.spec.deadline);
  RunAll();
  EXPECT_EQ(late->done->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(other->done->ok());
}

TEST_F(StepBatcherTest, EverySizeRunsAndTheOldestIdleOneMakesRoom) {
  MakeBatcher();
  BatchedModel model{.name = "fake",
                     .denoiser = std::make_shared<FakeDenoiser>(6, 3, 0),
                     .max_rows = 4,
                     .slots = 4,
                     .max_evaluations = 100};
  ASSERT_TRUE(batcher_->AddModel(model, 6, 6).ok());
  const size_t one_size = batcher_->SlotBytes("fake");
  for (int height = 7; height <= 24; ++height) {
    EffectiveJob job = Job(edm_, {.sampler = Sampler::kEdmEuler, .steps = 3}, 1);
    job.spec.class_labels.clear();
    job.spec.height = height;
    const auto heard = Submit(job);
    RunAll();
    ASSERT_TRUE(heard->done->ok()) << *heard->done;
    EXPECT_EQ(heard->images[0].size(), size_t(height) * 6 * 3);
  }
  EXPECT_LT(batcher_->SlotBytes("fake"), 14 * one_size) << "idle sizes were let go";
  EXPECT_GT(batcher_->ActivationBytes("fake"), 0u);
}

TEST_F(StepBatcherTest, ARemovedModelLeavesNothingBehind) {
  auto denoiser = std::make_shared<FakeDenoiser>(6, 3, 0);
  const std::weak_ptr<FakeDenoiser> weights = denoiser;
  ASSERT_TRUE(batcher_
                  ->AddModel({.name = "other",
                              .denoiser = std::move(denoiser),
                              .max_rows = 4,
                              .slots = 4,
                              .max_evaluations = 100},
                             6, 6)
                  .ok());
  for (bool more = true; more;) {
    const auto warm = batcher_->WarmUp("other");
    ASSERT_TRUE(warm.ok()) << warm.status();
    more = *warm;
  }
  EffectiveJob job = Job(edm_, {.sampler = Sampler::kEdmEuler, .steps = 3}, 1);
  job.spec.class_labels.clear();
  job.spec.model = "other";
  const auto heard = Submit(job);
  const std::string other = "other", fake = "fake";
  EXPECT_FALSE(queue_->WaitForNone(&other, Clock::now()));
  EXPECT_TRUE(queue_->WaitForNone(&fake, Clock::now()));
  RunAll();
  ASSERT_TRUE(heard->done->ok()) << *heard->done;
  EXPECT_TRUE(queue_->WaitForNone(&other, Clock::now()));
  EXPECT_FALSE(weights.expired());
  EXPECT_TRUE(batcher_->RemoveModel("other").ok());
  EXPECT_TRUE(weights.expired());
  EXPECT_EQ(batcher_->SlotBytes("other"), 0u);
  const auto kept = Submit(Job(edm_, {.sampler = Sampler::kEdmEuler, .steps = 3}, 2));
  RunAll();
  EXPECT_TRUE(kept->done->ok());
}

/// The point of it all: a request's bytes do not depend on its company.
TEST_F(StepBatcherTest, SameBytesAloneAndInRandomCompany) {
  struct Case {
    SchedulerConfig scheduler;
    SamplerParams params;
    double guidance;
  };
  std::vector<Case> cases;
  for (const Sampler sampler : ddpm_.samplers())
    for (const double guidance : {1.0, 2.5})
      cases.push_back(
          {ddpm_, {.sampler = sampler, .steps = 3 + static_cast<int>(cases.size()) % 6}, guidance});
  cases.push_back({edm_, {.sampler = Sampler::kHeun, .steps = 6, .s_churn = 20.0}, 1.0});
  cases.push_back({edm_, {.sampler = Sampler::kEdmDpmSolver, .steps = 9}, 4.0});

  std::vector<std::vector<float>> alone;
  for (size_t i = 0; i < cases.size(); ++i) {
    Restart();
    const auto heard =
        Submit(Job(cases[i].scheduler, cases[i].params, 1000 + i, 1, cases[i].guidance));
    RunAll();
    alone.push_back(heard->images[0]);
    for (const float value : alone.back()) ASSERT_TRUE(std::isfinite(value));
  }

  keep_evaluations_ = 0;
  std::mt19937 random(7);
  uint64_t parked = 0;
  for (int round = 0; round < 10; ++round) {
    Restart(2 + static_cast<int>(random() % 8));
    std::vector<std::pair<size_t, std::shared_ptr<Heard>>> running;
    std::vector<JobId> doomed;
    for (int event = 0; event < 60; ++event) {
      const size_t which = random() % cases.size();
      const Case& chosen = cases[which];
      switch (random() % 4) {
        case 0:  // a request that must come out as when it was alone
          running.emplace_back(which, Submit(Job(chosen.scheduler, chosen.params, 1000 + which, 1,
                                                 chosen.guidance)));
          break;
        case 1: {  // company that takes slots from others, and will be cancelled
          EffectiveJob company = Job(chosen.scheduler, chosen.params, random(), 2, chosen.guidance);
          company.spec.priority = Priority::kInteractive;
          Submit(company);
          doomed.push_back(last_id_);
          break;
        }
        case 2:
          if (!doomed.empty()) Cancel(doomed[random() % doomed.size()]);
          break;
        default:
          ASSERT_TRUE(batcher_->Step().ok());
      }
    }
    RunAll();
    parked += admission_->Read("fake", Clock::now()).parked_images;
    ASSERT_FALSE(running.empty());
    for (const auto& [which, heard] : running) {
      ASSERT_TRUE(heard->done->ok());
      EXPECT_EQ(std::memcmp(heard->images[0].data(), alone[which].data(),
                            alone[which].size() * sizeof(float)),
                0)
          << "case " << which << " in round " << round;
    }
  }
  EXPECT_GT(parked, 20u) << "images of every sampler lost their slots and got others";
}

}  // namespace
}  // namespace denoised
