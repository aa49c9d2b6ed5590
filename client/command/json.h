#pragma once

#include <nlohmann/json.hpp>

#include "denoised/generation.h"

/// Answers as JSON, under the field names of the wire contract.

namespace denoised::command {

nlohmann::json ToJson(const client::EffectiveParams& params);
nlohmann::json ToJson(const client::Timing& timing);
/// Without its content.
nlohmann::json ToJson(const client::Image& image);
nlohmann::json ToJson(const client::Model& model);

}  // namespace denoised::command
