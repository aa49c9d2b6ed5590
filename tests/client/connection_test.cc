// SPDX-License-Identifier: Apache-2.0
#include "denoised/connection.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "absl/strings/ascii.h"
#include "denoised/client.h"
#include "denoised/mock_connection.h"
#include "denoised/v1/model_admin.grpc.pb.h"
#include "tests/client/fake_service.h"
#include "tests/eventually.h"

namespace denoised::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::ElementsAre;
using testing::HasSubstr;

ConnectionOptions QuickRetries() {
  ConnectionOptions options;
  options.retry.initial_backoff = milliseconds(10);
  options.retry.max_backoff = milliseconds(40);
  return options;
}

class ConnectionTest : public testing::Test {
 protected:
  FakeServer server_;
  Client client_{*Connect(server_.address(), QuickRetries())};
};

/// What a listener heard.
struct Heard {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> events;
  std::vector<int> places;  // images in front
  std::vector<Image> images;
  std::optional<absl::Status> done;

  StreamListener Listener() {
    return {.on_event =
                [this](const Event& event) {
                  constexpr const char* kNames[] = {"queued",  "started", "progress",
                                                    "preview", "image",   "completed"};
                  std::lock_guard lock(mutex);
                  events.push_back(kNames[event.index()]);
                  if (const auto* image = std::get_if<Image>(&event)) images.push_back(*image);
                  if (const auto* queued = std::get_if<Queued>(&event))
                    places.push_back(queued->images_ahead);
                  changed.notify_all();
                },
            .on_done =
                [this](const absl::Status& status) {
                  std::lock_guard lock(mutex);
                  EXPECT_FALSE(done.has_value()) << "on_done came twice";
                  done = status;
                }};
  }
  void WaitForEvent() {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, seconds(60), [this] { return !events.empty(); }));
  }
};

TEST_F(ConnectionTest, EveryKnobArrives) {
  Generation generation;
  generation.model = "digits";
  generation.request_id = "knobs";
  generation.seed = 18446744073709551615u;
  generation.count = 2;
  generation.class_labels = {3, 4};
  generation.guidance_scale = 1.5;
  generation.steps = 7;
  generation.sampler = Sampler::kHeun;
  generation.noise_schedule = NoiseSchedule::kExponential;
  generation.eta = 0.25;
  generation.s_churn = 1;
  generation.s_tmin = 2;
  generation.s_tmax = 3;
  generation.s_noise = 4;
  generation.solver_order = 2;
  generation.width = 8;
  generation.height = 12;
  generation.format = ImageFormat::kRawUint8;
  generation.quality = 55;
  generation.embed_metadata = false;
  generation.initial_noise = Tensor{Tensor::Type::kFloat32, {1, 1, 1}, std::string(4, '\0')};
  generation.init_image = InitImage{.source = std::string("png"), .strength = 0.5};
  generation.mask = Mask{.source = Tensor{Tensor::Type::kUint8, {1, 2}, std::string(2, '\xff')}};
  generation.image_guidance_scale = 1.25;
  generation.guidance_rescale = 0.75;
  generation.guidance_start = 0.125;
  generation.guidance_stop = 0.625;
  const auto result = client_.Generate(generation);
  ASSERT_TRUE(result.ok()) << result.status();

  const v1::GenerationParams sent = server_.requests().at(0);
  EXPECT_EQ(sent.request_id(), "knobs");
  EXPECT_EQ(sent.s_tmin(), 2);
  EXPECT_EQ(sent.s_tmax(), 3);
  EXPECT_EQ(sent.s_noise(), 4);
  EXPECT_EQ(sent.eta(), 0.25);
  EXPECT_EQ(sent.s_churn(), 1);
  EXPECT_EQ(sent.solver_order(), 2);
  EXPECT_EQ(sent.output().quality(), 55);
  EXPECT_TRUE(sent.output().has_embed_metadata());
  EXPECT_FALSE(sent.output().embed_metadata());
  EXPECT_EQ(sent.initial_noise().data().size(), 4u);
  EXPECT_EQ(sent.init_image().encoded(), "png");
  EXPECT_EQ(sent.init_image().strength(), 0.5);
  EXPECT_THAT(sent.mask().tensor().shape(), ElementsAre(1, 2));
  EXPECT_EQ(sent.mask().tensor().data(), "\xff\xff");
  EXPECT_EQ(sent.image_guidance_scale(), 1.25);
  EXPECT_EQ(sent.guidance_rescale(), 0.75);
  EXPECT_EQ(sent.guidance_start(), 0.125);
  EXPECT_EQ(sent.guidance_stop(), 0.625);

  EXPECT_EQ(result->params.seed, 18446744073709551615u);
  EXPECT_EQ(result->params.sampler, Sampler::kHeun);
  EXPECT_EQ(result->params.noise_schedule, NoiseSchedule::kExponential);
  EXPECT_EQ(result->params.guidance_scale, 1.5);
  EXPECT_THAT(result->params.class_labels, ElementsAre(3, 4));
  EXPECT_EQ(result->params.eta, 0.25);
  EXPECT_EQ(result->params.s_churn, 1);
  EXPECT_EQ(result->params.s_tmin, 2);
  EXPECT_EQ(result->params.s_tmax, 3);
  EXPECT_EQ(result->params.s_noise, 4);
  EXPECT_EQ(result->params.solver_order, 2);
  ASSERT_EQ(result->images.size(), 2u);
  EXPECT_EQ(result->images[1].seed, 0u);  // modulo 2^64
  EXPECT_EQ(result->images[1].class_label, 4);
  const Tensor& tensor = std::get<Tensor>(result->images[1].content);
  EXPECT_EQ(tensor.type, Tensor::Type::kUint8);
  EXPECT_THAT(tensor.shape, ElementsAre(12, 8, 1));
  EXPECT_EQ(tensor.data.size(), 96u);
  EXPECT_EQ(result->timing.total_seconds, 0.5);
}

