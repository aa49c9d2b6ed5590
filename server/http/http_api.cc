// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_api.h"

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_split.h>
#include <fmt/format.h>

#include <algorithm>
#include <boost/beast/http/rfc7230.hpp>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "server/http/http_calls.h"
#include "server/http/json.h"
#include "server/http/open_api.h"
#include "server/http/openai.h"
#include "server/http/page_files.h"
#include "server/http/url.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"
#include "server/telemetry/log.h"

namespace denoised {
namespace {

constexpr char kLinkPrefix[] = "/v1/images/files/";

grpc::Status Status(absl::StatusCode code, const char* reason, const std::string& message) {
  return ToGrpcStatus(absl::Status(code, message), reason, "");
}

std::vector<std::string_view> Segments(std::string_view path) {
  std::vector<std::string_view> segments;
  while (!path.empty()) {
    path.remove_prefix(1);  // '/'
    const size_t slash = std::min(path.find('/'), path.size());
    segments.push_back(path.substr(0, slash));
    path.remove_prefix(slash);
  }
  return segments;
}

/// The segments that stand for what is in braces; nothing when the path is another.
std::optional<std::vector<std::string>> Match(std::string_view pattern, std::string_view path) {
  const auto wanted = Segments(pattern), given = Segments(path);
  if (wanted.size() != given.size()) return std::nullopt;
  std::vector<std::string> arguments;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].empty() || wanted[i][0] != '{') {
      if (wanted[i] != given[i]) return std::nullopt;
      continue;
    }
    auto argument = PercentDecode(given[i]);
    if (!argument || argument->empty()) return std::nullopt;
    arguments.push_back(*std::move(argument));
  }
  return arguments;
}

/// The media type of a header, without its parameters, in lower case.
std::string MediaType(std::string_view header) {
  std::string type = absl::AsciiStrToLower(std::string(header.substr(0, header.find(';'))));
  absl::StripTrailingAsciiWhitespace(&type);
  return type;
}

/// "host:port" and "[::1]:port" without the port.
std::string_view HostOf(std::string_view authority) {
  const size_t bracket = authority.rfind(']');
  const size_t colon = authority.rfind(':');
  if (colon == std::string_view::npos || (bracket != std::string_view::npos && colon < bracket)) {
    return authority;
  }
  return authority.substr(0, colon);
}

/// "https://host:port" without the scheme.
std::string_view AuthorityOf(std::string_view origin) {
  const size_t scheme = origin.find("://");
  return scheme == std::string_view::npos ? origin : origin.substr(scheme + 3);
}

/// An address in digits, or a name that is never looked up elsewhere: no page of the internet can
/// have it.
bool IsOwnHost(std::string_view host) {
  const bool v4 = !host.empty() && host.find_first_not_of("0123456789.") == std::string_view::npos;
  const bool v6 = !host.empty() && host[0] == '[';
  return v4 || v6 || host == "localhost" || host.ends_with(".localhost");
}

v1::ServerState StateOf(const HttpApiContext& context) { return context.health->State(); }

HttpReply Text(int code, std::string text) {
  return {.code = code,
          .headers = {{"Content-Type", "text/plain; charset=utf-8"}, {"Cache-Control", "no-store"}},
          .body = std::move(text)};
}

/// Reads the parameters of a query, and keeps what is wrong with them.
class QueryReader {
 public:
  explicit QueryReader(const std::map<std::string, std::string>& query) : query_(query) {}

  /// Leaves `value` when the parameter is not given.
  void Read(const char* name, std::optional<bool>* value) {
    const auto it = query_.find(name);
    if (it == query_.end()) return;
    *value = it->second == "true" || it->second == "1";
    if (!**value && it->second != "false" && it->second != "0") {
      Violate(name, it->second, "true or false");
    }
  }
  template <typename Number>
  void Read(const char* name, Number* value) {
    if (const auto it = query_.find(name); it != query_.end()) Parse(name, it->second, value);
  }
  template <typename Number>
  void Parse(const char* name, std::string_view text, Number* value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
    if (error == std::errc() && end == text.data() + text.size()) return;
    Violate(name, text, WholeNumber<Number>(text));
  }

  /// The reply that refuses; nothing when all are right.
  std::optional<HttpReply> refusal() const {
    if (violations_.empty()) return std::nullopt;
    return ErrorReply(InvalidFields(violations_, ""));
  }

 private:
  void Violate(const char* name, std::string_view text, const std::string& remedy) {
    violations_.push_back({name, fmt::format("is {}; use {}", Quote(text), remedy)});
  }

  const std::map<std::string, std::string>& query_;
  std::vector<FieldViolation> violations_;
};

/// What `Accept` says of a media type.
struct Preference {
  double quality = 0;  // 0: the client does not take it
  bool named = false;  // not only by "*/*" and the like
};

