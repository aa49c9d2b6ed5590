#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "denoised/generation.h"

/// Answers as JSON, under the field names of the wire contract.

namespace denoised::command {

nlohmann::json ToJson(const client::EffectiveParams& params);
nlohmann::json ToJson(const client::Timing& timing);
/// Without its content.
nlohmann::json ToJson(const client::Image& image);
nlohmann::json ToJson(const client::Model& model);
nlohmann::json ToJson(const client::Job& job);
nlohmann::json ToJson(const client::ServerInfo& info);
nlohmann::json ToJson(const std::vector<client::TimelineEntry>& timeline);

}  // namespace denoised::command
