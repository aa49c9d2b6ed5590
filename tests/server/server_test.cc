// SPDX-License-Identifier: Apache-2.0
// The whole server in process, over loopback, on a FakeEngine.

#include <gmock/gmock.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <functional>
#include <future>
#include <latch>
#include <limits>
#include <map>
#include <thread>
#include <utility>

#include "denoised/v1/model_admin.grpc.pb.h"
#include "engine/images/formats.h"
#include "tests/eventually.h"
#include "tests/io/temporary_directory.h"
#include "tests/server/server_fixture.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Event = v1::StreamGenerateResponse;

std::string Reason(const grpc::Status& status) {
  return Find<google::rpc::ErrorInfo>(status).reason();
}

/// grpc.health.v1.Health/Check on its two one-field messages, written by hand: the distribution
/// ships no compiled health.proto. 1 is SERVING, 2 NOT_SERVING, −1 an error.
int CheckHealth(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  std::string request, response;
  if (!service.empty()) request = std::string("\x0a") + char(service.size()) + service;
  grpc::ClientContext context;
  const grpc::Status status =
      CallByName(channel, &context, "/grpc.health.v1.Health/Check", request, &response);
  if (!status.ok()) return -1;
  return response.size() < 2 ? 0 : response[1];
}

class ServerTest : public ServerFixture {
 protected:
  grpc::Status Stream(const v1::StreamGenerateRequest& request, std::vector<Event>* events) {
    grpc::ClientContext context;
    auto reader = stub_->StreamGenerate(&context, request);
    Event event;
    while (reader->Read(&event)) events->push_back(event);
    return reader->Finish();
  }
};

TEST_F(ServerTest, GenerateReturnsImagesAndWhatWasRun) {
  Start();
  v1::GenerateRequest request;
  v1::GenerationParams& params = *request.mutable_params();
  params.set_request_id("my request");
  params.set_seed(41);
  params.set_count(3);
  params.set_sampler(v1::SAMPLER_HEUN);
  params.set_steps(4);
  params.add_conditions()->set_class_label(7);
  v1::GenerateResponse response;
  const grpc::Status status = Generate(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.params().model(), "digits");
  EXPECT_EQ(response.params().request_id(), "my request");
  EXPECT_EQ(response.run().evaluations(), 7);
  EXPECT_EQ(response.run().steps(), 4);
  EXPECT_EQ(response.run().model_version(), "1");
  EXPECT_EQ(response.params().sampler(), v1::SAMPLER_HEUN);
  EXPECT_EQ(response.params().noise_schedule(), v1::NOISE_SCHEDULE_NATIVE);
  ASSERT_EQ(response.params().conditions_size(), 3);
  for (const v1::Condition& condition : response.params().conditions())
    EXPECT_EQ(condition.class_label(), 7);
  EXPECT_EQ(response.params().width(), 32);
  ASSERT_EQ(response.images_size(), 3);
  for (int i = 0; i < 3; ++i) {
    const v1::Image& image = response.images(i);
    EXPECT_EQ(image.index(), i);
    EXPECT_EQ(image.seed(), 41u + i);
    EXPECT_EQ(image.class_label(), 7);
    EXPECT_THAT(image.encoded(), HasSubstr(std::string("tEXtseed\0", 9) + std::to_string(41 + i)));
    EXPECT_THAT(image.encoded(), HasSubstr(std::string("tEXtsampler\0", 12) + "heun"));
    const auto pixels = DecodeFile(image.encoded(), 32 * 32);
    ASSERT_TRUE(pixels.ok());
    EXPECT_EQ(pixels->width, 32);
  }
  EXPECT_GT(response.timing().total_seconds(), 0);
  EXPECT_LE(response.timing().queued_seconds(), response.timing().total_seconds());
}

TEST_F(ServerTest, TheLastImageAloneHasTheSameBytes) {
  Start();
  v1::GenerateRequest request;
  request.mutable_params()->set_seed(std::numeric_limits<uint64_t>::max() - 1);
  request.mutable_params()->set_count(4);
  request.mutable_params()->add_conditions()->set_class_label(1);
  request.mutable_params()->mutable_output()->set_format(v1::IMAGE_FORMAT_RAW_FLOAT32);
  v1::GenerateResponse many, one;
  ASSERT_TRUE(Generate(request, &many).ok());
  request.mutable_params()->set_count(1);
  request.mutable_params()->set_seed(many.images(3).seed());
  EXPECT_EQ(many.images(3).seed(), 1u);  // modulo 2^64
  ASSERT_TRUE(Generate(request, &one).ok());
  EXPECT_EQ(one.images(0).tensor().data(), many.images(3).tensor().data());
}

TEST_F(ServerTest, StreamTellsTheStoryInOrder) {
  Start();
  engine_->PauseAfter(2);  // so that a preview comes before its image
  v1::StreamGenerateRequest request;
  request.mutable_params()->set_request_id("story");
  request.mutable_params()->set_count(2);
  request.mutable_params()->set_steps(6);
  request.mutable_preview()->set_every_evaluations(2);
  request.mutable_preview()->set_max_edge(16);
  std::vector<Event> events;
  grpc::ClientContext context;
  auto reader = stub_->StreamGenerate(&context, request);
  for (Event event; reader->Read(&event);) {
    events.push_back(event);
    if (event.has_preview()) engine_->Pause(false);
  }
  const grpc::Status status = reader->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_GE(events.size(), 6u);
  int images = 0, previews = 0, progress = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    if (i > 0) {
      EXPECT_GT(events[i].sequence(), events[i - 1].sequence());
    }
    EXPECT_EQ(events[i].request_id(), "story");
    if (events[i].has_progress()) {
      EXPECT_GT(events[i].progress().evaluations_done(), progress);
      EXPECT_EQ(events[i].progress().evaluations_total(), 12);
      progress = events[i].progress().evaluations_done();
    }
    if (events[i].has_preview()) {
      ++previews;
      EXPECT_EQ(events[i].preview().image().width(), 16);
      EXPECT_EQ(events[i].preview().image().mime_type(), "image/jpeg");
      EXPECT_EQ(events[i].preview().evaluation() % 2, 0);
    }
    images += events[i].has_image();
  }
  EXPECT_TRUE(events[0].has_queued());
  EXPECT_EQ(events[0].queued().params().steps(), 6);
  EXPECT_TRUE(events[1].has_started());
  EXPECT_TRUE(events.back().has_completed());
  EXPECT_EQ(images, 2);
  EXPECT_GT(previews, 0);
  EXPECT_EQ(progress, 12);
}

TEST_F(ServerTest, AllViolationsOfServerAndEngineAtOnce) {
  Start();
  v1::GenerateRequest request;
  v1::GenerationParams& params = *request.mutable_params();
  params.set_eta(std::nan(""));
  params.set_steps(1'000'000);
  params.add_conditions()->set_class_label(10);
  params.set_sampler(v1::SAMPLER_PNDM);
  params.set_width(33);
  const grpc::Status status = Generate(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Reason(status), "INVALID_FIELDS");
  EXPECT_THAT(Violated(status), ElementsAre("params.eta", "params.conditions[0].class_label",
                                            "params.steps", "params.sampler", "params.width"));
}

