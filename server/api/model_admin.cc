// SPDX-License-Identifier: Apache-2.0
#include "server/api/model_admin.h"

#include <memory>
#include <utility>

#include "server/api/grpc_calls.h"
#include "server/api/server_info.h"
#include "server/api/translate.h"
#include "server/models/catalog.h"
#include "server/status/model_name.h"
#include "server/status/name.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

std::string NotAName(const std::string& name) {
  return fmt::format("is {}; {}", Quote(name), kNameRule);
}

/// `name` or `name@version`.
bool IsModelReference(const std::string& name) {
  const size_t at = name.find('@');
  return IsName(name.substr(0, at)) &&
         (at == std::string::npos || IsName(std::string_view(name).substr(at + 1)));
}

std::string NotAReference(const std::string& name) {
  return fmt::format("is {}; use name or name@version, as ListModels tells them", Quote(name));
}

}  // namespace

ModelChange ModelChanges::Describe(const v1::LoadModelRequest& request) {
  const std::string target =
      request.version().empty() ? request.name() : EngineName(request.name(), request.version());
  return {"load", target, request.directory()};
}

grpc::Status ModelChanges::Make(const v1::LoadModelRequest& request,
                                v1::LoadModelResponse* response) const {
  std::vector<FieldViolation> violations;
  if (!IsName(request.name())) violations.push_back({"name", NotAName(request.name())});
  if (!request.version().empty() && !IsName(request.version())) {
    violations.push_back({"version", NotAName(request.version())});
  }
  if (request.keep_current() && request.unload_previous()) {
    violations.push_back({"unload_previous", "contradicts keep_current; set one of the two"});
  }
  const std::string& directory = request.directory();
  if (!directory.empty()) {
    const auto allowed = catalog_->Allowed(request.name(), directory);
    if (!allowed.ok()) violations.push_back({"directory", std::string(allowed.status().message())});
  }
  if (!violations.empty()) return InvalidFields(violations, "");
  auto model = catalog_->Load({.name = request.name(),
                               .directory = directory,
                               .version = request.version(),
                               .keep_current = request.keep_current(),
                               .unload_previous = request.unload_previous()});
  if (!model.ok()) return ToGrpc(model.status());
  *response->mutable_model() = ToProto(*model, info_->DeviceNames(), limits_);
  return grpc::Status::OK;
}

ModelChange ModelChanges::Describe(const v1::UnloadModelRequest& request) {
  return {"unload", request.name()};
}

grpc::Status ModelChanges::Make(const v1::UnloadModelRequest& request,
                                v1::UnloadModelResponse*) const {
  if (!IsModelReference(request.name())) {
    return InvalidFields({{"name", NotAReference(request.name())}}, "");
  }
  return ToGrpc(catalog_->Unload(request.name()));
}

ModelChange ModelChanges::Describe(const v1::SetAliasRequest& request) {
  return {.verb = "alias", .model = request.target(), .alias = request.alias(), .waits = false};
}

grpc::Status ModelChanges::Make(const v1::SetAliasRequest& request,
                                v1::SetAliasResponse* response) const {
  std::vector<FieldViolation> violations;
  if (!IsName(request.alias())) violations.push_back({"alias", NotAName(request.alias())});
  if (!IsModelReference(request.target())) {
    violations.push_back({"target", NotAReference(request.target())});
  }
  if (!violations.empty()) return InvalidFields(violations, "");
  auto model = catalog_->SetAlias(request.alias(), request.target());
  if (!model.ok()) return ToGrpc(model.status());
  *response->mutable_model() = ToProto(*model, info_->DeviceNames(), limits_);
  return grpc::Status::OK;
}

ModelChange ModelChanges::Describe(const v1::DeleteAliasRequest& request) {
  return {.verb = "delete alias", .alias = request.alias(), .waits = false};
}

grpc::Status ModelChanges::Make(const v1::DeleteAliasRequest& request,
                                v1::DeleteAliasResponse*) const {
  if (!IsName(request.alias())) return InvalidFields({{"alias", NotAName(request.alias())}}, "");
  return ToGrpc(catalog_->DeleteAlias(request.alias()));
}

template <typename Request, typename Response>
grpc::ServerUnaryReactor* ModelAdminService::Change(grpc::CallbackServerContext* context,
                                                    const char* method,
                                                    const grpc::ByteBuffer* request,
                                                    grpc::ByteBuffer* response) {
  struct Exchanged {
    Received<Request> asked;
    Response made;
  };
  const auto both = std::make_shared<Exchanged>();
  const grpc::Status status = Read(context_, request, &both->asked);
  if (!status.ok()) {
    CallRecord record(context_.calls, method, context);
    return Reply(context_, context, &record, status);
  }
  return admin_->Post(
      context, method, ModelChanges::Describe(both->asked.message),
      [this, both] { return changes_->Make(both->asked.message, &both->made); },
      [response, both] { return Serialize(both->made, response); });
}

grpc::ServerUnaryReactor* ModelAdminService::LoadModel(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  return Change<v1::LoadModelRequest, v1::LoadModelResponse>(
      context, "denoised.v1.ModelAdmin.LoadModel", request, response);
}

grpc::ServerUnaryReactor* ModelAdminService::UnloadModel(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return Change<v1::UnloadModelRequest, v1::UnloadModelResponse>(
      context, "denoised.v1.ModelAdmin.UnloadModel", request, response);
}

grpc::ServerUnaryReactor* ModelAdminService::SetAlias(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* request,
                                                      grpc::ByteBuffer* response) {
  return Change<v1::SetAliasRequest, v1::SetAliasResponse>(
      context, "denoised.v1.ModelAdmin.SetAlias", request, response);
}

grpc::ServerUnaryReactor* ModelAdminService::DeleteAlias(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return Change<v1::DeleteAliasRequest, v1::DeleteAliasResponse>(
      context, "denoised.v1.ModelAdmin.DeleteAlias", request, response);
}

}  // namespace denoised
