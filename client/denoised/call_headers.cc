// SPDX-License-Identifier: Apache-2.0
#include "denoised/call_headers.h"

#include <fmt/format.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>

#include <algorithm>
#include <string_view>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_split.h"
#include "denoised/read_file.h"

namespace denoised::client {
namespace {

/// `text` as the C library of gRPC takes it; lives no longer than `text`.
grpc_slice SliceOf(const std::string& text) {
  return grpc_slice_from_static_buffer(text.data(), text.size());
}

/// gRPC writes these itself and drops ours, or HTTP/2 forbids them (RFC 9113, 8.2.2).
bool IsReserved(std::string_view key) {
  constexpr std::string_view kReserved[] = {
      "te",         "content-type",     "user-agent",        "host",   "connection",
      "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"};
  return key.starts_with("grpc-") ||
         std::find(std::begin(kReserved), std::end(kReserved), key) != std::end(kReserved);
}

absl::Status CheckMetadata(const std::string& key, const std::string& value) {
  if (!grpc_header_key_is_legal(SliceOf(key)) || key.starts_with(":")) {
    return absl::InvalidArgumentError(
        fmt::format("metadata key \"{}\" is not legal; use letters, digits, \"-\", \"_\" and \".\"",
                    absl::CHexEscape(key)));
  }
  if (IsReserved(key)) {
    return absl::InvalidArgumentError(
        fmt::format("metadata key \"{}\" is reserved for gRPC and HTTP/2; use another name", key));
  }
  if (!grpc_is_binary_header(SliceOf(key)) && !grpc_header_nonbin_value_is_legal(SliceOf(value))) {
    return absl::InvalidArgumentError(
        fmt::format("metadata \"{}\" has the value \"{}\"; use printable ASCII characters, or a "
                    "key that ends in -bin, which takes any bytes",
                    key, absl::CHexEscape(value)));
  }
  return absl::OkStatus();
}

/// Version 00, or a later one, which may add fields: https://www.w3.org/TR/trace-context.
bool IsTraceparent(const std::string& text) {
  const std::vector<std::string> fields = absl::StrSplit(text, '-');
  constexpr size_t kSizes[] = {2, 32, 16, 2};  // version, trace, parent, flags
  if (fields.size() < std::size(kSizes)) return false;
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    const auto is_digit = [](char c) { return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f'); };
    const auto is_zero = [](char c) { return c == '0'; };
    const std::string& field = fields[i];
    if (field.size() != kSizes[i] || !std::all_of(field.begin(), field.end(), is_digit)) {
      return false;
    }
    const bool id = i == 1 || i == 2;
    if (id && std::all_of(field.begin(), field.end(), is_zero)) return false;
  }
  return fields[0] != "ff" && (fields[0] != "00" || fields.size() == std::size(kSizes));
}

}  // namespace

absl::Status CallHeaders::AddTo(grpc::ClientContext* context) const {
  for (const auto& [key, value] : metadata) context->AddMetadata(key, value);
  if (token_file.empty()) return absl::OkStatus();
  const auto token = ReadToken(token_file);
  if (!token.ok()) return token.status();
  context->AddMetadata("authorization", "Bearer " + *token);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> MetadataOf(
    const CallOptions& options) {
  auto metadata = options.metadata;
  for (auto& [key, value] : metadata) {
    absl::AsciiStrToLower(&key);
    if (absl::Status status = CheckMetadata(key, value); !status.ok()) return status;
    if (key == "traceparent" && !options.traceparent.empty()) {
      return absl::InvalidArgumentError("traceparent is given twice, also as metadata; give one");
    }
  }
  if (options.traceparent.empty()) return metadata;
  if (!IsTraceparent(options.traceparent)) {
    return absl::InvalidArgumentError(
        fmt::format("traceparent is \"{}\"; use the form of W3C Trace Context in lower case, "
                    "00-<32 hex digits>-<16 hex digits>-<2 hex digits>, with ids that are not zero",
                    absl::CHexEscape(options.traceparent)));
  }
  metadata.emplace_back("traceparent", options.traceparent);
  return metadata;
}

}  // namespace denoised::client
