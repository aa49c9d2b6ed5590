// SPDX-License-Identifier: Apache-2.0
#include "server/api/call_record.h"

#include <utility>

#include "absl/status/status.h"
#include "server/security/credentials.h"
#include "server/telemetry/log.h"
#include "server/telemetry/metrics.h"

namespace denoised {

void Calls::Enter() {
  MutexLock lock(&mutex_);
  ++count_;
}

void Calls::Leave() {
  MutexLock lock(&mutex_);
  // Notified under the lock, as the thread that waits may destroy this object next.
  if (--count_ == 0) none_.NotifyAll();
}

bool Calls::WaitForNone(std::chrono::steady_clock::time_point deadline) {
  MutexLock lock(&mutex_);
  while (count_ > 0 && std::chrono::steady_clock::now() < deadline) {
    none_.WaitUntil(&mutex_, deadline);
  }
  return count_ == 0;
}

namespace {

std::shared_ptr<const Caller> CallerOf(const Clients& clients,
                                       const grpc::CallbackServerContext& context) {
  const auto connection = context.auth_context();
  auto caller =
      clients.IdentifyAdmitted(CredentialsOf(context.client_metadata(), connection.get()));
  // The port has checked the caller before, so there is one, unless the file has changed twice.
  return caller.ok() ? *std::move(caller) : std::make_shared<const Caller>();
}

}  // namespace

CallRecord::CallRecord(Calls* calls, const char* method, CallOrigin origin)
    : calls_(calls),
      method_(google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(method)),
      peer_(std::move(origin.peer)),
      caller_(std::move(origin.caller)),
      trace_(TraceContext::Continue(origin.traceparent)),
      via_(origin.via),
      arrival_(std::chrono::steady_clock::now()) {
  DENOISED_CHECK(method_ != nullptr, "no method {}", method);
  calls_->Enter();
  calls_->metrics_->CallStarted(method_);
}

CallRecord::CallRecord(Calls* calls, const char* method, grpc::CallbackServerContext* context)
    : CallRecord(
          calls, method,
          {.caller = CallerOf(*calls->clients_, *context),
           .peer = context->peer(),
           .traceparent = std::string(MetadataValue(context->client_metadata(), "traceparent")),
           .via = "grpc"}) {
  context->AddInitialMetadata("traceparent", trace_.traceparent());
}

double CallRecord::SecondsSinceArrival() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - arrival_).count();
}

void CallRecord::Describe(const Generation& generation) {
  Generation::Summary summary = generation.Summarise();
  request_id = std::move(summary.request_id);
  model = std::move(summary.model);
  sampler = std::move(summary.sampler);
  count = summary.count;
  steps = summary.steps;
  queued_seconds = summary.queued_seconds;
}

void CallRecord::End(grpc::StatusCode code, const std::string& message) {
  const double seconds = SecondsSinceArrival();
  calls_->metrics_->CallEnded(method_, CodeName(code), caller_->name, seconds);
  log::Fields fields = {{"method", method_->name()},
                        {"code", CodeName(code)},
                        {"client", caller_->name},
                        {"peer", peer_},
                        {"trace_id", trace_.trace_id},
                        {"span_id", trace_.span_id},
                        {"via", via_}};
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
  calls_->Leave();
}

std::string CodeName(grpc::StatusCode code) {
  // Abseil's codes are gRPC's.
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

}  // namespace denoised
