// SPDX-License-Identifier: Apache-2.0
// The parts of denoise bench: what is sent and when, how it is recorded, what is told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "command/bench_report.h"
#include "command/files.h"
#include "command/image_hashes.h"
#include "command/load_generator.h"
#include "command/workload.h"
#include "denoised/connection.h"
#include "tests/eventually.h"
#include "tests/io/temporary_directory.h"

namespace denoised::command {
namespace {

using std::chrono::milliseconds;
using testing::DoubleNear;
using testing::ElementsAre;
using testing::HasSubstr;

// --- what is sent

std::vector<Arrival> Take(Workload workload, int count) {
  std::vector<Arrival> arrivals;
  for (int i = 0; i < count; ++i) {
    auto arrival = workload.Next();
    if (!arrival) break;
    arrivals.push_back(*std::move(arrival));
  }
  return arrivals;
}

std::vector<Arrival> FromMix(const std::vector<std::string>& mix, double rate, uint64_t seed,
                             int count) {
  auto workload = Workload::FromMix(mix, rate, seed);
  EXPECT_TRUE(workload.ok()) << workload.status();
  return Take(*std::move(workload), count);
}

TEST(MixTest, EveryKeyIsRead) {
  const auto kind = ParseMix(
      "name=big,model=cats,steps=4..50,count=2,size=64x48,sampler=heun,guidance=1.5,"
      "priority=batch,previews=3,deadline=2.5,cancel=0..0.5,weight=3,prompt=a red=apple,words=2..9,"
      "negative=");
  ASSERT_TRUE(kind.ok()) << kind.status();
  EXPECT_EQ(kind->name, "big");
  EXPECT_EQ(kind->model, "cats");
  EXPECT_EQ(kind->steps->low, 4);
  EXPECT_EQ(kind->steps->high, 50);
  EXPECT_EQ(kind->count->high, 2);
  EXPECT_EQ(kind->size, std::pair(64, 48));
  EXPECT_EQ(kind->sampler, client::Sampler::kHeun);
  EXPECT_EQ(kind->guidance, 1.5);
  EXPECT_EQ(kind->priority, client::Priority::kBatch);
  EXPECT_EQ(kind->previews, 3);
  EXPECT_EQ(kind->deadline, 2.5);
  EXPECT_EQ(kind->cancel->high, 0.5);
  EXPECT_EQ(kind->weight, 3);
  EXPECT_EQ(kind->prompt, "a red=apple");
  EXPECT_EQ(kind->words->high, 9);
  EXPECT_EQ(kind->negative, "");
}

TEST(MixTest, RefusesByKeyAndValue) {
  for (const auto& [text, message] : std::vector<std::pair<std::string, std::string>>{
           {"steps", "\"steps\" has no '='"},
           {"steps=0", "steps is \"0\"; use a number of 1 or more"},
           {"steps=9..4", "steps is \"9..4\""},
           {"count=x", "count is \"x\""},
           {"weight=0", "weight is \"0\"; use a number above 0"},
           {"weight=nan", "weight is \"nan\""},
           {"size=-4", "size is \"-4\"; use pixels"},
           {"sampler=dance", "use one of ddpm"},
           {"priority=urgent", "use one of interactive, normal, batch"},
           {"words=0", "words is \"0\"; use a number of 1 or more"},
           {"previews=0", "previews is \"0\""},
           {"deadline=inf", "deadline is \"inf\""},
           {"cancel=-1", "cancel is \"-1\""},
           {"steps=08..x", "steps is \"08..x\""},
           {"steps=0x10", "steps is \"0x10\""},
           {"steps=1,steps=2", "--mix: steps is given twice; give it once, or another --mix"},
           {"colour=red", "there is no key \"colour\"; use name"}}) {
    const auto kind = ParseMix(text);
    EXPECT_EQ(kind.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(kind.status().message()), HasSubstr(message)) << text;
  }
}

TEST(MixTest, NumbersAreDecimal) {
  EXPECT_EQ(ParseMix("steps=010")->steps->low, 10);
  EXPECT_EQ(ParseMix("previews=010")->previews, 10);
  EXPECT_EQ(ParseMix("size=064")->size, std::pair(64, 64));
}

TEST(WorkloadTest, RequestsDependOnTheSeedAndNotOnTheRate) {
  const std::vector<std::string> mix = {"steps=4..50,count=1..3", "steps=7,weight=2"};
  const auto slow = FromMix(mix, 1, 5, 100), fast = FromMix(mix, 10, 5, 100),
             other = FromMix(mix, 1, 6, 100);
  int same = 0;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(slow[i].generation.seed, fast[i].generation.seed);
    EXPECT_EQ(slow[i].generation.steps, fast[i].generation.steps);
    EXPECT_EQ(slow[i].kind, fast[i].kind);
    EXPECT_THAT(slow[i].at_seconds, DoubleNear(10 * fast[i].at_seconds, 1e-9));
    same += slow[i].generation.seed == other[i].generation.seed;
  }
  EXPECT_EQ(same, 0);
}

TEST(WorkloadTest, ArrivalsArePoisson) {
  constexpr int kCount = 20'000;
  const auto arrivals = FromMix({}, 50, 1, kCount);
  double mean = 0, squares = 0;
  for (int i = 1; i < kCount; ++i) {
    const double gap = arrivals[i].at_seconds - arrivals[i - 1].at_seconds;
    ASSERT_GE(gap, 0);
    mean += gap / kCount;
    squares += gap * gap / kCount;
  }
  // The gaps of a Poisson process are exponential: their standard deviation is their mean. Of so
  // many both are known to about 1 %.
  EXPECT_THAT(mean, DoubleNear(0.02, 0.0006));
  EXPECT_THAT(std::sqrt(squares - mean * mean), DoubleNear(0.02, 0.001));
}

TEST(WorkloadTest, DrawsFromTheMixByWeightAndRange) {
  const auto arrivals = FromMix({"name=a,steps=4..6", "name=b,steps=9,weight=3"}, 1, 1, 4000);
  std::map<int, int> steps;
  for (const Arrival& arrival : arrivals) {
    ++steps[*arrival.generation.steps];
    EXPECT_EQ(arrival.kind, *arrival.generation.steps == 9 ? "b" : "a");
  }
  EXPECT_EQ(steps.size(), 4u);
  EXPECT_NEAR(steps[9], 3000, 120);
  for (const int each : {4, 5, 6}) EXPECT_NEAR(steps[each], 333, 75) << each;
}

TEST(WorkloadTest, PromptsAreFixedOrOfEachRequestsOwn) {
  const auto arrivals = FromMix(
      {"name=own,words=12..15,negative=blurry", "name=fixed,prompt=a red apple"}, 0, 1, 500);
  std::set<std::string> own;
  int fixed = 0;
  for (const Arrival& arrival : arrivals) {
    ASSERT_EQ(arrival.generation.prompts.size(), 1u);
    const client::Prompt& prompt = arrival.generation.prompts[0];
    if (arrival.kind == "fixed") {
      ++fixed;
      EXPECT_EQ(prompt.text, "a red apple");
      EXPECT_EQ(prompt.negative, std::nullopt);
    } else {
      own.insert(prompt.text);
      EXPECT_EQ(prompt.negative, "blurry");
      const auto spaces = std::count(prompt.text.begin(), prompt.text.end(), ' ');
      EXPECT_TRUE(spaces >= 11 && spaces <= 14) << prompt.text;
    }
  }
  EXPECT_GT(fixed, 100);
  EXPECT_EQ(own.size(), arrivals.size() - fixed) << "no two are equal";
  EXPECT_TRUE(FromMix({}, 0, 1, 1)[0].generation.prompts.empty());
}

class TraceTest : public testing::Test {
 protected:
  absl::StatusOr<Workload> Read(const std::string& text, double speed = 1) {
    EXPECT_TRUE(WriteFile(path_, text).ok());
    return Workload::FromTrace(path_, speed, 1);
  }