TEST_F(ConnectionTest, SeedsOfImagesTakeThePlaceOfASeed) {
  const auto result = client_.Generate({.seeds = {9, 2, 9}, .count = 3});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(server_.requests().at(0).has_seed());
  EXPECT_THAT(result->params.seeds, ElementsAre(9, 2, 9));
  ASSERT_EQ(result->images.size(), 3u);
  EXPECT_EQ(result->images[1].seed, 2u);
  EXPECT_EQ(result->images[2].seed, 9u);
}

TEST_F(ConnectionTest, UnsetKnobsStayUnset) {
  ASSERT_TRUE(client_.Generate({}).ok());
  v1::GenerationParams sent = server_.requests().at(0);
  EXPECT_TRUE(sent.has_seed());  // the connection's own, for retries
  sent.clear_seed();
  sent.clear_output();
  EXPECT_EQ(sent.ByteSizeLong(), 0u) << sent.DebugString();
}

TEST_F(ConnectionTest, WhatWasRunCanBeSentAgain) {
  Generation generation = {.model = "digits", .request_id = "mine"};
  generation.seed = 7;
  generation.count = 2;
  generation.prompts = {{.text = "a red apple", .negative = "", .text_2 = "x", .negative_2 = "y"},
                        {.text = ""}};
  generation.clip_skip = 1;
  generation.max_chunks = 2;
  generation.sizes = {.original_size = {{1, 2}}, .crop = {{3, 4}}, .target_size = {{5, 6}}};
  generation.guidance_scale = 2.5;
  generation.image_guidance_scale = 1.5;
  generation.guidance_rescale = 0.25;
  generation.guidance_start = 0.125;
  generation.guidance_stop = 0.75;
  generation.steps = 3;
  generation.sampler = Sampler::kHeun;
  generation.noise_schedule = NoiseSchedule::kBeta;
  generation.eta = 0.5;
  generation.s_churn = 1;
  generation.s_tmin = 2;
  generation.s_tmax = 3;
  generation.s_noise = 4;
  generation.solver_order = 2;
  generation.width = 16;
  generation.height = 8;
  generation.format = ImageFormat::kRawUint8;
  generation.quality = 80;
  generation.embed_metadata = false;
  generation.init_image = {.source = "a file", .strength = 0.5};
  generation.mask = {.source = "a mask"};
  generation.initial_noise = {
      .type = Tensor::Type::kFloat32, .shape = {1, 1, 1, 1}, .data = "1234"};
  generation.priority = Priority::kBatch;
  generation.survives = true;
  generation.include_timings = true;
  const auto result = client_.Generate(generation);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_TRUE(client_.Generate(result->params.request).ok());
  v1::GenerationParams first = server_.requests().at(0);
  first.mutable_init_image()->clear_source();  // uploads do not come back
  first.mutable_mask()->clear_source();
  first.mutable_initial_noise()->clear_data();
  EXPECT_EQ(server_.requests().at(1).DebugString(), first.DebugString());
  EXPECT_EQ(result->params.steps, 3);
  EXPECT_EQ(result->params.evaluations, 4);
  EXPECT_EQ(result->params.model_version, "1");
  EXPECT_EQ(result->params.strength, 0.5);
  EXPECT_TRUE(result->params.masked);
}