/// RFC 9110, section 12.5.1: the range that fits `type` best has its quality.
Preference PreferenceFor(std::string_view accept, std::string_view type) {
  if (accept.empty()) return {.quality = 1};
  const std::string group = std::string(type.substr(0, type.find('/'))) + "/*";
  Preference preference;
  int best = 0;
  const std::vector<std::string> ranges = absl::StrSplit(std::string(accept), ',');
  for (const std::string& each : ranges) {
    std::vector<std::string> parts = absl::StrSplit(absl::AsciiStrToLower(each), ';');
    for (std::string& part : parts) absl::StripAsciiWhitespace(&part);
    const std::string& range = parts[0];
    const int fit = range == type ? 3 : range == group ? 2 : range == "*/*" ? 1 : 0;
    if (fit <= best) continue;
    best = fit;
    preference = {.quality = 1, .named = range == type};
    for (const std::string& part : parts) {
      double quality = 0;
      if (part.starts_with("q=") && absl::SimpleAtod(part.substr(2), &quality))
        preference.quality = quality;
    }
  }
  return preference;
}

/// OpenAI's description of a model.
nlohmann::json OpenAiModel(const std::string& id) {
  static const int64_t start =
      std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  return {{"id", id}, {"object", "model"}, {"created", start}, {"owned_by", "denoised"}};
}

/// `json`, an object, with `members` ("\"a\":1") before its own.
std::string With(const std::string& members, const std::string& json) {
  return "{" + members + (json == "{}" ? "}" : "," + json.substr(1));
}
std::string Members(const nlohmann::json& object) {
  const std::string text = object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return text.substr(1, text.size() - 2);
}

std::string CompleteModels(const HttpRequest&, const v1::ListModelsResponse& response,
                           const std::string& json) {
  auto data = nlohmann::json::array();
  for (const v1::Model& model : response.models()) {
    if (model.state() != v1::MODEL_STATE_AVAILABLE) continue;
    data.push_back(
        OpenAiModel(model.current() ? model.name() : model.name() + "@" + model.version()));
    for (const std::string& alias : model.aliases()) data.push_back(OpenAiModel(alias));
  }
  return With(Members({{"object", "list"}, {"data", data}}), json);
}

std::string CompleteModel(const HttpRequest& request, const v1::GetModelResponse&,
                          const std::string& json) {
  return With(Members(OpenAiModel(request.arguments[0])), json);
}

std::string CompleteUnload(const HttpRequest& request, const v1::UnloadModelResponse&,
                           const std::string& json) {
  return With(Members({{"id", request.arguments[0]}, {"object", "model"}, {"deleted", true}}),
              json);
}

/// The reply of a call that is no generation. `complete` adds to its JSON; it may be null.
template <typename Response>
HttpReply ReplyOf(const HttpRequest& request, const CallRecord& record, const grpc::Status& status,
                  const Response& response, HttpApi::Complete<Response> complete) {
  HttpReply reply;
  if (status.ok()) {
    std::string json = ToJson(response);
    if (complete != nullptr) json = complete(request, response, json);
    reply = JsonReply(std::move(json));
  } else {
    reply = ErrorReply(status);
  }
  reply.headers.emplace_back("traceparent", record.trace().traceparent());
  return reply;
}

std::string EventText(const EventLog::Event& event) {
  const auto* field = event.GetDescriptor()->FindFieldByNumber(event.event_case());
  return ServerSentEvent(event.sequence(), field == nullptr ? "" : field->name(), ToJson(event));
}

}  // namespace

