// SPDX-License-Identifier: Apache-2.0
// The way of requests through workers and engine, without gRPC between: this is what
// ThreadSanitizer can see whole.

#include "server/jobs/generation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <map>
#include <random>
#include <thread>

#include "engine/images/formats.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/api/request_preparer.h"
#include "server/jobs/jobs.h"
#include "server/jobs/memory_budget.h"
#include "server/jobs/worker_pool.h"
#include "server/models/catalog.h"
#include "server/security/client_load.h"
#include "server/status/status_details.h"
#include "server/telemetry/metrics.h"
#include "tests/eventually.h"
#include "tests/server/fake_engine.h"
#include "tests/server/peak_memory.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

/// Reads a generation as a stream does and holds what it is told against the contract.
class StrictWatcher : public GenerationWatcher {
 public:
  void Follow(std::shared_ptr<Generation> generation) {
    {
      std::lock_guard lock(mutex_);
      generation_ = std::move(generation);
    }
    OnNews();
  }

  void OnNews() override {
    std::lock_guard lock(mutex_);
    if (!generation_ || status_) return;
    while (true) {
      Generation::News news = generation_->Next(this, sequence_);
      if (news.event == nullptr) {
        if (news.end) End(*news.end);
        return;
      }
      Check(*news.event);
    }
  }

  grpc::Status Wait() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(ended_.wait_for(lock, 1min, [this] { return status_.has_value(); }));
    return status_.value_or(grpc::Status::CANCELLED);
  }
  /// Called once, when the generation has ended.
  void set_on_end(std::function<void()> on_end) { on_end_ = std::move(on_end); }
  int previews() {
    std::lock_guard lock(mutex_);
    return previews_;
  }
  int progresses() const { return progresses_; }
  std::vector<int> places() {
    std::lock_guard lock(mutex_);
    return places_;
  }
  const std::map<int, std::string>& images() const { return images_; }
  const v1::CompletedEvent& completed() const { return completed_; }

 private:
  void Check(const EventLog::Event& event) {
    EXPECT_GT(event.sequence(), sequence_);
    EXPECT_TRUE(sequence_ > 0 || event.has_queued());
    sequence_ = event.sequence();
    if (event.has_queued()) {
      EXPECT_FALSE(started_) << "it does not wait any more";
      count_ = event.queued().params().count();
      places_.push_back(event.queued().position());
      return;
    }
    EXPECT_EQ(!started_, event.has_started());
    started_ = true;
    EXPECT_FALSE(completed_.has_params()) << "an event after the last";
    if (event.has_progress()) {
      EXPECT_GT(event.progress().evaluations_done(), progress_);
      EXPECT_LE(event.progress().evaluations_done(), event.progress().evaluations_total());
      progress_ = event.progress().evaluations_done();
      ++progresses_;
    } else if (event.has_preview()) {
      EXPECT_EQ(images_.count(event.preview().image().index()), 0u) << "a preview after its image";
      ++previews_;
    } else if (event.has_image()) {
      const v1::Image& image = event.image().image();
      EXPECT_TRUE(images_.emplace(image.index(), image.encoded()).second);
    } else if (event.has_completed()) {
      completed_ = event.completed();
    }
  }

  void End(const grpc::Status& status) {
    EXPECT_EQ(status.ok(), completed_.has_params());
    if (status.ok()) {
      EXPECT_EQ(images_.size(), size_t(count_));
    }
    if (on_end_) on_end_();
    status_ = status;
    ended_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable ended_;
  std::shared_ptr<Generation> generation_;
  uint64_t sequence_ = 0;
  bool started_ = false;
  int count_ = 0, progress_ = 0, progresses_ = 0, previews_ = 0;
  std::vector<int> places_;
  std::map<int, std::string> images_;
  v1::CompletedEvent completed_;
  std::function<void()> on_end_;
  std::optional<grpc::Status> status_;
};

