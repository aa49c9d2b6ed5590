// SPDX-License-Identifier: Apache-2.0
#include "denoised/connection.h"

#include <fmt/format.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <utility>

#include "denoised/attempts.h"
#include "denoised/backoff.h"
#include "denoised/call_headers.h"
#include "denoised/conversion.h"
#include "denoised/error.h"
#include "denoised/health/health.pb.h"
#include "denoised/read_file.h"
#include "denoised/rpc_status.h"
#include "denoised/stream_call.h"
#include "denoised/target.h"
#include "denoised/tls_files.h"
#include "denoised/v1/image_generation.grpc.pb.h"
#include "denoised/v1/model_admin.grpc.pb.h"

namespace denoised::client {
namespace {

/// The same for the same id, whoever computes it: FNV-1a (draft-eastlake-fnv).
uint64_t SeedOf(std::string_view request_id) {
  uint64_t hash = 14695981039346656037u;
  for (const unsigned char byte : request_id) hash = (hash ^ byte) * 1099511628211u;
  return hash;
}

std::optional<std::chrono::system_clock::time_point> Deadline(const CallOptions& options) {
  if (!options.timeout) return std::nullopt;
  return DeadlineAfter(*options.timeout);
}

absl::Status PlaintextToken(const char* what) {
  return absl::InvalidArgumentError(
      fmt::format("{} needs tls: anyone on the network could read the token. If something else "
                  "encrypts the connection, such as a service mesh, set allow_plaintext_token "
                  "(denoise --allow-plaintext-token)",
                  what));
}

// Calls that go to one server, not to any of several.
constexpr char kJobs[] = "a job is known to only";
constexpr char kModels[] = "models are changed on only";

/// For calls that may have been carried out though their reply was lost: a second LoadModel would
/// load a second version, a second UnloadModel or DeleteAlias would end with NOT_FOUND, or take
/// away what somebody has made meanwhile.
constexpr RetryPolicy kOnce = {.max_attempts = 1};

class GrpcConnection : public Connection {
 public:
  /// `name` is what the caller calls the target.
  /// `token_file` may be empty; `plaintext` when metadata must hold no token either.
  GrpcConnection(std::string name, bool replicas, const std::shared_ptr<grpc::Channel>& channel,
                 const RetryPolicy& retry, std::string token_file, bool plaintext)
      : name_(std::move(name)),
        replicas_(replicas),
        retry_(retry),
        token_file_(std::move(token_file)),
        plaintext_(plaintext),
        budget_(std::make_shared<RetryBudget>(retry.budget)),
        channel_(channel),
        stub_(v1::ImageGeneration::NewStub(channel)),
        admin_(v1::ModelAdmin::NewStub(channel)),
        health_(channel) {}

  absl::StatusOr<GenerationResult> Generate(const Generation& generation,
                                            const CallOptions& options) override {
    v1::GenerateRequest request;
    if (absl::Status status = SetParams(generation, request.mutable_params()); !status.ok()) {
      return status;
    }
    v1::GenerateResponse response;
    const absl::Status status = Call(options, [&](grpc::ClientContext* context) {
      return ExplainTooLarge(stub_->Generate(context, request, &response), request.ByteSizeLong());
    });
    if (!status.ok()) return status;
    return FromProto(std::move(response));
  }

  std::unique_ptr<StreamCall> StreamGenerate(const Generation& generation,
                                             const std::optional<PreviewOptions>& preview,
                                             StreamListener listener,
                                             const CallOptions& options) override {
    v1::StreamGenerateRequest request;
    if (absl::Status status = SetParams(generation, request.mutable_params()); !status.ok()) {
      return FailedStreamCall(std::move(status), listener);
    }
    if (preview) *request.mutable_preview() = ToProto(*preview);
    auto setup = Setup(options);
    if (!setup.ok()) return FailedStreamCall(setup.status(), listener);
    setup->to_status = [bytes = request.ByteSizeLong(),
                        to_status = std::move(setup->to_status)](const grpc::Status& status) {
      return to_status(ExplainTooLarge(status, bytes));
    };
    setup->generate = std::move(request);
    return StartStreamCall(stub_, *std::move(setup), std::move(listener), options.stop);
  }

