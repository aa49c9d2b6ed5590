// SPDX-License-Identifier: Apache-2.0
// Who is served when, on a simulated device: bounds, shares, limits and estimates.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/batching/cancel_storm.h"
#include "tests/batching/collector.h"
#include "tests/batching/simulation.h"

namespace denoised {
namespace {

using ::testing::HasSubstr;
using Request = Simulation::Request;

int64_t Done(const std::vector<std::shared_ptr<Heard>>& jobs) {
  int64_t evaluations = 0;
  for (const auto& heard : jobs)
    evaluations += heard->progress.empty() ? 0 : heard->progress.back();
  return evaluations;
}

/// Rows all taken by images that need many evaluations, in several ways.
struct Crowd {
  const char* name;
  std::function<void(Simulation&)> fill;
};
const Crowd kCrowds[] = {
    {"one job", [](Simulation& s) { s.Submit({.steps = 400, .count = 16}); }},
    {"many jobs of one client",
     [](Simulation& s) {
       for (int i = 0; i < 40; ++i) s.Submit({.steps = 400});
     }},
    {"many clients",
     [](Simulation& s) {
       for (int i = 0; i < 40; ++i) s.Submit({.steps = 400, .client = std::to_string(i)});
     }},
    {"guided", [](Simulation& s) { s.Submit({.steps = 400, .count = 20, .guidance = 3}); }},
};

TEST(Scheduling, AShortJobNeverWaitsForLongOnes) {
  for (const Crowd& crowd : kCrowds) {
    for (const int age : {1, 60, 300}) {
      for (const double guidance : {1.0, 3.0}) {
        for (const Priority priority : {Priority::kInteractive, Priority::kNormal}) {
          SCOPED_TRACE(
              fmt::format("{}, {} evaluations old, guidance {}", crowd.name, age, guidance));
          Simulation simulation({});
          crowd.fill(simulation);
          for (int i = 0; i < age; ++i) simulation.Step();
          EXPECT_EQ(simulation.widest, 16);
          const auto quick =
              simulation.Submit({.steps = 4, .guidance = guidance, .priority = priority});
          while (!quick->done) {
            simulation.Step();
            ASSERT_LE(simulation.evaluations - quick->submitted_at, 6);
          }
          EXPECT_EQ(*quick->started_at, quick->submitted_at) << "it was in the next evaluation";
          EXPECT_EQ(*quick->ended_at - quick->submitted_at, 4);
        }
      }
    }
  }
}

TEST(Scheduling, AnImageThatIsNearlyDoneKeepsItsSlot) {
  Simulation simulation({.max_rows = 2, .keep_evaluations = 4});
  const auto longer = simulation.Submit({.steps = 20, .count = 2});
  while (longer->progress.empty() || longer->progress.back() < 2 * 16) simulation.Step();
  const auto quick = simulation.Submit({.steps = 2, .priority = Priority::kInteractive});
  simulation.RunAll();
  EXPECT_EQ(*quick->started_at - quick->submitted_at, 4);
  EXPECT_EQ(simulation.Totals().parked_images, 0u);
}

TEST(Scheduling, ParkedImagesKeepTheirBits) {
  std::vector<std::vector<float>> alone;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    Simulation simulation({.max_rows = 4});
    const auto heard = simulation.Submit({.steps = 60, .seed = seed, .guidance = 1.0 + seed % 2});
    simulation.RunAll();
    alone.push_back(heard->images.at(0));
  }
  Simulation simulation({.max_rows = 4});
  std::vector<std::shared_ptr<Heard>> jobs;
  for (uint64_t seed = 0; seed < 8; ++seed)
    jobs.push_back(simulation.Submit({.steps = 60, .seed = seed, .guidance = 1.0 + seed % 2}));
  for (int i = 0; simulation.busy(); ++i) {
    if (i % 7 == 0 && i < 300)
      simulation.Submit({.steps = 3, .count = 1 + i % 3, .priority = Priority::kInteractive});
    simulation.Step();
  }
  EXPECT_GT(simulation.Totals().parked_images, 20u) << "else this tests nothing";
  for (uint64_t seed = 0; seed < 8; ++seed) EXPECT_EQ(jobs[seed]->images.at(0), alone[seed]);
}

TEST(Scheduling, AnImageThatIsNotFiniteEndsItsJobAloneAsInCompany) {
  for (const bool company : {false, true}) {
    Simulation simulation({.broken_class = 3});
    const auto broken = simulation.Submit({.steps = 60, .seed = 3});  // also its class
    // Its previews are on their way in every evaluation.
    if (company) simulation.Submit({.steps = 60, .seed = 2, .previews = true});
    simulation.RunAll();
    ASSERT_TRUE(broken->done.has_value());
    EXPECT_EQ(broken->done->code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(broken->done->message()), HasSubstr("since evaluation 1 of 60"));
    EXPECT_EQ(broken->progress, std::vector<int>{1}) << (company ? "in company" : "alone");
    EXPECT_EQ(simulation.nonfinite_images, 1);
  }
}

/// Its state is finite to the end, so nothing but its pixels tells.
TEST(Scheduling, AnImageThatTheCodecMakesNonfiniteEndsItsJobAlone) {
  const Simulation::Options options{.huge_class = 3, .decode_cost = [](int) { return 0.001; }};
  const Simulation::Request good{.steps = 60, .seed = 2}, huge{.steps = 60, .seed = 3};
  Simulation alone(options);
  const auto reference = alone.Submit(good);
  alone.RunAll();
  ASSERT_TRUE(reference->done->ok()) << *reference->done;
  EXPECT_EQ(alone.nonfinite_images, 0);

  Simulation simulation(options);
  const auto before = simulation.Submit(good), broken = simulation.Submit(huge),
             after = simulation.Submit(good);
  simulation.RunAll();
  ASSERT_TRUE(broken->done.has_value());
  EXPECT_EQ(broken->done->code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(broken->done->message()),
              HasSubstr("model 'fake' drew an image that is not finite: image 0 (seed 3, class "
                        "label 3) has NaN or infinity since evaluation 60 of 60"));
  EXPECT_TRUE(broken->images.empty());
  EXPECT_EQ(simulation.nonfinite_images, 1);
  EXPECT_EQ(simulation.widest, 3) << "else it had no neighbours";
  for (const auto& job : {before, after}) {
    ASSERT_TRUE(job->done->ok()) << *job->done;
    EXPECT_EQ(job->images, reference->images);
  }
}

TEST(Scheduling, ANonfiniteImageThatIsDeliveredIsCountedOnce) {
  for (const bool codec : {false, true}) {  // what makes it non-finite
    SCOPED_TRACE(codec);
    Simulation simulation({.broken_class = codec ? std::nullopt : std::optional(3),
                           .huge_class = codec ? std::optional(3) : std::nullopt,
                           .allow_nonfinite = true,
                           .decode_cost = [](int) { return 0.001; }});
    const auto broken = simulation.Submit({.steps = 4, .seed = 3, .previews = true});
    const auto good = simulation.Submit({.steps = 4, .seed = 2});
    simulation.RunAll();
    ASSERT_TRUE(broken->done.has_value() && broken->done->ok()) << *broken->done;
    EXPECT_FALSE(std::isfinite(broken->images.at(0)[0]));
    EXPECT_TRUE(std::isfinite(good->images.at(0)[0]));
    EXPECT_EQ(simulation.nonfinite_images, 1);
  }
}

TEST(Scheduling, ClientsHaveEqualSharesOfEvaluationsNotOfRequests) {
  Simulation simulation({});
  std::vector<std::shared_ptr<Heard>> few_long, many_short, heavier;
  for (int i = 0; i < 40; ++i) few_long.push_back(simulation.Submit({.steps = 50, .client = "a"}));
  for (int i = 0; i < 400; ++i)
    many_short.push_back(simulation.Submit({.steps = 5, .client = "b"}));
  for (int i = 0; i < 200; ++i)
    heavier.push_back(simulation.Submit({.steps = 20, .client = "c", .client_weight = 2}));
  for (int i = 0; i < 200; ++i) simulation.Step();
  const double all = static_cast<double>(simulation.row_evaluations);
  EXPECT_NEAR(Done(few_long) / all, 0.25, 0.04);
  EXPECT_NEAR(Done(many_short) / all, 0.25, 0.04);
  EXPECT_NEAR(Done(heavier) / all, 0.5, 0.04);
}

TEST(Scheduling, WhatAClientHasHadCountsAgainstIt) {
  // "a" always has one job, "b" a long queue: one after the other is no way to get more.
  Simulation simulation({.max_rows = 2});
  std::vector<std::shared_ptr<Heard>> queued, in_turn;
  for (int i = 0; i < 200; ++i) queued.push_back(simulation.Submit({.steps = 20, .client = "b"}));
  for (int i = 0; i < 1000; ++i) {
    if (in_turn.empty() || in_turn.back()->done)
      in_turn.push_back(simulation.Submit({.steps = 5, .count = 2, .client = "a"}));
    simulation.Step();
  }
  EXPECT_NEAR(Done(in_turn) / static_cast<double>(simulation.row_evaluations), 0.5, 0.05);
}

TEST(Scheduling, PrioritiesHaveSharesAndNoneStarves) {
  Simulation simulation({});
  std::map<Priority, std::vector<std::shared_ptr<Heard>>> jobs;
  const Priority all[] = {Priority::kBatch, Priority::kNormal, Priority::kInteractive};
  std::mt19937 random(5);
  for (int i = 0; i < 900; ++i)
    jobs[all[i % 3]].push_back(
        simulation.Submit({.steps = 4 + static_cast<int>(random() % 40), .priority = all[i % 3]}));
  for (int i = 0; i < 300; ++i) simulation.Step();
  const double rows = static_cast<double>(simulation.row_evaluations);
  EXPECT_NEAR(Done(jobs[Priority::kInteractive]) / rows, 16.0 / 21, 0.05);
  EXPECT_NEAR(Done(jobs[Priority::kNormal]) / rows, 4.0 / 21, 0.05);
  EXPECT_NEAR(Done(jobs[Priority::kBatch]) / rows, 1.0 / 21, 0.03);

  // However much interactive work there is, a batch job is done when its share has paid for it.
  Simulation flooded({});
  const auto batch = flooded.Submit({.steps = 50, .priority = Priority::kBatch});
  while (!batch->done) {
    while (flooded.Totals().queued_images[0] < 64)
      flooded.Submit({.steps = 30, .priority = Priority::kInteractive});
    flooded.Step();
    ASSERT_LE(flooded.row_evaluations, 50 * 17 + 16 * 50);
  }
  EXPECT_GT(flooded.row_evaluations, 50 * 17 / 2) << "it was not served first either";
}

TEST(Scheduling, LanesShareTheDeviceBySeconds) {
  // Evaluations of "slow" carry 8 rows, of "fast" 1: several times the seconds.
  Simulation simulation({.cost = [](int rows) { return 0.001 * rows; }});
  simulation.Add("slow");
  simulation.Submit({.steps = 1000, .count = 8, .model = "slow", .client = "a"});
  simulation.Submit({.steps = 1000, .count = 1, .model = "fake", .client = "b"});
  for (int i = 0; i < 900; ++i) simulation.Step();
  EXPECT_NEAR(simulation.seconds_of["slow"] / simulation.seconds_of["fake"], 1, 0.05);
  EXPECT_NEAR(simulation.evaluations_of["fake"] / double(simulation.evaluations_of["slow"]), 8,
              0.5);

  // Who comes to an idle lane is served next, and is not owed the time it was not there.
  simulation.Add("idle");
  const auto quick = simulation.Submit({.steps = 3, .model = "idle", .client = "c"});
  int between = 0;
  while (!quick->done) {
    simulation.Step();
    ASSERT_LE(++between, 3 * 4);
  }
  EXPECT_LE(*quick->started_at - quick->submitted_at, 1);
}

TEST(Scheduling, ALaneDoesNotPayForWorkWhileTheOthersWereIdle) {
  Simulation simulation({.cost = [](int) { return 0.001; }});
  simulation.Add("other");
  simulation.Submit({.steps = 1000, .count = 4});
  simulation.RunAll();
  simulation.Submit({.steps = 1000, .model = "other"});
  simulation.Step();
  const auto quick = simulation.Submit({.steps = 3});
  simulation.Submit({.steps = 1000});
  while (!quick->done) {
    simulation.Step();
    ASSERT_LE(simulation.evaluations - quick->submitted_at, 3 * 4);
  }
}

TEST(Scheduling, LanesWeighAsTheirClients) {
  Simulation simulation({.cost = [](int) { return 0.001; }});
  simulation.Add("other");
  simulation.Submit({.steps = 1000, .priority = Priority::kBatch});
  simulation.Submit({.steps = 1000, .model = "other", .priority = Priority::kInteractive});
  for (int i = 0; i < 850; ++i) simulation.Step();
  EXPECT_NEAR(simulation.seconds_of["other"] / simulation.seconds_of["fake"], 16, 1);
}

TEST(Scheduling, WholeBatchesLetNobodyJoin) {
  Simulation simulation({.max_rows = 4, .batching = Batching::kRequest});
  const auto longest = simulation.Submit({.steps = 10, .count = 2});
  const auto shorter = simulation.Submit({.steps = 4, .count = 2});
  simulation.Step();
  const auto late = simulation.Submit({.steps = 1, .priority = Priority::kInteractive});
  simulation.RunAll();
  EXPECT_EQ(*shorter->ended_at, 4) << "an image is delivered when it is done";
  EXPECT_EQ(*longest->ended_at, 10);
  EXPECT_EQ(*late->started_at, 10);
  EXPECT_EQ(simulation.Totals().parked_images, 0u);
}

// 11 rows are padded to 16. Where a row costs its full time, 8 rows and then 3 are faster, and the
// jobs that came first end first. Where the device is not full, all go together.
TEST(Scheduling, RowsArePaddedOnlyWhereThatIsFaster) {
  const auto draw = [](double seconds, double seconds_of_row, int images, double guidance) {
    auto simulation = std::make_unique<Simulation>(
        Simulation::Options{.cost = [=](int rows) { return seconds + seconds_of_row * rows; },
                            .pads_rows = true,
                            .warm_up = true});
    std::vector<std::shared_ptr<Heard>> jobs;
    for (int i = 0; i < images; ++i)
      jobs.push_back(
          simulation->Submit({.steps = 6, .seed = static_cast<uint64_t>(i), .guidance = guidance}));
    simulation->RunAll();
    for (const auto& job : jobs) EXPECT_TRUE(job->done && job->done->ok());
    return std::pair(std::move(simulation), std::move(jobs));
  };
  const auto [full, jobs] = draw(0.0001, 0.01, 11, 1);
  EXPECT_EQ(full->Totals().padding_rows, 0);
  EXPECT_EQ(full->widest, 8);
  EXPECT_NEAR(jobs[7]->seconds(), 6 * 0.08, 0.01);  // and not 6 · 0.16
  EXPECT_NEAR(jobs[10]->seconds(), 6 * 0.11, 0.01);
  for (int i = 8; i < 11; ++i) {
    const auto [alone, one] = draw(0.0001, 0.01, i + 1, 1);
    EXPECT_EQ(one[i]->images, jobs[i]->images) << i;
  }
  const auto [guided, guided_jobs] = draw(0.0001, 0.01, 5, 3);
  EXPECT_EQ(guided->widest, 8);
  EXPECT_EQ(guided->Totals().padding_rows, 0);
  // 8 rows and then 1 would take longer than 16, though 8 have more rows a second than 9 of 16.
  const auto [between, between_jobs] = draw(0.02, 0.001, 9, 1);
  EXPECT_EQ(between->widest, 9);
  const auto [flat, flat_jobs] = draw(0.1, 0.0001, 11, 1);
  EXPECT_EQ(flat->widest, 11);
  EXPECT_EQ(flat->evaluations, 6);
}

TEST(Limits, EachIsNamedAndSaysWhenToComeBack) {
  struct Case {
    Admission::Limits limits;
    const char* says;
  };
  const Case cases[] = {{{.requests = 3}, "3 requests are queued"}, {{.images = 7}, "limit of 7"}};
  for (const Case& limited : cases) {
    Simulation simulation({.max_rows = 2, .limits = limited.limits});
    Estimate estimate;
    absl::Status refused;
    int accepted = 0;
    for (; accepted < 10; ++accepted) {
      const auto heard = simulation.TrySubmit({.steps = 50, .count = 2, .client = "me"}, &estimate);
      refused = heard.status();
      if (!refused.ok()) break;
    }
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()), HasSubstr(limited.says));
    EXPECT_GT(estimate.retry_seconds.value(), 0);
    EXPECT_EQ(accepted, 3);
    // Room again once images have slots.
    while (simulation.Totals().queued_requests[1] == accepted) simulation.Step();
    EXPECT_TRUE(simulation.TrySubmit({.steps = 1, .client = "me"}).ok());
    simulation.RunAll();
  }
}