TEST_F(ConnectionTest, WhatTheSamplerDoesNotHaveStaysUnset) {
  const auto result = client_.Generate({.class_vectors = {{0.5f, 0.25f}}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->params.class_vectors, ElementsAre(std::vector{0.5f, 0.25f}));
  EXPECT_FALSE(result->params.s_tmin || result->params.s_tmax || result->params.s_noise);
  EXPECT_FALSE(result->params.solver_order);
}

TEST_F(ConnectionTest, RefusesLabelsAndVectorsTogether) {
  const Generation both = {.class_labels = {1}, .class_vectors = {{0.5f}}};
  EXPECT_EQ(client_.Generate(both).status().code(), absl::StatusCode::kInvalidArgument);
  Heard heard;
  EXPECT_EQ(client_.StreamGenerate(both, {}, heard.Listener())->Wait().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(heard.done.has_value());
  EXPECT_EQ(server_.generations(), 0);
}

TEST_F(ConnectionTest, TextThatIsNotUtf8IsRefusedByItsField) {
  const std::string bad = "\xff";
  const auto expect = [](const absl::Status& status, const std::string& field) {
    EXPECT_EQ(status, absl::InvalidArgumentError(field + " is not UTF-8; encode it so"));
  };
  expect(client_.Generate({.model = bad}).status(), "params.model");
  expect(client_.Generate({.request_id = bad}).status(), "params.request_id");
  expect(client_.Generate({.prompts = {{.text = "a"}, {.text = "b", .negative_2 = bad}}}).status(),
         "prompts[1].negative_2");
  expect(client_.WatchJob(bad, 0, {})->Wait(), "request_id");
  expect(client_.GetJob(bad).status(), "request_id");
  expect(client_.CancelJob(bad).status(), "request_id");
  expect(client_.LoadModel({.name = bad}).status(), "name");
  expect(client_.LoadModel({.name = "a", .directory = bad}).status(), "directory");
  expect(client_.LoadModel({.name = "a", .version = bad}).status(), "version");
  expect(client_.UnloadModel(bad), "name");
  expect(client_.SetAlias(bad, "a").status(), "alias");
  expect(client_.SetAlias("a", bad).status(), "target");
  expect(client_.DeleteAlias(bad), "alias");
  expect(client_.GetModel(bad).status(), "name");
  expect(client_.CheckHealth(bad).status(), "service");
}

TEST_F(ConnectionTest, RetriesWithTheSameSeed) {
  server_.FailNext(2, Draining());
  const auto result = client_.Generate({});
  ASSERT_TRUE(result.ok()) << result.status();
  const auto requests = server_.requests();
  ASSERT_EQ(requests.size(), 3u);
  EXPECT_EQ(requests[0].seed(), requests[2].seed());
  EXPECT_EQ(result->params.seed, requests[0].seed());
  ASSERT_TRUE(client_.Generate({}).ok());
  EXPECT_NE(server_.requests().back().seed(), requests[0].seed()) << "a new call, a new seed";
}

// The server joins what has the same id and the same parameters.
TEST_F(ConnectionTest, ARequestWithAnIdMayBeRepeated) {
  for (const char* id : {"a", "a", "b"}) ASSERT_TRUE(client_.Generate({.request_id = id}).ok());
  const auto requests = server_.requests();
  EXPECT_EQ(requests[0].seed(), requests[1].seed());
  EXPECT_NE(requests[0].seed(), requests[2].seed());
}

TEST_F(ConnectionTest, GivesUpAfterTheLastAttempt) {
  server_.FailNext(100, Draining());
  const absl::Status status = client_.Generate({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "the server is draining");
  EXPECT_EQ(Details(status).reason, "DRAINING");
  EXPECT_EQ(server_.generations(), 5);
}

TEST_F(ConnectionTest, ReturnsAtTheTimeTheQueueNamed) {
  server_.FailNext(1, QueueFull(milliseconds(200)));
  const auto begin = steady_clock::now();
  ASSERT_TRUE(client_.Generate({}).ok());
  EXPECT_GE(steady_clock::now() - begin, milliseconds(200));
  EXPECT_EQ(server_.generations(), 2);
}

TEST_F(ConnectionTest, FailsAtOnceWhenTheQueueOutlastsTheDeadline) {
  server_.FailNext(1, QueueFull(seconds(600)));
  const auto begin = steady_clock::now();
  const auto result = client_.Generate({}, {.timeout = seconds(300)});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_LT(steady_clock::now() - begin, seconds(60));
}

TEST_F(ConnectionTest, DoesNotRepeatWhatTheServerRefused) {
  const absl::Status status = client_.Generate({.guidance_scale = -1, .steps = 0}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Details(status).field_violations.size(), 2u);
  EXPECT_EQ(server_.generations(), 1);
}

TEST_F(ConnectionTest, DeadlineEndsACall) {
  server_.SetEvaluationTime(seconds(5));
  const CallOptions options = {.timeout = milliseconds(100)};
  EXPECT_EQ(client_.Generate({}, options).status().code(), absl::StatusCode::kDeadlineExceeded);
  Heard heard;
  EXPECT_EQ(client_.StreamGenerate({}, {}, heard.Listener(), options)->Wait().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ConnectionTest, AnyTimeoutHasItsMeaning) {
  using std::chrono::nanoseconds;
  EXPECT_TRUE(client_.ListModels({.timeout = nanoseconds::max()}).ok());
  for (const nanoseconds over : {nanoseconds(0), nanoseconds(-1), nanoseconds::min()}) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(client_.ListModels({.timeout = over}).status()))
        << over.count();
  }
}

TEST_F(ConnectionTest, StopRequestEndsAUnaryCall) {
  server_.SetEvaluationTime(seconds(5));
  std::stop_source source;
  std::jthread stopper([&] {
    while (server_.generations() == 0) std::this_thread::sleep_for(milliseconds(1));
    source.request_stop();
  });
  const auto result = client_.Generate({}, {.stop = source.get_token()});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled);
}

TEST_F(ConnectionTest, StopRequestEndsABackoff) {
  server_.FailNext(1, QueueFull(seconds(60)));
  std::stop_source source;
  std::jthread stopper([&] {
    while (server_.generations() == 0) std::this_thread::sleep_for(milliseconds(1));
    std::this_thread::sleep_for(milliseconds(50));
    source.request_stop();
  });
  const auto result = client_.Generate({}, {.stop = source.get_token()});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled);
}

TEST_F(ConnectionTest, StreamTellsEverythingInOrder) {
  Heard heard;
  const PreviewOptions preview = {.every_evaluations = 1, .format = ImageFormat::kRawUint8};
  const auto call = client_.StreamGenerate({.seed = 5, .count = 2}, preview, heard.Listener());
  ASSERT_TRUE(call->Wait().ok());
  EXPECT_EQ(heard.events.size(), 2 + 4 * (1 + 2) + 2 + 1u);
  EXPECT_EQ(heard.events[0], "queued");
  EXPECT_EQ(heard.events[1], "started");
  EXPECT_EQ(heard.events[2], "progress");
  EXPECT_EQ(heard.events[3], "preview");
  EXPECT_EQ(heard.events.back(), "completed");
  ASSERT_EQ(heard.images.size(), 2u);
  EXPECT_EQ(heard.images[1].seed, 6u);
  EXPECT_EQ(heard.images[1].mime_type, "image/png");
  EXPECT_TRUE(heard.done->ok());
}