class GenerationTest : public ::testing::Test {
 protected:
  explicit GenerationTest(const JobRetention& retention = {}, int workers = 4,
                          double max_previews_per_second = 30)
      : catalog_({.models = {{"digits", "models/digits"}}}, &engine_, &metrics_),
        preparer_(&catalog_, &engine_, {}, &decoding_, &queue_wait_),
        jobs_({.engine = &engine_,
               .preparer = &preparer_,
               .workers = &workers_,
               .client_load = &client_load_,
               .metrics = &metrics_,
               .queue_wait = &queue_wait_,
               .drain = &drain_,
               .max_previews_per_second = max_previews_per_second},
              retention),
        workers_(workers) {
    EXPECT_TRUE(catalog_.LoadListed("digits").ok());
    engine_.SetObserver(&metrics_);
  }
  // The engine posts to the workers until its jobs have ended.
  ~GenerationTest() override { engine_.Drain(std::chrono::steady_clock::now()); }

  struct Call {
    std::shared_ptr<StrictWatcher> watcher = std::make_shared<StrictWatcher>();
    std::shared_ptr<Generation> generation;
    grpc::Status refusal;

    ~Call() { Leave(); }
    void Leave() {
      if (generation) generation->Leave(watcher.get());
    }
    grpc::Status Wait() { return generation ? watcher->Wait() : refusal; }
  };

  std::unique_ptr<Call> Begin(const v1::GenerationParams& params,
                              std::optional<std::chrono::milliseconds> limit = {},
                              const std::string& client = "anonymous") {
    auto call = std::make_unique<Call>();
    v1::PreviewOptions preview;
    std::optional<std::chrono::steady_clock::time_point> deadline;
    if (limit) deadline = std::chrono::steady_clock::now() + *limit;
    call->generation = jobs_.Begin({.params = params,
                                    .preview = &preview,
                                    .together = false,
                                    .caller = {.name = client},
                                    .arrival = std::chrono::steady_clock::now(),
                                    .deadline = deadline},
                                   call->watcher, &call->refusal);
    if (call->generation) call->watcher->Follow(call->generation);
    return call;
  }

  static v1::GenerationParams Params(const std::string& request_id, uint64_t seed = 1) {
    v1::GenerationParams params;
    params.set_request_id(request_id);
    params.set_seed(seed);
    params.add_conditions()->set_class_label(3);
    return params;
  }
  static v1::GenerationParams Surviving(const std::string& request_id) {
    v1::GenerationParams params = Params(request_id);
    params.set_disconnect_policy(v1::DISCONNECT_POLICY_CONTINUE);
    return params;
  }
  v1::JobState StateOf(const std::string& request_id, const std::string& client = "anonymous") {
    grpc::Status refusal;
    const auto generation = jobs_.Find(client, request_id, &refusal);
    return generation ? jobs_.Describe(*generation).state() : v1::JOB_STATE_UNSPECIFIED;
  }

  Metrics metrics_;
  ClientLoad client_load_{0, 0};
  MemoryBudget decoding_{1 << 20};
  FakeEngine engine_;
  Catalog catalog_;
  QueueWait queue_wait_;
  DrainProgress drain_;
  RequestPreparer preparer_;
  Jobs jobs_;
  WorkerPool workers_;
};

