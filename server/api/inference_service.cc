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

grpc::ServerUnaryReactor* InferenceService::ServerLive(grpc::CallbackServerContext* context,
                                                       const inference::ServerLiveRequest*,
                                                       inference::ServerLiveResponse* response) {
  CallRecord record(context_.calls, "inference.GRPCInferenceService.ServerLive", context);
  response->set_live(info_->health().live());
  return Reply(context, &record, grpc::Status::OK);
}

grpc::ServerUnaryReactor* InferenceService::ServerReady(grpc::CallbackServerContext* context,
                                                        const inference::ServerReadyRequest*,
                                                        inference::ServerReadyResponse* response) {
  CallRecord record(context_.calls, "inference.GRPCInferenceService.ServerReady", context);
  response->set_ready(info_->health().ready());
  return Reply(context, &record, grpc::Status::OK);
}

grpc::ServerUnaryReactor* InferenceService::ModelReady(grpc::CallbackServerContext* context,
                                                       const inference::ModelReadyRequest* request,
                                                       inference::ModelReadyResponse* response) {
  CallRecord record(context_.calls, "inference.GRPCInferenceService.ModelReady", context);
  grpc::Status status;
  if (const auto model =
          catalog_->Select(Together(request->name(), request->version()), "name", "", &status)) {
    record.model = EngineName(model->name, model->version);
    response->set_ready(CheckReady(*model, "").ok());
  }
  return Reply(context, &record, status);
}