TEST_F(ConnectionTest, StreamTellsWhenThePlaceChanges) {
  server_.SetPlaces({3, 1, 1, 2});
  Heard heard;
  ASSERT_TRUE(client_.StreamGenerate({}, {}, heard.Listener())->Wait().ok());
  EXPECT_THAT(heard.places, ElementsAre(3, 1, 2));
  // Another server has its own queue. Once the request has started, no place is news.
  server_.BreakNext(1, 2, Draining());
  Heard twice;
  ASSERT_TRUE(client_.StreamGenerate({}, {}, twice.Listener())->Wait().ok());
  EXPECT_THAT(twice.places, ElementsAre(3, 1, 3, 1, 2));
  server_.BreakNext(1, 5, Draining());
  Heard begun;
  ASSERT_TRUE(client_.StreamGenerate({}, {}, begun.Listener())->Wait().ok());
  EXPECT_THAT(begun.places, ElementsAre(3, 1, 2));
  // Places that go to and fro are no reason to try for ever.
  const int before = server_.generations();
  server_.BreakNext(100, 4, Draining());
  Heard never;
  EXPECT_EQ(client_.StreamGenerate({}, {}, never.Listener())->Wait().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(server_.generations(), before + 10);
}

TEST_F(ConnectionTest, StreamRetriesBeforeItsFirstEvent) {
  server_.FailNext(2, Draining());
  Heard heard;
  EXPECT_TRUE(client_.StreamGenerate({}, {}, heard.Listener())->Wait().ok());
  EXPECT_EQ(server_.generations(), 3);
  EXPECT_EQ(server_.requests()[0].seed(), server_.requests()[2].seed());
}

TEST_F(ConnectionTest, ACancelThatNobodyAskedForIsRetried) {
  server_.FailNext(1, grpc::Status::CANCELLED);
  Heard heard;
  EXPECT_TRUE(client_.StreamGenerate({}, {}, heard.Listener())->Wait().ok());
  server_.FailNext(1, grpc::Status::CANCELLED);
  EXPECT_TRUE(client_.Generate({}).ok());
  EXPECT_EQ(server_.generations(), 4);
}

TEST_F(ConnectionTest, AStreamThatBreaksIsBegunAgainAndTellsNothingTwice) {
  const PreviewOptions preview = {.format = ImageFormat::kRawUint8};
  Heard whole;
  ASSERT_TRUE(
      client_.StreamGenerate({.seed = 5, .count = 2}, preview, whole.Listener())->Wait().ok());
  // Somewhere in each: queued, started, four times progress and two previews, two images,
  // completed.
  for (const uint64_t events : {1, 4, 9, 14, 15, 16}) {
    for (const grpc::Status& end :
         {Draining(), grpc::Status(grpc::StatusCode::UNAVAILABLE, "Socket closed"),
          grpc::Status::CANCELLED}) {
      server_.BreakNext(1, events, end);
      const int before = server_.generations();
      Heard heard;
      const auto call = client_.StreamGenerate({.seed = 5, .count = 2}, preview, heard.Listener());
      ASSERT_TRUE(call->Wait().ok()) << events;
      EXPECT_EQ(server_.generations(), before + 2);
      EXPECT_EQ(heard.events, whole.events) << events;
      ASSERT_EQ(heard.images.size(), 2u);
      for (int i : {0, 1}) {
        EXPECT_EQ(std::get<std::string>(heard.images[i].content),
                  std::get<std::string>(whole.images[i].content));
      }
    }
  }
}

TEST_F(ConnectionTest, AStreamThatBreaksAtItsEndIsDone) {
  server_.BreakNext(1, 9, {grpc::StatusCode::UNAVAILABLE, "Socket closed"});
  Heard heard;
  EXPECT_TRUE(client_.StreamGenerate({.count = 2}, {}, heard.Listener())->Wait().ok());
  EXPECT_EQ(heard.events.back(), "completed");
  EXPECT_EQ(server_.generations(), 1);
}

TEST_F(ConnectionTest, AStreamThatBreaksAgainAndAgainEnds) {
  // A request that ends every server it comes to.
  server_.BreakNext(100, 4, {grpc::StatusCode::UNAVAILABLE, "Socket closed"});
  Heard heard;
  EXPECT_EQ(client_.StreamGenerate({}, {}, heard.Listener())->Wait().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(server_.generations(), 10);
  EXPECT_THAT(heard.events, ElementsAre("queued", "started", "progress", "progress"));
}

TEST_F(ConnectionTest, WhatSurvivesIsFoundAgainByItsId) {
  server_.BreakNext(1, 1, {grpc::StatusCode::UNAVAILABLE, "connection reset"});
  Heard heard;
  EXPECT_TRUE(client_.StreamGenerate({.survives = true}, {}, heard.Listener())->Wait().ok());
  const auto requests = server_.requests();
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_NE(requests[0].request_id(), "");
  EXPECT_EQ(requests[0].SerializeAsString(), requests[1].SerializeAsString());
  EXPECT_EQ(requests[0].disconnect_policy(), v1::DISCONNECT_POLICY_CONTINUE);
}

TEST_F(ConnectionTest, JobsAreListedPageByPage) {
  const auto some = client_.ListJobs({.limit = 120});
  ASSERT_TRUE(some.ok()) << some.status();
  ASSERT_EQ(some->size(), 120u);
  EXPECT_EQ(some->front().request_id, "249");
  EXPECT_EQ(some->back().request_id, "130");
  EXPECT_EQ(some->back().client, "me");
  const auto all = client_.ListJobs({.all_clients = true, .limit = 1000});
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 250u);
  EXPECT_EQ(all->back().request_id, "0");
  EXPECT_EQ(all->back().client, "somebody");
  const auto none = client_.ListJobs({.limit = 0});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("limit"));
}