const std::vector<Route>& Routes() {
  static const auto* const routes = new std::vector<Route>{
      {"POST",
       "/v1/generate",
       "denoised.v1.ImageGeneration.Generate",
       Route::kCaller,
       Route::kJson,
       &HttpApi::Generate,
       "Draws all images of a request. With Accept: text/event-stream, or ?stream=true, tells it "
       "as "
       "it happens: the body is a StreamGenerateRequest, each event a StreamGenerateResponse.",
       {"stream"},
       "denoised.v1.StreamGenerateRequest",
       "denoised.v1.GenerateResponse"},
      {"GET",
       "/v1/jobs",
       "denoised.v1.ImageGeneration.ListJobs",
       Route::kCaller,
       Route::kNone,
       &HttpApi::ListJobs,
       "The caller's jobs, the latest first, in pages.",
       {"all_clients", "page_size", "page_token"},
       nullptr,
       "denoised.v1.ListJobsResponse"},
      {"GET",
       "/v1/jobs/{request_id}",
       "denoised.v1.ImageGeneration.GetJob",
       Route::kCaller,
       Route::kNone,
       &HttpApi::GetJob,
       "A job.",
       {},
       nullptr,
       "denoised.v1.GetJobResponse"},
      {"GET",
       "/v1/jobs/{request_id}/events",
       "denoised.v1.ImageGeneration.WatchJob",
       Route::kCaller,
       Route::kNone,
       &HttpApi::WatchJob,
       "The events of a job, those after after_sequence or the header Last-Event-ID.",
       {"after_sequence"},
       nullptr,
       "denoised.v1.StreamGenerateResponse"},
      {"POST",
       "/v1/jobs/{request_id}/cancel",
       "denoised.v1.ImageGeneration.CancelJob",
       Route::kCaller,
       Route::kNone,
       &HttpApi::CancelJob,
       "Ends a job.",
       {},
       nullptr,
       "denoised.v1.CancelJobResponse"},
      {"GET",
       "/v1/models",
       "denoised.v1.ImageGeneration.ListModels",
       Route::kCaller,
       Route::kNone,
       &HttpApi::ListModels,
       "The models, for our clients and for OpenAI's.",
       {},
       nullptr,
       "denoised.v1.ListModelsResponse"},
      {"GET",
       "/v1/models/{name}",
       "denoised.v1.ImageGeneration.GetModel",
       Route::kCaller,
       Route::kNone,
       &HttpApi::GetModel,
       "One model.",
       {},
       nullptr,
       "denoised.v1.GetModelResponse"},
      {"GET",
       "/v1/server",
       "denoised.v1.ImageGeneration.GetServerInfo",
       Route::kCaller,
       Route::kNone,
       &HttpApi::GetServerInfo,
       "What the server is, and its limits.",
       {},
       nullptr,
       "denoised.v1.GetServerInfoResponse"},
      {"POST",
       "/v1/models",
       "denoised.v1.ModelAdmin.LoadModel",
       Route::kCaller,
       Route::kSmallJson,
       &HttpApi::LoadModel,
       "Loads a version of a model. For admins.",
       {},
       "denoised.v1.LoadModelRequest",
       "denoised.v1.LoadModelResponse"},
      {"DELETE",
       "/v1/models/{name}",
       "denoised.v1.ModelAdmin.UnloadModel",
       Route::kCaller,
       Route::kNone,
       &HttpApi::UnloadModel,
       "Unloads a model or a version. For admins.",
       {},
       nullptr,
       "denoised.v1.UnloadModelResponse"},
      {"PUT",
       "/v1/aliases/{alias}",
       "denoised.v1.ModelAdmin.SetAlias",
       Route::kCaller,
       Route::kSmallJson,
       &HttpApi::SetAlias,
       "Makes another name for a model. For admins.",
       {},
       "denoised.v1.SetAliasRequest",
       "denoised.v1.SetAliasResponse"},
      {"DELETE",
       "/v1/aliases/{alias}",
       "denoised.v1.ModelAdmin.DeleteAlias",
       Route::kCaller,
       Route::kNone,
       &HttpApi::DeleteAlias,
       "Removes an alias. For admins.",
       {},
       nullptr,
       "denoised.v1.DeleteAliasResponse"},
      {"POST",
       "/v1/images/generations",
       "denoised.v1.ImageGeneration.Generate",
       Route::kCaller,
       Route::kJson,
       &HttpApi::GenerateImages,
       "OpenAI's images API: draws images.",
       {},
       "ImageGeneration",
       "Images"},
      {"POST",
       "/v1/images/edits",
       "denoised.v1.ImageGeneration.Generate",
       Route::kCaller,
       Route::kFormOrJson,
       &HttpApi::EditImages,
       "OpenAI's images API: image to image, with a mask if only a part is drawn anew.",
       {},
       "ImageEdit",
       "Images"},
      {"GET", "/v1/images/files/{file}", nullptr, Route::kOpen, Route::kNone, &HttpApi::ImageFile,
       "An image by the link of a reply with response_format url."},
      {"GET", "/metrics", nullptr, Route::kAdmin, Route::kNone, &HttpApi::Scrape,
       "Prometheus' text format. For admins."},
      {"GET", "/healthz", nullptr, Route::kOpen, Route::kNone, &HttpApi::Live,
       "Whether the process need not be restarted."},
      {"GET", "/readyz", nullptr, Route::kOpen, Route::kNone, &HttpApi::Ready,
       "Whether to send requests here."},
      {"GET", "/openapi.json", nullptr, Route::kOpen, Route::kNone, &HttpApi::OpenApi,
       "This interface."},
  };
  return *routes;
}

HttpApi::HttpApi(const HttpApiContext& context)
    : context_(context), links_(context.link_time, context.max_link_bytes) {}

HttpReply HttpApi::Malformed(int code, const std::string& problem) {
  const auto status = code == 503 || code == 413 ? absl::StatusCode::kResourceExhausted
                                                 : absl::StatusCode::kInvalidArgument;
  return ErrorReply(code, grpc::Status(static_cast<grpc::StatusCode>(status), problem));
}