  const TemporaryDirectory folder_;
  const std::string path_ = folder_ / "trace.jsonl";
};

TEST_F(TraceTest, GivesBackWhatWasSaved) {
  const auto arrivals = FromMix(
      {"model=cats,steps=4..50,count=1..3,size=64x48,sampler=heun,guidance=1.5,priority=batch",
       "previews=2,deadline=2.5,cancel=0..0.5", "words=3..9,negative=blurry"},
      20, 3, 50);
  std::string text;
  for (const Arrival& arrival : arrivals) text += ToTrace(arrival).dump() + "\n";
  auto workload = Read(text);
  ASSERT_TRUE(workload.ok()) << workload.status();
  const auto again = Take(*std::move(workload), 100);
  ASSERT_EQ(again.size(), arrivals.size());
  for (size_t i = 0; i < again.size(); ++i) {
    EXPECT_EQ(ToTrace(again[i]), ToTrace(arrivals[i]));
  }
}

TEST_F(TraceTest, RunsFaster) {
  auto workload = Read("{\"at_seconds\": 1}\n\n{\"at_seconds\": 3, \"priority\": \"batch\"}\n", 2);
  ASSERT_TRUE(workload.ok()) << workload.status();
  const auto arrivals = Take(*std::move(workload), 9);
  ASSERT_EQ(arrivals.size(), 2u);
  EXPECT_EQ(arrivals[0].at_seconds, 0.5);
  EXPECT_EQ(arrivals[0].kind, "normal");
  EXPECT_EQ(arrivals[1].at_seconds, 1.5);
  EXPECT_EQ(arrivals[1].kind, "batch");
}

TEST_F(TraceTest, RefusesByLine) {
  for (const auto& [text, message] : std::vector<std::pair<std::string, std::string>>{
           {"", "there is no line in it"},
           {"{\"at_seconds\": 1}\nsoon\n", "line 2: is not valid JSON"},
           {"{\"at_seconds\": 1}\n[2]\n", "line 2: is no JSON object"},
           {"{\"at_seconds\": 1}\n{\"at_seconds\": 2, \"steps\": 4, \"steps\": 5}",
            "line 2: has \"steps\" twice; give it once"},
           {"{\"steps\": 4}", "line 1: at_seconds is missing"},
           {"{\"at_seconds\": -1}", "line 1: at_seconds is missing or no number of 0 or more"},
           {"{\"at_seconds\": 2}\n{\"at_seconds\": 1}", "line 2: at_seconds is less"},
           {"{\"at_seconds\": 0, \"seed\": -5}", "seed is \"-5\""},
           {"{\"at_seconds\": 0, \"steps\": 1.5}", "steps is \"1.5\""}}) {
    const absl::Status status = Read(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message)) << text;
  }
}

