// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_calls.h"

#include "server/http/json.h"

namespace denoised {
namespace {

/// What every reply of a call says.
void AddHeaders(const CallRecord& record, const Generation* generation, HttpReply* reply) {
  reply->headers.emplace_back("traceparent", record.trace().traceparent());
  if (generation != nullptr) {
    reply->headers.emplace_back("X-Request-Id", generation->origin().request_id);
  }
}

}  // namespace

CallOrigin OriginOf(const HttpRequest& request) {
  return {.caller = request.caller,
          .peer = request.peer,
          .traceparent = std::string(request.Header("traceparent")),
          .via = "http"};
}

void HttpUnaryCall::Run(Beginning begin) {
  const auto self = std::static_pointer_cast<HttpUnaryCall>(shared_from_this());
  exchange_->OnStop([self] { self->Break(); });
  Post(Priority::kNormal, std::move(begin));
}

void HttpUnaryCall::Answer(const grpc::Status& status, v1::GenerateResponse* images) {
  HttpReply reply = images != nullptr ? make_(images) : ErrorReply(status);
  AddHeaders(record_, generation_.get(), &reply);
  exchange_->Reply(std::move(reply),
                   [self = std::static_pointer_cast<HttpUnaryCall>(shared_from_this())](bool ok) {
                     self->lost_ = !ok;
                     self->End();
                   });
}

void HttpStreamCall::Run(Beginning begin) {
  const auto self = std::static_pointer_cast<HttpStreamCall>(shared_from_this());
  exchange_->OnStop([self] { self->Break(); });
  Post(Priority::kNormal, std::move(begin));
}

void HttpStreamCall::BeginStream() {
  if (std::exchange(stream_begun_, true)) return;
  HttpReply head{.code = 200,
                 .headers = {{"Content-Type", "text/event-stream"},
                             {"Cache-Control", "no-store"},
                             {"X-Accel-Buffering", "no"}}};
  AddHeaders(record_, generation_.get(), &head);
  exchange_->Begin(std::move(head), ":\n\n");
}

void HttpStreamCall::Continue() {
  context_.workers->Post(Priority::kInteractive,
                         [self = std::static_pointer_cast<HttpStreamCall>(shared_from_this())] {
                           self->Written(true);
                         });
}

void HttpStreamCall::Write(const EventLog::Event& event) {
  BeginStream();
  std::string text = format_(event);
  if (text.empty()) return Continue();
  exchange_->Write(std::move(text),
                   [self = std::static_pointer_cast<HttpStreamCall>(shared_from_this())](bool ok) {
                     if (ok) return self->Continue();
                     self->lost_ = true;
                     self->Written(false);
                   });
}

void HttpStreamCall::EndStream(const grpc::Status& status) {
  const auto end = [self = std::static_pointer_cast<HttpStreamCall>(shared_from_this())](bool ok) {
    self->lost_ = self->lost_ || !ok;
    self->End();
  };
  if (!status.ok() && !stream_begun_) {
    HttpReply reply = ErrorReply(status);
    AddHeaders(record_, generation_.get(), &reply);
    return exchange_->Reply(std::move(reply), end);
  }
  BeginStream();
  if (!status.ok()) {
    exchange_->Write(ServerSentEvent(0, "error", ErrorJson(status, HttpCode(status))), {});
  }
  exchange_->End(end);
}

std::string ServerSentEvent(uint64_t id, const std::string& name, const std::string& data) {
  std::string text;
  text.reserve(data.size() + name.size() + 48);
  if (id > 0) text += "id: " + std::to_string(id) + "\n";
  return text.append("event: ").append(name).append("\ndata: ").append(data).append("\n\n");
}

}  // namespace denoised