TEST_F(GenerationTest, DeliversInOrder) {
  v1::GenerationParams params;
  params.set_count(5);
  engine_.PauseAfter(2);  // so that previews come before their images
  const auto call = Begin(params);
  EXPECT_TRUE(Eventually([&] { return call->watcher->previews() > 0; }));
  engine_.Pause(false);
  const grpc::Status status = call->Wait();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(GenerationTest, PlacesInTheQueueAreToldUntilItStarts) {
  engine_.Pause(true);
  const auto call = Begin(Params("a"));
  std::vector<int> places = {0};
  for (const int place : {3, 2, 1}) {
    engine_.TellPlaces({.jobs_ahead = place});
    places.push_back(place);
    EXPECT_TRUE(Eventually([&] { return call->watcher->places() == places; })) << place;
  }
  // Who comes late is told the latest alone.
  const auto late = Begin(Params("a"));
  EXPECT_TRUE(Eventually([&] { return late->watcher->places() == std::vector{1}; }));
  engine_.Pause(false);
  EXPECT_TRUE(call->Wait().ok());
  EXPECT_TRUE(late->Wait().ok());
}

class PreviewLimitTest : public GenerationTest {
 protected:
  explicit PreviewLimitTest(double limit = 1e-3) : GenerationTest({}, 4, limit) {}
  /// How many of two images come if the engine waits for the first `at_least` of each.
  int Previews(int at_least) {
    v1::GenerationParams params;
    params.set_count(2);
    params.set_steps(100);
    engine_.Pause(true);
    const auto call = Begin(params);
    for (int each = 1; each <= at_least; ++each) {
      engine_.PauseAfter(1);
      EXPECT_TRUE(Eventually([&] { return call->watcher->previews() >= 2 * each; })) << each;
    }
    engine_.Pause(false);
    EXPECT_TRUE(call->Wait().ok());
    return call->watcher->previews();
  }
};
class NoPreviewLimitTest : public PreviewLimitTest {
 protected:
  NoPreviewLimitTest() : PreviewLimitTest(0) {}
};

TEST_F(PreviewLimitTest, TheFirstOfEachImageComes) { EXPECT_EQ(Previews(1), 2); }
TEST_F(NoPreviewLimitTest, PreviewsComeAsTheyAreDrawn) { EXPECT_GE(Previews(10), 20); }

TEST_F(GenerationTest, ADrainRefusesNewJobs) {
  drain_.state = DrainState::kLameDuck;
  EXPECT_TRUE(Begin({})->Wait().ok());
  drain_.state = DrainState::kDraining;
  EXPECT_EQ(Begin({})->Wait().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(GenerationTest, JobsAreCountedByModelAndState) {
  EXPECT_TRUE(Begin(Params("done"))->Wait().ok());
  engine_.Pause(true);
  const auto waiting = Begin(Params("waiting"));
  const auto counts = jobs_.CountByState();
  EXPECT_EQ(counts,
            (std::map<std::pair<std::string, v1::JobState>, int>{
                {{"digits", v1::JOB_STATE_SUCCEEDED}, 1}, {{"digits", v1::JOB_STATE_QUEUED}, 1}}));
}

TEST_F(GenerationTest, TheLastWatcherThatLeavesCancels) {
  engine_.Pause(true);
  const auto first = Begin(Params("a")), second = Begin(Params("a"));
  ASSERT_EQ(first->generation, second->generation);
  first->Leave();
  EXPECT_EQ(engine_.cancels(), 0);
  second->Leave();
  EXPECT_EQ(engine_.cancels(), 1);
  EXPECT_TRUE(Eventually([&] { return StateOf("a") == v1::JOB_STATE_CANCELLED; }));
}

TEST_F(GenerationTest, ACancelAfterTheDeadlineIsTheDeadline) {
  engine_.Pause(true);
  const auto call = Begin({}, 1ms);
  std::this_thread::sleep_for(2ms);
  call->generation->Cancel(EndReason::kCancelled);
  EXPECT_EQ(call->Wait().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(GenerationTest, WhatSurvivesIsDrawnWithoutWatchersAndBeyondTheDeadline) {
  engine_.Pause(true);
  auto call = Begin(Surviving("a"), 1ms);
  call.reset();
  std::this_thread::sleep_for(5ms);
  engine_.Pause(false);
  ASSERT_TRUE(Eventually([&] { return StateOf("a") == v1::JOB_STATE_SUCCEEDED; }));
  EXPECT_EQ(engine_.cancels(), 0);
  const auto again = Begin(Surviving("a"));
  EXPECT_TRUE(again->Wait().ok());
  EXPECT_EQ(again->watcher->images().size(), 1u);
}

TEST_F(GenerationTest, TheSameRequestIsDrawnOnce) {
  engine_.Pause(true);
  const auto first = Begin(Params("a")), second = Begin(Params("a"));
  engine_.Pause(false);
  EXPECT_TRUE(first->Wait().ok());
  EXPECT_TRUE(second->Wait().ok());
  const int evaluations = engine_.evaluations();
  const auto late = Begin(Params("a"));
  EXPECT_TRUE(late->Wait().ok());
  EXPECT_EQ(engine_.evaluations(), evaluations);
  EXPECT_EQ(first->watcher->images(), second->watcher->images());
  EXPECT_EQ(first->watcher->images(), late->watcher->images());
}

TEST_F(GenerationTest, AnotherRequestOfTheSameIdIsRefused) {
  const auto first = Begin(Params("a", 1));
  const auto second = Begin(Params("a", 2));
  EXPECT_EQ(second->generation, nullptr);
  EXPECT_EQ(second->refusal.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_THAT(second->refusal.error_message(), HasSubstr("params.seed: 1 -> 2"));
  EXPECT_TRUE(first->Wait().ok());

  v1::GenerationParams with_noise = Params("b");
  with_noise.mutable_init_image()->set_encoded(std::string(1 << 20, 'a'));
  const auto third = Begin(with_noise);
  with_noise.mutable_init_image()->set_encoded(std::string(1 << 20, 'b'));
  engine_.Pause(true);
  const auto bad_image = third->Wait();  // not a picture: refused, so the id is free
  EXPECT_EQ(bad_image.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(StateOf("b"), v1::JOB_STATE_UNSPECIFIED);
}

TEST_F(GenerationTest, UploadsAreComparedToo) {
  engine_.Pause(true);
  v1::GenerationParams params = Params("a");
  v1::Tensor& noise = *params.mutable_initial_noise();
  noise.set_data_type(v1::DATA_TYPE_FLOAT32);
  for (const int extent : {32, 32, 1}) noise.add_shape(extent);
  noise.set_data(std::string(32 * 32 * 4, '\0'));
  const auto first = Begin(params), same = Begin(params);
  EXPECT_EQ(first->generation, same->generation);
  (*noise.mutable_data())[5] = 1;
  const auto other = Begin(params);
  EXPECT_EQ(other->refusal.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_THAT(other->refusal.error_message(), HasSubstr("initial_noise"));
}

/// Changes the first 16 bytes and keeps libstdc++'s std::hash, which is MurmurHash64A: a change of
/// the first word is made good in the second.
std::string CollideInStdHash(std::string bytes) {
  constexpr uint64_t kMultiplier = 0xc6a4a7935bd1e995, kSeed = 0xc70f6907;
  uint64_t inverse = kMultiplier;  // modulo 2^64, by Newton's method
  for (int i = 0; i < 6; ++i) inverse *= 2 - kMultiplier * inverse;
  const auto fold = [](uint64_t value) { return value ^ (value >> 47); };  // its own inverse
  const auto mix = [&](uint64_t word) { return fold(word * kMultiplier) * kMultiplier; };
  const auto unmix = [&](uint64_t mixed) { return fold(mixed * inverse) * inverse; };

  uint64_t words[2];
  std::memcpy(words, bytes.data(), sizeof(words));
  const uint64_t start = kSeed ^ (bytes.size() * kMultiplier);
  const uint64_t state = (start ^ mix(words[0])) * kMultiplier;
  const uint64_t changed = (start ^ mix(++words[0])) * kMultiplier;
  words[1] = unmix(changed ^ state ^ mix(words[1]));
  std::memcpy(bytes.data(), words, sizeof(words));
  return bytes;
}

TEST_F(GenerationTest, UploadsThatCollideInAFastHashAreToldApart) {
  engine_.Pause(true);
  v1::GenerationParams params = Params("a");
  v1::Tensor& image = *params.mutable_init_image()->mutable_tensor();
  image.set_data_type(v1::DATA_TYPE_UINT8);
  for (const int extent : {32, 32, 1}) image.add_shape(extent);
  image.set_data(std::string(32 * 32, 'a'));
  const auto first = Begin(params);
  ASSERT_NE(first->generation, nullptr);
  const std::string other = CollideInStdHash(image.data());
  ASSERT_NE(other, image.data());
#ifdef __GLIBCXX__
  ASSERT_EQ(std::hash<std::string>{}(other), std::hash<std::string>{}(image.data()));
#endif
  image.set_data(other);
  EXPECT_EQ(Begin(params)->refusal.error_code(), grpc::StatusCode::ALREADY_EXISTS);
}

TEST_F(GenerationTest, UploadsAreComparedWithoutACopy) {
  v1::GenerationParams params = Params("a");
  v1::Tensor& image = *params.mutable_init_image()->mutable_tensor();
  image.set_data_type(v1::DATA_TYPE_UINT8);
  image.set_data(std::string(128 << 20, 'a'));
  EXPECT_LT(PeakGrowth([&] {
              const grpc::Status status = Begin(params)->Wait();
              EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
            }),
            64 << 20);
}

/// What is not given differs from what is given as zero.
TEST_F(GenerationTest, RequestsAreComparedByWhatIsGiven) {
  engine_.Pause(true);
  v1::GenerationParams params = Params("a");
  const auto first = Begin(params);
  params.set_eta(0);
  EXPECT_EQ(Begin(params)->refusal.error_code(), grpc::StatusCode::ALREADY_EXISTS);
}

/// Its models leave while requests are on their way to them.
class LeavingEngine : public FakeEngine {
 public:
  absl::StatusOr<EffectiveJob> Resolve(const JobSpec& spec,
                                       std::vector<FieldViolation>* violations) const override {
    ++resolves;
    if (leave_at_resolve) return NotFound("there is no model \"{}\"", spec.model);
    return FakeEngine::Resolve(spec, violations);
  }
  absl::StatusOr<JobId> Submit(EffectiveJob job, std::shared_ptr<JobListener>, Estimate*) override {
    return NotFound("there is no model \"{}\"", job.spec.model);
  }

  bool leave_at_resolve = false;
  mutable int resolves = 0;
};

TEST_F(GenerationTest, AModelThatKeepsBeingReplacedIsTriedThreeTimes) {
  for (const bool at_resolve : {true, false}) {
    LeavingEngine engine;
    engine.leave_at_resolve = at_resolve;
    Catalog catalog({.models = {{"digits", "models/digits"}}}, &engine, &metrics_);
    ASSERT_TRUE(catalog.LoadListed("digits").ok());
    RequestPreparer preparer(&catalog, &engine, {}, &decoding_, &queue_wait_);
    Jobs jobs({.engine = &engine,
               .preparer = &preparer,
               .workers = &workers_,
               .client_load = &client_load_,
               .metrics = &metrics_,
               .queue_wait = &queue_wait_,
               .drain = &drain_,
               .max_previews_per_second = 0},
              {});
    grpc::Status refusal;
    const auto watcher = std::make_shared<StrictWatcher>();
    const v1::GenerationParams params = Params("a");
    const auto generation =
        jobs.Begin({.params = params, .preview = nullptr, .together = false}, watcher, &refusal);
    ASSERT_NE(generation, nullptr);
    const std::optional<grpc::Status> end = generation->end();
    generation->Leave(watcher.get());
    ASSERT_TRUE(end.has_value());
    EXPECT_EQ(end->error_code(), grpc::StatusCode::FAILED_PRECONDITION) << end->error_message();
    EXPECT_EQ(ReasonOf(*end), "MODEL_UNLOADING");
    EXPECT_EQ(engine.resolves, 3);
  }
}

TEST_F(GenerationTest, UploadsAreUnpackedOnlyWhenThereIsMemory) {
  engine_.Pause(true);
  v1::GenerationParams params = Params("a");
  auto picture = EncodeFile(Tensor::Host({100, 100, 1}, DType::kF32), FileFormat::kPng, 90, {});
  ASSERT_TRUE(picture.ok());
  params.mutable_init_image()->set_encoded(*picture);
  MemoryBudget::Lease others;
  ASSERT_TRUE(decoding_.Reserve(decoding_.bytes() - 50'000, &others).ok());
  const grpc::Status refusal = Begin(params)->Wait();
  EXPECT_EQ(refusal.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refusal.error_message(), HasSubstr("params.init_image.encoded"));
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(refusal.error_details()));
  EXPECT_TRUE(std::any_of(details.details().begin(), details.details().end(), [](const auto& any) {
    return any.template Is<google::rpc::RetryInfo>();
  }));
  EXPECT_EQ(decoding_.reserved(), decoding_.bytes() - 50'000) << "a refusal holds memory";
  others = {};
  const auto call = Begin(params);
  EXPECT_EQ(StateOf("a"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(decoding_.reserved(), 0) << "the engine counts what it was given";
}

TEST_F(GenerationTest, ClientsDoNotSeeEachOther) {
  engine_.Pause(true);
  const auto mine = Begin(Params("a", 1), {}, "me"), yours = Begin(Params("a", 2), {}, "you");
  ASSERT_NE(mine->generation, nullptr);
  ASSERT_NE(yours->generation, nullptr);
  EXPECT_NE(mine->generation, yours->generation);
  grpc::Status refusal;
  EXPECT_EQ(jobs_.Find("someone", "a", &refusal), nullptr);
  EXPECT_EQ(refusal.error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(GenerationTest, ACancelledJobIsBegunAgain) {
  engine_.Pause(true);
  const auto first = Begin(Params("a"));
  first->generation->Cancel(EndReason::kCancelled);
  const auto second = Begin(Params("a"));  // the engine may not even have ended the first
  EXPECT_NE(first->generation, second->generation);
  engine_.Pause(false);
  EXPECT_EQ(first->Wait().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(second->Wait().ok());
  EXPECT_EQ(StateOf("a"), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(GenerationTest, AFailedJobIsBegunAgain) {
  for (const bool late : {false, true}) {  // what failed it: the engine, or its deadline
    SCOPED_TRACE(late);
    const std::string id = late ? "late" : "broken";
    engine_.Pause(true);
    const auto first = late ? Begin(Params(id), 1ms) : Begin(Params(id));
    if (!late) {
      ASSERT_TRUE(Eventually([&] { return engine_.QueuedImages("digits") == 1; }));
      engine_.FailJobs(DataLoss("it drew an image that is not finite"));
    }
    EXPECT_EQ(first->Wait().error_code(),
              late ? grpc::StatusCode::DEADLINE_EXCEEDED : grpc::StatusCode::DATA_LOSS);
    ASSERT_TRUE(Eventually([&] { return StateOf(id) == v1::JOB_STATE_FAILED; }));
    const auto second = Begin(Params(id));
    ASSERT_NE(second->generation, nullptr) << second->refusal.error_message();
    EXPECT_NE(first->generation, second->generation);
    engine_.Pause(false);
    EXPECT_TRUE(second->Wait().ok());
    EXPECT_EQ(second->watcher->images().size(), 1u);
    EXPECT_EQ(StateOf(id), v1::JOB_STATE_SUCCEEDED);
  }
}

TEST_F(GenerationTest, NothingIsKeptOfWhatNobodyCanAskFor) {
  engine_.Pause(true);  // so that it is not over before it is counted
  const auto call = Begin({});
  EXPECT_EQ(jobs_.CountByState().size(), 1u);
  engine_.Pause(false);
  EXPECT_TRUE(call->Wait().ok());
  EXPECT_TRUE(jobs_.CountByState().empty());
  EXPECT_TRUE(Eventually([&] { return call->generation->bytes() == 0; })) << "read and still held";
  EXPECT_EQ(jobs_.bytes(), 0u);
}

TEST_F(GenerationTest, ALostDeviceIsNoDrain) {
  for (const bool draining : {false, true}) {
    engine_.Pause(true);
    const auto call = Begin({});
    ASSERT_TRUE(Eventually([&] { return engine_.QueuedImages("digits") == 1; }));
    if (draining) drain_.state = DrainState::kDraining;
    engine_.FailJobs(Unavailable("the last device is lost"));
    engine_.Pause(false);
    EXPECT_EQ(ReasonOf(call->Wait()), draining ? "DRAINING" : "DEVICE_LOST");
  }
}

/// What a slow reader has yet to read takes memory, although nobody else can ask for it.
TEST_F(GenerationTest, WhatCallsStillHoldIsCounted) {
  const v1::GenerationParams params;
  Call call;  // its watcher reads nothing
  call.generation = jobs_.Begin({.params = params, .preview = nullptr, .together = false},
                                call.watcher, &call.refusal);
  ASSERT_NE(call.generation, nullptr);
  EXPECT_TRUE(Eventually([&] { return call.generation->end().has_value(); }));
  EXPECT_TRUE(Eventually([&] { return jobs_.CountByState().empty(); }));
  EXPECT_GT(call.generation->bytes(), 0u);
  EXPECT_EQ(jobs_.bytes(), call.generation->bytes());
  call.Leave();
  call.generation.reset();
  EXPECT_TRUE(Eventually([&] { return jobs_.bytes() == 0; }));
}

TEST_F(GenerationTest, ProgressIsToldTenTimesASecond) {
  engine_.set_evaluation_cost(1ms);
  v1::GenerationParams params;
  params.set_steps(400);
  const auto start = std::chrono::steady_clock::now();
  const auto call = Begin(params);
  ASSERT_TRUE(call->Wait().ok());
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_GE(call->watcher->progresses(), 4);
  // It also goes with the start, the previews and the image.
  EXPECT_LE(call->watcher->progresses(), 10 * seconds + call->watcher->previews() + 3);
}

TEST_F(GenerationTest, TheTimelineHasEveryMilestoneInOrder) {
  v1::GenerationParams params = Params("a");
  params.set_count(2);
  params.set_steps(25);
  params.set_include_timings(true);
  const auto call = Begin(params);
  ASSERT_TRUE(call->Wait().ok());
  std::string story;
  double last = 0;
  for (const v1::TimelineEntry& entry : call->watcher->completed().timeline().entries()) {
    EXPECT_GE(entry.seconds(), last);
    last = entry.seconds();
    story += v1::TimelineEntry::Milestone_Name(entry.milestone()).substr(10, 1);
  }
  EXPECT_EQ(story.substr(0, 2), "QA");
  EXPECT_EQ(std::count(story.begin(), story.end(), 'E'), 5);  // evaluations 10, 20, 30, 40, 50
  EXPECT_EQ(std::count(story.begin(), story.end(), 'D'), 2);
  EXPECT_EQ(story.size(), 9u);
  EXPECT_LE(last, call->watcher->completed().timing().total_seconds());
}

class OneWorkerTest : public GenerationTest {
 protected:
  OneWorkerTest() : GenerationTest({}, 1) {}
};

TEST_F(OneWorkerTest, InteractiveJobsAreEncodedBeforeBatchJobs) {
  std::promise<void> drawn;
  workers_.Post(Priority::kInteractive, "", [&] { drawn.get_future().wait(); });
  v1::GenerationParams params = Params("batch");
  params.set_count(32);
  params.set_priority(v1::PRIORITY_BATCH);
  const auto batch = Begin(params);
  const auto drawn_all = [&] {
    return engine_.Stats()[0].active_images == 0 && engine_.QueuedImages("digits@1") == 0;
  };
  // All images wait for the worker before the interactive job comes.
  ASSERT_TRUE(Eventually(drawn_all));
  params = Params("interactive");
  params.set_priority(v1::PRIORITY_INTERACTIVE);
  const auto interactive = Begin(params);
  std::atomic<int> encoded{-1};
  interactive->watcher->set_on_end([&] { encoded = batch->generation->Describe().images_done(); });
  ASSERT_TRUE(Eventually(drawn_all));
  drawn.set_value();
  EXPECT_TRUE(interactive->Wait().ok());
  EXPECT_LE(encoded, 8) << "of 32 that were there before";
  EXPECT_TRUE(batch->Wait().ok());
}

class RetentionTest : public GenerationTest {
 protected:
  RetentionTest() : GenerationTest({.time = 20ms}) {}
};

TEST_F(RetentionTest, ResultsGoWhenTheirTimeIsOver) {
  ASSERT_TRUE(Begin(Params("a"))->Wait().ok());
  EXPECT_TRUE(Eventually([&] {
    jobs_.Expire();
    return StateOf("a") == v1::JOB_STATE_UNSPECIFIED;
  }));
  EXPECT_TRUE(Eventually([&] { return jobs_.bytes() == 0; }));
}

class LastingRetentionTest : public GenerationTest {
 protected:
  LastingRetentionTest() : GenerationTest({.time = 1h, .max_bytes = 40'000}) {}
};

TEST_F(LastingRetentionTest, ResultsStayForTheirTime) {
  ASSERT_TRUE(Begin(Params("a"))->Wait().ok());
  jobs_.Expire();
  EXPECT_EQ(StateOf("a"), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(LastingRetentionTest, TheOldestGoWhenTheyTakeTooMuch) {
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE(Begin(Params("job" + std::to_string(i)))->Wait().ok());
    EXPECT_TRUE(Eventually([&] { return jobs_.bytes() <= 40'000; }));
  }
  EXPECT_GT(jobs_.bytes(), 20'000u);
  EXPECT_EQ(StateOf("job0"), v1::JOB_STATE_UNSPECIFIED);
  EXPECT_EQ(StateOf("job39"), v1::JOB_STATE_SUCCEEDED);
  grpc::Status refusal;
  EXPECT_EQ(jobs_.Find("anonymous", "job0", &refusal), nullptr);
  EXPECT_THAT(refusal.error_message(), HasSubstr("a result is kept for"));
}

TEST_F(LastingRetentionTest, WhatStillRunsTakesRoomFromWhatIsKept) {
  ASSERT_TRUE(Begin(Params("kept"))->Wait().ok());
  const size_t kept = jobs_.bytes();
  engine_.Pause(true);
  std::vector<std::unique_ptr<Call>> running;
  while (jobs_.bytes() <= 40'000 && running.size() < 2000) {
    running.push_back(Begin(Params("running" + std::to_string(running.size()))));
    jobs_.Expire();
  }
  EXPECT_EQ(StateOf("kept"), v1::JOB_STATE_UNSPECIFIED);
  EXPECT_GT(jobs_.bytes() + kept, 40'000u) << "it went while there was room";
  EXPECT_EQ(StateOf("running0"), v1::JOB_STATE_QUEUED);
}

TEST_F(GenerationTest, JobsAreListedFromTheLatest) {
  engine_.Pause(true);
  std::vector<std::unique_ptr<Call>> calls;
  for (const char* id : {"b", "c", "a"}) calls.push_back(Begin(Params(id), {}, "me"));
  calls.push_back(Begin(Params("d"), {}, "you"));
  calls.push_back(Begin(Params("e"), {}, "yours"));
  constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  constexpr int64_t kMost = 1 << 20;  // bytes
  const auto ids = [](const v1::ListJobsResponse& listed) {
    std::string ids;
    for (const v1::Job& job : listed.jobs()) ids += job.request_id();
    return ids;
  };
  EXPECT_EQ(ids(jobs_.List("me", 10, kAll, kMost)), "acb");
  EXPECT_EQ(ids(jobs_.List("you", 10, kAll, kMost)), "d");
  EXPECT_EQ(ids(jobs_.List("nobody", 10, kAll, kMost)), "");
  EXPECT_EQ(ids(jobs_.List(std::nullopt, 10, kAll, kMost)), "edacb");
  EXPECT_EQ(jobs_.List("me", 10, kAll, kMost).next_page_token(), "");
  EXPECT_EQ(jobs_.List("you", 10, kAll, kMost).jobs(0).client(), "you");

  const v1::ListJobsResponse first = jobs_.List("me", 2, kAll, kMost);
  EXPECT_EQ(ids(first), "ac");
  // What begins between two pages is in neither of them, and moves nothing from one to the other.
  calls.push_back(Begin(Params("f"), {}, "me"));
  const v1::ListJobsResponse second =
      jobs_.List("me", 2, std::stoull(first.next_page_token()), kMost);
  EXPECT_EQ(ids(second), "b");
  EXPECT_EQ(second.next_page_token(), "");
}

TEST_F(GenerationTest, ManyAtOnceWithRandomCancels) {
  engine_.set_evaluation_cost(100us);
  std::vector<std::thread> clients;
  std::atomic<int> ok{0}, cancelled{0}, taken{0};
  for (int client = 0; client < 4; ++client) {
    clients.emplace_back([&, client] {
      std::mt19937 random(client);
      for (int round = 0; round < 40; ++round) {
        v1::GenerationParams params;
        params.set_count(1 + random() % 4);
        params.set_steps(1 + random() % 20);
        if (random() % 3 == 0) params.set_request_id("shared");
        const auto call = Begin(params);
        if (call->generation == nullptr) {
          EXPECT_EQ(call->refusal.error_code(), grpc::StatusCode::ALREADY_EXISTS);
          ++taken;
          continue;
        }
        if (random() % 2 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
          call->generation->Cancel(EndReason::kCancelled);
        }
        const grpc::Status status = call->Wait();
        if (status.ok()) ++ok;
        if (status.error_code() == grpc::StatusCode::CANCELLED) ++cancelled;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(ok + cancelled + taken, 160);
  EXPECT_GT(ok, 0);
  EXPECT_GT(cancelled, 0);
}

}  // namespace
}  // namespace denoised
