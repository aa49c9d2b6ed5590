// SPDX-License-Identifier: Apache-2.0
// Several devices and one queue: who draws what, and what becomes of it when a device is lost.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "tests/batching/cancel_storm.h"
#include "tests/batching/collector.h"
#include "tests/batching/simulation.h"

namespace denoised {
namespace {

using Request = Simulation::Request;

Simulation::Options With(int devices) {
  return {.devices = devices, .limits = {.requests = 20'000, .images = 40'000}};
}

/// Ends device `index` at its next evaluation.
void Break(Simulation& simulation, int index) {
  simulation.devices[index].backend->fault = [] { return Internal("it fell off the bus"); };
}

TEST(Devices, ThroughputGrowsWithThem) {
  std::map<int, double> seconds;
  for (const int devices : {1, 2, 4}) {
    Simulation simulation(With(devices));
    std::vector<std::shared_ptr<Heard>> jobs;
    const FakeClock::TimePoint began = simulation.clock.now;
    for (int i = 0; i < 400; ++i)
      jobs.push_back(simulation.Submit({.steps = 20 + i % 30, .count = 1 + i % 4}));
    simulation.RunAll();
    seconds[devices] = Seconds(began, simulation.clock.now);
    for (const auto& heard : jobs) ASSERT_TRUE(heard->done->ok());
    EXPECT_EQ(simulation.evaluations_on.size(), static_cast<size_t>(devices));
  }
  EXPECT_GT(seconds[1] / seconds[2], 1.95);
  EXPECT_GT(seconds[1] / seconds[4], 3.8);
}

TEST(Devices, AFewImagesAreSharedOut) {
  Simulation simulation(With(2));
  const auto heard = simulation.Submit({.steps = 10, .count = 4});
  simulation.RunAll();
  EXPECT_EQ(simulation.evaluations_on["simulated:0"], 10);
  EXPECT_EQ(simulation.evaluations_on["simulated:1"], 10);
  EXPECT_EQ(simulation.widest, 2);
  EXPECT_NEAR(heard->seconds(), 10 * (0.001 + 2 * 0.0001), 1e-9);
}

TEST(Devices, BitsDoNotDependOnTheDevice) {
  std::vector<std::vector<float>> alone;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Simulation simulation({.max_rows = 4});
    const auto heard = simulation.Submit({.steps = 60, .seed = seed, .guidance = 1.0 + seed % 2});
    simulation.RunAll();
    alone.push_back(heard->images.at(0));
  }
  Simulation simulation({.devices = 3, .max_rows = 4});
  std::vector<std::shared_ptr<Heard>> jobs;
  for (uint64_t seed = 0; seed < 12; ++seed)
    jobs.push_back(simulation.Submit({.steps = 60, .seed = seed, .guidance = 1.0 + seed % 2}));
  for (int i = 0; simulation.busy(); ++i) {
    // Company that has images parked, which may go on elsewhere.
    if (i % 7 == 0 && i < 600)
      simulation.Submit({.steps = 3, .count = 1 + i % 5, .priority = Priority::kInteractive});
    simulation.Step();
  }
  EXPECT_GT(simulation.Totals().parked_images, 20u) << "else this tests nothing";
  for (uint64_t seed = 0; seed < 12; ++seed) EXPECT_EQ(jobs[seed]->images.at(0), alone[seed]);
}

TEST(Devices, EstimatesCountThem) {
  std::map<int, Estimate> last;
  for (const int devices : {1, 2}) {
    Simulation simulation(With(devices));
    std::vector<std::pair<Estimate, std::shared_ptr<Heard>>> jobs;
    for (int i = 0; i < 320; ++i) {
      const auto heard = simulation.TrySubmit({.steps = 20}, &last[devices]);
      jobs.emplace_back(last[devices], *heard);
    }
    simulation.RunAll();
    for (const auto& [estimate, heard] : jobs)
      EXPECT_NEAR(heard->seconds(), *estimate.total_seconds, 20 * 0.0026)
          << "within the length of one job";
  }
  EXPECT_NEAR(*last[2].total_seconds / *last[1].total_seconds, 0.5, 0.03);

  // A deadline that two meet and one does not.
  Simulation one(With(1)), two(With(2));
  const Request request = {.steps = 50, .count = 32, .deadline_seconds = 0.2};
  one.Submit({.steps = 1});  // a device without jobs may try
  EXPECT_FALSE(one.TrySubmit(request).ok());
  const auto heard = two.TrySubmit(request);
  ASSERT_TRUE(heard.ok()) << heard.status();
  two.RunAll();
  EXPECT_TRUE((*heard)->done->ok()) << *(*heard)->done;
}

TEST(Devices, AShortJobIsInTheNextEvaluationOfSomeDevice) {
  Simulation simulation(With(2));
  simulation.Submit({.steps = 400, .count = 64});
  for (int i = 0; i < 60; ++i) simulation.Step();
  const auto quick = simulation.Submit({.steps = 4, .priority = Priority::kInteractive});
  simulation.Step();
  EXPECT_TRUE(quick->started_at.has_value());
  while (!quick->done) simulation.Step();
  EXPECT_LE(quick->seconds(), 6 * 0.0026);
}

TEST(Devices, ANewSizeTakesMemoryWhereItIsNeeded) {
  Simulation simulation({.devices = 2, .max_rows = 4});
  simulation.Add("plain", 0);
  const auto taken = [&](int device) { return simulation.devices[device].backend->allocated(); };
  const size_t before = taken(0);
  ASSERT_EQ(taken(1), before);
  const auto few = simulation.Submit({.steps = 3, .count = 2, .model = "plain", .size = 6});
  simulation.RunAll();
  EXPECT_TRUE(few->done->ok());
  EXPECT_EQ((taken(0) > before) + (taken(1) > before), 1) << "one can carry them";
  const auto many = simulation.Submit({.steps = 3, .count = 12, .model = "plain", .size = 6});
  simulation.RunAll();
  EXPECT_TRUE(many->done->ok());
  EXPECT_GT(taken(0), before);
  EXPECT_EQ(taken(1), taken(0));

  // Where there is no memory for a size, another device has it; where none has, the job is told.
  SimulatedBackend& full = *simulation.devices[0].backend;
  full.memory_limit = full.allocated() / 2;
  const auto elsewhere = simulation.Submit({.steps = 3, .model = "plain", .size = 8});
  simulation.RunAll();
  EXPECT_TRUE(elsewhere->done->ok()) << *elsewhere->done;
  SimulatedBackend& other = *simulation.devices[1].backend;
  other.memory_limit = other.allocated() / 2;
  const auto nowhere = simulation.Submit({.steps = 3, .model = "plain", .size = 12});
  simulation.RunAll();
  ASSERT_TRUE(nowhere->done.has_value());
  EXPECT_EQ(nowhere->done->code(), absl::StatusCode::kResourceExhausted);
}

TEST(Devices, ANewSizeTakesMemoryWhereThereAreSlots) {
  Simulation simulation({.devices = 2, .max_rows = 8, .slots = 1});
  simulation.Add("plain", 0);
  const size_t before = simulation.devices[1].backend->allocated();
  const auto two = simulation.Submit({.steps = 8, .count = 2, .model = "plain", .size = 6});
  simulation.RunAll();
  EXPECT_TRUE(two->done->ok());
  for (const Simulation::Device& device : simulation.devices)
    EXPECT_GT(device.backend->allocated(), before) << "one has rows for both, but not slots";
}

TEST(Devices, ASizeThatOnlyTheLostOneHadMemoryForIsToldSo) {
  Simulation simulation({.devices = 2, .max_rows = 4});
  simulation.Add("plain", 0);
  SimulatedBackend& full = *simulation.devices[0].backend;
  full.memory_limit = full.allocated();
  const auto size = simulation.Submit({.steps = 20, .count = 9, .model = "plain", .size = 8});
  const auto other = simulation.Submit({.steps = 20, .count = 3});
  for (int i = 0; i < 8; ++i) simulation.Step();
  EXPECT_FALSE(size->progress.empty());
  Break(simulation, 1);
  simulation.RunAll();
  ASSERT_TRUE(size->done.has_value());
  EXPECT_EQ(size->done->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(other->done->ok());
  ExpectNothingLeft(simulation.Totals("plain"));
}

/// Not even an image that was evaluated and only waits to be decoded, one after each evaluation.
TEST(Devices, OneThatIsLostLosesNoImageThatWaitsToBeDecoded) {
  const auto request = [](uint64_t seed) {
    return Request{.steps = 3 + static_cast<int>(seed % 2), .seed = seed, .count = 3};
  };
  const auto decode_cost = [](int images) { return 0.001 * images; };
  std::vector<std::map<int, std::vector<float>>> alone;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Simulation simulation({.max_rows = 8, .decode_cost = decode_cost});
    const auto heard = simulation.Submit(request(seed));
    simulation.RunAll();
    alone.push_back(heard->images);
  }
  for (int after = 1; after < 30; ++after) {
    SCOPED_TRACE(after);
    Simulation simulation({.devices = 2, .max_rows = 8, .decode_cost = decode_cost});
    std::vector<std::shared_ptr<Heard>> jobs;
    for (uint64_t seed = 0; seed < 6; ++seed) jobs.push_back(simulation.Submit(request(seed)));
    for (int i = 0; i < after; ++i) simulation.Step();
    Break(simulation, 1);
    simulation.RunAll();
    for (uint64_t seed = 0; seed < 6; ++seed) {
      ASSERT_TRUE(jobs[seed]->done.has_value());
      ASSERT_TRUE(jobs[seed]->done->ok()) << *jobs[seed]->done;
      EXPECT_EQ(jobs[seed]->images, alone[seed]);
    }
    ExpectNothingLeft(simulation.Totals());
  }
}

TEST(Devices, OneThatIsLostLosesNoImage) {
  const auto request = [](uint64_t seed) {
    return Request{.steps = 30, .seed = seed, .count = 3, .previews = true};
  };
  std::vector<std::map<int, std::vector<float>>> alone;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Simulation simulation({.max_rows = 8});
    const auto heard = simulation.Submit(request(seed));
    simulation.RunAll();
    alone.push_back(heard->images);
  }
  for (const int after : {1, 2, 31, 47}) {
    SCOPED_TRACE(after);
    Simulation simulation({.devices = 2, .max_rows = 8});
    std::vector<std::shared_ptr<Heard>> jobs;
    for (uint64_t seed = 0; seed < 20; ++seed) jobs.push_back(simulation.Submit(request(seed)));
    for (int i = 0; i < after; ++i) simulation.Step();
    Break(simulation, 1);
    simulation.RunAll();
    EXPECT_TRUE(simulation.devices[1].lost);
    uint64_t wanted = 0;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const Heard& heard = *jobs[seed];
      ASSERT_TRUE(heard.done->ok()) << *heard.done;
      EXPECT_EQ(heard.images, alone[seed]);
      // Events go on where they were: nothing is told twice, and progress does not go back.
      EXPECT_TRUE(std::is_sorted(heard.progress.begin(), heard.progress.end(),
                                 [](int a, int b) { return a <= b; }));
      EXPECT_EQ(heard.progress.back(), 90);
      const std::set<std::pair<int, int>> previews(heard.previews.begin(), heard.previews.end());
      EXPECT_EQ(previews.size(), heard.previews.size());
      EXPECT_EQ(previews.size(), size_t{3} * 29);
      wanted += 90;
    }
    const Admission::Totals totals = simulation.Totals();
    const uint64_t wasted = totals.wasted_rows[static_cast<size_t>(EndReason::kFailed)];
    EXPECT_EQ(totals.rows, wanted + wasted);
    if (after > 2) {
      EXPECT_GT(wasted, 0u);
    }
    ExpectNothingLeft(totals);
    EXPECT_EQ(simulation.admission.RoomToPark(1), size_t{1} << 30) << "all is given back";
  }
}

