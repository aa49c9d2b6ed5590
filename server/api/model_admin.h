// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "denoised/v1/model_admin.grpc.pb.h"
#include "server/api/admin_calls.h"
#include "server/api/generation_call.h"
#include "server/api/server_info.h"
#include "server/models/catalog.h"
#include "server/security/limits.h"

namespace denoised {

using ModelAdminInBytes = v1::ModelAdmin::WithRawCallbackMethod_LoadModel<
    v1::ModelAdmin::WithRawCallbackMethod_UnloadModel<
        v1::ModelAdmin::WithRawCallbackMethod_SetAlias<
            v1::ModelAdmin::WithRawCallbackMethod_DeleteAlias<v1::ModelAdmin::Service>>>>;

/// The methods of denoised.v1.ModelAdmin, whatever carries the call. They may wait for the device
/// and for requests to end; AdminCalls runs them. Thread-safe; what is pointed to must outlive it.
class ModelChanges {
 public:
  ModelChanges(Catalog* catalog, const ServerInfo* info, const RequestLimits& limits)
      : catalog_(catalog), info_(info), limits_(limits) {}

  grpc::Status Make(const v1::LoadModelRequest& request, v1::LoadModelResponse* response) const;
  grpc::Status Make(const v1::UnloadModelRequest& request, v1::UnloadModelResponse* response) const;
  grpc::Status Make(const v1::SetAliasRequest& request, v1::SetAliasResponse* response) const;
  grpc::Status Make(const v1::DeleteAliasRequest& request, v1::DeleteAliasResponse* response) const;

  /// What a request wants, for the log.
  static ModelChange Describe(const v1::LoadModelRequest& request);
  static ModelChange Describe(const v1::UnloadModelRequest& request);
  static ModelChange Describe(const v1::SetAliasRequest& request);
  static ModelChange Describe(const v1::DeleteAliasRequest& request);

 private:
  Catalog* const catalog_;
  const ServerInfo* const info_;
  const RequestLimits limits_;
};

/// denoised.v1.ModelAdmin on gRPC's callback API, with messages as bytes. All pointers must outlive
/// the service, and the service its calls.
class ModelAdminService final : public ModelAdminInBytes {
 public:
  ModelAdminService(const GenerationCallContext& context, AdminCalls* admin,
                    const ModelChanges* changes)
      : context_(context), admin_(admin), changes_(changes) {}

  grpc::ServerUnaryReactor* LoadModel(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* UnloadModel(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* SetAlias(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* DeleteAlias(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;

 private:
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Change(grpc::CallbackServerContext* context, const char* method,
                                   const grpc::ByteBuffer* request, grpc::ByteBuffer* response);

  const GenerationCallContext context_;
  AdminCalls* const admin_;
  const ModelChanges* const changes_;
};

}  // namespace denoised