TEST_F(ServerTest, UnknownModelsAndTheChoiceOfModels) {
  config_.models = {{"digits", "models/digits"}, {"faces", "models/faces"}};
  Start();
  v1::GenerateRequest request;
  request.mutable_params()->set_model("no\nsuch");
  grpc::Status status = Generate(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Reason(status), "MODEL_NOT_FOUND");
  EXPECT_THAT(status.error_message(), HasSubstr("digits, faces"));
  request.mutable_params()->clear_model();
  status = Generate(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(Violated(status), ElementsAre("params.model"));
  request.mutable_params()->set_model("faces");
  EXPECT_TRUE(Generate(request).ok());

  grpc::ClientContext list_context, get_context, bad_context;
  v1::ListModelsResponse list;
  ASSERT_TRUE(stub_->ListModels(&list_context, {}, &list).ok());
  ASSERT_EQ(list.models_size(), 2);
  EXPECT_EQ(list.models(1).name(), "faces");
  v1::GetModelRequest get;
  v1::GetModelResponse model;
  get.set_name("digits");
  ASSERT_TRUE(stub_->GetModel(&get_context, get, &model).ok());
  EXPECT_EQ(model.model().state(), v1::MODEL_STATE_AVAILABLE);
  EXPECT_EQ(model.model().limits().num_classes(), 10);
  EXPECT_TRUE(model.model().capabilities().class_label());
  EXPECT_FALSE(model.model().capabilities().text());
  EXPECT_THAT(model.model().samplers(), Contains(v1::SAMPLER_HEUN));
  EXPECT_THAT(model.model().noise_schedules(), Contains(v1::NOISE_SCHEDULE_EXPONENTIAL));
  EXPECT_EQ(model.model().memory_bytes(), 7'000'000);
  get.set_name("none");
  EXPECT_EQ(stub_->GetModel(&bad_context, get, &model).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerTest, WhileItStartsARequestWithoutAModelMayComeAgain) {
  std::latch loads{1};
  config_.models = {{"digits", "models/digits"}, {"faces", "models/faces"}};
  StartLoading({.on_open = [&](const std::string&) { loads.wait(); }});
  const grpc::Status status = Generate();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Reason(status), "MODEL_LOADING");
  EXPECT_GT(Find<google::rpc::RetryInfo>(status).retry_delay().seconds(), 0);
  loads.count_down();
  server_.reset();  // no load waits any more
}

TEST_F(ServerTest, RequestsWithoutAModelGoOnWhileAnotherModelIsAdded) {
  const std::string faces = testing::TempDir() + "faces";
  std::filesystem::create_directory(faces);
  std::latch opening{1}, loads{1};
  Start({.on_open = [&](const std::string& directory) {
    if (directory != faces) return;
    opening.count_down();
    loads.wait();
  }});
  v1::LoadModelRequest request;
  request.set_name("faces");
  request.set_directory(faces);
  grpc::ClientContext load_context, get_context;
  auto load = std::async(std::launch::async, [&] {
    v1::LoadModelResponse loaded;
    return v1::ModelAdmin::NewStub(channel_)->LoadModel(&load_context, request, &loaded);
  });
  opening.wait();
  EXPECT_TRUE(Generate().ok());
  v1::GetModelResponse got;
  EXPECT_TRUE(stub_->GetModel(&get_context, {}, &got).ok());
  EXPECT_EQ(got.model().name(), "digits");
  loads.count_down();
  EXPECT_TRUE(load.get().ok());
  EXPECT_EQ(Generate().error_code(), grpc::StatusCode::INVALID_ARGUMENT) << "now there are two";
}

TEST_F(ServerTest, ThePrecisionIsToldWhereverAModelIs) {
  config_.models[0].precision = Precision::kFp8;
  config_.metrics_listen = "127.0.0.1:0";
  Start();
  grpc::ClientContext context;
  v1::GetModelRequest get;
  v1::GetModelResponse model;
  ASSERT_TRUE(stub_->GetModel(&context, get, &model).ok());
  EXPECT_EQ(model.model().precision(), "fp8");
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate({}, &response).ok());
  EXPECT_THAT(response.images(0).encoded(), HasSubstr(std::string("tEXtprecision\0fp8", 17)));
  EXPECT_THAT(Scrape(), HasSubstr("denoised_model_info{model=\"digits\",precision=\"fp8\""));
}

TEST_F(ServerTest, CancelReachesTheEngineWithinAnEvaluation) {
  Start({.evaluation_cost = 5ms});
  v1::StreamGenerateRequest request;
  request.mutable_params()->set_steps(1000);
  grpc::ClientContext context;
  auto reader = stub_->StreamGenerate(&context, request);
  Event event;
  while (reader->Read(&event) && !event.has_progress()) {
  }
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return engine_->cancels() == 1; }));
  EXPECT_TRUE(Eventually([&] { return engine_->Stats()[0].active_images == 0; }));
}

TEST_F(ServerTest, ACallOutlivesTheAgeOfItsConnection) {
  config_.connections.max_age = 300ms;
  Start();
  grpc::ClientContext info_context, context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&info_context, {}, &info).ok());
  EXPECT_EQ(info.limits().max_connection_age_seconds(), 0.3);
  engine_->Pause(true);
  auto reader = stub_->StreamGenerate(&context, {});
  Event event;
  ASSERT_TRUE(reader->Read(&event) && event.has_queued());
  // The connection is asked to close, so the channel has none for new calls.
  EXPECT_TRUE(Eventually([&] { return channel_->GetState(false) != GRPC_CHANNEL_READY; }));
  std::this_thread::sleep_for(500ms);  // a grace that was as long as the age would be over
  EXPECT_EQ(engine_->QueuedImages("digits"), 1) << "the job was cut off";
  engine_->Pause(false);
  while (reader->Read(&event)) {
  }
  EXPECT_TRUE(event.has_completed());
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(Generate().ok()) << "on a connection of its own";
}

TEST_F(ServerTest, CancelOfAQueuedUnaryCall) {
  Start();
  engine_->Pause(true);
  grpc::ClientContext context;
  v1::GenerateRequest request;
  v1::GenerateResponse response;
  auto call =
      std::async(std::launch::async, [&] { return stub_->Generate(&context, request, &response); });
  ASSERT_TRUE(Eventually([&] { return engine_->QueuedImages("digits") == 1; }));
  context.TryCancel();
  EXPECT_EQ(call.get().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return engine_->QueuedImages("digits") == 0; }));
}