TEST(Devices, CancelsAndALossLeaveNothingBehindAndChangeNoBit) {
  Simulation simulation(
      {.devices = 3, .max_rows = 6, .limits = {.requests = 20'000, .images = 40'000}});
  CancelStorm storm(simulation, 4);
  for (int event = 0; event < 6000; ++event) {
    if (event == 2000) Break(simulation, 2);
    if (event == 4000) Break(simulation, 0);
    storm.Next();
  }
  ASSERT_NO_FATAL_FAILURE(storm.Finish());
  EXPECT_TRUE(simulation.devices[0].lost && simulation.devices[2].lost);
}

TEST(Devices, OnThreadsOfTheirOwnOneMayBeLostInTheMiddleOfAStep) {
  constexpr int kDevices = 3;
  Admission admission({.requests = 20'000, .images = 40'000});
  JobQueue queue(admission);
  std::atomic<bool> stop{false};
  std::atomic<int> ready{0};
  std::vector<std::thread> devices;
  for (int i = 0; i < kDevices; ++i)
    devices.emplace_back([&, i] {
      const auto backend = OpenBackend({.device = "cpu"});
      ASSERT_TRUE(backend.ok()) << backend.status();
      StepBatcher batcher(**backend, admission, queue, nullptr,
                          {.device = i, .keep_evaluations = 0});
      const BatchedModel model{.name = "fake",
                               .denoiser = std::make_shared<FakeDenoiser>(Simulation::kSize, 1, 5),
                               .null_label = 4,
                               .max_rows = 6,
                               .slots = 6,
                               .max_evaluations = 100};
      EXPECT_TRUE(batcher.AddModel(model, Simulation::kSize, Simulation::kSize).ok());
      ++ready;
      // One that is lost goes on, as one that hung and came back: nobody may notice.
      while (!stop) {
        if (!batcher.busy()) continue;
        EXPECT_TRUE(batcher.Step().ok());
      }
    });
  while (ready < kDevices) std::this_thread::yield();

  std::mt19937 random(6);
  std::vector<JobId> doomed;
  std::vector<std::pair<int, std::shared_ptr<Collector>>> survivors;
  Simulation requests({});
  const auto submit = [&](int shape) {
    auto collected = std::make_shared<Collector>();
    const auto id = queue.Submit(requests.Job(RequestOfShape(shape)), collected);
    EXPECT_TRUE(id.ok()) << id.status();
    doomed.push_back(*id);
    return collected;
  };
  for (int i = 0; i < 400; ++i) {
    if (i == 130) queue.Lose(1);
    if (i == 260) queue.Lose(2);
    const int shape = static_cast<int>(random() % kShapes);
    survivors.emplace_back(shape, submit(shape));
    doomed.pop_back();
    submit(static_cast<int>(random() % kShapes));
    if (random() % 2)
      queue.End(doomed[random() % doomed.size()], Cancelled("gone"), EndReason::kCancelled);
  }
  const auto deadline = JobQueue::Clock::now() + std::chrono::minutes(2);
  EXPECT_TRUE(queue.WaitForNone(nullptr, deadline));
  stop = true;
  for (std::thread& device : devices) device.join();
  const auto alone = ImagesOfShapes();
  for (const auto& [shape, collected] : survivors) {
    ASSERT_TRUE(collected->done().has_value());
    ASSERT_TRUE(collected->done()->ok()) << *collected->done();
    EXPECT_EQ(collected->images(), alone[shape]);
  }
  ExpectNothingLeft(admission.Read("fake", JobQueue::Clock::now()));
  EXPECT_EQ(admission.RoomToPark(1), size_t{1} << 30);
}

