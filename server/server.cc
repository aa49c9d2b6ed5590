// SPDX-License-Identifier: Apache-2.0
#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
#include <malloc.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "server/api/health.h"
#include "server/api/inference_service.h"
#include "server/api/methods.h"
#include "server/api/model_admin.h"
#include "server/api/request_preparer.h"
#include "server/api/server_info.h"
#include "server/api/service.h"
#include "server/api/write_watch.h"
#include "server/http/http_api.h"
#include "server/http/http_port.h"
#include "server/http/metrics_port.h"
#include "server/jobs/jobs.h"
#include "server/jobs/memory_budget.h"
#include "server/jobs/worker_pool.h"
#include "server/models/catalog.h"
#include "server/security/acceptor.h"
#include "server/security/client_load.h"
#include "server/security/clients.h"
#include "server/security/credentials.h"
#include "server/settings.h"
#include "server/snapshots.h"
#include "server/status/model_name.h"
#include "server/telemetry/log.h"
#include "server/telemetry/metrics.h"
#include "server/version.h"

namespace denoised {
namespace {

using Clock = std::chrono::steady_clock;

/// Initialised before main: the start of the process, near enough for startup_seconds.
const Clock::time_point process_start = Clock::now();

/// How often free memory goes back to the system. malloc keeps freed pages in the arena of the
/// thread that took them, where other threads cannot use them, so resident memory grows without a
/// leak.
constexpr std::chrono::minutes kTrimPeriod{1};

/// A model directory that has not changed for this long is complete.
constexpr std::chrono::milliseconds kSettling{1000};

int Milliseconds(std::chrono::milliseconds duration) {
  return static_cast<int>(std::min<int64_t>(duration.count(), INT32_MAX));
}

void Limits(const Config& config, grpc::ServerBuilder* builder) {
  const ConnectionLimits& connections = config.connections;
  builder->SetMaxReceiveMessageSize(static_cast<int>(config.limits.max_request_bytes));
  // gRPC 1.51 inflates a message before it compares its size with the maximum, into memory that the
  // quota does not count: 200 KB would take 200 MB. Uploads are compressed pictures anyway.
  for (const auto algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    builder->SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  // Replies are bounded by RequestLimits::max_reply_bytes, before anything is drawn, or before they
  // are sent if a call has joined a job that was to be streamed.
  builder->SetMaxSendMessageSize(-1);
  // Queued clients may ping. By default gRPC closes connections that ping without data more often
  // than every five minutes.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              Milliseconds(connections.min_ping));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(connections.keepalive));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                              Milliseconds(connections.handshake));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, connections.max_streams);
  if (connections.max_idle.count() > 0) {
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                                Milliseconds(connections.max_idle));
  }
  if (connections.max_age.count() > 0) {
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, Milliseconds(connections.max_age));
    // Streams that run may end: a job is never cut off by the age of its connection.
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, INT32_MAX);
  }
  grpc::ResourceQuota quota("denoised");
  quota.Resize(static_cast<size_t>(connections.max_buffered_bytes));
  builder->SetResourceQuota(quota);
}

/// InitProtoReflectionServerBuilderPlugin is for every builder of the process from then on.
class WithoutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins,
                  [](const auto& plugin) { return plugin->name() == "proto_server_reflection"; });
  }
};

std::string WithPort(const std::string& address, int port) {
  return address.substr(0, address.rfind(':') + 1) + std::to_string(port);
}

}  // namespace

