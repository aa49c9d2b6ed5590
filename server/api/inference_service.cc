// SPDX-License-Identifier: Apache-2.0
#include "server/api/inference_service.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "server/api/call_record.h"
#include "server/api/grpc_calls.h"
#include "server/api/inference.h"
#include "server/api/repository.h"
#include "server/api/server_info.h"
#include "server/jobs/jobs.h"
#include "server/models/catalog.h"
#include "server/status/model_name.h"
#include "server/status/status_details.h"
#include "server/version.h"

namespace denoised {
namespace {

constexpr char kModelInfer[] = "inference.GRPCInferenceService.ModelInfer";

/// The protocol has names and versions apart.
std::string Together(const std::string& name, const std::string& version) {
  return version.empty() ? name : EngineName(name, version);
}

}  // namespace

grpc::Status InferenceService::FillServerLive(const inference::ServerLiveRequest&, CallRecord*,
                                              inference::ServerLiveResponse* response) const {
  response->set_live(info_->health().live());
  return grpc::Status::OK;
}

grpc::ServerUnaryReactor* InferenceService::ServerLive(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  return Answer(context_, "inference.GRPCInferenceService.ServerLive", *this,
                &InferenceService::FillServerLive, context, request, response);
}

grpc::Status InferenceService::FillServerReady(const inference::ServerReadyRequest&, CallRecord*,
                                               inference::ServerReadyResponse* response) const {
  response->set_ready(info_->health().ready());
  return grpc::Status::OK;
}

grpc::ServerUnaryReactor* InferenceService::ServerReady(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* response) {
  return Answer(context_, "inference.GRPCInferenceService.ServerReady", *this,
                &InferenceService::FillServerReady, context, request, response);
}

grpc::Status InferenceService::FillModelReady(const inference::ModelReadyRequest& request,
                                              CallRecord* record,
                                              inference::ModelReadyResponse* response) const {
  grpc::Status status;
  if (const auto model =
          catalog_->Select(Together(request.name(), request.version()), "name", "", &status)) {
    record->model = EngineName(model->name, model->version);
    response->set_ready(CheckReady(*model, "").ok());
  }
  return status;
}

grpc::ServerUnaryReactor* InferenceService::ModelReady(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  return Answer(context_, "inference.GRPCInferenceService.ModelReady", *this,
                &InferenceService::FillModelReady, context, request, response);
}

grpc::Status InferenceService::FillServerMetadata(
    const inference::ServerMetadataRequest&, CallRecord*,
    inference::ServerMetadataResponse* response) const {
  response->set_name("denoised");
  response->set_version(kVersion);
  for (const char* extension : {"model_repository", "statistics", "model_configuration"}) {
    response->add_extensions(extension);
  }
  return grpc::Status::OK;
}

grpc::ServerUnaryReactor* InferenceService::ServerMetadata(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* request,
                                                           grpc::ByteBuffer* response) {
  return Answer(context_, "inference.GRPCInferenceService.ServerMetadata", *this,
                &InferenceService::FillServerMetadata, context, request, response);
}

template <typename Request>
std::optional<CatalogModel> InferenceService::SelectReady(const Request& request,
                                                          CallRecord* record,
                                                          grpc::Status* status) const {
  auto model = catalog_->Select(Together(request.name(), request.version()), "name", "", status);
  if (!model) return std::nullopt;
  record->model = EngineName(model->name, model->version);
  *status = CheckReady(ShownTo(record->caller().admin, *model), "");
  if (!status->ok()) return std::nullopt;
  return model;
}

grpc::Status InferenceService::FillModelMetadata(const inference::ModelMetadataRequest& request,
                                                 CallRecord* record,
                                                 inference::ModelMetadataResponse* response) const {
  grpc::Status status;
  const auto model = SelectReady(request, record, &status);
  if (model) {
    response->set_name(model->name);
    for (const CatalogModel& each : catalog_->All()) {
      if (each.name == model->name) response->add_versions(each.version);
    }
    response->set_platform("denoised_diffusers");
    DescribeTensors(*model->info, response);
  }
  return status;
}

grpc::ServerUnaryReactor* InferenceService::ModelMetadata(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request,
                                                          grpc::ByteBuffer* response) {
  return Answer(context_, "inference.GRPCInferenceService.ModelMetadata", *this,
                &InferenceService::FillModelMetadata, context, request, response);
}

grpc::ServerUnaryReactor* InferenceService::ModelInfer(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  struct Wanted {
    std::string id;
    InferenceOutputs outputs;
  };
  const auto wanted = std::make_shared<Wanted>();
  const auto call = std::make_shared<GrpcUnaryCall>(
      context_, kModelInfer, context, [=, this](v1::GenerateResponse* images) {
        inference::ModelInferResponse reply;
        reply.set_id(wanted->id);
        const grpc::Status status =
            WriteInference(*images, wanted->outputs, context_.max_reply_bytes, decoding_, &reply);
        return status.ok() ? Serialize(reply, response) : status;
      });
  const auto begin = [=, this, record = &call->record()](
                         const inference::ModelInferRequest& request, const auto& watcher,
                         grpc::Status* refusal) -> std::shared_ptr<Generation> {
    const std::string name = Together(request.model_name(), request.model_version());
    const auto model = catalog_->Select(name, "model_name", "", refusal);
    if (!model) return nullptr;
    *refusal = CheckReady(ShownTo(record->caller().admin, *model), "");
    if (!refusal->ok()) return nullptr;
    std::vector<FieldViolation> violations;
    Inference inference = ReadInference(request, *model->info, limits_, decoding_, &violations);
    if (!violations.empty()) {
      *refusal = InvalidFields(violations, "");
      return nullptr;
    }
    if (!inference.memory_status.ok()) {
      *refusal = ToGrpcStatus(inference.memory_status, reason::kDecodingMemory, "",
                              context_.queue_wait->RetryDelay());
      return nullptr;
    }
    inference.params.set_model(name);
    *wanted = {request.id(), std::move(inference.outputs)};
    JobRequest asked =
        MakeJobRequest(*record, DeadlineOf(*context), inference.params, nullptr, true);
    asked.field_name = InputName;
    if (inference.timeout) {
      const auto end = record->arrival() + *inference.timeout;
      asked.deadline = std::min(asked.deadline.value_or(end), end);
    }
    return BeginJob(context_, *record, asked, watcher, refusal);
  };
  Start<inference::ModelInferRequest>(context_, call, request, ReadPriority, begin);
  return call.get();
}

grpc::Status InferenceService::FillModelConfig(const inference::ModelConfigRequest& request,
                                               CallRecord* record,
                                               inference::ModelConfigResponse* response) const {
  grpc::Status status;
  const auto model = SelectReady(request, record, &status);
  if (model) DescribeConfig(*model, response->mutable_config());
  return status;
}

grpc::ServerUnaryReactor* InferenceService::ModelConfig(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* response) {
  return Answer(context_, "inference.GRPCInferenceService.ModelConfig", *this,
                &InferenceService::FillModelConfig, context, request, response);
}

grpc::Status InferenceService::FillModelStatistics(
    const inference::ModelStatisticsRequest& request, CallRecord*,
    inference::ModelStatisticsResponse* response) const {
  grpc::Status status;
  std::optional<CatalogModel> asked;
  if (!request.name().empty()) {
    asked = catalog_->Select(Together(request.name(), request.version()), "name", "", &status);
  } else if (!request.version().empty()) {
    status = InvalidFields({{"version", "is given without a name; give both, or neither"}}, "");
  }
  if (!status.ok()) return status;
  std::map<std::string, uint64_t> evaluations;
  for (const EngineStats& stats : engine_->Stats()) {
    evaluations[stats.model] = stats.evaluations;
  }
  for (const CatalogModel& model : catalog_->All()) {
    if (asked && model.name != asked->name) continue;
    if (!request.version().empty() && model.version != asked->version) continue;
    const std::string name = EngineName(model.name, model.version);
    DescribeStatistics(model, totals_->Of(name), evaluations[name], response->add_model_stats());
  }
  return grpc::Status::OK;
}

grpc::ServerUnaryReactor* InferenceService::ModelStatistics(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request,
                                                            grpc::ByteBuffer* response) {
  return Answer(context_, "inference.GRPCInferenceService.ModelStatistics", *this,
                &InferenceService::FillModelStatistics, context, request, response);
}

grpc::Status InferenceService::FillRepositoryIndex(
    const inference::RepositoryIndexRequest& request, CallRecord* record,
    inference::RepositoryIndexResponse* response) const {
  const auto violations = CheckRepositoryName(request.repository_name());
  if (!violations.empty()) return InvalidFields(violations, "");
  std::vector<CatalogModel> models = catalog_->All();
  for (CatalogModel& model : models) model = ShownTo(record->caller().admin, std::move(model));
  DescribeIndex(models, request.ready(), response);
  return grpc::Status::OK;
}

grpc::ServerUnaryReactor* InferenceService::RepositoryIndex(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request,
                                                            grpc::ByteBuffer* response) {
  return Answer(context_, "inference.GRPCInferenceService.RepositoryIndex", *this,
                &InferenceService::FillRepositoryIndex, context, request, response);
}

template <typename Request, typename Response, typename Work>
grpc::ServerUnaryReactor* InferenceService::Change(grpc::CallbackServerContext* context,
                                                   const char* method, const char* verb,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response, Work work) {
  const auto asked = std::make_shared<Received<Request>>();
  const grpc::Status status = admin_ == nullptr ? NoAdmins() : Read(context_, request, asked.get());
  if (!status.ok()) {
    CallRecord record(context_.calls, method, context);
    return Reply(context_, context, &record, status);
  }
  return admin_->Post(
      context, method, {verb, asked->message.model_name()},
      [asked, work] { return work(asked->message); },
      [response] { return Serialize(Response(), response); });
}

grpc::ServerUnaryReactor* InferenceService::RepositoryModelLoad(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
    grpc::ByteBuffer* response) {
  using Request = inference::RepositoryModelLoadRequest;
  return Change<Request, inference::RepositoryModelLoadResponse>(
      context, "inference.GRPCInferenceService.RepositoryModelLoad", "load", request, response,
      [this](const Request& asked) {
        const std::string& name = asked.model_name();
        const auto violations =
            CheckRepositoryChange(asked.repository_name(), name, asked.parameters(), nullptr);
        if (!violations.empty()) return InvalidFields(violations, "");
        return ToGrpc(
            catalog_->Load({.name = name, .unload_previous = true, .name_field = "model_name"})
                .status());
      });
}

grpc::ServerUnaryReactor* InferenceService::RepositoryModelUnload(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
    grpc::ByteBuffer* response) {
  using Request = inference::RepositoryModelUnloadRequest;
  return Change<Request, inference::RepositoryModelUnloadResponse>(
      context, "inference.GRPCInferenceService.RepositoryModelUnload", "unload", request, response,
      [this](const Request& asked) {
        const std::string& name = asked.model_name();
        const auto violations = CheckRepositoryChange(asked.repository_name(), name,
                                                      asked.parameters(), "unload_dependents");
        if (!violations.empty()) return InvalidFields(violations, "");
        return ToGrpc(catalog_->Unload(name, "model_name"));
      });
}

}  // namespace denoised