TEST(Limits, ParkedImagesTakeBytesToo) {
  constexpr int kEdge = 32;
  constexpr size_t kParkedBytes = 6 * kEdge * kEdge * sizeof(float);
  struct Case {
    size_t bytes;
    uint64_t parks;
  };
  for (const Case& limit : {Case{kParkedBytes, 0}, Case{3 * kParkedBytes, 2}, Case{1 << 30, 4}}) {
    Simulation simulation({.max_rows = 4, .limits = {.bytes = limit.bytes}});
    simulation.Add("plain", 0);
    const auto running =
        simulation.Submit({.steps = 20, .count = 4, .model = "plain", .size = kEdge});
    for (int part = 0; part < 2; ++part) simulation.Step();  // of opening the size
    std::vector<std::shared_ptr<Heard>> quick;
    for (int i = 0; i < 4; ++i)
      quick.push_back(simulation.Submit(
          {.steps = 2, .model = "plain", .size = kEdge, .priority = Priority::kInteractive}));
    simulation.Step();
    EXPECT_EQ(simulation.Totals("plain").parked_images, limit.parks) << limit.bytes;
    simulation.RunAll();
    EXPECT_TRUE(running->done->ok());
    for (const auto& heard : quick) EXPECT_TRUE(heard->done->ok());
    EXPECT_EQ(simulation.admission.RoomToPark(1), limit.bytes) << "all is given back";
  }
}