/// A lost device may return from a hang and report what it did, though its model is gone.
TEST(Devices, AModelThatIsOpenedAgainAfterALossBeginsAnew) {
  Admission admission({});
  JobQueue queue(admission);
  const auto open = [&] { return admission.Open("model", 4, 4, {.rows = 4, .slots = 4}); };
  const auto seconds = [&] {
    return admission.StageSeconds("model")[static_cast<size_t>(Stage::kDenoise)];
  };
  const auto old_lane = open();
  for (const int device : {0, 1}) {
    queue.AddModel("model", device);
    queue.Opened({old_lane, "model", 4, 4}, device, absl::OkStatus());
  }
  admission.Measured(*old_lane, 1, 0.5);
  queue.Lose(1);
  queue.RemoveModel("model", 0);
  EXPECT_EQ(seconds(), 0) << "the costs are forgotten";
  admission.Measured(*old_lane, 1, 0.25);
  EXPECT_TRUE(queue.Close(old_lane, 1));
  // It was adding another model when it was lost.
  queue.AddModel("model", 1);
  queue.Opened({old_lane, "model", 4, 4}, 1, absl::OkStatus());
  const auto lane = open();
  EXPECT_NE(lane, old_lane);
  queue.AddModel("model", 0);
  queue.Opened({lane, "model", 4, 4}, 0, absl::OkStatus());
  admission.Measured(*lane, 1, 0.125);
  admission.Measured(*old_lane, 1, 0.25);
  EXPECT_EQ(seconds(), 0.125);
  queue.RemoveModel("model", 0);
  EXPECT_EQ(seconds(), 0) << "the lost one draws nothing";
}

