// SPDX-License-Identifier: Apache-2.0
#include "server/api/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/core/mutex.h"
#include "server/api/generation_call.h"
#include "server/api/server_info.h"
#include "server/api/translate.h"
#include "server/jobs/generation.h"
#include "server/jobs/jobs.h"
#include "server/jobs/worker_pool.h"
#include "server/models/catalog.h"
#include "server/security/clients.h"
#include "server/status/model_name.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

constexpr char kGenerate[] = "denoised.v1.ImageGeneration.Generate";
constexpr char kStreamGenerate[] = "denoised.v1.ImageGeneration.StreamGenerate";
constexpr char kWatchJob[] = "denoised.v1.ImageGeneration.WatchJob";

/// StreamGenerate and WatchJob: one write in flight, the rest waits in the generation's log.
/// The thread that sets writing_ owns message_ and may call gRPC.
class StreamCall final : public grpc::ServerWriteReactor<v1::StreamGenerateResponse>,
                         public GenerationCall {
 public:
  /// `sequence`: events up to it are known.
  StreamCall(const GenerationCallContext& context, const char* method,
             grpc::CallbackServerContext* grpc_context, uint64_t sequence)
      : GenerationCall(context, method, grpc_context), sequence_(sequence) {}

  void OnWriteDone(bool ok) override {
    context_.write_watch->Disarm(grpc_context_);
    if (ok && message_->has_image() && generation_->include_timings()) {
      sent_.AddImage(v1::TimelineEntry::MILESTONE_SENT, generation_->SecondsSinceArrival(),
                     message_->image().image().index());
    }
    {
      MutexLock lock(&mutex_);
      writing_ = false;
    }
    if (!ok) return Break();
    Advance();
  }

  void OnCancel() override { Break(); }
  void OnDone() override { End(); }

 private:
  void Advance() override {
    std::optional<grpc::Status> end;
    {
      MutexLock lock(&mutex_);
      if (!begun_ || writing_ || finished_) return;
      end = EndWithoutGeneration();
      if (!end) {
        Generation::News news = generation_->Next(this, sequence_);
        if (news.event != nullptr) {
          writing_ = true;
          sequence_ = news.event->sequence();
          message_ = Completed(std::move(news.event));
        } else if (news.end) {
          end = std::move(news.end);
        } else {
          return;
        }
      }
      finished_ = end.has_value();
    }
    if (!end) {
      context_.write_watch->Arm(grpc_context_);
      return StartWrite(message_.get());
    }
    status_ = *end;
    Finish(*end);  // the call may be deleted now, unless the caller holds it
  }

  /// `event`; a timeline in it gets what was sent on this stream.
  std::shared_ptr<const EventLog::Event> Completed(std::shared_ptr<const EventLog::Event> event) {
    if (!event->completed().has_timeline()) return event;
    auto completed = std::make_shared<EventLog::Event>(*event);
    completed->mutable_completed()->mutable_timeline()->MergeFrom(sent_.ToProto());
    return completed;
  }

  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_);       // of the last event taken
  std::shared_ptr<const EventLog::Event> message_;  // the write in flight
  Timeline sent_;
};

/// Whether the caller may ask for it; `before` is what the token says.
grpc::Status CheckListJobs(const v1::ListJobsRequest& request, const Caller& caller,
                           uint64_t* before) {
  if (caller.anonymous() && !caller.admin) {
    return ToGrpcStatus(
        absl::PermissionDeniedError(
            "callers without a name may not list jobs, as the ids of all of them would be told; "
            "ask for a job by its request_id, or ask the server's operator for a token"),
        reason::kNotAdmin, "");
  }
  if (request.all_clients() && !caller.admin) {
    return ToGrpcStatus(
        absl::PermissionDeniedError(fmt::format(
            "all_clients: client \"{}\" sees its own jobs alone; leave all_clients out, or give it "
            "\"admin\": true in the file of clients",
            caller.name)),
        reason::kNotAdmin, "");
  }
  std::vector<FieldViolation> violations;
  if (request.page_size() < 0) {
    violations.push_back(
        {"page_size", fmt::format("is {}; use 1 to 1000, or 0 for 100", request.page_size())});
  }
  const std::string& token = request.page_token();
  if (!token.empty()) {
    const auto [end, error] = std::from_chars(token.data(), token.data() + token.size(), *before);
    if (error != std::errc() || end != token.data() + token.size()) {
      violations.push_back({"page_token", fmt::format("is {}; use next_page_token of the reply "
                                                      "before, or none for the first page",
                                                      Quote(token))});
    }
  }
  return violations.empty() ? grpc::Status::OK : InvalidFields(violations, "");
}

}  // namespace

grpc::ServerUnaryReactor* ImageGenerationService::Generate(grpc::CallbackServerContext* context,
                                                           const v1::GenerateRequest* request,
                                                           v1::GenerateResponse* response) {
  const auto call = std::make_shared<UnaryCall>(
      context_, kGenerate, context,
      [response](v1::GenerateResponse* images) { response->Swap(images); });
  const Priority priority = ReadPriority(request->params());
  call->Post(priority, [=, this, record = &call->record()](const auto& watcher, auto* refusal) {
    return context_.jobs->Begin(MakeJobRequest(*context, *record, request->params(), nullptr, true),
                                watcher, refusal);
  });
  return call.get();
}

