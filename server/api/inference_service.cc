// SPDX-License-Identifier: Apache-2.0
#include "server/api/inference_service.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "server/api/call_record.h"
#include "server/api/generation_call.h"
#include "server/api/inference.h"
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
  response->set_live(engine_->Health().ok());
  return Reply(context, &record, grpc::Status::OK);
}

grpc::ServerUnaryReactor* InferenceService::ServerReady(grpc::CallbackServerContext* context,
                                                        const inference::ServerReadyRequest*,
                                                        inference::ServerReadyResponse* response) {
  CallRecord record(context_.calls, "inference.GRPCInferenceService.ServerReady", context);
  response->set_ready(info_->State() == v1::SERVER_STATE_SERVING);
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
  return Reply(context, &record, grpc::Status::OK);
}

grpc::ServerUnaryReactor* InferenceService::ModelMetadata(
    grpc::CallbackServerContext* context, const inference::ModelMetadataRequest* request,
    inference::ModelMetadataResponse* response) {
  CallRecord record(context_.calls, "inference.GRPCInferenceService.ModelMetadata", context);
  grpc::Status status;
  const auto model =
      catalog_->Select(Together(request->name(), request->version()), "name", "", &status);
  if (model) {
    record.model = EngineName(model->name, model->version);
    status = CheckReady(*model, "");
  }
  if (status.ok()) {
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
  const auto outputs = std::make_shared<std::vector<std::string>>();
  const auto call = std::make_shared<UnaryCall>(context_, kModelInfer, context,
                                                [=](v1::GenerateResponse* images) {
                                                  WriteInference(*images, *outputs, response);
                                                  response->set_id(request->id());
                                                });
  const auto begin = [=, this, record = &call->record()](
                         const auto& watcher,
                         grpc::Status* refusal) -> std::shared_ptr<Generation> {
    const std::string name = Together(request->model_name(), request->model_version());
    const auto model = catalog_->Select(name, "model_name", "", refusal);
    if (!model) return nullptr;
    *refusal = CheckReady(*model, "");
    if (!refusal->ok()) return nullptr;
    std::vector<FieldViolation> violations;
    Inference inference = ReadInference(*request, *model->info, limits_, &violations);
    if (!violations.empty()) {
      *refusal = InvalidFields(violations, "");
      return nullptr;
    }
    inference.params.set_model(name);
    *outputs = std::move(inference.outputs);
    JobRequest asked = MakeJobRequest(*context, *record, inference.params, nullptr, true);
    asked.field_name = InputName;
    if (inference.timeout) {
      const auto end = record->arrival() + *inference.timeout;
      asked.deadline = std::min(asked.deadline.value_or(end), end);
    }
    return context_.jobs->Begin(asked, watcher, refusal);
  };
  call->Post(Priority::kNormal, begin);
  return call.get();
}

}  // namespace denoised