/// What it had reported on the first one counts once.
TEST(Devices, AnImageMayLoseItsDeviceTwice) {
  Simulation requests({});
  Admission admission({});
  JobQueue queue(admission);
  const auto lane =
      admission.Open("fake", Simulation::kSize, Simulation::kSize, {.rows = 4, .slots = 4});
  for (const int device : {0, 1, 2}) {
    queue.AddModel("fake", device);
    queue.Opened({lane, "fake", Simulation::kSize, Simulation::kSize}, device, absl::OkStatus());
  }
  const auto collected = std::make_shared<Collector>();
  const auto id = queue.Submit(requests.Job({.steps = 50}), collected);
  ASSERT_TRUE(id.ok());
  const auto draw = [&](int device, int evaluations) {
    const auto image = queue.Take(queue.First(lane, device, 0), device);
    while (image->evaluation < evaluations) {
      image->Launched();
      queue.Report({{.image = image, .evaluation = image->evaluation}});
    }
  };
  draw(0, 40);
  queue.Lose(0);
  draw(1, 5);
  queue.Lose(1);
  draw(2, 3);
  queue.End(*id, Cancelled("gone"), EndReason::kCancelled);
  queue.EndDueJobs();
  const Admission::Totals totals = admission.Read("fake", {});
  EXPECT_EQ(totals.wasted_rows[static_cast<size_t>(EndReason::kFailed)], 45u);
  EXPECT_EQ(totals.wasted_rows[static_cast<size_t>(EndReason::kCancelled)], 3u);
  EXPECT_EQ(collected->progress(), 40);
}