// --- how it is recorded

/// Only a cancel ends a request of so many steps.
constexpr int kEndless = 1000;

/// Answers every request after a time, with an image of one byte: its seed's lowest.
class FakeConnection : public client::Connection {
 public:
  explicit FakeConnection(milliseconds latency) : latency_(latency) {}

  std::atomic<int> under_way = 0, most_under_way = 0, calls = 0;
  int together = 0;  // no request ends before so many were under way at once
  std::atomic<int> classes = 0;
  std::atomic<bool> reads_text = false;
  client::Model state;    // of every model, with its error
  milliseconds stall{0};  // of the first call, before it returns
  absl::Status answer;
  absl::Status later;  // of all questions about models but the first

  absl::StatusOr<client::GenerationResult> Generate(const client::Generation& generation,
                                                    const client::CallOptions& options) override {
    const Entered entered(this);
    std::mutex mutex;
    std::condition_variable_any wake;
    std::unique_lock lock(mutex);
    if (generation.steps == kEndless) {
      wake.wait(lock, options.stop, [] { return false; });
    } else {
      wake.wait_for(lock, options.stop, latency_, [] { return false; });
    }
    EXPECT_TRUE(Eventually([this] { return most_under_way >= together; }));
    if (options.stop.stop_requested()) return absl::CancelledError("cancelled");
    if (!answer.ok()) return answer;
    client::GenerationResult result = {.params = {.model = generation.model},
                                       .images = {ImageOf(generation)},
                                       .timing = {.queued_seconds = 0.25}};
    return result;
  }

