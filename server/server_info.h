#pragma once

#include "denoised/v1/image_generation.pb.h"
#include "server/call_record.h"
#include "server/serving.h"

namespace denoised {

/// Whether the server takes requests now.
v1::ServerState StateOf(const Serving& serving);

/// What GetServerInfo replies to this call.
v1::GetServerInfoResponse DescribeServer(const Serving& serving, const CallRecord& call);

}  // namespace denoised
