// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <optional>
#include <string>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "server/jobs/memory_budget.h"
#include "server/jobs/rendering.h"
#include "server/security/clients.h"

namespace denoised {

/// A request for images as its call brought it.
struct JobRequest {
  using Clock = std::chrono::steady_clock;

  const v1::GenerationParams& params;
  const v1::PreviewOptions* preview;  // null: no previews
  bool together;                      // all images leave in one message
  Caller caller;
  std::string peer;  // where the call came from
  std::string traceparent;
  Clock::time_point arrival;
  std::optional<Clock::time_point> deadline;
  /// What the caller's protocol calls a field of denoised.v1: "params.steps". Null: the same.
  std::string (*field_name)(const std::string& field) = nullptr;
};

/// Whether `id` may be used as GenerationParams.request_id says: 1 to 128 printable ASCII
/// characters.
bool IsRequestId(const std::string& id);

/// What became of a request.
struct PreparedJob {
  /// The engine's name of the version that will draw, "digits@2". Set as soon as it is known, also
  /// when the request is refused later.
  std::string model;
  /// The version left while the request was checked. Its successor can be asked.
  bool replaced = false;
  EffectiveJob job;
  v1::EffectiveParams params;  // what the client is told of it
  Rendering image, preview;
  MemoryBudget::Lease memory;  // of the tensors in `job`
};

/// Turns requests into jobs. The room of the services has the one that knows the wire's fields and
/// the catalog.
class JobPreparer {
 public:
  virtual ~JobPreparer() = default;
  /// Checks all of the request, on a worker thread. OK, or what the client is told; then only
  /// `model` and `replaced` of the result are set, or nothing. `request_id` is the job's.
  virtual grpc::Status Prepare(const JobRequest& request, const std::string& request_id,
                               PreparedJob* prepared) = 0;
};

}  // namespace denoised