  std::unique_ptr<client::StreamCall> StreamGenerate(
      const client::Generation& generation, const std::optional<client::PreviewOptions>& preview,
      client::StreamListener listener, const client::CallOptions& options) override {
    if (calls == 0) std::this_thread::sleep_for(stall);
    return std::make_unique<Call>(this, generation, preview.has_value(), std::move(listener));
  }

  absl::StatusOr<client::Model> GetModel(const std::string& name,
                                         const client::CallOptions& options) override {
    if (++questions_ > 1 && !later.ok()) return later;
    client::Model model = state;
    model.name = name;
    model.limits.num_classes = classes;
    model.capabilities.text = reads_text;
    return model;
  }

 private:
  struct Entered {
    explicit Entered(FakeConnection* connection) : connection(connection) {
      ++connection->calls;
      const int now = ++connection->under_way;
      int most = connection->most_under_way;
      while (now > most && !connection->most_under_way.compare_exchange_weak(most, now)) {
      }
    }
    ~Entered() { --connection->under_way; }
    FakeConnection* const connection;
  };

  /// Generate as a stream.
  class Call : public client::StreamCall {
   public:
    Call(FakeConnection* connection, const client::Generation& generation, bool preview,
         client::StreamListener listener)
        : thread_([=, this] {
            listener.on_event(client::Queued{.params = {.model = generation.model}});
            listener.on_event(client::Started{.queued_seconds = 0.25});
            if (preview) listener.on_event(client::Preview{});
            const auto result = connection->Generate(generation, {.stop = stop_.get_token()});
            if (result.ok()) {
              listener.on_event(result->images[0]);
              listener.on_event(client::Completed{result->params, result->timing});
            }
            listener.on_done(result.status());
          }) {}
    ~Call() override { stop_.request_stop(); }
    void Cancel() override { stop_.request_stop(); }
    absl::Status Wait() override { return absl::OkStatus(); }

   private:
    std::stop_source stop_;
    std::jthread thread_;
  };

  static client::Image ImageOf(const client::Generation& generation) {
    return {.seed = *generation.seed, .content = std::string(1, char(*generation.seed & 0xff))};
  }

  const milliseconds latency_;
  std::atomic<int> questions_ = 0;
};

class LoadTest : public testing::Test {
 protected:
  LoadResult Run(const std::vector<std::string>& mix, double rate, const LoadOptions& options,
                 std::stop_token stop = {}) {
    auto workload = Workload::FromMix(mix, rate, 1);
    EXPECT_TRUE(workload.ok()) << workload.status();
    return RunLoad({client::Client(connection_)}, *std::move(workload), options, nullptr, nullptr,
                   std::move(stop));
  }

  std::shared_ptr<FakeConnection> connection_ = std::make_shared<FakeConnection>(milliseconds(20));
};

TEST_F(LoadTest, AClosedLoopKeepsItsPlacesTaken) {
  connection_->together = 4;
  const LoadResult result = Run({"previews=1"}, 0, {.concurrency = 4, .requests = 24});
  EXPECT_EQ(result.outcomes.size(), 24u);
  EXPECT_EQ(connection_->calls, 24);
  EXPECT_EQ(connection_->most_under_way, 4);
  EXPECT_EQ(result.images, 24);
  EXPECT_EQ(result.hashes.size(), 24u);
  for (const Outcome& outcome : result.outcomes) {
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_GE(outcome.latency_seconds, 0.02);
    EXPECT_EQ(outcome.queued_seconds, 0.25);
    ASSERT_TRUE(outcome.first_preview_seconds);
    EXPECT_LT(*outcome.first_preview_seconds, outcome.latency_seconds);
    EXPECT_EQ(outcome.images, 1);
  }
}

// Calls that end at about the same time, on threads of their own, are heard of in any order.
TEST_F(LoadTest, ArrivalsOfAClosedLoopAreInOrder) {
  connection_ = std::make_shared<FakeConnection>(milliseconds(0));
  auto workload = Workload::FromMix({}, 0, 1);
  ASSERT_TRUE(workload.ok()) << workload.status();
  // Busy cores keep what has ended from being told of.
  std::vector<std::jthread> busy(2 * std::thread::hardware_concurrency());
  for (std::jthread& thread : busy) {
    thread = std::jthread([](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
      }
    });
  }
  std::vector<double> arrivals;
  RunLoad({client::Client(connection_)}, *std::move(workload),
          {.concurrency = 64, .requests = 5000},
          [&](const Arrival& arrival) { arrivals.push_back(arrival.at_seconds); }, nullptr, {});
  EXPECT_EQ(arrivals.size(), 5000u);
  EXPECT_TRUE(std::is_sorted(arrivals.begin(), arrivals.end()));
}

