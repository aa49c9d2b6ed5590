// SPDX-License-Identifier: Apache-2.0
#include "denoised/rpc_status.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

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

grpc::Status ExplainTooLarge(const grpc::Status& status, size_t request_bytes) {
  if (status.error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED) return status;
  // gRPC gives the sizes in the message only: "Received message larger than max (5 vs. 4)".
  const std::string message = status.error_message();
  constexpr std::string_view kLarger = "message larger than max (";
  const size_t found = message.find(kLarger);
  if (found == std::string::npos) return status;
  const char* const end = message.data() + message.size();
  uint64_t bytes = 0, limit = 0;
  const auto first = std::from_chars(message.data() + found + kLarger.size(), end, bytes);
  constexpr std::string_view kVersus = " vs. ";
  // The same is said of a reply that is too large for this side.
  if (first.ec != std::errc() || bytes != request_bytes ||
      !std::string_view(first.ptr, end).starts_with(kVersus) ||
      std::from_chars(first.ptr + kVersus.size(), end, limit).ec != std::errc()) {
    return status;
  }
  const bool sent = message.find("Sent ") != std::string::npos;  // refused on this side
  constexpr double kMebi = 1 << 20;
  return {grpc::StatusCode::INVALID_ARGUMENT,
          fmt::format("the request has {} bytes ({:.1f} MiB), and {} {} ({:.1f} MiB); make the "
                      "pictures or the noise in it smaller{}",
                      bytes, static_cast<double>(bytes) / kMebi,
                      sent ? "this client sends at most" : "the server takes at most", limit,
                      static_cast<double>(limit) / kMebi,
                      sent ? "" : ", or raise the server's --max-request-bytes")};
}

absl::Status WithoutShutdownCancel(absl::Status status) {
  if (!absl::IsCancelled(status) || !Details(status).domain.empty()) return status;
  return absl::UnavailableError("the server shut down");
}

}  // namespace denoised::client