  std::unique_ptr<StreamCall> WatchJob(const std::string& request_id, uint64_t after_sequence,
                                       StreamListener listener,
                                       const CallOptions& options) override {
    if (absl::Status status = CheckSingle(kJobs); !status.ok()) {
      return FailedStreamCall(std::move(status), listener);
    }
    if (absl::Status status = CheckUtf8({{"request_id", request_id}}); !status.ok()) {
      return FailedStreamCall(std::move(status), listener);
    }
    auto setup = Setup(options);
    if (!setup.ok()) return FailedStreamCall(setup.status(), listener);
    setup->watch.set_request_id(request_id);
    setup->watch.set_after_sequence(after_sequence);
    return StartStreamCall(stub_, *std::move(setup), std::move(listener), options.stop);
  }

  absl::StatusOr<Job> GetJob(const std::string& request_id, const CallOptions& options) override {
    if (absl::Status status = CheckSingle(kJobs); !status.ok()) return status;
    if (absl::Status status = CheckUtf8({{"request_id", request_id}}); !status.ok()) return status;
    v1::GetJobRequest request;
    request.set_request_id(request_id);
    v1::GetJobResponse response;
    const absl::Status status = Call(options, [&](grpc::ClientContext* context) {
      return stub_->GetJob(context, request, &response);
    });
    if (!status.ok()) return status;
    return FromProto(response.job());
  }

  absl::StatusOr<std::vector<Job>> ListJobs(const JobQuery& query,
                                            const CallOptions& options) override {
    if (absl::Status status = CheckSingle(kJobs); !status.ok()) return status;
    if (query.limit < 1) {
      return absl::InvalidArgumentError(
          fmt::format("limit is {}; ask for at least one job", query.limit));
    }
    const auto deadline = Deadline(options);
    CallOptions page = options;
    std::vector<Job> jobs;
    v1::ListJobsRequest request;
    request.set_all_clients(query.all_clients);
    do {
      request.set_page_size(query.limit - static_cast<int>(jobs.size()));
      if (deadline) page.timeout = *deadline - std::chrono::system_clock::now();
      v1::ListJobsResponse response;
      const absl::Status status = Call(page, [&](grpc::ClientContext* context) {
        return stub_->ListJobs(context, request, &response);
      });
      if (!status.ok()) return status;
      for (const v1::Job& job : response.jobs()) jobs.push_back(FromProto(job));
      request.set_page_token(response.next_page_token());
    } while (!request.page_token().empty() && static_cast<int>(jobs.size()) < query.limit);
    return jobs;
  }

  absl::StatusOr<Job> CancelJob(const std::string& request_id,
                                const CallOptions& options) override {
    if (absl::Status status = CheckSingle(kJobs); !status.ok()) return status;
    if (absl::Status status = CheckUtf8({{"request_id", request_id}}); !status.ok()) return status;
    v1::CancelJobRequest request;
    request.set_request_id(request_id);
    v1::CancelJobResponse response;
    const absl::Status status = Call(options, [&](grpc::ClientContext* context) {
      return stub_->CancelJob(context, request, &response);
    });
    if (!status.ok()) return status;
    return FromProto(response.job());
  }

  absl::StatusOr<ServerInfo> GetServerInfo(const CallOptions& options) override {
    v1::GetServerInfoResponse response;
    const absl::Status status = Call(options, [&](grpc::ClientContext* context) {
      return stub_->GetServerInfo(context, v1::GetServerInfoRequest(), &response);
    });
    if (!status.ok()) return status;
    return FromProto(response);
  }

  absl::StatusOr<Model> LoadModel(const ModelLoad& load, const CallOptions& options) override {
    if (absl::Status status = CheckSingle(kModels); !status.ok()) return status;
    if (absl::Status status = CheckUtf8(
            {{"name", load.name}, {"directory", load.directory}, {"version", load.version}});
        !status.ok())
      return status;
    const v1::LoadModelRequest request = ToProto(load);
    v1::LoadModelResponse response;
    const absl::Status status = Call(
        options,
        [&](grpc::ClientContext* context) {
          return admin_->LoadModel(context, request, &response);
        },
        kOnce);
    if (!status.ok()) return status;
    return FromProto(response.model());
  }

  absl::Status UnloadModel(const std::string& name, const CallOptions& options) override {
    if (absl::Status status = CheckSingle(kModels); !status.ok()) return status;
    if (absl::Status status = CheckUtf8({{"name", name}}); !status.ok()) return status;
    v1::UnloadModelRequest request;
    request.set_name(name);
    v1::UnloadModelResponse response;
    return Call(
        options,
        [&](grpc::ClientContext* context) {
          return admin_->UnloadModel(context, request, &response);
        },
        kOnce);
  }

