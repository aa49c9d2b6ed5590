// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/core/status.h"

/// Lets measure.py decide when a benchmark measures, so that it can alternate programs: one
/// measures while the others wait with their models and buffers in place.
///
/// The program writes one line of JSON when it has started and one for each line of its standard
/// input, which is "prepare NAME" or "measure NAME". It ends with its input. Single-threaded.

namespace denoised {

struct Request {
  std::string verb, name;
};

/// False at the end of the input.
inline bool ReadRequest(Request* request) {
  std::string line;
  if (!std::getline(std::cin, line)) return false;
  const size_t space = line.find(' ');
  request->verb = line.substr(0, space);
  request->name = space == std::string::npos ? "" : line.substr(space + 1);
  return true;
}

inline void Answer(const nlohmann::json& answer) {
  std::puts(answer.dump().c_str());
  std::fflush(stdout);
}

inline void Answer(const absl::Status& error) {
  Answer(nlohmann::json{{"error", std::string(error.message())}});
}

inline void Answer(const absl::StatusOr<nlohmann::json>& answer) {
  answer.ok() ? Answer(*answer) : Answer(answer.status());
}

}  // namespace denoised