std::optional<HttpReply> HttpApi::CheckOrigin(HttpRequest* head) const {
  const std::string_view host = head->Header("host");
  // It goes into links and messages.
  if (!std::all_of(host.begin(), host.end(), [](unsigned char c) {
        return c < 0x80 && (std::isalnum(c) || std::string_view("._:-[]%").find(
                                                   static_cast<char>(c)) != std::string_view::npos);
      })) {
    return ErrorReply(
        400,
        grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                     fmt::format("the header Host is {}; use a name or an address", Quote(host))));
  }
  const auto listed = [&](auto matches) {
    return std::any_of(context_.origins.begin(), context_.origins.end(), matches);
  };
  if (context_.check_host && !IsOwnHost(HostOf(host)) &&
      !listed([&](std::string_view origin) { return AuthorityOf(origin) == host; })) {
    return ErrorReply(Status(
        absl::StatusCode::kPermissionDenied, reason::kForeignOrigin,
        fmt::format("the host {} is not this machine's; call localhost, or list the host as an "
                    "origin in --http-origins",
                    Quote(host))));
  }
  const std::string_view origin = head->Header("origin");
  if (origin.empty()) return std::nullopt;
  if (listed([&](std::string_view each) { return each == origin; })) {
    head->reply_headers = {
        {"Access-Control-Allow-Origin", std::string(origin)},
        {"Access-Control-Expose-Headers",
         "traceparent, X-Request-Id, Retry-After, Retry-After-Ms, X-Should-Retry"},
        {"Vary", "Origin"}};
    return std::nullopt;
  }
  // A proxy that ends TLS passes http:// on as https://, so the scheme tells nothing.
  if (AuthorityOf(origin) == host) return std::nullopt;
  return ErrorReply(
      Status(absl::StatusCode::kPermissionDenied, reason::kForeignOrigin,
             fmt::format("pages of {} may not call this server; list it in --http-origins",
                         Quote(origin))));
}

std::optional<HttpReply> HttpApi::FindRoute(HttpRequest* head) const {
  std::string allowed;
  // HEAD is GET without the body, which the port leaves out.
  const std::string& method = head->method == "HEAD" ? "GET" : head->method;
  for (const Route& route : Routes()) {
    auto arguments = Match(route.path, head->path);
    if (!arguments) continue;
    // A stream of events has no reply without a body.
    const bool streams = std::string_view(route.path).ends_with("/events");
    if (route.method == method && !(streams && head->method == "HEAD")) {
      head->route = &route;
      head->arguments = *std::move(arguments);
      return std::nullopt;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(route.method);
  }
  for (const PageFile& file : PageFiles()) {
    if (file.path != head->path) continue;
    if (method == "GET") return std::nullopt;
    allowed = "GET";
  }
  if (allowed.empty()) {
    return ErrorReply(
        grpc::Status(grpc::StatusCode::NOT_FOUND,
                     fmt::format("there is no {}; see /openapi.json", Quote(head->path))));
  }
  if (head->method == "OPTIONS" && !head->reply_headers.empty()) {
    HttpReply reply{
        .code = 204,
        .headers = {{"Access-Control-Allow-Methods", allowed}, {"Access-Control-Max-Age", "600"}}};
    // Any names: what a header does, the port decides when it comes.
    if (const std::string_view names = head->Header("access-control-request-headers");
        !names.empty()) {
      namespace http = boost::beast::http;
      if (!http::validate_list(
              http::opt_token_list(boost::beast::string_view(names.data(), names.size())))) {
        return ErrorReply(InvalidFields(
            {{"Access-Control-Request-Headers",
              fmt::format("is {}; use names with commas between them", Quote(names))}},
            ""));
      }
      reply.headers.emplace_back("Access-Control-Allow-Headers", names);
    }
    return reply;
  }
  HttpReply reply =
      ErrorReply(405, grpc::Status(grpc::StatusCode::UNIMPLEMENTED,
                                   fmt::format("{} has no method {}; use {}", Quote(head->path),
                                               Quote(head->method), allowed)));
  reply.headers.emplace_back("Allow", allowed);
  return reply;
}

std::optional<HttpReply> HttpApi::Identify(HttpRequest* head) const {
  Credentials credentials{.authorization = head->Header("authorization")};
  for (const char* header : {"x-forwarded-for", "forwarded", "via"}) {
    credentials.forwarded = credentials.forwarded || head->headers.count(header) > 0;
  }
  for (const std::string& name : head->certificate) credentials.certificate.push_back(name);
  auto caller = context_.clients->Identify(credentials);
  if (caller.ok()) {
    head->caller = *std::move(caller);
    return std::nullopt;
  }
  const auto* method =
      head->route->rpc == nullptr
          ? nullptr
          : google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(head->route->rpc);
  context_.metrics->CallRefused(method);
  log::Info("request", {{"method", method == nullptr ? "unknown" : method->name()},
                        {"code", "UNAUTHENTICATED"},
                        {"via", "http"},
                        {"peer", head->peer},
                        {"error", std::string(caller.status().message())}});
  return ErrorReply(ToGrpcStatus(caller.status(), reason::kUnauthenticated, ""));
}

std::optional<HttpReply> HttpApi::ReadQuery(HttpRequest* head) const {
  auto parameters = ParseQuery(head->query);
  if (!parameters) {
    return ErrorReply(
        InvalidFields({{"query",
                        "has a % that two hexadecimal digits do not follow, or a name twice; "
                        "encode a % as %25, and give each name once"}},
                      ""));
  }
  const auto& known = head->route->query;
  for (const auto& [name, value] : *parameters) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    return ErrorReply(
        InvalidFields({{name, "is no parameter of this path; see /openapi.json"}}, ""));
  }
  head->parameters = *std::move(parameters);
  return std::nullopt;
}