grpc::ServerWriteReactor<v1::StreamGenerateResponse>* ImageGenerationService::StreamGenerate(
    grpc::CallbackServerContext* context, const v1::StreamGenerateRequest* request) {
  const auto call = std::make_shared<StreamCall>(context_, kStreamGenerate, context, 0);
  const Priority priority = ReadPriority(request->params());
  call->Post(priority, [=, this, record = &call->record()](const auto& watcher, auto* refusal) {
    const v1::PreviewOptions* preview = request->has_preview() ? &request->preview() : nullptr;
    return context_.jobs->Begin(
        MakeJobRequest(*context, *record, request->params(), preview, false), watcher, refusal);
  });
  return call.get();
}

grpc::ServerUnaryReactor* ImageGenerationService::GetJob(grpc::CallbackServerContext* context,
                                                         const v1::GetJobRequest* request,
                                                         v1::GetJobResponse* response) {
  CallRecord record(context_.calls, "denoised.v1.ImageGeneration.GetJob", context);
  grpc::Status status;
  if (const auto generation =
          context_.jobs->Find(record.caller().name, request->request_id(), &status)) {
    record.Describe(*generation);
    *response->mutable_job() = context_.jobs->Describe(*generation);
  }
  return Reply(context, &record, status);
}

grpc::ServerUnaryReactor* ImageGenerationService::ListJobs(grpc::CallbackServerContext* context,
                                                           const v1::ListJobsRequest* request,
                                                           v1::ListJobsResponse* response) {
  constexpr int kPageSize = 100, kMaxPageSize = 1000;
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto record =
      std::make_shared<CallRecord>(context_.calls, "denoised.v1.ImageGeneration.ListJobs", context);
  // There may be many to look through.
  context_.workers->Post(Priority::kNormal, [=, this] {
    uint64_t before = std::numeric_limits<uint64_t>::max();
    grpc::Status status = CheckListJobs(*request, record->caller(), &before);
    if (status.ok()) {
      std::optional<std::string> client;
      if (!request->all_clients()) client = record->caller().name;
      const int size = request->page_size() == 0 ? kPageSize : request->page_size();
      *response = context_.jobs->List(client, std::min(size, kMaxPageSize), before);
    }
    record->End(status.error_code(), status.error_message());
    reactor->Finish(status);
  });
  return reactor;
}

grpc::ServerWriteReactor<v1::StreamGenerateResponse>* ImageGenerationService::WatchJob(
    grpc::CallbackServerContext* context, const v1::WatchJobRequest* request) {
  const auto call =
      std::make_shared<StreamCall>(context_, kWatchJob, context, request->after_sequence());
  // Nothing is decoded or encoded to begin a watch.
  constexpr Priority kPriority = Priority::kInteractive;
  call->Post(kPriority, [=, this, record = &call->record()](const auto& watcher, auto* refusal) {
    auto generation = context_.jobs->Find(record->caller().name, request->request_id(), refusal);
    if (generation) generation->Watch(watcher);
    return generation;
  });
  return call.get();
}

grpc::ServerUnaryReactor* ImageGenerationService::CancelJob(grpc::CallbackServerContext* context,
                                                            const v1::CancelJobRequest* request,
                                                            v1::CancelJobResponse* response) {
  CallRecord record(context_.calls, "denoised.v1.ImageGeneration.CancelJob", context);
  grpc::Status status;
  if (const auto generation =
          context_.jobs->Find(record.caller().name, request->request_id(), &status)) {
    record.Describe(*generation);
    *response->mutable_job() = context_.jobs->Describe(*generation);
    generation->Cancel(EndReason::kCancelled);
  }
  return Reply(context, &record, status);
}

grpc::ServerUnaryReactor* ImageGenerationService::GetServerInfo(
    grpc::CallbackServerContext* context, const v1::GetServerInfoRequest*,
    v1::GetServerInfoResponse* response) {
  CallRecord record(context_.calls, "denoised.v1.ImageGeneration.GetServerInfo", context);
  *response = info_->Describe(record.caller());
  return Reply(context, &record, grpc::Status::OK);
}

grpc::ServerUnaryReactor* ImageGenerationService::ListModels(grpc::CallbackServerContext* context,
                                                             const v1::ListModelsRequest*,
                                                             v1::ListModelsResponse* response) {
  CallRecord record(context_.calls, "denoised.v1.ImageGeneration.ListModels", context);
  const RequestLimits limits = Within(record.caller().limits, limits_);
  for (CatalogModel& model : catalog_->All()) {
    *response->add_models() =
        ToProto(ShownTo(record.caller().admin, std::move(model)), info_->DeviceNames(), limits);
  }
  return Reply(context, &record, grpc::Status::OK);
}

grpc::ServerUnaryReactor* ImageGenerationService::GetModel(grpc::CallbackServerContext* context,
                                                           const v1::GetModelRequest* request,
                                                           v1::GetModelResponse* response) {
  CallRecord record(context_.calls, "denoised.v1.ImageGeneration.GetModel", context);
  grpc::Status status;
  if (const auto model = catalog_->Select(request->name(), "name", "", &status)) {
    record.model = EngineName(model->name, model->version);
    *response->mutable_model() =
        ToProto(ShownTo(record.caller().admin, *model), info_->DeviceNames(),
                Within(record.caller().limits, limits_));
  }
  return Reply(context, &record, status);
}

}  // namespace denoised
