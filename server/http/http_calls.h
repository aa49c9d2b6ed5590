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

class HttpUnaryCall final : public UnaryCall {
 public:
  /// Makes the reply of the images; on a worker, and only when all went well.
  using MakeReply = std::function<HttpReply(v1::GenerateResponse* images)>;

  /// `method` is gRPC's full name of it.
  HttpUnaryCall(const GenerationCallContext& context, const char* method,
                std::shared_ptr<Exchange> exchange, MakeReply make)
      : UnaryCall(context, method, OriginOf(exchange->request())),
        exchange_(std::move(exchange)),
        make_(std::move(make)) {}

  /// Post, and stops when the client goes.
  void Run(Beginning begin);

 private:
  void Answer(const grpc::Status& status, v1::GenerateResponse* images) override;
  bool IsLate() const override { return exchange_->late(); }
  bool IsLost() const override { return lost_; }

  const std::shared_ptr<Exchange> exchange_;
  const MakeReply make_;
  std::atomic<bool> lost_{false};
};

/// Server-sent events.
class HttpStreamCall final : public StreamCall {
 public:
  /// An event as text for the client, with the empty line after it; empty: it is not sent. On a
  /// worker, one after the other.
  using Format = std::function<std::string(const EventLog::Event& event)>;

  /// Events up to `sequence` are known.
  HttpStreamCall(const GenerationCallContext& context, const char* method,
                 std::shared_ptr<Exchange> exchange, uint64_t sequence, Format format)
      : StreamCall(context, sequence, method, OriginOf(exchange->request())),
        exchange_(std::move(exchange)),
        format_(std::move(format)) {}

  /// Post, and stops when the client goes.
  void Run(Beginning begin);

 private:
  void Write(const EventLog::Event& event) override;
  void EndStream(const grpc::Status& status) override;
  bool IsLate() const override { return exchange_->late(); }
  bool IsLost() const override { return lost_; }
  void BeginStream();
  /// Written, on a worker, where the next event is made.
  void Continue();

  const std::shared_ptr<Exchange> exchange_;
  const Format format_;
  bool stream_begun_ = false;  // used by one thread at a time
  std::atomic<bool> lost_{false};
};

/// "id: …\nevent: …\ndata: …\n\n"; without an id when it is 0. `data` is one line.
std::string ServerSentEvent(uint64_t id, const std::string& name, const std::string& data);

}  // namespace denoised