TEST_F(ServerTest, AJobSurvivesItsStreamAndIsWatchedFromWhereItWasLost) {
  Start({.evaluation_cost = 2ms, .max_rows = 1});
  v1::StreamGenerateRequest request;
  request.mutable_params()->set_request_id("mine");
  request.mutable_params()->set_seed(5);
  request.mutable_params()->set_count(4);
  request.mutable_params()->set_disconnect_policy(v1::DISCONNECT_POLICY_CONTINUE);
  std::map<int, std::string> images;
  uint64_t sequence = 0;
  {
    grpc::ClientContext context;
    auto reader = stub_->StreamGenerate(&context, request);
    Event event;
    while (images.size() < 2 && reader->Read(&event)) {
      sequence = event.sequence();
      if (event.has_image())
        images[event.image().image().index()] = event.image().image().encoded();
    }
    context.TryCancel();
    reader->Finish();
  }
  grpc::ClientContext context;
  v1::WatchJobRequest watch;
  watch.set_request_id("mine");
  watch.set_after_sequence(sequence);
  auto reader = stub_->WatchJob(&context, watch);
  Event event;
  bool completed = false;
  while (reader->Read(&event)) {
    EXPECT_GT(event.sequence(), sequence);
    EXPECT_EQ(event.request_id(), "mine");
    sequence = event.sequence();
    completed |= event.has_completed();
    if (!event.has_image()) continue;
    const v1::Image& image = event.image().image();
    EXPECT_TRUE(images.emplace(image.index(), image.encoded()).second) << image.index();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(completed);
  EXPECT_EQ(images.size(), 4u);
  EXPECT_EQ(engine_->cancels(), 0);

  const auto watched_after = [&](uint64_t number) {
    grpc::ClientContext again;
    watch.set_after_sequence(number);
    auto events = stub_->WatchJob(&again, watch);
    std::vector<uint64_t> read;
    while (events->Read(&event)) read.push_back(event.sequence());
    return std::pair{events->Finish(), read};
  };
  const auto [ended, last] = watched_after(sequence);
  EXPECT_TRUE(ended.ok());
  EXPECT_THAT(last, ElementsAre(sequence)) << "every stream tells its end";
  EXPECT_TRUE(event.has_completed());
  const auto [refused, none] = watched_after(sequence + 1);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), StartsWith("after_sequence: is "));
  EXPECT_THAT(none, ElementsAre());

  // The same request again, in one reply: nothing is drawn, and the bytes are the same.
  const int evaluations = engine_->evaluations();
  v1::GenerateRequest unary;
  *unary.mutable_params() = request.params();
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate(unary, &response).ok());
  EXPECT_EQ(engine_->evaluations(), evaluations);
  for (const v1::Image& image : response.images()) {
    EXPECT_EQ(image.encoded(), images[image.index()]);
  }
  unary.mutable_params()->set_steps(3);
  const grpc::Status taken = Generate(unary);
  EXPECT_EQ(taken.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(Reason(taken), "REQUEST_ID_TAKEN");
  EXPECT_THAT(taken.error_message(), HasSubstr("params.steps: 3"));

  grpc::ClientContext get_context;
  v1::GetJobRequest get;
  get.set_request_id("mine");
  v1::GetJobResponse got;
  ASSERT_TRUE(stub_->GetJob(&get_context, get, &got).ok());
  EXPECT_EQ(got.job().state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(got.job().images_done(), 4);
  EXPECT_EQ(got.job().last_sequence(), sequence);
  EXPECT_EQ(got.job().params().seed(), 5u);
  EXPECT_GE(got.job().end_time().seconds(), got.job().create_time().seconds());
  EXPECT_GT(got.job().expire_time().seconds(), got.job().end_time().seconds());
}

TEST_F(ServerTest, AnIdOfAnotherUploadNamesIt) {
  Start();
  v1::GenerateRequest request;
  v1::GenerationParams& params = *request.mutable_params();
  params.set_request_id("mine");
  v1::Tensor& noise = *params.mutable_initial_noise();
  noise.set_data_type(v1::DATA_TYPE_FLOAT32);
  for (const int extent : {1, 32, 32, 1}) noise.add_shape(extent);
  noise.set_data(std::string(4096, '\0'));
  v1::GenerateResponse response;
  const grpc::Status drawn = Generate(request, &response);
  ASSERT_TRUE(drawn.ok()) << drawn.error_message();
  v1::GenerationParams effective = response.params();
  noise.mutable_data()->back() = '\x40';
  EXPECT_THAT(Generate(request).error_message(), HasSubstr("(params.initial_noise.data differs)"));
  // As its reply told them: of what was added since, the upload alone is another.
  *effective.mutable_initial_noise() = noise;
  params = effective;
  EXPECT_THAT(Generate(request).error_message(), HasSubstr("(params.initial_noise.data differs)"));
}

TEST_F(ServerTest, CancelJobEndsItForEverybodyWhoWatches) {
  Start();
  engine_->Pause(true);
  v1::StreamGenerateRequest request;
  request.mutable_params()->set_disconnect_policy(v1::DISCONNECT_POLICY_CONTINUE);
  grpc::ClientContext context, watch_context, get_context, cancel_context, late_context;
  auto stream = stub_->StreamGenerate(&context, request);
  Event event;
  ASSERT_TRUE(stream->Read(&event));
  const std::string id = event.request_id();  // made by the server
  v1::WatchJobRequest watch;
  watch.set_request_id(id);
  auto watching = stub_->WatchJob(&watch_context, watch);
  ASSERT_TRUE(watching->Read(&event) && event.has_queued());
  engine_->TellPlaces({.jobs_ahead = 7, .images_ahead = 9});
  for (auto* reader : {stream.get(), watching.get()}) {
    ASSERT_TRUE(reader->Read(&event) && event.has_queued());
    EXPECT_EQ(event.queued().position(), 7);
    EXPECT_EQ(event.queued().images_ahead(), 9);
  }

  v1::GetJobRequest get;
  get.set_request_id(id);
  v1::GetJobResponse got;
  ASSERT_TRUE(stub_->GetJob(&get_context, get, &got).ok());
  EXPECT_EQ(got.job().state(), v1::JOB_STATE_QUEUED);

  v1::CancelJobRequest cancel;
  cancel.set_request_id(id);
  v1::CancelJobResponse cancelled;
  ASSERT_TRUE(stub_->CancelJob(&cancel_context, cancel, &cancelled).ok());
  EXPECT_EQ(cancelled.job().state(), v1::JOB_STATE_QUEUED);
  EXPECT_FALSE(stream->Read(&event));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_FALSE(watching->Read(&event));
  EXPECT_EQ(watching->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(stub_->GetJob(&late_context, get, &got).ok());
  EXPECT_EQ(got.job().state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(got.job().error().code(), int(grpc::StatusCode::CANCELLED));
}

TEST_F(ServerTest, JobsAreListedInPages) {
  Start();
  for (int i = 0; i < 5; ++i) {
    v1::GenerateRequest request;
    request.mutable_params()->set_request_id("job" + std::to_string(i));
    ASSERT_TRUE(Generate(request).ok());
  }
  v1::ListJobsRequest list;
  const auto ask = [&](v1::ListJobsResponse* response) {
    grpc::ClientContext context;
    return stub_->ListJobs(&context, list, response);
  };
  std::string ids;
  for (int page = 0; page < 3; ++page) {
    v1::ListJobsResponse response;
    list.set_page_size(2);
    ASSERT_TRUE(ask(&response).ok());
    for (const v1::Job& job : response.jobs()) {
      ids += job.request_id() + " ";
      EXPECT_EQ(job.state(), v1::JOB_STATE_SUCCEEDED);
      EXPECT_TRUE(job.has_expire_time());
    }
    list.set_page_token(response.next_page_token());
  }
  EXPECT_EQ(ids, "job4 job3 job2 job1 job0 ");
  EXPECT_EQ(list.page_token(), "");

  list.set_page_size(-1);
  list.set_page_token("-3");
  v1::ListJobsResponse response;
  const grpc::Status status = ask(&response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(Violated(status), ElementsAre("page_size", "page_token"));
}

TEST_F(ServerTest, APageOfJobsEndsWhereAReplyMust) {
  config_.limits.max_reply_bytes = 1500;
  Start();
  std::vector<std::string> ids;
  for (int i = 0; i < 9; ++i) {
    v1::GenerateRequest request;
    ids.push_back(fmt::format("{}{}", std::string(100, 'j'), i));
    request.mutable_params()->set_request_id(ids.back());
    request.mutable_params()->set_steps(1);
    const grpc::Status status = Generate(request);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  std::vector<std::string> listed;
  v1::ListJobsRequest list;
  v1::ListJobsResponse response;
  int pages = 0;
  do {
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->ListJobs(&context, list, &response).ok());
    EXPECT_LE(response.ByteSizeLong(), 1500u);
    ASSERT_GT(response.jobs_size(), 0);
    for (const v1::Job& job : response.jobs()) listed.push_back(job.request_id());
    list.set_page_token(response.next_page_token());
    ++pages;
  } while (!list.page_token().empty());
  EXPECT_GT(pages, 1);
  std::reverse(ids.begin(), ids.end());
  EXPECT_EQ(listed, ids);
}

TEST_F(ServerTest, UnknownJobsAreNotFound) {
  Start();
  v1::GetJobRequest get;
  v1::GetJobResponse got;
  grpc::ClientContext none, unknown, watch_context, cancel_context;
  grpc::Status status = stub_->GetJob(&none, get, &got);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(Violated(status), ElementsAre("request_id"));
  get.set_request_id("nobody's");
  status = stub_->GetJob(&unknown, get, &got);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Reason(status), "JOB_NOT_FOUND");
  v1::WatchJobRequest watch;
  watch.set_request_id("nobody's");
  Event event;
  auto reader = stub_->WatchJob(&watch_context, watch);
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
  v1::CancelJobRequest cancel;
  cancel.set_request_id("nobody's");
  v1::CancelJobResponse cancelled;
  EXPECT_EQ(stub_->CancelJob(&cancel_context, cancel, &cancelled).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

/// Streams send images one by one, so their jobs may be larger than one reply may be.
TEST_F(ServerTest, AJobThatWasStreamedMayBeTooLargeForOneReply) {
  config_.limits.max_reply_bytes = 32 << 10;
  Start();
  v1::StreamGenerateRequest stream;
  v1::GenerationParams& params = *stream.mutable_params();
  params.set_request_id("large");
  params.set_count(12);
  params.set_width(64);
  params.set_height(64);
  params.mutable_output()->set_format(v1::IMAGE_FORMAT_RAW_FLOAT32);
  std::vector<Event> events;
  const grpc::Status streamed = Stream(stream, &events);
  ASSERT_TRUE(streamed.ok()) << streamed.error_message();
  v1::GenerateRequest unary;
  *unary.mutable_params() = params;
  v1::GenerateResponse response;
  const grpc::Status status = Generate(unary, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("WatchJob"));
}

TEST_F(ServerTest, IncludeTimingsTellsWhatWasSentToo) {
  Start({.max_slots = 1});
  v1::StreamGenerateRequest stream;
  stream.mutable_params()->set_count(2);
  stream.mutable_params()->set_steps(3);
  stream.mutable_params()->set_include_timings(true);
  engine_->PauseAfter(3);  // so that the first image is sent before the second is drawn
  std::vector<Event> events;
  grpc::ClientContext context;
  auto reader = stub_->StreamGenerate(&context, stream);
  for (Event event; reader->Read(&event);) {
    if (event.has_image()) engine_->Pause(false);
    events.push_back(std::move(event));
  }
  ASSERT_TRUE(reader->Finish().ok());
  int sent = 0;
  double last = 0;
  for (const v1::TimelineEntry& entry : events.back().completed().timeline().entries()) {
    sent += entry.milestone() == v1::TimelineEntry::MILESTONE_SENT;
    EXPECT_GE(entry.seconds(), last) << "in order of time";
    last = entry.seconds();
  }
  EXPECT_EQ(sent, 2);
  v1::GenerateRequest unary;
  unary.mutable_params()->set_include_timings(true);
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate(unary, &response).ok());
  EXPECT_EQ(response.timeline().entries().rbegin()->milestone(), v1::TimelineEntry::MILESTONE_SENT);
  unary.mutable_params()->set_include_timings(false);
  ASSERT_TRUE(Generate(unary, &response).ok());
  EXPECT_FALSE(response.has_timeline());
}

TEST_F(ServerTest, DeadlineEndsTheJob) {
  Start();
  engine_->Pause(true);
  // A machine that is too busy to queue it before is given more time.
  for (auto time = 500ms; !engine_->last_spec().deadline && time < 1min; time *= 2) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + time);
    v1::GenerateResponse response;
    EXPECT_EQ(stub_->Generate(&context, {}, &response).error_code(),
              grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  EXPECT_TRUE(engine_->last_spec().deadline.has_value());
  EXPECT_TRUE(Eventually([&] { return engine_->QueuedImages("digits") == 0; }));
}

TEST_F(ServerTest, FullQueueSaysWhenToComeBack) {
  Start({.max_queued_images = 4});
  engine_->Pause(true);
  v1::StreamGenerateRequest stream;
  stream.mutable_params()->set_count(4);
  grpc::ClientContext context;
  auto reader = stub_->StreamGenerate(&context, stream);
  Event event;
  ASSERT_TRUE(reader->Read(&event) && event.has_queued());
  const grpc::Status status = Generate();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Reason(status), "QUEUE_FULL");
  const auto delay = Find<google::rpc::RetryInfo>(status).retry_delay();
  EXPECT_GT(delay.seconds() * 1000 + delay.nanos() / 1'000'000, 0);
  engine_->Pause(false);
  while (reader->Read(&event)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(Generate().ok());
}

TEST_F(ServerTest, WhatMayNeverWaitIsNotAskedToComeBack) {
  config_.engine.max_queued_images = 4;
  Start({.max_queued_images = 4});
  v1::GenerateRequest request;
  request.mutable_params()->set_count(5);
  const grpc::Status status = Generate(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_details(), Not(HasSubstr("RetryInfo")));
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.limits().max_count(), 4);
}

TEST_F(ServerTest, OversizeRequestsAreRefused) {
  config_.limits.max_request_bytes = 1 << 20;
  Start();
  v1::GenerateRequest request;
  request.mutable_params()->mutable_init_image()->set_encoded(std::string(2 << 20, 'x'));
  const grpc::Status status = Generate(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("1048576"));
  EXPECT_TRUE(Generate().ok());
}

TEST_F(ServerTest, RepliesMayExceedTheDefaultFourMegabytes) {
  Start({.size = 1024, .channels = 3});
  v1::GenerateRequest request;
  request.mutable_params()->set_steps(1);
  request.mutable_params()->mutable_output()->set_format(v1::IMAGE_FORMAT_RAW_FLOAT32);
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate(request, &response).ok());
  EXPECT_EQ(response.images(0).tensor().data().size(), 1024u * 1024 * 3 * 4);
}

TEST_F(ServerTest, TwoHundredStreamsAtOnce) {
  Start({.max_rows = 64});
  constexpr int kStreams = 200;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<Event>>> readers;
  for (int i = 0; i < kStreams; ++i) {
    v1::StreamGenerateRequest request;
    request.mutable_params()->set_seed(i);
    request.mutable_params()->set_count(2);
    request.mutable_params()->set_steps(1 + i % 20);
    request.mutable_preview();
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    readers.push_back(stub_->StreamGenerate(contexts.back().get(), request));
  }
  for (int i = 0; i < kStreams; ++i) {
    Event event;
    uint64_t sequence = 0;
    int images = 0;
    bool completed = false;
    while (readers[i]->Read(&event)) {
      EXPECT_GT(event.sequence(), std::exchange(sequence, event.sequence()));
      if (event.has_image()) {
        EXPECT_EQ(event.image().image().seed(), uint64_t(i) + event.image().image().index());
        ++images;
      }
      completed |= event.has_completed();
    }
    EXPECT_TRUE(readers[i]->Finish().ok());
    EXPECT_EQ(images, 2);
    EXPECT_TRUE(completed);
  }
}

TEST_F(ServerTest, RandomCancelsLeaveNothingBehind) {
  Start({.evaluation_cost = 1ms});
  std::vector<std::thread> clients;
  for (int i = 0; i < 8; ++i) {
    clients.emplace_back([this, i] {
      for (int round = 0; round < 12; ++round) {
        grpc::ClientContext context;
        v1::StreamGenerateRequest request;
        request.mutable_params()->set_count(1 + round % 3);
        request.mutable_preview();
        auto reader = stub_->StreamGenerate(&context, request);
        Event event;
        for (int reads = (i * 7 + round * 3) % 11; reads > 0 && reader->Read(&event); --reads) {
        }
        context.TryCancel();
        reader->Finish();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_TRUE(Eventually(
      [&] { return engine_->QueuedImages("") == 0 && engine_->Stats()[0].active_images == 0; }));
  EXPECT_TRUE(Generate().ok());
}

/// Reads nothing while far more is sent than gRPC buffers: the write must time out and the device
/// be freed.
TEST_F(ServerTest, AStalledReaderIsCancelled) {
  config_.write_timeout = 300ms;
  config_.metrics_listen = "127.0.0.1:0";
  Start({.evaluation_cost = 1ms, .size = 512, .channels = 3});
  v1::StreamGenerateRequest request;
  request.mutable_params()->set_count(32);
  request.mutable_params()->set_steps(1);
  request.mutable_params()->mutable_output()->set_format(v1::IMAGE_FORMAT_RAW_FLOAT32);
  grpc::ClientContext context;
  auto reader = stub_->StreamGenerate(&context, request);
  EXPECT_TRUE(Eventually(
      [&] { return Scrape().find("denoised_stalled_readers_total 1") != std::string::npos; }));
  Event event;
  while (reader->Read(&event)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

/// Makes a unary call, expects told() while its reply is not read, and cancels it.
void CallThatReadsNothing(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                          const std::string& request, const std::function<bool()>& told) {
  SCOPED_TRACE(method);
  const grpc::Slice message(request);
  grpc::CompletionQueue queue;
  const auto await = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  grpc::ClientContext context;
  const auto call =
      grpc::GenericStub(channel).PrepareCall(&context, "/denoised.v1." + method, &queue);
  call->StartCall(nullptr);
  ASSERT_TRUE(await());
  call->WriteLast(grpc::ByteBuffer(&message, 1), {}, nullptr);
  ASSERT_TRUE(await());
  EXPECT_TRUE(told());
  context.TryCancel();  // the status would wait behind what nobody reads
  grpc::Status status;
  call->Finish(&status, nullptr);
  EXPECT_TRUE(await());
}

/// The same of a reply that is one large message.
TEST_F(ServerTest, AStalledReaderOfAUnaryReplyIsCancelled) {
  config_.write_timeout = 300ms;
  config_.metrics_listen = "127.0.0.1:0";
  Start({.evaluation_cost = 1ms, .size = 512, .channels = 3});
  v1::GenerateRequest request;
  request.mutable_params()->set_count(4);
  request.mutable_params()->set_steps(1);
  request.mutable_params()->mutable_output()->set_format(v1::IMAGE_FORMAT_RAW_FLOAT32);
  CallThatReadsNothing(channel_, "ImageGeneration/Generate", request.SerializeAsString(), [&] {
    return Eventually(
        [&] { return Scrape().find("denoised_stalled_readers_total 1") != std::string::npos; });
  });
}

/// The same of the small replies of all other calls, by a client that lets nearly nothing through.
TEST_F(ServerTest, AStalledReaderOfASmallReplyIsCancelled) {
  config_.write_timeout = 300ms;
  config_.metrics_listen = "127.0.0.1:0";
  Start();
  v1::GenerateRequest drawn;
  drawn.mutable_params()->set_request_id("kept");
  ASSERT_TRUE(Generate(drawn).ok());
  v1::GetJobRequest job;
  job.set_request_id("kept");
  v1::SetAliasRequest alias;
  alias.set_alias("numbers");
  alias.set_target("digits");
  grpc::ChannelArguments narrow;
  narrow.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 16);
  narrow.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  const auto channel = Connect(grpc::InsecureChannelCredentials(), narrow);
  int stalled = 0;
  for (const auto& [method, message] :
       {std::pair{"ImageGeneration/GetJob", job.SerializeAsString()},
        {"ImageGeneration/ListJobs", ""},
        {"ImageGeneration/GetServerInfo", ""},
        {"ModelAdmin/SetAlias", alias.SerializeAsString()}}) {
    const std::string told = fmt::format("denoised_stalled_readers_total {}", ++stalled);
    CallThatReadsNothing(channel, method, message, [&] {
      return Eventually([&] { return Scrape().find(told) != std::string::npos; }, 5s);
    });
  }
}

TEST_F(ServerTest, HealthFollowsLoadingAndDraining) {
  std::latch loads{1};
  StartLoading({.on_open = [&](const std::string&) { loads.wait(); }});
  EXPECT_EQ(CheckHealth(channel_, ""), 2);
  EXPECT_EQ(CheckHealth(channel_, "denoised.v1.ImageGeneration"), 2);
  EXPECT_EQ(CheckHealth(channel_, "liveness"), 1);
  EXPECT_EQ(CheckHealth(channel_, "nobody"), -1);
  const grpc::Status status = Generate();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Reason(status), "MODEL_LOADING");
  grpc::ClientContext context;
  v1::GetModelResponse model;
  ASSERT_TRUE(stub_->GetModel(&context, {}, &model).ok());
  EXPECT_EQ(model.model().state(), v1::MODEL_STATE_LOADING);

  loads.count_down();
  ASSERT_TRUE(server_->Loaded(1min));
  EXPECT_EQ(CheckHealth(channel_, ""), 1);
  EXPECT_EQ(CheckHealth(channel_, "denoised.v1.ImageGeneration"), 1);

  engine_->Pause(true);
  v1::GenerateResponse response;
  auto running = std::async(std::launch::async, [&] { return Generate({}, &response); });
  ASSERT_TRUE(Eventually([&] { return engine_->QueuedImages("") == 1; }));
  auto drain = std::async(std::launch::async, [&] { server_->Drain(1min); });
  ASSERT_TRUE(Eventually([&] { return CheckHealth(channel_, "") == 2; }));
  EXPECT_EQ(CheckHealth(channel_, "liveness"), 1);
  // That is told a moment before requests are refused.
  ASSERT_TRUE(Eventually([&] {
    grpc::ClientContext info_context;
    v1::GetServerInfoResponse info;
    return stub_->GetServerInfo(&info_context, {}, &info).ok() &&
           info.state() == v1::SERVER_STATE_DRAINING;
  }));
  const grpc::Status refused = Generate();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Reason(refused), "DRAINING");
  engine_->Pause(false);
  drain.get();
  const grpc::Status finished = running.get();
  EXPECT_TRUE(finished.ok()) << finished.error_message();
  EXPECT_EQ(response.images_size(), 1);
}

TEST_F(ServerTest, TheEndOfTheGracePeriodEndsJobs) {
  Start();
  engine_->Pause(true);
  auto running = std::async(std::launch::async, [&] { return Generate(); });
  ASSERT_TRUE(Eventually([&] { return engine_->QueuedImages("") == 1; }));
  server_->Drain(50ms);
  const grpc::Status status = running.get();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Reason(status), "DRAINING");
}

/// Clients that begin requests until they are refused, and a server that drains meanwhile: every
/// request that was accepted is answered in full.
TEST_F(ServerTest, NoAcceptedRequestIsLostInADrain) {
  Start({.evaluation_cost = 1ms});
  std::atomic<int> accepted{0}, completed{0}, refused{0}, lost{0};
  std::vector<std::thread> clients;
  for (int client = 0; client < 16; ++client) {
    clients.emplace_back([&, client] {
      for (int round = 0;; ++round) {
        v1::StreamGenerateRequest request;
        request.mutable_params()->set_steps(1 + (client + round) % 30);
        request.mutable_params()->set_count(1 + round % 3);
        grpc::ClientContext context;
        auto reader = stub_->StreamGenerate(&context, request);
        Event event;
        bool queued = false, done = false;
        while (reader->Read(&event)) {
          if (event.has_queued() && !std::exchange(queued, true)) ++accepted;
          done |= event.has_completed();
        }
        const grpc::Status status = reader->Finish();
        completed += done && status.ok();
        lost += queued && !(done && status.ok());
        if (!status.ok()) {
          // gRPC itself cancels what arrives between its shutdown and the client's knowing of it.
          EXPECT_THAT(status.error_code(),
                      AnyOf(grpc::StatusCode::UNAVAILABLE, grpc::StatusCode::CANCELLED));
          refused += !queued;
          return;
        }
      }
    });
  }
  EXPECT_TRUE(Eventually([&] { return completed > 64 && accepted > completed; }));
  server_->Drain(1min, /*lame_duck=*/100ms);
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(completed, accepted);
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(refused, 16) << "each ends with a refusal";
}

TEST_F(ServerTest, ALameDuckStillTakesRequests) {
  Start();
  auto drain = std::async(std::launch::async, [&] { server_->Drain(10s, /*lame_duck=*/5s); });
  ASSERT_TRUE(Eventually([&] { return CheckHealth(channel_, "") == 2; }));
  EXPECT_TRUE(Generate().ok());
  drain.get();
  EXPECT_EQ(Generate().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServerTest, ModelsAreLoadedAndUnloadedByRpc) {
  Start();
  const auto admin = v1::ModelAdmin::NewStub(channel_);
  v1::LoadModelRequest load;
  load.set_name("faces");
  load.set_directory(testing::TempDir());
  v1::LoadModelResponse loaded;
  grpc::ClientContext load_context, again_context, alias_context, unload_context, delete_context;
  ASSERT_TRUE(admin->LoadModel(&load_context, load, &loaded).ok());
  EXPECT_EQ(loaded.model().state(), v1::MODEL_STATE_AVAILABLE);
  EXPECT_EQ(loaded.model().version(), "1");
  EXPECT_TRUE(loaded.model().current());
  v1::LoadModelRequest again;
  again.set_name("faces");
  again.set_keep_current(true);
  ASSERT_TRUE(admin->LoadModel(&again_context, again, &loaded).ok());
  EXPECT_EQ(loaded.model().version(), "2");
  EXPECT_FALSE(loaded.model().current());
  again.set_unload_previous(true);
  grpc::ClientContext contradiction;
  const grpc::Status refused = admin->LoadModel(&contradiction, again, &loaded);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(),
              AllOf(HasSubstr("unload_previous"), HasSubstr("keep_current")));
  grpc::ClientContext cut_context;
  v1::LoadModelRequest cut;  // the system would read the path up to the NUL
  cut.set_name("cats");
  cut.set_directory(testing::TempDir() + std::string("\0x", 2));
  const grpc::Status nul = admin->LoadModel(&cut_context, cut, &loaded);
  EXPECT_EQ(nul.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(Violated(nul), ElementsAre("directory"));
  v1::SetAliasRequest alias;
  alias.set_alias("canary");
  alias.set_target("faces@2");
  v1::SetAliasResponse aliased;
  ASSERT_TRUE(admin->SetAlias(&alias_context, alias, &aliased).ok());
  EXPECT_THAT(aliased.model().aliases(), ElementsAre("canary"));

  for (const auto& [asked, version] :
       {std::pair{"faces", "1"}, {"faces@2", "2"}, {"canary", "2"}}) {
    v1::GenerateRequest request;
    request.mutable_params()->set_model(asked);
    v1::GenerateResponse response;
    ASSERT_TRUE(Generate(request, &response).ok()) << asked;
    EXPECT_EQ(response.params().model(), "faces");
    EXPECT_EQ(response.run().model_version(), version);
  }

  v1::DeleteAliasRequest remove;
  remove.set_alias("canary");
  v1::DeleteAliasResponse removed;
  EXPECT_TRUE(admin->DeleteAlias(&delete_context, remove, &removed).ok());
  v1::UnloadModelRequest unload;
  unload.set_name("faces");
  v1::UnloadModelResponse unloaded;
  ASSERT_TRUE(admin->UnloadModel(&unload_context, unload, &unloaded).ok());
  v1::GenerateRequest request;
  request.mutable_params()->set_model("faces");
  EXPECT_EQ(Generate(request).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(engine_->Models().size(), 1u);
}

TEST_F(ServerTest, ACancelledCallDoesNotStopItsUnload) {
  Start();
  engine_->Pause(true);
  grpc::ClientContext stream_context, context;
  auto reader = stub_->StreamGenerate(&stream_context, {});
  Event event;
  ASSERT_TRUE(reader->Read(&event) && event.has_queued());
  v1::UnloadModelRequest unload;
  unload.set_name("digits");
  v1::UnloadModelResponse unloaded;
  const auto admin = v1::ModelAdmin::NewStub(channel_);
  auto call = std::async(std::launch::async,
                         [&] { return admin->UnloadModel(&context, unload, &unloaded); });
  // It waits for the request that the model has.
  ASSERT_TRUE(Eventually([&] { return engine_->Models().at(0)->state == ModelState::kUnloading; }));
  context.TryCancel();
  EXPECT_EQ(call.get().error_code(), grpc::StatusCode::CANCELLED);
  v1::GenerateRequest request;
  request.mutable_params()->set_model("digits");
  std::this_thread::sleep_for(100ms);  // for an unload that would stop
  EXPECT_EQ(Generate(request).error_code(), grpc::StatusCode::FAILED_PRECONDITION) << "it leaves";
  engine_->Pause(false);
  while (reader->Read(&event)) {
  }
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << "the request was cut off: " << status.error_message();
  EXPECT_TRUE(Eventually(
      [&] { return Generate(request).error_code() == grpc::StatusCode::NOT_FOUND; }, 10s));
  EXPECT_TRUE(engine_->Models().empty());
}

TEST_F(ServerTest, WhatWaitsForNoModelWaitsForNoLoad) {
  const std::string slow = testing::TempDir() + "slow";
  std::filesystem::create_directory(slow);
  std::latch may_load{1};
  Start({.on_open = [&](const std::string& directory) {
    if (directory == slow) may_load.wait();
  }});
  const auto admin = v1::ModelAdmin::NewStub(channel_);
  std::atomic<int> ended = 0;
  std::vector<std::thread> loads;
  for (int i = 0; i < 6; ++i) {
    loads.emplace_back([&, i] {
      v1::LoadModelRequest request;
      request.set_name(fmt::format("model{}", i));
      request.set_directory(slow);
      v1::LoadModelResponse response;
      grpc::ClientContext context;
      const grpc::Status status = admin->LoadModel(&context, request, &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      ++ended;
    });
  }
  EXPECT_TRUE(Eventually([&] { return engine_->opens() == 2; }));  // of digits, and the first here
  grpc::ClientContext context, alias_context, delete_context;
  // If one waited for a thread, a load would have to leave it first.
  for (grpc::ClientContext* each : {&context, &alias_context, &delete_context}) {
    each->set_deadline(std::chrono::system_clock::now() + 1min);
  }
  context.AddMetadata("x-forwarded-for", "192.0.2.7");  // whom a proxy passes on is no admin
  v1::UnloadModelResponse response;
  EXPECT_EQ(admin->UnloadModel(&context, {}, &response).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  v1::SetAliasRequest alias;
  alias.set_alias("numbers");
  alias.set_target("digits");
  v1::SetAliasResponse aliased;
  v1::DeleteAliasRequest remove;
  remove.set_alias("numbers");
  v1::DeleteAliasResponse removed;
  EXPECT_TRUE(admin->SetAlias(&alias_context, alias, &aliased).ok());
  EXPECT_TRUE(admin->DeleteAlias(&delete_context, remove, &removed).ok());
  EXPECT_EQ(ended, 0);
  may_load.count_down();
  for (std::thread& load : loads) load.join();
}

TEST_F(ServerTest, AChangeThatCannotBeSavedIsLoggedAsMade) {
  const TemporaryDirectory state;
  config_.state_dir = state.path();
  Start();
  std::filesystem::create_directories(state / "models.json/in-the-way");
  v1::SetAliasRequest alias;
  alias.set_alias("numbers");
  alias.set_target("digits");
  v1::SetAliasResponse aliased;
  grpc::ClientContext context;
  log::Configure(log::Format::kText, log::Level::kInfo);
  testing::internal::CaptureStderr();
  const grpc::Status status =
      v1::ModelAdmin::NewStub(channel_)->SetAlias(&context, alias, &aliased);
  const std::string text = testing::internal::GetCapturedStderr();
  log::Configure(log::Format::kText, log::Level::kError);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(Reason(status), "CHANGE_INCOMPLETE");
  EXPECT_THAT(text, HasSubstr("models changed, but not all of the change was done"));
  EXPECT_THAT(text, testing::Not(HasSubstr("models not changed")));
}

TEST_F(ServerTest, BadAdminRequestsNameTheField) {
  Start();
  const auto admin = v1::ModelAdmin::NewStub(channel_);
  const auto load = [&](const char* name, const char* version, const std::string& directory) {
    v1::LoadModelRequest request;
    request.set_name(name);
    request.set_version(version);
    request.set_directory(directory);
    v1::LoadModelResponse response;
    grpc::ClientContext context;
    return admin->LoadModel(&context, request, &response);
  };
  grpc::Status status = load("../etc", "a b", "/no/such/place");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(Violated(status), ElementsAre("name", "version", "directory"));
  status = load("nothing", "", "");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Reason(status), "MODEL_NOT_FOUND");
  status = load("digits", "1", "");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(Reason(status), "MODEL_EXISTS");
  // As the catalog names it, without the slash at the end.
  engine_->set_broken(std::filesystem::canonical(testing::TempDir() + ".").string());
  status = load("digits", "", testing::TempDir());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Reason(status), "MODEL_FAILED");
  EXPECT_TRUE(Generate().ok()) << "the old version serves on";
  v1::UnloadModelRequest unload;
  unload.set_name("digits/1");
  v1::UnloadModelResponse unloaded;
  grpc::ClientContext context;
  EXPECT_EQ(admin->UnloadModel(&context, unload, &unloaded).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ServerTest, ModelsAreLoadedFromTheRootsAlone) {
  Start();
  v1::LoadModelRequest load;
  load.set_name("faces");
  load.set_directory("/etc");
  v1::LoadModelResponse loaded;
  grpc::ClientContext context;
  const grpc::Status status = v1::ModelAdmin::NewStub(channel_)->LoadModel(&context, load, &loaded);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(Violated(status), ElementsAre("directory"));
  EXPECT_EQ(engine_->opens(), 1) << "the engine was not asked";
}

TEST_F(ServerTest, WhatAdminsChangedSurvivesARestart) {
  const TemporaryDirectory state;
  config_.state_dir = state.path();
  Start();
  v1::SetAliasRequest alias;
  alias.set_alias("numbers");
  alias.set_target("digits");
  v1::SetAliasResponse aliased;
  grpc::ClientContext alias_context, load_context;
  const auto admin = v1::ModelAdmin::NewStub(channel_);
  ASSERT_TRUE(admin->SetAlias(&alias_context, alias, &aliased).ok());
  v1::LoadModelRequest load;
  load.set_name("faces");
  load.set_directory(testing::TempDir());
  v1::LoadModelResponse loaded;
  ASSERT_TRUE(admin->LoadModel(&load_context, load, &loaded).ok());
  server_.reset();

  Start();
  EXPECT_EQ(engine_->Models().size(), 2u);
  v1::GenerateRequest request;
  for (const char* name : {"numbers", "faces"}) {
    request.mutable_params()->set_model(name);
    EXPECT_TRUE(Generate(request).ok()) << name;
  }
  // Nothing is left to load: the server is as the admin left it, and serves.
  for (const char* name : {"digits", "faces"}) {
    v1::UnloadModelRequest unload;
    unload.set_name(name);
    v1::UnloadModelResponse unloaded;
    grpc::ClientContext context;
    ASSERT_TRUE(v1::ModelAdmin::NewStub(channel_)->UnloadModel(&context, unload, &unloaded).ok());
  }
  server_.reset();
  Start();
  EXPECT_EQ(engine_->Models().size(), 0u);
  EXPECT_EQ(CheckHealth(channel_, ""), 1);
}

/// Requests that arrive while their model is replaced over and over all get images.
TEST_F(ServerTest, ReplacingAModelLosesNoRequest) {
  Start({.evaluation_cost = 200us});
  const auto admin = v1::ModelAdmin::NewStub(channel_);
  std::atomic<bool> stop{false};
  std::atomic<int> drawn{0};
  std::vector<std::thread> clients;
  for (int client = 0; client < 6; ++client) {
    clients.emplace_back([&] {
      while (!stop) {
        const grpc::Status status = Generate();
        EXPECT_TRUE(status.ok()) << status.error_message();
        ++drawn;
      }
    });
  }
  for (int round = 0; round < 40; ++round) {
    v1::LoadModelRequest load;
    load.set_name("digits");
    load.set_unload_previous(true);
    v1::LoadModelResponse loaded;
    grpc::ClientContext context;
    const grpc::Status status = admin->LoadModel(&context, load, &loaded);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(Eventually([&] { return drawn > round; }));
  }
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(engine_->Models().size(), 1u);
  EXPECT_EQ(engine_->Models()[0]->name, "digits@41");
}

TEST_F(ServerTest, ServerInfoTellsLimitsAndFeatures) {
  config_.admin = false;
  config_.limits.max_steps = 77;
  config_.grace = 1500ms;
  Start();
  grpc::ClientContext context, admin_context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.state(), v1::SERVER_STATE_SERVING);
  EXPECT_EQ(info.device(), "fake:0,fake:1");
  EXPECT_EQ(info.client(), "anonymous");
  EXPECT_EQ(info.batching(), "step");
  EXPECT_EQ(info.limits().max_steps(), 77);
  EXPECT_EQ(info.limits().drain_grace_seconds(), 1.5);
  EXPECT_EQ(info.limits().min_ping_interval_seconds(), 10);
  EXPECT_FALSE(info.limits().has_max_connection_age_seconds());
  EXPECT_THAT(info.features(), ElementsAre(v1::SERVER_FEATURE_REFLECTION));
  EXPECT_GT(info.uptime_seconds(), 0);
  EXPECT_NE(info.version(), "");
  v1::LoadModelResponse loaded;
  EXPECT_EQ(v1::ModelAdmin::NewStub(channel_)->LoadModel(&admin_context, {}, &loaded).error_code(),
            grpc::StatusCode::UNIMPLEMENTED)
      << "without --admin there is no such service";
}

TEST_F(ServerTest, ABrokenModelLeavesTheOthers) {
  config_.models = {{"bad", "broken"}, {"digits", "models/digits"}};
  Start();
  EXPECT_EQ(CheckHealth(channel_, ""), 1);
  v1::GenerateRequest request;
  request.mutable_params()->set_model("bad");
  const grpc::Status status = Generate(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Reason(status), "MODEL_FAILED");
  EXPECT_THAT(status.error_message(), HasSubstr("broken/config.json"));
  request.mutable_params()->set_model("digits");
  EXPECT_TRUE(Generate(request).ok());
}

TEST_F(ServerTest, NoModelAtAllIsAnError) {
  config_.models = {{"bad", "broken"}};
  StartLoading();
  const auto loaded = server_->Loaded(1min);
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(CheckHealth(channel_, ""), 2);
}

TEST_F(ServerTest, OneLostDeviceLeavesTheOtherServing) {
  config_.metrics_listen = "127.0.0.1:0";
  Start();
  EXPECT_TRUE(server_->CheckDevices().ok());
  EXPECT_FALSE(server_->DestructorWaits());
  engine_->BreakDevice(0, Internal("an illegal memory access"));
  EXPECT_TRUE(server_->CheckDevices().ok());
  EXPECT_TRUE(server_->DestructorWaits());
  EXPECT_EQ(CheckHealth(channel_, ""), 1);
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  ASSERT_EQ(info.devices_size(), 2);
  EXPECT_EQ(info.devices(0).error(), "an illegal memory access");
  EXPECT_EQ(info.devices(1).error(), "");
  const std::string text = Scrape();
  EXPECT_THAT(text, HasSubstr("denoised_device_up{device=\"fake:0\"} 0"));
  EXPECT_THAT(text, HasSubstr("denoised_device_up{device=\"fake:1\"} 1"));
}

TEST_F(ServerTest, WithoutADeviceItIsNeitherServingNorLive) {
  config_.metrics_listen = "127.0.0.1:0";
  Start();
  engine_->BreakDevice(0, Internal("an illegal memory access"));
  engine_->BreakDevice(1, Internal("fell off the bus"));
  EXPECT_FALSE(server_->CheckDevices().ok());
  EXPECT_EQ(CheckHealth(channel_, ""), 2);
  EXPECT_EQ(CheckHealth(channel_, "liveness"), 2);
  EXPECT_THAT(Get("/healthz"), HasSubstr("503"));
}

TEST_F(ServerTest, ProbesOverHttpSayWhatHealthSays) {
  config_.metrics_listen = "127.0.0.1:0";
  std::latch loads{1};
  StartLoading({.on_open = [&](const std::string&) { loads.wait(); }});
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(Get("/"), StartsWith("HTTP/1.1 404"));
  loads.count_down();
  ASSERT_TRUE(server_->Loaded(1min)->ok());
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 200"));
  server_->Drain(0ms);
  EXPECT_THAT(Get("/readyz"), StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200"));
}

TEST_F(ServerTest, APortInUseIsAnErrorThatNamesIt) {
  Start();
  Config second = config_;
  second.listen = "127.0.0.1:" + std::to_string(server_->port());
  const auto refused = Server::Start(second, std::make_unique<FakeEngine>());
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr(second.listen));
}

TEST_F(ServerTest, MetricsTellWhatHappened) {
  config_.metrics_listen = "127.0.0.1:0";
  Start();
  v1::StreamGenerateRequest request;
  request.mutable_params()->set_count(3);
  request.mutable_preview();
  std::vector<Event> events;
  ASSERT_TRUE(Stream(request, &events).ok());
  v1::GenerateRequest bad;
  bad.mutable_params()->set_steps(0);
  EXPECT_FALSE(Generate(bad).ok());
  const std::string labels =
      "grpc_method=\"Generate\",grpc_service=\"denoised.v1.ImageGeneration\",grpc_type=\"unary\"";
  std::string text;
  // Each call is counted after its end is sent, and not in the order of the calls.
  ASSERT_TRUE(Eventually([&] {
    text = Scrape();
    return text.find("grpc_server_handled_total{grpc_code=\"INVALID_ARGUMENT\"," + labels +
                     "} 1") != std::string::npos &&
           text.find("grpc_server_handled_total{grpc_code=\"OK\",grpc_method=\"StreamGenerate\"") !=
               std::string::npos;
  })) << text;
  for (const char* series :
       {"denoised_images_total{model=\"digits\",version=\"1\"} 3",
        "denoised_evaluation_rows_count{device=\"fake:0\",model=\"digits\",version=\"1\"} 10",
        "denoised_evaluation_rows_sum{device=\"fake:0\",model=\"digits\",version=\"1\"} 30",
        "denoised_evaluation_seconds_count{device=\"fake:0\",model=\"digits\",version=\"1\"} 10",
        "denoised_padding_rows_total{device=\"fake:0\",model=\"digits\",version=\"1\"} 130",
        "denoised_nonfinite_images_total{model=\"digits\",version=\"1\"} 0",
        "denoised_queue_seconds_count{model=\"digits\",priority=\"normal\",version=\"1\"} 1",
        "denoised_first_preview_seconds_count{model=\"digits\",version=\"1\"} 1",
        "denoised_encoding_seconds_count{format=\"png\",model=\"digits\",version=\"1\"} 3",
        "denoised_queued_images{priority=\"normal\",model=\"digits\",version=\"1\"} 0",
        "denoised_active_images{model=\"digits\",version=\"1\"} 0",
        "denoised_model_state{state=\"available\",model=\"digits\",version=\"1\"} 1",
        "denoised_model_memory_bytes{device=\"fake:1\",purpose=\"weights\",model=\"digits\","
        "version=\"1\"} "
        "4000000",
        "denoised_model_current{model=\"digits\",version=\"1\"} 1",
        "denoised_jobs{model=\"digits\",state=\"running\"} 0",
        "denoised_requests_total{code=\"OK\",model=\"digits\",version=\"1\"} 1",
        "denoised_requests_total{code=\"INVALID_ARGUMENT\",model=\"digits\",version=\"1\"} 1",
        "denoised_request_seconds_count{model=\"digits\",version=\"1\"} 1",
        "denoised_build_info{version=\"",
        "denoised_startup_seconds ",
        "denoised_stalled_readers_total 0",
        "grpc_server_handled_total{grpc_code=\"OK\",grpc_method=\"StreamGenerate\"",
        "grpc_server_started_total{grpc_method=\"StreamGenerate\"",
        "grpc_server_handling_seconds_count{grpc_method=\"Generate\""}) {
    EXPECT_THAT(text, HasSubstr(series));
  }
}

TEST_F(ServerTest, ReflectionListsTheServices) {
  Start();
  // ServerReflectionRequest{list_services: ""}: field 7, length 0.
  grpc::Slice slice(std::string("\x3a\x00", 2));
  grpc::ByteBuffer send(&slice, 1), receive;
  grpc::GenericStub stub(channel_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag;
  bool ok = false;
  call->StartCall(nullptr);
  queue.Next(&tag, &ok);
  call->Write(send, nullptr);
  queue.Next(&tag, &ok);
  call->Read(&receive, nullptr);
  queue.Next(&tag, &ok);
  ASSERT_TRUE(ok);
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(receive.Dump(&slices).ok());
  std::string text;
  for (const grpc::Slice& part : slices) {
    text.append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  EXPECT_THAT(text, HasSubstr("denoised.v1.ImageGeneration"));
  EXPECT_THAT(text, HasSubstr("grpc.health.v1.Health"));
  context.TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
}

}  // namespace
}  // namespace denoised
