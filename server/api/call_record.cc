#include "server/api/call_record.h"

#include <utility>

#include "server/security/credentials.h"
#include "server/serving.h"
#include "server/telemetry/log.h"
#include "server/telemetry/metrics.h"

namespace denoised {

void ActiveCalls::Enter() {
  std::lock_guard lock(mutex_);
  ++count_;
}

void ActiveCalls::Leave() {
  std::lock_guard lock(mutex_);
  // Notified under the lock: whoever waits may destroy this object next.
  if (--count_ == 0) none_.notify_all();
}

bool ActiveCalls::WaitForNone(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return none_.wait_until(lock, deadline, [this] { return count_ == 0; });
}

namespace {

std::shared_ptr<const Caller> CallerOf(const Serving& serving,
                                       const grpc::CallbackServerContext& context) {
  auto caller =
      IdentifyCaller(*serving.clients, context.client_metadata(), context.auth_context().get());
  // The port has let nobody in whom it did not know, but a token may have been withdrawn since.
  return caller.ok() ? *std::move(caller) : std::make_shared<const Caller>();
}

}  // namespace

CallRecord::CallRecord(const Serving& serving, const char* method,
                       grpc::CallbackServerContext* context)
    : active_(serving.active),
      metrics_(serving.metrics),
      method_(google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(method)),
      peer_(context->peer()),
      caller_(CallerOf(serving, *context)),
      trace_(TraceContext::Continue(MetadataValue(context->client_metadata(), "traceparent"))),
      arrival_(std::chrono::steady_clock::now()) {
  DENOISED_CHECK(method_ != nullptr, "no method {}", method);
  context->AddInitialMetadata("traceparent", trace_.traceparent());
  active_->Enter();
  metrics_->CallStarted(method_);
}

double CallRecord::SecondsSinceArrival() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - arrival_).count();
}

void CallRecord::End(grpc::StatusCode code, const std::string& message) {
  const double seconds = SecondsSinceArrival();
  metrics_->CallEnded(method_, CodeName(code), caller_->name, seconds);
  log::Fields fields = {{"method", method_->name()},   {"code", CodeName(code)},
                        {"client", caller_->name},     {"peer", peer_},
                        {"trace_id", trace_.trace_id}, {"span_id", trace_.span_id}};
  if (!trace_.parent_id.empty()) fields.push_back({"parent_span_id", trace_.parent_id});
  if (!request_id.empty()) fields.push_back({"request_id", request_id});
  if (!model.empty()) fields.push_back({"model", model});
  if (count > 0) {
    fields.push_back({"count", count});
    fields.push_back({"steps", steps});
    fields.push_back({"sampler", sampler});
  }
  if (queued_seconds >= 0) fields.push_back({"queued_seconds", queued_seconds});
  fields.push_back({"seconds", seconds});
  if (code != grpc::StatusCode::OK && !message.empty()) fields.push_back({"error", message});
  log::Info("request", fields);
  active_->Leave();
}

grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, CallRecord* record,
                                const grpc::Status& status) {
  record->End(status.error_code(), status.error_message());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(status);
  return reactor;
}

const char* CodeName(grpc::StatusCode code) {
  constexpr const char* kNames[] = {"OK",
                                    "CANCELLED",
                                    "UNKNOWN",
                                    "INVALID_ARGUMENT",
                                    "DEADLINE_EXCEEDED",
                                    "NOT_FOUND",
                                    "ALREADY_EXISTS",
                                    "PERMISSION_DENIED",
                                    "RESOURCE_EXHAUSTED",
                                    "FAILED_PRECONDITION",
                                    "ABORTED",
                                    "OUT_OF_RANGE",
                                    "UNIMPLEMENTED",
                                    "INTERNAL",
                                    "UNAVAILABLE",
                                    "DATA_LOSS",
                                    "UNAUTHENTICATED"};
  const int index = static_cast<int>(code);
  return index >= 0 && index < static_cast<int>(std::size(kNames)) ? kNames[index] : "UNKNOWN";
}

}  // namespace denoised
