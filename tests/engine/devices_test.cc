// SPDX-License-Identifier: Apache-2.0
// The engine over several devices: their bits, and what happens when one is lost.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "engine/device_engine.h"
#include "engine/device_worker.h"
#include "tests/batching/simulated_backend.h"
#include "tests/engine/busy_gpu.h"
#include "tests/engine/submit.h"
#include "tests/needs_gpu.h"

namespace denoised {
namespace {

using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

const std::string kDigitsModel = DENOISED_SOURCE_DIR "/models/mnist-32";

JobSpec Digits(uint64_t seed, int count, int steps) {
  JobSpec spec{.model = "digits", .seed = seed, .count = count};
  spec.class_labels = {static_cast<int>(seed % 10)};
  spec.sampler.steps = steps;
  return spec;
}

/// Counts evaluations by device.
class Counter : public EngineObserver {
 public:
  void OnEvaluation(const std::string&, const std::string& device, int, int, double) override {
    std::lock_guard lock(mutex_);
    ++evaluations_[device];
  }
  std::map<std::string, int> evaluations() {
    std::lock_guard lock(mutex_);
    return evaluations_;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int> evaluations_;
};

/// Two devices that are CPUs and fail and hang on demand.
class TwoDevices : public ::testing::Test {
 protected:
  void Open(double watchdog_seconds = 60) {
    auto engine = CreateEngine(
        {.devices = {0, 1}, .max_rows = 4, .watchdog_seconds = watchdog_seconds},
        [this](const BackendOptions& options) -> absl::StatusOr<std::unique_ptr<Backend>> {
          DENOISED_ASSIGN_OR_RETURN(auto cpu, OpenBackend({.device = "cpu"}));
          // Backends of one device have their turns on different threads, each with its own clock.
          auto backend = std::make_unique<SimulatedBackend>(
              std::move(cpu), &NewClock(), [](int) { return 0.001; },
              fmt::format("simulated:{}", options.number));
          backend->fault = [this, number = options.number] { return Fault(number); };
          return backend;
        });
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    engine_->SetObserver(&counter_);
    const absl::Status opened = engine_->Open("digits", kDigitsModel);
    ASSERT_TRUE(opened.ok()) << opened;
  }
  ~TwoDevices() override { Release(); }

  FakeClock& NewClock() {
    std::lock_guard lock(mutex_);
    return clocks_.emplace_back();
  }
  absl::Status Fault(int device) {
    std::unique_lock lock(mutex_);
    FaultPlan& plan = fault_plans_[device];
    if (!plan.hang && !plan.fail) return absl::OkStatus();
    if (plan.evaluations-- > 0) return absl::OkStatus();
    if (plan.fail) return Internal("it fell off the bus");
    released_.wait(lock, [&] { return released_all_; });
    return absl::OkStatus();
  }
  /// After so many evaluations more.
  void Break(int device, int evaluations) {
    std::lock_guard lock(mutex_);
    fault_plans_[device] = {.fail = true, .evaluations = evaluations};
  }
  void Hang(int device, int evaluations) {
    std::lock_guard lock(mutex_);
    fault_plans_[device] = {.hang = true, .evaluations = evaluations};
  }
  void Release() {
    std::lock_guard lock(mutex_);
    released_all_ = true;
    released_.notify_all();
  }
  std::vector<std::map<int, std::vector<float>>> Alone(int jobs, int count, int steps) {
    std::vector<std::map<int, std::vector<float>>> images;
    auto engine = Engine::Create({.device = "cpu", .max_rows = 8});
    EXPECT_TRUE((*engine)->Open("digits", kDigitsModel).ok());
    for (int i = 0; i < jobs; ++i) {
      const auto job = Submit(**engine, Digits(i, count, steps));
      EXPECT_TRUE(job->Wait().ok());
      images.push_back(job->images());
    }
    return images;
  }

