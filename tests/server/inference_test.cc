// SPDX-License-Identifier: Apache-2.0
// The Open Inference Protocol over loopback, on a FakeEngine: what clients of Triton and KServe
// send, and what they must not.

#include "server/api/inference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <latch>
#include <limits>
#include <map>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"
#include "denoised/v1/model_admin.grpc.pb.h"
#include "engine/images/formats.h"
#include "inference/open_inference.grpc.pb.h"
#include "server/api/translate.h"
#include "tests/eventually.h"
#include "tests/io/temporary_directory.h"
#include "tests/server/server_fixture.h"

namespace denoised {
namespace {

using namespace std::chrono_literals;
using grpc::StatusCode;
using inference::ModelInferRequest;
using inference::ModelInferResponse;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;
using ::testing::StartsWith;

template <typename T>
std::string Raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// An element of BYTES as it is in raw contents.
std::string Element(const std::string& bytes) {
  return Raw<uint32_t>({static_cast<uint32_t>(bytes.size())}) + bytes;
}

ModelInferRequest::InferInputTensor* Declare(ModelInferRequest* request, const std::string& name,
                                             const std::string& datatype,
                                             const std::vector<int64_t>& shape) {
  auto* input = request->add_inputs();
  input->set_name(name);
  input->set_datatype(datatype);
  input->mutable_shape()->Add(shape.begin(), shape.end());
  return input;
}

void Add(ModelInferRequest* request, const std::string& name, const std::string& datatype,
         const std::vector<int64_t>& shape, const std::string& raw) {
  Declare(request, name, datatype, shape);
  request->add_raw_input_contents(raw);
}

void AddSeeds(ModelInferRequest* request, const std::vector<uint64_t>& seeds) {
  Add(request, "seed", "UINT64", {static_cast<int64_t>(seeds.size())}, Raw(seeds));
}
void AddLabels(ModelInferRequest* request, const std::vector<int32_t>& labels) {
  Add(request, "label", "INT32", {static_cast<int64_t>(labels.size())}, Raw(labels));
}
void AddInt(ModelInferRequest* request, const std::string& name, int32_t value) {
  Add(request, name, "INT32", {1}, Raw<int32_t>({value}));
}
void AddNumber(ModelInferRequest* request, const std::string& name, double value) {
  Add(request, name, "FP64", {1}, Raw<double>({value}));
}
void AddBytes(ModelInferRequest* request, const std::string& name, const std::string& value) {
  Add(request, name, "BYTES", {1}, Element(value));
}

std::vector<std::string> Names(const ModelInferResponse& response) {
  std::vector<std::string> names;
  for (const auto& output : response.outputs()) names.push_back(output.name());
  return names;
}

/// An output of a reply.
struct Output {
  std::string datatype;
  std::vector<int64_t> shape;
  std::string bytes;

  template <typename T>
  std::vector<T> as() const {
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
  /// Of BYTES.
  std::vector<std::string> elements() const {
    std::vector<std::string> elements;
    for (size_t at = 0; at < bytes.size();) {
      uint32_t size;
      std::memcpy(&size, bytes.data() + at, sizeof(size));
      elements.push_back(bytes.substr(at + sizeof(size), size));
      at += sizeof(size) + size;
    }
    return elements;
  }
};

Output Find(const ModelInferResponse& response, const std::string& name) {
  EXPECT_EQ(response.outputs_size(), response.raw_output_contents_size());
  for (int i = 0; i < response.outputs_size(); ++i) {
    const auto& output = response.outputs(i);
    if (output.name() != name) continue;
    return {output.datatype(),
            {output.shape().begin(), output.shape().end()},
            response.raw_output_contents(i)};
  }
  ADD_FAILURE() << "no output " << name;
  return {};
}

class InferenceTest : public ServerFixture {
 protected:
  void Start(const FakeEngineOptions& options = {}) {
    ServerFixture::Start(options);
    inference_ = inference::GRPCInferenceService::NewStub(channel_);
  }

  grpc::Status Infer(const ModelInferRequest& request, ModelInferResponse* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 20s);
    return inference_->ModelInfer(&context, request, response);
  }
  grpc::Status Infer(const ModelInferRequest& request) {
    ModelInferResponse response;
    return Infer(request, &response);
  }
  bool Ready() {
    grpc::ClientContext context;
    inference::ServerReadyResponse response;
    EXPECT_TRUE(inference_->ServerReady(&context, {}, &response).ok());
    return response.ready();
  }

  std::unique_ptr<inference::GRPCInferenceService::Stub> inference_;
};

TEST_F(InferenceTest, TellsWhetherItLivesAndWhatItIs) {
  config_.models.push_back({"missing", "models/broken"});
  Start();
  grpc::ClientContext live_context, ready_context, bad_context, none_context, server_context;
  inference::ServerLiveResponse live;
  ASSERT_TRUE(inference_->ServerLive(&live_context, {}, &live).ok());
  EXPECT_TRUE(live.live());
  EXPECT_TRUE(Ready());

  inference::ModelReadyRequest model;
  inference::ModelReadyResponse ready;
  model.set_name("digits");
  model.set_version("1");
  ASSERT_TRUE(inference_->ModelReady(&ready_context, model, &ready).ok());
  EXPECT_TRUE(ready.ready());
  model.set_name("missing");
  ASSERT_TRUE(inference_->ModelReady(&bad_context, model, &ready).ok());
  EXPECT_FALSE(ready.ready());
  model.set_name("digits");
  model.set_version("9");
  const grpc::Status none = inference_->ModelReady(&none_context, model, &ready);
  EXPECT_EQ(none.error_code(), StatusCode::NOT_FOUND);
  EXPECT_THAT(none.error_message(), HasSubstr("\"digits@9\""));

  inference::ServerMetadataResponse server;
  ASSERT_TRUE(inference_->ServerMetadata(&server_context, {}, &server).ok());
  EXPECT_EQ(server.name(), "denoised");
  EXPECT_FALSE(server.version().empty());

  engine_->BreakDevice(0, absl::UnavailableError("lost"));
  grpc::ClientContext half_context, lost_context;
  ASSERT_TRUE(inference_->ServerLive(&half_context, {}, &live).ok());
  EXPECT_TRUE(live.live());
  engine_->BreakDevice(1, absl::UnavailableError("lost"));
  EXPECT_FALSE(server_->CheckDevices().ok());
  ASSERT_TRUE(inference_->ServerLive(&lost_context, {}, &live).ok());
  EXPECT_FALSE(live.live());
}

/// What Triton's clients call beside the protocol: their own extensions.
class TritonTest : public InferenceTest {
 protected:
  using Service = inference::GRPCInferenceService::Stub;

  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (Service::*method)(grpc::ClientContext*, const Request&,
                                                    Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 20s);
    return (inference_.get()->*method)(&context, request, response);
  }
  /// "digits@1 READY", ...
  std::vector<std::string> Index(bool ready = false) {
    inference::RepositoryIndexRequest request;
    request.set_ready(ready);
    inference::RepositoryIndexResponse response;
    EXPECT_TRUE(Call(&Service::RepositoryIndex, request, &response).ok());
    std::vector<std::string> index;
    for (const auto& model : response.models()) {
      index.push_back(model.name() + "@" + model.version() + " " + model.state());
    }
    return index;
  }
  grpc::Status Load(const inference::RepositoryModelLoadRequest& request) {
    inference::RepositoryModelLoadResponse response;
    return Call(&Service::RepositoryModelLoad, request, &response);
  }
  grpc::Status Load(const std::string& name) {
    inference::RepositoryModelLoadRequest request;
    request.set_model_name(name);
    return Load(request);
  }
  grpc::Status Unload(const std::string& name, const std::string& parameter) {
    inference::RepositoryModelUnloadRequest request;
    request.set_model_name(name);
    (*request.mutable_parameters())[parameter].set_bool_param(false);
    inference::RepositoryModelUnloadResponse response;
    return Call(&Service::RepositoryModelUnload, request, &response);
  }

