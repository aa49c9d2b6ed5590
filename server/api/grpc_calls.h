// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "server/api/generation_call.h"
#include "server/api/grpc_messages.h"

/// Calls for images that gRPC carries, on its callback API. `grpc_context` must outlive the call.

namespace denoised {

class GrpcUnaryCall final : public WatchedReactor, public UnaryCall {
 public:
  /// Makes the reply of the images, or says why there is none; on a worker, before gRPC sends it,
  /// and only when all went well.
  using Reply = std::function<grpc::Status(v1::GenerateResponse* images)>;

  /// `method` is its full name.
  GrpcUnaryCall(const GenerationCallContext& context, const char* method,
                grpc::CallbackServerContext* grpc_context, Reply reply)
      : WatchedReactor(context.write_watch, grpc_context),
        UnaryCall(context, method, grpc_context),
        grpc_context_(grpc_context),
        reply_(std::move(reply)) {}

  void OnCancel() override { Break(); }

 private:
  void Done() override { End(); }
  void Answer(const grpc::Status& status, v1::GenerateResponse* images) override;
  bool IsLate() const override;
  bool IsLost() const override { return grpc_context_->IsCancelled(); }

  grpc::CallbackServerContext* const grpc_context_;
  const Reply reply_;
};

class GrpcStreamCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public StreamCall {
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
  grpc::ByteBuffer event_;  // the write in flight
};

/// gRPC's deadline, a point of the wall clock, on the steady clock.
std::optional<std::chrono::steady_clock::time_point> DeadlineOf(
    const grpc::CallbackServerContext& context);

/// As Beginning, with the message of the call, which is gone when it returns.
template <typename Message>
using BeginningWith = std::function<std::shared_ptr<Generation>(
    const Message& message, const std::shared_ptr<GenerationWatcher>& watcher,
    grpc::Status* refusal)>;

/// Reads the message of a call: Parse() with the budget of `context`.
template <typename Message>
grpc::Status Read(const GenerationCallContext& context, const grpc::ByteBuffer* bytes,
                  Received<Message>* received) {
  return Parse(Take(bytes), context.messages, context.queue_wait->RetryDelay(), &received->message,
               &received->memory);
}

/// Begins a call that has just come: admits it, reads its message and has a worker run `begin`.
template <typename Message>
void Start(const GenerationCallContext& context, const std::shared_ptr<GenerationCall>& call,
           const grpc::ByteBuffer* bytes, Priority (*priority)(const Message& message),
           BeginningWith<Message> begin) {
  const auto received = std::make_shared<Received<Message>>();
  grpc::Status refusal = call->Admit();
  if (refusal.ok()) refusal = Read(context, bytes, received.get());
  if (!refusal.ok()) return call->Refuse(refusal);
  call->Post(priority(received->message),
             [received, begin = std::move(begin)](const auto& watcher, grpc::Status* refusal) {
               const Received<Message> taken = std::move(*received);
               return begin(taken.message, watcher, refusal);
             });
}

/// The reply to a call that needs no generation: what `answer` makes of its message, as bytes.
template <typename Request, typename Response, typename Answer>
grpc::Status Respond(const GenerationCallContext& context, const grpc::ByteBuffer* request,
                     grpc::ByteBuffer* response, const Answer& answer) {
  Received<Request> asked;
  Response reply;
  grpc::Status status = Read(context, request, &asked);
  if (status.ok()) status = answer(asked.message, &reply);
  return status.ok() ? Serialize(reply, response) : status;
}

/// Ends a call that has nothing to wait for, and its record.
grpc::ServerUnaryReactor* Reply(const GenerationCallContext& context,
                                grpc::CallbackServerContext* grpc_context, CallRecord* record,
                                const grpc::Status& status);

/// Answers such a call by a method of `object`, and ends it.
template <typename Object, typename Request, typename Response>
grpc::ServerUnaryReactor* Answer(const GenerationCallContext& context, const char* name,
                                 const Object& object,
                                 grpc::Status (Object::*method)(const Request&, CallRecord*,
                                                                Response*) const,
                                 grpc::CallbackServerContext* grpc_context,
                                 const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  CallRecord record(context.calls, name, grpc_context);
  return Reply(context, grpc_context, &record,
               Respond<Request, Response>(context, request, response,
                                          [&](const Request& asked, Response* reply) {
                                            return (object.*method)(asked, &record, reply);
                                          }));
}

}  // namespace denoised