TEST(Limits, BytesOfWhatWaits) {
  Simulation simulation({.max_rows = 2, .limits = {.bytes = 100'000}});
  EffectiveJob job = simulation.Job({.steps = 10, .count = 2});
  job.spec.initial_noise = Tensor::Host({2, 4, 4, 500}, DType::kF32);  // 64 kB
  Estimate estimate;
  EXPECT_TRUE(simulation.admission.Enter(1, job, simulation.clock.now, &estimate).ok());
  const auto refused = simulation.admission.Enter(2, job, simulation.clock.now, &estimate).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("limit of 100000"));
  EXPECT_TRUE(estimate.retry_seconds.has_value());
  job.spec.initial_noise = Tensor::Host({2, 4, 4, 5000}, DType::kF32);
  EXPECT_FALSE(simulation.admission.Enter(3, job, simulation.clock.now, &estimate).ok());
  EXPECT_FALSE(estimate.retry_seconds.has_value()) << "it will never fit";
}

TEST(Scheduling, NewSizesAreOpenedBetweenEvaluationsOfOthers) {
  int launches = 0;
  std::vector<int> launched;  // when a part was done
  Simulation simulation({.part_done = [&] { launched.push_back(launches); }});
  simulation.Add("plain", 0);
  simulation.devices[0].backend->fault = [&] {
    ++launches;
    return absl::OkStatus();
  };
  const auto running = simulation.Submit({.steps = 40});
  simulation.Step();
  std::vector<std::shared_ptr<Heard>> jobs;
  for (int size = 5; size < 13; ++size)
    jobs.push_back(simulation.Submit({.steps = 2, .model = "plain", .size = size}));
  const double evaluation = 0.0011;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const auto began = simulation.clock.now;
    const int evaluations = simulation.evaluations;
    simulation.Step();
    EXPECT_EQ(simulation.evaluations, evaluations + 1) << "one is reported after each size";
    EXPECT_LE(std::chrono::duration<double>(simulation.clock.now - began).count(),
              1.01 * evaluation);
    ASSERT_EQ(launched.size(), i + 1) << "of one size";
    EXPECT_EQ(launched[i], launches - 1) << "after its own launches, and before the evaluation";
  }
  simulation.RunAll();
  EXPECT_TRUE(running->done->ok());
  for (const auto& heard : jobs) EXPECT_TRUE(heard->done->ok()) << *heard->done;
}

TEST(Estimates, AreWhatHappens) {
  Simulation simulation({});
  std::mt19937 random(11);
  std::vector<std::pair<Estimate, std::shared_ptr<Heard>>> jobs;
  for (int i = 0; i < 200; ++i) {
    Estimate estimate;
    const auto heard = simulation.TrySubmit({.steps = 20}, &estimate);
    EXPECT_EQ(estimate.jobs_ahead, i) << "none has had a slot yet";
    jobs.emplace_back(estimate, *heard);
  }
  simulation.RunAll();
  for (const auto& [estimate, heard] : jobs) {
    const double evaluation = 0.0026;
    EXPECT_NEAR(heard->seconds(), *estimate.total_seconds, 20 * evaluation)
        << "within the length of one job";
    EXPECT_LT(*estimate.start_seconds, *estimate.total_seconds);
  }
  // Alone, it is exact.
  Estimate alone;
  const auto heard = simulation.TrySubmit({.steps = 30, .count = 4}, &alone);
  simulation.RunAll();
  EXPECT_NEAR((*heard)->seconds(), *alone.total_seconds, 1e-6);
  EXPECT_EQ(*alone.start_seconds, 0);
}

TEST(Estimates, CountGuidanceInThePartThatHasIt) {
  for (const bool pads_rows : {false, true}) {  // to powers of two
    SCOPED_TRACE(pads_rows);
    const auto cost = [](int rows) { return 0.001 + 0.0002 * rows; };
    Simulation simulation(
        {.max_rows = 8, .cost = cost, .pads_rows = pads_rows, .warm_up = pads_rows});
    EffectiveJob job = simulation.Job({.steps = 100, .count = 3, .guidance = 2});
    job.guided_evaluations = {0, 10};
    Estimate estimate;
    ASSERT_TRUE(simulation.queue.Submit(job, std::make_shared<Collector>(), &estimate).ok());
    const double expected = 10 * cost(pads_rows ? 8 : 6) + 90 * cost(pads_rows ? 4 : 3);
    EXPECT_NEAR(*estimate.total_seconds, expected, 1e-5);
    const auto before = simulation.clock.now;
    simulation.RunAll();
    EXPECT_NEAR(ToSeconds(simulation.clock.now - before), expected, 1e-5);
  }
}

TEST(Estimates, OfBucketsThatWereNotMeasuredLieBetweenThoseThatWere) {
  Simulation simulation({.warm_up = true});
  simulation.Submit({.steps = 4, .count = 16});
  simulation.RunAll();  // 1 and 16 rows have been measured now
  Estimate estimate;
  const auto heard =
      simulation.TrySubmit({.steps = 100, .count = 4, .deadline_seconds = 0.2}, &estimate);
  ASSERT_TRUE(heard.ok()) << "16 rows would take 0.26 s, these take 0.14: " << heard.status();
  EXPECT_NEAR(*estimate.total_seconds, 0.14, 1e-6);
  simulation.RunAll();
  EXPECT_TRUE((*heard)->done->ok());
}

TEST(Estimates, AreNeverMoreThanProportionalToAMeasuredOne) {
  Simulation simulation(
      {.cost = [](int rows) { return rows < 16 ? 0.001 * rows : 1.0; }, .warm_up = true});
  simulation.Submit({.steps = 1, .count = 16});
  simulation.RunAll();
  Estimate estimate;
  EXPECT_TRUE(simulation.TrySubmit({.steps = 10, .count = 2}, &estimate).ok());
  EXPECT_NEAR(*estimate.total_seconds, 0.02, 1e-6);
}

TEST(Estimates, OfMoreRowsThanWereMeasuredGoOnAtTheSamePace) {
  Simulation simulation({});
  Admission admission({});
  const auto lane = admission.Open("fake", Simulation::kSize, Simulation::kSize,
                                   {.rows = 16, .slots = 16, .buckets = {1, 2, 4, 8, 16}});
  const auto seconds = [&](int count) {
    Estimate estimate;
    const auto ticket = admission.Enter(1, simulation.Job({.steps = 1, .count = count}),
                                        simulation.clock.now, &estimate);
    EXPECT_TRUE(ticket.ok());
    admission.Withdraw(**ticket);
    admission.Left(**ticket, 0, EndReason::kCancelled);
    return *estimate.total_seconds;
  };
  admission.Measured(*lane, 2, 0.25);
  EXPECT_EQ(seconds(16), 0.25) << "of one bucket, nothing is known of more rows";
  admission.Measured(*lane, 4, 0.375);
  EXPECT_EQ(seconds(8), 0.625);
  EXPECT_EQ(seconds(16), 1.125);
  admission.Measured(*lane, 16, -1);  // captured alone
  EXPECT_EQ(seconds(16), 1.125);
  for (int i = 0; i < 2; ++i) admission.Measured(*lane, 2, 9.0);
  EXPECT_EQ(seconds(16), 0.375) << "two rows were disturbed, because four take less";
  admission.Measured(*lane, 16, 1.0);
  EXPECT_EQ(seconds(16), 1.0);
}

TEST(Estimates, OfAnotherSizeStartFromTheModelsOwn) {
  Admission admission({});
  const Admission::Room room{.rows = 16, .slots = 16, .buckets = {1, 2, 4, 8, 16}};
  const auto own = admission.Open("model", 4, 4, room);
  for (const int rows : room.buckets) admission.Measured(*own, rows, 0.01 * rows);
  const auto other = admission.Open("model", 4, 8, room);
  EXPECT_NEAR(admission.Cost(*other, 8), 0.16, 1e-9) << "twice the pixels";
  admission.Measured(*other, 16, 0.3);
  EXPECT_NEAR(admission.Cost(*other, 16), 0.3, 1e-9);
  EXPECT_NEAR(admission.Cost(*other, 8), 0.16, 1e-9) << "and not what 16 rows take";
}

TEST(Estimates, AreOfTheBucketThatRowsArePaddedTo) {
  Simulation simulation({});
  Admission admission({});
  const auto lane = admission.Open("fake", Simulation::kSize, Simulation::kSize,
                                   {.rows = 16, .slots = 16, .buckets = {1, 2, 4, 8, 16}});
  admission.Measured(*lane, 4, 0.5);
  admission.Measured(*lane, 8, 0.75);
  Estimate estimate;
  EXPECT_TRUE(
      admission.Enter(1, simulation.Job({.steps = 2, .count = 5}), simulation.clock.now, &estimate)
          .ok());
  EXPECT_EQ(*estimate.total_seconds, 1.5) << "five rows are eight";
}

// Another program takes the cores for one of the evaluations of warm-up, or for all of them.
TEST(Estimates, OutliveABusyWarmUp) {
  const auto estimate = [](Simulation& simulation) {
    Estimate estimate;
    const auto heard = simulation.TrySubmit({.steps = 20}, &estimate);
    simulation.RunAll();
    EXPECT_TRUE((*heard)->done->ok());
    return *estimate.total_seconds;
  };
  constexpr double kCost = 0.01, kBusy = 25 * kCost;
  for (int disturbed = 1; disturbed <= 3; ++disturbed) {
    int launched = 0;  // number 0 is not measured
    Simulation simulation(
        {.cost = [&](int) { return launched++ == disturbed ? kBusy : kCost; }, .warm_up = true});
    EXPECT_GE(launched, 3);
    EXPECT_NEAR(estimate(simulation), 20 * kCost, 1e-6) << "evaluation " << disturbed;
  }
  bool busy = true;
  Simulation simulation({.cost = [&](int) { return busy ? kBusy : kCost; }, .warm_up = true});
  busy = false;
  simulation.Submit({.steps = 2});
  simulation.RunAll();
  EXPECT_NEAR(estimate(simulation), 20 * kCost, 1e-6) << "two evaluations are enough";
  // Nor does a disturbance later on count.
  busy = true;
  simulation.Submit({.steps = 2});
  simulation.RunAll();
  busy = false;
  EXPECT_NEAR(estimate(simulation), 20 * kCost, 1e-6);
}

// What was measured of one row at warm-up is not believed when sixteen take less.
TEST(Estimates, OutliveABusyWarmUpAlsoAtOtherRows) {
  bool busy = true;
  Simulation simulation(
      {.cost = [&](int rows) { return (busy ? 25 : 1) * (0.01 + 0.001 * rows); }, .warm_up = true});
  busy = false;
  simulation.Submit({.steps = 2, .count = 16});
  simulation.RunAll();
  for (const int count : {1, 4}) {
    Estimate estimate;
    const auto heard = simulation.TrySubmit({.steps = 20, .count = count}, &estimate);
    EXPECT_LE(*estimate.total_seconds, 20 * 0.026 + 1e-6) << "as sixteen rows at most";
    simulation.RunAll();
  }
}

// A model that takes long loads as soon as one evaluation has been measured.
TEST(Estimates, WarmUpMeasuresLongEvaluationsOnce) {
  int launched = 0;
  Simulation simulation({.cost =
                             [&](int) {
                               ++launched;
                               return 5.0;
                             },
                         .warm_up = true});
  EXPECT_EQ(launched, 2) << "one of them is not measured";
}

// The first evaluation of another size captures its graph, which says nothing about the second.
TEST(Estimates, AreNotOfCaptures) {
  Simulation simulation({});
  simulation.Add("sized", /*classes=*/0);
  SimulatedBackend& backend = *simulation.devices[0].backend;
  backend.capture_seconds = 0.5;
  const int before = backend.captures;
  const auto heard = simulation.Submit({.steps = 2, .model = "sized", .size = 8});
  simulation.RunAll();
  ASSERT_TRUE(heard->done->ok()) << *heard->done;
  EXPECT_EQ(backend.captures, before + 1);
  EXPECT_NEAR(simulation.seconds_of["sized"], 2 * 0.0011, 1e-6);
}

// On a GPU they would run beside what warm-up measures of another model.
TEST(Estimates, WarmUpWaitsForDecodes) {
  Simulation simulation({.decode_cost = [](int) { return 0.1; }});
  Simulation::Device& device = simulation.devices[0];
  device.backend->can.runs_ahead = true;
  simulation.Add("other");
  simulation.Submit({.steps = 1});
  ASSERT_TRUE(device.batcher->Step().ok());
  ASSERT_TRUE(device.batcher->busy()) << "the evaluation is not reported yet";
  const FakeClock::TimePoint decoded = simulation.clock.now;
  device.backend->waited.clear();
  ASSERT_TRUE(device.batcher->WarmUp("other").ok());
  EXPECT_THAT(device.backend->waited, ::testing::Contains(decoded));
}

TEST(Estimates, SlotsMayBeWhatADeviceLacks) {
  for (const double guidance : {1.0, 3.0}) {
    Simulation simulation({.slots = 1});
    const double evaluation = guidance > 1 ? 0.0012 : 0.0011;
    std::vector<std::pair<Estimate, std::shared_ptr<Heard>>> jobs;
    for (int i = 0; i < 12; ++i) {
      Estimate estimate;
      const auto heard = simulation.TrySubmit({.steps = 20, .guidance = guidance}, &estimate);
      jobs.emplace_back(estimate, *heard);
    }
    Estimate estimate;
    EXPECT_EQ(
        simulation
            .TrySubmit({.steps = 20, .guidance = guidance, .deadline_seconds = 0.1}, &estimate)
            .status()
            .code(),
        absl::StatusCode::kDeadlineExceeded)
        << "there are rows for all, but it is the thirteenth of one slot";
    simulation.RunAll();
    for (const auto& [admitted, listener] : jobs)
      EXPECT_NEAR(listener->seconds(), *admitted.total_seconds, 20 * evaluation)
          << "within the length of one job";
    // Four images one after the other.
    const auto alone =
        simulation.TrySubmit({.steps = 5, .count = 4, .guidance = guidance}, &estimate);
    simulation.RunAll();
    EXPECT_NEAR((*alone)->seconds(), *estimate.total_seconds, 20 * evaluation);
    EXPECT_GE(*estimate.total_seconds, 19 * evaluation);
  }
}

TEST(Estimates, ADeadlineThatCannotBeMetIsRefusedAtOnce) {
  Simulation simulation({});
  Estimate estimate;
  // 100 evaluations take 110 ms.
  EXPECT_TRUE(simulation.TrySubmit({.steps = 100, .deadline_seconds = 0.12}, &estimate).ok());
  auto refused = simulation.TrySubmit({.steps = 100, .deadline_seconds = 0.1}, &estimate).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("100 evaluations"));
  EXPECT_FALSE(estimate.retry_seconds.has_value()) << "it would never be met";
  simulation.RunAll();
  for (int i = 0; i < 64; ++i) simulation.Submit({.steps = 100});
  simulation.Step();
  refused = simulation.TrySubmit({.steps = 100, .deadline_seconds = 0.3}, &estimate).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_GT(estimate.retry_seconds.value(), 0) << "the queue is to blame";
  const auto quick = simulation.TrySubmit({.steps = 4, .deadline_seconds = 0.3}, &estimate);
  ASSERT_TRUE(quick.ok()) << "a short job goes first: " << quick.status();
  simulation.RunAll();
  EXPECT_TRUE((*quick)->done->ok());
}

