#include "server/api/server_info.h"

#include <algorithm>
#include <chrono>

#include "server/models/catalog.h"
#include "server/version.h"

namespace denoised {
namespace {

/// Initialised before main: the start of the process, near enough.
const std::chrono::system_clock::time_point process_start = std::chrono::system_clock::now();

double Seconds(std::chrono::milliseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

void AddFeatures(const Config& config, v1::GetServerInfoResponse* info) {
  const auto add = [&](bool there, v1::ServerFeature feature) {
    if (there) info->add_features(feature);
  };
  add(config.security.tls(), v1::SERVER_FEATURE_TLS);
  add(!config.security.tls_client_ca.empty(), v1::SERVER_FEATURE_MUTUAL_TLS);
  add(!config.security.clients.empty(), v1::SERVER_FEATURE_TOKENS);
  add(config.admin, v1::SERVER_FEATURE_MODEL_ADMIN);
  add(config.reload_models.count() > 0, v1::SERVER_FEATURE_MODEL_RELOAD);
  add(config.reflection, v1::SERVER_FEATURE_REFLECTION);
}

/// Fields that are optional on the wire stay unset where 0 means no bound.
v1::ServerLimits LimitsOf(const Config& config, const Caller& caller) {
  const RequestLimits request = Within(caller.limits, config.limits);
  const ConnectionLimits& connections = config.connections;
  const EngineOptions& engine = config.engine;
  v1::ServerLimits limits;
  limits.set_max_request_bytes(request.max_request_bytes);
  limits.set_max_reply_bytes(request.max_reply_bytes);
  limits.set_max_init_pixels(request.max_init_pixels);
  limits.set_max_tensor_bytes(request.max_tensor_bytes);
  limits.set_max_count(LowerLimit(engine.LargestCount(), request.max_count));
  if (request.max_steps > 0) limits.set_max_steps(request.max_steps);
  if (request.max_previews_per_second > 0) {
    limits.set_max_previews_per_second(request.max_previews_per_second);
  }
  limits.set_max_queued_requests(engine.max_queued_requests);
  limits.set_max_queued_images(engine.max_queued_images);
  limits.set_max_queued_bytes(static_cast<int64_t>(engine.max_queued_bytes));
  const int queued =
      LowerLimit(engine.max_queued_requests_per_client, caller.limits.max_queued_requests);
  if (queued > 0) limits.set_max_queued_requests_per_client(queued);
  limits.set_max_streams_per_client(
      LowerLimit(connections.max_streams_per_client, caller.limits.max_streams));
  limits.set_max_streams_per_connection(connections.max_streams);
  limits.set_write_timeout_seconds(Seconds(config.write_timeout));
  limits.set_min_ping_interval_seconds(Seconds(connections.min_ping));
  if (connections.max_idle.count() > 0) {
    limits.set_max_connection_idle_seconds(Seconds(connections.max_idle));
  }
  if (connections.max_age.count() > 0) {
    limits.set_max_connection_age_seconds(Seconds(connections.max_age));
  }
  limits.set_job_retention_seconds(Seconds(config.jobs.time));
  limits.set_max_kept_job_bytes(config.jobs.max_bytes);
  limits.set_drain_grace_seconds(Seconds(config.grace));
  return limits;
}

}  // namespace

std::string DeviceNames(const Engine& engine) {
  std::string names;
  for (const DeviceState& device : engine.Devices())
    names += (names.empty() ? "" : ",") + device.name;
  return names;
}

v1::ServerState StateOf(const Serving& serving) {
  if (serving.drain == DrainState::kLameDuck) return v1::SERVER_STATE_LAME_DUCK;
  if (serving.draining()) return v1::SERVER_STATE_DRAINING;
  const auto models = serving.catalog->All();
  const bool ready = std::any_of(models.begin(), models.end(), [](const CatalogModel& model) {
    return model.info->state == ModelState::kReady;
  });
  return ready ? v1::SERVER_STATE_SERVING : v1::SERVER_STATE_STARTING;
}

v1::GetServerInfoResponse DescribeServer(const Serving& serving, const CallRecord& call) {
  const Config& config = *serving.config;
  v1::GetServerInfoResponse info;
  info.set_version(kVersion);
  info.set_build(kBuild);
  info.set_state(StateOf(serving));
  info.set_device(DeviceNames(*serving.engine));
  for (const DeviceState& state : serving.engine->Devices()) {
    v1::Device* const device = info.add_devices();
    device->set_name(state.name);
    device->set_description(state.description);
    device->set_error(std::string(state.health.message()));
    info.set_device_description(state.description);
  }
  info.mutable_start_time()->set_seconds(std::chrono::system_clock::to_time_t(process_start));
  info.set_uptime_seconds(
      std::chrono::duration<double>(std::chrono::system_clock::now() - process_start).count());
  AddFeatures(config, &info);
  *info.mutable_limits() = LimitsOf(config, call.caller());
  info.set_client(call.caller().name);
  info.set_batching(config.engine.batching == Batching::kStep ? "step" : "request");
  return info;
}

}  // namespace denoised
