#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "server/catalog.h"
#include "server/health.h"
#include "server/jobs.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/service.h"
#include "server/version.h"
#include "server/worker_pool.h"
#include "server/write_watch.h"

namespace denoised {
namespace {

using Clock = std::chrono::steady_clock;

/// Initialised before main: the start of the process, near enough for startup_seconds.
const Clock::time_point process_start = Clock::now();

int WorkerThreads(int asked) {
  return asked > 0 ? asked : std::max(2, static_cast<int>(std::thread::hardware_concurrency() / 2));
}

void Limits(const Config& config, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(config.limits.max_request_bytes));
  // Replies are bounded by RequestLimits::max_reply_bytes, before anything is drawn.
  builder->SetMaxSendMessageSize(-1);
  // Two servers on one port would share its connections silently.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Queued clients may ping: by default gRPC cuts off whoever pings without data more often than
  // every five minutes.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS,
                              static_cast<int>(config.keepalive.count()));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  if (config.max_connection_age.count() > 0) {
    builder->AddChannelArgument(
        GRPC_ARG_MAX_CONNECTION_AGE_MS,
        static_cast<int>(std::min<int64_t>(config.max_connection_age.count(), INT32_MAX)));
    // Streams that run may end: a job is never cut off by the age of its connection.
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, INT32_MAX);
  }
}

bool IsLoopback(const std::string& address) {
  return address.rfind("127.", 0) == 0 || address.rfind("localhost:", 0) == 0 ||
         address.rfind("[::1]", 0) == 0;
}

std::string WithPort(const std::string& address, int port) {
  return address.substr(0, address.rfind(':') + 1) + std::to_string(port);
}

}  // namespace

/// In the order of construction; what stands later uses what stands earlier.
struct Server::State {
  State(const Config& config, std::unique_ptr<Engine> engine_in)
      : config(config),
        jobs(&serving, config.jobs),
        workers(WorkerThreads(config.worker_threads)),
        write_watch(config.write_timeout, [this] { metrics.ReaderStalled(); }),
        engine(std::move(engine_in)),
        catalog(config.models, engine.get()),
        service(&serving) {
    serving.engine = engine.get();
    serving.catalog = &catalog;
    serving.jobs = &jobs;
    serving.workers = &workers;
    serving.metrics = &metrics;
    serving.write_watch = &write_watch;
    serving.limits = config.limits;
    engine->SetObserver(&metrics);
  }

  void Announce() const;
  void LoadModels();
  void KeepHouse();

  const Config config;
  Metrics metrics;
  Serving serving;
  Jobs jobs;
  WorkerPool workers;
  WriteWatch write_watch;
  std::unique_ptr<Engine> engine;
  Catalog catalog;
  ImageGenerationService service;
  std::unique_ptr<grpc::Server> grpc_server;
  std::unique_ptr<Health> health;
  int port = 0;

  std::mutex mutex;
  std::condition_variable loaded_changed;
  std::optional<absl::Status> loaded;  // guarded by mutex
  bool stopping = false;               // guarded by mutex
  std::condition_variable stop;
  std::once_flag drained;
  std::thread loader, housekeeper;
};

void Server::State::Announce() const {
  log::Fields fields = {{"version", kVersion},
                        {"address", WithPort(config.listen, port)},
                        {"device", engine->DeviceName()},
                        {"device_description", engine->DeviceDescription()},
                        {"models", static_cast<int>(config.models.size())}};
  if (metrics.port() != 0) {
    fields.push_back(
        {"metrics", "http://" + WithPort(config.metrics_listen, metrics.port()) + "/metrics"});
  }
  log::Info("listening", fields);
  if (!IsLoopback(config.listen)) {
    log::Warning("the port has neither encryption nor login; keep it behind a proxy",
                 {{"address", config.listen}});
  }
}

