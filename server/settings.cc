// SPDX-License-Identifier: Apache-2.0
#include "server/settings.h"

#include <chrono>

#include "server/security/clients.h"

namespace denoised {
namespace {

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

/// Fields that are optional on the wire stay unset if 0 means no limit.
v1::ServerLimits LimitsOf(const Config& config) {
  const RequestLimits& request = config.limits;
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
  if (connections.max_queued_requests_per_client > 0) {
    limits.set_max_queued_requests_per_client(connections.max_queued_requests_per_client);
  }
  limits.set_max_streams_per_client(connections.max_streams_per_client);
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

v1::GetServerInfoResponse DescribeSettings(const Config& config) {
  v1::GetServerInfoResponse settings;
  AddFeatures(config, &settings);
  *settings.mutable_limits() = LimitsOf(config);
  settings.set_batching(config.engine.batching == Batching::kStep ? "step" : "request");
  return settings;
}

}  // namespace denoised
