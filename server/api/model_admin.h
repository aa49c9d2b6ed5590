// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "denoised/v1/model_admin.grpc.pb.h"
#include "server/api/admin_calls.h"
#include "server/api/server_info.h"
#include "server/models/catalog.h"
#include "server/security/limits.h"

namespace denoised {

/// denoised.v1.ModelAdmin on gRPC's callback API. What is pointed to must outlive the service, the
/// service its calls.
class ModelAdminService final : public v1::ModelAdmin::CallbackService {
 public:
  ModelAdminService(AdminCalls* admin, Catalog* catalog, const ServerInfo* info,
                    const RequestLimits& limits)
      : admin_(admin), catalog_(catalog), info_(info), limits_(limits) {}

  grpc::ServerUnaryReactor* LoadModel(grpc::CallbackServerContext* context,
                                      const v1::LoadModelRequest* request,
                                      v1::LoadModelResponse* response) override;
  grpc::ServerUnaryReactor* UnloadModel(grpc::CallbackServerContext* context,
                                        const v1::UnloadModelRequest* request,
                                        v1::UnloadModelResponse* response) override;
  grpc::ServerUnaryReactor* SetAlias(grpc::CallbackServerContext* context,
                                     const v1::SetAliasRequest* request,
                                     v1::SetAliasResponse* response) override;
  grpc::ServerUnaryReactor* DeleteAlias(grpc::CallbackServerContext* context,
                                        const v1::DeleteAliasRequest* request,
                                        v1::DeleteAliasResponse* response) override;

 private:
  AdminCalls* const admin_;
  Catalog* const catalog_;
  const ServerInfo* const info_;
  const RequestLimits limits_;
};

}  // namespace denoised
