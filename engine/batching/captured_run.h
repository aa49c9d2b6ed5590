// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "engine/backend/compute_device.h"

namespace denoised {

/// Work of a device that is run many times: captured once as a graph, and launched. Where there is
/// no memory for a graph, each run enqueues its ops, which is slower and has the same bits. Used by
/// the thread that owns the device.
class CapturedRun {
 public:
  /// `body` enqueues the work. `device`, and what the body refers to, must outlive the run.
  CapturedRun(ComputeDevice& device, std::function<void()> body);

  /// Captures the graph unless there is one. Call it before Run(), and before what Run() reads is
  /// put where the body may write. If there is no memory, it is tried again when more is free.
  absl::Status Capture();

  struct Ran {
    std::unique_ptr<Marker> begin, end;  // around it, without the capture
  };
  /// Enqueues the work.
  absl::StatusOr<Ran> Run();

 private:
  ComputeDevice& device_;
  const std::function<void()> body_;
  std::unique_ptr<Graph> graph_;
  std::optional<size_t> too_little_;  // bytes that were free when a capture failed
};

}  // namespace denoised
