#pragma once

#include "inference/open_inference.grpc.pb.h"
#include "server/serving.h"

namespace denoised {

/// The Open Inference Protocol for clients of Triton and KServe: another way to ask what
/// ImageGenerationService is asked, with the same queue, limits, metrics and log behind it. No
/// method blocks. `serving` must outlive the service, the service its calls.
class InferenceService final : public inference::GRPCInferenceService::CallbackService {
 public:
  explicit InferenceService(Serving* serving) : serving_(serving) {}

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
  Serving* const serving_;
};

}  // namespace denoised
