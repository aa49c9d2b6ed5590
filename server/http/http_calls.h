// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "server/api/generation_call.h"
#include "server/http/message.h"

/// Calls for images that HTTP carries.

namespace denoised {

/// The origin of the call that `request` makes.
CallOrigin OriginOf(const HttpRequest& request);
/// ClientKey of the client that makes `request`.
std::string ClientOf(const HttpRequest& request);

/// What both kinds of calls have of their exchange. `Call`: UnaryCall or StreamCall.
template <typename Call>
class HttpCall : public Call {
 public:
  /// Post, and stops when the client goes.
  void Run(GenerationCall::Beginning begin) {
    exchange_->OnStop([this, self = this->shared_from_this()] { this->Break(); });
    this->Post(Priority::kNormal, std::move(begin));
  }

 protected:
  template <typename... Arguments>
  explicit HttpCall(std::shared_ptr<Exchange> exchange, Arguments&&... arguments)
      : Call(std::forward<Arguments>(arguments)..., OriginOf(exchange->request())),
        exchange_(std::move(exchange)) {}

  /// What ends the call once the client has all, or has gone.
  Exchange::Done AtEnd() {
    return [this, self = this->shared_from_this()](bool ok) {
      if (!ok) lost_ = true;
      this->End();
    };
  }
  /// Adds what every reply of a call says.
  void AddHeaders(HttpReply* reply) const {
    reply->headers.emplace_back("traceparent", this->record_.trace().traceparent());
    if (this->generation_ != nullptr) {
      reply->headers.emplace_back("X-Request-Id", this->generation_->origin().request_id);
    }
  }

  const std::shared_ptr<Exchange> exchange_;
  std::atomic<bool> lost_{false};

 private:
  bool IsLate() const final { return exchange_->late(); }
  bool IsLost() const final { return lost_; }
};

class HttpUnaryCall final : public HttpCall<UnaryCall> {
 public:
  /// Makes the reply of the images; on a worker, and only when all went well.
  using MakeReply = std::function<HttpReply(v1::GenerateResponse* images)>;

  /// `method` is gRPC's full name of it.
  HttpUnaryCall(const GenerationCallContext& context, const char* method,
                std::shared_ptr<Exchange> exchange, MakeReply make)
      : HttpCall(std::move(exchange), context, method), make_(std::move(make)) {}

 private:
  void Answer(const grpc::Status& status, v1::GenerateResponse* images) override;

  const MakeReply make_;
};

/// Server-sent events.
class HttpStreamCall final : public HttpCall<StreamCall> {
 public:
  /// An event as text for the client, with the empty line after it; empty: it is not sent. On a
  /// worker, one after the other.
  using Format = std::function<std::string(const EventLog::Event& event)>;

  /// Events up to `sequence` are known.
  HttpStreamCall(const GenerationCallContext& context, const char* method,
                 std::shared_ptr<Exchange> exchange, uint64_t sequence, Format format)
      : HttpCall(std::move(exchange), context, sequence, method), format_(std::move(format)) {}

 private:
  void Write(const EventLog::Event& event) override;
  void EndStream(const grpc::Status& status) override;
  void BeginStream();
  /// Written, on a worker, where the next event is made.
  void Continue();

  const Format format_;
  bool stream_begun_ = false;  // used by one thread at a time
};

/// "id: …\nevent: …\ndata: …\n\n"; without an id when it is 0. `data` is one line.
std::string ServerSentEvent(uint64_t id, const std::string& name, const std::string& data);

}  // namespace denoised
