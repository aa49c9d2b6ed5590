// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "tests/batching/collector.h"

namespace denoised {

/// Resolves `spec`, in which nothing may be wrong, and submits it.
inline std::shared_ptr<Collector> Submit(Engine& engine, const JobSpec& spec, JobId* id = nullptr) {
  std::vector<FieldViolation> violations;
  const auto job = engine.Resolve(spec, &violations);
  EXPECT_TRUE(job.ok()) << job.status();
  EXPECT_TRUE(violations.empty()) << violations[0].field << " " << violations[0].description;
  auto collector = std::make_shared<Collector>();
  const auto submitted = engine.Submit(*job, collector);
  EXPECT_TRUE(submitted.ok()) << submitted.status();
  if (id) *id = *submitted;
  return collector;
}

}  // namespace denoised
