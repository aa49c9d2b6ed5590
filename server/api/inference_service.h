// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "inference/open_inference.grpc.pb.h"
#include "server/api/admin_calls.h"
#include "server/api/generation_call.h"
#include "server/api/server_info.h"
#include "server/models/catalog.h"
#include "server/security/limits.h"
#include "server/telemetry/request_totals.h"

namespace denoised {

using InferenceInBytes = inference::GRPCInferenceService::WithRawCallbackMethod_ServerLive<
    inference::GRPCInferenceService::WithRawCallbackMethod_ServerReady<
        inference::GRPCInferenceService::WithRawCallbackMethod_ModelReady<
            inference::GRPCInferenceService::WithRawCallbackMethod_ServerMetadata<
                inference::GRPCInferenceService::WithRawCallbackMethod_ModelMetadata<
                    inference::GRPCInferenceService::WithRawCallbackMethod_ModelInfer<
                        inference::GRPCInferenceService::WithRawCallbackMethod_ModelConfig<
                            inference::GRPCInferenceService::WithRawCallbackMethod_ModelStatistics<
                                inference::GRPCInferenceService::
                                    WithRawCallbackMethod_RepositoryIndex<
                                        inference::GRPCInferenceService::
                                            WithRawCallbackMethod_RepositoryModelLoad<
                                                inference::GRPCInferenceService::
                                                    WithRawCallbackMethod_RepositoryModelUnload<
                                                        inference::GRPCInferenceService::
                                                            Service>>>>>>>>>>>;

/// The Open Inference Protocol for clients of Triton and KServe. Requests share the queue, limits,
/// metrics and log of ImageGenerationService, and Triton's extensions those of ModelAdminService.
/// No method blocks. Messages are bytes. All pointers must outlive the service, and the service its
/// calls.
class InferenceService final : public InferenceInBytes {
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
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ServerReady(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ModelReady(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ServerMetadata(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ModelMetadata(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ModelInfer(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ModelConfig(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ModelStatistics(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* RepositoryIndex(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* RepositoryModelLoad(grpc::CallbackServerContext* context,
                                                const grpc::ByteBuffer* request,
                                                grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* RepositoryModelUnload(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) override;

 private:
  /// The model that a request names. Returns nothing and sets `status` if it cannot draw now. Its
  /// name goes into the record either way.
  template <typename Request>
  std::optional<CatalogModel> SelectReady(const Request& request, CallRecord* record,
                                          grpc::Status* status) const;
  /// Calls that have nothing to wait for: each fills in the reply and says in the record what was
  /// asked for.
  grpc::Status FillServerLive(const inference::ServerLiveRequest& request, CallRecord* record,
                              inference::ServerLiveResponse* response) const;
  grpc::Status FillServerReady(const inference::ServerReadyRequest& request, CallRecord* record,
                               inference::ServerReadyResponse* response) const;
  grpc::Status FillModelReady(const inference::ModelReadyRequest& request, CallRecord* record,
                              inference::ModelReadyResponse* response) const;
  grpc::Status FillServerMetadata(const inference::ServerMetadataRequest& request,
                                  CallRecord* record,
                                  inference::ServerMetadataResponse* response) const;
  grpc::Status FillModelMetadata(const inference::ModelMetadataRequest& request, CallRecord* record,
                                 inference::ModelMetadataResponse* response) const;
  grpc::Status FillModelConfig(const inference::ModelConfigRequest& request, CallRecord* record,
                               inference::ModelConfigResponse* response) const;
  grpc::Status FillModelStatistics(const inference::ModelStatisticsRequest& request,
                                   CallRecord* record,
                                   inference::ModelStatisticsResponse* response) const;
  grpc::Status FillRepositoryIndex(const inference::RepositoryIndexRequest& request,
                                   CallRecord* record,
                                   inference::RepositoryIndexResponse* response) const;
  /// Has `work` change the models as a message asks. UNIMPLEMENTED if nobody may.
  template <typename Request, typename Response, typename Work>
  grpc::ServerUnaryReactor* Change(grpc::CallbackServerContext* context, const char* method,
                                   const char* verb, const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response, Work work);

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
