// SPDX-License-Identifier: Apache-2.0
// What stands between the bytes of an HTTP request and a job: paths, queries, forms, JSON, and
// OpenAI's fields. The library parses HTTP itself. The first byte chooses; the rest is the input.

#include <google/protobuf/stubs/logging.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "server/http/form.h"
#include "server/http/json.h"
#include "server/http/openai.h"
#include "server/http/url.h"
#include "server/status/status_details.h"
#include "server/telemetry/metrics.h"
#include "tests/server/fake_engine.h"

namespace {

using namespace denoised;  // NOLINT: a program of one file

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

/// A refusal names a field and is JSON.
void CheckRefusal(const grpc::Status& status) {
  Require(!status.error_message().empty(), "an error says what is wrong");
  const auto json = nlohmann::json::parse(ErrorJson(status, HttpCode(status)), nullptr, false);
  Require(json.is_object() && json["error"]["message"].is_string(), "an error is JSON");
  Require(HttpCode(status) >= 400, "an error has an HTTP code");
  Require(json["error"]["code"].is_string(), "an error has a code");
  Require(!json["error"]["details"].empty(), "an error has details");
}

const Catalog& Models() {
  static FakeEngine* const engine = new FakeEngine;
  static Metrics* const metrics = new Metrics;
  static Catalog* const catalog = [] {
    auto options = MakeCatalogOptions({{"digits", "models/digits"}}, {"/"}, "");
    auto* made = new Catalog(*std::move(options), engine, metrics);
    Require(made->LoadListed("digits@1").ok(), "the fake engine loads");
    return made;
  }();
  return *catalog;
}

void AskOpenAi(const std::string& content_type, const std::string& body, bool edit) {
  OpenAiRequest request;
  const grpc::Status status =
      ReadOpenAi(content_type, body, edit, Models(), {.admin = true}, &request);
  if (!status.ok()) return CheckRefusal(status);
  const v1::GenerationParams& params = request.message.params();
  Require(params.output().format() >= v1::IMAGE_FORMAT_PNG &&
              params.output().format() <= v1::IMAGE_FORMAT_WEBP,
          "images have a file format");
  Require(!edit || params.has_init_image(), "an edit begins with an image");
  Require(request.reply.stream || !request.message.has_preview(), "previews are for streams");
  // Replies repeat the request, and are JSON whatever it holds.
  const auto is_json = [](const std::string& text) {
    return nlohmann::json::parse(text, nullptr, false).is_object();
  };
  Require(is_json(ToJson(request.message)), "the message can be printed");
  v1::GenerateResponse images;
  *images.mutable_params() = params;
  images.add_images()->set_encoded("picture");
  const MakeLink link = [](const std::string&, const std::string&) { return "http://a/b"; };
  Require(is_json(OpenAiReply(request.reply, &images, link)), "the reply is JSON");
  OpenAiEvents events(request.reply);
  v1::StreamGenerateResponse event;
  *event.mutable_queued()->mutable_params() = params;
  Require(events.Format(event).empty(), "OpenAI's API has no such event");
  event.mutable_image()->mutable_image()->set_encoded("picture");
  const std::string text = events.Format(event);
  Require(is_json(text.substr(text.find("data: ") + 6)), "an event is JSON");
}

void AskForm(const std::string& text) {
  constexpr char kType[] = "multipart/form-data; boundary=b";
  std::vector<FormPart> parts;
  if (ParseForm(kType, text, &parts).ok()) {
    for (const FormPart& part : parts) {
      Require(!part.name.empty(), "a part has a name");
      Require(part.body.data() >= text.data() &&
                  part.body.data() + part.body.size() <= text.data() + text.size(),
              "a part is of the body");
    }
  }
  AskOpenAi(kType, text, true);
}

void AskJson(const std::string& text) {
  v1::StreamGenerateRequest request, again;
  const grpc::Status status = FromJson(text, &request);
  if (!status.ok()) return CheckRefusal(status);
  Require(FromJson(ToJson(request), &again).ok(), "what is printed can be read");
  Require(again.SerializeAsString() == request.SerializeAsString(), "and is the same");
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 5) {
    case 0: {
      const auto decoded = PercentDecode(text);
      Require(!decoded || decoded->size() <= text.size(), "decoding makes it shorter");
      ParseQuery(text);
      break;
    }
    case 1:
      AskJson(text);
      break;
    case 2:
      AskForm(text);
      break;
    default:
      AskOpenAi("application/json", text, data[0] % 5 == 4);
  }
  return 0;
}
