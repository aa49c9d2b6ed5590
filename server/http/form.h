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
  std::string_view body;  // of the whole body
};

/// The parts of multipart/form-data (RFC 7578), which `content_type` is the header of and `body`
/// must outlive. INVALID_ARGUMENT says what is wrong.
grpc::Status ParseForm(std::string_view content_type, std::string_view body,
                       std::vector<FormPart>* parts);

/// Puts a field into an object as its name says: "n", "denoised[seed]", "denoised[labels][]". False
/// when the name says something else or differs from earlier ones.
bool SetField(const std::string& name, const std::string& value, nlohmann::json* object);

}  // namespace denoised