/// Members are constructed in this order and destroyed in reverse. A member may have pointers to
/// later ones (`jobs` has them to `workers` and `preparer`); its constructor and destructor do not
/// use them.
struct Server::State {
  State(const Config& config, std::unique_ptr<Engine> engine_in,
        std::unique_ptr<Clients> clients_in, CatalogOptions models)
      : config(config),
        client_load(config.connections.max_streams_per_client,
                    config.connections.max_queued_requests_per_client),
        decoding(config.max_decoding_bytes),
        messages(config.connections.max_buffered_bytes),
        clients(std::move(clients_in)),
        calls(clients.get(), &metrics),
        jobs({.engine = engine_in.get(),
              .preparer = &preparer,
              .workers = &workers,
              .client_load = &client_load,
              .metrics = &metrics,
              .queue_wait = &queue_wait,
              .drain = &drain,
              .max_previews_per_second = config.limits.max_previews_per_second},
             config.jobs),
        workers(WorkerThreads(config.worker_threads)),
        write_watch(config.write_timeout, [this] { metrics.ReaderStalled(); }),
        engine(std::move(engine_in)),
        catalog(std::move(models), engine.get(), &metrics),
        info(DescribeSettings(config), engine.get(), &health),
        preparer(&catalog, engine.get(), config.limits, &decoding, &queue_wait),
        call_context{&calls,      &jobs,        &workers,  &client_load,
                     &queue_wait, &write_watch, &messages, config.limits.max_reply_bytes},
        methods(&jobs, &catalog, &info, config.limits),
        service(call_context, &methods),
        model_changes(&catalog, &info, config.limits),
        admin(config.admin ? std::make_unique<AdminCalls>(&calls, &drain, &write_watch) : nullptr),
        inference(call_context, engine.get(), &catalog, &info, config.limits, &decoding,
                  &metrics.totals(), admin.get()),
        model_admin(
            admin ? std::make_unique<ModelAdminService>(call_context, admin.get(), &model_changes)
                  : nullptr) {
    engine->SetObserver(&metrics);
  }

  /// The metrics, as text for Prometheus.
  std::string Scrape();
  /// Opens the port for Prometheus and probes.
  absl::Status ServeMetrics();
  /// Opens the HTTP port.
  absl::Status ServeHttp();
  void Announce() const;
  void LoadModels();
  /// Drops what was kept long enough.
  void KeepHouse();
  /// Waits, and returns whether the server goes on.
  bool Pause(std::chrono::milliseconds period);
  /// Runs `task` once every `period` until the server stops.
  void Repeat(std::chrono::milliseconds period, const std::function<void()>& task);

  const Config config;
  Metrics metrics;
  DrainProgress drain;
  Health health{&drain};
  QueueWait queue_wait;
  ClientLoad client_load;
  MemoryBudget decoding, messages;
  std::unique_ptr<Clients> clients;
  Calls calls;
  Jobs jobs;
  WorkerPool workers;
  WriteWatch write_watch;
  std::unique_ptr<Engine> engine;
  Catalog catalog;
  ServerInfo info;
  RequestPreparer preparer;
  GenerationCallContext call_context;
  Methods methods;
  ImageGenerationService service;
  ModelChanges model_changes;
  std::unique_ptr<AdminCalls> admin;  // null where nobody may change the models
  InferenceService inference;
  std::unique_ptr<ModelAdminService> model_admin;  // null as `admin`
  std::unique_ptr<grpc::Server> grpc_server;
  std::unique_ptr<Acceptor> acceptor;
  std::unique_ptr<MetricsPort> metrics_port;  // null when it is not wanted
  std::unique_ptr<HttpApi> http_api;          // null as `http_port`
  std::unique_ptr<HttpPort> http_port;        // null when it is not wanted

  Mutex mutex;
  ConditionVariable loaded_changed;
  std::optional<absl::Status> loaded ABSL_GUARDED_BY(mutex);
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  ConditionVariable stop;
  std::once_flag drained;
  std::thread loader, housekeeper, reloader, trimmer;
  std::set<std::string> lost_devices;  // that CheckDevices has seen
};

