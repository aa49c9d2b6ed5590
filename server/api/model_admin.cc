// SPDX-License-Identifier: Apache-2.0
#include "server/api/model_admin.h"

#include <memory>
#include <utility>

#include "server/api/call_record.h"
#include "server/api/server_info.h"
#include "server/api/translate.h"
#include "server/models/catalog.h"
#include "server/security/clients.h"
#include "server/status/model_name.h"
#include "server/status/name.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"
#include "server/telemetry/log.h"

namespace denoised {
namespace {

/// Only admins may change the models.
grpc::Status Authorize(const Caller& caller) {
  if (caller.admin) return grpc::Status::OK;
  return ToGrpcStatus(
      absl::PermissionDeniedError(fmt::format(
          "client \"{}\" may not change models; give it \"admin\": true in the file of clients",
          caller.name)),
      reason::kNotAdmin, "");
}

/// What the catalog refused. A directory that is not there is the caller's mistake, not a resource
/// of ours.
grpc::Status ToGrpc(const absl::Status& status) {
  const char* reason = reason::kModelFailed;
  if (absl::IsAlreadyExists(status)) reason = reason::kModelExists;
  if (absl::IsNotFound(status)) reason = reason::kModelNotFound;
  if (absl::IsResourceExhausted(status)) reason = reason::kDeviceMemory;
  return ToGrpcStatus(status, reason, "");
}

std::string NotAName(const std::string& name) {
  return fmt::format("is {}; {}", Quote(name), kNameRule);
}

/// Who changed what, or wanted to.
void LogChange(const ModelChange& change, const CallRecord& call, const grpc::Status& status) {
  log::Fields fields = {{"change", change.verb},
                        {"client", call.caller().name},
                        {"peer", call.peer()},
                        {"trace_id", call.trace().trace_id},
                        {"code", CodeName(status.error_code())}};
  for (const auto& [name, value] : {std::pair{"model", &change.model},
                                    {"directory", &change.directory},
                                    {"alias", &change.alias}}) {
    // What the client sent may be of any length.
    if (!value->empty()) fields.push_back({name, value->substr(0, 256)});
  }
  if (!status.ok()) fields.push_back({"error", status.error_message()});
  log::Info(status.ok() ? "models changed" : "models not changed", fields);
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

grpc::ServerUnaryReactor* ModelAdminService::Post(grpc::CallbackServerContext* context,
                                                  const char* method, ModelChange change,
                                                  std::function<grpc::Status()> work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto record = std::make_shared<CallRecord>(calls_, method, context);
  threads_.Post(Priority::kNormal, [this, reactor, record, change = std::move(change),
                                    work = std::move(work)] {
    grpc::Status status = Authorize(record->caller());
    if (status.ok() && drain_->draining()) {
      status = ToGrpcStatus(Unavailable("the server is shutting down"), reason::kDraining, "");
    }
    if (status.ok()) status = work();
    LogChange(change, *record, status);
    record->End(status.error_code(), status.error_message());
    reactor->Finish(status);
  });
  return reactor;
}

grpc::ServerUnaryReactor* ModelAdminService::LoadModel(grpc::CallbackServerContext* context,
                                                       const v1::LoadModelRequest* request,
                                                       v1::LoadModelResponse* response) {
  const std::string target = request->version().empty()
                                 ? request->name()
                                 : EngineName(request->name(), request->version());
  const ModelChange change{"load", target, request->directory()};
  return Post(context, "denoised.v1.ModelAdmin.LoadModel", change, [=, this] {
    std::vector<FieldViolation> violations;
    if (!IsName(request->name())) violations.push_back({"name", NotAName(request->name())});
    if (!request->version().empty() && !IsName(request->version())) {
      violations.push_back({"version", NotAName(request->version())});
    }
    const std::string& directory = request->directory();
    if (!directory.empty()) {
      const auto allowed = catalog_->Allowed(request->name(), directory);
      if (!allowed.ok())
        violations.push_back({"directory", std::string(allowed.status().message())});
    }
    if (!violations.empty()) return InvalidFields(violations, "");
    auto model = catalog_->Load({.name = request->name(),
                                 .directory = directory,
                                 .version = request->version(),
                                 .keep_current = request->keep_current(),
                                 .unload_previous = request->unload_previous()});
    if (!model.ok()) return ToGrpc(model.status());
    *response->mutable_model() = ToProto(*model, info_->DeviceNames(), limits_);
    return grpc::Status::OK;
  });
}

grpc::ServerUnaryReactor* ModelAdminService::UnloadModel(grpc::CallbackServerContext* context,
                                                         const v1::UnloadModelRequest* request,
                                                         v1::UnloadModelResponse*) {
  const ModelChange change{"unload", request->name()};
  return Post(context, "denoised.v1.ModelAdmin.UnloadModel", change, [=, this] {
    if (!IsModelReference(request->name())) {
      return InvalidFields({{"name", NotAReference(request->name())}}, "");
    }
    return ToGrpc(catalog_->Unload(request->name()));
  });
}

grpc::ServerUnaryReactor* ModelAdminService::SetAlias(grpc::CallbackServerContext* context,
                                                      const v1::SetAliasRequest* request,
                                                      v1::SetAliasResponse* response) {
  const ModelChange change{"alias", request->target(), "", request->alias()};
  return Post(context, "denoised.v1.ModelAdmin.SetAlias", change, [=, this] {
    std::vector<FieldViolation> violations;
    if (!IsName(request->alias())) violations.push_back({"alias", NotAName(request->alias())});
    if (!IsModelReference(request->target())) {
      violations.push_back({"target", NotAReference(request->target())});
    }
    if (!violations.empty()) return InvalidFields(violations, "");
    auto model = catalog_->SetAlias(request->alias(), request->target());
    if (!model.ok()) return ToGrpc(model.status());
    *response->mutable_model() = ToProto(*model, info_->DeviceNames(), limits_);
    return grpc::Status::OK;
  });
}

grpc::ServerUnaryReactor* ModelAdminService::DeleteAlias(grpc::CallbackServerContext* context,
                                                         const v1::DeleteAliasRequest* request,
                                                         v1::DeleteAliasResponse*) {
  const ModelChange change{"delete alias", "", "", request->alias()};
  return Post(context, "denoised.v1.ModelAdmin.DeleteAlias", change, [=, this] {
    if (!IsName(request->alias())) {
      return InvalidFields({{"alias", NotAName(request->alias())}}, "");
    }
    return ToGrpc(catalog_->DeleteAlias(request->alias()));
  });
}

}  // namespace denoised