/// It may hang, or capture graphs, while another one has slots for all.
TEST(Devices, OneThatTakesNothingLeavesItsShareToTheOthersAfterTwoEvaluations) {
  FakeClock clock;
  Simulation requests({});
  Admission admission({});
  JobQueue queue(admission, [&] { return clock.now; });
  const auto lane =
      admission.Open("fake", Simulation::kSize, Simulation::kSize, {.rows = 4, .slots = 4});
  for (const int device : {0, 1}) {
    queue.AddModel("fake", device);
    queue.Opened({lane, "fake", Simulation::kSize, Simulation::kSize}, device, absl::OkStatus());
  }
  admission.Measured(*lane, 2, 0.125);
  ASSERT_TRUE(
      queue.Submit(requests.Job({.steps = 50, .count = 4}), std::make_shared<Collector>()).ok());
  for (const int own_rows : {0, 1}) ASSERT_TRUE(queue.Take(queue.First(lane, 0, own_rows), 0));
  EXPECT_FALSE(queue.First(lane, 0, 2));
  clock.Advance(0.24);
  EXPECT_FALSE(queue.First(lane, 0, 2));
  EXPECT_TRUE(queue.Take(queue.First(lane, 1, 0), 1)) << "it is there: the first waits anew";
  clock.Advance(0.02);
  EXPECT_FALSE(queue.First(lane, 0, 2));
  clock.Advance(0.26);
  EXPECT_TRUE(queue.Take(queue.First(lane, 0, 2), 0));
}