// Only what is admitted is measured: a server that refuses all would never learn better.
TEST(Estimates, OfABusyWarmUpRefuseDeadlinesNoLongerThanAJobTakes) {
  constexpr double kCost = 0.01;
  bool busy = true;
  Simulation simulation({.cost = [&](int) { return busy ? 25 * kCost : kCost; }, .warm_up = true});
  busy = false;
  const Simulation::Request request = {.steps = 20, .deadline_seconds = 22 * kCost};
  const auto first = simulation.TrySubmit(request);
  ASSERT_TRUE(first.ok()) << "the lane is idle: " << first.status();
  EXPECT_EQ(simulation.TrySubmit(request).status().code(), absl::StatusCode::kDeadlineExceeded)
      << "one is enough to find out";
  for (int i = 0; i < 2; ++i) simulation.Step();
  const auto second = simulation.TrySubmit(request);
  ASSERT_TRUE(second.ok()) << "an evaluation was measured: " << second.status();
  simulation.RunAll();
  EXPECT_TRUE((*first)->done->ok()) << *(*first)->done;
  EXPECT_TRUE((*second)->done->ok()) << *(*second)->done;
}

TEST(Estimates, OfABusyWarmUpAreCorrectedAlsoForMoreRows) {
  Simulation simulation({});
  Admission admission({});
  const auto lane = admission.Open("fake", Simulation::kSize, Simulation::kSize,
                                   {.rows = 4, .slots = 4, .buckets = {1, 2, 4}});
  for (const int rows : {1, 2, 4}) admission.Measured(*lane, rows, 25.0);
  const Admission::Charge charge;
  admission.Measured(*lane, 1, 1.0, &charge);
  EXPECT_EQ(admission.Cost(*lane, 2), 2.0) << "two rows take no longer than one row twice";
  EXPECT_EQ(admission.Cost(*lane, 4), 4.0);
  for (int i = 0; i < 2; ++i) admission.Measured(*lane, 4, 5.0, &charge);
  EXPECT_EQ(admission.Cost(*lane, 4), 5.0) << "unless they did";
}