TEST_F(ConnectionTest, FailedRetriesAreBounded) {
  ConnectionOptions options = QuickRetries();
  options.retry.budget = 2;
  const Client client(*Connect(server_.address(), options));
  server_.FailNext(100, {grpc::StatusCode::UNAVAILABLE, "a proxy's word"});
  const auto attempts = [&] {
    const int before = server_.generations();
    Heard heard;
    client.StreamGenerate({}, {}, heard.Listener())->Wait().IgnoreError();
    return server_.generations() - before;
  };
  EXPECT_EQ(attempts(), 3);
  EXPECT_EQ(attempts(), 1) << "nothing is left";
  server_.FailNext(1, QueueFull(milliseconds(10)));
  EXPECT_EQ(attempts(), 2) << "the server asked to come back";
  for (int i = 0; i < 10; ++i) ASSERT_EQ(attempts(), 1);
  server_.FailNext(1, {grpc::StatusCode::UNAVAILABLE, "a proxy's word"});
  EXPECT_EQ(attempts(), 2) << "after ten calls that succeeded";
}

TEST_F(ConnectionTest, AServerThatHasAnsweredIsWaitedForLonger) {
  const grpc::Status refused(grpc::StatusCode::UNAVAILABLE, "Connection refused");
  server_.FailNext(5, refused);
  EXPECT_TRUE(absl::IsUnavailable(client_.Generate({}).status())) << "nobody has ever answered";
  EXPECT_EQ(server_.generations(), 5);
  ASSERT_TRUE(client_.ListModels().ok());
  server_.FailNext(9, refused);
  EXPECT_TRUE(client_.Generate({}).ok());
  EXPECT_EQ(server_.generations(), 15);
  server_.FailNext(100, QueueFull(milliseconds(1)));
  EXPECT_TRUE(absl::IsResourceExhausted(client_.Generate({}).status()));
  EXPECT_EQ(server_.generations(), 20) << "a full queue is no restart";
}

TEST_F(ConnectionTest, AModelThatIsLoadingIsWaitedFor) {
  server_.FailNext(4, Loading(milliseconds(1)));
  EXPECT_TRUE(client_.Generate({}).ok());
  server_.FailNext(9, Loading(milliseconds(1)));
  EXPECT_TRUE(client_.StreamGenerate({}, {}, {})->Wait().ok()) << "as of a server that restarts";
  EXPECT_EQ(server_.generations(), 15);
}

TEST_F(ConnectionTest, AStreamOutlivesARestart) {
  // The server ends after the first event, and is not back for the next eight attempts.
  server_.BreakNext(1, 1, Draining());
  const auto on_event = [this](const Event&) {
    if (server_.generations() > 1) return;
    server_.FailNext(8, {grpc::StatusCode::UNAVAILABLE, "Connection refused"});
  };
  EXPECT_TRUE(client_.StreamGenerate({}, {}, {.on_event = on_event})->Wait().ok());
  EXPECT_EQ(server_.generations(), 10);
}

TEST_F(ConnectionTest, AnErrorSaysWhyNobodyIsThere) {
  const std::string refused = "no server could be reached at " + server_.address() + ": refused";
  const auto leave = [this](const Event&) {
    server_.FailNext(100, {grpc::StatusCode::UNAVAILABLE, "refused"});
  };
  server_.BreakNext(1, 1, Draining());
  EXPECT_EQ(client_.StreamGenerate({}, {}, {.on_event = leave})->Wait(),
            absl::UnavailableError(refused + "; the first failure was: the server is draining"));
  EXPECT_EQ(client_.Generate({}).status(), absl::UnavailableError(refused)) << "the same each time";
}

TEST_F(ConnectionTest, OneAttemptIsOneAttempt) {
  ConnectionOptions options;
  options.retry.max_attempts = 1;
  const Client client(*Connect(server_.address(), options));
  ASSERT_TRUE(client.ListModels().ok());
  server_.FailNext(1, Draining());
  EXPECT_TRUE(absl::IsUnavailable(client.Generate({}).status()));
  EXPECT_EQ(server_.generations(), 1);
}

