// SPDX-License-Identifier: Apache-2.0
// The HTTP port over loopback, with a FakeEngine behind: the same as gRPC's port answers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <spng.h>

#include <cstdlib>
#include <filesystem>
#include <latch>
#include <map>
#include <regex>
#include <thread>

#include "denoised/v1/model_admin.grpc.pb.h"
#include "engine/images/png.h"
#include "server/http/image_links.h"
#include "server/http/json.h"
#include "server/http/openai.h"
#include "server/security/clients.h"
#include "tests/eventually.h"
#include "tests/io/temporary_directory.h"
#include "tests/server/http_client.h"
#include "tests/server/server_fixture.h"
#include "tests/tls/certificates.h"

namespace denoised {
namespace {

/// A black PNG with this alpha channel.
std::string PngOfAlpha(int width, int height, const std::vector<uint8_t>& alpha) {
  std::vector<uint8_t> samples;
  for (const uint8_t value : alpha) samples.insert(samples.end(), {0, value});
  const std::unique_ptr<spng_ctx, void (*)(spng_ctx*)> context(spng_ctx_new(SPNG_CTX_ENCODER),
                                                               spng_ctx_free);
  spng_set_option(context.get(), SPNG_ENCODE_TO_BUFFER, 1);
  spng_ihdr header{.width = static_cast<uint32_t>(width),
                   .height = static_cast<uint32_t>(height),
                   .bit_depth = 8,
                   .color_type = SPNG_COLOR_TYPE_GRAYSCALE_ALPHA};
  EXPECT_EQ(spng_set_ihdr(context.get(), &header), 0);
  EXPECT_EQ(spng_encode_image(context.get(), samples.data(), samples.size(), SPNG_FMT_PNG,
                              SPNG_ENCODE_FINALIZE),
            0);
  size_t size = 0;
  int error = 0;
  const std::unique_ptr<void, void (*)(void*)> file(
      spng_get_png_buffer(context.get(), &size, &error), std::free);
  return {static_cast<const char*>(file.get()), size};
}

using namespace std::chrono_literals;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class HttpTest : public ServerFixture {
 protected:
  HttpTest() { config_.http_listen = "127.0.0.1:0"; }

  HttpAnswer Ask(const std::string& method, const std::string& target, const std::string& body = "",
                 const HttpHeaders& headers = {}) const {
    return denoised::Ask(server_->http_port(), method, target, body, headers);
  }
  HttpClient Stream(const std::string& method, const std::string& target,
                    const std::string& body = "", const HttpHeaders& headers = {}) const {
    HttpClient client(server_->http_port());
    client.Send(HttpClient::Request(method, target, body, headers));
    return client;
  }

  static std::string Form(const std::vector<std::pair<std::string, std::string>>& fields,
                          const std::string& image) {
    std::string body;
    for (const auto& [name, value] : fields) {
      body +=
          "--b\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n";
    }
    if (!image.empty()) {
      body +=
          "--b\r\nContent-Disposition: form-data; name=\"image\"; filename=\"a.png\"\r\n"
          "Content-Type: image/png\r\n\r\n" +
          image + "\r\n";
    }
    return body + "--b--\r\n";
  }
  HttpAnswer Edit(const std::vector<std::pair<std::string, std::string>>& fields,
                  const std::string& image) const {
    return Ask("POST", "/v1/images/edits", Form(fields, image),
               {{"Content-Type", "multipart/form-data; boundary=b"}});
  }
};

TEST_F(HttpTest, EveryDoorGivesTheSameBytes) {
  Start();
  v1::GenerateRequest request;
  request.mutable_params()->set_seed(42);
  request.mutable_params()->add_conditions()->set_class_label(7);
  v1::GenerateResponse response;
  ASSERT_TRUE(Generate(request, &response).ok());
  const std::string bytes = response.images(0).encoded();
  ASSERT_FALSE(bytes.empty());

  const std::string ours = R"({"params": {"seed": "42", "conditions": [{"class_label": 7}]}})";
  const HttpAnswer unary = Ask("POST", "/v1/generate", ours);
  ASSERT_EQ(unary.code, 200) << unary.body;
  EXPECT_EQ(Decode64(unary.Json()["images"][0]["encoded"]), bytes);
  EXPECT_EQ(unary.Json()["images"][0]["seed"], "42");
  EXPECT_EQ(unary.Json()["images"][0]["index"], 0) << "fields that are not optional are there";
  EXPECT_EQ(unary.Header("x-request-id"), unary.Json()["params"]["request_id"]);
  EXPECT_EQ(unary.Header("traceparent"), unary.Json()["traceparent"]);

  HttpClient stream = Stream("POST", "/v1/generate", ours, {{"Accept", "text/event-stream"}});
  EXPECT_EQ(stream.ReadHead().code, 200);
  std::string streamed;
  while (const auto event = stream.ReadEvent()) {
    if (event->name == "image") streamed = Decode64(event->Json()["image"]["image"]["encoded"]);
  }
  EXPECT_EQ(streamed, bytes);
  EXPECT_TRUE(stream.ended());

  const HttpAnswer openai =
      Ask("POST", "/v1/images/generations", R"({"prompt": "7", "denoised": {"seed": 42}})");
  ASSERT_EQ(openai.code, 200) << openai.body;
  EXPECT_EQ(Decode64(openai.Json()["data"][0]["b64_json"]), bytes);
}

TEST_F(HttpTest, ErrorsAreThoseOfGrpc) {
  Start();
  for (const char* params :
       {R"({"steps": -1})", R"({"model": "absent"})", R"({"count": 100000})",
        R"({"steps": 0, "guidance_scale": 101, "width": 3, "request_id": "\u00e4"})",
        R"({"init_image": {"encoded": "AAAA"}})", R"({"sampler": "SAMPLER_LCM"})"}) {
    const HttpAnswer answer =
        Ask("POST", "/v1/generate", std::string(R"({"params": )") + params + "}");
    v1::GenerateRequest request;
    const json parsed = json::parse(params);
    auto& p = *request.mutable_params();
    if (parsed.contains("steps")) p.set_steps(parsed["steps"]);
    if (parsed.contains("model")) p.set_model(parsed["model"]);
    if (parsed.contains("count")) p.set_count(parsed["count"]);
    if (parsed.contains("guidance_scale")) p.set_guidance_scale(parsed["guidance_scale"]);
    if (parsed.contains("width")) p.set_width(parsed["width"]);
    if (parsed.contains("request_id")) p.set_request_id(parsed["request_id"]);
    if (parsed.contains("init_image")) p.mutable_init_image()->set_encoded(std::string(3, '\0'));
    if (parsed.contains("sampler")) p.set_sampler(v1::SAMPLER_LCM);
    const grpc::Status status = Generate(request);
    EXPECT_FALSE(status.ok()) << params;
    EXPECT_EQ(answer.Error(), status.error_message());
    EXPECT_EQ(answer.code, status.error_code() == grpc::StatusCode::NOT_FOUND ? 404 : 400);
    EXPECT_EQ(answer.Error("code"), status.error_code() == grpc::StatusCode::NOT_FOUND
                                        ? "model_not_found"
                                        : "invalid_fields");
    EXPECT_EQ(answer.Error("type"), "invalid_request_error");
    EXPECT_THAT(answer.Error(), StartsWith(answer.Error("param") + ": "));
    EXPECT_THAT(answer.Error("param"), StartsWith("params."));
    EXPECT_EQ(answer.Header("content-type"), "application/json");
  }
  const json violations =
      Ask("POST", "/v1/generate", R"({"params": {"steps": -1, "width": -1}})").Json();
  const json& details = violations["error"]["details"];
  EXPECT_EQ(details[1]["@type"], "type.googleapis.com/google.rpc.BadRequest");
  EXPECT_EQ(details[1]["field_violations"].size(), 2u);
  EXPECT_EQ(violations["error"]["param"], details[1]["field_violations"][0]["field"]);
}

TEST_F(HttpTest, ErrorsOfOtherCodesNameTheirFieldToo) {
  Start();
  const auto param = [&](const std::string& method, const std::string& target,
                         const std::string& body, int code) {
    const HttpAnswer answer = Ask(method, target, body);
    EXPECT_EQ(answer.code, code) << target << answer.body;
    const std::string field = answer.Error("param");
    EXPECT_THAT(answer.Error(), StartsWith(field + ": "));
    EXPECT_EQ(answer.Json()["error"]["details"][0]["metadata"]["field"], field);
    EXPECT_EQ(answer.Header("x-should-retry"), "false");
    return field;
  };
  EXPECT_EQ(param("POST", "/v1/images/generations", R"({"prompt": "1", "model": "absent"})", 404),
            "model");
  EXPECT_EQ(param("POST", "/v1/generate", R"({"params": {"model": "absent"}})", 404),
            "params.model");
  EXPECT_EQ(param("GET", "/v1/models/absent", "", 404), "name");
  EXPECT_EQ(param("GET", "/v1/jobs/absent", "", 404), "request_id");
  EXPECT_EQ(param("GET", "/v1/jobs/absent/events", "", 404), "request_id");
  EXPECT_EQ(param("POST", "/v1/jobs/absent/cancel", "", 404), "request_id");
  const std::string mine = R"({"prompt": "1", "denoised": {"request_id": "mine", "seed": 1}})";
  EXPECT_EQ(Ask("POST", "/v1/images/generations", mine).code, 200);
  EXPECT_EQ(param("POST", "/v1/generate", R"({"params": {"request_id": "mine"}})", 409),
            "params.request_id");
  EXPECT_EQ(param("POST", "/v1/images/generations",
                  R"({"prompt": "2", "denoised": {"request_id": "mine"}})", 409),
            "denoised.request_id");
}

TEST_F(HttpTest, WhatIsNoMessageIsRefusedByField) {
  Start();
  const auto error = [&](const std::string& body) {
    const HttpAnswer answer = Ask("POST", "/v1/generate", body);
    EXPECT_EQ(answer.code, 400) << body;
    return answer.Error();
  };
  EXPECT_THAT(error(R"({"params": {"stepps": 3}})"), HasSubstr("params.stepps: is no field"));
  EXPECT_THAT(error(R"({"parms": {}})"), HasSubstr("parms: is no field"));
  EXPECT_EQ(error(R"({"params": {"steps": "many"}})"),
            "params.steps: is \"many\"; use a whole number");
  EXPECT_EQ(error(R"({"params": {"steps": 1.5}})"), "params.steps: is 1.5; use a whole number");
  EXPECT_EQ(error(R"({"params": {"seed": -1}})"),
            "params.seed: is -1; use a whole number from 0 to 18446744073709551615");
  EXPECT_EQ(error(R"({"params": {"guidance_scale": "high"}})"),
            "params.guidance_scale: is \"high\"; use a number");
  EXPECT_EQ(error(R"({"params": {"steps": 99999999999}})"),
            "params.steps: is 99999999999; use a smaller whole number");
  EXPECT_EQ(error(R"({"params": {"steps": "-99999999999"}})"),
            "params.steps: is \"-99999999999\"; use a larger whole number");
  EXPECT_EQ(error(R"({"params": {"steps": "inf"}})"),
            "params.steps: is \"inf\"; use a whole number");
  EXPECT_EQ(error(R"({"params": {"guidance_scale": 1e999}})"),
            "params.guidance_scale: is 1e999; use a number within 1.7e308");
  EXPECT_EQ(error(R"({"params": {"conditions": [{}, {"class_vector": [0, -1e999]}]}})"),
            "params.conditions[1].class_vector[1]: is -1e999; use a number within 1.7e308");
  EXPECT_EQ(error("1e999"), "body: is 1e999; use a number within 1.7e308");
  EXPECT_THAT(error(R"({"params": {"steps": "\n"}})"), HasSubstr("params.steps: is"));
  EXPECT_EQ(error(R"({"params": {"steps": {}}})"),
            "params.steps: is an object, but takes one value");
  EXPECT_EQ(error(R"({"params": {"request_id": ["a"]}})"),
            "params.request_id: is a list, but takes one value");
  EXPECT_EQ(error(R"({"params": {"output": "png"}})"), "params.output: is \"png\"; use an object");
  EXPECT_EQ(error(R"({"params": {"seeds": [{}]}})"),
            "params.seeds: is an object, but takes one value");
  EXPECT_EQ(error(R"({"params": []})"), "params: is a list, but takes one value");
  EXPECT_EQ(error(R"({"a: b": 3})"),
            "a: b: is no field here; see /openapi.json for those that there are");
  EXPECT_EQ(error(R"({"params": {"init_image": {"encoded": "AAAA", "tensor": {}}}})"),
            "params.init_image: has two fields of which it takes one; leave one out");
  EXPECT_THAT(error(R"({"params": {"steps": ")" + std::string(2000, 'x') + R"("}})"),
              HasSubstr("xxx...; use a whole number"));
  EXPECT_THAT(error(R"({"params": {"sampler": "ddim"}})"),
              HasSubstr("params.sampler: is \"ddim\"; use one of SAMPLER_DDPM, SAMPLER_DDIM, "));
  EXPECT_THAT(error(R"({"params": {"steps": 3)"), HasSubstr("body: is no JSON"));
  EXPECT_THAT(error("{'params': {}}"), HasSubstr("body: is no JSON"));
  EXPECT_EQ(error(R"({"params": {"steps": 3, "count": 1, "steps": 4}})"),
            "params.steps: is given twice");
  EXPECT_EQ(error(R"({"params": {"noise_schedule": 1, "noiseSchedule": 1}})"),
            "params.noiseSchedule: is given twice");
  EXPECT_EQ(error(R"({"params": {"conditions": [{"class_label": 1},
                                                {"class_label": 1, "class_label": 1}]}})"),
            "params.conditions[1].class_label: is given twice");
  EXPECT_EQ(error(R"({"params": {"init_image": {"encoded": ")" + std::string(4096, 'A') +
                  R"(", "encoded": ""}}})"),
            "params.init_image.encoded: is given twice");
  EXPECT_THAT(error("[1]"), HasSubstr("body: "));
  EXPECT_THAT(error("\xff\xfe"), HasSubstr("body: "));
  EXPECT_THAT(error(std::string(100'000, '[')), HasSubstr("body: "));
  EXPECT_THAT(error(R"({"preview": {}})"), HasSubstr("preview: is no field"))
      << "a unary reply has no previews";
  EXPECT_EQ(engine_->evaluations(), 0);
}

TEST_F(HttpTest, AStreamTellsTheStoryInOrder) {
  Start();
  engine_->PauseAfter(2);  // so that a preview comes before its image
  HttpClient stream = Stream("POST", "/v1/generate?stream=true",
                             R"({"params": {"steps": 5, "requestId": "mine"}, "preview": {}})");
  const HttpAnswer head = stream.ReadHead();
  EXPECT_EQ(head.Header("x-request-id"), "mine") << "camelCase is read too";
  EXPECT_EQ(head.Header("cache-control"), "no-store");
  std::vector<std::string> names;
  int64_t last = 0;
  while (const auto event = stream.ReadEvent()) {
    names.push_back(event->name);
    if (event->name == "preview") engine_->Pause(false);
    const json data = event->Json();
    EXPECT_EQ(data["sequence"], event->id);
    EXPECT_GT(std::stoll(event->id), last);
    last = std::stoll(event->id);
    EXPECT_EQ(data["request_id"], "mine");
    EXPECT_TRUE(data.contains(event->name)) << event->data;
  }
  ASSERT_GE(names.size(), 5u);
  EXPECT_EQ(names[0], "queued");
  EXPECT_EQ(names[1], "started");
  EXPECT_THAT(names, ::testing::Contains("image"));  // encoded while progress goes on
  EXPECT_EQ(names.back(), "completed");
  EXPECT_THAT(names, ::testing::Contains("preview"));
  EXPECT_THAT(names, ::testing::Contains("progress"));
}

TEST_F(HttpTest, ThePlaceInTheQueueMoves) {
  Start();
  engine_->Pause(true);
  HttpClient stream = Stream("POST", "/v1/generate?stream=true",
                             R"({"params": {"steps": 5, "request_id": "mine"}})");
  ASSERT_EQ(stream.ReadHead().code, 200);
  json first = stream.ReadEvent()->Json();
  EXPECT_EQ(first["queued"]["position"], 0);
  for (const int place : {2, 1}) {
    engine_->TellPlaces({.jobs_ahead = place, .images_ahead = 10 * place, .start_seconds = 0.5});
    const auto event = stream.ReadEvent();
    EXPECT_EQ(event->name, "queued");
    json expected = first["queued"];
    expected["position"] = place;
    expected["images_ahead"] = 10 * place;
    expected["estimated_start_seconds"] = 0.5;
    EXPECT_EQ(event->Json()["queued"], expected) << "all that the first one tells, too";
  }
  HttpClient late = Stream("GET", "/v1/jobs/mine/events?after_sequence=0");
  ASSERT_EQ(late.ReadHead().code, 200);
  const auto latest = late.ReadEvent();
  EXPECT_EQ(latest->id, "3");
  EXPECT_EQ(latest->Json()["queued"]["position"], 1);
  engine_->Pause(false);
  for (HttpClient* each : {&stream, &late}) EXPECT_EQ(each->ReadEvent()->name, "started");
}

TEST_F(HttpTest, AClientThatGoesFreesTheDevice) {
  Start({.evaluation_cost = 5ms});
  for (const bool stream : {true, false}) {
    const int before = engine_->cancels();
    const auto evaluated = engine_->evaluations();
    HttpClient client = Stream("POST", stream ? "/v1/generate?stream=true" : "/v1/generate",
                               R"({"params": {"steps": 1000}})");
    ASSERT_TRUE(Eventually([&] { return engine_->evaluations() > evaluated; }));
    client.Close();
    EXPECT_TRUE(Eventually([&] { return engine_->cancels() == before + 1; })) << stream;
    // Its last evaluation must not be taken for one of the next.
    ASSERT_TRUE(Eventually([&] { return engine_->Stats()[0].active_images == 0; }));
  }
}

TEST_F(HttpTest, AJobSurvivesItsStreamAndIsResumed) {
  Start({.evaluation_cost = 10ms});
  HttpClient first = Stream(
      "POST", "/v1/generate?stream=true",
      R"({"params": {"steps": 30, "request_id": "a b/c", "disconnect_policy": 2}, "preview": {}})");
  first.ReadHead();
  std::string last;
  for (int i = 0; i < 4; ++i) last = first.ReadEvent()->id;
  first.Close();
  HttpClient second = Stream("GET", "/v1/jobs/a%20b%2Fc/events", "", {{"Last-Event-ID", last}});
  EXPECT_EQ(second.ReadHead().code, 200);
  std::vector<HttpEvent> events;
  while (auto event = second.ReadEvent()) events.push_back(*std::move(event));
  ASSERT_FALSE(events.empty());
  EXPECT_GT(std::stoi(events.front().id), std::stoi(last)) << "what is known is not sent again";
  EXPECT_EQ(events.back().name, "completed");
  EXPECT_EQ(engine_->cancels(), 0);

  const HttpAnswer job = Ask("GET", "/v1/jobs/a%20b%2Fc");
  EXPECT_EQ(job.Json()["job"]["state"], "JOB_STATE_SUCCEEDED");
  EXPECT_EQ(job.Json()["job"]["last_sequence"], events.back().id);
  EXPECT_EQ(Ask("GET", "/v1/jobs?page_size=5").Json()["jobs"].size(), 1u);
  HttpClient ended = Stream("GET", "/v1/jobs/a%20b%2Fc/events?after_sequence=" + events.back().id);
  EXPECT_EQ(ended.ReadHead().code, 200);
  const auto again = ended.ReadEvent();
  ASSERT_TRUE(again) << "a stream without its last event would read as cut off";
  EXPECT_EQ(again->data, events.back().data);
  EXPECT_EQ(again->id, events.back().id);
  EXPECT_FALSE(ended.ReadEvent());
  EXPECT_TRUE(ended.ended());
  const std::string beyond = std::to_string(std::stoi(events.back().id) + 1);
  const HttpAnswer late = Ask("GET", "/v1/jobs/a%20b%2Fc/events?after_sequence=" + beyond);
  EXPECT_EQ(late.code, 400);
  EXPECT_EQ(late.Error(), "after_sequence: is " + beyond + ", but the job's last event is " +
                              events.back().id +
                              "; use the number of an event of this job, or 0 for all");
  EXPECT_EQ(Ask("GET", "/v1/jobs/a%20b%2Fc/events", "", {{"Last-Event-ID", beyond}}).Error("param"),
            "Last-Event-ID");
  EXPECT_EQ(Ask("GET", "/v1/jobs/a%20b%2Fc/events", "", {{"Last-Event-ID", "-1"}}).Error("param"),
            "Last-Event-ID");

  EXPECT_EQ(Ask("GET", "/v1/jobs/other").code, 404);
  EXPECT_EQ(Ask("GET", "/v1/jobs/other/events").Error("code"), "job_not_found");
  EXPECT_THAT(Ask("GET", "/v1/jobs/other/events?after_sequence=x").Error(),
              HasSubstr("after_sequence: is \"x\""));
  EXPECT_THAT(Ask("GET", "/v1/jobs?page_size=many").Error(), HasSubstr("page_size"));
  EXPECT_THAT(Ask("GET", "/v1/jobs?page_token=x").Error(), HasSubstr("page_token"));
}

TEST_F(HttpTest, AJobIsCancelledForWhoeverWatchesIt) {
  Start({.evaluation_cost = 10ms});
  HttpClient stream = Stream("POST", "/v1/generate?stream=true",
                             R"({"params": {"steps": 1000, "request_id": "long"}})");
  stream.ReadHead();
  ASSERT_EQ(stream.ReadEvent()->name, "queued");
  const HttpAnswer cancelled = Ask("POST", "/v1/jobs/long/cancel");
  EXPECT_EQ(cancelled.code, 200) << cancelled.body;
  EXPECT_EQ(cancelled.Json()["job"]["request_id"], "long");
  std::optional<HttpEvent> last;
  while (auto event = stream.ReadEvent()) last = std::move(event);
  EXPECT_EQ(last->name, "error");
  EXPECT_EQ(last->id, "");
  EXPECT_EQ(last->Json()["error"]["status"], "CANCELLED");
  EXPECT_TRUE(stream.ended());
}

TEST_F(HttpTest, TheDeadlineEndsTheJob) {
  Start();
  engine_->Pause(true);  // so that nothing but the deadline ends a job
  // The engine may see the deadline before the call cancels the job.
  const auto ended = [&] {
    return Eventually([&] { return engine_->Stats()[0].queued_images == 0; });
  };
  // A machine that is too busy to queue a job before is given more time.
  for (double seconds = 0.5; !engine_->last_spec().deadline && seconds < 60; seconds *= 2) {
    const HttpAnswer late =
        Ask("POST", "/v1/generate", "{}", {{"Request-Timeout", std::to_string(seconds)}});
    EXPECT_EQ(late.code, 504) << late.body;
    EXPECT_EQ(late.Error("status"), "DEADLINE_EXCEEDED");
  }
  EXPECT_TRUE(engine_->last_spec().deadline.has_value());
  EXPECT_TRUE(ended());
  std::optional<HttpEvent> last;
  for (double seconds = 0.5; !last && seconds < 60; seconds *= 2) {
    HttpClient stream = Stream("POST", "/v1/generate?stream=true", "{}",
                               {{"Request-Timeout", std::to_string(seconds)}});
    stream.ReadHead();
    while (auto event = stream.ReadEvent()) last = std::move(event);
  }
  ASSERT_TRUE(last);
  EXPECT_EQ(last->Json()["error"]["status"], "DEADLINE_EXCEEDED");
  EXPECT_TRUE(ended());
  for (const char* bad : {"0", "-1", "soon", "nan", "inf", "1e400"}) {
    EXPECT_THAT(Ask("POST", "/v1/generate", "{}", {{"Request-Timeout", bad}}).Error(),
                HasSubstr("Request-Timeout"))
        << bad;
  }
}

TEST_F(HttpTest, AFullQueueSaysWhenToComeBack) {
  Start({.max_queued_images = 1});
  engine_->Pause(true);
  HttpClient first = Stream("POST", "/v1/generate?stream=true", "{}");
  first.ReadHead();
  const HttpAnswer full = Ask("POST", "/v1/generate", "{}");
  EXPECT_EQ(full.code, 429);
  EXPECT_THAT(full.Header("date"),
              ::testing::MatchesRegex("[A-Z][a-z]+, [0-9]+ [A-Z][a-z]+ [0-9]+ [0-9:]+ GMT"));
  EXPECT_EQ(full.Error("type"), "rate_limit_error");
  EXPECT_EQ(full.Error("code"), "queue_full");
  EXPECT_FALSE(full.Header("retry-after").empty());
  EXPECT_EQ(full.Header("x-should-retry"), "true");
  engine_->Pause(false);
}

/// OpenAI's clients would retry every 409, 429 and 5xx.
TEST(ErrorReplyTest, OnlyWhatMayPassIsToBeRetried) {
  const auto retries = [](const HttpReply& reply) {
    std::map<std::string, std::string> headers(reply.headers.begin(), reply.headers.end());
    EXPECT_EQ(headers.count("Retry-After"), headers["X-Should-Retry"] == "true" ? 1u : 0u);
    return headers["X-Should-Retry"];
  };
  using Code = grpc::StatusCode;
  for (const auto code : {Code::INVALID_ARGUMENT, Code::NOT_FOUND, Code::ALREADY_EXISTS,
                          Code::RESOURCE_EXHAUSTED, Code::CANCELLED, Code::UNIMPLEMENTED,
                          Code::INTERNAL, Code::DATA_LOSS, Code::DEADLINE_EXCEEDED}) {
    EXPECT_EQ(retries(ErrorReply({code, "no"})), "false") << code;
  }
  EXPECT_EQ(retries(ErrorReply({Code::UNAVAILABLE, "no"})), "true");
  // Too many uploads at a time.
  EXPECT_EQ(retries(ErrorReply(503, {Code::RESOURCE_EXHAUSTED, "no"})), "true");
}

TEST_F(HttpTest, AModelThatLoadsIsUnavailable) {
  std::latch loads{1};
  config_.models = {{"digits", "models/digits"}, {"faces", "models/faces"}};
  StartLoading({.on_open = [&](const std::string&) { loads.wait(); }});
  EXPECT_EQ(Ask("GET", "/readyz").code, 503);
  EXPECT_EQ(Ask("GET", "/healthz").code, 200);
  const HttpAnswer answer = Ask("POST", "/v1/generate", "{}");
  EXPECT_EQ(answer.code, 503);
  EXPECT_EQ(answer.Error("code"), "model_loading");
  EXPECT_FALSE(answer.Header("retry-after").empty());
  EXPECT_EQ(answer.Header("x-should-retry"), "true");
  EXPECT_EQ(Ask("POST", "/v1/images/generations", R"({"prompt": "1"})").code, 503);
  loads.count_down();
  server_.reset();  // no load waits any more
}

TEST_F(HttpTest, ModelsAreReadByOurClientsAndOpenAis) {
  Start();
  const json models = Ask("GET", "/v1/models").Json();
  EXPECT_EQ(models["object"], "list");
  EXPECT_EQ(models["data"][0]["id"], "digits");
  EXPECT_EQ(models["data"][0]["object"], "model");
  EXPECT_EQ(models["models"][0]["name"], "digits");
  EXPECT_EQ(models["models"][0]["state"], "MODEL_STATE_AVAILABLE");
  const json model = Ask("GET", "/v1/models/digits@1").Json();
  EXPECT_EQ(model["id"], "digits@1");
  EXPECT_EQ(model["model"]["version"], "1");
  EXPECT_EQ(Ask("GET", "/v1/models/absent").Error("code"), "model_not_found");
  EXPECT_EQ(Ask("GET", "/v1/server").Json()["client"], "anonymous");
  EXPECT_EQ(Ask("GET", "/v1/server").Json()["state"], "SERVER_STATE_SERVING");
}

TEST_F(HttpTest, AdminsChangeModels) {
  config_.model_roots = {testing::TempDir()};
  Start();
  const std::string directory = testing::TempDir() + "/http_cats";
  std::filesystem::create_directories(directory);
  const HttpAnswer loaded =
      Ask("POST", "/v1/models", json{{"name", "cats"}, {"directory", directory}}.dump());
  ASSERT_EQ(loaded.code, 200) << loaded.body;
  EXPECT_EQ(loaded.Json()["model"]["name"], "cats");
  EXPECT_EQ(Ask("POST", "/v1/models", R"({"name": "cats", "version": "1"})").code, 409);
  EXPECT_THAT(Ask("POST", "/v1/models", R"({"name": "../cats"})").Error(), StartsWith("name: "));
  EXPECT_EQ(Ask("PUT", "/v1/aliases/dall-e-3", R"({"target": "cats"})").Json()["model"]["name"],
            "cats");
  EXPECT_EQ(Ask("POST", "/v1/images/generations", R"({"prompt": "1", "model": "dall-e-3"})").code,
            200);
  EXPECT_EQ(Ask("PUT", "/v1/aliases/a", R"({"target": "cats", "alias": "b"})").code, 400);
  EXPECT_EQ(Ask("DELETE", "/v1/aliases/dall-e-3").Json(), json::object());
  const HttpAnswer no_alias = Ask("DELETE", "/v1/aliases/dall-e-3");
  EXPECT_EQ(no_alias.code, 404);
  EXPECT_EQ(no_alias.Error("param"), "alias");
  EXPECT_THAT(no_alias.Error(), StartsWith("alias: there is no alias"));
  EXPECT_EQ(Ask("PUT", "/v1/aliases/a", R"({"target": "nope"})").Error("param"), "target");
  EXPECT_EQ(Ask("DELETE", "/v1/models/nope").Error("param"), "name");
  const json gone = Ask("DELETE", "/v1/models/cats").Json();
  EXPECT_EQ(gone, json({{"id", "cats"}, {"object", "model"}, {"deleted", true}}));
  EXPECT_EQ(Ask("DELETE", "/v1/models/cats").code, 404);
  EXPECT_THAT(Ask("GET", "/metrics").body, HasSubstr("denoised_"));
  // A proxy passed it on: the caller may be anybody.
  const HttpHeaders forwarded = {{"X-Forwarded-For", "192.0.2.1"}};
  EXPECT_EQ(Ask("POST", "/v1/models", R"({"name": "cats"})", forwarded).code, 403);
  EXPECT_EQ(Ask("GET", "/metrics", "", forwarded).code, 403);
}

TEST_F(HttpTest, WithoutAdminsNobodyChangesModels) {
  config_.admin = false;
  Start();
  const HttpAnswer refused = Ask("POST", "/v1/models", R"({"name": "cats"})");
  EXPECT_EQ(refused.code, 501);
  EXPECT_EQ(refused.Error("code"), "no_admins");
  EXPECT_EQ(Ask("DELETE", "/v1/models/digits").code, 501);
}

TEST(OpenAiFieldTest, AnImageIsNamedAsItIsSent) {
  EXPECT_EQ(OpenAiField("params.init_image"), "image");
  EXPECT_EQ(OpenAiField("params.init_image.encoded"), "image");
  EXPECT_EQ(OpenAiField("params.init_image.tensor.shape"), "denoised.init_image.tensor.shape");
  EXPECT_EQ(OpenAiField("params.init_image.strength"), "denoised.strength");
  EXPECT_EQ(OpenAiField("params.steps"), "denoised.steps");
}

TEST_F(HttpTest, OpenAiFieldsAreThoseOfOurMessages) {
  Start();
  const HttpAnswer answer = Ask("POST", "/v1/images/generations", R"({
      "prompt": "", "n": 2, "size": "64x48", "output_format": "jpeg", "output_compression": 80,
      "quality": "high", "background": "auto", "moderation": "low", "user": "me", "model": null,
      "denoised": {"label": 5, "seed": "7", "steps": 4, "sampler": "heun", "guidance_scale": 1.5,
                   "priority": "PRIORITY_BATCH", "request_id": "mine"}})");
  ASSERT_EQ(answer.code, 200) << answer.body;
  const JobSpec spec = engine_->last_spec();
  EXPECT_EQ(spec.count, 2);
  EXPECT_EQ(spec.width, 64);
  EXPECT_EQ(spec.height, 48);
  EXPECT_EQ(spec.seed, 7u);
  EXPECT_EQ(spec.sampler.steps, 4);
  EXPECT_EQ(spec.guidance_scale, 1.5);
  EXPECT_EQ(spec.sampler.sampler, Sampler::kHeun);
  EXPECT_EQ(spec.priority, Priority::kBatch);
  EXPECT_THAT(spec.class_labels, ::testing::Each(5));
  const json reply = answer.Json();
  EXPECT_EQ(reply["data"].size(), 2u);
  EXPECT_EQ(Decode64(reply["data"][1]["b64_json"]).substr(0, 2), "\xff\xd8");
  EXPECT_EQ(reply["data"][1]["denoised"]["seed"], "8");
  EXPECT_EQ(reply["size"], "64x48");
  EXPECT_EQ(reply["output_format"], "jpeg");
  EXPECT_EQ(reply["quality"], "high");
  EXPECT_EQ(reply["denoised"]["params"]["sampler"], "SAMPLER_HEUN");
  EXPECT_EQ(answer.Header("x-request-id"), "mine");
  for (const char* quality : {"auto", "hd"}) {
    const json body = {{"prompt", "5"}, {"quality", quality}};
    const json none = Ask("POST", "/v1/images/generations", body.dump()).Json();
    EXPECT_TRUE(none.contains("data"));
    EXPECT_FALSE(none.contains("quality")) << "OpenAI's replies have no such value";
  }
}

TEST_F(HttpTest, OpenAiCompressionZeroIsTheStrongest) {
  Start();
  for (const int compression : {0, 1}) {
    const json body = {
        {"prompt", "5"}, {"output_format", "jpeg"}, {"output_compression", compression}};
    const HttpAnswer answer = Ask("POST", "/v1/images/generations", body.dump());
    ASSERT_EQ(answer.code, 200) << answer.body;
    EXPECT_EQ(answer.Json()["denoised"]["params"]["output"]["quality"], 1);
  }
}

TEST_F(HttpTest, OpenAiErrorsNameItsFields) {
  Start();
  const std::pair<const char*, const char*> kBad[] = {
      {R"({"prompt": "eleven"})", "prompt: is \"eleven\", which is no class; use"},
      {R"({"prompt": "10"})", "prompt: is \"10\""},
      {R"({"prompt": "1", "n": 0})", "n: is 0; use a whole number from 1 to 256"},
      {R"({"prompt": "1", "n": 100000})", "n: "},
      {R"({"prompt": "1", "size": "big"})", "size: is \"big\""},
      {R"({"prompt": "1", "size": "-5x64"})", "size: "},
      {R"({"prompt": "1", "output_format": "gif"})", "output_format: is \"gif\""},
      {R"({"prompt": "1", "output_compression": 101})", "output_compression: "},
      {R"({"prompt": "1", "response_format": "x"})", "response_format: "},
      {R"({"prompt": "1", "stream": true, "response_format": "url"})", "response_format: is url"},
      {R"({"prompt": "1", "partial_images": 2})", "partial_images: "},
      {R"({"prompt": "1", "quality": "best"})", "quality: is \"best\""},
      {R"({"prompt": "1", "background": "transparent"})", "background: is \"transparent\""},
      {R"({"prompt": "1", "steps": 5})", "steps: is no field of OpenAI's API"},
      {R"({"prompt": "1", "denoised": {"stepps": 5}})", "denoised.stepps: is no field"},
      {R"({"prompt": "1", "denoised": {"steps": 0}})", "denoised.steps: "},
      {R"({"prompt": "1", "denoised": {"sampler": "magic"}})",
       "denoised.sampler: is \"magic\"; use one of SAMPLER_DDPM, "},
      {R"({"prompt": "1", "denoised": {"count": 2}, "n": 1})", "n: is given, and denoised.count"},
      {R"({"prompt": "1", "denoised": {"negative_prompt": "x"}})", "denoised.negative_prompt: "},
      {R"({"prompt": "1", "denoised": {"label": 1, "labels": [2]}})", "denoised.label: "},
      {R"({"denoised": {"labels": [11]}})", "denoised.labels: "},
      {R"({"prompt": "1", "denoised": {"label": 1}})",
       "prompt: is \"1\", and denoised.label is given too"},
      {R"({"prompt": "1", "denoised": {"labels": [1]}})",
       "prompt: is \"1\", and denoised.labels is given too"},
      {R"({"denoised": {"label": 11}})", "denoised.label: is 11, which is no class"},
      {R"({"prompt": "1", "denoised": {"conditions": [{"class_label": 2}]}})",
       "prompt: is given, and denoised.conditions"},
      {R"({"prompt": "1", "n": -1})", "n: is -1; use a whole number from 1 to 256"},
      {R"({"prompt": "1", "n": "two"})", "n: is \"two\"; use a whole number from 1 to 256"},
      {R"({"prompt": "1", "n": 1.5})", "n: is 1.5; use a whole number from 1 to 256"},
      {R"({"prompt": "1", "n": 3000000000})", "n: is 3000000000; use a whole number from 1 to 256"},
      {R"({"prompt": "1", "n": 1e300})", "n: is 1e+300; use a whole number from 1 to 256"},
      {R"({"prompt": "1", "n": 18446744073709551615})",
       "n: is 18446744073709551615; use a whole number from 1 to 256"},
      {R"({"prompt": "1", "denoised": {"steps": {}}})",
       "denoised.steps: is an object, but takes one value"},
      {R"({"prompt": "1", "denoised": {"steps": [1]}})",
       "denoised.steps: is a list, but takes one value"},
      {R"({"prompt": "1", "output_compression": 50})", "output_compression: is 50, but PNG"},
      {R"({"prompt": "1", "mask": "x"})", "mask: is for /v1/images/edits"},
      {R"({"prompt": "1", "image": "x"})", "image: is for /v1/images/edits"},
      {R"({"prompt": "1", "input_fidelity": "low"})", "input_fidelity: is for /v1/images/edits"},
      {R"({"prompt": "1", "denoised": {"strength": 0.5}})", "denoised.strength: "},
      {R"({"prompt": "1", "denoised": {"output": {"format": 4}}})", "denoised.output.format: "},
      {R"({"prompt": "1", "denoised": []})", "denoised: is no object"},
      {R"({"prompt": "1", "n": 1, "prompt": "2"})", "prompt: is given twice"},
      {R"({"prompt": "1", "denoised": {"seed": 1, "seed": 1}})", "denoised.seed: is given twice"},
      {R"({"prompt": "1", "denoised": "{\"seed\": 1, \"seed\": 1}"})",
       "denoised.seed: is given twice"},
      {R"({"prompt": "1", "denoised": "{"})", "denoised: is text that is no JSON"},
      {R"("a")", "body: is no JSON object"},
      {R"({)", "body: is no JSON"},
  };
  for (const auto& [body, message] : kBad) {
    const HttpAnswer answer = Ask("POST", "/v1/images/generations", body);
    EXPECT_EQ(answer.code, 400) << body;
    EXPECT_THAT(answer.Error(), HasSubstr(message)) << body;
    EXPECT_EQ(std::string(message).rfind(answer.Error("param"), 0), 0u) << answer.body;
  }
  for (const char* body :
       {R"({"prompt": "", "denoised": {"label": 1}})",
        R"({"prompt": "1", "output_compression": 100})", R"({"prompt": "1", "n": 2.0})"}) {
    EXPECT_EQ(Ask("POST", "/v1/images/generations", body).code, 200) << body;
  }
  const int evaluations = engine_->evaluations();
  const json many = {{"denoised", {{"labels", std::vector<std::string>(1000, "three")}}}};
  EXPECT_THAT(Ask("POST", "/v1/images/generations", many.dump()).Error(),
              StartsWith("denoised.labels: has 1000 entries; send at most 256"));
  EXPECT_EQ(engine_->evaluations(), evaluations);
  const std::string deep = "{\"prompt\": " + std::string(5000, '[') + std::string(5000, ']') + "}";
  EXPECT_THAT(Ask("POST", "/v1/images/generations", deep).Error(), HasSubstr("nested deeper"));
}

TEST_F(HttpTest, PartialImagesAreOurPreviews) {
  Start({.evaluation_cost = 40ms});  // no more previews a second than the server sends
  engine_->PauseAfter(2);            // so that each comes before the next
  HttpClient stream =
      Stream("POST", "/v1/images/generations",
             R"({"prompt": "3", "stream": true, "partial_images": 3, "size": "64x64",
                                 "denoised": {"steps": 8, "seed": 1}})");
  EXPECT_EQ(stream.ReadHead().code, 200);
  std::vector<std::string> names;
  std::vector<int> evaluations;
  while (const auto event = stream.ReadEvent()) {
    const json data = event->Json();
    EXPECT_EQ(data["type"], event->name);
    EXPECT_EQ(data["size"], "64x64");
    EXPECT_EQ(Decode64(data["b64_json"]).substr(1, 3), "PNG");
    if (event->name == "image_generation.partial_image") {
      EXPECT_EQ(data["partial_image_index"], static_cast<int>(evaluations.size()));
      evaluations.push_back(data["denoised"]["evaluation"]);
      engine_->PauseAfter(2);
    } else {
      EXPECT_EQ(data["usage"]["total_tokens"], 0);
    }
    names.push_back(event->name);
  }
  EXPECT_EQ(names.size(), 4u);
  EXPECT_EQ(names.back(), "image_generation.completed");
  EXPECT_THAT(evaluations, ElementsAre(2, 4, 6));
}

TEST_F(HttpTest, PartialImagesOfAnEditAreSpacedOverItsOwnSteps) {
  Start({.evaluation_cost = 40ms});  // no more previews a second than the server sends
  const std::string image = Decode64(
      Ask("POST", "/v1/images/generations", R"({"prompt": "3"})").Json()["data"][0]["b64_json"]);
  engine_->PauseAfter(2);  // so that each comes before the next
  HttpClient stream = Stream("POST", "/v1/images/edits",
                             Form({{"prompt", "5"},
                                   {"stream", "true"},
                                   {"partial_images", "3"},
                                   {"denoised[steps]", "16"},
                                   {"denoised[strength]", "0.5"}},
                                  image),
                             {{"Content-Type", "multipart/form-data; boundary=b"}});
  EXPECT_EQ(stream.ReadHead().code, 200);
  std::vector<std::string> names;
  while (const auto event = stream.ReadEvent()) {
    names.push_back(event->name);
    engine_->PauseAfter(2);
  }
  const std::string partial = "image_edit.partial_image";
  EXPECT_THAT(names, ElementsAre(partial, partial, partial, "image_edit.completed"));
}

TEST_F(HttpTest, EditsBeginWithAnImage) {
  Start();
  const std::string image = Decode64(
      Ask("POST", "/v1/images/generations", R"({"prompt": "3"})").Json()["data"][0]["b64_json"]);
  const HttpAnswer form = Edit({{"prompt", "5"},
                                {"n", "2"},
                                {"denoised[seed]", "9"},
                                {"denoised[strength]", "0.25"},
                                {"denoised[output][embed_metadata]", "false"}},
                               image);
  ASSERT_EQ(form.code, 200) << form.body;
  JobSpec spec = engine_->last_spec();
  EXPECT_EQ(spec.count, 2);
  EXPECT_EQ(spec.seed, 9u);
  EXPECT_EQ(spec.sampler.strength, 0.25);
  EXPECT_THAT(spec.class_labels, ::testing::Each(5));

  const json asked = {
      {"prompt", "5"},
      {"n", 2},
      {"images", {{{"image_url", "data:image/png;base64," + Encode64(image)}}}},
      {"denoised", R"({"seed": 9, "strength": 0.25, "output": {"embed_metadata": false}})"}};
  const HttpAnswer text = Ask("POST", "/v1/images/edits", asked.dump());
  ASSERT_EQ(text.code, 200) << text.body;
  EXPECT_EQ(text.Json()["data"], form.Json()["data"]);

  // A picture as large as others are is taken out of the text before it is parsed; the same bytes
  // where no picture belongs are not.
  json large = asked;
  const std::string noise = EncodePng({64, 64, 1,
                                       [] {
                                         std::vector<uint8_t> samples(64 * 64);
                                         for (size_t i = 0; i < samples.size(); ++i) {
                                           samples[i] = static_cast<uint8_t>(i * i * 31 >> 4);
                                         }
                                         return samples;
                                       }()},
                                      {})
                                .value();
  ASSERT_GT(noise.size(), 1024u);
  large["images"][0]["image_url"] = "data:image/png;base64," + Encode64(noise);
  const HttpAnswer drawn = Ask("POST", "/v1/images/edits", large.dump());
  ASSERT_EQ(drawn.code, 200) << drawn.body;
  EXPECT_EQ(
      drawn.Json()["data"],
      Edit({{"prompt", "5"}, {"n", "2"}, {"denoised", asked["denoised"]}}, noise).Json()["data"]);
  large["user"] = Encode64(noise);
  EXPECT_EQ(Ask("POST", "/v1/images/edits", large.dump()).Json()["data"], drawn.Json()["data"]);
  large["size"] = Encode64(noise);
  EXPECT_THAT(Ask("POST", "/v1/images/edits", large.dump()).Error(),
              StartsWith("size: is \"" + Encode64(noise).substr(0, 40)));

  // A list of many objects takes no longer than its length.
  json many = asked;
  many["images"] = json(300000, json::object());
  EXPECT_THAT(Ask("POST", "/v1/images/edits", many.dump()).Error(),
              StartsWith("image: has 300000 images"));
  json odd = asked;
  odd["mask"] = json::array();
  EXPECT_THAT(Ask("POST", "/v1/images/edits", odd.dump()).Error(),
              StartsWith("mask: is an empty list"));
  for (const json& prompt : {json(7), json({5}), json({{"a", 5}}), json(true)}) {
    odd = asked;
    odd["prompt"] = prompt;
    const HttpAnswer refused = Ask("POST", "/v1/images/edits", odd.dump());
    EXPECT_EQ(refused.code, 400);
    EXPECT_THAT(refused.Error(), StartsWith("prompt: is "));
  }
  EXPECT_THAT(Ask("POST", "/v1/generate", R"({"params": {"steps": [10]}})").Error(),
              StartsWith("params.steps: "));

  EXPECT_EQ(Edit({{"prompt", "5"}}, "").Error(),
            "image: is missing; send a PNG, JPEG or WebP file");
  odd = asked;
  for (const json& images : {json::array(), json("data:"), json({{{"file_id", "x"}}})}) {
    odd["images"] = images;
    const std::string error = Ask("POST", "/v1/images/edits", odd.dump()).Error();
    EXPECT_THAT(error, StartsWith("images: is ")) << images;
    EXPECT_THAT(error, Not(HasSubstr("image: "))) << "one error is told once";
  }
  odd = asked;
  odd["style"] = "vivid";
  EXPECT_THAT(Ask("POST", "/v1/images/edits", odd.dump()).Error(),
              StartsWith("style: is no field"));
  EXPECT_THAT(Edit({{"prompt", "5"}}, "GIF89a").Error(), StartsWith("image: "));
  EXPECT_THAT(Edit({{"prompt", "5"}, {"denoised[strength]", "2"}}, image).Error(),
              StartsWith("denoised.strength: "));
  EXPECT_THAT(Edit({{"prompt", "5"}, {"prompt", "6"}}, image).Error(),
              HasSubstr("prompt: comes twice"));
  EXPECT_THAT(Edit({{"prompt", "5"}, {"denoised[a", "6"}}, image).code, 400);
  EXPECT_EQ(Edit({{"prompt", "5"}, {"\xff[", "6"}}, image).Error("code"), "invalid_fields");
  const json elsewhere = {{"prompt", "5"}, {"image", "http://192.0.2.1/a.png"}};
  EXPECT_THAT(Ask("POST", "/v1/images/edits", elsewhere.dump()).Error(),
              HasSubstr("image: is no data URL"));
  for (const char* broken : {"", "--b", "--b\r\n", "--b\r\n\r\n", "--b\r\nX: y\r\n\r\nz\r\n--b--",
                             "--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nz"}) {
    EXPECT_EQ(Ask("POST", "/v1/images/edits", std::string(" ") + broken,
                  {{"Content-Type", "multipart/form-data; boundary=b"}})
                  .code,
              400)
        << broken;
  }
  EXPECT_THAT(
      Ask("POST", "/v1/images/edits", "x", {{"Content-Type", "multipart/form-data"}}).Error(),
      HasSubstr("boundary"));

  HttpClient stream =
      Stream("POST", "/v1/images/edits", Form({{"prompt", "5"}, {"stream", "true"}}, image),
             {{"Content-Type", "multipart/form-data; boundary=b"}});
  EXPECT_EQ(stream.ReadHead().code, 200);
  EXPECT_EQ(stream.ReadEvent()->name, "image_edit.completed");
}

/// Large base64 is taken out of a body before it is parsed. What is read must not depend on that.
TEST_F(HttpTest, TextOfAFormIsUtf8) {
  Start();
  const HttpAnswer answer = Edit({{"prompt", "5"}, {"user", "\xff"}}, "a picture");
  EXPECT_EQ(answer.code, 400);
  EXPECT_EQ(answer.Error(), "user: is not UTF-8; encode the text so");
}

TEST(FromJsonTest, LargeBytesAreReadAsSmallOnes) {
  std::string bytes;
  for (int i = 0; i < 5000; ++i) bytes += static_cast<char>(i * i);
  const std::string large = Encode64(bytes.substr(0, 4999)), other = Encode64(bytes);
  const auto read = [](const std::string& text) {
    v1::GenerateRequest request;
    const grpc::Status status = FromJson(text, &request);
    return std::pair{status, std::move(request)};
  };
  // In another order than the message has its fields, with an escaped quote before it.
  const auto [good, request] = read(
      R"({"params": {"mask": {"transparency": ")" + other +
      R"("}, "conditions": [{"text": "a \"b"}], "init_image": {"encoded": ")" + large + "\"}}}");
  ASSERT_TRUE(good.ok()) << good.error_message();
  EXPECT_EQ(request.params().init_image().encoded(), bytes.substr(0, 4999));
  EXPECT_EQ(request.params().mask().transparency(), bytes);
  EXPECT_EQ(request.params().conditions(0).text(), "a \"b");

  const auto [long_text, prompt] =
      read(R"({"params": {"conditions": [{"text": ")" + large + "\"}]}}");
  ASSERT_TRUE(long_text.ok());
  EXPECT_EQ(prompt.params().conditions(0).text(), large) << "text that looks like base64";
  EXPECT_THAT(read(R"({"params": {"seed": ")" + large + "\"}}").first.error_message(),
              AllOf(StartsWith("params.seed: "), HasSubstr(large.substr(0, 60))));
  // Protobuf decides alone on what is odd, so each is refused or read as in a short string.
  const auto tail = [&](const std::string& end) {
    const auto encoded = [&](const std::string& begin) {
      return read(R"({"params": {"init_image": {"encoded": ")" + begin + end + "\"}}}");
    };
    const auto [small, small_request] = encoded("");
    const auto [big, big_request] = encoded(std::string(4096, 'A'));
    EXPECT_EQ(small.ok(), big.ok()) << end;
    EXPECT_EQ(
        std::string(small.ok() ? 3072 : 0, '\0') + small_request.params().init_image().encoded(),
        big_request.params().init_image().encoded())
        << end;
  };
  for (const char* end : {"AAAA", "AAE=", "AAF=", "AA==", "AB==", "AAE", "AA", "A",
                          "A A=", "\\nAAA", "A=AA", "-_-_", "+/+/", "\\u0041AAA", "AA=A", "!AAA"}) {
    tail(end);
  }
}