TEST_F(LoadTest, WarmUpIsSentAndNotCounted) {
  LoadResult result;
  double unit = 0.1;
  // A machine that is too busy to end a request in the window is given more time.
  for (; result.window_images == 0 && unit < 10; unit *= 2) {
    connection_->calls = 0;
    result =
        Run({}, 0, {.concurrency = 2, .warm_up_seconds = 2 * unit, .duration_seconds = 3 * unit});
    EXPECT_GT(connection_->calls, static_cast<int>(result.outcomes.size()));
    EXPECT_GT(result.images, result.window_images);
    EXPECT_DOUBLE_EQ(result.window_seconds, 3 * unit);
    for (const Outcome& outcome : result.outcomes) {
      EXPECT_GE(outcome.arrival_seconds, 2 * unit);
      EXPECT_LT(outcome.arrival_seconds, 5 * unit);
    }
  }
  EXPECT_GT(result.window_images, 0);
}

TEST_F(LoadTest, LatencyCountsFromTheArrivalAlsoWhenSentLate) {
  connection_->stall = milliseconds(300);
  const LoadResult result = Run({}, 100, {.requests = 20});
  ASSERT_EQ(result.outcomes.size(), 20u);
  const auto sent_late =
      std::count_if(result.outcomes.begin(), result.outcomes.end(), [](const Outcome& outcome) {
        EXPECT_GE(outcome.latency_seconds, outcome.sent_late_seconds + 0.02);
        EXPECT_GE(outcome.latency_seconds, 0.31 - outcome.arrival_seconds);
        return outcome.sent_late_seconds > 0.02;
      });
  EXPECT_GT(sent_late, 10) << "what arrived while the first call stalled waited for it";
}

TEST_F(LoadTest, CancelsWhatTheMixSays) {
  const LoadResult result = Run({"name=cancelled,cancel=0..0.01,steps=1000", "name=kept"}, 0,
                                {.concurrency = 4, .requests = 40});
  int cancelled = 0;
  for (const Outcome& outcome : result.outcomes) {
    cancelled += outcome.cancelled;
    EXPECT_EQ(outcome.cancelled, outcome.kind == "cancelled");
    EXPECT_EQ(outcome.status.ok(), outcome.kind == "kept");
  }
  EXPECT_GT(cancelled, 5);
  EXPECT_EQ(result.images, 40 - cancelled);
  EXPECT_EQ(connection_->under_way, 0);
}

TEST_F(LoadTest, UnaryCallsTellTheSame) {
  const LoadResult result = Run({"cancel=0.005,name=cancelled,steps=1000", "name=kept"}, 0,
                                {.concurrency = 4, .requests = 40, .unary = true});
  for (const Outcome& outcome : result.outcomes) {
    EXPECT_EQ(outcome.cancelled, outcome.kind == "cancelled");
    if (outcome.cancelled) continue;
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.images, 1);
    EXPECT_EQ(outcome.queued_seconds, 0.25);
  }
}

TEST_F(LoadTest, AStopEndsEverything) {
  std::stop_source stop;
  std::jthread stopper([&] {
    EXPECT_TRUE(Eventually([this] { return connection_->calls > 6; }));  // of 3, some have ended
    stop.request_stop();
  });
  const LoadResult result =
      Run({}, 0, {.concurrency = 3, .duration_seconds = 3600}, stop.get_token());
  EXPECT_EQ(connection_->under_way, 0);
  EXPECT_GT(result.images, 0);
  EXPECT_LT(result.window_seconds, 3600);
}

