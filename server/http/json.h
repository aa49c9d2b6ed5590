// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/status.h>

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

/// JSON whose large base64 strings, data URLs too, are decoded at once and have markers in their
/// places, so that what reads it has little to read: protobuf takes 9 ns a byte, nlohmann 16.
/// Nobody can guess a marker. One that was put where it is not read as bytes never comes back:
/// then the text must be read as it was.
class TakenBytes {
 public:
  explicit TakenBytes(const std::string& text);

  bool none() const { return bytes_.empty(); }
  /// The text with the markers; empty if there are none.
  const std::string& rest() const { return rest_; }
  /// If `bytes`, decoded, are a marker, makes them what it stands for. Call once for each.
  bool PutBack(std::string* bytes);
  bool all_back() const { return put_back_ == bytes_.size(); }

 private:
  std::string rest_;
  std::vector<std::string> bytes_;
  size_t put_back_ = 0;
};

/// INVALID_ARGUMENT names the field at fault, such as a key that is given twice, or "body" when the
/// text is no JSON, or nested too deeply.
grpc::Status FromJson(const std::string& text, google::protobuf::Message* message);

/// Reads JSON for code that looks into it. INVALID_ARGUMENT as FromJson.
grpc::Status ParseJson(const std::string& text, nlohmann::json* json);

/// Base64 as RFC 4648 has it in section 4.
std::string ToBase64(const std::string& bytes);
/// False when `text` is none.
bool FromBase64(std::string_view text, std::string* bytes);

/// The HTTP code of an error: google.rpc.Code's, but 503 while a model loads.
int HttpCode(const grpc::Status& status);
/// {"error": …} of docs/http.md. `code` is the HTTP code.
std::string ErrorJson(const grpc::Status& status, int code);
/// A whole reply of it.
HttpReply ErrorReply(const grpc::Status& status);
/// The same for what HTTP alone knows, with a code of its own.
HttpReply ErrorReply(int code, const grpc::Status& status);

HttpReply JsonReply(std::string json);

}  // namespace denoised