void Server::State::Announce() const {
  log::Fields fields = {{"version", kVersion},
                        {"address", WithPort(config.listen, acceptor->port())},
                        {"device", info.DeviceNames()},
                        {"device_description", engine->Devices().front().description},
                        {"models", static_cast<int>(config.models.size())},
                        {"admins", !config.admin              ? "nobody"
                                   : EverybodyIsAdmin(config) ? "everybody"
                                                              : "clients with \"admin\": true"}};
  if (http_port) {
    fields.push_back({"http", (config.security.tls() ? "https://" : "http://") +
                                  WithPort(config.http_listen, http_port->port())});
  }
  if (metrics_port) {
    fields.push_back({"metrics", "http://" + WithPort(config.metrics_listen, metrics_port->port()) +
                                     "/metrics"});
  }
  log::Info("listening", fields);
  const SecurityConfig& security = config.security;
  for (const std::string& address : {config.listen, config.http_listen}) {
    if (address.empty() || IsLoopback(address)) continue;
    if (!security.tls()) {
      log::Warning(
          "the port has neither encryption nor login; keep it behind a proxy, or see "
          "--tls-cert and --clients",
          {{"address", address}});
    } else if (security.clients.empty() && security.tls_client_ca.empty()) {
      log::Warning("the port has no login: everybody may call; see --clients and --tls-client-ca",
                   {{"address", address}});
    }
  }
}

void Server::State::LoadModels() {
  absl::Status first_error;
  int ready = 0;
  const std::vector<std::string> listed = catalog.Listed();
  for (const std::string& model : listed) {
    if (drain.draining()) break;
    const absl::Status status = catalog.LoadListed(model);
    if (status.ok()) {
      ++ready;
    } else if (first_error.ok()) {
      first_error = Annotate(status, "model " + model);
    }
  }
  // When admins have unloaded all models, the server is as they left it.
  if (ready > 0 || listed.empty()) {
    const double seconds = std::chrono::duration<double>(Clock::now() - process_start).count();
    metrics.FirstServed(seconds);
    health.Serve();
    if (health.ready()) {
      log::Info("serving", {{"models", ready}, {"seconds_since_start", seconds}});
    }
  }
  MutexLock lock(&mutex);
  loaded = ready > 0 ? absl::OkStatus() : first_error;  // OK too when nothing was listed
  loaded_changed.NotifyAll();
}

std::string Server::State::Scrape() {
  const SnapshotSources sources{.engine = engine.get(),
                                .catalog = &catalog,
                                .jobs = &jobs,
                                .decoding = &decoding,
                                .drain = &drain,
                                .info = &info,
                                .security = config.security};
  std::vector<prometheus::MetricFamily> families = metrics.Collect();
  for (auto& more : {CollectServing(sources), CollectProcess()}) {
    families.insert(families.end(), more.begin(), more.end());
  }
  return prometheus::TextSerializer().Serialize(families);
}

absl::Status Server::State::ServeMetrics() {
  if (config.metrics_listen.empty()) return absl::OkStatus();
  const auto probe = [](bool ok) { return ok ? PageReply{200, "ok\n"} : PageReply{503, "no\n"}; };
  DENOISED_ASSIGN_OR_RETURN(
      metrics_port,
      MetricsPort::Listen(config.metrics_listen, config.connections.max_connections,
                          {{"/metrics",
                            [this] {
                              return PageReply{200, Scrape()};
                            }},
                           {"/healthz", [this, probe] { return probe(health.live()); }},
                           {"/readyz", [this, probe] { return probe(health.ready()); }}}));
  return absl::OkStatus();
}

