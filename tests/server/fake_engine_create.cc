// SPDX-License-Identifier: Apache-2.0
// Gives main.cc a FakeEngine: the binary denoised_with_fake_engine, for tests of the whole process
// and for load tests.

#include "tests/server/fake_engine.h"

namespace denoised {

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  FakeEngineOptions fake;
  fake.evaluation_cost = std::chrono::milliseconds(2);
  fake.open_cost = std::chrono::seconds(20);
  fake.slow = "slow";
  if (options.max_rows > 0) fake.max_rows = options.max_rows;
  if (options.max_slots > 0) fake.max_slots = options.max_slots;
  fake.max_queued_images = options.max_queued_images;
  return std::make_unique<FakeEngine>(fake);
}

absl::StatusOr<std::string> Calibrate(const std::string&, const EngineOptions&) {
  return absl::UnimplementedError("the fake engine has nothing to calibrate");
}

}  // namespace denoised