TEST_F(ConnectionTest, CancelEndsAStream) {
  server_.SetEvaluationTime(seconds(5));
  Heard heard;
  const auto call = client_.StreamGenerate({}, {}, heard.Listener());
  heard.WaitForEvent();
  call->Cancel();
  EXPECT_EQ(call->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(heard.done->code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Eventually([&] { return server_.cancelled() == 1; })) << "the server was not told";
}

TEST_F(ConnectionTest, CancelEndsABackoff) {
  server_.FailNext(1, QueueFull(seconds(60)));
  Heard heard;
  const auto call = client_.StreamGenerate({}, {}, heard.Listener());
  while (server_.generations() == 0) std::this_thread::sleep_for(milliseconds(1));
  std::this_thread::sleep_for(milliseconds(50));
  call->Cancel();
  EXPECT_EQ(call->Wait().code(), absl::StatusCode::kCancelled);
}

TEST_F(ConnectionTest, DestroyingTheCallCancelsAndWaits) {
  server_.SetEvaluationTime(seconds(5));
  Heard heard;
  { const auto call = client_.StreamGenerate({}, {}, heard.Listener()); }
  EXPECT_EQ(heard.done->code(), absl::StatusCode::kCancelled);
}

TEST_F(ConnectionTest, AListenerMayCancelButNotWait) {
  server_.SetEvaluationTime(seconds(5));
  std::mutex mutex;
  std::unique_ptr<StreamCall> call;
  absl::Status waited;
  {
    std::lock_guard lock(mutex);  // the listener must not run before `call` is set
    call = client_.StreamGenerate({}, {}, {.on_event = [&](const Event&) {
                                    std::lock_guard lock(mutex);
                                    waited = call->Wait();
                                    call->Cancel();
                                  }});
  }
  EXPECT_EQ(call->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(waited.code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(ConnectionTest, AStreamMayBeDestroyedInItsListener) {
  server_.SetEvaluationTime(seconds(5));
  std::mutex mutex;
  std::unique_ptr<StreamCall> call;
  const auto done = std::make_shared<std::promise<absl::Status>>();
  const StreamListener listener = {
      .on_event =
          [&](const Event&) {
            std::lock_guard lock(mutex);
            call.reset();
          },
      .on_done = [done](const absl::Status& status) { done->set_value(status); }};
  {
    std::lock_guard lock(mutex);  // the listener must not run before `call` is set
    call = client_.StreamGenerate({}, {}, listener);
  }
  EXPECT_TRUE(absl::IsCancelled(done->get_future().get()));
}

TEST_F(ConnectionTest, WhatCannotBeMadeIsDoneBeforeTheCallReturns) {
  std::optional<std::thread::id> thread;
  const StreamListener listener = {
      .on_done = [&](const absl::Status&) { thread = std::this_thread::get_id(); }};
  const auto call = client_.StreamGenerate({}, {}, listener, {.traceparent = "wrong"});
  EXPECT_EQ(thread, std::this_thread::get_id());
}

// gRPC would swallow the exception, and the call would never end.
TEST(ListenerDeathTest, AListenerThatThrowsEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto stream = [](const Generation& generation, const StreamListener& listener) {
    const FakeServer server;
    const Client client(*Connect(server.address()));
    client.StreamGenerate(generation, {}, listener)->Wait().IgnoreError();
  };
  const StreamListener on_event = {
      .on_event = [](const Event&) { throw std::runtime_error("from on_event"); }};
  const StreamListener on_done = {
      .on_done = [](const absl::Status&) { throw std::runtime_error("from on_done"); }};
  EXPECT_DEATH(stream({}, on_event), "from on_event");
  EXPECT_DEATH(stream({}, on_done), "from on_done");
  const Generation refused = {.class_labels = {1}, .class_vectors = {{0.5f}}};
  EXPECT_DEATH(stream(refused, on_done), "from on_done");
}

TEST_F(ConnectionTest, AStreamWithoutItsLastEventIsAnError) {
  server_.OmitCompleted();
  Heard heard;
  EXPECT_EQ(client_.StreamGenerate({}, {}, heard.Listener())->Wait().code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(ConnectionTest, ManyStreamsAtOnce) {
  constexpr int kStreams = 32;
  std::vector<Heard> heard(kStreams);
  std::vector<std::unique_ptr<StreamCall>> calls;
  for (int i = 0; i < kStreams; ++i) {
    calls.push_back(client_.StreamGenerate({.seed = uint64_t(i)}, {}, heard[i].Listener()));
    if (i % 4 == 0) calls.back()->Cancel();
  }
  for (int i = 0; i < kStreams; ++i) {
    const absl::Status status = calls[i]->Wait();
    if (i % 4 == 0) continue;  // cancelled, or just in time
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(heard[i].images.at(0).seed, uint64_t(i));
  }
}

TEST_F(ConnectionTest, ARequestThatIsTooLargeIsAnInvalidArgument) {
  const Generation generation = {
      .init_image = InitImage{.source = std::string(65 << 20, 'x')}};  // the fake takes 64 MiB
  const absl::Status unary = client_.Generate(generation).status();
  const absl::Status stream = client_.StreamGenerate(generation, std::nullopt, {})->Wait();
  for (const absl::Status& status : {unary, stream}) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("the server takes at most 67108864"));
  }
  EXPECT_EQ(server_.generations(), 0);
}

TEST_F(ConnectionTest, LargeRepliesPass) {
  server_.SetImageBytes(12 << 20);  // a raw 1024 x 1024 image; gRPC's own limit is 4 MB
  const auto result = client_.Generate({.count = 2});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(std::get<std::string>(result->images[1].content).size(), size_t{12 << 20});
}

TEST_F(ConnectionTest, MessageLimitHolds) {
  server_.SetImageBytes(2 << 20);
  ConnectionOptions options = QuickRetries();
  options.max_message_bytes = 1 << 20;
  const auto result = Client(*Connect(server_.address(), options)).Generate({});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(server_.generations(), 1) << "no retry helps against a reply that is too large";
}

TEST_F(ConnectionTest, Models) {
  const auto models = client_.ListModels();
  ASSERT_TRUE(models.ok()) << models.status();
  ASSERT_EQ(models->size(), 1u);
  const Model& model = models->front();
  EXPECT_EQ(model.name, "digits");
  EXPECT_EQ(model.state, ModelState::kAvailable);
  EXPECT_EQ(model.labels.at(7), "seven");
  EXPECT_EQ(model.limits.num_classes, 10);
  EXPECT_EQ(model.defaults.noise_schedule, NoiseSchedule::kKarras);
  EXPECT_THAT(model.samplers, ElementsAre(Sampler::kEdmEuler, Sampler::kHeun));
  EXPECT_EQ(client_.GetModel("digits")->parameters, 1'234'567);
  const absl::Status missing = client_.GetModel("cats").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Details(missing).reason, "MODEL_NOT_FOUND");
}

TEST_F(ConnectionTest, Health) {
  EXPECT_EQ(*client_.CheckHealth(""), ServingStatus::kServing);
  server_.SetServing(false);
  EXPECT_EQ(*client_.CheckHealth(""), ServingStatus::kNotServing);
  EXPECT_EQ(client_.CheckHealth("no.such.Service").status().code(), absl::StatusCode::kNotFound);
}

/// Answers the first call with an empty message, and none after it.
class AnswersOnce : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Reactor(calls++ == 0);
  }
  std::atomic<int> calls = 0;

 private:
  class Reactor : public grpc::ServerGenericBidiReactor {
   public:
    explicit Reactor(bool answers) {
      if (answers) {
        StartWriteAndFinish(&empty_, {}, grpc::Status::OK);
      } else {
        Finish({grpc::StatusCode::UNAVAILABLE, "Connection refused"});
      }
    }
    void OnDone() override { delete this; }

   private:
    const grpc::Slice slice_;
    const grpc::ByteBuffer empty_{&slice_, 1};
  };
};

TEST(HealthTest, AServerThatIsGoneIsNotWaitedFor) {
  grpc::EnableDefaultHealthCheckService(false);  // a FakeServer has it enabled
  AnswersOnce service;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterCallbackGenericService(&service);
  const auto server = builder.BuildAndStart();
  const Client client(*Connect("127.0.0.1:" + std::to_string(port), QuickRetries()));
  EXPECT_TRUE(client.CheckHealth("").ok());
  EXPECT_TRUE(absl::IsUnavailable(client.CheckHealth("").status()));
  EXPECT_EQ(service.calls, 1 + 5);
  server->Shutdown(std::chrono::system_clock::now());
}

TEST(ConnectTest, NamesTheServerThatCannotBeReached) {
  const auto result = Client(*Connect("127.0.0.1:1", QuickRetries())).Generate({});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("127.0.0.1:1"));
}

