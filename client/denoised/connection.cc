#include "denoised/connection.h"

#include <fmt/format.h>
#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <mutex>
#include <string_view>
#include <utility>

#include "denoised/backoff.h"
#include "denoised/conversion.h"
#include "denoised/error.h"
#include "denoised/rpc_status.h"
#include "denoised/stream_call.h"
#include "denoised/v1/image_generation.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace denoised::client {
namespace {

std::optional<std::chrono::system_clock::time_point> Deadline(const CallOptions& options) {
  if (!options.timeout) return std::nullopt;
  return std::chrono::system_clock::now() + *options.timeout;
}

/// Sleeps, or returns false early when a stop is requested.
bool Sleep(std::chrono::nanoseconds delay, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any wakeup;
  std::unique_lock lock(mutex);
  wakeup.wait_for(lock, stop, delay, [] { return false; });
  return !stop.stop_requested();
}

class GrpcConnection : public Connection {
 public:
  GrpcConnection(std::string target, std::shared_ptr<grpc::Channel> channel, RetryPolicy retry)
      : target_(std::move(target)),
        retry_(retry),
        stub_(v1::ImageGeneration::NewStub(channel)),
        health_(grpc::health::v1::Health::NewStub(channel)) {}

  absl::StatusOr<GenerationResult> Generate(const Generation& generation,
                                            const CallOptions& options) override {
    v1::GenerateRequest request;
    if (absl::Status status = SetParams(generation, request.mutable_params()); !status.ok()) {
      return status;
    }
    v1::GenerateResponse response;
    const absl::Status status = Call(options, [&](grpc::ClientContext* context) {
      return stub_->Generate(context, request, &response);
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
    auto to_status = [target = target_](const grpc::Status& status) {
      return ToStatus(status, target);
    };
    return StartStreamCall(stub_,
                           {.request = std::move(request),
                            .retry = retry_,
                            .deadline = Deadline(options),
                            .to_status = std::move(to_status)},
                           std::move(listener), options.stop);
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
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    grpc::health::v1::HealthCheckResponse response;
    const absl::Status status = Call(options, [&](grpc::ClientContext* context) {
      return health_->Check(context, request, &response);
    });
    if (!status.ok()) return status;
    switch (response.status()) {
      case grpc::health::v1::HealthCheckResponse::SERVING:
        return ServingStatus::kServing;
      case grpc::health::v1::HealthCheckResponse::NOT_SERVING:
        return ServingStatus::kNotServing;
      default:
        return ServingStatus::kUnknown;
    }
  }

 private:
  /// Fixes the seed if the caller did not, so that every attempt draws the same images.
  static absl::Status SetParams(const Generation& generation, v1::GenerationParams* params) {
    auto converted = ToProto(generation);
    if (!converted.ok()) return converted.status();
    *params = *std::move(converted);
    if (!params->has_seed()) params->set_seed(RandomBits());
    return absl::OkStatus();
  }

  /// Names the server where gRPC does not: an UNAVAILABLE without details is the transport's.
  static absl::Status ToStatus(const grpc::Status& grpc_status, const std::string& target) {
    absl::Status status = FromGrpc(grpc_status);
    if (!absl::IsUnavailable(status) || !Details(status).domain.empty()) return status;
    return absl::UnavailableError(
        fmt::format("no server could be reached at {}: {}", target, grpc_status.error_message()));
  }

  /// Makes a unary call until it succeeds or must not be made again.
  template <typename Attempt>
  absl::Status Call(const CallOptions& options, const Attempt& attempt) {
    const auto deadline = Deadline(options);
    for (int attempts = 1;; ++attempts) {
      grpc::ClientContext context;
      if (deadline) context.set_deadline(*deadline);
      absl::Status status;
      {
        std::stop_callback cancel(options.stop, [&context] { context.TryCancel(); });
        status = ToStatus(attempt(&context), target_);
      }
      if (status.ok()) return status;
      const auto delay = retry_.NextDelay(status, attempts, RandomFraction(), Remaining(deadline));
      if (!delay) return status;
      if (!Sleep(*delay, options.stop)) return absl::CancelledError("cancelled by the caller");
    }
  }

  const std::string target_;
  const RetryPolicy retry_;
  const std::shared_ptr<v1::ImageGeneration::Stub> stub_;
  const std::unique_ptr<grpc::health::v1::Health::Stub> health_;
};

bool IsLoopback(std::string_view target) {
  for (const std::string_view prefix : {"127.", "localhost", "[::1]", "unix:"}) {
    if (target.substr(0, prefix.size()) == prefix) return true;
  }
  return false;
}

absl::Status Validate(const ConnectionOptions& options) {
  if (options.retry.max_attempts < 1) {
    return absl::InvalidArgumentError(fmt::format(
        "retry.max_attempts is {}; use 1 (no retries) or more", options.retry.max_attempts));
  }
  if (!(options.retry.multiplier >= 1)) {
    return absl::InvalidArgumentError(
        fmt::format("retry.multiplier is {}; use 1 or more", options.retry.multiplier));
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
  if (target.empty()) {
    return absl::InvalidArgumentError("the server's address is empty; use host:port");
  }
  if (absl::Status status = Validate(options); !status.ok()) return status;
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(options.max_message_bytes);
  arguments.SetMaxSendMessageSize(options.max_message_bytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
                   static_cast<int>(options.keepalive_interval.count()));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(options.keepalive_timeout.count()));
  // By default gRPC stops pinging after two pings without data: just where a queued call begins.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A window that is set, not probed: the bandwidth probe of gRPC 1.51 now and then holds back the
  // window update of a message of several MB until its next probe, 10 s later.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4 << 20);
  // gRPC lets all channels of equal arguments share one connection; ours are what they say.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // RetryPolicy decides about retries, so that they are the same for unary and streaming calls.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Reconnect as quickly as the retries come; gRPC's own pause starts at a second and grows to two
  // minutes. The minimum is no pause: it is what one attempt to connect is given, which a busy
  // machine may need for the handshake.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  if (IsLoopback(target)) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetUserAgentPrefix("denoised-client");
  auto channel = grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
  return std::make_shared<GrpcConnection>(target, std::move(channel), options.retry);
}

}  // namespace denoised::client
