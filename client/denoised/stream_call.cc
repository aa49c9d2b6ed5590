// SPDX-License-Identifier: Apache-2.0
#include "denoised/stream_call.h"

#include <grpcpp/alarm.h>

#include <atomic>
#include <condition_variable>
#include <thread>
#include <utility>

#include "denoised/conversion.h"
#include "denoised/error.h"
#include "denoised/mutex.h"
#include "denoised/rpc_status.h"
#include "denoised/seen_events.h"

namespace denoised::client {
namespace {

absl::Status Cancelled() { return absl::CancelledError("cancelled by the caller"); }

/// A stream with its retries. It keeps itself alive until on_done has returned: each attempt and
/// each pending alarm holds a reference.
class Operation : public std::enable_shared_from_this<Operation> {
 public:
  /// `stub` is used until on_done has returned.
  Operation(v1::ImageGeneration::Stub* stub, StreamCallSetup setup, StreamListener listener)
      : stub_(stub),
        setup_(std::move(setup)),
        listener_(std::move(listener)),
        attempts_(setup_.attempts),
        watch_(setup_.watch) {}

  void StartAttempt() noexcept;
  void Cancel();
  absl::Status Wait();

 private:
  class Attempt;

  void Deliver(v1::StreamGenerateResponse&& response, const grpc::ClientContext& context);
  void AttemptDone(const grpc::Status& grpc_status);
  void Finish(absl::Status status);

  // Not owned: the last reference may be dropped on a gRPC thread, and a channel that is destroyed
  // there would wait for that very thread.
  v1::ImageGeneration::Stub* const stub_;
  const StreamCallSetup setup_;
  const StreamListener listener_;

  // Touched by one callback at a time.
  Attempts attempts_;
  bool received_ = false;      // in any attempt
  v1::WatchJobRequest watch_;  // up to what was received
  SeenEvents seen_;
  bool completed_ = false;

  std::atomic<std::thread::id> listening_;  // the thread that is in the listener, if any