  absl::StatusOr<Model> SetAlias(const std::string& alias, const std::string& target,
                                 const CallOptions& options) override {
    if (absl::Status status = CheckSingle(kModels); !status.ok()) return status;
    if (absl::Status status = CheckUtf8({{"alias", alias}, {"target", target}}); !status.ok())
      return status;
    v1::SetAliasRequest request;
    request.set_alias(alias);
    request.set_target(target);
    v1::SetAliasResponse response;
    const absl::Status status = Call(options, [&](grpc::ClientContext* context) {
      return admin_->SetAlias(context, request, &response);
    });
    if (!status.ok()) return status;
    return FromProto(response.model());
  }

  absl::Status DeleteAlias(const std::string& alias, const CallOptions& options) override {
    if (absl::Status status = CheckSingle(kModels); !status.ok()) return status;
    if (absl::Status status = CheckUtf8({{"alias", alias}}); !status.ok()) return status;
    v1::DeleteAliasRequest request;
    request.set_alias(alias);
    v1::DeleteAliasResponse response;
    return Call(
        options,
        [&](grpc::ClientContext* context) {
          return admin_->DeleteAlias(context, request, &response);
        },
        kOnce);
  }

  absl::StatusOr<std::vector<Model>> ListModels(const CallOptions& options) override {
    v1::ListModelsResponse response;
    const absl::Status status = Call(options, [&](grpc::ClientContext* context) {
      return stub_->ListModels(context, v1::ListModelsRequest(), &response);
    });
    if (!status.ok()) return status;
    std::vector<Model> models;
    for (const v1::Model& model : response.models()) models.push_back(FromProto(model));
    return models;
  }

  absl::StatusOr<Model> GetModel(const std::string& name, const CallOptions& options) override {
    if (absl::Status status = CheckUtf8({{"name", name}}); !status.ok()) return status;
    v1::GetModelRequest request;
    request.set_name(name);
    v1::GetModelResponse response;
    const absl::Status status = Call(options, [&](grpc::ClientContext* context) {
      return stub_->GetModel(context, request, &response);
    });
    if (!status.ok()) return status;
    return FromProto(response.model());
  }

  absl::StatusOr<ServingStatus> CheckHealth(const std::string& service,
                                            const CallOptions& options) override {
    if (absl::Status status = CheckUtf8({{"service", service}}); !status.ok()) return status;
    health::HealthCheckRequest request;
    request.set_service(service);
    health::HealthCheckResponse response;
    const auto check = [&](grpc::ClientContext* context) {
      // The generated stub would call the service by the name of our copy (proto/CMakeLists.txt).
      grpc::CompletionQueue queue;
      const auto call =
          health_.PrepareUnaryCall(context, "/grpc.health.v1.Health/Check", request, &queue);
      grpc::Status result;
      call->StartCall();
      call->Finish(&response, &result, nullptr);
      void* tag = nullptr;
      bool ok = false;
      queue.Next(&tag, &ok);
      return result;
    };
    // Who asks whether the server is there does not want to wait until it is.
    RetryPolicy policy = retry_;
    policy.restart_attempts = policy.max_attempts;
    const absl::Status status = Call(options, check, policy);
    if (!status.ok()) return status;
    switch (response.status()) {
      case health::HealthCheckResponse::SERVING:
        return ServingStatus::kServing;
      case health::HealthCheckResponse::NOT_SERVING:
        return ServingStatus::kNotServing;
      default:
        return ServingStatus::kUnknown;
    }
  }

 private:
  absl::Status CheckSingle(const char* what) const {
    if (!replicas_) return absl::OkStatus();
    return absl::InvalidArgumentError(fmt::format(
        "{} one server, but {} stands for several; connect to that server by its own address, "
        "host:port",
        what, name_));
  }

  absl::StatusOr<CallHeaders> Headers(const CallOptions& options) const {
    auto metadata = MetadataOf(options);
    if (!metadata.ok()) return metadata.status();
    for (const auto& [key, value] : *metadata) {
      if (key != "authorization") continue;
      if (!token_file_.empty()) {
        return absl::InvalidArgumentError(
            "metadata \"authorization\" and token_file are both given; give one");
      }
      if (plaintext_) return PlaintextToken("metadata \"authorization\"");
    }
    return CallHeaders{*std::move(metadata), token_file_};
  }