TEST_F(HttpTest, EditsWithAMaskDrawWhatIsTransparent) {
  Start();
  constexpr int kEdge = 32;
  const std::string image =
      EncodePng({kEdge, kEdge, 1, std::vector<uint8_t>(kEdge * kEdge, 200)}, {}).value();
  // Opaque, half transparent by a hair less and more, and fully transparent: a quarter each.
  std::vector<uint8_t> alpha;
  for (const uint8_t quarter : {255, 128, 127, 0}) {
    alpha.insert(alpha.end(), kEdge * kEdge / 4, quarter);
  }
  const std::string mask = PngOfAlpha(kEdge, kEdge, alpha);

  v1::GenerateRequest request;
  v1::GenerationParams& params = *request.mutable_params();
  params.set_seed(9);
  params.add_conditions()->set_class_label(5);
  params.mutable_init_image()->set_encoded(image);
  params.mutable_mask()->set_transparency(mask);
  v1::GenerateResponse response;
  const grpc::Status status = Generate(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(response.params().has_mask());
  const std::string bytes = response.images(0).encoded();
  const Pixels drawn = DecodePng(bytes, kEdge * kEdge).value();
  for (int y = 0; y < kEdge; ++y) {
    const auto row = drawn.samples.begin() + y * kEdge;
    const bool kept = std::all_of(row, row + kEdge, [](uint8_t sample) { return sample == 200; });
    EXPECT_EQ(kept, y < kEdge / 2) << "row " << y;
  }

  const std::vector<std::pair<std::string, std::string>> fields = {{"prompt", "5"},
                                                                   {"denoised[seed]", "9"}};
  const auto masked = [&](const std::string& file) {
    auto all = fields;
    all.emplace_back("mask", file);
    return Edit(all, image);
  };
  const HttpAnswer form = masked(mask);
  ASSERT_EQ(form.code, 200) << form.body;
  EXPECT_EQ(Decode64(form.Json()["data"][0]["b64_json"]), bytes);
  const auto url = [](const std::string& file) {
    return json{{"image_url", "data:image/png;base64," + Encode64(file)}};
  };
  json asked = {
      {"prompt", "5"}, {"images", {url(image)}}, {"mask", url(mask)}, {"denoised", {{"seed", 9}}}};
  const HttpAnswer text = Ask("POST", "/v1/images/edits", asked.dump());
  ASSERT_EQ(text.code, 200) << text.body;
  EXPECT_EQ(Decode64(text.Json()["data"][0]["b64_json"]), bytes);
  EXPECT_NE(Decode64(Edit(fields, image).Json()["data"][0]["b64_json"]), bytes);

  EXPECT_EQ(Ask("POST", "/v1/images/generations", R"({"prompt": "3", "size": "0x0"})").Error(),
            "size: is 0; use at least 1");
  EXPECT_THAT(masked(image).Error(), StartsWith("mask: the PNG has no alpha channel"));
  EXPECT_THAT(masked("").Error(), StartsWith("mask: the image is no PNG"));
  EXPECT_THAT(masked("\xff\xd8\xff a JPEG").Error(), StartsWith("mask: the image is no PNG"));
  EXPECT_THAT(masked(PngOfAlpha(2, 1, {0, 255})).Error(),
              StartsWith("mask: is 2×1, but init_image is 32×32 pixels"));
  asked["denoised"]["mask"] = {{"encoded", Encode64(image)}};
  EXPECT_THAT(Ask("POST", "/v1/images/edits", asked.dump()).Error(),
              StartsWith("mask: is given, and denoised.mask too"));
  asked["denoised"].erase("mask");
  asked["mask"] = json::array({url(mask), url(mask)});
  EXPECT_THAT(Ask("POST", "/v1/images/edits", asked.dump()).Error(),
              StartsWith("mask: is given 2 times"));
  asked["mask"] = "http://192.0.2.1/a.png";
  EXPECT_THAT(Ask("POST", "/v1/images/edits", asked.dump()).Error(),
              HasSubstr("mask: is no data URL"));
}

TEST_F(HttpTest, LinksWorkForAWhile) {
  Start();
  const json reply = Ask("POST", "/v1/images/generations",
                         R"({"prompt": "3", "response_format": "url"})", {{"Host", "localhost:7"}})
                         .Json();
  const std::string url = reply["data"][0]["url"];
  EXPECT_FALSE(reply["data"][0].contains("b64_json"));
  const std::string host = "http://localhost:7";
  ASSERT_THAT(url, StartsWith(host + "/v1/images/files/"));
  const std::string path = url.substr(host.size());
  const HttpAnswer file = Ask("GET", path);
  EXPECT_EQ(file.code, 200);
  EXPECT_EQ(file.Header("content-type"), "image/png");
  EXPECT_EQ(file.body.substr(1, 3), "PNG");
  EXPECT_EQ(Ask("GET", "/v1/images/files/..%2f..%2fetc").code, 404);
}

TEST_F(HttpTest, LinksEnd) {
  config_.http_link_time = 20ms;
  Start();
  const json reply =
      Ask("POST", "/v1/images/generations", R"({"prompt": "3", "response_format": "url"})").Json();
  const std::string url = reply["data"][0]["url"];
  const std::string path = url.substr(url.find("/v1/"));
  EXPECT_TRUE(Eventually([&] { return Ask("GET", path).code == 404; }));
}

/// Nobody asks for links any more. (With a sanitizer there is no such count, and this shows
/// nothing.)
TEST_F(HttpTest, LinksThatAreOverHoldNoMemory) {
  config_.http_link_time = 300ms;
  Start({.size = 2048, .channels = 3});
  const auto heap = [] {
    const auto information = mallinfo2();
    return static_cast<int64_t>(information.uordblks + information.hblkhd);
  };
  const int64_t before = heap();
  EXPECT_EQ(Ask("POST", "/v1/images/generations",
                R"({"prompt": "3", "response_format": "url", "denoised": {"steps": 1}})")
                .code,
            200);
  // The file has more than 4 MiB.
  EXPECT_TRUE(Eventually([&] { return heap() - before < 2 << 20; })) << heap() - before;
}

TEST(ImageLinksTest, TheOldestGoWhenThereIsNoRoom) {
  ImageLinks links(1h, 10);
  const auto add = [&](size_t bytes) { return links.Add({"image/png", std::string(bytes, 'x')}); };
  const std::string first = add(5).value(), second = add(4).value(), third = add(2).value();
  EXPECT_EQ(links.Find(first), nullptr);
  EXPECT_NE(links.Find(second), nullptr);
  EXPECT_EQ(add(11).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(links.Find(second), nullptr) << "an image that never fits takes no place";
  EXPECT_EQ(links.Find(third)->bytes, "xx");
}

TEST_F(HttpTest, AnImageTooLargeForLinksComesInTheReply) {
  config_.jobs.max_bytes = 16;
  Start();
  const json image =
      Ask("POST", "/v1/images/generations", R"({"prompt": "3", "response_format": "url"})")
          .Json()["data"][0];
  EXPECT_FALSE(image.contains("url"));
  EXPECT_EQ(Decode64(image["b64_json"]).substr(1, 3), "PNG");
}

TEST_F(HttpTest, LinksThroughAListedProxyAreHttps) {
  config_.http_origins = {"https://studio.example.org", "http://plain.example.org"};
  Start();
  for (const std::string& origin : config_.http_origins) {
    const std::string host = origin.substr(origin.find("://") + 3);
    const json reply = Ask("POST", "/v1/images/generations",
                           R"({"prompt": "3", "response_format": "url"})", {{"Host", host}})
                           .Json();
    EXPECT_THAT(reply["data"][0]["url"].get<std::string>(), StartsWith(origin + "/v1/images/"));
  }
}

TEST_F(HttpTest, PagesOfOtherOriginsNeedLeave) {
  config_.http_origins = {"https://studio.example.org"};
  Start();
  const std::string body = R"({"prompt": "3"})";
  const auto generate = [&](const HttpHeaders& headers) {
    return Ask("POST", "/v1/images/generations", body, headers);
  };
  const HttpAnswer evil = generate({{"Origin", "https://evil.example.org"}});
  EXPECT_EQ(evil.code, 403);
  EXPECT_EQ(evil.Error("code"), "foreign_origin");
  EXPECT_EQ(generate({{"Origin", "null"}}).code, 403);
  EXPECT_EQ(generate({{"Origin", "http://localhost:1"}, {"Host", "localhost:1"}}).code, 200);
  const HttpAnswer listed = generate({{"Origin", "https://studio.example.org"}});
  EXPECT_EQ(listed.code, 200);
  EXPECT_EQ(listed.Header("access-control-allow-origin"), "https://studio.example.org");
  EXPECT_EQ(listed.Header("vary"), "Origin");
  EXPECT_EQ(listed.Header("access-control-allow-credentials"), "");
  const HttpAnswer error =
      Ask("GET", "/v1/models/absent", "", {{"Origin", "https://studio.example.org"}});
  EXPECT_EQ(error.Header("access-control-allow-origin"), "https://studio.example.org")
      << "a page can read errors too";
  const auto preflight = [&](const std::string& names) {
    return Ask("OPTIONS", "/v1/generate", "",
               {{"Origin", "https://studio.example.org"},
                {"Access-Control-Request-Method", "POST"},
                {"Access-Control-Request-Headers", names}});
  };
  const HttpAnswer asked = preflight("authorization,x-stainless-os");
  EXPECT_EQ(asked.code, 204);
  EXPECT_EQ(asked.Header("access-control-allow-methods"), "POST");
  EXPECT_EQ(asked.Header("access-control-allow-headers"), "authorization,x-stainless-os")
      << "OpenAI's client sends headers of its own";
  for (const char* bad : {"a b", "a;b=c", "a,\"b\"", "<a>"}) {
    EXPECT_EQ(preflight(bad).code, 400) << bad;
    EXPECT_EQ(preflight(bad).Header("access-control-allow-headers"), "") << bad;
  }
  EXPECT_EQ(Ask("OPTIONS", "/v1/generate", "", {{"Origin", "https://evil.example.org"}}).code, 403);
  // DNS rebinding: the page's own host, which means this machine.
  const HttpHeaders rebound = {{"Origin", "http://evil.example.org"}, {"Host", "evil.example.org"}};
  EXPECT_EQ(generate(rebound).code, 403);
  EXPECT_EQ(Ask("GET", "/v1/server", "", {{"Host", "evil.example.org"}}).code, 403);
  EXPECT_EQ(Ask("GET", "/v1/server", "", {{"Host", "studio.example.org"}}).code, 200);
  EXPECT_EQ(Ask("GET", "/v1/server", "", {{"Host", "[::1]:8080"}}).code, 200);
  // What a page may send without asking.
  for (const char* type : {"text/plain", "application/x-www-form-urlencoded", ""}) {
    EXPECT_EQ(generate({{"Content-Type", type}}).code, 415) << type;
  }
}

TEST_F(HttpTest, CompressedBodiesAreRefused) {
  Start();
  for (const char* encoding : {"gzip", "br", "identity, gzip"}) {
    const HttpAnswer answer = Ask("POST", "/v1/generate", "{}", {{"Content-Encoding", encoding}});
    EXPECT_EQ(answer.code, 415) << encoding;
    EXPECT_EQ(answer.Header("accept-encoding"), "identity");
    EXPECT_EQ(answer.Error(), "the Content-Encoding is \"" + std::string(encoding) +
                                  "\", and the server reads no compressed bodies; send it "
                                  "uncompressed");
  }
  for (const char* encoding : {"identity", "Identity", ""}) {
    EXPECT_EQ(Ask("POST", "/v1/generate", "{}", {{"Content-Encoding", encoding}}).code, 200);
  }
}

TEST_F(HttpTest, AnotherHostIsRefusedWithoutAdminsToo) {
  config_.admin = false;
  Start();
  EXPECT_EQ(Ask("GET", "/v1/server", "", {{"Host", "evil.example.org"}}).code, 403);
  EXPECT_EQ(Ask("GET", "/v1/server", "", {{"Host", "localhost:8080"}}).code, 200);
}

TEST_F(HttpTest, PathsAndMethods) {
  Start();
  EXPECT_EQ(Ask("GET", "/nothing").code, 404);
  EXPECT_EQ(Ask("GET", "/v1/jobs/").code, 404);
  EXPECT_EQ(Ask("GET", "/v1/jobs/%zz").code, 404);
  EXPECT_EQ(Ask("GET", "//v1/models").code, 404);
  const HttpAnswer wrong = Ask("PUT", "/v1/models/digits", "{}");
  EXPECT_EQ(wrong.code, 405);
  EXPECT_EQ(wrong.Header("allow"), "GET, DELETE");
  EXPECT_EQ(Ask("GET", "/v1/generate").code, 405);
  EXPECT_EQ(Ask("BREW", "/v1/models").code, 405);
  // A reply to HEAD is the head alone, whatever its Content-Length says.
  HttpClient client(server_->http_port());
  client.Send(
      "HEAD /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /readyz HTTP/1.1\r\n"
      "Host: localhost\r\nConnection: close\r\n\r\n");
  const HttpAnswer head = client.Read(true);
  EXPECT_EQ(head.code, 200);
  EXPECT_EQ(head.Header("content-length"), "3");
  const HttpAnswer get = client.Read();
  EXPECT_EQ(get.code, 200);
  EXPECT_EQ(get.body, "ok\n");
  EXPECT_TRUE(client.IsClosedWithin(1min)) << "asked to";
}

TEST_F(HttpTest, QueriesAreChecked) {
  Start();
  for (const char* query : {"page_size=%zz", "page_sise=5", "page_size=5&%ff=1"}) {
    const HttpAnswer answer = Ask("GET", std::string("/v1/jobs?") + query);
    EXPECT_EQ(answer.code, 400) << query;
    EXPECT_EQ(answer.Error("code"), "invalid_fields") << query;
  }
  EXPECT_THAT(Ask("GET", "/v1/jobs?page_sise=5").Error(), StartsWith("page_sise: is no parameter"));
  EXPECT_EQ(Ask("GET", "/v1/jobs?page_size=5&page_token=&all_clients=false").code, 200);
  const auto error = [&](const std::string& target, const HttpHeaders& headers = {}) {
    const std::string method = target.starts_with("/v1/generate") ? "POST" : "GET";
    const HttpAnswer answer = Ask(method, target, method == "POST" ? "{}" : "", headers);
    EXPECT_EQ(answer.code, 400) << target;
    return answer.Error();
  };
  EXPECT_EQ(error("/v1/jobs?all_clients=yes"), "all_clients: is \"yes\"; use true or false");
  EXPECT_EQ(error("/v1/jobs?page_size="), "page_size: is \"\"; use a whole number");
  EXPECT_EQ(error("/v1/jobs?page_size=99999999999"),
            "page_size: is \"99999999999\"; use a smaller whole number");
  EXPECT_THAT(error("/v1/jobs?page_size=5&page_size=6"), HasSubstr("a name twice"));
  EXPECT_EQ(error("/v1/generate?stream=maybe"), "stream: is \"maybe\"; use true or false");
  EXPECT_THAT(error("/v1/generate?stream="), StartsWith("stream: is \"\""));
  EXPECT_THAT(error("/v1/generate?stream=false", {{"Accept", "text/event-stream"}}),
              StartsWith("Accept: is \"text/event-stream\", but the reply is application/json"));
  EXPECT_THAT(error("/v1/generate?stream=true", {{"Accept", "application/json"}}),
              StartsWith("Accept: is \"application/json\", but the reply is text/event-stream"));
  EXPECT_THAT(error("/v1/generate", {{"Accept", "image/png"}}), StartsWith("Accept: "));
  for (const char* accept : {"*/*", "image/png, */*;q=0.1", "application/*", "Application/JSON;q=1",
                             "text/event-stream, application/json"}) {
    EXPECT_EQ(Ask("POST", "/v1/generate?stream=false", "{}", {{"Accept", accept}}).code, 200)
        << accept;
  }
  const auto type = [&](const char* accept) {
    return Ask("POST", "/v1/generate", "{}", {{"Accept", accept}}).Header("content-type");
  };
  for (const char* accept :
       {"text/event-stream;q=0, application/json", "application/json, text/event-stream; q=0.000",
        "text/event-stream;q=0, */*", "text/event-stream;q=0.1, application/json", "*/*"}) {
    EXPECT_EQ(type(accept), "application/json") << accept;
  }
  for (const char* accept : {"application/json, text/event-stream", "Text/Event-Stream;q=0.5",
                             "text/event-stream, */*;q=0.1"}) {
    EXPECT_EQ(type(accept), "text/event-stream") << accept;
  }
  for (const char* accept : {"text/event-stream;q=0", "application/json;q=0, */*"}) {
    EXPECT_THAT(error("/v1/generate?stream=false", {{"Accept", accept}}), StartsWith("Accept: "))
        << accept;
  }
  EXPECT_EQ(Ask("POST", "/v1/generate?stream=%7", "{}").code, 400);
  EXPECT_EQ(Ask("GET", "/healthz?from=a-probe").code, 200);
}

TEST_F(HttpTest, TargetsAndHosts) {
  Start();
  const auto ask = [&](const std::string& target, const std::string& hosts,
                       const char* version = "1.1") {
    HttpClient client(server_->http_port());
    client.Send("GET " + target + " HTTP/" + version + "\r\n" + hosts + "\r\n");
    return client.Read().code;
  };
  const std::string host = "Host: localhost\r\n";
  EXPECT_EQ(ask("/healthz", host), 200);
  EXPECT_EQ(ask("http://localhost:1/healthz", host), 200);
  EXPECT_EQ(ask("HTTPS://localhost/v1/jobs?page_size=1", host), 200);
  EXPECT_EQ(ask("http://localhost", host), 200);
  EXPECT_EQ(ask("http://evil.example.org/v1/server", host), 403) << "the target's host counts";
  for (const char* target :
       {"healthz", "xhealthz", "*", "localhost:80", "ftp://localhost/healthz"}) {
    EXPECT_EQ(ask(target, host), 400) << target;
  }
  EXPECT_EQ(ask("/healthz", ""), 400);
  EXPECT_EQ(ask("/healthz", host + host), 400);
  EXPECT_EQ(ask("/healthz", host + host, "1.0"), 400);
  EXPECT_EQ(ask("/v1/server", "Host: evil.example.org\r\n", "1.0"), 403);
  EXPECT_EQ(ask("http://evil.example.org/v1/server", "", "1.0"), 403);
  // An older request may name none: it means the address that it was sent to, also in links.
  EXPECT_EQ(ask("/v1/server", "", "1.0"), 200);
  HttpClient client(server_->http_port());
  const std::string body = R"({"prompt": "3", "response_format": "url"})";
  client.Send(
      "POST /v1/images/generations HTTP/1.0\r\nContent-Type: application/json\r\n"
      "Expect: 100-continue\r\n" +  // which HTTP/1.0 does not have
      fmt::format("Content-Length: {}\r\n\r\n{}", body.size(), body));
  EXPECT_THAT(
      client.Read().Json()["data"][0]["url"].get<std::string>(),
      StartsWith(fmt::format("http://127.0.0.1:{}/v1/images/files/", server_->http_port())));
}

TEST_F(HttpTest, AConnectionServesOneRequestAfterTheOther) {
  Start();
  HttpClient client(server_->http_port());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client.Ask("GET", "/v1/models").code, 200);
  EXPECT_EQ(client.Ask("GET", "/v1/models/absent").code, 404);
  EXPECT_EQ(client.Ask("POST", "/v1/generate", "{}").code, 200);
  // Ahead of the replies.
  client.Send(HttpClient::Request("POST", "/v1/generate", "{}") +
              HttpClient::Request("GET", "/v1/server") + HttpClient::Request("GET", "/healthz"));
  EXPECT_TRUE(client.Read().Json().contains("images"));
  EXPECT_TRUE(client.Read().Json().contains("version"));
  EXPECT_EQ(client.Read().body, "ok\n");
}

TEST_F(HttpTest, BodiesComeInChunksAndOnRequest) {
  Start();
  HttpClient client(server_->http_port());
  client.Send(
      "POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
      "Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(client.Read().code, 100);
  client.Send("1\r\n{\r\n");
  std::this_thread::sleep_for(50ms);
  client.Send("1\r\n}\r\n0\r\n\r\n");
  EXPECT_EQ(client.Read().code, 200);
  EXPECT_EQ(client.Ask("GET", "/healthz").code, 200);
}

TEST_F(HttpTest, ABodyOfUnknownLengthIsNoRequest) {
  Start();
  for (const char* coding : {"Transfer-Encoding: gzip\r\n", "Transfer-Encoding: identity\r\n",
                             "Transfer-Encoding: chunked, gzip\r\n",
                             "Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n"}) {
    HttpClient client(server_->http_port());
    client.Send("POST /v1/generate HTTP/1.1\r\nHost: localhost\r\n" + std::string(coding) + "\r\n" +
                HttpClient::Request("GET", "/healthz"));
    const HttpAnswer answer = client.Read();
    EXPECT_EQ(answer.code, 400) << coding;
    EXPECT_EQ(answer.Header("connection"), "close") << coding;
    EXPECT_THAT(answer.body, HasSubstr("Transfer-Encoding")) << coding;
    EXPECT_EQ(client.Read().code, 0) << "the body was read as a request: " << coding;
  }
}

TEST_F(HttpTest, ThePageIsInTheProgram) {
  Start();
  const HttpAnswer page = Ask("GET", "/");
  EXPECT_EQ(page.code, 200);
  EXPECT_EQ(page.Header("content-type"), "text/html; charset=utf-8");
  for (const HttpAnswer& file : {page, Ask("GET", "/app.js")}) {
    EXPECT_EQ(file.code, 200);
    EXPECT_EQ(
        file.Header("content-security-policy"),
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'");
    EXPECT_EQ(file.Header("x-content-type-options"), "nosniff");
    EXPECT_EQ(file.Header("referrer-policy"), "no-referrer");
  }
  EXPECT_THAT(page.body, HasSubstr("denoised"));
  const HttpAnswer known = Ask("GET", "/", "", {{"If-None-Match", page.Header("etag")}});
  EXPECT_EQ(known.code, 304);
  EXPECT_EQ(known.body, "");
  EXPECT_EQ(Ask("POST", "/", "{}").code, 405);
}

TEST_F(HttpTest, ADrainFinishesStreamsAndClosesIdleConnections) {
  Start({.evaluation_cost = 10ms});
  HttpClient idle(server_->http_port());
  EXPECT_EQ(idle.Ask("GET", "/readyz").code, 200);
  HttpClient busy(server_->http_port());
  busy.Send(
      HttpClient::Request("POST", "/v1/generate?stream=true", R"({"params": {"steps": 40}})"));
  busy.ReadHead();
  ASSERT_EQ(busy.ReadEvent()->name, "queued");
  std::thread drain([this] { server_->Drain(1min, 5s); });
  EXPECT_TRUE(Eventually([&] { return Ask("GET", "/readyz").code == 503; })) << "a lame duck";
  EXPECT_EQ(Ask("POST", "/v1/generate", "{}").code, 200) << "which still takes requests";
  EXPECT_TRUE(idle.IsClosedWithin(1min));
  std::optional<HttpEvent> last;
  while (auto event = busy.ReadEvent()) last = std::move(event);
  EXPECT_EQ(last->name, "completed");
  drain.join();
  EXPECT_FALSE(HttpClient(server_->http_port()).connected());
}

TEST_F(HttpTest, ADrainFinishesRepliesThatHaveNoCall) {
  config_.metrics_listen = "127.0.0.1:0";
  Start({.size = 2048, .channels = 3});
  const json reply = Ask("POST", "/v1/images/generations",
                         R"({"prompt": "3", "response_format": "url", "denoised": {"steps": 1}})",
                         {{"Host", "localhost"}})
                         .Json();
  const std::string url = reply["data"][0]["url"];
  const std::string path = url.substr(url.find("/v1/"));
  const HttpAnswer whole = Ask("GET", path);
  // More than the system takes for a client that does not read.
  ASSERT_GT(whole.body.size(), 4u << 20);
  HttpClient slow(server_->http_port(), std::nullopt, 16 << 10);
  slow.Send(HttpClient::Request("GET", path));
  EXPECT_TRUE(Eventually([&] {
    return Scrape().find("denoised_http_replies_total{code=\"200\"} 3\n") != std::string::npos;
  }));
  std::thread drain([this] { server_->Drain(1min); });
  EXPECT_TRUE(Eventually([&] { return Ask("GET", "/readyz").code != 200; }));
  std::this_thread::sleep_for(200ms);
  const HttpAnswer read = slow.Read();
  EXPECT_EQ(read.body.size(), whole.body.size());
  EXPECT_TRUE(read.body == whole.body);
  drain.join();
}

TEST_F(HttpTest, DuringADrainNewRequestsAreRefused) {
  Start();
  engine_->Pause(true);  // a job is under way until its client goes
  HttpClient busy(server_->http_port());
  busy.Send(HttpClient::Request("POST", "/v1/generate?stream=true", "{}"));
  busy.ReadHead();
  std::thread drain([this] { server_->Drain(2min); });
  // A request before the drain would be admitted, and wait for the paused engine. A connection that
  // is idle when the port learns of it is closed without an answer.
  EXPECT_TRUE(Eventually([&] {
    return Ask("GET", "/v1/server").body.find("SERVER_STATE_DRAINING") != std::string::npos;
  }));
  HttpAnswer refused;
  EXPECT_TRUE(Eventually([&] {
    refused = Ask("POST", "/v1/generate", "{}");
    return refused.code == 503;
  }));
  EXPECT_EQ(refused.Error("code"), "draining");
  EXPECT_FALSE(refused.Header("retry-after").empty());
  EXPECT_EQ(refused.Header("connection"), "close");
  EXPECT_TRUE(
      Eventually([&] { return Ask("POST", "/v1/models", R"({"name": "a"})").code == 503; }));
  busy.Close();
  drain.join();
}

TEST_F(HttpTest, TheEndOfTheGracePeriodEndsStreams) {
  Start({.evaluation_cost = 10ms});
  HttpClient busy(server_->http_port());
  busy.Send(
      HttpClient::Request("POST", "/v1/generate?stream=true", R"({"params": {"steps": 1000}})"));
  busy.ReadHead();
  server_->Drain(100ms);
  std::optional<HttpEvent> last;
  while (auto event = busy.ReadEvent()) last = std::move(event);
  EXPECT_EQ(last->name, "error");
  EXPECT_EQ(last->Json()["error"]["status"], "UNAVAILABLE");
}

TEST_F(HttpTest, ADrainWaitsForNoLoad) {
  const std::string slow = testing::TempDir() + "slow";
  std::filesystem::create_directory(slow);
  config_.metrics_listen = "127.0.0.1:0";
  std::latch loads{1};
  Start({.on_open = [&](const std::string& directory) {
    if (directory == slow) loads.wait();
  }});
  std::thread over_http([&] {
    const json body = {{"name", "one"}, {"directory", slow}};
    const HttpAnswer answer = Ask("POST", "/v1/models", body.dump());
    EXPECT_EQ(answer.code, 503) << answer.body;
    EXPECT_EQ(answer.Error("code"), "draining");
  });
  std::thread over_grpc([&] {
    v1::LoadModelRequest request;
    request.set_name("two");
    request.set_directory(slow);
    v1::LoadModelResponse response;
    grpc::ClientContext context;
    const grpc::Status status =
        v1::ModelAdmin::NewStub(channel_)->LoadModel(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  });
  EXPECT_TRUE(Eventually([&] { return engine_->opens() == 2; }));
  EXPECT_TRUE(Eventually([&] {  // the other waits for this one
    const std::string metrics = Scrape();
    const std::regex started("grpc_server_started_total\\{[^}]*\"LoadModel\"[^}]*\\} 2\n");
    return std::regex_search(metrics, started);
  }));
  server_->Drain(100ms);
  over_http.join();
  over_grpc.join();
  EXPECT_TRUE(server_->DestructorWaits());
  loads.count_down();
  server_.reset();  // no load waits any more
}

TEST_F(HttpTest, CallsAreCountedAsThoseOfGrpc) {
  config_.metrics_listen = "127.0.0.1:0";
  Start();
  Ask("POST", "/v1/generate", "{}");
  Ask("POST", "/v1/images/generations", R"({"prompt": "x"})");
  Ask("GET", "/v1/models");
  for (const char* series :
       {"grpc_server_handled_total.*grpc_code=\"OK\".*\"Generate\".* 1\n",
        "grpc_server_handled_total.*grpc_code=\"INVALID_ARGUMENT\".*\"Generate\".* 1\n",
        "grpc_server_handled_total.*\"ListModels\".* 1\n"}) {
    std::string metrics;
    // A call is counted after its reply is sent.
    EXPECT_TRUE(Eventually([&] {
      metrics = Scrape();
      return ::testing::Matches(::testing::ContainsRegex(series))(metrics);
    })) << series
        << " is not in\n"
        << metrics;
  }
}

TEST_F(HttpTest, RepliesAreCountedByCode) {
  config_.metrics_listen = "127.0.0.1:0";
  config_.connections.max_connections = 100;
  Start();
  HttpClient open(server_->http_port());
  EXPECT_EQ(open.Ask("GET", "/healthz").code, 200);
  EXPECT_EQ(Ask("GET", "/nowhere").code, 404);
  EXPECT_EQ(Ask("DELETE", "/v1/generate").code, 405);
  EXPECT_EQ(Ask("GET", "/v1/models", std::string(20'000, ' ')).code, 413);
  EXPECT_EQ(Ask("POST", "/v1/generate", "{}", {{"Content-Type", "text/plain"}}).code, 415);
  EXPECT_EQ(Ask("GET", "/" + std::string(20'000, 'a')).code, 431);
  HttpClient broken(server_->http_port());
  broken.Send("no HTTP\r\n\r\n");
  EXPECT_EQ(broken.Read().code, 400);
  HttpClient stream =
      Stream("POST", "/v1/generate?stream=true", R"({"params": {"model": "digits"}})");
  EXPECT_EQ(stream.ReadHead().code, 200);
  while (stream.ReadEvent()) {
  }
  const std::string metrics = Scrape();
  for (const auto& [code, count] :
       std::map<int, int>{{200, 2}, {400, 1}, {404, 1}, {405, 1}, {413, 1}, {415, 1}, {431, 1}}) {
    EXPECT_THAT(metrics, HasSubstr("denoised_http_replies_total{code=\"" + std::to_string(code) +
                                   "\"} " + std::to_string(count) + "\n"));
  }
  // Those of the other clients close as the server notices that they have gone.
  broken.Close();
  stream.Close();
  EXPECT_TRUE(Eventually(
      [&] { return Scrape().find("\ndenoised_http_connections 1\n") != std::string::npos; }));
  EXPECT_EQ(open.Ask("GET", "/healthz").code, 200);
}

TEST_F(HttpTest, OpenApiTellsEveryPath) {
  Start();
  const json document = Ask("GET", "/openapi.json").Json();
  EXPECT_EQ(document["openapi"], "3.1.0");
  for (const char* path : {"/v1/generate", "/v1/jobs/{request_id}/events", "/v1/images/edits"}) {
    EXPECT_TRUE(document["paths"].contains(path)) << path;
  }
  EXPECT_TRUE(document["components"]["schemas"].contains("GenerateResponse"));
}

// Who may call.

struct Token {
  explicit Token(const std::string& name) {
    const std::string text = *MakeToken(name);
    std::smatch match;
    if (std::regex_search(text, match, std::regex("(denoised_\\w+)\n"))) value = match[1];
    if (std::regex_search(text, match, std::regex("\"(\\w{64})\""))) digest = match[1];
  }
  HttpHeaders Bearer() const { return {{"Authorization", "Bearer " + value}}; }
  std::string value, digest;
};

class HttpSecurityTest : public HttpTest {
 protected:
  HttpSecurityTest() { config_.security.refresh = 1s; }

  void WriteKeyPair(const KeyPair& pair) {
    config_.security.tls_cert = directory_.Write("server.crt", pair.certificate);
    config_.security.tls_key = directory_.Write("server.key", pair.key);
  }
  HttpAnswer Ask(const HttpTls& tls, const std::string& method, const std::string& target,
                 const std::string& body = "", const HttpHeaders& headers = {}) const {
    HttpClient client(server_->http_port(), tls);
    return client.connected() ? client.Ask(method, target, body, headers) : HttpAnswer{};
  }

  TestAuthority authority_;
  TemporaryDirectory directory_;
};

TEST_F(HttpSecurityTest, TokensAreAskedForAndPagesAreNot) {
  const Token studio("studio"), ops("ops");
  config_.security.clients =
      directory_.Write("clients.json", R"({"studio": {"token_sha256": [")" + studio.digest +
                                           R"("], "max_count": 2}, "ops": {"token_sha256": [")" +
                                           ops.digest + R"("], "admin": true}})");
  WriteKeyPair(authority_.Issue("server", "DNS:localhost,IP:127.0.0.1"));
  Start();
  const HttpTls tls{.authority = authority_.certificate()};
  for (const char* open : {"/", "/healthz", "/readyz", "/openapi.json"}) {
    EXPECT_EQ(Ask(tls, "GET", open).code, 200) << open;
  }
  const HttpAnswer none = Ask(tls, "POST", "/v1/generate", "{}");
  EXPECT_EQ(none.code, 401);
  EXPECT_EQ(none.Header("www-authenticate"), "Bearer");
  EXPECT_EQ(none.Error("type"), "authentication_error");
  EXPECT_EQ(none.Error("code"), "unauthenticated");
  EXPECT_EQ(Ask(tls, "POST", "/v1/generate", "{}", {{"Authorization", "Bearer denoised_x"}}).code,
            401);
  EXPECT_EQ(Ask(tls, "GET", "/v1/models?access_token=" + studio.value).code, 401)
      << "no credentials in URLs";
  EXPECT_EQ(Ask(tls, "POST", "/v1/generate", "{}", studio.Bearer()).code, 200);
  EXPECT_EQ(Ask(tls, "GET", "/v1/server", "", studio.Bearer()).Json()["client"], "studio");
  EXPECT_THAT(
      Ask(tls, "POST", "/v1/generate", R"({"params": {"count": 3}})", studio.Bearer()).Error(),
      HasSubstr("params.count"));
  EXPECT_EQ(Ask(tls, "POST", "/v1/models", R"({"name": "a"})", studio.Bearer()).code, 403);
  EXPECT_EQ(Ask(tls, "GET", "/metrics", "", studio.Bearer()).code, 403);
  EXPECT_EQ(Ask(tls, "GET", "/metrics", "", ops.Bearer()).code, 200);
  // Jobs belong to their client.
  EXPECT_EQ(
      Ask(tls, "POST", "/v1/generate", R"({"params": {"request_id": "a"}})", studio.Bearer()).code,
      200);
  EXPECT_EQ(Ask(tls, "GET", "/v1/jobs/a", "", studio.Bearer()).code, 200);
  EXPECT_EQ(Ask(tls, "GET", "/v1/jobs/a", "", ops.Bearer()).code, 404);
  EXPECT_EQ(Ask(tls, "GET", "/v1/jobs?all_clients=true", "", studio.Bearer()).code, 403);
  // A proxy's host may be any: there is a login.
  HttpHeaders headers = studio.Bearer();
  headers.push_back({"Host", "images.example.org"});
  const json reply = Ask(tls, "POST", "/v1/images/generations",
                         R"({"prompt": "1", "response_format": "url"})", headers)
                         .Json();
  EXPECT_THAT(reply["data"][0]["url"].get<std::string>(),
              StartsWith("https://images.example.org/"));
}

TEST_F(HttpSecurityTest, AWithdrawnTokenEndsAtOnce) {
  const Token first("first"), second("second");
  const auto write = [&](const std::string& digest, const char* padding) {
    return directory_.Write("clients.json",
                            R"({"studio": {"token_sha256": [")" + digest + "\"]}}" + padding);
  };
  config_.security.clients = write(first.digest, "");
  WriteKeyPair(authority_.Issue("server", "DNS:localhost,IP:127.0.0.1"));
  Start({.evaluation_cost = 10ms});
  const HttpTls tls{.authority = authority_.certificate()};
  HttpClient kept(server_->http_port(), tls);  // a connection is no leave to go on
  EXPECT_EQ(kept.Ask("POST", "/v1/generate", "{}", first.Bearer()).code, 200);
  write(second.digest, "\n");
  EXPECT_TRUE(Eventually(
      [&] { return Ask(tls, "POST", "/v1/generate", "{}", second.Bearer()).code == 200; }));
  EXPECT_EQ(kept.Ask("POST", "/v1/generate", "{}", first.Bearer()).code, 401);
  EXPECT_EQ(Ask(tls, "POST", "/v1/generate", "{}", first.Bearer()).code, 401);
}

TEST_F(HttpSecurityTest, TlsIsSpokenAndNothingElse) {
  WriteKeyPair(authority_.Issue("server", "DNS:localhost,IP:127.0.0.1"));
  Start();
  EXPECT_EQ(Ask({.authority = authority_.certificate()}, "POST", "/v1/generate", "{}").code, 200);
  const TestAuthority stranger;
  EXPECT_EQ(Ask({.authority = stranger.certificate()}, "GET", "/healthz").code, 0);
  HttpClient plain(server_->http_port());
  plain.Send(HttpClient::Request("GET", "/healthz"));
  EXPECT_TRUE(plain.IsClosedWithin(1min));
  // A stream, whose client goes in the middle.
  engine_->PauseAfter(1);  // so that nothing else ends it
  HttpClient stream(server_->http_port(), HttpTls{.authority = authority_.certificate()});
  stream.Send(
      HttpClient::Request("POST", "/v1/generate?stream=true", R"({"params": {"steps": 1000}})"));
  stream.ReadHead();
  EXPECT_EQ(stream.ReadEvent()->name, "queued");
  EXPECT_EQ(stream.ReadEvent()->name, "started");
  stream.Close();
  EXPECT_TRUE(Eventually([&] { return engine_->cancels() == 1; }));
}

TEST_F(HttpSecurityTest, ClientsShowCertificates) {
  WriteKeyPair(authority_.Issue("server", "DNS:localhost,IP:127.0.0.1"));
  const TestAuthority clients;
  config_.security.tls_client_ca = directory_.Write("ca.crt", clients.certificate());
  Start();
  const KeyPair named = clients.Issue("common", "DNS:studio.example.org");
  EXPECT_EQ(Ask({authority_.certificate(), named.certificate, named.key}, "GET", "/v1/server")
                .Json()["client"],
            "studio.example.org");
  const KeyPair stranger = authority_.Issue("x", "DNS:studio.example.org");
  EXPECT_EQ(
      Ask({authority_.certificate(), stranger.certificate, stranger.key}, "GET", "/healthz").code,
      0);
  EXPECT_EQ(Ask({.authority = authority_.certificate()}, "GET", "/healthz").code, 0);
}

TEST_F(HttpSecurityTest, AnotherCertificateIsUsedWithoutARestart) {
  WriteKeyPair(authority_.Issue("server", "DNS:localhost,IP:127.0.0.1"));
  Start();
  const HttpTls old{.authority = authority_.certificate()};
  HttpClient open_before(server_->http_port(), old);
  ASSERT_EQ(open_before.Ask("GET", "/healthz").code, 200);
  const TestAuthority next;
  WriteKeyPair(next.Issue("server", "DNS:localhost,IP:127.0.0.1"));
  EXPECT_TRUE(Eventually(
      [&] { return Ask({.authority = next.certificate()}, "GET", "/healthz").code == 200; }));
  EXPECT_EQ(Ask(old, "GET", "/healthz").code, 0);
  EXPECT_EQ(open_before.Ask("GET", "/healthz").code, 200) << "connections that were there live on";
}

TEST_F(HttpSecurityTest, APortInUseIsAnErrorThatNamesIt) {
  Start();
  Config config = config_;
  config.http_listen = "127.0.0.1:" + std::to_string(server_->http_port());
  const auto second = Server::Start(config, std::make_unique<FakeEngine>());
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()),
              AllOf(HasSubstr("--http-listen " + config.http_listen), HasSubstr("in use")));
}

}  // namespace
}  // namespace denoised
