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

grpc::ServerUnaryReactor* ImageGenerationService::Generate(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* request,
                                                           grpc::ByteBuffer* response) {
  const auto call = std::make_shared<GrpcUnaryCall>(
      context_, kGenerate, context,
      [response](v1::GenerateResponse* images) { return Serialize(*images, response); });
  Start<v1::GenerateRequest>(
      context_, call, request,
      [](const v1::GenerateRequest& asked) { return ReadPriority(asked.params()); },
      [=, this, record = &call->record()](const v1::GenerateRequest& asked, const auto& watcher,
                                          auto* refusal) {
        return BeginJob(
            context_, *record,
            MakeJobRequest(*record, DeadlineOf(*context), asked.params(), nullptr, true), watcher,
            refusal);
      });
  return call.get();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* ImageGenerationService::StreamGenerate(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  const auto call = std::make_shared<GrpcStreamCall>(context_, kStreamGenerate, context, 0);
  Start<v1::StreamGenerateRequest>(
      context_, call, request,
      [](const v1::StreamGenerateRequest& asked) { return ReadPriority(asked.params()); },
      [=, this, record = &call->record()](const v1::StreamGenerateRequest& asked,
                                          const auto& watcher, auto* refusal) {
        const v1::PreviewOptions* preview = asked.has_preview() ? &asked.preview() : nullptr;
        return BeginJob(
            context_, *record,
            MakeJobRequest(*record, DeadlineOf(*context), asked.params(), preview, false), watcher,
            refusal);
      });
  return call.get();
}

grpc::ServerUnaryReactor* ImageGenerationService::GetJob(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* response) {
  return Answer(context_, "denoised.v1.ImageGeneration.GetJob", *methods_, &Methods::GetJob,
                context, request, response);
}

grpc::ServerUnaryReactor* ImageGenerationService::ListJobs(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* request,
                                                           grpc::ByteBuffer* response) {
  auto* const reactor = new WatchedReactor(context_.write_watch, context);
  const auto record =
      std::make_shared<CallRecord>(context_.calls, "denoised.v1.ImageGeneration.ListJobs", context);
  context_.workers->Post(Priority::kNormal, ClientKey(record->caller(), record->peer()), [=, this] {
    const grpc::Status status = Respond<v1::ListJobsRequest, v1::ListJobsResponse>(
        context_, request, response,
        [&](const v1::ListJobsRequest& asked, v1::ListJobsResponse* reply) {
          return methods_->ListJobs(asked, record.get(), reply);
        });
    record->End(status.error_code(), status.error_message());
    reactor->Send(status);
  });
  return reactor;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* ImageGenerationService::WatchJob(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request) {
  // The call is made with the event after which it begins.
  const auto asked = std::make_shared<Received<v1::WatchJobRequest>>();
  const grpc::Status parsed = Read(context_, request, asked.get());
  const uint64_t sequence = asked->message.after_sequence();
  const auto call = std::make_shared<GrpcStreamCall>(context_, kWatchJob, context, sequence);
  if (!parsed.ok()) {
    call->Refuse(parsed);
    return call.get();
  }
  // Nothing is decoded or encoded to begin a watch.
  constexpr Priority kPriority = Priority::kInteractive;
  call->Post(kPriority, [=, this, record = &call->record()](const auto& watcher, auto* refusal) {
    return BeginWatch(context_, *record, asked->message.request_id(), {"after_sequence", sequence},
                      watcher, refusal);
  });
  return call.get();
}

grpc::ServerUnaryReactor* ImageGenerationService::CancelJob(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request,
                                                            grpc::ByteBuffer* response) {
  return Answer(context_, "denoised.v1.ImageGeneration.CancelJob", *methods_, &Methods::CancelJob,
                context, request, response);
}

grpc::ServerUnaryReactor* ImageGenerationService::GetServerInfo(
    grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
    grpc::ByteBuffer* response) {
  return Answer(context_, "denoised.v1.ImageGeneration.GetServerInfo", *methods_,
                &Methods::GetServerInfo, context, request, response);
}

grpc::ServerUnaryReactor* ImageGenerationService::ListModels(grpc::CallbackServerContext* context,
                                                             const grpc::ByteBuffer* request,
                                                             grpc::ByteBuffer* response) {
  return Answer(context_, "denoised.v1.ImageGeneration.ListModels", *methods_, &Methods::ListModels,
                context, request, response);
}

grpc::ServerUnaryReactor* ImageGenerationService::GetModel(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* request,
                                                           grpc::ByteBuffer* response) {
  return Answer(context_, "denoised.v1.ImageGeneration.GetModel", *methods_, &Methods::GetModel,
                context, request, response);
}

}  // namespace denoised