std::optional<HttpReply> HttpApi::Admit(HttpRequest* head) {
  if (auto refusal = CheckOrigin(head)) return refusal;
  if (auto refusal = FindRoute(head)) return refusal;
  if (head->route == nullptr || head->route->body == Route::kNone) {
    // Some clients send "{}"; no more is read for nothing, least of all from strangers.
    constexpr size_t kMostDigits = 4;
    if (!head->Header("transfer-encoding").empty() ||
        head->Header("content-length").size() > kMostDigits) {
      return ErrorReply(
          413, grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "this takes no body; send none"));
    }
  }
  if (head->route == nullptr || head->route->access == Route::kOpen) return std::nullopt;
  if (auto refusal = Identify(head)) return refusal;
  if (head->route->access == Route::kAdmin && !head->caller->admin) {
    return ErrorReply(Status(absl::StatusCode::kPermissionDenied, reason::kNotAdmin,
                             "this is for admins: clients with \"admin\": true"));
  }
  const std::string type = MediaType(head->Header("content-type"));
  const bool form = head->route->body == Route::kFormOrJson && type == "multipart/form-data";
  if (head->route->body != Route::kNone && !form && type != "application/json") {
    // A page of another origin can send a form without asking, but not JSON.
    return ErrorReply(
        415,
        grpc::Status(
            grpc::StatusCode::INVALID_ARGUMENT,
            fmt::format("the Content-Type is {}; use application/json{}", Quote(type),
                        head->route->body == Route::kFormOrJson ? " or multipart/form-data" : "")));
  }
  const std::string encoding(head->Header("content-encoding"));
  if (head->route->body != Route::kNone && !encoding.empty() &&
      absl::AsciiStrToLower(encoding) != "identity") {
    HttpReply refusal = ErrorReply(
        415, grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                          fmt::format("the Content-Encoding is {}, and the server reads no "
                                      "compressed bodies; send it uncompressed",
                                      Quote(encoding))));
    refusal.headers.emplace_back("Accept-Encoding", "identity");
    return refusal;
  }
  if (auto refusal = ReadQuery(head)) return refusal;
  constexpr uint64_t kSmall = 64 << 10;
  if (head->route->body == Route::kSmallJson) head->max_body_bytes = kSmall;
  if (const std::string text(head->Header("request-timeout")); !text.empty()) {
    char* end = nullptr;
    const double seconds = std::strtod(text.c_str(), &end);
    if (*end != '\0' || !(seconds > 0) || !std::isfinite(seconds)) {
      return ErrorReply(InvalidFields(
          {{"Request-Timeout", fmt::format("is {}; use seconds, such as 12.5", Quote(text))}}, ""));
    }
    constexpr double kYear = 365 * 86400.0;
    if (seconds < kYear) {
      head->deadline = std::chrono::steady_clock::now() +
                       std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                           std::chrono::duration<double>(seconds));
    }
  }
  return std::nullopt;
}

void HttpApi::Serve(std::shared_ptr<Exchange> exchange) {
  const HttpRequest& request = exchange->request();
  if (request.route != nullptr) return (this->*request.route->serve)(exchange);
  for (const PageFile& file : PageFiles()) {
    if (file.path != request.path) continue;
    HttpReply reply{
        .code = 200,
        .headers = {
            {"Content-Type", std::string(file.mime_type)},
            {"ETag", std::string(file.etag)},
            {"Cache-Control", "no-cache"},
            {"Content-Security-Policy",
             "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: "
             "blob:; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
             "frame-ancestors 'none'"},
            {"X-Content-Type-Options", "nosniff"},
            {"Referrer-Policy", "no-referrer"}}};
    if (request.Header("if-none-match") == file.etag) {
      reply.code = 304;
    } else {
      reply.lasting = file.bytes;
    }
    return exchange->Reply(std::move(reply));
  }
}

grpc::Status HttpApi::CheckSize(const google::protobuf::Message& message) const {
  const size_t size = message.ByteSizeLong();
  if (static_cast<int64_t>(size) <= context_.max_request_bytes) return grpc::Status::OK;
  return {grpc::StatusCode::RESOURCE_EXHAUSTED,
          fmt::format("the request is a message of {} bytes, and at most {} may be sent; see "
                      "--max-request-bytes",
                      size, context_.max_request_bytes)};
}

