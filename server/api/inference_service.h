// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "inference/open_inference.grpc.pb.h"
#include "server/api/generation_call.h"
#include "server/api/server_info.h"
#include "server/models/catalog.h"
#include "server/security/limits.h"

namespace denoised {

/// The Open Inference Protocol for clients of Triton and KServe: another way to ask what
/// ImageGenerationService is asked, with the same queue, limits, metrics and log behind it. No
/// method blocks. What is pointed to must outlive the service, the service its calls.
class InferenceService final : public inference::GRPCInferenceService::CallbackService {
 public:
  InferenceService(const GenerationCallContext& context, const Engine* engine,
                   const Catalog* catalog, const ServerInfo* info, const RequestLimits& limits)
      : context_(context), engine_(engine), catalog_(catalog), info_(info), limits_(limits) {}

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

 private:
  const GenerationCallContext context_;
  const Engine* const engine_;
  const Catalog* const catalog_;
  const ServerInfo* const info_;
  const RequestLimits limits_;
};

}  // namespace denoised