TEST_F(LoadTest, AStopEndsAlsoWhatIsOverdue) {
  connection_->stall = milliseconds(50);  // meanwhile all of them arrive
  auto workload = Workload::FromMix({}, 1e6, 1);
  ASSERT_TRUE(workload.ok()) << workload.status();
  std::stop_source stop;
  int sent = 0;
  const LoadResult result = RunLoad(
      {client::Client(connection_)}, *std::move(workload), {.requests = 2000},
      [&](const Arrival&) {
        if (++sent == 3) stop.request_stop();
      },
      nullptr, stop.get_token());
  EXPECT_EQ(sent, 3);
  EXPECT_EQ(result.outcomes.size(), 3u);
}

TEST_F(LoadTest, LabelsFollowFromTheSeed) {
  connection_->classes = 10;
  auto workload = Workload::FromMix({"count=3"}, 1, 1);
  ASSERT_TRUE(workload.ok()) << workload.status();
  ASSERT_TRUE(workload->Learn(client::Client(connection_), {}).ok());
  const auto arrivals = Take(*std::move(workload), 1);
  const client::Generation& generation = arrivals.at(0).generation;
  const int first = static_cast<int>(*generation.seed % 10);
  EXPECT_THAT(generation.class_labels, ElementsAre(first, (first + 1) % 10, (first + 2) % 10));
}

TEST_F(LoadTest, ModelsThatReadNoTextGetNoPrompts) {
  connection_->classes = 10;
  for (const std::string mix : {"words=5", "prompt=x", "negative=x"}) {
    auto workload = Workload::FromMix({"steps=4", "model=digits," + mix}, 0, 1);
    ASSERT_TRUE(workload.ok()) << workload.status();
    const absl::Status status = workload->Learn(client::Client(connection_), {});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << mix;
    EXPECT_EQ(status.message(),
              "--mix: the model digits reads no text; leave prompt, words and negative out");
  }
}

TEST_F(LoadTest, NothingIsSaidOfModelsThatAreNotReady) {
  const auto expect = [this](client::ModelState state, const std::string& message) {
    connection_->state.state = state;
    connection_->state.error = "out of memory";
    auto workload = Workload::FromMix({"model=emoji,words=5"}, 0, 1);
    ASSERT_TRUE(workload.ok()) << workload.status();
    const absl::Status status =
        workload->Learn(client::Client(connection_), {.timeout = milliseconds(300)});
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  };
  expect(client::ModelState::kLoading, "model emoji is still loading; try again when");
  expect(client::ModelState::kFailed, "model emoji could not be loaded: out of memory");
  expect(client::ModelState::kUnloading, "model emoji is being unloaded");
}

TEST_F(LoadTest, ALateAnswerAboutAModelThatWasLoadingSaysSo) {
  connection_->state.state = client::ModelState::kLoading;
  connection_->later = absl::DeadlineExceededError("the server did not answer in time");
  auto workload = Workload::FromMix({"model=emoji"}, 0, 1);
  ASSERT_TRUE(workload.ok()) << workload.status();
  const client::CallOptions options = {.timeout = milliseconds(300)};
  const absl::Status loading = workload->Learn(client::Client(connection_), options);
  EXPECT_EQ(loading.code(), absl::StatusCode::kFailedPrecondition) << loading;
  EXPECT_THAT(std::string(loading.message()), HasSubstr("model emoji is still loading"));
  EXPECT_EQ(workload->Learn(client::Client(connection_), options), connection_->later);
}

TEST_F(LoadTest, ModelsThatReadTextGetPrompts) {
  connection_->reads_text = true;
  auto workload = Workload::FromMix({}, 0, 1);
  ASSERT_TRUE(workload.ok()) << workload.status();
  ASSERT_TRUE(workload->Learn(client::Client(connection_), {}).ok());
  const auto arrivals = Take(*std::move(workload), 2);
  ASSERT_EQ(arrivals.at(0).generation.prompts.size(), 1u);
  EXPECT_NE(arrivals[0].generation.prompts[0].text, arrivals[1].generation.prompts[0].text);
}

// --- what is told