template <typename Request, typename Response>
void HttpApi::Answer(const std::shared_ptr<Exchange>& exchange, const Request& request,
                     grpc::Status (Methods::*method)(const Request&, CallRecord*, Response*) const,
                     Complete<Response> complete) {
  const HttpRequest& http = exchange->request();
  CallRecord record(context_.calls.calls, http.route->rpc, OriginOf(http));
  Response response;
  const grpc::Status status = (context_.methods->*method)(request, &record, &response);
  HttpReply reply = ReplyOf(http, record, status, response, complete);
  record.End(status.error_code(), status.error_message());
  exchange->Reply(std::move(reply));
}

grpc::Status HttpApi::ReadChange(Exchange* exchange, google::protobuf::Message* request) const {
  if (context_.admin == nullptr || !exchange->request().caller->admin) return grpc::Status::OK;
  MemoryBudget::Lease upload;
  return FromJson(exchange->TakeBody(&upload), request);
}

template <typename Request, typename Response>
void HttpApi::Change(const std::shared_ptr<Exchange>& exchange, std::shared_ptr<Request> request,
                     Complete<Response> complete) {
  if (context_.admin == nullptr) {
    return exchange->Reply(ErrorReply(NoAdmins()));
  }
  const auto record = std::make_shared<CallRecord>(
      context_.calls.calls, exchange->request().route->rpc, OriginOf(exchange->request()));
  const auto response = std::make_shared<Response>();
  context_.admin->Post(
      record, ModelChanges::Describe(*request),
      [changes = context_.changes, request, response] {
        return changes->Make(*request, response.get());
      },
      [exchange, record, response, complete](const grpc::Status& status) {
        exchange->Reply(ReplyOf(exchange->request(), *record, status, *response, complete));
      });
}

void HttpApi::Generate(const std::shared_ptr<Exchange>& exchange) {
  const HttpRequest& http = exchange->request();
  QueryReader query(http.parameters);
  std::optional<bool> asked;
  query.Read("stream", &asked);
  if (auto refusal = query.refusal()) return exchange->Reply(*std::move(refusal));
  const std::string_view accept = http.Header("accept");
  const Preference events = PreferenceFor(accept, "text/event-stream");
  const Preference json = PreferenceFor(accept, "application/json");
  const bool stream =
      asked.value_or(events.named && events.quality > 0 && events.quality >= json.quality);
  const char* const type = stream ? "text/event-stream" : "application/json";
  if (!((stream ? events : json).quality > 0)) {
    return exchange->Reply(ErrorReply(InvalidFields(
        {{"Accept", fmt::format("is {}, but the reply is {} with stream={}; accept that, or change "
                                "stream",
                                Quote(accept), type, stream)}},
        "")));
  }
  if (stream) {
    const auto call = std::make_shared<HttpStreamCall>(
        context_.calls, "denoised.v1.ImageGeneration.StreamGenerate", exchange, 0, EventText);
    return call->Run([this, exchange, record = &call->record()](
                         const auto& watcher,
                         grpc::Status* refusal) -> std::shared_ptr<Generation> {
      v1::StreamGenerateRequest request;
      MemoryBudget::Lease upload;  // of the body, and then of the message
      *refusal = FromJson(exchange->TakeBody(&upload), &request);
      if (refusal->ok()) *refusal = CheckSize(request);
      if (!refusal->ok()) return nullptr;
      const v1::PreviewOptions* preview = request.has_preview() ? &request.preview() : nullptr;
      return BeginJob(
          context_.calls, *record,
          MakeJobRequest(*record, exchange->request().deadline, request.params(), preview, false),
          watcher, refusal);
    });
  }
  const auto call = std::make_shared<HttpUnaryCall>(
      context_.calls, http.route->rpc, exchange,
      [](v1::GenerateResponse* images) { return JsonReply(ToJson(*images)); });
  call->Run([this, exchange, record = &call->record()](
                const auto& watcher, grpc::Status* refusal) -> std::shared_ptr<Generation> {
    v1::GenerateRequest request;
    MemoryBudget::Lease upload;
    *refusal = FromJson(exchange->TakeBody(&upload), &request);
    if (refusal->ok()) *refusal = CheckSize(request);
    if (!refusal->ok()) return nullptr;
    return BeginJob(
        context_.calls, *record,
        MakeJobRequest(*record, exchange->request().deadline, request.params(), nullptr, true),
        watcher, refusal);
  });
}

void HttpApi::WatchJob(const std::shared_ptr<Exchange>& exchange) {
  const HttpRequest& http = exchange->request();
  uint64_t sequence = 0;
  QueryReader query(http.parameters);
  query.Read("after_sequence", &sequence);
  // An EventSource that connects again has the URL that it began with, so this is the later number.
  const std::string_view last = http.Header("last-event-id");
  const char* const field = last.empty() ? "after_sequence" : "Last-Event-ID";
  if (!last.empty()) query.Parse(field, last, &sequence);
  if (auto refusal = query.refusal()) return exchange->Reply(*std::move(refusal));
  const auto call = std::make_shared<HttpStreamCall>(context_.calls, http.route->rpc, exchange,
                                                     sequence, EventText);
  call->Run([this, record = &call->record(), id = http.arguments[0], field, sequence](
                const auto& watcher, grpc::Status* refusal) {
    return BeginWatch(context_.calls, *record, id, {field, sequence}, watcher, refusal);
  });
}

