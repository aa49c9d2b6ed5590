// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/captured_run.h"

#include <utility>

namespace denoised {

CapturedRun::CapturedRun(ComputeDevice& device, std::function<void()> body)
    : device_(device), body_(std::move(body)) {}

absl::Status CapturedRun::Capture() {
  if (graph_ || (too_little_ && device_.memory().free <= *too_little_)) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<Graph>> graph = device_.Capture(body_);
  if (graph.ok()) {
    graph_ = *std::move(graph);
  } else if (absl::IsResourceExhausted(graph.status())) {
    too_little_ = device_.memory().free;
  } else {
    return graph.status();
  }
  return absl::OkStatus();
}

absl::StatusOr<CapturedRun::Ran> CapturedRun::Run() {
  Ran ran;
  ran.begin = device_.Mark();
  if (graph_) {
    device_.Launch(*graph_);
  } else {
    body_();
  }
  ran.end = device_.Mark();
  DENOISED_RETURN_IF_ERROR(device_.status());
  return ran;
}

}  // namespace denoised
