// SPDX-License-Identifier: Apache-2.0
#include "denoised/rpc_status.h"

#include "denoised/error.h"
#include "denoised/rpc/error_details.pb.h"
#include "denoised/rpc/status.pb.h"

namespace denoised::client {
namespace {

constexpr char kTypeUrl[] = "type.googleapis.com/google.rpc.";

template <typename Message>
std::optional<Message> Payload(const absl::Status& status) {
  const auto payload = status.GetPayload(kTypeUrl + Message::descriptor()->name());
  Message message;
  if (!payload || !message.ParseFromString(std::string(*payload))) return std::nullopt;
  return message;
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  // absl::StatusCode and grpc::StatusCode share their numbers.
  absl::Status converted(static_cast<absl::StatusCode>(status.error_code()),
                         status.error_message());
  rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return converted;
  for (const auto& detail : details.details()) {
    converted.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return converted;
}

ErrorDetails Details(const absl::Status& status) {
  ErrorDetails details;
  if (const auto bad_request = Payload<rpc::BadRequest>(status)) {
    for (const auto& violation : bad_request->field_violations()) {
      details.field_violations.push_back({violation.field(), violation.description()});
    }
  }
  if (const auto retry = Payload<rpc::RetryInfo>(status)) {
    details.retry_after = std::chrono::seconds(retry->retry_delay().seconds()) +
                          std::chrono::nanoseconds(retry->retry_delay().nanos());
  }
  if (const auto info = Payload<rpc::ErrorInfo>(status)) {
    details.reason = info->reason();
    details.domain = info->domain();
  }
  return details;
}

absl::Status WithoutShutdownCancel(absl::Status status) {
  if (!absl::IsCancelled(status) || !Details(status).domain.empty()) return status;
  return absl::UnavailableError("the server shut down");
}

}  // namespace denoised::client
