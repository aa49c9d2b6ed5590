// SPDX-License-Identifier: Apache-2.0
#include "server/api/server_info.h"

#include <chrono>

#include "server/version.h"

namespace denoised {
namespace {

/// Initialised before main: the start of the process, near enough.
const std::chrono::system_clock::time_point process_start = std::chrono::system_clock::now();

/// Lowers the server's limits to those of one client.
void Lower(const ClientLimits& client, v1::ServerLimits* limits) {
  limits->set_max_count(LowerLimit(client.max_count, limits->max_count()));
  if (const int steps = LowerLimit(client.max_steps, limits->max_steps()); steps > 0) {
    limits->set_max_steps(steps);
  }
  const int queued =
      LowerLimit(client.max_queued_requests, limits->max_queued_requests_per_client());
  if (queued > 0) limits->set_max_queued_requests_per_client(queued);
  limits->set_max_streams_per_client(
      LowerLimit(client.max_streams, limits->max_streams_per_client()));
}

}  // namespace

std::string ServerInfo::DeviceNames() const {
  std::string names;
  for (const DeviceState& device : engine_->Devices()) {
    names += (names.empty() ? "" : ",") + device.name;
  }
  return names;
}

v1::GetServerInfoResponse ServerInfo::Describe(const Caller& caller) const {
  v1::GetServerInfoResponse info = settings_;
  info.set_version(kVersion);
  info.set_build(kBuild);
  info.set_state(health_->State());
  info.set_device(DeviceNames());
  for (const DeviceState& state : engine_->Devices()) {
    v1::Device* const device = info.add_devices();
    device->set_name(state.name);
    device->set_description(state.description);
    device->set_error(std::string(state.health.message()));
    info.set_device_description(state.description);
  }
  info.mutable_start_time()->set_seconds(std::chrono::system_clock::to_time_t(process_start));
  info.set_uptime_seconds(
      std::chrono::duration<double>(std::chrono::system_clock::now() - process_start).count());
  Lower(caller.limits, info.mutable_limits());
  info.set_client(caller.name);
  return info;
}

}  // namespace denoised
