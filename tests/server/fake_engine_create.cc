// SPDX-License-Identifier: Apache-2.0
// Gives main.cc a FakeEngine: the binary denoised_with_fake_engine, for tests of the whole process
// and for load tests.

#include <thread>

#include "tests/server/fake_engine.h"

namespace denoised {

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  FakeEngineOptions fake;
  fake.evaluation_cost = std::chrono::milliseconds(2);
  // Longer than any test.
  fake.on_open = [](const std::string& directory) {
    if (directory.find("slow") != std::string::npos) {
      std::this_thread::sleep_for(std::chrono::hours(1));
    }
  };
  if (options.max_rows > 0) fake.max_rows = options.max_rows;
  if (options.max_slots > 0) fake.max_slots = options.max_slots;
  fake.max_queued_images = options.max_queued_images;
  return std::make_unique<FakeEngine>(fake);
}

absl::StatusOr<std::string> Calibrate(const std::string&, const EngineOptions&) {
  return absl::UnimplementedError("the fake engine has nothing to calibrate");
}

}  // namespace denoised
