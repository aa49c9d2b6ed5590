#include "server/service.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "server/catalog.h"
#include "server/generation.h"
#include "server/outbox.h"
#include "server/status_details.h"
#include "server/translate.h"
#include "server/worker_pool.h"
#include "server/write_watch.h"

namespace denoised {
namespace {

/// gRPC's deadline, a point of the wall clock, on the steady clock.
std::optional<std::chrono::steady_clock::time_point> Deadline(
    const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  const auto left = deadline - std::chrono::system_clock::now();
  if (deadline == std::chrono::system_clock::time_point::max() ||
      left > std::chrono::hours(24 * 365)) {
    return std::nullopt;
  }
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(left);
}

/// The call as its client saw it: a reply that could not be delivered was cancelled.
grpc::StatusCode SeenCode(const grpc::Status& status, const grpc::CallbackServerContext& context) {
  return status.ok() && context.IsCancelled() ? grpc::StatusCode::CANCELLED : status.error_code();
}

/// Generate: gathers the images into one reply. gRPC deletes it through OnDone, after Finish.
class UnaryCall final : public grpc::ServerUnaryReactor, public GenerationSink {
 public:
  UnaryCall(Serving* serving, ActiveCalls* active, grpc::CallbackServerContext* context,
            const v1::GenerateRequest* request, v1::GenerateResponse* response)
      : context_(context),
        response_(response),
        record_(*serving, active, "denoised.v1.ImageGeneration.Generate", context),
        generation_(std::make_shared<Generation>(serving, request->params(), nullptr, true,
                                                 Deadline(*context), &record_, this)) {
    serving->workers->Post([generation = generation_] { generation->Start(); });
  }

  void OnQueued(const v1::EffectiveParams& params, int) override {
    *response_->mutable_params() = params;
  }
  void OnStarted(double) override {}
  void OnProgress(int, int) override {}
  void OnPreview(int, int, v1::Image) override {}
  void OnImage(v1::Image image) override { *response_->add_images() = std::move(image); }

  void OnEnd(const grpc::Status& status, const v1::Timing& timing) override {
    auto& images = *response_->mutable_images();
    std::sort(images.pointer_begin(), images.pointer_end(),
              [](const v1::Image* a, const v1::Image* b) { return a->index() < b->index(); });
    *response_->mutable_timing() = timing;
    status_ = status;
    Finish(status);
  }

  void OnCancel() override { generation_->Cancel(); }

  void OnDone() override {
    record_.End(SeenCode(status_, *context_), status_.error_message());
    delete this;
  }

