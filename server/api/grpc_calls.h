// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <functional>
#include <optional>
#include <utility>

#include "server/api/generation_call.h"

/// Calls for images that gRPC carries, on its callback API. `grpc_context` must outlive the call.

namespace denoised {

class GrpcUnaryCall final : public grpc::ServerUnaryReactor, public UnaryCall {
 public:
  /// Makes the reply of the images, or says why there is none; on a worker, before gRPC sends it,
  /// and only when all went well.
  using Reply = std::function<grpc::Status(v1::GenerateResponse* images)>;

  /// `method` is its full name.
  GrpcUnaryCall(const GenerationCallContext& context, const char* method,
                grpc::CallbackServerContext* grpc_context, Reply reply)
      : UnaryCall(context, method, grpc_context),
        grpc_context_(grpc_context),
        reply_(std::move(reply)) {}

  void OnCancel() override { Break(); }
  void OnDone() override;

 private:
  void Answer(const grpc::Status& status, v1::GenerateResponse* images) override;
  bool IsLate() const override;
  bool IsLost() const override { return grpc_context_->IsCancelled(); }

  grpc::CallbackServerContext* const grpc_context_;
  const Reply reply_;
};

class GrpcStreamCall final : public grpc::ServerWriteReactor<v1::StreamGenerateResponse>,
                             public StreamCall {
 public:
  GrpcStreamCall(const GenerationCallContext& context, const char* method,
                 grpc::CallbackServerContext* grpc_context, uint64_t sequence)
      : StreamCall(context, sequence, method, grpc_context), grpc_context_(grpc_context) {}

  void OnWriteDone(bool ok) override;
  void OnCancel() override { Break(); }
  void OnDone() override { End(); }

 private:
  void Write(const EventLog::Event& event) override;
  void EndStream(const grpc::Status& status) override { Finish(status); }
  bool IsLate() const override;
  bool IsLost() const override { return grpc_context_->IsCancelled(); }

  grpc::CallbackServerContext* const grpc_context_;
};

/// Moves the message of a call out of gRPC, which would keep it until the call ends: an upload can
/// be large, and its job can wait for long. (gRPC made it, and not as a constant.)
template <typename Message>
Message Take(const Message* message) {
  return std::move(*const_cast<Message*>(message));
}

/// gRPC's deadline, a point of the wall clock, on the steady clock.
std::optional<std::chrono::steady_clock::time_point> DeadlineOf(
    const grpc::CallbackServerContext& context);

}  // namespace denoised
