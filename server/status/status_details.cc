// SPDX-License-Identifier: Apache-2.0
#include "server/status/status_details.h"

#include <grpcpp/support/error_details.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/status/quote.h"

namespace denoised {
namespace {

constexpr size_t kMaxMessageBytes = 1024;
constexpr size_t kMaxViolationBytes = 3072;

std::string Shortened(std::string text, size_t limit) {
  // Text of a client or a library may be no UTF-8, which protobuf strings must be.
  if (!IsUtf8(text)) {
    for (char& c : text) {
      if (static_cast<unsigned char>(c) >= 0x80) c = '?';
    }
  }
  if (text.size() <= limit) return text;
  text.resize(limit);
  // Not in the middle of a UTF-8 sequence: protobuf strings must be whole.
  while (!text.empty() && (static_cast<unsigned char>(text.back()) & 0xC0) == 0x80) text.pop_back();
  if (!text.empty() && static_cast<unsigned char>(text.back()) >= 0xC0) text.pop_back();
  return text + "...";
}

/// A path in the proto, or what a client sent as a name: for messages and proto strings.
std::string FieldName(const std::string& field) {
  constexpr size_t kMaxFieldBytes = 128;
  return IsUtf8(field) ? Shortened(field, kMaxFieldBytes) : Quote(field);
}

google::rpc::Status Plain(const absl::Status& status) {
  google::rpc::Status rpc;
  rpc.set_code(static_cast<int>(status.code()));
  rpc.set_message(Shortened(std::string(status.message()), kMaxMessageBytes));
  return rpc;
}

void AddErrorInfo(google::rpc::Status* rpc, const char* reason, const std::string& request_id,
                  const std::string& field = "") {
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("denoised");
  if (!request_id.empty()) (*info.mutable_metadata())["request_id"] = request_id;
  if (!field.empty()) (*info.mutable_metadata())["field"] = field;
  rpc->add_details()->PackFrom(info);
}

grpc::Status ToGrpc(const google::rpc::Status& rpc) {
  return {static_cast<grpc::StatusCode>(rpc.code()), rpc.message(), rpc.SerializeAsString()};
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status, const char* reason,
                          const std::string& request_id,
                          std::optional<std::chrono::milliseconds> retry_delay) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status rpc = Plain(status);
  AddErrorInfo(&rpc, reason, request_id);
  if (retry_delay) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(retry_delay->count() / 1000);
    retry.mutable_retry_delay()->set_nanos(
        static_cast<int32_t>(retry_delay->count() % 1000 * 1'000'000));
    rpc.add_details()->PackFrom(retry);
  }
  return ToGrpc(rpc);
}

grpc::Status FieldStatus(absl::StatusCode code, const FieldViolation& violation, const char* reason,
                         const std::string& request_id) {
  const std::string field = FieldName(violation.field);
  google::rpc::Status rpc =
      Plain(absl::Status(code, fmt::format("{}: {}", field, violation.description)));
  AddErrorInfo(&rpc, reason, request_id, field);
  return ToGrpc(rpc);
}

grpc::Status InvalidFields(const std::vector<FieldViolation>& violations,
                           const std::string& request_id) {
  google::rpc::BadRequest bad;
  std::string message;
  size_t bytes = 0;
  for (size_t i = 0; i < violations.size(); ++i) {
    const std::string field = FieldName(violations[i].field);
    const std::string description = Shortened(violations[i].description, 512);
    bytes += field.size() + description.size();
    auto* violation = bad.add_field_violations();
    if (bytes > kMaxViolationBytes && i + 1 < violations.size()) {
      violation->set_field(field);
      violation->set_description(
          fmt::format("this and {} more fields are invalid", violations.size() - i - 1));
      break;
    }
    violation->set_field(field);
    violation->set_description(description);
    message += fmt::format("{}{}: {}", message.empty() ? "" : "; ", field, description);
  }
  google::rpc::Status rpc = Plain(InvalidArgument("{}", message));
  AddErrorInfo(&rpc, reason::kInvalidFields, request_id);
  rpc.add_details()->PackFrom(bad);
  return ToGrpc(rpc);
}

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status rpc;
  google::rpc::ErrorInfo info;
  if (!rpc.ParseFromString(status.error_details())) return "";
  for (const auto& detail : rpc.details()) {
    if (detail.UnpackTo(&info)) return info.reason();
  }
  return "";
}

std::string FieldOf(const grpc::Status& status) {
  google::rpc::Status rpc;
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad;
  if (!rpc.ParseFromString(status.error_details())) return "";
  for (const auto& detail : rpc.details()) {
    if (detail.UnpackTo(&bad) && bad.field_violations_size() > 0) {
      return bad.field_violations(0).field();
    }
    if (detail.UnpackTo(&info) && info.metadata().contains("field")) {
      return info.metadata().at("field");
    }
  }
  return "";
}

grpc::Status JobStatus(const absl::Status& status, const std::string& request_id) {
  const char* reason = reason::kServerError;
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
      reason = reason::kCancelled;
      break;
    case absl::StatusCode::kDeadlineExceeded:
      reason = reason::kDeadlineExceeded;
      break;
    case absl::StatusCode::kUnavailable:
      reason = reason::kDraining;
      break;
    case absl::StatusCode::kResourceExhausted:
      reason = reason::kDeviceMemory;
      break;
    case absl::StatusCode::kDataLoss:
      reason = reason::kNonfiniteImage;
      break;
    default:
      break;
  }
  return ToGrpcStatus(status, reason, request_id);
}

}  // namespace denoised