  Mutex mutex_;
  std::condition_variable_any finished_;
  Attempt* attempt_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::unique_ptr<grpc::Alarm> backoff_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> result_ ABSL_GUARDED_BY(mutex_);
};

/// One gRPC call. Deletes itself when it is over. gRPC swallows what its callbacks throw, and a
/// call whose callback stopped half-way would never end: they are noexcept, so the process ends
/// instead.
class Operation::Attempt : public grpc::ClientReadReactor<v1::StreamGenerateResponse> {
 public:
  explicit Attempt(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  /// Before Start. If it fails, the attempt cannot be made.
  absl::Status AddHeaders() { return operation_->setup_.headers.AddTo(&context_); }
  void Start() {
    const StreamCallSetup& setup = operation_->setup_;
    if (setup.deadline) context_.set_deadline(*setup.deadline);
    if (setup.generate) {
      operation_->stub_->async()->StreamGenerate(&context_, &*setup.generate, this);
    } else {
      watch_ = operation_->watch_;
      operation_->stub_->async()->WatchJob(&context_, &watch_, this);
    }
    StartRead(&response_);
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) noexcept override {
    if (!ok) return;  // OnDone follows
    operation_->Deliver(std::move(response_), context_);
    response_.Clear();
    StartRead(&response_);
  }
  void OnDone(const grpc::Status& status) noexcept override {
    const std::shared_ptr<Operation> operation = std::move(operation_);
    {
      MutexLock lock(&operation->mutex_);
      operation->attempt_ = nullptr;
    }
    delete this;
    operation->AttemptDone(status);
  }

 private:
  std::shared_ptr<Operation> operation_;
  grpc::ClientContext context_;
  v1::WatchJobRequest watch_;
  v1::StreamGenerateResponse response_;
};

void Operation::StartAttempt() noexcept {
  auto attempt = std::make_unique<Attempt>(shared_from_this());
  absl::Status status = attempt->AddHeaders();
  {
    MutexLock lock(&mutex_);
    backoff_.reset();
    if (cancelled_) status = Cancelled();
    if (status.ok()) attempt_ = attempt.get();
  }
  if (!status.ok()) return Finish(std::move(status));
  // It lives at least until OnDone; a Cancel before this ends it at once.
  attempt.release()->Start();
}

void Operation::Cancel() {
  MutexLock lock(&mutex_);
  cancelled_ = true;
  if (attempt_ != nullptr) attempt_->Cancel();
  if (backoff_ != nullptr) backoff_->Cancel();
}

absl::Status Operation::Wait() {
  if (listening_.load() == std::this_thread::get_id()) {
    return absl::FailedPreconditionError(
        "a streaming call cannot be waited for in its own listener; use on_done instead");
  }
  MutexLock lock(&mutex_);
  while (!result_) finished_.wait(mutex_);
  return *result_;
}

void Operation::Deliver(v1::StreamGenerateResponse&& response, const grpc::ClientContext& context) {
  received_ = true;
  watch_.set_request_id(response.request_id());
  watch_.set_after_sequence(response.sequence());
  std::optional<Event> event = FromProto(std::move(response));
  if (!event) return;
  const SeenEvents::News news = seen_.Add(*event);
  if (news == SeenEvents::News::kNone) return;
  if (news == SeenEvents::News::kFurther) attempts_.Renew();
  completed_ = completed_ || std::holds_alternative<Completed>(*event);
  if (auto* queued = std::get_if<Queued>(&*event)) queued->server = context.peer();
  if (!listener_.on_event) return;
  listening_ = std::this_thread::get_id();
  listener_.on_event(*event);
  listening_ = std::thread::id();
}

void Operation::AttemptDone(const grpc::Status& grpc_status) {
  absl::Status status = setup_.to_status(grpc_status);
  {
    MutexLock lock(&mutex_);
    if (!cancelled_) status = WithoutShutdownCancel(std::move(status));
  }
  if (status.ok() && !completed_) {
    status = absl::DataLossError("the stream ended without its last event; see the server's log");
  } else if (absl::IsUnavailable(status) && completed_) {
    status = absl::OkStatus();  // the connection was lost after the last event
  }
  // An error with details is how the job ended, and watching it again would only return the same.
  const bool final = !setup_.generate && received_ && !Details(status).domain.empty();
  const auto delay = attempts_.Ended(status);
  if (delay && !final) {
    MutexLock lock(&mutex_);
    if (cancelled_) {
      status = Cancelled();
    } else {
      backoff_ = std::make_unique<grpc::Alarm>();
      backoff_->Set(std::chrono::system_clock::now() + *delay,
                    [self = shared_from_this()](bool) { self->StartAttempt(); });
      return;
    }
  }
  Finish(attempts_.WithCause(std::move(status)));
}

void Operation::Finish(absl::Status status) {
  if (listener_.on_done) {
    listening_ = std::this_thread::get_id();
    listener_.on_done(status);
    listening_ = std::thread::id();
  }
  MutexLock lock(&mutex_);
  result_ = std::move(status);
  finished_.notify_all();
}

class RunningCall : public StreamCall {
 public:
  RunningCall(std::shared_ptr<v1::ImageGeneration::Stub> stub, std::shared_ptr<Operation> operation,
              std::stop_token stop)
      : stub_(std::move(stub)),
        operation_(std::move(operation)),
        on_stop_(std::move(stop), [operation = operation_.get()] { operation->Cancel(); }) {}
  ~RunningCall() override {
    operation_->Cancel();
    operation_->Wait().IgnoreError();
  }
  void Cancel() override { operation_->Cancel(); }
  absl::Status Wait() override { return operation_->Wait(); }

 private:
  const std::shared_ptr<v1::ImageGeneration::Stub> stub_;  // the operation does not own it
  const std::shared_ptr<Operation> operation_;
  const std::stop_callback<std::function<void()>> on_stop_;
};

class FailedCall : public StreamCall {
 public:
  explicit FailedCall(absl::Status status) : status_(std::move(status)) {}
  void Cancel() override {}
  absl::Status Wait() override { return status_; }

 private:
  const absl::Status status_;
};

}  // namespace

std::unique_ptr<StreamCall> StartStreamCall(std::shared_ptr<v1::ImageGeneration::Stub> stub,
                                            StreamCallSetup setup, StreamListener listener,
                                            std::stop_token stop) {
  auto operation = std::make_shared<Operation>(stub.get(), std::move(setup), std::move(listener));
  operation->StartAttempt();
  return std::make_unique<RunningCall>(std::move(stub), std::move(operation), std::move(stop));
}

std::unique_ptr<StreamCall> FailedStreamCall(absl::Status status,
                                             const StreamListener& listener) noexcept {
  if (listener.on_done) listener.on_done(status);
  return std::make_unique<FailedCall>(std::move(status));
}

}  // namespace denoised::client
