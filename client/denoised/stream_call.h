// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "denoised/attempts.h"
#include "denoised/call_headers.h"
#include "denoised/connection.h"
#include "denoised/v1/image_generation.grpc.pb.h"

namespace denoised::client {

/// What a streaming call needs of the connection that makes it.
struct StreamCallSetup {
  std::optional<v1::StreamGenerateRequest> generate;  // unset: make the call of `watch` instead
  v1::WatchJobRequest watch;
  CallHeaders headers;
  Attempts attempts;
  std::optional<std::chrono::system_clock::time_point> deadline;
  std::function<absl::Status(const grpc::Status&)> to_status;
};

/// Begins the call.
std::unique_ptr<StreamCall> StartStreamCall(std::shared_ptr<v1::ImageGeneration::Stub> stub,
                                            StreamCallSetup setup, StreamListener listener,
                                            std::stop_token stop);

/// A call that failed before it could be made; on_done is called before this returns.
std::unique_ptr<StreamCall> FailedStreamCall(absl::Status status,
                                             const StreamListener& listener) noexcept;

}  // namespace denoised::client
