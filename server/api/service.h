// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "denoised/v1/image_generation.grpc.pb.h"
#include "server/api/generation_call.h"
#include "server/api/methods.h"

namespace denoised {

/// denoised.v1.ImageGeneration on gRPC's callback API. No method blocks: workers and the engine do
/// the work. All pointers must outlive the service, and the service its calls.
class ImageGenerationService final : public v1::ImageGeneration::CallbackService {
 public:
  ImageGenerationService(const GenerationCallContext& context, const Methods* methods)
      : context_(context), methods_(methods) {}

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
  /// Ends a call that has nothing to wait for.
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Answer(const char* name,
                                   grpc::Status (Methods::*method)(const Request&, CallRecord*,
                                                                   Response*) const,
                                   grpc::CallbackServerContext* context, const Request* request,
                                   Response* response);

  const GenerationCallContext context_;
  const Methods* const methods_;
};

}  // namespace denoised
