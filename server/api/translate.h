// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "server/jobs/memory_budget.h"
#include "server/jobs/rendering.h"
#include "server/models/catalog.h"
#include "server/security/limits.h"

/// Between the wire's messages and the engine's types.

namespace denoised {

struct Translation {
  JobSpec spec;
  Rendering image;
  Rendering preview;
  MemoryBudget::Lease memory;  // of the tensors in `spec`, and of what unpacking them took
  /// ResourceExhausted: others hold the memory that an upload needs, which was left unset.
  absl::Status memory_status;
  std::string memory_field;  // of that upload, as the path of a violation
};

/// Checks all that does not need the engine: presence, finiteness, the ranges that the proto
/// states, shapes and files. Whatever is wrong is appended to `violations` under its path in the
/// proto and left unset in the result, so that Engine::Resolve can go on to check the rest.
/// `preview` is null when none was asked for. `together`: all images leave in one message.
/// `request_id` is used when the request names none. What uploads need, by their headers, is
/// reserved in `memory` before they are unpacked; an upload that needs all of it and more is a
/// violation.
Translation Translate(const v1::GenerationParams& params, const v1::PreviewOptions* preview,
                      bool together, const std::string& request_id, const ModelInfo& model,
                      const RequestLimits& limits, MemoryBudget* memory,
                      std::vector<FieldViolation>* violations);

/// The priority of a request; normal if it is unset or unknown.
Priority ReadPriority(const v1::GenerationParams& params);

/// The path in the proto of a field of JobSpec: "class_labels[2]" is
/// "params.conditions[2].class_label".
std::string ProtoField(const std::string& job_field);

/// A complete request that reproduces `job`: every default is filled in, and images are returned as
/// in `rendering`. It has init_image, mask and initial_noise if the job does, without their bytes.
v1::GenerationParams ToProto(const EffectiveJob& job, const Rendering& rendering);

/// Facts about a job besides its parameters, for replies.
v1::Run RunOf(const EffectiveJob& job);

v1::Model ToProto(const CatalogModel& model, const std::string& device,
                  const RequestLimits& limits);

}  // namespace denoised
