// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "denoised/v1/model_admin.pb.h"
#include "server/api/admin_calls.h"
#include "server/api/generation_call.h"
#include "server/api/health.h"
#include "server/api/methods.h"
#include "server/api/model_admin.h"
#include "server/http/image_links.h"
#include "server/http/message.h"
#include "server/security/clients.h"
#include "server/telemetry/metrics.h"

namespace denoised {

struct OpenAiRequest;

/// Shared by the handlers of the HTTP port. All pointers must outlive them.
struct HttpApiContext {
  GenerationCallContext calls;
  const Methods* methods;
  const Catalog* catalog;
  AdminCalls* admin;  // null if nobody may change the models
  const ModelChanges* changes;
  const Health* health;
  const Clients* clients;
  Metrics* metrics;
  std::function<std::string()> scrape;  // what /metrics answers
  int64_t max_request_bytes;            // of a message, as on gRPC's port
  std::vector<std::string> origins;     // whose pages may call, "https://studio.example.org"
  /// The Host header must be of this machine or of `origins`.
  bool check_host;
  std::chrono::milliseconds link_time;  // how long links to images work
  size_t max_link_bytes;
};

class HttpApi;

/// A path and method of docs/http.md.
struct Route {
  using Serve = void (HttpApi::*)(const std::shared_ptr<Exchange>&);
  enum Access { kOpen, kCaller, kAdmin };
  enum Body { kNone, kSmallJson, kJson, kFormOrJson };  // kSmallJson: up to 64 KiB

  const char* method;  // "GET"
  const char* path;    // "/v1/jobs/{request_id}"; what is in braces is one segment
  const char* rpc;     // gRPC's full name of the method; null for what gRPC has not
  Access access;
  Body body;
  Serve serve;
  const char* summary;
  std::vector<std::string> query = {};  // the names that it may have; open paths ignore it
  const char* request = nullptr;        // the message of the body, "denoised.v1.GenerateRequest"
  const char* response = nullptr;
};

/// All routes, in no order.
const std::vector<Route>& Routes();

/// The paths of the HTTP port: who may call, and the same calls as on gRPC's port.
class HttpApi final : public HttpHandler {
 public:
  /// What can be added to the JSON of a reply.
  template <typename Response>
  using Complete = std::string (*)(const HttpRequest& request, const Response& response,
                                   const std::string& json);

  explicit HttpApi(const HttpApiContext& context);

  std::optional<HttpReply> Admit(HttpRequest* head) override;
  void Serve(std::shared_ptr<Exchange> exchange) override;
  HttpReply Malformed(int code, const std::string& problem) override;

  /// Drops what was kept long enough.
  void Expire() { links_.Expire(); }

  // The routes.
  void Generate(const std::shared_ptr<Exchange>& exchange);
  void ListJobs(const std::shared_ptr<Exchange>& exchange);
  void GetJob(const std::shared_ptr<Exchange>& exchange);
  void WatchJob(const std::shared_ptr<Exchange>& exchange);
  void CancelJob(const std::shared_ptr<Exchange>& exchange);
  void ListModels(const std::shared_ptr<Exchange>& exchange);
  void GetModel(const std::shared_ptr<Exchange>& exchange);
  void GetServerInfo(const std::shared_ptr<Exchange>& exchange);
  void LoadModel(const std::shared_ptr<Exchange>& exchange);
  void UnloadModel(const std::shared_ptr<Exchange>& exchange);
  void SetAlias(const std::shared_ptr<Exchange>& exchange);
  void DeleteAlias(const std::shared_ptr<Exchange>& exchange);
  void GenerateImages(const std::shared_ptr<Exchange>& exchange);
  void EditImages(const std::shared_ptr<Exchange>& exchange);
  void ImageFile(const std::shared_ptr<Exchange>& exchange);
  void Scrape(const std::shared_ptr<Exchange>& exchange);
  void Live(const std::shared_ptr<Exchange>& exchange);
  void Ready(const std::shared_ptr<Exchange>& exchange);
  void OpenApi(const std::shared_ptr<Exchange>& exchange);

 private:
  std::optional<HttpReply> CheckOrigin(HttpRequest* head) const;
  std::optional<HttpReply> FindRoute(HttpRequest* head) const;
  std::optional<HttpReply> Identify(HttpRequest* head) const;
  std::optional<HttpReply> ReadQuery(HttpRequest* head) const;

  /// A call that waits for nothing.
  template <typename Request, typename Response>
  void Answer(const std::shared_ptr<Exchange>& exchange, const Request& request,
              grpc::Status (Methods::*method)(const Request&, CallRecord*, Response*) const,
              Complete<Response> complete = nullptr);
  /// Reads the body of a call that changes the models. It stays empty, to be refused by Change,
  /// where the caller may not make changes.
  grpc::Status ReadChange(Exchange* exchange, google::protobuf::Message* request) const;
  /// A call that changes the models.
  template <typename Request, typename Response>
  void Change(const std::shared_ptr<Exchange>& exchange, std::shared_ptr<Request> request,
              Complete<Response> complete = nullptr);
  void OpenAi(const std::shared_ptr<Exchange>& exchange, bool edit);
  grpc::Status CheckSize(const google::protobuf::Message& message) const;

  const HttpApiContext context_;
  ImageLinks links_;
};

}  // namespace denoised
