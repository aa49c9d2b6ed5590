// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "server/jobs/job_request.h"
#include "server/jobs/memory_budget.h"
#include "server/jobs/queue_wait.h"
#include "server/models/catalog.h"
#include "server/security/limits.h"

namespace denoised {

/// Appends the engine's violations to the server's in `all`; each field once. What was refused is
/// not in `spec`, so the engine misses it; that is not told of a field that is in `params` or that
/// the server has complained about.
void MergeViolations(const std::vector<FieldViolation>& engine, const v1::GenerationParams& params,
                     const JobSpec& spec, std::vector<FieldViolation>* all);

/// Whether `model` reads what the request's first condition holds.
bool Takes(const ModelInfo& model, const v1::GenerationParams& params);

/// Finds the model of a request, translates it and has the engine fill in the defaults. Collects
/// all violations. Thread-safe; all pointers must outlive it.
class RequestPreparer final : public JobPreparer {
 public:
  RequestPreparer(const Catalog* catalog, const Engine* engine, const RequestLimits& limits,
                  MemoryBudget* decoding, const QueueWait* queue_wait)
      : catalog_(catalog),
        engine_(engine),
        limits_(limits),
        decoding_(decoding),
        queue_wait_(queue_wait) {}

  grpc::Status Prepare(const JobRequest& request, const std::string& request_id,
                       PreparedJob* prepared) override;

 private:
  const Catalog* const catalog_;
  const Engine* const engine_;
  const RequestLimits limits_;
  MemoryBudget* const decoding_;
  const QueueWait* const queue_wait_;
};

}  // namespace denoised
