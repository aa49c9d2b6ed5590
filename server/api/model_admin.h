// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "denoised/v1/model_admin.grpc.pb.h"
#include "server/api/call_record.h"
#include "server/api/server_info.h"
#include "server/jobs/drain.h"
#include "server/jobs/worker_pool.h"
#include "server/models/catalog.h"
#include "server/security/limits.h"

namespace denoised {

/// What an admin wants to change, for the log.
struct ModelChange {
  const char* verb;       // "load", "unload", ...
  std::string model;      // "name" or "name@version"
  std::string directory;  // of a load; empty: where the current version came from
  std::string alias;
};

/// denoised.v1.ModelAdmin on gRPC's callback API. Its calls wait for the device and for requests to
/// end, so they have threads of their own. What is pointed to must outlive the service, the service
/// its calls.
class ModelAdminService final : public v1::ModelAdmin::CallbackService {
 public:
  ModelAdminService(Calls* calls, Catalog* catalog, const DrainProgress* drain,
                    const ServerInfo* info, const RequestLimits& limits)
      : calls_(calls), catalog_(catalog), drain_(drain), info_(info), limits_(limits) {}

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
  /// Runs `work` on a thread that may wait, if the caller is an admin. `change` goes to the log,
  /// with the caller and what came of it.
  grpc::ServerUnaryReactor* Post(grpc::CallbackServerContext* context, const char* method,
                                 ModelChange change, std::function<grpc::Status()> work);

  Calls* const calls_;
  Catalog* const catalog_;
  const DrainProgress* const drain_;
  const ServerInfo* const info_;
  const RequestLimits limits_;
  WorkerPool threads_{4};
};

}  // namespace denoised