  absl::StatusOr<StreamCallSetup> Setup(const CallOptions& options) const {
    auto headers = Headers(options);
    if (!headers.ok()) return headers.status();
    const auto deadline = Deadline(options);
    return StreamCallSetup{
        .headers = *std::move(headers),
        .attempts = Attempts(retry_, budget_, deadline),
        .deadline = deadline,
        .to_status = [name = name_](const grpc::Status& status) { return ToStatus(status, name); }};
  }

  /// Fixes the seed if the caller did not, so that every attempt draws the same images, those of
  /// another call with the same request_id among them; and the id of what survives, so that a
  /// second attempt finds the first.
  static absl::Status SetParams(const Generation& generation, v1::GenerationParams* params) {
    auto converted = ToProto(generation);
    if (!converted.ok()) return converted.status();
    *params = *std::move(converted);
    if (!params->has_seed() && params->seeds().empty()) {
      const std::string& id = generation.request_id;
      params->set_seed(id.empty() ? RandomBits() : SeedOf(id));
    }
    if (generation.survives && generation.request_id.empty()) {
      params->set_request_id(fmt::format("{:016x}{:016x}", RandomBits(), RandomBits()));
    }
    return absl::OkStatus();
  }

  /// Names the server where gRPC does not: an UNAVAILABLE without details is the transport's.
  static absl::Status ToStatus(const grpc::Status& grpc_status, const std::string& name) {
    absl::Status status = FromGrpc(grpc_status);
    if (!absl::IsUnavailable(status) || !Details(status).domain.empty()) return status;
    return absl::UnavailableError(
        fmt::format("no server could be reached at {}: {}", name, grpc_status.error_message()));
  }

  /// Waits before the next attempt, or returns false early when a stop is requested. It waits for
  /// gRPC, which connects only while some thread does: an attempt that fails at once is too short,
  /// and a connection that was begun in one would time out in the pauses.
  bool Pause(std::chrono::nanoseconds delay, const std::stop_token& stop) const {
    constexpr std::chrono::milliseconds kStopLatency{20};
    const auto end = std::chrono::steady_clock::now() + delay;
    while (!stop.stop_requested() && std::chrono::steady_clock::now() < end) {
      const auto left = end - std::chrono::steady_clock::now();
      channel_->WaitForStateChange(
          channel_->GetState(/*try_to_connect=*/true),
          std::chrono::system_clock::now() +
              std::min<std::chrono::steady_clock::duration>(left, kStopLatency));
    }
    return !stop.stop_requested();
  }

  /// Makes a unary call until it succeeds or must not be made again.
  template <typename Attempt>
  absl::Status Call(const CallOptions& options, const Attempt& attempt) {
    return Call(options, attempt, retry_);
  }
  template <typename Attempt>
  absl::Status Call(const CallOptions& options, const Attempt& attempt, const RetryPolicy& retry) {
    const auto headers = Headers(options);
    if (!headers.ok()) return headers.status();
    const auto deadline = Deadline(options);
    for (Attempts attempts(retry, budget_, deadline);;) {
      grpc::ClientContext context;
      if (absl::Status status = headers->AddTo(&context); !status.ok()) return status;
      if (deadline) context.set_deadline(*deadline);
      absl::Status status;
      {
        std::stop_callback cancel(options.stop, [&context] { context.TryCancel(); });
        status = ToStatus(attempt(&context), name_);
      }
      if (!options.stop.stop_requested()) status = WithoutShutdownCancel(std::move(status));
      const auto delay = attempts.Ended(status);
      if (!delay) return attempts.WithCause(std::move(status));
      if (!Pause(*delay, options.stop)) return absl::CancelledError("cancelled by the caller");
    }
  }