absl::Status Server::State::ServeHttp() {
  if (config.http_listen.empty()) return absl::OkStatus();
  http_api = std::make_unique<HttpApi>(HttpApiContext{
      .calls = call_context,
      .methods = &methods,
      .catalog = &catalog,
      .admin = admin.get(),
      .changes = &model_changes,
      .health = &health,
      .clients = clients.get(),
      .metrics = &metrics,
      .scrape = [this] { return Scrape(); },
      .max_request_bytes = config.limits.max_request_bytes,
      .origins = config.http_origins,
      .check_host = config.security.clients.empty() && config.security.tls_client_ca.empty() &&
                    IsLoopback(config.http_listen),
      .link_time = config.http_link_time,
      .max_link_bytes = static_cast<size_t>(config.jobs.max_bytes)});
  const ConnectionLimits& connections = config.connections;
  const std::chrono::milliseconds idle = std::chrono::seconds(75);
  const HttpPortOptions options{
      .address = config.http_listen,
      .security = config.security,
      .max_connections = connections.max_connections,
      .handshake = connections.handshake,
      .idle = connections.max_idle.count() > 0 ? std::min(connections.max_idle, idle) : idle,
      .write_timeout = config.write_timeout,
      // A message in base64, and what stands around it; no more than there may be of all bodies,
      // which nobody should be told to try again.
      .max_body_bytes = std::min(config.limits.max_request_bytes / 3 * 4 + (64 << 10),
                                 connections.max_buffered_bytes)};
  DENOISED_ASSIGN_OR_RETURN(http_port,
                            HttpPort::Listen(options, http_api.get(), &messages, &metrics));
  http_port->Start();
  return absl::OkStatus();
}

void Server::State::KeepHouse() {
  jobs.Expire();
  if (http_api) http_api->Expire();
  std::set<std::string> models;
  for (const CatalogModel& model : catalog.All()) {
    models.insert(EngineName(model.name, model.version));
  }
  metrics.Retain(models);
}

bool Server::State::Pause(std::chrono::milliseconds period) {
  MutexLock lock(&mutex);
  const Clock::time_point end = Clock::now() + period;
  while (!stopping && Clock::now() < end) stop.WaitUntil(&mutex, end);
  return !stopping;
}

void Server::State::Repeat(std::chrono::milliseconds period, const std::function<void()>& task) {
  while (Pause(period)) task();
}

Server::Server(std::unique_ptr<State> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config,
                                                      std::unique_ptr<Engine> engine) {
  DENOISED_ASSIGN_OR_RETURN(
      auto clients,
      Clients::Open(config.security.clients, config.security.refresh, EverybodyIsAdmin(config)));
  DENOISED_ASSIGN_OR_RETURN(CatalogOptions models,
                            MakeCatalogOptions(config.models, config.model_roots, config.state_dir,
                                               config.models_directory));
  auto state =
      std::make_unique<State>(config, std::move(engine), std::move(clients), std::move(models));
  DENOISED_ASSIGN_OR_RETURN(
      const auto credentials,
      MakeServerCredentials(config.security, state->clients.get(), &state->metrics));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  if (!config.reflection) builder.SetOption(std::make_unique<WithoutReflection>());
  Limits(config, &builder);
  DENOISED_ASSIGN_OR_RETURN(state->acceptor,
                            Acceptor::Listen("--listen", config.listen,
                                             config.connections.max_connections, &state->metrics));
  auto handler = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials);
  builder.RegisterService(&state->service);
  builder.RegisterService(&state->inference);
  if (state->model_admin) builder.RegisterService(state->model_admin.get());
  state->grpc_server = builder.BuildAndStart();
  DENOISED_CHECK(state->grpc_server != nullptr, "gRPC cannot start a server");
  // gRPC's own health service says SERVING until it is told otherwise: before anybody can ask.
  state->health.Attach(state->grpc_server->GetHealthCheckService());
  DENOISED_RETURN_IF_ERROR(state->ServeMetrics());
  DENOISED_RETURN_IF_ERROR(state->ServeHttp());
  state->acceptor->Start([handler = std::shared_ptr(std::move(handler))](int listener, int fd) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = listener;
    connection.fd = fd;
    handler->HandleNewConnection(&connection);
  });
  state->Announce();
  State* raw = state.get();
  state->loader = std::thread([raw] { raw->LoadModels(); });
  state->housekeeper = std::thread([raw] {
    const auto period = std::clamp<std::chrono::milliseconds>(
        raw->config.jobs.time / 4, std::chrono::milliseconds(10), std::chrono::seconds(1));
    raw->Repeat(period, [raw] { raw->KeepHouse(); });
  });
  state->trimmer = std::thread([raw] { raw->Repeat(kTrimPeriod, [] { malloc_trim(0); }); });
  if (config.reload_models.count() > 0) {
    state->reloader = std::thread([raw] {
      const std::chrono::milliseconds period = raw->config.reload_models;
      raw->Repeat(period, [raw, period] {
        // A trainer may write its next snapshot before the period is over.
        while (raw->catalog.ReloadChanged() && raw->Pause(std::min(period, kSettling))) {
        }
      });
    });
  }
  return std::unique_ptr<Server>(new Server(std::move(state)));
}

