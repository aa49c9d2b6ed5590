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

/// A request for images as it arrived.
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

  std::string FieldName(const std::string& field) const {
    return field_name == nullptr ? field : field_name(field);
  }
};

/// Whether `id` may be used as GenerationParams.request_id says: 1 to 128 printable ASCII
/// characters.
bool IsRequestId(const std::string& id);

/// The result of checking a request.
struct PreparedJob {
  /// The engine's name of the version that will draw, "digits@2". Set as soon as it is known, even
  /// if the request is refused later.
  std::string model;
  /// The version was replaced while the request was checked. Try again with its successor.
  bool replaced = false;
  EffectiveJob job;
  v1::GenerationParams params;  // of `job`, as reported to the client
  v1::Run run;
  Rendering image, preview;
  MemoryBudget::Lease memory;  // of the tensors in `job`
};

/// Turns requests into jobs. api/ implements it, since it needs the fields of the wire and the
/// catalog.
class JobPreparer {
 public:
  virtual ~JobPreparer() = default;
  /// Checks the whole request, on a worker thread. Returns OK or the client's status; on an error
  /// only `model` and `replaced` may be set. `request_id` is the job's.
  virtual grpc::Status Prepare(const JobRequest& request, const std::string& request_id,
                               PreparedJob* prepared) = 0;
};

}  // namespace denoised
