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
  // As a device may be lost at any time.
  const auto made = std::make_shared<FakeEngine*>(nullptr);
  fake.on_opened = [made](const std::string& directory) {
    for (const int device : {0, 1}) {
      if (directory.find(fmt::format("loses-device-{}", device)) != std::string::npos) {
        (*made)->BreakDevice(device, Unavailable("device {} fell off the bus", device));
      }
    }
  };
  if (options.max_rows > 0) fake.max_rows = options.max_rows;
  if (options.max_slots > 0) fake.max_slots = options.max_slots;
  fake.max_queued_images = options.max_queued_images;
  auto engine = std::make_unique<FakeEngine>(fake);
  *made = engine.get();
  return engine;
}

absl::StatusOr<std::string> Calibrate(const std::string&, const EngineOptions&) {
  return absl::UnimplementedError("the fake engine has nothing to calibrate");
}

}  // namespace denoised