 private:
  grpc::CallbackServerContext* const context_;
  v1::GenerateResponse* const response_;
  CallRecord record_;
  grpc::Status status_;
  const std::shared_ptr<Generation> generation_;
};

/// StreamGenerate: one write in flight, the rest waits in the outbox. Whoever sets writing_ owns
/// message_ and the right to call gRPC, which is never called with the lock held. gRPC deletes it
/// through OnDone, after Finish.
class StreamCall final : public grpc::ServerWriteReactor<v1::StreamGenerateResponse>,
                         public GenerationSink {
 public:
  StreamCall(Serving* serving, ActiveCalls* active, grpc::CallbackServerContext* context,
             const v1::StreamGenerateRequest* request)
      : context_(context),
        watch_(serving->write_watch),
        record_(*serving, active, "denoised.v1.ImageGeneration.StreamGenerate", context),
        generation_(std::make_shared<Generation>(
            serving, request->params(), request->has_preview() ? &request->preview() : nullptr,
            false, Deadline(*context), &record_, this)) {
    serving->workers->Post([generation = generation_] { generation->Start(); });
  }

  void OnQueued(const v1::EffectiveParams& params, int images_ahead) override {
    params_ = params;
    outbox_.set_request_id(params.request_id());
    v1::StreamGenerateResponse event;
    *event.mutable_queued()->mutable_params() = params;
    event.mutable_queued()->set_images_ahead(images_ahead);
    Push(std::move(event));
  }

  void OnStarted(double queued_seconds) override {
    v1::StreamGenerateResponse event;
    event.mutable_started()->set_queued_seconds(queued_seconds);
    Push(std::move(event));
  }

  void OnProgress(int done, int total) override {
    v1::StreamGenerateResponse event;
    event.mutable_progress()->set_evaluations_done(done);
    event.mutable_progress()->set_evaluations_total(total);
    Push(std::move(event));
  }

  void OnPreview(int evaluation, int evaluations, v1::Image image) override {
    v1::StreamGenerateResponse event;
    event.mutable_preview()->set_evaluation(evaluation);
    event.mutable_preview()->set_evaluations(evaluations);
    *event.mutable_preview()->mutable_image() = std::move(image);
    Push(std::move(event));
  }

  void OnImage(v1::Image image) override {
    v1::StreamGenerateResponse event;
    *event.mutable_image()->mutable_image() = std::move(image);
    Push(std::move(event));
  }

  void OnEnd(const grpc::Status& status, const v1::Timing& timing) override {
    std::unique_lock lock(mutex_);
    if (status.ok()) {
      v1::StreamGenerateResponse event;
      *event.mutable_completed()->mutable_params() = params_;
      *event.mutable_completed()->mutable_timing() = timing;
      outbox_.Push(std::move(event));
    }
    status_ = status;
    Advance(std::move(lock));
  }

  void OnWriteDone(bool ok) override {
    watch_->Disarm(context_);
    if (!ok) generation_->Cancel();
    std::unique_lock lock(mutex_);
    writing_ = false;
    if (!ok) broken_ = true;
    Advance(std::move(lock));
  }

  void OnCancel() override {
    generation_->Cancel();
    std::unique_lock lock(mutex_);
    broken_ = true;
    Advance(std::move(lock));
  }

  void OnDone() override {
    record_.End(SeenCode(*status_, *context_), status_->error_message());
    delete this;
  }

 private:
  void Push(v1::StreamGenerateResponse event) {
    std::unique_lock lock(mutex_);
    outbox_.Push(std::move(event));
    Advance(std::move(lock));
  }

  /// Takes the next step that gRPC allows: a write, or, when all is said, Finish.
  void Advance(std::unique_lock<std::mutex> lock) {
    if (writing_ || finished_) return;
    if (broken_) outbox_.Clear();
    if (auto event = outbox_.Pop()) {
      message_ = *std::move(event);
      writing_ = true;
      lock.unlock();
      watch_->Arm(context_);
      StartWrite(&message_);
    } else if (status_) {
      finished_ = true;
      const grpc::Status status = *status_;
      lock.unlock();
      Finish(status);  // the call may be gone now
    }
  }

  grpc::CallbackServerContext* const context_;
  WriteWatch* const watch_;
  CallRecord record_;
  v1::EffectiveParams params_;

  std::mutex mutex_;
  Outbox outbox_;                       // guarded by mutex_
  bool writing_ = false;                // guarded by mutex_
  bool broken_ = false;                 // guarded by mutex_; nobody reads any more
  bool finished_ = false;               // guarded by mutex_
  std::optional<grpc::Status> status_;  // guarded by mutex_; how the generation ended
  v1::StreamGenerateResponse message_;  // the write in flight

  const std::shared_ptr<Generation> generation_;
};

grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, CallRecord* record,
                                const grpc::Status& status) {
  record->End(status.error_code(), status.error_message());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(status);
  return reactor;
}

}  // namespace

grpc::ServerUnaryReactor* ImageGenerationService::Generate(grpc::CallbackServerContext* context,
                                                           const v1::GenerateRequest* request,
                                                           v1::GenerateResponse* response) {
  return new UnaryCall(serving_, &active_, context, request, response);
}

grpc::ServerWriteReactor<v1::StreamGenerateResponse>* ImageGenerationService::StreamGenerate(
    grpc::CallbackServerContext* context, const v1::StreamGenerateRequest* request) {
  return new StreamCall(serving_, &active_, context, request);
}

grpc::ServerUnaryReactor* ImageGenerationService::ListModels(grpc::CallbackServerContext* context,
                                                             const v1::ListModelsRequest*,
                                                             v1::ListModelsResponse* response) {
  CallRecord record(*serving_, &active_, "denoised.v1.ImageGeneration.ListModels", context);
  const RequestLimits limits = Within(record.caller().limits, serving_->limits);
  for (const auto& model : serving_->catalog->All()) {
    *response->add_models() = ToProto(*model, serving_->engine->DeviceName(), limits);
  }
  return Reply(context, &record, grpc::Status::OK);
}

grpc::ServerUnaryReactor* ImageGenerationService::GetModel(grpc::CallbackServerContext* context,
                                                           const v1::GetModelRequest* request,
                                                           v1::GetModelResponse* response) {
  CallRecord record(*serving_, &active_, "denoised.v1.ImageGeneration.GetModel", context);
  grpc::Status status;
  if (const auto model = serving_->catalog->Select(request->name(), "name", "", &status)) {
    record.model = model->name;
    *response->mutable_model() = ToProto(*model, serving_->engine->DeviceName(),
                                         Within(record.caller().limits, serving_->limits));
  }
  return Reply(context, &record, status);
}

}  // namespace denoised
