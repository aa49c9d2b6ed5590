#pragma once

#include <string>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "server/api/call_record.h"
#include "server/serving.h"

namespace denoised {

/// The names of the engine's devices with commas, lost ones too: "cuda:0,cuda:1".
std::string DeviceNames(const Engine& engine);
/// Whether the server takes requests now.
v1::ServerState StateOf(const Serving& serving);

/// What GetServerInfo replies to this call.
v1::GetServerInfoResponse DescribeServer(const Serving& serving, const CallRecord& call);

}  // namespace denoised
