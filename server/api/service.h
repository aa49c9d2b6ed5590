// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "denoised/v1/image_generation.grpc.pb.h"
#include "server/api/generation_call.h"
#include "server/api/methods.h"

namespace denoised {

using ImageGenerationInBytes = v1::ImageGeneration::WithRawCallbackMethod_Generate<
    v1::ImageGeneration::WithRawCallbackMethod_StreamGenerate<
        v1::ImageGeneration::WithRawCallbackMethod_GetJob<
            v1::ImageGeneration::WithRawCallbackMethod_ListJobs<
                v1::ImageGeneration::WithRawCallbackMethod_WatchJob<
                    v1::ImageGeneration::WithRawCallbackMethod_CancelJob<
                        v1::ImageGeneration::WithRawCallbackMethod_GetServerInfo<
                            v1::ImageGeneration::WithRawCallbackMethod_ListModels<
                                v1::ImageGeneration::WithRawCallbackMethod_GetModel<
                                    v1::ImageGeneration::Service>>>>>>>>>;

/// denoised.v1.ImageGeneration on gRPC's callback API, with messages as bytes. No method blocks:
/// workers and the engine do the work. All pointers must outlive the service, and the service its
/// calls.
class ImageGenerationService final : public ImageGenerationInBytes {
 public:
  ImageGenerationService(const GenerationCallContext& context, const Methods* methods)
      : context_(context), methods_(methods) {}

  grpc::ServerUnaryReactor* Generate(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* StreamGenerate(
      grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* WatchJob(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* CancelJob(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;

 private:
  const GenerationCallContext context_;
  const Methods* const methods_;
};

}  // namespace denoised
