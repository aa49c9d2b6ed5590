#include "server/api/model_admin.h"

#include <filesystem>
#include <memory>
#include <utility>

#include "server/api/call_record.h"
#include "server/api/server_info.h"
#include "server/api/translate.h"
#include "server/models/catalog.h"
#include "server/security/clients.h"
#include "server/status/name.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"

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
                                                  const char* method,
                                                  std::function<grpc::Status()> work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto record = std::make_shared<CallRecord>(calls_, method, context);
  threads_.Post(Priority::kNormal, [this, reactor, record, work = std::move(work)] {
    grpc::Status status = Authorize(record->caller());
    if (status.ok() && drain_->draining()) {
      status = ToGrpcStatus(Unavailable("the server is shutting down"), reason::kDraining, "");
    }
    if (status.ok()) status = work();
    record->End(status.error_code(), status.error_message());
    reactor->Finish(status);
  });
  return reactor;
}

grpc::ServerUnaryReactor* ModelAdminService::LoadModel(grpc::CallbackServerContext* context,
                                                       const v1::LoadModelRequest* request,
                                                       v1::LoadModelResponse* response) {
  return Post(context, "denoised.v1.ModelAdmin.LoadModel", [=, this] {
    std::vector<FieldViolation> violations;
    if (!IsName(request->name())) violations.push_back({"name", NotAName(request->name())});
    if (!request->version().empty() && !IsName(request->version())) {
      violations.push_back({"version", NotAName(request->version())});
    }
    std::error_code error;
    const std::string& directory = request->directory();
    if (!directory.empty() && !std::filesystem::is_directory(directory, error)) {
      violations.push_back(
          {"directory", fmt::format("is {}, which is no directory of the server; give the folder "
                                    "that holds model_index.json or config.json",
                                    Quote(directory))});
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
  return Post(context, "denoised.v1.ModelAdmin.UnloadModel", [=, this] {
    if (!IsModelReference(request->name())) {
      return InvalidFields({{"name", NotAReference(request->name())}}, "");
    }
    return ToGrpc(catalog_->Unload(request->name()));
  });
}

grpc::ServerUnaryReactor* ModelAdminService::SetAlias(grpc::CallbackServerContext* context,
                                                      const v1::SetAliasRequest* request,
                                                      v1::SetAliasResponse* response) {
  return Post(context, "denoised.v1.ModelAdmin.SetAlias", [=, this] {
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
  return Post(context, "denoised.v1.ModelAdmin.DeleteAlias", [=, this] {
    if (!IsName(request->alias())) {
      return InvalidFields({{"alias", NotAName(request->alias())}}, "");
    }
    return ToGrpc(catalog_->DeleteAlias(request->alias()));
  });
}

}  // namespace denoised