void Server::State::LoadModels() {
  absl::Status first_error;
  int ready = 0;
  for (const ModelSource& source : catalog.sources()) {
    if (serving.draining) break;
    log::Info("loading model", {{"model", source.name}, {"directory", source.directory}});
    const Clock::time_point start = Clock::now();
    const absl::Status status = engine->Open(source.name, source.directory);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (!status.ok()) {
      catalog.Fail(source.name, status);
      if (first_error.ok()) first_error = Annotate(status, "model " + source.name);
      log::Error("model failed",
                 {{"model", source.name}, {"error", std::string(status.message())}});
      continue;
    }
    ++ready;
    metrics.ModelLoaded(source.name, seconds);
    log::Info("model ready", {{"model", source.name}, {"seconds", seconds}});
  }
  if (ready > 0) {
    const double seconds = std::chrono::duration<double>(Clock::now() - process_start).count();
    metrics.Serving(seconds);
    health->Serve();
    log::Info("serving", {{"models", ready}, {"seconds_since_start", seconds}});
  }
  std::lock_guard lock(mutex);
  loaded = ready > 0 ? absl::OkStatus() : first_error;
  loaded_changed.notify_all();
}

void Server::State::KeepHouse() {
  const auto period = std::clamp<std::chrono::milliseconds>(
      config.jobs.time / 4, std::chrono::milliseconds(10), std::chrono::seconds(1));
  std::unique_lock lock(mutex);
  while (!stop.wait_for(lock, period, [this] { return stopping; })) {
    lock.unlock();
    jobs.Expire();
    lock.lock();
  }
}

Server::Server(std::unique_ptr<State> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config,
                                                      std::unique_ptr<Engine> engine) {
  auto state = std::make_unique<State>(config, std::move(engine));
  if (!config.metrics_listen.empty()) {
    DENOISED_RETURN_IF_ERROR(
        state->metrics.Serve(config.metrics_listen, state->engine.get(), &state->catalog));
  }
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  Limits(config, &builder);
  builder.AddListeningPort(config.listen, grpc::InsecureServerCredentials(), &state->port);
  builder.RegisterService(&state->service);
  state->grpc_server = builder.BuildAndStart();
  if (state->grpc_server == nullptr || state->port == 0) {
    state->metrics.Detach();
    return InvalidArgument(
        "--listen {}: cannot listen there; is the port in use? Choose another, "
        "or port 0 for a free one",
        config.listen);
  }
  state->health = std::make_unique<Health>(state->grpc_server->GetHealthCheckService());
  state->Announce();
  State* raw = state.get();
  state->loader = std::thread([raw] { raw->LoadModels(); });
  state->housekeeper = std::thread([raw] { raw->KeepHouse(); });
  return std::unique_ptr<Server>(new Server(std::move(state)));
}

Server::~Server() {
  Drain(std::chrono::milliseconds(0));
  state_->loader.join();
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->stop.notify_all();
  state_->housekeeper.join();
  state_->metrics.Detach();
}

int Server::port() const { return state_->port; }
int Server::metrics_port() const { return state_->metrics.port(); }

std::optional<absl::Status> Server::Loaded(std::chrono::milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  state_->loaded_changed.wait_for(lock, timeout, [this] { return state_->loaded.has_value(); });
  return state_->loaded;
}

absl::Status Server::CheckDevice() {
  const absl::Status status = state_->engine->Health();
  if (!status.ok()) state_->health->Die();
  return status;
}

void Server::Drain(std::chrono::milliseconds grace) {
  std::call_once(state_->drained, [&] {
    const Clock::time_point deadline = Clock::now() + grace;
    state_->health->Stop();
    state_->serving.draining = true;
    state_->engine->Drain(deadline);
    // The images of the last jobs are on their way through the workers and to their readers.
    const Clock::time_point flushed = std::max(deadline, Clock::now() + std::chrono::seconds(1));
    if (!state_->service.active().WaitForNone(flushed)) {
      log::Warning("calls were still being read at the end of the grace period; cancelling them");
    }
    // An open health watch would hold a shutdown without deadline forever.
    state_->grpc_server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  });
}

}  // namespace denoised
