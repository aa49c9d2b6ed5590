// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/status.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace denoised {

struct FormPart {
  std::string name;
  std::string_view body;  // in the request's body
};

/// Splits a body of multipart/form-data (RFC 7578) into its parts, which are views of `body`.
/// `content_type` is the header, which has the boundary. INVALID_ARGUMENT says what is wrong.
grpc::Status ParseForm(std::string_view content_type, std::string_view body,
                       std::vector<FormPart>* parts);

/// Sets the member of `object` that a form field's name means: "n", "denoised[seed]",
/// "denoised[labels][]". False if the name is malformed or contradicts an earlier one.
bool SetField(const std::string& name, const std::string& value, nlohmann::json* object);

}  // namespace denoised