void HttpApi::ListJobs(const std::shared_ptr<Exchange>& exchange) {
  const auto& query = exchange->request().parameters;
  v1::ListJobsRequest request;
  std::optional<bool> all;
  int32_t size = 0;
  QueryReader reader(query);
  reader.Read("all_clients", &all);
  reader.Read("page_size", &size);
  if (auto refusal = reader.refusal()) return exchange->Reply(*std::move(refusal));
  request.set_all_clients(all.value_or(false));
  request.set_page_size(size);
  if (const auto it = query.find("page_token"); it != query.end()) {
    request.set_page_token(it->second);
  }
  context_.calls.workers->Post(
      Priority::kNormal, ClientOf(exchange->request()),
      [this, exchange, request] { Answer(exchange, request, &Methods::ListJobs); });
}

void HttpApi::GetJob(const std::shared_ptr<Exchange>& exchange) {
  v1::GetJobRequest request;
  request.set_request_id(exchange->request().arguments[0]);
  Answer(exchange, request, &Methods::GetJob);
}

void HttpApi::CancelJob(const std::shared_ptr<Exchange>& exchange) {
  v1::CancelJobRequest request;
  request.set_request_id(exchange->request().arguments[0]);
  Answer(exchange, request, &Methods::CancelJob);
}

void HttpApi::ListModels(const std::shared_ptr<Exchange>& exchange) {
  Answer(exchange, v1::ListModelsRequest(), &Methods::ListModels, CompleteModels);
}

void HttpApi::GetModel(const std::shared_ptr<Exchange>& exchange) {
  v1::GetModelRequest request;
  request.set_name(exchange->request().arguments[0]);
  Answer(exchange, request, &Methods::GetModel, CompleteModel);
}

void HttpApi::GetServerInfo(const std::shared_ptr<Exchange>& exchange) {
  Answer(exchange, v1::GetServerInfoRequest(), &Methods::GetServerInfo);
}

void HttpApi::LoadModel(const std::shared_ptr<Exchange>& exchange) {
  const auto request = std::make_shared<v1::LoadModelRequest>();
  const grpc::Status status = ReadChange(exchange.get(), request.get());
  if (!status.ok()) return exchange->Reply(ErrorReply(status));
  Change<v1::LoadModelRequest, v1::LoadModelResponse>(exchange, request);
}

void HttpApi::UnloadModel(const std::shared_ptr<Exchange>& exchange) {
  const auto request = std::make_shared<v1::UnloadModelRequest>();
  request->set_name(exchange->request().arguments[0]);
  Change<v1::UnloadModelRequest, v1::UnloadModelResponse>(exchange, request, CompleteUnload);
}

void HttpApi::SetAlias(const std::shared_ptr<Exchange>& exchange) {
  const auto request = std::make_shared<v1::SetAliasRequest>();
  const grpc::Status status = ReadChange(exchange.get(), request.get());
  if (!status.ok()) return exchange->Reply(ErrorReply(status));
  const std::string& alias = exchange->request().arguments[0];
  if (!request->alias().empty() && request->alias() != alias) {
    return exchange->Reply(
        ErrorReply(InvalidFields({{"alias", "is another than the path says; leave it out"}}, "")));
  }
  request->set_alias(alias);
  Change<v1::SetAliasRequest, v1::SetAliasResponse>(exchange, request);
}

void HttpApi::DeleteAlias(const std::shared_ptr<Exchange>& exchange) {
  const auto request = std::make_shared<v1::DeleteAliasRequest>();
  request->set_alias(exchange->request().arguments[0]);
  Change<v1::DeleteAliasRequest, v1::DeleteAliasResponse>(exchange, request);
}

void HttpApi::GenerateImages(const std::shared_ptr<Exchange>& exchange) { OpenAi(exchange, false); }
void HttpApi::EditImages(const std::shared_ptr<Exchange>& exchange) { OpenAi(exchange, true); }

namespace {

/// Begins the job of a request of OpenAI's API, which is gone afterwards: uploads can be large, and
/// the job can wait for long.
std::shared_ptr<Generation> BeginOpenAi(const GenerationCallContext& context,
                                        OpenAiRequest* request, const CallRecord& record,
                                        const Exchange& exchange,
                                        const std::shared_ptr<GenerationWatcher>& watcher,
                                        grpc::Status* refusal) {
  const OpenAiRequest taken = std::move(*request);
  const auto& message = taken.message;
  const v1::PreviewOptions* preview = message.has_preview() ? &message.preview() : nullptr;
  JobRequest asked = MakeJobRequest(record, exchange.request().deadline, message.params(), preview,
                                    !taken.reply.stream);
  asked.field_name = OpenAiField;
  return BeginJob(context, record, asked, watcher, refusal);
}

}  // namespace