grpc::ServerUnaryReactor* InferenceService::ServerMetadata(
    grpc::CallbackServerContext* context, const inference::ServerMetadataRequest*,
    inference::ServerMetadataResponse* response) {
  CallRecord record(context_.calls, "inference.GRPCInferenceService.ServerMetadata", context);
  response->set_name("denoised");
  response->set_version(kVersion);
  for (const char* extension : {"model_repository", "statistics", "model_configuration"}) {
    response->add_extensions(extension);
  }
  return Reply(context, &record, grpc::Status::OK);
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

grpc::ServerUnaryReactor* InferenceService::ModelMetadata(
    grpc::CallbackServerContext* context, const inference::ModelMetadataRequest* request,
    inference::ModelMetadataResponse* response) {
  CallRecord record(context_.calls, "inference.GRPCInferenceService.ModelMetadata", context);
  grpc::Status status;
  const auto model = SelectReady(*request, &record, &status);
  if (model) {
    response->set_name(model->name);
    for (const CatalogModel& each : catalog_->All()) {
      if (each.name == model->name) response->add_versions(each.version);
    }
    response->set_platform("denoised_diffusers");
    DescribeTensors(*model->info, response);
  }
  return Reply(context, &record, status);
}

grpc::ServerUnaryReactor* InferenceService::ModelInfer(grpc::CallbackServerContext* context,
                                                       const inference::ModelInferRequest* request,
                                                       inference::ModelInferResponse* response) {
  const auto outputs = std::make_shared<InferenceOutputs>();
  const auto call = std::make_shared<GrpcUnaryCall>(
      context_, kModelInfer, context, [=, this, id = request->id()](v1::GenerateResponse* images) {
        response->set_id(id);
        return WriteInference(*images, *outputs, context_.max_reply_bytes, decoding_, response);
      });
  const auto begin = [=, this, record = &call->record()](
                         const auto& watcher,
                         grpc::Status* refusal) -> std::shared_ptr<Generation> {
    const inference::ModelInferRequest taken = Take(request);
    const std::string name = Together(taken.model_name(), taken.model_version());
    const auto model = catalog_->Select(name, "model_name", "", refusal);
    if (!model) return nullptr;
    *refusal = CheckReady(ShownTo(record->caller().admin, *model), "");
    if (!refusal->ok()) return nullptr;
    std::vector<FieldViolation> violations;
    Inference inference = ReadInference(taken, *model->info, limits_, decoding_, &violations);
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
    *outputs = std::move(inference.outputs);
    JobRequest asked =
        MakeJobRequest(*record, DeadlineOf(*context), inference.params, nullptr, true);
    asked.field_name = InputName;
    if (inference.timeout) {
      const auto end = record->arrival() + *inference.timeout;
      asked.deadline = std::min(asked.deadline.value_or(end), end);
    }
    return BeginJob(context_, *record, asked, watcher, refusal);
  };
  call->Post(ReadPriority(*request), begin);
  return call.get();
}

grpc::ServerUnaryReactor* InferenceService::ModelConfig(
    grpc::CallbackServerContext* context, const inference::ModelConfigRequest* request,
    inference::ModelConfigResponse* response) {
  CallRecord record(context_.calls, "inference.GRPCInferenceService.ModelConfig", context);
  grpc::Status status;
  const auto model = SelectReady(*request, &record, &status);
  if (model) DescribeConfig(*model, response->mutable_config());
  return Reply(context, &record, status);
}

grpc::ServerUnaryReactor* InferenceService::ModelStatistics(
    grpc::CallbackServerContext* context, const inference::ModelStatisticsRequest* request,
    inference::ModelStatisticsResponse* response) {
  CallRecord record(context_.calls, "inference.GRPCInferenceService.ModelStatistics", context);
  grpc::Status status;
  std::optional<CatalogModel> asked;
  if (!request->name().empty()) {
    asked = catalog_->Select(Together(request->name(), request->version()), "name", "", &status);
  } else if (!request->version().empty()) {
    status = InvalidFields({{"version", "is given without a name; give both, or neither"}}, "");
  }
  if (!status.ok()) return Reply(context, &record, status);
  std::map<std::string, uint64_t> evaluations;
  for (const EngineStats& stats : engine_->Stats()) {
    evaluations[stats.model] = stats.evaluations;
  }
  for (const CatalogModel& model : catalog_->All()) {
    if (asked && model.name != asked->name) continue;
    if (!request->version().empty() && model.version != asked->version) continue;
    const std::string name = EngineName(model.name, model.version);
    DescribeStatistics(model, totals_->Of(name), evaluations[name], response->add_model_stats());
  }
  return Reply(context, &record, grpc::Status::OK);
}

grpc::ServerUnaryReactor* InferenceService::RepositoryIndex(
    grpc::CallbackServerContext* context, const inference::RepositoryIndexRequest* request,
    inference::RepositoryIndexResponse* response) {
  CallRecord record(context_.calls, "inference.GRPCInferenceService.RepositoryIndex", context);
  const auto violations = CheckRepositoryName(request->repository_name());
  if (!violations.empty()) return Reply(context, &record, InvalidFields(violations, ""));
  std::vector<CatalogModel> models = catalog_->All();
  for (CatalogModel& model : models) model = ShownTo(record.caller().admin, std::move(model));
  DescribeIndex(models, request->ready(), response);
  return Reply(context, &record, grpc::Status::OK);
}

grpc::ServerUnaryReactor* InferenceService::PostChange(grpc::CallbackServerContext* context,
                                                       const char* method, ModelChange change,
                                                       std::function<grpc::Status()> work) {
  if (admin_ != nullptr) {
    return admin_->Post(context, method, std::move(change), std::move(work), nullptr);
  }
  CallRecord record(context_.calls, method, context);
  return Reply(context, &record, NoAdmins());
}

grpc::ServerUnaryReactor* InferenceService::RepositoryModelLoad(
    grpc::CallbackServerContext* context, const inference::RepositoryModelLoadRequest* request,
    inference::RepositoryModelLoadResponse*) {
  const ModelChange change{"load", request->model_name()};
  constexpr char kMethod[] = "inference.GRPCInferenceService.RepositoryModelLoad";
  return PostChange(context, kMethod, change, [this, asked = Take(request)] {
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
    grpc::CallbackServerContext* context, const inference::RepositoryModelUnloadRequest* request,
    inference::RepositoryModelUnloadResponse*) {
  const ModelChange change{"unload", request->model_name()};
  constexpr char kMethod[] = "inference.GRPCInferenceService.RepositoryModelUnload";
  return PostChange(context, kMethod, change, [this, asked = Take(request)] {
    const std::string& name = asked.model_name();
    const auto violations = CheckRepositoryChange(asked.repository_name(), name, asked.parameters(),
                                                  "unload_dependents");
    if (!violations.empty()) return InvalidFields(violations, "");
    return ToGrpc(catalog_->Unload(name, "model_name"));
  });
}

}  // namespace denoised