TEST(Devices, ASizeThatOneHasNoRoomForIsForTheOthersAtOnce) {
  Simulation requests({});
  Admission admission({});
  JobQueue queue(admission);
  int woken = 0;
  queue.SetWake([&] { ++woken; });
  const auto lane =
      admission.Open("fake", Simulation::kSize, Simulation::kSize, {.rows = 4, .slots = 4});
  for (const int device : {0, 1}) queue.AddModel("fake", device);
  ASSERT_TRUE(queue.Submit(requests.Job({.steps = 5}), std::make_shared<Collector>()).ok());
  const auto size = queue.ToOpen(0);
  ASSERT_TRUE(size.has_value());
  EXPECT_FALSE(queue.HasWork(1));
  woken = 0;
  queue.OpenLater(*size, 0, JobQueue::Lack::kMemory);
  EXPECT_EQ(woken, 1);
  EXPECT_TRUE(queue.WaitsForRoom(0, "fake"));
  EXPECT_FALSE(queue.HasWork(0));
  EXPECT_TRUE(queue.ToOpen(1).has_value());
}

TEST(Devices, AnImageThatWasDrawnButNotToldIsDrawnAgain) {
  Simulation requests({});
  Admission admission({});
  JobQueue queue(admission);
  const auto lane =
      admission.Open("fake", Simulation::kSize, Simulation::kSize, {.rows = 4, .slots = 4});
  for (const int device : {0, 1}) {
    queue.AddModel("fake", device);
    queue.Opened({lane, "fake", Simulation::kSize, Simulation::kSize}, device, absl::OkStatus());
  }
  const auto collected = std::make_shared<Collector>();
  ASSERT_TRUE(queue.Submit(requests.Job({.steps = 5}), collected).ok());
  const auto draw = [&](int device) {
    const auto job = queue.First(lane, device, 0);
    const auto image = job ? queue.Take(job, device) : nullptr;
    if (!image) return image;
    while (image->evaluation < 4) {
      image->Launched();
      queue.Report({{.image = image, .evaluation = image->evaluation}});
    }
    queue.Drawn(image);
    return image;
  };
  const auto tell = [&](const std::shared_ptr<JobQueue::Image>& image) {
    queue.Report({{.image = image,
                   .evaluation = 5,
                   .result = ImageResult{.index = 0, .pixels = Tensor::Host({1}, DType::kF32)}}});
  };
  const auto lost = draw(0);
  ASSERT_TRUE(lost);
  EXPECT_EQ(admission.Read("fake", {}).active_images, 0);
  queue.Lose(0);
  EXPECT_FALSE(draw(0)) << "it is given nothing any more";
  tell(lost);
  EXPECT_FALSE(collected->done()) << "what it says late is for nobody";
  const Admission::Totals totals = admission.Read("fake", {});
  EXPECT_EQ(totals.active_images, 0);
  EXPECT_EQ(totals.queued_images[static_cast<size_t>(Priority::kNormal)], 1);
  EXPECT_EQ(totals.wasted_rows[static_cast<size_t>(EndReason::kFailed)], 4u);
  const auto again = draw(1);
  ASSERT_TRUE(again);
  tell(again);
  EXPECT_EQ(collected->done(), absl::OkStatus());
  ExpectNothingLeft(admission.Read("fake", {}));
}

}  // namespace
}  // namespace denoised