  const std::string name_;
  const bool replicas_;
  const RetryPolicy retry_;
  const std::string token_file_;
  const bool plaintext_;
  const std::shared_ptr<RetryBudget> budget_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::shared_ptr<v1::ImageGeneration::Stub> stub_;
  const std::unique_ptr<v1::ModelAdmin::Stub> admin_;
  grpc::TemplatedGenericStub<health::HealthCheckRequest, health::HealthCheckResponse> health_;
};

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ConnectionOptions& options) {
  if (!options.tls) return grpc::InsecureChannelCredentials();
  const auto files = ReadTlsFiles(*options.tls);
  if (!files.ok()) return files.status();
  return grpc::SslCredentials(*files);
}

absl::Status Validate(const ConnectionOptions& options) {
  if (!options.tls && !options.token_file.empty() && !options.allow_plaintext_token) {
    return PlaintextToken("token_file");
  }
  if (options.tls && options.tls->cert_file.empty() != options.tls->key_file.empty()) {
    return absl::InvalidArgumentError(
        "tls.cert_file and tls.key_file belong together; give both or none");
  }

  if (options.retry.max_attempts < 1) {
    return absl::InvalidArgumentError(fmt::format(
        "retry.max_attempts is {}; use 1 (no retries) or more", options.retry.max_attempts));
  }
  if (!(options.retry.multiplier >= 1)) {
    return absl::InvalidArgumentError(
        fmt::format("retry.multiplier is {}; use 1 or more", options.retry.multiplier));
  }
  if (options.retry.budget < 1) {
    return absl::InvalidArgumentError(fmt::format(
        "retry.budget is {}; use 1 or more, or 1 for retry.max_attempts to retry nothing",
        options.retry.budget));
  }
  if (options.retry.initial_backoff.count() < 0 || options.retry.max_backoff.count() < 0) {
    return absl::InvalidArgumentError("a retry backoff is negative; use 0 ms or more");
  }
  if (options.max_message_bytes < 1) {
    return absl::InvalidArgumentError(fmt::format(
        "max_message_bytes is {}; use the size of the largest reply", options.max_message_bytes));
  }
  if (options.keepalive_interval < std::chrono::seconds(20)) {
    return absl::InvalidArgumentError(
        fmt::format("keepalive_interval is {} ms; use 20000 or more, or servers will close the "
                    "connection for pinging too often",
                    options.keepalive_interval.count()));
  }
  if (options.keepalive_timeout.count() < 1) {
    return absl::InvalidArgumentError(fmt::format("keepalive_timeout is {} ms; use 1 or more",
                                                  options.keepalive_timeout.count()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<Connection>> Connect(const std::string& target,
                                                    const ConnectionOptions& options) {
  const auto parsed = ParseTarget(target);
  if (!parsed.ok()) return parsed.status();
  if (absl::Status status = Validate(options); !status.ok()) return status;
  if (parsed->list && options.tls && options.tls->server_name.empty()) {
    return absl::InvalidArgumentError(
        "a list of servers has no name to look for in their certificates; give tls.server_name");
  }
  auto credentials = MakeCredentials(options);
  if (!credentials.ok()) return credentials.status();
  if (!options.token_file.empty()) {  // so that what is wrong is said now
    if (const auto token = ReadToken(options.token_file); !token.ok()) return token.status();
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(options.max_message_bytes);
  arguments.SetMaxSendMessageSize(options.max_message_bytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, GrpcMilliseconds(options.keepalive_interval));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, GrpcMilliseconds(options.keepalive_timeout));
  // By default gRPC stops pinging after two pings without data: just where a queued call begins.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A window that is set, not probed: the bandwidth probe of gRPC 1.51 now and then holds back the
  // window update of a message of several MB until its next probe, 10 s later.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20);
  // By default all channels with equal arguments share one connection; each of ours has its own.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // RetryPolicy decides about retries, so that they are the same for unary and streaming calls.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Reconnect as quickly as the retries come; gRPC's own pause starts at a second and grows to two
  // minutes. The minimum is no pause: it is what one attempt to connect is given, which a busy
  // machine may need for the handshake.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  if (options.tls && !options.tls->server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls->server_name);
  } else if (!parsed->authority.empty()) {
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, parsed->authority);
  }
  if (parsed->replicas) {
    // Health is watched on every connection, so that a server that drains gets no new calls.
    arguments.SetServiceConfigJSON(fmt::format(
        R"({{"loadBalancingConfig":[{{"round_robin":{{}}}}],"healthCheckConfig":{{"serviceName":"{}"}}}})",
        v1::ImageGeneration::service_full_name()));
    // The watch is a call, so servers never see the connection idle; without others, leave.
    arguments.SetInt(GRPC_ARG_CLIENT_IDLE_TIMEOUT_MS, 600'000);
    // gRPC looks a name up again when a connection ends, but by its default twice a minute at most:
    // replicas that replace others would be found late.
    arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 5'000);
  }
  if (parsed->direct) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetUserAgentPrefix("denoised-client");
  const auto channel = grpc::CreateCustomChannel(parsed->uri, *credentials, arguments);
  return std::make_shared<GrpcConnection>(target, parsed->replicas, channel, options.retry,
                                          options.token_file,
                                          !options.tls && !options.allow_plaintext_token);
}

}  // namespace denoised::client
