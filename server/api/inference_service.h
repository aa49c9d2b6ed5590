// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>

#include "inference/open_inference.grpc.pb.h"
#include "server/api/admin_calls.h"
#include "server/api/generation_call.h"
#include "server/api/server_info.h"
#include "server/models/catalog.h"
#include "server/security/limits.h"
#include "server/telemetry/request_totals.h"

namespace denoised {

/// The Open Inference Protocol for clients of Triton and KServe. Requests share the queue, limits,
/// metrics and log of ImageGenerationService, and Triton's extensions those of ModelAdminService.
/// No method blocks. All pointers must outlive the service, and the service its calls.
class InferenceService final : public inference::GRPCInferenceService::CallbackService {
 public:
  /// `admin` is null if nobody may change models.
  InferenceService(const GenerationCallContext& context, const Engine* engine, Catalog* catalog,
                   const ServerInfo* info, const RequestLimits& limits, MemoryBudget* decoding,
                   const RequestTotals* totals, AdminCalls* admin)
      : context_(context),
        engine_(engine),
        catalog_(catalog),
        info_(info),
        limits_(limits),
        decoding_(decoding),
        totals_(totals),
        admin_(admin) {}

  grpc::ServerUnaryReactor* ServerLive(grpc::CallbackServerContext* context,
                                       const inference::ServerLiveRequest* request,
                                       inference::ServerLiveResponse* response) override;
  grpc::ServerUnaryReactor* ServerReady(grpc::CallbackServerContext* context,
                                        const inference::ServerReadyRequest* request,
                                        inference::ServerReadyResponse* response) override;
  grpc::ServerUnaryReactor* ModelReady(grpc::CallbackServerContext* context,
                                       const inference::ModelReadyRequest* request,
                                       inference::ModelReadyResponse* response) override;
  grpc::ServerUnaryReactor* ServerMetadata(grpc::CallbackServerContext* context,
                                           const inference::ServerMetadataRequest* request,
                                           inference::ServerMetadataResponse* response) override;
  grpc::ServerUnaryReactor* ModelMetadata(grpc::CallbackServerContext* context,
                                          const inference::ModelMetadataRequest* request,
                                          inference::ModelMetadataResponse* response) override;
  grpc::ServerUnaryReactor* ModelInfer(grpc::CallbackServerContext* context,
                                       const inference::ModelInferRequest* request,
                                       inference::ModelInferResponse* response) override;
  grpc::ServerUnaryReactor* ModelConfig(grpc::CallbackServerContext* context,
                                        const inference::ModelConfigRequest* request,
                                        inference::ModelConfigResponse* response) override;
  grpc::ServerUnaryReactor* ModelStatistics(grpc::CallbackServerContext* context,
                                            const inference::ModelStatisticsRequest* request,
                                            inference::ModelStatisticsResponse* response) override;
  grpc::ServerUnaryReactor* RepositoryIndex(grpc::CallbackServerContext* context,
                                            const inference::RepositoryIndexRequest* request,
                                            inference::RepositoryIndexResponse* response) override;
  grpc::ServerUnaryReactor* RepositoryModelLoad(
      grpc::CallbackServerContext* context, const inference::RepositoryModelLoadRequest* request,
      inference::RepositoryModelLoadResponse* response) override;
  grpc::ServerUnaryReactor* RepositoryModelUnload(
      grpc::CallbackServerContext* context, const inference::RepositoryModelUnloadRequest* request,
      inference::RepositoryModelUnloadResponse* response) override;

 private:
  /// The model that a request names. Returns nothing and sets `status` if it cannot draw now. Its
  /// name goes into the record either way.
  template <typename Request>
  std::optional<CatalogModel> SelectReady(const Request& request, CallRecord* record,
                                          grpc::Status* status) const;
  /// AdminCalls::Post, or UNIMPLEMENTED if nobody may change models.
  grpc::ServerUnaryReactor* PostChange(grpc::CallbackServerContext* context, const char* method,
                                       ModelChange change, std::function<grpc::Status()> work);

  const GenerationCallContext context_;
  const Engine* const engine_;
  Catalog* const catalog_;
  const ServerInfo* const info_;
  const RequestLimits limits_;
  MemoryBudget* const decoding_;
  const RequestTotals* const totals_;
  AdminCalls* const admin_;
};

}  // namespace denoised