TEST(Estimates, StagesOfABusyWarmUpAreCorrectedByTheFirstJob) {
  Simulation simulation({});
  Admission admission({});
  const auto lane = admission.Open("fake", Simulation::kSize, Simulation::kSize,
                                   {.rows = 4, .slots = 4, .buckets = {1}});
  const auto decode = [&] {
    return admission.StageSeconds("fake")[static_cast<size_t>(Stage::kDecode)];
  };
  admission.MeasuredStage(*lane, Stage::kDecode, 1, 25.0, false);
  admission.MeasuredStage(*lane, Stage::kDecode, 2, 2.0, true);
  EXPECT_EQ(decode(), 1.0);
  admission.MeasuredStage(*lane, Stage::kDecode, 1, 0.5, true);
  EXPECT_EQ(decode(), 0.9) << "an average from then on";
}

// The machine was paused in all the evaluations that jobs have had.
TEST(Estimates, OfAPausedMachineAreCorrectedToo) {
  constexpr double kCost = 0.01;
  bool paused = true;
  Simulation simulation({.cost = [&](int) { return paused ? 25 * kCost : kCost; }});
  simulation.Submit({.steps = 5});
  simulation.RunAll();
  paused = false;
  const Simulation::Request request = {.steps = 20, .deadline_seconds = 22 * kCost};
  for (int i = 0; i < 2; ++i) {
    const auto heard = simulation.TrySubmit(request);
    ASSERT_TRUE(heard.ok()) << heard.status();
    simulation.RunAll();
    EXPECT_TRUE((*heard)->done->ok()) << *(*heard)->done;
  }
}

// What an idle lane tries and finds out is believed for a while.
TEST(Estimates, AnIdleLaneTriesADeadlineThatCannotBeMetTwiceAMinute) {
  Simulation simulation({});
  const Simulation::Request request = {.steps = 100, .deadline_seconds = 0.05};
  const auto begin = simulation.clock.now;
  int tried = 0;
  while (simulation.clock.now - begin < std::chrono::minutes(5)) {
    const auto heard = simulation.TrySubmit(request);
    simulation.RunAll();
    if (heard.ok()) {
      ++tried;
      EXPECT_EQ((*heard)->done->code(), absl::StatusCode::kDeadlineExceeded);
      EXPECT_LE((*heard)->seconds(), 0.06);
    } else {
      EXPECT_EQ(heard.status().code(), absl::StatusCode::kDeadlineExceeded);
    }
    simulation.clock.Advance(1);
  }
  EXPECT_GE(tried, 9);
  EXPECT_LE(tried, 10);
}

