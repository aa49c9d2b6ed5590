// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "denoised/generation.h"

/// Answers as JSON, under the field names of the wire contract. Not protobuf's JSON mapping: the
/// library gives plain types, and scripts pass these values back as flags ("sampler": "uni_pc"),
/// where protobuf would print "SAMPLER_UNI_PC". Seeds are strings, as in protobuf's: readers that
/// make doubles of numbers, such as jq 1.6, would read another seed.

namespace denoised::command {

nlohmann::json ToJson(const client::EffectiveParams& params);
nlohmann::json ToJson(const client::Timing& timing);
/// Without its content.
nlohmann::json ToJson(const client::Image& image);
nlohmann::json ToJson(const client::Model& model);
nlohmann::json ToJson(const client::Job& job);
nlohmann::json ToJson(const client::ServerInfo& info);
nlohmann::json ToJson(const std::vector<client::TimelineEntry>& timeline);

/// The text of all JSON that the command writes: in one line, or indented. Characters that a
/// terminal would obey are escaped, since a prompt may be another user's. Bytes that are not UTF-8,
/// which a message may quote, become U+FFFD.
std::string PrintableJson(const nlohmann::json& json, int indent = -1);

/// Parses a user's file. InvalidArgument also when an object has a key twice, of which
/// nlohmann::json would silently keep the last.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text);

}  // namespace denoised::command
