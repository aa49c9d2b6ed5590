// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <google/protobuf/message.h>
#include <grpcpp/support/status.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/message.h"

/// Messages as JSON, by protobuf's own functions, and errors.

namespace denoised {

/// On one line, with the proto's names, and every field that is not `optional`. All strings of
/// `message` must be UTF-8, as they are in a message that was parsed.
std::string ToJson(const google::protobuf::Message& message);

/// JSON text whose large base64 strings (and data URLs) are decoded and replaced by short markers
/// before a parser reads it, because parsers are slow: protobuf takes 9 ns a byte, nlohmann 16.
/// Clients cannot guess a marker. If a marker stands where the parser reads no bytes, it is not put
/// back (all_back() is false): then parse the original text.
class TakenBytes {
 public:
  explicit TakenBytes(const std::string& text);

  bool none() const { return bytes_.empty(); }
  /// The text with the markers; empty if there are none.
  const std::string& rest() const { return rest_; }
  /// If `bytes` are a decoded marker, replaces them by what it stands for. Call once for each.
  bool PutBack(std::string* bytes);
  bool all_back() const { return put_back_ == bytes_.size(); }

 private:
  std::string rest_;
  std::vector<std::string> bytes_;
  size_t put_back_ = 0;
};

/// "a whole number", or a smaller or larger one than `value` if that is one.
std::string AnotherWholeNumber(std::string_view value);

/// What an Int may be instead of `value`, for messages: "a whole number from 0 to 4294967295". A
/// field of a signed one takes less than that, so the range is left out.
template <typename Int>
std::string WholeNumber(std::string_view value) {
  if (std::numeric_limits<Int>::is_signed) return AnotherWholeNumber(value);
  using Limits = std::numeric_limits<Int>;
  return fmt::format("a whole number from {} to {}", Limits::min(), Limits::max());
}

/// Parses `text` into `message`. INVALID_ARGUMENT names the field at fault, such as a key that is
/// given twice, or "body" if the text is not JSON or is nested too deeply.
grpc::Status FromJson(const std::string& text, google::protobuf::Message* message);

/// Reads JSON for code that looks into it. INVALID_ARGUMENT as FromJson.
grpc::Status ParseJson(const std::string& text, nlohmann::json* json);

/// Standard base64 (RFC 4648, section 4).
std::string ToBase64(const std::string& bytes);
/// False if `text` is not base64.
bool FromBase64(std::string_view text, std::string* bytes);

/// The HTTP code of an error: google.rpc.Code's, but 503 while a model loads.
int HttpCode(const grpc::Status& status);
/// The object {"error": …} that docs/http.md describes. `code` is the HTTP code.
std::string ErrorJson(const grpc::Status& status, int code);
/// A reply with that object and HttpCode(status).
HttpReply ErrorReply(const grpc::Status& status);
/// The same with an HTTP code that no gRPC status has, such as 405.
HttpReply ErrorReply(int code, const grpc::Status& status);

HttpReply JsonReply(std::string json);

}  // namespace denoised