void HttpApi::OpenAi(const std::shared_ptr<Exchange>& exchange, bool edit) {
  // Whether it is a stream stands in the body, which a worker reads.
  context_.calls.workers->Post(
      Priority::kNormal, ClientOf(exchange->request()), [this, exchange, edit] {
        const auto request = std::make_shared<OpenAiRequest>();
        const HttpRequest& http = exchange->request();
        // Before the body is parsed, which a client with too many streams must not cause.
        ClientLoad::Lease stream;
        grpc::Status status = AdmitStream(context_.calls, *http.caller, http.peer, &stream);
        if (status.ok()) {
          MemoryBudget::Lease upload;
          status = ReadOpenAi(http.Header("content-type"), exchange->TakeBody(&upload), edit,
                              *context_.catalog, *http.caller, request.get());
          request->upload = std::move(upload);
        }
        if (status.ok()) status = CheckSize(request->message);
        const OpenAiReplyOptions options = request->reply;
        if (options.stream && status.ok()) {
          const auto events = std::make_shared<OpenAiEvents>(options);
          const auto call = std::make_shared<HttpStreamCall>(
              context_.calls, "denoised.v1.ImageGeneration.StreamGenerate", exchange, 0,
              [events](const EventLog::Event& event) { return events->Format(event); });
          call->SetStream(std::move(stream));
          return call->Run([this, exchange, request, record = &call->record()](const auto& watcher,
                                                                               auto* refusal) {
            return BeginOpenAi(context_.calls, request.get(), *record, *exchange, watcher, refusal);
          });
        }
        const MakeLink link = [this, exchange](const std::string& mime_type, std::string bytes) {
          const auto name = links_.Add({mime_type, std::move(bytes)});
          if (!name.ok()) return std::string();
          const HttpRequest& http = exchange->request();
          const std::string host(http.Header("host"));
          // A proxy that ends TLS: its name is listed.
          const auto& origins = context_.origins;
          const bool https = http.tls || std::find(origins.begin(), origins.end(),
                                                   "https://" + host) != origins.end();
          return fmt::format("{}://{}{}{}.{}", https ? "https" : "http", host, kLinkPrefix, *name,
                             mime_type.substr(mime_type.find('/') + 1));
        };
        const auto call = std::make_shared<HttpUnaryCall>(
            context_.calls, "denoised.v1.ImageGeneration.Generate", exchange,
            [options, link](v1::GenerateResponse* images) {
              return JsonReply(OpenAiReply(options, images, link));
            });
        call->SetStream(std::move(stream));
        call->Run([this, exchange, request, status, record = &call->record()](
                      const auto& watcher, auto* refusal) -> std::shared_ptr<Generation> {
          *refusal = status;
          if (!status.ok()) return nullptr;
          return BeginOpenAi(context_.calls, request.get(), *record, *exchange, watcher, refusal);
        });
      });
}

void HttpApi::ImageFile(const std::shared_ptr<Exchange>& exchange) {
  const std::string& file = exchange->request().arguments[0];
  const auto image = links_.Find(file.substr(0, file.find('.')));
  if (image == nullptr) {
    return exchange->Reply(ErrorReply(
        {grpc::StatusCode::NOT_FOUND,
         "there is no such image, or its link is too old; links work for --http-link-seconds"}));
  }
  exchange->Reply({.code = 200,
                   .headers = {{"Content-Type", image->mime_type},
                               {"Cache-Control", "private, no-store"},
                               {"X-Content-Type-Options", "nosniff"},
                               {"Content-Security-Policy", "default-src 'none'"}},
                   .lasting = image->bytes,
                   .owner = image});
}

void HttpApi::Scrape(const std::shared_ptr<Exchange>& exchange) {
  context_.calls.workers->Post(Priority::kNormal, ClientOf(exchange->request()),
                               [this, exchange] { exchange->Reply(Text(200, context_.scrape())); });
}

void HttpApi::Live(const std::shared_ptr<Exchange>& exchange) {
  const bool live = context_.health->live();
  exchange->Reply(Text(live ? 200 : 503, live ? "ok\n" : "no\n"));
}

void HttpApi::Ready(const std::shared_ptr<Exchange>& exchange) {
  const bool ready = StateOf(context_) == v1::SERVER_STATE_SERVING;
  exchange->Reply(Text(ready ? 200 : 503, ready ? "ok\n" : "no\n"));
}

void HttpApi::OpenApi(const std::shared_ptr<Exchange>& exchange) {
  static const auto* const text = new std::string(OpenApiJson());
  HttpReply reply = JsonReply("");
  reply.lasting = *text;
  exchange->Reply(std::move(reply));
}

}  // namespace denoised
