// SPDX-License-Identifier: Apache-2.0
#include "server/api/service.h"

#include <memory>

#include "server/api/grpc_calls.h"
#include "server/api/translate.h"
#include "server/jobs/generation.h"
#include "server/jobs/jobs.h"
#include "server/jobs/worker_pool.h"

namespace denoised {
namespace {

constexpr char kGenerate[] = "denoised.v1.ImageGeneration.Generate";
constexpr char kStreamGenerate[] = "denoised.v1.ImageGeneration.StreamGenerate";
constexpr char kWatchJob[] = "denoised.v1.ImageGeneration.WatchJob";

}  // namespace

template <typename Request, typename Response>
grpc::ServerUnaryReactor* ImageGenerationService::Answer(
    const char* name, grpc::Status (Methods::*method)(const Request&, CallRecord*, Response*) const,
    grpc::CallbackServerContext* context, const Request* request, Response* response) {
  CallRecord record(context_.calls, name, context);
  return Reply(context, &record, (methods_->*method)(*request, &record, response));
}

grpc::ServerUnaryReactor* ImageGenerationService::Generate(grpc::CallbackServerContext* context,
                                                           const v1::GenerateRequest* request,
                                                           v1::GenerateResponse* response) {
  const auto call = std::make_shared<GrpcUnaryCall>(
      context_, kGenerate, context,
      [response](v1::GenerateResponse* images) {
        response->Swap(images);
        return grpc::Status::OK;
      });
  const Priority priority = ReadPriority(request->params());
  call->Post(priority, [=, this, record = &call->record()](const auto& watcher, auto* refusal) {
    const v1::GenerateRequest taken = Take(request);
    return BeginJob(context_, *record,
                    MakeJobRequest(*record, DeadlineOf(*context), taken.params(), nullptr, true),
                    watcher, refusal);
  });
  return call.get();
}

grpc::ServerWriteReactor<v1::StreamGenerateResponse>* ImageGenerationService::StreamGenerate(
    grpc::CallbackServerContext* context, const v1::StreamGenerateRequest* request) {
  const auto call = std::make_shared<GrpcStreamCall>(context_, kStreamGenerate, context, 0);
  const Priority priority = ReadPriority(request->params());
  call->Post(priority, [=, this, record = &call->record()](const auto& watcher, auto* refusal) {
    const v1::StreamGenerateRequest taken = Take(request);
    const v1::PreviewOptions* preview = taken.has_preview() ? &taken.preview() : nullptr;
    return BeginJob(context_, *record,
                    MakeJobRequest(*record, DeadlineOf(*context), taken.params(), preview, false),
                    watcher, refusal);
  });
  return call.get();
}

grpc::ServerUnaryReactor* ImageGenerationService::GetJob(grpc::CallbackServerContext* context,
                                                         const v1::GetJobRequest* request,
                                                         v1::GetJobResponse* response) {
  return Answer("denoised.v1.ImageGeneration.GetJob", &Methods::GetJob, context, request, response);
}

grpc::ServerUnaryReactor* ImageGenerationService::ListJobs(grpc::CallbackServerContext* context,
                                                           const v1::ListJobsRequest* request,
                                                           v1::ListJobsResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto record =
      std::make_shared<CallRecord>(context_.calls, "denoised.v1.ImageGeneration.ListJobs", context);
  context_.workers->Post(Priority::kNormal, [=, this] {
    const grpc::Status status = methods_->ListJobs(*request, record.get(), response);
    record->End(status.error_code(), status.error_message());
    reactor->Finish(status);
  });
  return reactor;
}

grpc::ServerWriteReactor<v1::StreamGenerateResponse>* ImageGenerationService::WatchJob(
    grpc::CallbackServerContext* context, const v1::WatchJobRequest* request) {
  const auto call =
      std::make_shared<GrpcStreamCall>(context_, kWatchJob, context, request->after_sequence());
  // Nothing is decoded or encoded to begin a watch.
  constexpr Priority kPriority = Priority::kInteractive;
  call->Post(kPriority, [=, this, record = &call->record()](const auto& watcher, auto* refusal) {
    return BeginWatch(context_, *record, request->request_id(),
                      {"after_sequence", request->after_sequence()}, watcher, refusal);
  });
  return call.get();
}

grpc::ServerUnaryReactor* ImageGenerationService::CancelJob(grpc::CallbackServerContext* context,
                                                            const v1::CancelJobRequest* request,
                                                            v1::CancelJobResponse* response) {
  return Answer("denoised.v1.ImageGeneration.CancelJob", &Methods::CancelJob, context, request,
                response);
}

grpc::ServerUnaryReactor* ImageGenerationService::GetServerInfo(
    grpc::CallbackServerContext* context, const v1::GetServerInfoRequest* request,
    v1::GetServerInfoResponse* response) {
  return Answer("denoised.v1.ImageGeneration.GetServerInfo", &Methods::GetServerInfo, context,
                request, response);
}

grpc::ServerUnaryReactor* ImageGenerationService::ListModels(grpc::CallbackServerContext* context,
                                                             const v1::ListModelsRequest* request,
                                                             v1::ListModelsResponse* response) {
  return Answer("denoised.v1.ImageGeneration.ListModels", &Methods::ListModels, context, request,
                response);
}

grpc::ServerUnaryReactor* ImageGenerationService::GetModel(grpc::CallbackServerContext* context,
                                                           const v1::GetModelRequest* request,
                                                           v1::GetModelResponse* response) {
  return Answer("denoised.v1.ImageGeneration.GetModel", &Methods::GetModel, context, request,
                response);
}

}  // namespace denoised
