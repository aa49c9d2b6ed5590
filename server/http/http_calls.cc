// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_calls.h"

#include "server/http/json.h"

namespace denoised {

CallOrigin OriginOf(const HttpRequest& request) {
  return {.caller = request.caller,
          .peer = request.peer,
          .traceparent = std::string(request.Header("traceparent")),
          .via = "http"};
}

std::string ClientOf(const HttpRequest& request) {
  return ClientKey(request.caller == nullptr ? Caller() : *request.caller, request.peer);
}

void HttpUnaryCall::Answer(const grpc::Status& status, v1::GenerateResponse* images) {
  HttpReply reply = images != nullptr ? make_(images) : ErrorReply(status);
  AddHeaders(&reply);
  exchange_->Reply(std::move(reply), AtEnd());
}

void HttpStreamCall::BeginStream() {
  if (std::exchange(stream_begun_, true)) return;
  HttpReply head{.code = 200,
                 .headers = {{"Content-Type", "text/event-stream"},
                             {"Cache-Control", "no-store"},
                             {"X-Accel-Buffering", "no"}}};
  AddHeaders(&head);
  exchange_->Begin(std::move(head), ":\n\n");
}

void HttpStreamCall::Continue() {
  // An event of the generation was written, so there is one.
  context_.workers->Post(generation_->priority(), ClientOf(exchange_->request()),
                         [this, self = shared_from_this()] { Written(true); });
}

void HttpStreamCall::Write(const EventLog::Event& event) {
  BeginStream();
  std::string text = format_(event);
  if (text.empty()) return Continue();
  exchange_->Write(std::move(text), [this, self = shared_from_this()](bool ok) {
    if (ok) return Continue();
    lost_ = true;
    Written(false);
  });
}

void HttpStreamCall::EndStream(const grpc::Status& status) {
  if (!status.ok() && !stream_begun_) {
    HttpReply reply = ErrorReply(status);
    AddHeaders(&reply);
    return exchange_->Reply(std::move(reply), AtEnd());
  }
  BeginStream();
  if (!status.ok()) {
    exchange_->Write(ServerSentEvent(0, "error", ErrorJson(status, HttpCode(status))), {});
  }
  exchange_->End(AtEnd());
}

std::string ServerSentEvent(uint64_t id, const std::string& name, const std::string& data) {
  std::string text;
  text.reserve(data.size() + name.size() + 48);
  if (id > 0) text += "id: " + std::to_string(id) + "\n";
  return text.append("event: ").append(name).append("\ndata: ").append(data).append("\n\n");
}

}  // namespace denoised