TEST(ConnectTest, RefusesOptionsOutOfRange) {
  const auto refused = [](ConnectionOptions options) {
    return Connect("127.0.0.1:1", options).status().code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused({.max_message_bytes = 0}));
  EXPECT_TRUE(refused({.keepalive_interval = seconds(5)}));
  EXPECT_TRUE(refused({.retry = {.max_attempts = 0}}));
  EXPECT_TRUE(refused({.retry = {.multiplier = 0.5}}));
  EXPECT_TRUE(refused({.retry = {.budget = 0}}));
  EXPECT_FALSE(Connect("").ok());
}

constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST_F(ConnectionTest, MetadataAndTraceparentArrive) {
  const CallOptions options = {
      .metadata = {{"X-Tenant", "blue"}, {"x-tenant", "green"}, {"x-raw-bin", "\xff\x01"}},
      .traceparent = kTraceparent};
  const auto expect_arrived = [this] {
    EXPECT_THAT(
        server_.metadata(),
        testing::IsSupersetOf(
            {testing::Pair("x-tenant", "blue"), testing::Pair("x-tenant", "green"),
             testing::Pair("x-raw-bin", "\xff\x01"), testing::Pair("traceparent", kTraceparent)}));
  };
  ASSERT_TRUE(client_.ListModels(options).ok());
  expect_arrived();
  ASSERT_TRUE(client_.ListModels().ok());
  EXPECT_EQ(server_.metadata().count("x-tenant"), 0u);
  ASSERT_TRUE(client_.StreamGenerate({}, {}, {}, options)->Wait().ok());
  expect_arrived();
  // Again with the second attempt.
  server_.FailNext(1, Draining());
  ASSERT_TRUE(client_.Generate({}, options).ok());
  EXPECT_EQ(server_.generations(), 3);
  expect_arrived();
  server_.BreakNext(1, 2, grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone"));
  ASSERT_TRUE(client_.StreamGenerate({}, {}, {}, options)->Wait().ok());
  EXPECT_EQ(server_.generations(), 5);
  expect_arrived();
}

TEST_F(ConnectionTest, MetadataThatGrpcCannotSendIsRefused) {
  const std::pair<std::string, std::string> illegal[] = {
      {"", "v"},          {"a b", "v"},           {":path", "v"},
      {"k\xc3\xa9", "v"}, {"grpc-timeout", "1S"}, {"Content-Type", "v"},
      {"key", "a\nb"},    {"key", "\xc3\xa9"}};
  for (const auto& [key, value] : illegal) {
    const CallOptions options = {.metadata = {{"fine", "v"}, {key, value}}};
    const absl::Status unary = client_.ListModels(options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(unary)) << key << ": " << unary;
    EXPECT_THAT(std::string(unary.message()), HasSubstr("; use ")) << key;
    EXPECT_EQ(client_.StreamGenerate({}, {}, {}, options)->Wait(), unary);
    EXPECT_EQ(client_.WatchJob("id", 0, {}, options)->Wait(), unary);
  }
  EXPECT_EQ(server_.generations(), 0);
}

TEST_F(ConnectionTest, TraceparentIsChecked) {
  const std::string trace = "4bf92f3577b34da6a3ce929d0e0e4736", span = "00f067aa0ba902b7";
  for (const std::string& text :
       {"00-" + trace + "-" + span, "00-" + trace + "-" + span + "-01-more",
        "ff-" + trace + "-" + span + "-01", "00-" + std::string(32, '0') + "-" + span + "-01",
        "00-" + trace + "-" + std::string(16, '0') + "-01", "00-" + trace + "-" + span + "-0G",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-" + span + "-01", std::string("garbage\n")}) {
    const absl::Status status = client_.ListModels({.traceparent = text}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("traceparent is ")) << text;
  }
  EXPECT_TRUE(client_.ListModels({.traceparent = "01-" + trace + "-" + span + "-01-more"}).ok());
  const CallOptions twice = {.metadata = {{"traceparent", kTraceparent}},
                             .traceparent = kTraceparent};
  EXPECT_THAT(std::string(client_.ListModels(twice).status().message()), HasSubstr("twice"));
}

TEST(ClientTest, WorksOnAnyConnection) {
  auto connection = std::make_shared<MockConnection>();
  EXPECT_CALL(*connection, Generate).WillOnce([](const Generation& generation, const CallOptions&) {
    GenerationResult result;
    result.params.count = *generation.count;
    return result;
  });
  EXPECT_CALL(*connection, GetModel(testing::StrEq("cats"), testing::_))
      .WillOnce(testing::Return(absl::NotFoundError("no cats")));
  const Client client(connection);
  EXPECT_EQ(client.Generate({.count = 3})->params.count, 3);
  EXPECT_EQ(client.GetModel("cats").status().message(), "no cats");
}

/// How each call of `client` ends.
std::vector<absl::Status> AllCalls(const Client& client) {
  std::optional<absl::Status> done;
  const StreamListener listener = {.on_done = [&done](const absl::Status& s) { done = s; }};
  const auto streamed = client.StreamGenerate({}, {}, listener);
  EXPECT_EQ(streamed->Wait(), done);
  return {
      client.Generate({}).status(),
      streamed->Wait(),
      client.WatchJob("id", 0, listener)->Wait(),
      client.GetJob("id").status(),
      client.ListJobs().status(),
      client.CancelJob("id").status(),
      client.GetServerInfo().status(),
      client.LoadModel({}).status(),
      client.UnloadModel("name"),
      client.SetAlias("alias", "name").status(),
      client.DeleteAlias("alias"),
      client.ListModels().status(),
      client.GetModel("name").status(),
      client.CheckHealth("").status(),
  };
}

TEST(ClientTest, CallsThatAConnectionLacksAreUnimplemented) {
  class Bare : public Connection {};
  const Client client(std::make_shared<Bare>());
  for (const absl::Status& status : AllCalls(client)) {
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
  }
  EXPECT_THAT(std::string(client.GetJob("id").status().message()), HasSubstr("GetJob"));
}

TEST(ClientTest, MockedCallsThatNoTestExpectsAreUnimplemented) {
  const Client client(std::make_shared<testing::NiceMock<MockConnection>>());
  for (const absl::Status& status : AllCalls(client)) {
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
  }
}

/// Loses every reply.
class LossyAdmin : public v1::ModelAdmin::Service {
 public:
  grpc::Status LoadModel(grpc::ServerContext*, const v1::LoadModelRequest*,
                         v1::LoadModelResponse*) override {
    return Lose();
  }
  grpc::Status UnloadModel(grpc::ServerContext*, const v1::UnloadModelRequest*,
                           v1::UnloadModelResponse*) override {
    return Lose();
  }
  grpc::Status SetAlias(grpc::ServerContext*, const v1::SetAliasRequest*,
                        v1::SetAliasResponse*) override {
    return Lose();
  }
  grpc::Status DeleteAlias(grpc::ServerContext*, const v1::DeleteAliasRequest*,
                           v1::DeleteAliasResponse*) override {
    return Lose();
  }
  int TakeCalls() { return calls_.exchange(0); }

 private:
  grpc::Status Lose() {
    ++calls_;
    return {grpc::StatusCode::UNAVAILABLE, "lost"};
  }
  std::atomic<int> calls_ = 0;
};

TEST(ClientTest, ChangesThatCannotBeMadeTwiceAreMadeOnce) {
  LossyAdmin admin;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&admin);
  const auto server = builder.BuildAndStart();
  const auto connection =
      Connect("127.0.0.1:" + std::to_string(port),
              {.retry = {.max_attempts = 3, .initial_backoff = std::chrono::milliseconds(1)}});
  ASSERT_TRUE(connection.ok());
  const Client client(*connection);
  EXPECT_FALSE(client.LoadModel({.name = "a"}).ok());
  EXPECT_EQ(admin.TakeCalls(), 1);
  EXPECT_FALSE(client.UnloadModel("a").ok());
  EXPECT_EQ(admin.TakeCalls(), 1);
  EXPECT_FALSE(client.DeleteAlias("a").ok());
  EXPECT_EQ(admin.TakeCalls(), 1);
  EXPECT_FALSE(client.SetAlias("a", "b").ok());
  EXPECT_EQ(admin.TakeCalls(), 3) << "an alias that is set twice is the same";
}

TEST(NamesTest, RoundTrip) {
  EXPECT_EQ(AllSamplers().size(), 23u);
  for (const Sampler sampler : AllSamplers()) {
    EXPECT_EQ(SamplerFromName(Name(sampler)), sampler);
    EXPECT_EQ("SAMPLER_" + absl::AsciiStrToUpper(std::string(Name(sampler))),
              v1::Sampler_Name(static_cast<v1::Sampler>(sampler)));
  }
  for (const NoiseSchedule schedule : AllNoiseSchedules()) {
    EXPECT_EQ(NoiseScheduleFromName(Name(schedule)), schedule);
  }
  for (const Priority priority : AllPriorities()) {
    EXPECT_EQ(PriorityFromName(Name(priority)), priority);
  }
  EXPECT_FALSE(SamplerFromName("unknown"));
  EXPECT_FALSE(SamplerFromName("Euler"));
  EXPECT_EQ(Name(static_cast<Sampler>(99)), "unknown");
}

}  // namespace
}  // namespace denoised::client