Server::~Server() {
  Drain(std::chrono::milliseconds(0));
  state_->loader.join();
  {
    MutexLock lock(&state_->mutex);
    state_->stopping = true;
  }
  state_->stop.NotifyAll();
  state_->housekeeper.join();
  state_->trimmer.join();
  if (state_->reloader.joinable()) state_->reloader.join();
}

int Server::port() const { return state_->acceptor->port(); }
int Server::http_port() const { return state_->http_port ? state_->http_port->port() : 0; }
int Server::metrics_port() const { return state_->metrics_port ? state_->metrics_port->port() : 0; }

std::optional<absl::Status> Server::Loaded(std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  MutexLock lock(&state_->mutex);
  while (!state_->loaded && Clock::now() < deadline) {
    state_->loaded_changed.WaitUntil(&state_->mutex, deadline);
  }
  return state_->loaded;
}

absl::Status Server::CheckDevices() {
  const std::vector<DeviceState> devices = state_->engine->Devices();
  const auto left = std::count_if(devices.begin(), devices.end(),
                                  [](const DeviceState& device) { return device.health.ok(); });
  for (const DeviceState& device : devices) {
    if (device.health.ok() || !state_->lost_devices.insert(device.name).second) continue;
    log::Error("a device is lost", {{"device", device.name},
                                    {"error", std::string(device.health.message())},
                                    {"devices_left", static_cast<int>(left)}});
  }
  absl::Status status = state_->engine->Health();
  if (!status.ok()) state_->health.Die();
  return status;
}

bool Server::DestructorWaits() const {
  const std::vector<DeviceState> devices = state_->engine->Devices();
  const bool lost = std::any_of(devices.begin(), devices.end(),
                                [](const DeviceState& device) { return !device.health.ok(); });
  const std::vector<CatalogModel> models = state_->catalog.All();
  return lost || std::any_of(models.begin(), models.end(), [](const CatalogModel& model) {
           return model.info->state == ModelState::kLoading;
         });
}

void Server::Drain(std::chrono::milliseconds grace, std::chrono::milliseconds lame_duck) {
  std::call_once(state_->drained, [&] {
    DrainProgress& drain = state_->drain;
    const auto end = std::chrono::system_clock::now() + lame_duck + grace;
    drain.deadline = std::chrono::duration<double>(end.time_since_epoch()).count();
    drain.state = DrainState::kLameDuck;
    state_->health.Update();
    std::this_thread::sleep_for(lame_duck);
    const Clock::time_point deadline = Clock::now() + grace;
    drain.state = DrainState::kDraining;
    state_->health.Update();
    if (state_->http_port) state_->http_port->Drain();
    state_->engine->Drain(deadline);
    // The images of the last jobs are on their way through the workers and to their readers.
    const Clock::time_point flushed = std::max(deadline, Clock::now() + std::chrono::seconds(1));
    // A reply over HTTP may be written after the end of its call, or have none.
    const auto wait = [this](Clock::time_point until) {
      return state_->calls.WaitForNone(until) &&
             (!state_->http_port || state_->http_port->WaitForReplies(until));
    };
    if (!wait(flushed)) {
      if (state_->admin) state_->admin->EndCalls();
      if (!wait(Clock::now() + std::chrono::seconds(1))) {
        log::Warning("calls were still being read at the end of the grace period; cancelling them");
      }
    }
    state_->acceptor->Stop();
    if (state_->http_port) state_->http_port->Stop();
    // An open health watch would hold a shutdown without deadline forever.
    state_->grpc_server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  });
}

}  // namespace denoised
