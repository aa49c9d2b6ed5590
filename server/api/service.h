// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "denoised/v1/image_generation.grpc.pb.h"
#include "server/api/generation_call.h"
#include "server/api/server_info.h"
#include "server/api/write_watch.h"
#include "server/models/catalog.h"
#include "server/security/limits.h"

namespace denoised {

/// denoised.v1.ImageGeneration on gRPC's callback API. No method blocks: work is done by the
/// workers and the engine. What is pointed to must outlive the service, the service its calls.
class ImageGenerationService final : public v1::ImageGeneration::CallbackService {
 public:
  ImageGenerationService(const GenerationCallContext& context, const Catalog* catalog,
                         const ServerInfo* info, const RequestLimits& limits)
      : context_(context), catalog_(catalog), info_(info), limits_(limits) {}

  grpc::ServerUnaryReactor* Generate(grpc::CallbackServerContext* context,
                                     const v1::GenerateRequest* request,
                                     v1::GenerateResponse* response) override;
  grpc::ServerWriteReactor<v1::StreamGenerateResponse>* StreamGenerate(
      grpc::CallbackServerContext* context, const v1::StreamGenerateRequest* request) override;
  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context,
                                   const v1::GetJobRequest* request,
                                   v1::GetJobResponse* response) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context,
                                     const v1::ListJobsRequest* request,
                                     v1::ListJobsResponse* response) override;
  grpc::ServerWriteReactor<v1::StreamGenerateResponse>* WatchJob(
      grpc::CallbackServerContext* context, const v1::WatchJobRequest* request) override;
  grpc::ServerUnaryReactor* CancelJob(grpc::CallbackServerContext* context,
                                      const v1::CancelJobRequest* request,
                                      v1::CancelJobResponse* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;

 private:
  const GenerationCallContext context_;
  const Catalog* const catalog_;
  const ServerInfo* const info_;
  const RequestLimits limits_;
};

}  // namespace denoised
