// SPDX-License-Identifier: Apache-2.0
#include "server/api/grpc_calls.h"

namespace denoised {
namespace {

bool HasPassed(const grpc::CallbackServerContext& context) {
  return std::chrono::system_clock::now() >= context.deadline();
}

}  // namespace

bool GrpcUnaryCall::IsLate() const { return HasPassed(*grpc_context_); }

void GrpcUnaryCall::Answer(const grpc::Status& status, v1::GenerateResponse* images) {
  if (images != nullptr) status_ = reply_(images);
  Send(images != nullptr ? status_ : status);
}

grpc::ServerUnaryReactor* Reply(const GenerationCallContext& context,
                                grpc::CallbackServerContext* grpc_context, CallRecord* record,
                                const grpc::Status& status) {
  record->End(status.error_code(), status.error_message());
  auto* const reactor = new WatchedReactor(context.write_watch, grpc_context);
  reactor->Send(status);
  return reactor;
}

bool GrpcStreamCall::IsLate() const { return HasPassed(*grpc_context_); }

void GrpcStreamCall::Write(const EventLog::Event& event) {
  if (!Serialize(event, &event_).ok()) return Written(false);  // it has more than 2 GiB
  context_.write_watch->Arm(grpc_context_);
  StartWrite(&event_);
}

void GrpcStreamCall::OnWriteDone(bool ok) {
  context_.write_watch->Disarm(grpc_context_);
  Written(ok);
}

std::optional<std::chrono::steady_clock::time_point> DeadlineOf(
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

}  // namespace denoised