TEST(DistributionTest, NearestRank) {
  std::vector<double> seconds;
  for (int i = 100; i >= 1; --i) seconds.push_back(i);
  const auto times = DistributionOf(seconds);
  ASSERT_TRUE(times);
  EXPECT_EQ(times->p50, 50);
  EXPECT_EQ(times->p90, 90);
  EXPECT_EQ(times->p99, 99);
  EXPECT_EQ(times->max, 100);
  EXPECT_EQ(times->mean, 50.5);
  EXPECT_EQ(DistributionOf({7})->p50, 7);
  EXPECT_EQ(DistributionOf({1, 2, 3})->p50, 2);
  EXPECT_EQ(DistributionOf({1, 2, 3})->p99, 3);
  EXPECT_FALSE(DistributionOf({}));
}

TEST(BenchReportTest, CountsWhatWasInTimeAndWhatFailed) {
  LoadResult load = {
      .window_seconds = 2, .window_images = 6, .window_requests = 3, .window_in_time = 2};
  const auto add = [&load](double latency, std::optional<double> deadline, absl::Status status,
                           bool cancelled = false) {
    load.outcomes.push_back({.kind = cancelled ? "b" : "a",
                             .latency_seconds = latency,
                             .deadline_seconds = deadline,
                             .cancelled = cancelled,
                             .status = std::move(status)});
  };
  add(1, 2, absl::OkStatus());
  add(3, 2, absl::OkStatus());  // too late
  add(9, std::nullopt, absl::OkStatus());
  add(0.001, 2, absl::ResourceExhaustedError("the queue is full"));
  add(0.002, 2, absl::ResourceExhaustedError("the queue is full"));
  add(0.5, std::nullopt, absl::CancelledError("cancelled"), true);
  const BenchReport report = MakeReport(std::move(load));
  EXPECT_EQ(report.all.requests, 6);
  EXPECT_EQ(report.all.succeeded, 3);
  EXPECT_EQ(report.all.in_time, 2);
  EXPECT_EQ(report.all.failed, 2);
  EXPECT_EQ(report.all.cancelled, 1);
  EXPECT_EQ(report.all.latency->count, 3) << "quick refusals must not flatter the latency";
  EXPECT_EQ(report.all.latency->p50, 3);
  EXPECT_EQ(report.kinds.at("a").requests, 5);
  const nlohmann::json json = ToJson(report);
  EXPECT_EQ(json["images_per_second"], 3);
  EXPECT_EQ(json["goodput_per_second"], 1);
  EXPECT_EQ(json["errors"][0]["error"], "RESOURCE_EXHAUSTED");
  EXPECT_EQ(json["errors"][0]["count"], 2);
  EXPECT_THAT(Describe(report), HasSubstr("2 x RESOURCE_EXHAUSTED: the queue is full"));
  EXPECT_THAT(Describe(report), HasSubstr("40.0 % of all"));
}

TEST(ImageHashesTest, FindsDifferences) {
  ImageHashes first, second;
  first.Add("a", 1);
  first.Add("a", 1);
  first.Add("b", 2);
  EXPECT_TRUE(first.differences().empty());
  const auto read = ImageHashes::FromJson(first.ToJson());
  ASSERT_TRUE(read.ok()) << read.status();
  second.Add("a", 1);
  second.Add("b", 0xfedcba9876543210);
  second.Add("c", 3);
  EXPECT_EQ(second.CompareWith(*read), 2);
  EXPECT_THAT(second.differences(), ElementsAre("b"));
  second.Add("c", 4);  // within one run too
  EXPECT_THAT(second.differences(), ElementsAre("b", "c"));
  EXPECT_FALSE(ImageHashes::FromJson({{"a", "12x"}}).ok());
  EXPECT_FALSE(ImageHashes::FromJson(nullptr).ok());
}

TEST(ImageHashesTest, HashesTheBytes) {
  std::string bytes(100, 'a');
  const uint64_t hash = HashOf({.content = bytes});
  EXPECT_EQ(HashOf({.content = client::Tensor{.data = bytes}}), hash);
  for (char& byte : bytes) {
    byte ^= 1;
    EXPECT_NE(HashOf({.content = bytes}), hash);
    byte ^= 1;
  }
  EXPECT_NE(HashOf({.content = bytes.substr(1)}), hash);
}

}  // namespace
}  // namespace denoised::command