double Seconds(FakeClock::TimePoint::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

TEST(Places, MoveAsTheQueueDoes) {
  constexpr double kEvaluation = 0.1, kJob = 24 * kEvaluation;
  Simulation simulation({.slots = 1, .cost = [](int) { return kEvaluation; }});
  std::vector<std::shared_ptr<Heard>> jobs;
  for (int i = 0; i < 6; ++i) jobs.push_back(simulation.Submit({.steps = 12, .count = 2}));
  simulation.RunAll();
  for (int i = 0; i < 6; ++i) {
    const auto& places = jobs[i]->places;
    std::vector<int> ahead;
    for (const auto& [time, estimate] : places) {
      if (ahead.empty() || ahead.back() != estimate.jobs_ahead)
        ahead.push_back(estimate.jobs_ahead);
      EXPECT_NEAR(Seconds(jobs[i]->ended.value() - time), *estimate.total_seconds, kJob)
          << "job " << i << " behind " << estimate.jobs_ahead;
    }
    std::vector<int> expected;
    for (int j = i; j > 0; --j) expected.push_back(j);
    if (i > 0) expected.push_back(0);
    EXPECT_EQ(ahead, expected) << "job " << i;
    for (size_t j = 1; j < places.size(); ++j) {
      EXPECT_GE(Seconds(places[j].first - places[j - 1].first), 1) << "once a second";
      EXPECT_LT(places[j].second.images_ahead, places[j - 1].second.images_ahead);
      EXPECT_LT(*places[j].second.start_seconds, *places[j - 1].second.start_seconds);
    }
  }
}

TEST(Places, AreToldOnlyWhenTheyChange) {
  Simulation simulation({.slots = 1, .cost = [](int) { return 0.1; }});
  simulation.Submit({.steps = 1000});
  simulation.Step();  // it waits no more
  const auto waiting = simulation.Submit({.steps = 1000});
  for (int i = 0; i < 100; ++i) simulation.Step();
  EXPECT_EQ(waiting->places.size(), 0u);
  // Shorter jobs that come later go first.
  simulation.Submit({.steps = 20, .count = 2});
  for (int i = 0; i < 15; ++i) simulation.Step();
  ASSERT_EQ(waiting->places.size(), 1u);
  EXPECT_EQ(waiting->places[0].second.jobs_ahead, 2) << "and the one that was parked for them";
  simulation.End(simulation.last_id, EndReason::kCancelled);
  for (int i = 0; i < 15; ++i) simulation.Step();
  ASSERT_EQ(waiting->places.size(), 2u);
  EXPECT_EQ(waiting->places[1].second.jobs_ahead, 0);
  EXPECT_EQ(waiting->places[1].second.images_ahead, 0);
}

TEST(Places, OfManyJobsAreToldAFewAtATime) {
  Simulation simulation({.slots = 1, .cost = [](int) { return 0.1; }});
  std::vector<std::shared_ptr<Heard>> jobs;
  for (int i = 0; i < 300; ++i) jobs.push_back(simulation.Submit({.steps = 10}));
  const auto told = [&] {
    size_t places = 0;
    for (const auto& heard : jobs) places += heard->places.size();
    return places;
  };
  for (size_t before = 0; before < 299; before = told()) {
    simulation.Step();
    ASSERT_GT(told(), before) << "the walk goes on after each evaluation";
    EXPECT_LE(told() - before, 64u);
  }
  for (int i = 1; i < 300; ++i) {
    ASSERT_EQ(jobs[i]->places.size(), 1u) << i;
    EXPECT_EQ(jobs[i]->places[0].second.jobs_ahead, i - 1) << "one has its slot";
  }
}

TEST(Limits, AJobMayHaveMoreEvaluationsThanAnIntHolds) {
  Simulation simulation({.limits = {.images = 1 << 16}});
  EffectiveJob job = simulation.Job({.steps = 2, .count = 1 << 16, .deadline_seconds = 1e9});
  job.evaluations = 100'000;  // both are the engine's highest limits
  const auto collected = std::make_shared<Collector>();
  ASSERT_TRUE(simulation.queue.Submit(std::move(job), collected).ok());
  simulation.Step();
  EXPECT_EQ(collected->progress(), 16) << "of no fewer than that, as it checks";
  simulation.clock.Advance(1e9);
  simulation.queue.EndDueJobs();
  ASSERT_TRUE(collected->done().has_value());
  EXPECT_THAT(std::string(collected->done()->message()), HasSubstr("16 of 6553600000 evaluations"));
}

TEST(Faults, WhatIsWastedIsCountedByReason) {
  Simulation simulation({});
  const auto end_after = [&](int evaluations, EndReason reason) {
    simulation.Submit({.steps = 50, .guidance = 2});
    for (int i = 0; i < evaluations; ++i) simulation.Step();
    simulation.End(simulation.last_id, reason);
  };
  end_after(3, EndReason::kCancelled);
  end_after(5, EndReason::kDisconnected);
  end_after(7, EndReason::kDrained);
  simulation.Submit({.steps = 50, .deadline_seconds = 0.06});
  simulation.clock.Advance(0.05);  // the device was busy with something else
  simulation.RunAll();
  const auto wasted = simulation.Totals().wasted_rows;
  EXPECT_EQ(wasted[static_cast<size_t>(EndReason::kCancelled)], 6u);
  EXPECT_EQ(wasted[static_cast<size_t>(EndReason::kDisconnected)], 10u);
  EXPECT_EQ(wasted[static_cast<size_t>(EndReason::kDrained)], 14u);
  EXPECT_EQ(wasted[static_cast<size_t>(EndReason::kDeadline)], 10u);
}

/// Forty sizes of about as many pixels, as SDXL has them, use the activations of the largest, and a
/// few slots each.
TEST(Sizes, FortyRunInTheMemoryOfTheLargest) {
  constexpr int kOwn = Simulation::kSize;
  std::vector<std::pair<int, int>> sizes;
  for (int height = 1; height <= kOwn * kOwn; ++height)
    for (int width = 1; height * width <= kOwn * kOwn; ++width)
      if (height * width != kOwn * kOwn || height != width) sizes.emplace_back(height, width);
  ASSERT_GE(sizes.size(), 40u);
  sizes.resize(40);
  Simulation simulation({.max_rows = 64});
  simulation.Add("plain", 0);
  StepBatcher& batcher = *simulation.devices[0].batcher;
  const size_t activations = batcher.ActivationBytes("plain"), slots = batcher.SlotBytes("plain");
  const auto request = [&](size_t i) {
    return Simulation::Request{.steps = 3 + static_cast<int>(i) % 3,
                               .seed = i,
                               .model = "plain",
                               .size = sizes[i % sizes.size()].first,
                               .width = sizes[i % sizes.size()].second};
  };
  std::vector<std::shared_ptr<Heard>> together;
  for (size_t i = 0; i < 3 * sizes.size(); ++i) together.push_back(simulation.Submit(request(i)));
  while (simulation.busy()) {
    simulation.Step();
    ASSERT_EQ(batcher.ActivationBytes("plain"), activations) << "no size takes any of its own";
    ASSERT_LE(batcher.SlotBytes("plain"), 13.5 * slots);
  }
  for (size_t i = 0; i < together.size(); ++i) {
    ASSERT_TRUE(together[i]->done->ok()) << *together[i]->done;
    if (i % 7 > 0) continue;
    Simulation other({.max_rows = 8});
    other.Add("plain", 0);
    const auto alone = other.Submit(request(i));
    other.RunAll();
    EXPECT_EQ(alone->images, together[i]->images) << i;
  }
}

/// A size of many more pixels runs in the same memory with fewer rows at a time, and takes memory
/// of its own only if it needs more for a few rows.
TEST(Sizes, LargeOnesHaveFewerRows) {
  Simulation simulation({.max_rows = 64});
  simulation.Add("plain", 0);
  StepBatcher& batcher = *simulation.devices[0].batcher;
  const size_t activations = batcher.ActivationBytes("plain");
  const auto twice =
      simulation.Submit({.steps = 3, .count = 40, .model = "plain", .size = 2 * Simulation::kSize});
  simulation.RunAll();
  ASSERT_TRUE(twice->done->ok()) << *twice->done;
  EXPECT_EQ(batcher.ActivationBytes("plain"), activations);
  EXPECT_LE(simulation.widest, 16);
  EXPECT_GE(simulation.widest, 4);
  const auto large =
      simulation.Submit({.steps = 3, .count = 9, .model = "plain", .size = 8 * Simulation::kSize});
  simulation.RunAll();
  ASSERT_TRUE(large->done->ok()) << *large->done;
  EXPECT_GT(batcher.ActivationBytes("plain"), activations);
  Simulation other({.max_rows = 8});
  other.Add("plain", 0);
  const auto alone =
      other.Submit({.steps = 3, .count = 9, .model = "plain", .size = 8 * Simulation::kSize});
  other.RunAll();
  EXPECT_EQ(alone->images, large->images);
}

TEST(Sizes, OneThatIsLongUnusedIsGivenUp) {
  Simulation simulation({});
  simulation.Add("plain", 0);
  const SimulatedBackend& backend = *simulation.devices[0].backend;
  const size_t before = backend.allocated();
  for (const int size : {5, 6}) {
    const auto heard = simulation.Submit({.steps = 2, .model = "plain", .size = size});
    simulation.RunAll();
    ASSERT_TRUE(heard->done->ok());
  }
  const size_t taken = backend.allocated();
  EXPECT_GT(taken, before);
  const auto after = [&](std::chrono::minutes time) {
    simulation.clock.Advance(std::chrono::duration<double>(time).count());
    simulation.Submit({.steps = 4});
    simulation.RunAll();
    return backend.allocated();
  };
  EXPECT_EQ(after(StepBatcher::kUnused / 2), taken);
  EXPECT_EQ(after(StepBatcher::kUnused), before);
  const auto again = simulation.Submit({.steps = 2, .model = "plain", .size = 5});
  simulation.RunAll();
  EXPECT_TRUE(again->done->ok());
}

/// Nothing steps a device that has nothing to draw, so it asks when to look.
TEST(Sizes, OneThatIsLongUnusedIsGivenUpByAnIdleDevice) {
  Simulation simulation({});
  simulation.Add("plain", 0);
  StepBatcher& batcher = *simulation.devices[0].batcher;
  const SimulatedBackend& backend = *simulation.devices[0].backend;
  const size_t before = backend.allocated();
  EXPECT_FALSE(batcher.NextEviction().has_value()) << "models keep their own sizes";
  const auto began = simulation.clock.now;
  for (const int size : {5, 6}) simulation.Submit({.steps = 2, .model = "plain", .size = size});
  simulation.RunAll();
  const size_t taken = backend.allocated();
  const auto next = batcher.NextEviction();
  ASSERT_TRUE(next.has_value());
  EXPECT_GE(*next, began + StepBatcher::kUnused);
  EXPECT_LE(*next, simulation.clock.now + StepBatcher::kUnused);
  batcher.EvictUnused();
  EXPECT_EQ(backend.allocated(), taken) << "too early";
  simulation.clock.now += StepBatcher::kUnused;
  EXPECT_FALSE(simulation.busy());
  for (int i = 0; i < 2; ++i) {
    ASSERT_LE(batcher.NextEviction().value(), simulation.clock.now);
    batcher.EvictUnused();
  }
  EXPECT_FALSE(batcher.NextEviction().has_value());
  EXPECT_EQ(backend.allocated(), before);
}

/// So memory does not grow with the number of sizes that were ever requested.
TEST(Sizes, OneIsForgottenWithItsLastJobAndDevice) {
  Simulation simulation({});
  simulation.Add("plain", 0);
  const auto lane_of = [&](int size) -> std::weak_ptr<Admission::Lane> {
    return simulation.admission.Open("plain", size, size, {.rows = 16, .slots = 4});
  };
  EXPECT_TRUE(lane_of(5).expired()) << "nobody has it";
  std::vector<std::weak_ptr<Admission::Lane>> lanes;
  for (int size = 5; size < 9; ++size) {
    const auto heard = simulation.Submit({.steps = 2, .model = "plain", .size = size});
    lanes.push_back(lane_of(size));
    EXPECT_FALSE(lanes.back().expired()) << "the job has it";
    simulation.RunAll();
    ASSERT_TRUE(heard->done->ok());
    EXPECT_FALSE(lanes.back().expired()) << "the device has it";
  }
  simulation.Submit({.steps = 2, .model = "plain", .size = 9});
  lanes.push_back(lane_of(9));
  simulation.End(simulation.last_id, EndReason::kCancelled);
  EXPECT_TRUE(lanes.back().expired()) << "no device opened it";
  EXPECT_TRUE(simulation.devices[0].batcher->EvictIdle());
  for (const auto& lane : lanes) EXPECT_TRUE(lane.expired());
  EXPECT_FALSE(lane_of(Simulation::kSize).expired()) << "the model's own";
}

/// Memory that idle sizes hold is there for a model that is loaded.
TEST(Sizes, IdleOnesMakeRoomForAModel) {
  Simulation simulation({});
  SimulatedBackend& backend = *simulation.devices[0].backend;
  const size_t without = backend.allocated();
  simulation.Add("plain", 0);
  const size_t model = backend.allocated() - without;
  for (int size = 5; size < 9; ++size) {
    simulation.Submit({.steps = 2, .model = "plain", .size = size});
    simulation.RunAll();
  }
  ASSERT_GE(backend.allocated(), without + 2 * model) << "else this tests nothing";
  backend.memory_limit = backend.allocated() + model / 2;
  simulation.Add("another", 0);
  EXPECT_LE(backend.allocated(), backend.memory_limit);
  EXPECT_TRUE(simulation.devices[0].batcher->EvictIdle());
  EXPECT_EQ(backend.allocated(), without + 2 * model);
  EXPECT_FALSE(simulation.devices[0].batcher->EvictIdle());
}

/// Images that are drawn at the same time, with the rest of the queue given.
std::vector<int> DecodedTogether(std::function<double(int)> cost, bool others_wait,
                                 std::map<int, std::vector<float>>* images = nullptr) {
  Simulation simulation({.max_rows = 64, .warm_up = true, .decode_cost = std::move(cost)});
  if (others_wait) simulation.Submit({.steps = 60});
  simulation.Step();
  simulation.decoded_together.clear();
  const auto heard = simulation.Submit({.steps = 3, .count = 8});
  while (!heard->done) simulation.Step();
  EXPECT_TRUE(heard->done->ok()) << *heard->done;
  if (images) *images = heard->images;
  return simulation.decoded_together;
}

TEST(Decoding, IsSideBySideWhereThatIsFasterAndNobodyWaits) {
  using ::testing::Each;
  using ::testing::ElementsAre;
  std::map<int, std::vector<float>> one, many;
  // As long as one image: then always.
  EXPECT_THAT(DecodedTogether([](int) { return 0.01; }, true, &many), ElementsAre(8));
  EXPECT_THAT(DecodedTogether([](int) { return 0.01; }, false), ElementsAre(8));
  // Faster for each, but longer than one: only while no evaluation waits.
  const auto faster = [](int images) { return 0.005 + 0.005 * images; };
  EXPECT_THAT(DecodedTogether(faster, true), ElementsAre(1, 1, 1, 1, 1, 1, 1, 1));
  EXPECT_THAT(DecodedTogether(faster, false), ElementsAre(8));
  // In proportion, or slower: never.
  EXPECT_THAT(DecodedTogether([](int images) { return 0.01 * images; }, false, &one), Each(1));
  EXPECT_THAT(DecodedTogether([](int images) { return 0.01 * images * images; }, false), Each(1));
  // Two at a time gain, four do not.
  EXPECT_THAT(DecodedTogether([](int images) { return images <= 2 ? 0.01 : 0.01 * images; }, false),
              ElementsAre(2, 2, 2, 2));
  EXPECT_EQ(one, many);
}

/// Beside evaluations that take longer, more images are decoded than one.
TEST(Decoding, TakesAsLongAsTheEvaluationBeforeIt) {
  using ::testing::ElementsAre;
  const auto decoded = [](double evaluation) {
    Simulation simulation({.max_rows = 64,
                           .cost = [=](int) { return evaluation; },
                           .warm_up = true,
                           .decode_cost = [](int images) { return 0.005 + 0.005 * images; }});
    simulation.Submit({.steps = 60});
    simulation.Step();
    simulation.decoded_together.clear();
    const auto heard = simulation.Submit({.steps = 3, .count = 8});
    while (!heard->done) simulation.Step();
    EXPECT_TRUE(heard->done->ok()) << *heard->done;
    return simulation.decoded_together;
  };
  EXPECT_THAT(decoded(0.046), ElementsAre(8));
  EXPECT_THAT(decoded(0.044), ElementsAre(4, 2, 2)) << "four and two take 0.04 s";
  EXPECT_THAT(decoded(0.009), ElementsAre(1, 1, 1, 1, 1, 1, 1, 1));
}

/// Images that only wait to be decoded hold the slots that the next evaluation would need. If they
/// were decoded one at a time, models of one step would go on with one row and one image.
TEST(Decoding, OfModelsWithOneStepKeepsBatchesLarge) {
  const std::function<double(int)> costs[] = {
      [](int images) { return 0.0005 * (1 + images); },      // less than an evaluation
      [](int images) { return images <= 2 ? 0.01 : 0.02; },  // more, and two are the fastest
      [](int images) { return 0.005 * images; }};            // as long for each
  for (const auto& decode_cost : costs) {
    SCOPED_TRACE(&decode_cost - costs);
    Simulation simulation({.max_rows = 16,
                           .cost = [](int rows) { return 0.004 + 0.001 * rows; },
                           .warm_up = true,
                           .decode_cost = decode_cost});
    constexpr int kImages = 200;
    for (uint64_t seed = 0; seed < kImages; ++seed) simulation.Submit({.steps = 1, .seed = seed});
    simulation.RunAll();
    EXPECT_EQ(simulation.row_evaluations, kImages);
    EXPECT_LE(simulation.evaluations, 1 + (kImages - 16 + 7) / 8);
  }
}

/// Beside evaluations that take less time than an image, one image is decoded at a time.
TEST(Decoding, HoldsUpAShortEvaluationForOneImageAtMost) {
  const double decode = 0.02;
  Simulation simulation({.max_rows = 32, .warm_up = true, .decode_cost = [&](int images) {
                           return decode * (1 + 0.5 * images) / 1.5;
                         }});
  const auto running = simulation.Submit({.steps = 200});
  simulation.Step();
  for (int i = 0; i < 20; ++i)
    simulation.Submit({.steps = 2 + i % 3, .seed = static_cast<uint64_t>(i)});
  while (!running->done) {
    const auto began = simulation.clock.now;
    const size_t progress = running->progress.size();
    simulation.Step();
    EXPECT_LE(std::chrono::duration<double>(simulation.clock.now - began).count(),
              decode * 1.001 + 0.001 + 0.0001 * 32);
    if (!running->done) {
      EXPECT_EQ(running->progress.size(), progress + 1);
    }
  }
  simulation.RunAll();
}

TEST(Decoding, IsToldAsAStage) {
  Simulation simulation({.warm_up = true, .decode_cost = [](int images) { return 0.01 * images; }});
  const auto heard = simulation.Submit({.steps = 3, .count = 2});
  simulation.RunAll();
  ASSERT_EQ(heard->stages.size(), 4u);
  std::map<std::pair<int, Stage>, double> seconds;
  for (const auto& [image, stage, took] : heard->stages) seconds[{image, stage}] = took;
  for (const int image : {0, 1}) {
    EXPECT_LT(seconds.at({image, Stage::kDenoise}), 0) << "many evaluations";
    EXPECT_NEAR(seconds.at({image, Stage::kDecode}), 0.01, 1e-6);
  }
  EXPECT_NEAR(simulation.stage_seconds, 0.02, 1e-6);
}

TEST(Estimates, CountDecoding) {
  Simulation simulation({.warm_up = true, .decode_cost = [](int images) { return 0.05 * images; }});
  Estimate estimate;
  const auto heard = simulation.TrySubmit({.steps = 4, .count = 3}, &estimate);
  ASSERT_TRUE(heard.ok());
  simulation.RunAll();
  EXPECT_GE(*estimate.total_seconds, 3 * 0.05);
  EXPECT_NEAR((*heard)->seconds(), *estimate.total_seconds, 0.01);
  EXPECT_NEAR(simulation.admission.StageSeconds("fake")[static_cast<size_t>(Stage::kDecode)], 0.05,
              1e-6);
}

/// Of prompts and init images, by what they took so far; and of sizes that were never drawn by
/// their pixels.
TEST(Estimates, CountEveryStage) {
  Simulation simulation({});
  Admission& admission = simulation.admission;
  const auto lane =
      admission.Open("fake", Simulation::kSize, Simulation::kSize, {.rows = 16, .slots = 16});
  const auto total = [&](bool init_image, int size = Simulation::kSize) {
    EffectiveJob job = simulation.Job({.steps = 4, .size = size});
    if (init_image) job.spec.init_image = Tensor::Host({size, size, 1}, DType::kF32);
    Estimate estimate;
    const auto ticket = admission.Enter(1, job, simulation.clock.now, &estimate);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    admission.Left(**ticket, 0, EndReason::kCancelled);
    return *estimate.total_seconds;
  };
  const double plain = total(false);
  EXPECT_EQ(total(true), plain) << "nothing was measured";
  admission.MeasuredStage(*lane, Stage::kCondition, 2, 0.5, false);
  EXPECT_NEAR(total(false), plain + 0.25, 1e-9);
  admission.MeasuredStage(*lane, Stage::kEncode, 1, 1.0, false);
  EXPECT_NEAR(total(false), plain + 0.25, 1e-9);
  EXPECT_NEAR(total(true), plain + 1.25, 1e-9);
  // Known prompts make the next estimate shorter.
  admission.MeasuredStage(*lane, Stage::kCondition, 4, 0, true);
  EXPECT_NEAR(total(false), plain + 0.8 * 0.25, 1e-9);
  // Four times as many pixels: evaluations and init images take as much longer, prompts do not.
  EXPECT_NEAR(total(true, 2 * Simulation::kSize), 4 * (plain + 1) + 0.8 * 0.25, 1e-9);
}

TEST(Faults, MemoryForASizeIsRefusedBeforeItIsDrawnAndNeverLater) {
  Simulation simulation({.slots = 4});
  simulation.Add("plain", 0);
  SimulatedBackend& backend = *simulation.devices[0].backend;
  const auto first = simulation.Submit({.steps = 1, .model = "plain", .size = 6});
  simulation.RunAll();
  ASSERT_TRUE(first->done->ok());
  backend.memory_limit = backend.allocated();  // there is room for one more size
  const auto running = simulation.Submit({.steps = 300, .count = 3});
  simulation.Step();
  for (const int size : {5, 3, 5, 6, 3}) {
    const auto heard = simulation.Submit({.steps = 3, .model = "plain", .size = size});
    simulation.Step();  // takes its memory
    const size_t taken = backend.allocated();
    const auto refused = simulation.Submit({.steps = 3, .model = "plain", .size = 8});
    simulation.Step();
    EXPECT_FALSE(refused->done.has_value()) << "a size is in use that may make room";
    EXPECT_EQ(backend.allocated(), taken) << "nothing of it is left";
    while (!heard->done) simulation.Step();
    EXPECT_TRUE(heard->done->ok()) << *heard->done;
    EXPECT_EQ(backend.allocated(), taken) << "drawing takes no memory";
    simulation.Step();
    ASSERT_TRUE(refused->done.has_value()) << "it does not fit without the other either";
    EXPECT_EQ(refused->done->code(), absl::StatusCode::kResourceExhausted);
    EXPECT_LT(backend.allocated(), taken);
  }
  simulation.RunAll();
  EXPECT_TRUE(running->done->ok());
}

/// Whether the device has no more memory, or the model's sizes have their budget.
TEST(Faults, SizesThatAreInUseMakeTheOthersWait) {
  for (const bool limited : {false, true}) {
    SCOPED_TRACE(limited);
    Simulation simulation({.slots = 4});
    simulation.Add("plain", 0);
    SimulatedBackend& backend = *simulation.devices[0].backend;
    const size_t own = simulation.devices[0].batcher->SlotBytes("plain");
    const auto taken = [&] { return simulation.devices[0].batcher->SlotBytes("plain") - own; };
    if (limited) {
      const auto largest = simulation.Submit({.model = "plain", .size = 10});
      simulation.RunAll();
      ASSERT_TRUE(largest->done->ok());
      backend.memory_limit = backend.allocated();
    }
    std::vector<std::shared_ptr<Heard>> jobs;
    for (int size = 5; size <= 8; ++size)
      for (int width = 5; width <= 10; ++width)
        jobs.push_back(
            simulation.Submit({.steps = 40, .model = "plain", .size = size, .width = width}));
    size_t most = 0;
    while (simulation.busy()) {
      simulation.Step();
      most = std::max(most, taken());
    }
    for (const auto& heard : jobs) {
      ASSERT_TRUE(heard->done.has_value());
      EXPECT_TRUE(heard->done->ok()) << *heard->done;
    }
    EXPECT_LE(most, 12 * own) << "kSizesMemory";
    EXPECT_LT(jobs.front()->ended_at, jobs.back()->started_at) << "it waited";
    EXPECT_TRUE(std::is_sorted(jobs.begin(), jobs.end(), [](const auto& a, const auto& b) {
      return *a->started_at < *b->started_at;
    })) << "in their order";
  }
}

/// Not for ever: neither one that could only fit without the others, nor one of a model whose sizes
/// are always in use.
TEST(Faults, ASizeWaitsForRoomHalfAMinute) {
  for (const bool limited : {false, true}) {
    SCOPED_TRACE(limited);
    Simulation simulation({.slots = 4, .cost = [](int) { return 1.0; }});
    simulation.Add("plain", 0);
    SimulatedBackend& backend = *simulation.devices[0].backend;
    std::vector<std::shared_ptr<Heard>> jobs;
    for (int width = 5; width <= 16; ++width)
      jobs.push_back(
          simulation.Submit({.steps = 1000, .model = "plain", .size = 8, .width = width}));
    for (int i = 0; i < 24; ++i) simulation.Step();
    std::erase_if(jobs, [](const auto& heard) { return !heard->started_at.has_value(); });
    EXPECT_GE(jobs.size(), 2u);
    EXPECT_LT(jobs.size(), 12u);
    if (limited) backend.memory_limit = backend.allocated();
    const auto late = simulation.Submit({.steps = 1, .model = "plain", .size = 9});
    const auto submitted = simulation.clock.now;
    while (!late->done) simulation.Step();
    EXPECT_GE(simulation.clock.now - submitted, JobQueue::kWaitForRoom);
    EXPECT_LE(simulation.clock.now - submitted, 3 * JobQueue::kWaitForRoom);
    if (limited) {
      EXPECT_EQ(late->done->code(), absl::StatusCode::kResourceExhausted);
    } else {
      EXPECT_TRUE(late->done->ok()) << *late->done << "; it may have more than the budget";
    }
    for (const auto& heard : jobs) EXPECT_FALSE(heard->done.has_value());
  }
}

/// Sizes of a model wait for its share of the memory, and another model has an idle size.
TEST(Faults, ASizeThatWaitsForItsModelsShareHoldsUpNoOtherModel) {
  Simulation simulation({.max_rows = 4, .slots = 4, .cost = [](int) { return 0.05; }});
  for (const char* model : {"a", "b", "c"}) simulation.Add(model, 0);
  simulation.Submit({.steps = 2, .model = "a", .size = 8});
  simulation.RunAll();
  std::vector<std::shared_ptr<Heard>> jobs;
  for (int size = 8; size <= 40; size += 4)
    jobs.push_back(simulation.Submit({.steps = 1000, .count = 4, .model = "b", .size = size}));
  for (int i = 0; i < 30; ++i) simulation.Step();
  EXPECT_TRUE(jobs.front()->started_at.has_value());
  ASSERT_FALSE(jobs.back()->started_at.has_value()) << "it waits";
  const auto quick = simulation.Submit({.steps = 2, .model = "c", .size = 8});
  while (!quick->done) {
    simulation.Step();
    ASSERT_LE(simulation.evaluations - quick->submitted_at, 20);
  }
  EXPECT_TRUE(quick->done->ok()) << *quick->done;
}

/// A size waits while its model's others are in use; then a command evicts these before a step
/// does.
TEST(Faults, ASizeThatWaitsIsOpenedThoughAnotherHandMadeTheRoom) {
  Simulation simulation({.slots = 4});
  simulation.Add("plain", 0);
  SimulatedBackend& backend = *simulation.devices[0].backend;
  StepBatcher& batcher = *simulation.devices[0].batcher;
  const auto used = simulation.Submit({.steps = 3, .model = "plain", .size = 8});
  simulation.Step();
  backend.memory_limit = backend.allocated();
  const auto waits = simulation.Submit({.steps = 3, .model = "plain", .size = 7});
  while (!used->done) simulation.Step();
  EXPECT_FALSE(waits->done.has_value());
  EXPECT_TRUE(batcher.busy());
  EXPECT_TRUE(batcher.EvictIdle());
  simulation.RunAll();
  ASSERT_TRUE(waits->done.has_value());
  EXPECT_TRUE(waits->done->ok()) << *waits->done;
}

TEST(Faults, TenThousandCancelsLeakNoSlotAndChangeNoBit) {
  Simulation simulation({.max_rows = 8, .limits = {.requests = 20'000, .images = 40'000}});
  CancelStorm storm(simulation, 2);
  while (storm.cancelled() < 10'000) storm.Next();
  ASSERT_NO_FATAL_FAILURE(storm.Finish());
  EXPECT_GT(simulation.Totals().wasted_rows[static_cast<size_t>(EndReason::kCancelled)], 1'000u)
      << "many had begun";
  // All slots are there to be had.
  simulation.Submit({.steps = 1, .count = 8});
  simulation.widest = 0;
  simulation.Step();
  EXPECT_EQ(simulation.widest, 8);
}

}  // namespace
}  // namespace denoised