  const TemporaryDirectory repository_;
};

TEST_F(TritonTest, TheRepositoryIsListedLoadedAndUnloaded) {
  config_.models.push_back({"missing", "models/broken"});
  repository_.Write("faces/config.json", "{}");
  config_.model_roots = {repository_.path()};
  Start();
  EXPECT_THAT(Index(), ElementsAre("digits@1 READY", "missing@1 UNAVAILABLE"));
  EXPECT_THAT(Index(true), ElementsAre("digits@1 READY"));

  ASSERT_TRUE(Load("faces").ok()) << "a directory of this name is in the repository";
  EXPECT_THAT(Index(true), ElementsAre("digits@1 READY", "faces@1 READY"));
  ASSERT_TRUE(Load("faces").ok()) << "again: in place of the version before";
  EXPECT_THAT(Index(true), ElementsAre("digits@1 READY", "faces@2 READY"));
  ASSERT_TRUE(Unload("faces", "unload_dependents").ok());
  EXPECT_THAT(Index(true), ElementsAre("digits@1 READY"));

  repository_.Write("digits/config.json", "{}");  // of the same name, and not the configured one
  ASSERT_TRUE(Unload("digits", "unload_dependents").ok());
  ASSERT_TRUE(Load("digits").ok());
  EXPECT_EQ(engine_->Find("digits@1")->directory, "models/digits") << "as configured";

  EXPECT_EQ(Load("cats").error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(Load("..").error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(Load("cats").error_message(), StartsWith("model_name: "));
  const grpc::Status unknown = Unload("faces", "unload_dependents");
  EXPECT_EQ(unknown.error_code(), StatusCode::NOT_FOUND);
  EXPECT_THAT(unknown.error_message(), StartsWith("model_name: there is no model"));
  EXPECT_THAT(Violated(Unload("digits", "force")), ElementsAre("parameters"));
  inference::RepositoryModelLoadRequest bad;
  bad.set_repository_name("mine");
  bad.set_model_name("../etc");
  (*bad.mutable_parameters())["config"].set_string_param("{}");
  EXPECT_THAT(Violated(Load(bad)), ElementsAre("repository_name", "model_name", "parameters"));
}

TEST_F(TritonTest, AnAliasMayBeAskedForWithAVersion) {
  repository_.Write("faces/config.json", "{}");
  config_.model_roots = {repository_.path()};
  Start();
  v1::LoadModelRequest load;
  load.set_name("digits");
  load.set_directory(repository_ / "faces");
  v1::LoadModelResponse loaded;
  v1::SetAliasRequest alias;
  alias.set_alias("best");
  alias.set_target("digits");
  v1::SetAliasResponse aliased;
  grpc::ClientContext load_context, alias_context;
  const auto admin = v1::ModelAdmin::NewStub(channel_);
  ASSERT_TRUE(admin->LoadModel(&load_context, load, &loaded).ok());
  ASSERT_TRUE(admin->SetAlias(&alias_context, alias, &aliased).ok());
  for (const auto& [asked, drawn] : {std::pair{"", "2"}, {"1", "1"}, {"2", "2"}}) {
    ModelInferRequest request;
    request.set_model_name("best");
    request.set_model_version(asked);
    ModelInferResponse response;
    const grpc::Status status = Infer(request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.model_name(), "digits");
    EXPECT_EQ(response.model_version(), drawn);
    inference::ModelMetadataRequest metadata_request;
    metadata_request.set_name("best");
    metadata_request.set_version(asked);
    inference::ModelMetadataResponse metadata;
    EXPECT_TRUE(Call(&Service::ModelMetadata, metadata_request, &metadata).ok());
  }
  ModelInferRequest request;
  request.set_model_name("best");
  request.set_model_version("3");
  EXPECT_EQ(Infer(request).error_code(), StatusCode::NOT_FOUND);
}

TEST_F(TritonTest, OnlyAdminsSeePathsOfTheServer) {
  config_.models.push_back({"missing", "models/broken"});
  Start();
  const auto said = [&](bool admin) {
    const auto begin = [admin](grpc::ClientContext* context) {
      if (!admin) context->AddMetadata("x-forwarded-for", "192.0.2.7");
      return context;
    };
    std::vector<std::string> said;
    grpc::ClientContext index, list, get, draw, infer, metadata;
    inference::RepositoryIndexResponse repository;
    EXPECT_TRUE(inference_->RepositoryIndex(begin(&index), {}, &repository).ok());
    said.push_back(repository.models(1).reason());
    v1::ListModelsResponse models;
    EXPECT_TRUE(stub_->ListModels(begin(&list), {}, &models).ok());
    said.push_back(models.models(1).error());
    v1::GetModelRequest request;
    request.set_name("missing");
    v1::GetModelResponse model;
    EXPECT_TRUE(stub_->GetModel(begin(&get), request, &model).ok());
    said.push_back(model.model().error());
    v1::GenerateRequest images;
    images.mutable_params()->set_model("missing");
    v1::GenerateResponse drawn;
    said.push_back(stub_->Generate(begin(&draw), images, &drawn).error_message());
    ModelInferRequest tensors;
    tensors.set_model_name("missing");
    ModelInferResponse inferred;
    said.push_back(inference_->ModelInfer(begin(&infer), tensors, &inferred).error_message());
    inference::ModelMetadataRequest describe;
    describe.set_name("missing");
    inference::ModelMetadataResponse described;
    said.push_back(
        inference_->ModelMetadata(begin(&metadata), describe, &described).error_message());
    return said;
  };
  EXPECT_THAT(said(true), testing::Each(HasSubstr("models/broken/config.json: no such file")));
  EXPECT_THAT(said(false), testing::Each(testing::AllOf(HasSubstr("the server's log says why"),
                                                        testing::Not(HasSubstr("models/broken")))));
}

/// Everything that tells whether the server takes requests says the same in each state.
TEST_F(TritonTest, AllProbesAgree) {
  config_.metrics_listen = "127.0.0.1:0";
  config_.models.push_back({"slow", "models/slow"});
  // The name of the state, if ServerReady, /readyz, GetServerInfo and the metric agree about it.
  const auto state = [&]() -> std::string {
    grpc::ClientContext context;
    v1::GetServerInfoResponse info;
    EXPECT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
    std::string name(absl::StripPrefix(v1::ServerState_Name(info.state()), "SERVER_STATE_"));
    name = absl::AsciiStrToLower(name);
    const bool ready = name == "serving";
    EXPECT_EQ(Ready(), ready) << name;
    EXPECT_THAT(Get("/readyz"), StartsWith(ready ? "HTTP/1.1 200" : "HTTP/1.1 503")) << name;
    EXPECT_THAT(Scrape(), HasSubstr("denoised_server_state{state=\"" + name + "\"} 1"));
    std::string health;
    grpc::ClientContext health_context;
    EXPECT_TRUE(
        CallByName(channel_, &health_context, "/grpc.health.v1.Health/Check", "", &health).ok());
    EXPECT_EQ(health, ready ? "\x08\x01" : "\x08\x02") << name;
    return name;
  };
  std::latch loads{1};
  StartLoading({.on_open = [&](const std::string& directory) {
    if (directory.ends_with("slow")) loads.wait();
  }});
  inference_ = inference::GRPCInferenceService::NewStub(channel_);
  ASSERT_TRUE(Eventually([&] { return engine_->Models().size() == 1; }));
  EXPECT_EQ(state(), "starting") << "one model can draw, and another is being loaded";
  loads.count_down();
  ASSERT_TRUE(server_->Loaded(1min)->ok());
  EXPECT_EQ(state(), "serving");
  for (const char* name : {"digits", "slow"}) {
    grpc::ClientContext context;
    inference::RepositoryModelUnloadRequest unload;
    unload.set_model_name(name);
    inference::RepositoryModelUnloadResponse unloaded;
    ASSERT_TRUE(inference_->RepositoryModelUnload(&context, unload, &unloaded).ok());
  }
  EXPECT_EQ(state(), "serving") << "without a model, so that an admin can load one";
  auto drain = std::async(std::launch::async, [&] { server_->Drain(0s, 5s); });
  EXPECT_TRUE(Eventually([&] { return !Ready(); }));
  EXPECT_EQ(state(), "lame_duck");
}

TEST_F(TritonTest, OnlyAdminsChangeTheRepository) {
  config_.admin = false;
  Start();
  const grpc::Status refused = Load("digits");
  EXPECT_EQ(refused.error_code(), StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(denoised::Find<google::rpc::ErrorInfo>(refused).reason(), "NO_ADMINS");
  EXPECT_EQ(Unload("digits", "unload_dependents").error_code(), StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(Index(), ElementsAre("digits@1 READY"));
}

TEST_F(TritonTest, TheConfigurationSaysWhatTheMetadataSays) {
  Start();
  inference::ModelConfigRequest request;
  request.set_name("digits");
  inference::ModelConfigResponse response;
  ASSERT_TRUE(Call(&Service::ModelConfig, request, &response).ok());
  const inference::ModelConfig& config = response.config();
  EXPECT_EQ(config.name(), "digits");
  EXPECT_EQ(config.max_batch_size(), 0);
  inference::ModelMetadataRequest metadata_request;
  metadata_request.set_name("digits");
  inference::ModelMetadataResponse metadata;
  ASSERT_TRUE(Call(&Service::ModelMetadata, metadata_request, &metadata).ok());
  ASSERT_EQ(config.input_size(), metadata.inputs_size());
  std::map<std::string, inference::DataType> types;
  for (int i = 0; i < config.input_size(); ++i) {
    EXPECT_EQ(config.input(i).name(), metadata.inputs(i).name());
    EXPECT_TRUE(config.input(i).optional());
    EXPECT_TRUE(std::equal(config.input(i).dims().begin(), config.input(i).dims().end(),
                           metadata.inputs(i).shape().begin(), metadata.inputs(i).shape().end()));
    types[config.input(i).name()] = config.input(i).data_type();
  }
  for (const auto& output : config.output()) types[output.name()] = output.data_type();
  EXPECT_EQ(types["seed"], inference::TYPE_UINT64);
  EXPECT_EQ(types["label"], inference::TYPE_INT32);
  EXPECT_EQ(types["eta"], inference::TYPE_FP64);
  EXPECT_EQ(types["sampler"], inference::TYPE_STRING);
  EXPECT_EQ(types["image"], inference::TYPE_UINT8);
  EXPECT_EQ(types["encoded"], inference::TYPE_STRING);
  request.set_name("cats");
  EXPECT_EQ(Call(&Service::ModelConfig, request, &response).error_code(), StatusCode::NOT_FOUND);
}

TEST_F(TritonTest, StatisticsCountRequestsOfEachVersion) {
  config_.model_roots = {repository_.path()};
  repository_.Write("faces/config.json", "{}");
  Start();
  ASSERT_TRUE(Load("faces").ok());
  const auto ask = [&](const std::string& name, const std::string& version,
                       inference::ModelStatisticsResponse* response) {
    inference::ModelStatisticsRequest request;
    request.set_name(name);
    request.set_version(version);
    return Call(&Service::ModelStatistics, request, response);
  };
  inference::ModelStatisticsResponse before;
  ASSERT_TRUE(ask("", "", &before).ok());
  ASSERT_EQ(before.model_stats_size(), 2);
  EXPECT_EQ(before.model_stats(0).inference_stats().success().count(), 0u);
  EXPECT_EQ(before.model_stats(0).last_inference(), 0u);

  ModelInferRequest infer;
  infer.set_model_name("digits");
  AddSeeds(&infer, {1, 2, 3});
  ASSERT_TRUE(Infer(infer).ok());
  v1::GenerateRequest generate;
  generate.mutable_params()->set_model("digits");
  ASSERT_TRUE(Generate(generate).ok());
  generate.mutable_params()->set_steps(-1);
  ASSERT_FALSE(Generate(generate).ok());

  inference::ModelStatisticsResponse after;
  ASSERT_TRUE(ask("digits", "", &after).ok());
  ASSERT_EQ(after.model_stats_size(), 1);
  const inference::ModelStatistics& stats = after.model_stats(0);
  EXPECT_EQ(stats.name(), "digits");
  EXPECT_EQ(stats.version(), "1");
  EXPECT_EQ(stats.inference_count(), 4u) << "images";
  EXPECT_GT(stats.last_inference(), 1'600'000'000'000u);
  const inference::InferStatistics& requests = stats.inference_stats();
  EXPECT_EQ(requests.success().count(), 2u);
  EXPECT_EQ(requests.fail().count(), 1u);
  EXPECT_EQ(requests.queue().count(), 2u);
  EXPECT_EQ(requests.compute_infer().count(), 2u);
  EXPECT_GT(requests.compute_infer().ns(), 2 * 10 * 200'000u) << "evaluations cost 200 us";
  EXPECT_LT(requests.success().ns(), 60'000'000'000u);
  EXPECT_EQ(requests.success().ns(), requests.queue().ns() + requests.compute_infer().ns());
  ASSERT_TRUE(ask("faces", "1", &after).ok());
  EXPECT_EQ(after.model_stats(after.model_stats_size() - 1).inference_stats().success().count(),
            0u);

  EXPECT_EQ(ask("digits", "9", &after).error_code(), StatusCode::NOT_FOUND);
  EXPECT_THAT(Violated(ask("", "1", &after)), ElementsAre("version"));
  ASSERT_TRUE(Unload("digits", "unload_dependents").ok());
  ASSERT_TRUE(ask("", "", &before).ok());
  EXPECT_EQ(before.model_stats_size(), 1) << "those of a version that is gone are gone";
}

TEST_F(InferenceTest, TheMetadataListsTensors) {
  Start();
  grpc::ClientContext context, bad_context;
  inference::ModelMetadataRequest request;
  request.set_name("digits");
  inference::ModelMetadataResponse metadata;
  ASSERT_TRUE(inference_->ModelMetadata(&context, request, &metadata).ok());
  EXPECT_EQ(metadata.name(), "digits");
  EXPECT_THAT(metadata.versions(), ElementsAre("1"));
  const auto text = [](const auto& tensors) {
    std::vector<std::string> lines;
    for (const auto& tensor : tensors) {
      std::string line = tensor.name() + " " + tensor.datatype();
      for (const int64_t extent : tensor.shape()) line += " " + std::to_string(extent);
      lines.push_back(line);
    }
    return lines;
  };
  EXPECT_THAT(
      text(metadata.inputs()),
      ElementsAre("seed UINT64 -1", "label INT32 -1", "steps INT32 1", "guidance_scale FP64 1",
                  "guidance_start FP64 1", "guidance_stop FP64 1", "width INT32 1",
                  "height INT32 1", "sampler BYTES 1", "noise_schedule BYTES 1", "eta FP64 1",
                  "s_churn FP64 1", "s_tmin FP64 1", "s_tmax FP64 1", "s_noise FP64 1",
                  "solver_order INT32 1", "init_image BYTES 1", "strength FP64 1", "mask BYTES 1",
                  "format BYTES 1", "quality INT32 1"));
  EXPECT_THAT(text(metadata.outputs()), ElementsAre("image UINT8 -1 -1 -1 1", "encoded BYTES -1",
                                                    "seed UINT64 -1", "label INT32 -1"));
  request.set_name("nobody");
  EXPECT_EQ(inference_->ModelMetadata(&bad_context, request, &metadata).error_code(),
            StatusCode::NOT_FOUND);
}

TEST(InferenceTensorsTest, FollowTheModel) {
  ModelInfo latents;
  latents.channels = 4;
  latents.condition = ClassCondition::kVector;
  latents.class_vector_size = 3;
  inference::ModelMetadataResponse metadata;
  DescribeTensors(latents, &metadata);
  EXPECT_EQ(metadata.inputs(1).name(), "class_vector");
  EXPECT_THAT(metadata.inputs(1).shape(), ElementsAre(-1, 3));
  EXPECT_EQ(metadata.outputs(0).datatype(), "FP32");
  EXPECT_EQ(metadata.outputs_size(), 2);  // image and seed

  ModelInferRequest request;
  Add(&request, "class_vector", "FP32", {2, 3}, Raw<float>({1, 2, 3, 4, 5, 6}));
  std::vector<FieldViolation> violations;
  MemoryBudget memory(1 << 20);
  const Inference read = ReadInference(request, latents, {}, &memory, &violations);
  EXPECT_TRUE(violations.empty());
  EXPECT_EQ(read.params.count(), 2);
  ASSERT_EQ(read.params.conditions_size(), 2);
  EXPECT_THAT(read.params.conditions(0).class_vector(), ElementsAre(1, 2, 3));
  EXPECT_THAT(read.params.conditions(1).class_vector(), ElementsAre(4, 5, 6));
  EXPECT_EQ(read.params.output().format(), v1::IMAGE_FORMAT_UNSPECIFIED);
  request.mutable_inputs(0)->set_shape(1, 2);  // would be one vector for both
  request.mutable_raw_input_contents(0)->resize(16);
  ReadInference(request, latents, {}, &memory, &violations);
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].description,
            "has shape [2, 2]; use [-1, 3] with the number of images in place of -1");
}

/// As BYTES has them in raw_input_contents.
std::string RawTexts(const std::vector<std::string>& texts) {
  std::string raw;
  for (const std::string& text : texts) {
    const auto size = static_cast<uint32_t>(text.size());
    raw.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(text);
  }
  return raw;
}

TEST(InferenceTensorsTest, TextsMasksAndGuidance) {
  ModelInfo model;
  model.channels = 3;
  model.max_count = 4;
  model.text = {.max_clip_skip = 2, .max_chunks = 3, .chunk_tokens = 75, .two_encoders = true};
  model.guidance = model.guidance_rescale = true;
  model.images = {.init = true, .strength = true, .mask = true, .guidance = true};
  ModelInferRequest request;
  Add(&request, "prompt", "BYTES", {2}, RawTexts({"a red apple", "päärynä"}));
  Add(&request, "negative_prompt", "BYTES", {2}, RawTexts({"", "blur"}));
  Add(&request, "prompt_2", "BYTES", {2}, RawTexts({"x", "y"}));
  Add(&request, "clip_skip", "INT32", {1}, Raw<int32_t>({2}));
  Add(&request, "max_chunks", "INT32", {1}, Raw<int32_t>({1}));
  Add(&request, "image_guidance_scale", "FP64", {1}, Raw<double>({1.5}));
  Add(&request, "guidance_rescale", "FP64", {1}, Raw<double>({0.7}));
  Add(&request, "guidance_stop", "FP64", {1}, Raw<double>({0.8}));
  Add(&request, "mask", "BYTES", {1}, RawTexts({"a file"}));
  std::vector<FieldViolation> violations;
  MemoryBudget memory(1 << 20);
  const v1::GenerationParams read = ReadInference(request, model, {}, &memory, &violations).params;
  EXPECT_TRUE(violations.empty());
  EXPECT_EQ(read.count(), 2);
  ASSERT_EQ(read.conditions_size(), 2);
  EXPECT_EQ(read.conditions(0).text(), "a red apple");
  EXPECT_TRUE(read.conditions(0).has_negative_text());
  EXPECT_EQ(read.conditions(0).negative_text(), "");
  EXPECT_EQ(read.conditions(1).text(), "päärynä");
  EXPECT_EQ(read.conditions(1).negative_text(), "blur");
  EXPECT_EQ(read.conditions(1).text_2(), "y");
  EXPECT_FALSE(read.conditions(1).has_negative_text_2());
  EXPECT_EQ(read.text_options().clip_skip(), 2);
  EXPECT_EQ(read.text_options().max_chunks(), 1);
  EXPECT_EQ(read.image_guidance_scale(), 1.5);
  EXPECT_EQ(read.guidance_rescale(), 0.7);
  EXPECT_EQ(read.guidance_stop(), 0.8);
  EXPECT_EQ(read.mask().encoded(), "a file");

  EXPECT_EQ(InputName("params.conditions[1].text"), "prompt[1]");
  EXPECT_EQ(InputName("params.conditions[0].negative_text_2"), "negative_prompt_2[0]");
  EXPECT_EQ(InputName("params.conditions[12].class_vector[3]"), "class_vector[12]");
  EXPECT_EQ(InputName("params.conditions"), "prompt");
  EXPECT_EQ(InputName(ProtoField("class_values")), "class_vector[0]");
  EXPECT_EQ(InputName("params.text_options.clip_skip"), "clip_skip");
  EXPECT_EQ(InputName("params.priority"), "parameters.priority");

  *request.mutable_raw_input_contents(0) = RawTexts({"a", "b", "c"});  // one too many
  *request.mutable_raw_input_contents(1) = RawTexts({"a", "\xff"});
  *request.mutable_raw_input_contents(2) = std::string("\xff\xff\xff\xff", 4);
  ReadInference(request, model, {}, &memory, &violations);
  std::vector<std::string> fields;
  for (const FieldViolation& violation : violations) fields.push_back(violation.field);
  EXPECT_THAT(fields, ElementsAre("prompt", "negative_prompt[1]", "prompt_2"));
}

TEST_F(InferenceTest, ABatchOfSeedsIsAnImageForEach) {
  Start({.channels = 3});
  ModelInferRequest request;
  request.set_model_name("digits");
  request.set_id("mine");
  AddSeeds(&request, {900, 5, 900});
  AddLabels(&request, {7, 3, 1});
  AddInt(&request, "steps", 3);
  ModelInferResponse response;
  const grpc::Status status = Infer(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.model_name(), "digits");
  EXPECT_EQ(response.model_version(), "1");
  EXPECT_EQ(response.id(), "mine");
  EXPECT_FALSE(response.parameters().at("request_id").string_param().empty());
  EXPECT_THAT(Names(response), ElementsAre("image", "encoded", "seed", "label"));
  EXPECT_THAT(Find(response, "seed").as<uint64_t>(), ElementsAre(900, 5, 900));
  EXPECT_THAT(Find(response, "label").as<int32_t>(), ElementsAre(7, 3, 1));
  const Output image = Find(response, "image");
  EXPECT_EQ(image.datatype, "UINT8");
  EXPECT_THAT(image.shape, ElementsAre(3, 32, 32, 3));
  const Output encoded = Find(response, "encoded");
  EXPECT_EQ(encoded.datatype, "BYTES");
  EXPECT_THAT(encoded.shape, ElementsAre(3));
  ASSERT_EQ(encoded.elements().size(), 3u);

  // Each is the image that Generate draws of this seed alone, as pixels and as a file.
  const auto alone = [&](v1::ImageFormat format) {
    v1::GenerateRequest generate;
    generate.mutable_params()->set_seed(5);
    generate.mutable_params()->set_steps(3);
    generate.mutable_params()->add_conditions()->set_class_label(3);
    generate.mutable_params()->mutable_output()->set_format(format);
    grpc::ClientContext context;
    v1::GenerateResponse reply;
    EXPECT_TRUE(stub_->Generate(&context, generate, &reply).ok());
    return reply.images(0);
  };
  const std::string pixels = alone(v1::IMAGE_FORMAT_RAW_UINT8).tensor().data();
  EXPECT_EQ(image.bytes.substr(pixels.size(), pixels.size()), pixels);
  EXPECT_NE(image.bytes.substr(0, pixels.size()), pixels);
  EXPECT_EQ(encoded.elements()[1], alone(v1::IMAGE_FORMAT_PNG).encoded());

  // Pixels that come without files are the same.
  request.add_outputs()->set_name("seed");
  request.add_outputs()->set_name("image");
  ASSERT_TRUE(Infer(request, &response).ok());
  EXPECT_THAT(Names(response), ElementsAre("seed", "image"));
  EXPECT_EQ(Find(response, "image").bytes, image.bytes);
}

TEST_F(InferenceTest, TypedContentsAreTheSame) {
  Start();
  ModelInferRequest raw, typed;
  AddSeeds(&raw, {8, std::numeric_limits<uint64_t>::max()});
  AddLabels(&raw, {4, 9});
  AddInt(&raw, "steps", 4);
  AddNumber(&raw, "guidance_scale", 1.25);
  AddBytes(&raw, "sampler", "heun");
  auto* seeds = Declare(&typed, "seed", "UINT64", {2})->mutable_contents();
  seeds->add_uint64_contents(8);
  seeds->add_uint64_contents(std::numeric_limits<uint64_t>::max());
  auto* labels = Declare(&typed, "label", "INT32", {2})->mutable_contents();
  labels->add_int_contents(4);
  labels->add_int_contents(9);
  Declare(&typed, "steps", "INT32", {1})->mutable_contents()->add_int_contents(4);
  Declare(&typed, "guidance_scale", "FP64", {1})->mutable_contents()->add_fp64_contents(1.25);
  Declare(&typed, "sampler", "BYTES", {1})->mutable_contents()->add_bytes_contents("heun");
  ModelInferResponse from_raw, from_typed;
  ASSERT_TRUE(Infer(raw, &from_raw).ok());
  ASSERT_TRUE(Infer(typed, &from_typed).ok());
  EXPECT_EQ(engine_->last_spec().guidance_scale, 1.25);
  EXPECT_EQ(engine_->last_spec().sampler.sampler, Sampler::kHeun);
  EXPECT_EQ(from_raw.raw_output_contents(1), from_typed.raw_output_contents(1));
  EXPECT_EQ(from_raw.outputs(1).name(), "encoded");
}

TEST_F(InferenceTest, EverySettingArrives) {
  Start();
  v1::GenerateRequest generate;
  grpc::ClientContext context;
  v1::GenerateResponse picture;
  ASSERT_TRUE(stub_->Generate(&context, generate, &picture).ok());

  ModelInferRequest request;
  request.set_model_version("1");
  request.set_model_name("digits");
  (*request.mutable_parameters())["priority"].set_uint64_param(3);
  (*request.mutable_parameters())["timeout"].set_int64_param(15'000'000);
  AddInt(&request, "steps", 6);
  AddInt(&request, "width", 48);
  AddInt(&request, "height", 16);
  AddInt(&request, "solver_order", 2);
  AddInt(&request, "quality", 40);
  AddNumber(&request, "guidance_scale", 2.5);
  AddNumber(&request, "eta", 0.25);
  AddNumber(&request, "s_churn", 4);
  AddNumber(&request, "s_tmin", 0.5);
  AddNumber(&request, "s_tmax", std::numeric_limits<double>::infinity());
  AddNumber(&request, "s_noise", 1.003);
  AddNumber(&request, "strength", 0.5);
  AddBytes(&request, "init_image", picture.images(0).encoded());
  AddBytes(&request, "sampler", "edm_euler");
  AddBytes(&request, "noise_schedule", "native");
  AddBytes(&request, "format", "jpeg");
  request.add_outputs()->set_name("encoded");
  ModelInferResponse response;
  const auto begin = std::chrono::steady_clock::now();
  const grpc::Status status = Infer(request, &response);
  const auto end = std::chrono::steady_clock::now();
  ASSERT_TRUE(status.ok()) << status.error_message();
  const JobSpec spec = engine_->last_spec();
  EXPECT_EQ(spec.priority, Priority::kBatch);
  ASSERT_TRUE(spec.deadline.has_value());  // the call's own is 20 s away
  EXPECT_GE(*spec.deadline, begin + 15s);
  EXPECT_LE(*spec.deadline, end + 15s);
  EXPECT_EQ(spec.sampler.steps, 6);
  EXPECT_EQ(spec.width, 48);
  EXPECT_EQ(spec.height, 16);
  EXPECT_EQ(spec.sampler.solver_order, 2);
  EXPECT_EQ(spec.guidance_scale, 2.5);
  EXPECT_EQ(spec.sampler.eta, 0.25);
  EXPECT_EQ(spec.sampler.s_churn, 4);
  EXPECT_EQ(spec.sampler.s_tmin, 0.5);
  EXPECT_EQ(spec.sampler.s_tmax, std::numeric_limits<double>::infinity());
  EXPECT_EQ(spec.sampler.s_noise, 1.003);
  EXPECT_EQ(spec.sampler.strength, 0.5);
  EXPECT_TRUE(spec.init_image);
  EXPECT_EQ(spec.sampler.sampler, Sampler::kEdmEuler);
  EXPECT_EQ(spec.sampler.schedule, NoiseSchedule::kNative);
  const auto files = Find(response, "encoded").elements();
  ASSERT_EQ(files.size(), 1u);
  EXPECT_EQ(files[0].substr(0, 3), "\xff\xd8\xff");
}

TEST_F(InferenceTest, RefusesByName) {
  Start();
  struct Case {
    std::function<void(ModelInferRequest*)> spoil;
    std::string field, description;
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const std::vector<Case> cases = {
      // Inputs that there are not, or not so.
      {[](auto* r) { AddBytes(r, "prompt", "a seven"); }, "inputs",
       "has \"prompt\", which model 'digits@1' does not take; use seed, label, steps"},
      {[](auto* r) {
         Add(r, "class_vector", "FP32", {1, 1}, Raw<float>({1}));
       },
       "inputs", "has \"class_vector\""},
      {[](auto* r) { AddInt(r, std::string(70'000, 'x'), 1); }, "inputs", "has \"xxxx"},
      {[](auto* r) { AddInt(r, "", 1); }, "inputs", "has \"\""},
      {[](auto* r) {
         AddInt(r, "steps", 2);
         AddInt(r, "steps", 2);
       },
       "steps", "is given twice"},
      {[](auto* r) { Add(r, "steps", "INT64", {1}, Raw<int64_t>({2})); }, "steps",
       "is of datatype \"INT64\"; use INT32"},
      {[](auto* r) { Add(r, "steps", "", {1}, Raw<int32_t>({2})); }, "steps",
       "is of datatype \"\"; use INT32"},
      {[](auto* r) {
         for (int i = 0; i < 100'000; ++i) Declare(r, "x" + std::to_string(i), "INT32", {1});
       },
       "inputs", "has 100000 tensors, and no model takes more than 30; use seed, label"},
      {[](auto* r) {
         for (int i = 0; i < 100'000; ++i) r->add_outputs()->set_name("image");
       },
       "outputs", "has 100000 names; use image, encoded, seed, label, each once"},
      {[](auto* r) {
         for (int i = 0; i < 100'000; ++i) (*r->mutable_parameters())["x" + std::to_string(i)];
       },
       "parameters", "has \"x"},
      // Shapes.
      {[](auto* r) { Add(r, "steps", "INT32", {}, Raw<int32_t>({2})); }, "steps",
       "has shape []; use [1]"},
      {[](auto* r) {
         Add(r, "steps", "INT32", {2}, Raw<int32_t>({2, 2}));
       },
       "steps", "has shape [2]; use [1]"},
      {[](auto* r) { Add(r, "label", "INT32", {-1}, Raw<int32_t>({2})); }, "label",
       "has shape [-1]; use [-1] with the number of images in place of -1"},
      {[](auto* r) { Add(r, "label", "INT32", {0}, ""); }, "label", "has shape [0]"},
      {[](auto* r) {
         Add(r, "label", "INT32", {1, 1}, Raw<int32_t>({2}));
       },
       "label", "has shape [1, 1]"},
      {[](auto* r) { Add(r, "label", "INT32", std::vector<int64_t>(5000, 1), "abcd"); }, "label",
       "has shape [1, 1, 1, 1, 1, 1, ...]"},
      {[](auto* r) { Add(r, "label", "INT32", {kHuge}, "abcd"); }, "label", "has shape [9223"},
      {[](auto* r) { Add(r, "label", "INT32", {2147483647}, "abcd"); }, "label",
       "has 4 bytes, but shape [2147483647] of INT32 needs 2147483647 elements of 4 bytes"},
      {[](auto* r) {
         AddSeeds(r, {1, 2});
         AddLabels(r, {1, 2, 3});
       },
       "label", "has 3 entries, but seed has 2; give one for each image"},
      // Contents.
      {[](auto* r) { Add(r, "label", "INT32", {2}, Raw<int32_t>({1})); }, "label",
       "has 4 bytes, but shape [2] of INT32 needs 2 elements of 4 bytes"},
      {[](auto* r) { Add(r, "label", "INT32", {1}, "12345"); }, "label", "has 5 bytes"},
      {[](auto* r) { Add(r, "label", "INT32", {1}, ""); }, "label", "has 0 bytes"},
      {[](auto* r) {
         AddInt(r, "steps", 2);
         Declare(r, "label", "INT32", {1});
       },
       "raw_input_contents", "has 1 entries for 2 inputs"},
      {[](auto* r) {
         AddInt(r, "steps", 2);
         r->add_raw_input_contents("more");
       },
       "raw_input_contents", "has 2 entries for 1 inputs"},
      {[](auto* r) {
         AddInt(r, "steps", 2);
         r->mutable_inputs(0)->mutable_contents()->add_int_contents(2);
       },
       "steps", "has contents, and raw_input_contents are given too"},
      {[](auto* r) { Declare(r, "label", "INT32", {2})->mutable_contents()->add_int_contents(1); },
       "label", "has 1 elements of its datatype in contents, but shape [2] needs 2"},
      {[](auto* r) {
         Declare(r, "label", "INT32", {1})->mutable_contents()->add_int64_contents(1);
       },
       "label", "has 0 elements"},
      {[](auto* r) { Declare(r, "steps", "INT32", {1}); }, "steps", "has 0 elements"},
      {[](auto* r) { Declare(r, "sampler", "BYTES", {1}); }, "sampler", "has 0 elements"},
      {[](auto* r) { Add(r, "sampler", "BYTES", {1}, "heun"); }, "sampler",
       "has 4 bytes that are not 1 element of BYTES; give each its length"},
      {[](auto* r) { Add(r, "sampler", "BYTES", {1}, "\xff\xff\xff\xff"); }, "sampler",
       "has 4 bytes"},
      {[](auto* r) { Add(r, "sampler", "BYTES", {1}, Element("heun") + Element("heun")); },
       "sampler", "has 16 bytes"},
      {[](auto* r) { Add(r, "sampler", "BYTES", {1}, "abc"); }, "sampler", "has 3 bytes"},
      // Shared memory, which is an extension, would come so.
      {[](auto* r) {
         (*Declare(r, "label", "INT32", {1})->mutable_parameters())["shared_memory_region"]
             .set_string_param("region");
       },
       "label", "has the parameter \"shared_memory_region\""},
      // Values.
      {[](auto* r) { AddInt(r, "steps", 0); }, "steps", "is 0; use 1 to 1000"},
      {[](auto* r) {
         AddLabels(r, {1, 10});
       },
       "label[1]", "is 10; use 0 to 9"},
      {[](auto* r) { AddLabels(r, std::vector<int32_t>(100'000, 1)); }, "batch size",
       "is 100000; use 1 to"},
      {[](auto* r) { AddNumber(r, "eta", std::numeric_limits<double>::quiet_NaN()); }, "eta",
       "is nan; use 0 to 1"},
      {[](auto* r) { AddInt(r, "width", -32); }, "width", "is -32"},
      {[](auto* r) { AddInt(r, "height", 33); }, "height", "is 33"},
      {[](auto* r) { AddBytes(r, "sampler", "Heun"); }, "sampler",
       "is \"Heun\"; use one of ddpm, ddim, pndm"},
      {[](auto* r) { AddBytes(r, "format", "raw_float32"); }, "format",
       "is \"raw_float32\"; use one of png, jpeg, webp"},
      {[](auto* r) { AddBytes(r, "init_image", "no picture"); }, "init_image", ""},
      {[](auto* r) { AddNumber(r, "strength", 0.5); }, "init_image", "has no picture"},
      {[](auto* r) { AddBytes(r, "format", "jpeg"); }, "format",
       "is not png, but the output image is asked for too"},
      {[](auto* r) {
         AddInt(r, "quality", 5);
         r->add_outputs()->set_name("image");
       },
       "quality", "is of the output encoded, which is not asked for"},
      // Outputs and parameters.
      {[](auto* r) { r->add_outputs()->set_name("logits"); }, "outputs",
       "has \"logits\", which model 'digits@1' does not give; use image, encoded, seed, label"},
      {[](auto* r) {
         r->add_outputs()->set_name("seed");
         r->add_outputs()->set_name("seed");
       },
       "outputs", "has seed twice"},
      {[](auto* r) {
         auto* output = r->add_outputs();
         output->set_name("image");
         (*output->mutable_parameters())["classification"].set_int64_param(3);
       },
       "outputs", "has the parameter \"classification\" of image"},
      {[](auto* r) { (*r->mutable_parameters())["sequence_id"].set_int64_param(1); }, "parameters",
       "has \"sequence_id\", which this server does not know; use priority, timeout"},
      {[](auto* r) { (*r->mutable_parameters())["priority"].set_uint64_param(~uint64_t{0}); },
       "parameters.priority", "is 9223372036854775807; use 1 (interactive)"},
      {[](auto* r) { (*r->mutable_parameters())["priority"].set_string_param("high"); },
       "parameters.priority", "is not a whole number"},
      {[](auto* r) { (*r->mutable_parameters())["timeout"].set_int64_param(-1); },
       "parameters.timeout", "is -1; use microseconds"},
  };
  for (const Case& each : cases) {
    ModelInferRequest request;
    each.spoil(&request);
    SCOPED_TRACE(request.ShortDebugString().substr(0, 200));
    const grpc::Status status = Infer(request);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(each.field + ": " + each.description));
    EXPECT_THAT(Violated(status), IsSupersetOf({each.field}));
  }
  EXPECT_EQ(engine_->evaluations(), 0);
  EXPECT_TRUE(Infer({}).ok());
}

TEST_F(InferenceTest, AMaskWithoutItsPictureNamesInputs) {
  Start({.channels = 3});
  ModelInferRequest request;
  AddBytes(&request, "mask", "a file");
  const grpc::Status status = Infer(request);
  EXPECT_THAT(Violated(status), ElementsAre("mask"));
  EXPECT_THAT(status.error_message(), HasSubstr("init_image is not"));
  EXPECT_THAT(status.error_message(), Not(HasSubstr("params")));
}

TEST_F(InferenceTest, AllThatIsWrongAtOnce) {
  Start();
  ModelInferRequest request;
  AddInt(&request, "prompt", 1);
  Add(&request, "steps", "FP32", {1}, Raw<float>({1}));
  Add(&request, "label", "INT32", {3}, "");
  request.add_outputs()->set_name("text");
  EXPECT_THAT(Violated(Infer(request)), ElementsAre("inputs", "steps", "label", "outputs"));
}

TEST_F(InferenceTest, PixelsAndFilesTogetherCountTwice) {
  config_.limits.max_reply_bytes = 3 * 32 * 32;
  Start();
  ModelInferRequest request;
  AddSeeds(&request, {1, 2});
  const grpc::Status status = Infer(request);
  EXPECT_THAT(Violated(status), ElementsAre("outputs"));
  request.add_outputs()->set_name("image");
  EXPECT_TRUE(Infer(request).ok());
  AddInt(&request, "width", 64);
  EXPECT_THAT(Violated(Infer(request)), ElementsAre("batch size"));
}

std::vector<std::string> InputsOf(const ModelInfo& model) {
  inference::ModelMetadataResponse metadata;
  DescribeTensors(model, &metadata);
  std::vector<std::string> names;
  for (const auto& input : metadata.inputs()) {
    names.push_back(input.name() + (IsRequired(input.name(), model) ? " (required)" : ""));
  }
  return names;
}

TEST(InferenceTensorsTest, WhatAModelNeedsIsNotOptional) {
  ModelInfo model;
  model.channels = 3;
  EXPECT_THAT(InputsOf(model), Not(Contains(HasSubstr("init_image")))) << "it has no encoder";
  EXPECT_THAT(InputsOf(model), Not(Contains(HasSubstr("strength"))));
  model.images.init = true;
  EXPECT_THAT(InputsOf(model), Contains("init_image"));
  EXPECT_THAT(InputsOf(model), Not(Contains(HasSubstr("strength"))));
  model.images.strength = model.images.mask = true;
  EXPECT_THAT(InputsOf(model), Contains("strength"));
  EXPECT_THAT(InputsOf(model), Contains("mask"));
  EXPECT_THAT(InputsOf(model), Not(Contains(HasSubstr("required"))));
  model.images.required = model.images.mask_required = true;
  model.text = {.max_clip_skip = 2, .max_chunks = 3, .chunk_tokens = 75};
  for (const char* input : {"init_image", "mask", "prompt"}) {
    EXPECT_THAT(InputsOf(model), Contains(input + std::string(" (required)")));
  }
  model.text.reset();
  model.condition = ClassCondition::kVector;
  model.class_vector_size = 3;
  EXPECT_THAT(InputsOf(model), Contains("class_vector (required)"));
}

TEST(InferenceTensorsTest, MemoryOfAnUploadIsReserved) {
  ModelInfo model;
  model.channels = 1;
  model.width = model.height = 32;
  model.max_edge = 4096;
  model.images.init = true;
  ModelInferRequest request;
  AddBytes(&request, "init_image", std::string(1000, 'x'));
  request.add_outputs()->set_name("encoded");
  MemoryBudget memory(2000);
  std::vector<FieldViolation> violations;
  {
    const Inference read = ReadInference(request, model, {}, &memory, &violations);
    EXPECT_TRUE(read.memory_status.ok());
    EXPECT_EQ(memory.reserved(), 1000);
    const Inference second = ReadInference(request, model, {}, &memory, &violations);
    const Inference third = ReadInference(request, model, {}, &memory, &violations);
    EXPECT_TRUE(absl::IsResourceExhausted(third.memory_status));
    EXPECT_THAT(std::string(third.memory_status.message()), HasSubstr("init_image"));
    EXPECT_EQ(third.params.init_image().encoded(), "");
    EXPECT_TRUE(violations.empty());
  }
  EXPECT_EQ(memory.reserved(), 0);
  MemoryBudget small(500);
  ReadInference(request, model, {}, &small, &violations);
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "init_image");
}

TEST(InferenceTensorsTest, AFileIsUnpackedOnceThereIsMemory) {
  v1::GenerateResponse images;
  v1::Image& image = *images.add_images();
  const auto file = EncodeFile(Tensor::Host({32, 32, 1}, DType::kF32), FileFormat::kPng, 90, {});
  ASSERT_TRUE(file.ok());
  image.set_encoded(*file);
  image.set_width(32);
  image.set_height(32);
  MemoryBudget memory(32 * 32 * kPngDecodingBytesPerPixel);
  MemoryBudget::Lease others;
  ASSERT_TRUE(memory.Reserve(1, &others).ok());
  std::atomic<bool> written = false;
  ModelInferResponse response;
  std::jthread writer([&] {
    const InferenceOutputs outputs{.names = {"image"}, .channels = 1};
    EXPECT_TRUE(WriteInference(images, outputs, 1 << 20, &memory, &response).ok());
    written = true;
  });
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(written);
  others = {};
  writer.join();
  EXPECT_EQ(response.raw_output_contents(0).size(), 32u * 32u);
  EXPECT_EQ(memory.reserved(), 0);
}

TEST_F(InferenceTest, AFileThatCanNeverBeUnpackedIsRefusedAtOnce) {
  config_.max_decoding_bytes = 32 * 32 * kPngDecodingBytesPerPixel - 1;
  Start();
  const grpc::Status refused = Infer({});
  EXPECT_THAT(Violated(refused), ElementsAre("outputs"));
  EXPECT_EQ(engine_->evaluations(), 0);
  ModelInferRequest request;
  request.add_outputs()->set_name("image");
  EXPECT_TRUE(Infer(request).ok());
}

/// The height of what is drawn is known when the picture is decoded.
TEST_F(InferenceTest, APicturesProportionsDoNotPassTheBounds) {
  constexpr int kWidth = 256;
  config_.max_decoding_bytes = 2 * kWidth * 32 * kPngDecodingBytesPerPixel;
  Start();
  const auto picture = EncodeFile(Tensor::Host({8, 8, 1}, DType::kF32), FileFormat::kPng, 90, {});
  ASSERT_TRUE(picture.ok());
  ModelInferRequest request;
  AddBytes(&request, "init_image", *picture);
  AddNumber(&request, "strength", 1);
  AddInt(&request, "width", kWidth);
  EXPECT_THAT(Violated(Infer(request)), ElementsAre("outputs"));
  request.add_outputs()->set_name("encoded");
  EXPECT_TRUE(Infer(request).ok());
}

TEST_F(InferenceTest, WaitsInTheSameQueueUnderTheSameLimits) {
  config_.metrics_listen = "127.0.0.1:0";
  Start({.max_queued_images = 2});
  engine_->Pause(true);
  ModelInferRequest request;
  AddSeeds(&request, {1, 2});
  grpc::ClientContext context;
  ModelInferResponse response;
  auto waiting = std::async(std::launch::async,
                            [&] { return inference_->ModelInfer(&context, request, &response); });
  ASSERT_TRUE(Eventually([&] { return engine_->QueuedImages("digits@1") == 2; }));
  const grpc::Status full = Infer(request);
  EXPECT_EQ(full.error_code(), StatusCode::RESOURCE_EXHAUSTED) << full.error_message();

  // A cancel takes it out of the queue.
  context.TryCancel();
  EXPECT_EQ(waiting.get().error_code(), StatusCode::CANCELLED);
  ASSERT_TRUE(Eventually([&] { return engine_->QueuedImages("digits@1") == 0; }));

  (*request.mutable_parameters())["timeout"].set_int64_param(50'000);
  const grpc::Status late = Infer(request);
  EXPECT_EQ(late.error_code(), StatusCode::DEADLINE_EXCEEDED) << late.error_message();
  engine_->Pause(false);
  request.clear_parameters();
  EXPECT_TRUE(Infer(request).ok());
  ASSERT_TRUE(Eventually([&] {
    const std::string text = Scrape();
    return text.find(
               "grpc_server_handled_total{grpc_code=\"RESOURCE_EXHAUSTED\",grpc_method="
               "\"ModelInfer\",grpc_service=\"inference.GRPCInferenceService\"") !=
               std::string::npos &&
           text.find("denoised_client_images_total{client=\"anonymous\",model=\"digits\"} 2") !=
               std::string::npos;
  }));
}

TEST_F(InferenceTest, ADrainIsToldAndRefusesNewWork) {
  Start();
  engine_->PauseAfter(1);
  auto running = std::async(std::launch::async, [&] { return Infer({}); });
  ASSERT_TRUE(Eventually([&] { return engine_->evaluations() > 0; }));
  auto drain = std::async(std::launch::async, [&] { server_->Drain(1min); });
  EXPECT_TRUE(Eventually([&] { return !Ready(); }));
  EXPECT_TRUE(Eventually([&] { return Infer({}).error_code() == StatusCode::UNAVAILABLE; }));
  engine_->Pause(false);
  EXPECT_TRUE(running.get().ok());
}

}  // namespace
}  // namespace denoised