  std::deque<FakeClock> clocks_;
  std::mutex mutex_;
  std::condition_variable released_;
  struct FaultPlan {
    bool fail = false, hang = false;
    int evaluations = 0;
  };
  std::array<FaultPlan, 2> fault_plans_;
  bool released_all_ = false;
  Counter counter_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(TwoDevices, ShareTheWorkAndDrawTheSameBits) {
  const auto alone = Alone(4, 2, 6);
  Open();
  EXPECT_EQ(engine_->Stats()[0].slots, 8);
  std::vector<std::shared_ptr<Collector>> jobs;
  for (int i = 0; i < 4; ++i) jobs.push_back(Submit(*engine_, Digits(i, 2, 6)));
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(jobs[i]->Wait().ok());
    EXPECT_EQ(jobs[i]->images(), alone[i]);
  }
  const auto evaluations = counter_.evaluations();
  EXPECT_EQ(evaluations.size(), 2u) << "both drew";
}

TEST_F(TwoDevices, AnUnloadWaitsForBoth) {
  Open();
  const auto running = Submit(*engine_, Digits(1, 8, 12));
  while (counter_.evaluations().size() < 2) std::this_thread::yield();
  EXPECT_TRUE(engine_->Close("digits").ok());
  EXPECT_TRUE(running->Wait().ok());
  EXPECT_EQ(running->images().size(), 8u);
  EXPECT_EQ(engine_->Find("digits"), nullptr);
  ASSERT_TRUE(engine_->Open("digits", kDigitsModel).ok());
  EXPECT_TRUE(Submit(*engine_, Digits(2, 2, 2))->Wait().ok());
}

TEST_F(TwoDevices, OneThatFailsLeavesItsImagesToTheOther) {
  const auto alone = Alone(3, 2, 8);
  Open();
  Break(1, /*evaluations=*/3);
  std::vector<std::shared_ptr<Collector>> jobs;
  for (int i = 0; i < 3; ++i) jobs.push_back(Submit(*engine_, Digits(i, 2, 8)));
  for (int i = 0; i < 3; ++i) {
    const absl::Status status = jobs[i]->Wait();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(jobs[i]->images(), alone[i]);
    EXPECT_EQ(jobs[i]->progress(), 2 * 8);
  }
  EXPECT_TRUE(engine_->Health().ok()) << engine_->Health();
  const std::vector<DeviceState> devices = engine_->Devices();
  EXPECT_TRUE(devices[0].health.ok());
  EXPECT_THAT(std::string(devices[1].health.message()), HasSubstr("simulated:1 failed"));
  const EngineStats stats = engine_->Stats()[0];
  EXPECT_GT(stats.wasted_rows[static_cast<size_t>(EndReason::kFailed)], 0u);
  EXPECT_EQ(stats.slots, 4);

  // The other goes on serving, loads and unloads; with it all ends.
  EXPECT_TRUE(engine_->Open("second", kDigitsModel).ok());
  EXPECT_TRUE(engine_->Close("second").ok());
  const auto last = Submit(*engine_, Digits(9, 2, 900));
  Break(0, /*evaluations=*/0);
  EXPECT_EQ(last->Wait().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(engine_->Health().message()), HasSubstr("it fell off the bus"));
  std::vector<FieldViolation> violations;
  EXPECT_EQ(engine_->Submit(*engine_->Resolve(Digits(1, 1, 1), &violations), last).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(TwoDevices, OneThatHangsLeavesItsImagesToTheOther) {
  const auto alone = Alone(2, 2, 6);
  Open(/*watchdog_seconds=*/5);
  Hang(0, /*evaluations=*/2);
  std::vector<std::shared_ptr<Collector>> jobs;
  for (int i = 0; i < 2; ++i) jobs.push_back(Submit(*engine_, Digits(i, 2, 6)));
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(jobs[i]->Wait().ok());
    EXPECT_EQ(jobs[i]->images(), alone[i]);
  }
  EXPECT_TRUE(engine_->Health().ok());
  EXPECT_THAT(std::string(engine_->Devices()[0].health.message()),
              HasSubstr("did not return within 5 s"));
  Release();  // what it does from now on, nobody hears
  EXPECT_TRUE(Submit(*engine_, Digits(5, 1, 3))->Wait().ok());
}

TEST_F(TwoDevices, ALoadThatHangsOnOneEndsOnTheOther) {
  const auto alone = Alone(1, 4, 6);
  Open(/*watchdog_seconds=*/5);
  Hang(0, /*evaluations=*/0);  // of the warm-up
  const absl::Status opened = engine_->Open("second", kDigitsModel);
  EXPECT_TRUE(opened.ok()) << opened;
  EXPECT_THAT(std::string(engine_->Devices()[0].health.message()),
              HasSubstr("a part of loading or removing a model did not return within 5 s"));
  EXPECT_TRUE(engine_->Health().ok());
  JobSpec spec = Digits(0, 4, 6);
  spec.model = "second";
  const auto job = Submit(*engine_, spec);
  ASSERT_TRUE(job->Wait().ok());
  EXPECT_EQ(job->images(), alone[0]);
  EXPECT_TRUE(engine_->Close("second").ok());
}

/// A disk may be slower than the watchdog's limit.
TEST(Watchdog, CountsWhatMayWaitForTheDeviceAndNoFiles) {
  constexpr auto kLimit = std::chrono::milliseconds(30);
  Admission admission({});
  JobQueue queue(admission);
  FakeClock clock;
  const BackendOpener open =
      [&](const BackendOptions&) -> absl::StatusOr<std::unique_ptr<Backend>> {
    DENOISED_ASSIGN_OR_RETURN(auto cpu, OpenBackend({.device = "cpu"}));
    return std::make_unique<SimulatedBackend>(std::move(cpu), &clock, [](int) { return 0.001; });
  };
  DeviceWorker worker({}, open, {}, &admission, &queue, nullptr, [] {});
  ASSERT_TRUE(worker.Start().ok());
  const absl::StatusOr<int> read = worker.RunBeside([&](auto progress) -> absl::StatusOr<int> {
    progress(LoadPart::kFiles);
    std::this_thread::sleep_for(2 * kLimit);
    worker.LoseIfHanging(kLimit);
    progress(LoadPart::kDevice);
    return 1;
  });
  EXPECT_EQ(read.value_or(0), 1) << read.status();
  EXPECT_TRUE(worker.health().ok()) << worker.health();
  const absl::StatusOr<int> packed = worker.RunBeside([&](auto progress) -> absl::StatusOr<int> {
    progress(LoadPart::kFiles);
    progress(LoadPart::kDevice);
    std::this_thread::sleep_for(2 * kLimit);
    worker.LoseIfHanging(kLimit);
    return 1;
  });
  EXPECT_THAT(std::string(packed.status().message()), HasSubstr("did not return within 0.03 s"));
  EXPECT_FALSE(worker.health().ok());
}

TEST(Watchdog, LeavesADeviceAloneThatCanOnlyBeSlow) {
  constexpr auto kLimit = std::chrono::milliseconds(30);
  Admission admission({});
  JobQueue queue(admission);
  const BackendOpener open = [](const BackendOptions&) { return OpenBackend({.device = "cpu"}); };
  DeviceWorker worker({}, open, {}, &admission, &queue, nullptr, [] {});
  ASSERT_TRUE(worker.Start().ok());
  const absl::StatusOr<int> packed = worker.RunBeside([&](auto progress) -> absl::StatusOr<int> {
    progress(LoadPart::kDevice);
    std::this_thread::sleep_for(2 * kLimit);
    worker.LoseIfHanging(kLimit);
    return 1;
  });
  EXPECT_TRUE(packed.ok()) << packed.status();
  EXPECT_TRUE(worker.health().ok()) << worker.health();
}

TEST(SeveralDevices, MustBeOfOneKindAndNamedOnce) {
  const auto open = [](const BackendOptions& options) -> absl::StatusOr<std::unique_ptr<Backend>> {
    // As if they were two kinds: the description of the CPU, and one that is made up.
    if (options.number == 0) return OpenBackend({.device = "cpu"});
    DENOISED_ASSIGN_OR_RETURN(auto cpu, OpenBackend({.device = "cpu"}));
    static FakeClock clock;
    return std::make_unique<SimulatedBackend>(std::move(cpu), &clock, [](int) { return 0.001; });
  };
  const absl::Status kinds = CreateEngine({.devices = {0, 1}}, open).status();
  EXPECT_EQ(kinds.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(kinds.message()), HasSubstr("devices of one kind"));
  const absl::Status twice = Engine::Create({.device = "cpu", .devices = {1, 1}}).status();
  EXPECT_THAT(std::string(twice.message()), HasSubstr("devices holds 1 twice"));
  EXPECT_FALSE(Engine::Create({.device = "cpu", .devices = {}}).ok());
  EXPECT_FALSE(Engine::Create({.device = "cpu", .devices = {-1}}).ok());
}

/// On a machine with two GPUs. A kernel that fails there is no subject of this test: CUDA then
/// fails on every GPU of the process (docs/scaling.md).
TEST(SeveralDevices, AGpuThatHangsLeavesItsImagesToTheOther) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs a GPU beside another";
  constexpr int kJobs = 24;
  std::vector<std::map<int, std::vector<float>>> alone;
  {
    auto engine = Engine::Create({.device = "cuda"});
    ASSERT_TRUE(engine.ok()) << engine.status();
    ASSERT_TRUE((*engine)->Open("digits", kDigitsModel).ok());
    for (int i = 0; i < kJobs; ++i) {
      const auto job = Submit(**engine, Digits(i, 8, 200));
      ASSERT_TRUE(job->Wait().ok());
      alone.push_back(job->images());
    }
  }
  // It must outlive the engine: when BusyGpu lets go, the thread of GPU 1 ends its evaluation and
  // still reports it.
  Counter counter;
  auto engine = Engine::Create({.device = "cuda", .devices = {0, 1}, .watchdog_seconds = 2});
  ASSERT_TRUE(engine.ok()) << engine.status();
  (*engine)->SetObserver(&counter);
  ASSERT_TRUE((*engine)->Open("digits", kDigitsModel).ok());
  std::vector<std::shared_ptr<Collector>> jobs;
  for (int i = 0; i < kJobs; ++i) jobs.push_back(Submit(**engine, Digits(i, 8, 200)));
  while (counter.evaluations()["cuda:1"] < 50) std::this_thread::yield();
  const BusyGpu busy(1);
  ASSERT_TRUE(busy.ok());
  for (int i = 0; i < kJobs; ++i) {
    const absl::Status status = jobs[i]->Wait();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(jobs[i]->images(), alone[i]) << i;
  }
  EXPECT_TRUE((*engine)->Health().ok());
  EXPECT_THAT(std::string((*engine)->Devices()[1].health.message()),
              HasSubstr("did not return within 2 s"));
  EXPECT_GT((*engine)->Stats()[0].wasted_rows[static_cast<size_t>(EndReason::kFailed)], 0u);
}

}  // namespace
}  // namespace denoised
