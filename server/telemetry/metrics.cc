// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/metrics.h"

#include <utility>

#include "server/status/model_name.h"

namespace denoised {
namespace {

prometheus::Histogram::BucketBoundaries Doubling(double first, int count) {
  prometheus::Histogram::BucketBoundaries bounds;
  for (int i = 0; i < count; ++i) bounds.push_back(first * (1 << i));
  return bounds;
}

/// 5 ms to 82 s: requests and calls.
prometheus::Histogram::BucketBoundaries LatencyBuckets() { return Doubling(0.005, 15); }
/// 0.1 ms to 6.5 s: one evaluation or one encoding.
prometheus::Histogram::BucketBoundaries ShortBuckets() { return Doubling(0.0001, 17); }
/// 1 to 1024 rows.
prometheus::Histogram::BucketBoundaries RowBuckets() { return Doubling(1, 11); }

prometheus::Family<prometheus::Counter>& CounterFamily(prometheus::Registry& registry,
                                                       const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}

prometheus::Family<prometheus::Gauge>& GaugeFamily(prometheus::Registry& registry, const char* name,
                                                   const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}

prometheus::Family<prometheus::Histogram>& HistogramFamily(prometheus::Registry& registry,
                                                           const char* name, const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

using google::protobuf::MethodDescriptor;

/// As gRPC's own interceptors name them.
prometheus::Labels CallLabels(const MethodDescriptor* method) {
  if (method == nullptr) {
    return {{"grpc_type", "unknown"}, {"grpc_service", "unknown"}, {"grpc_method", "unknown"}};
  }
  const char* type = method->client_streaming()
                         ? (method->server_streaming() ? "bidi_stream" : "client_stream")
                         : (method->server_streaming() ? "server_stream" : "unary");
  return {{"grpc_type", type},
          {"grpc_service", method->service()->full_name()},
          {"grpc_method", method->name()}};
}

std::string ModelLabel(const std::string& model) {
  return model.empty() ? "unknown" : ModelOf(model);
}

}  // namespace

const char* PriorityLabel(Priority priority) {
  switch (priority) {
    case Priority::kInteractive:
      return "interactive";
    case Priority::kNormal:
      return "normal";
    case Priority::kBatch:
      return "batch";
  }
  DENOISED_CHECK(false, "priority {}", static_cast<int>(priority));
  return "";
}

const char* StageName(Stage stage) {
  switch (stage) {
    case Stage::kCondition:
      return "condition";
    case Stage::kEncode:
      return "encode";
    case Stage::kDenoise:
      return "denoise";
    case Stage::kDecode:
      return "decode";
  }
  DENOISED_CHECK(false, "stage {}", static_cast<int>(stage));
  return "";
}

template <typename Metric>
template <typename... Arguments>
Metric& Metrics::ByVersion<Metric>::Get(const std::string& model, prometheus::Labels labels,
                                        Arguments&&... arguments) {
  labels["model"] = ModelLabel(model);
  labels["version"] = model.empty() ? "unknown" : VersionOf(model);
  Metric& metric = family_.Add(labels, std::forward<Arguments>(arguments)...);
  if (!model.empty()) series_[model].insert(&metric);
  return metric;
}

template <typename Metric>
void Metrics::ByVersion<Metric>::Remove(const std::string& model) {
  const auto series = series_.find(model);
  if (series == series_.end()) return;
  for (Metric* const metric : series->second) family_.Remove(metric);
  series_.erase(series);
}

Metrics::Metrics()
    : started_(CounterFamily(registry_, "grpc_server_started_total", "Calls that began")),
      handled_(CounterFamily(registry_, "grpc_server_handled_total", "Calls that ended, by code")),
      client_calls_(CounterFamily(registry_, "denoised_client_calls_total",
                                  "Calls that ended, by client and code")),
      handling_seconds_(HistogramFamily(registry_, "grpc_server_handling_seconds",
                                        "From the arrival of a call to its end")),
      client_images_(CounterFamily(registry_, "denoised_client_images_total",
                                   "Images drawn, by client and model")),
      connections_(
          CounterFamily(registry_, "denoised_connections_total", "Connections that were accepted")),
      refused_connections_(CounterFamily(registry_, "denoised_refused_connections_total",
                                         "Connections closed since there were too many")),
      stalled_readers_(CounterFamily(registry_, "denoised_stalled_readers_total",
                                     "Calls cancelled because nobody read them")),
      http_replies_(CounterFamily(registry_, "denoised_http_replies_total",
                                  "Replies of the HTTP port, by code")),
      http_connections_(
          GaugeFamily(registry_, "denoised_http_connections", "Open connections of the HTTP port")),
      startup_seconds_(GaugeFamily(registry_, "denoised_startup_seconds",
                                   "From the start of the process until it served")),
      requests_(CounterFamily(registry_, "denoised_requests_total",
                              "Requests for images that ended, by code")),
      request_seconds_(HistogramFamily(registry_, "denoised_request_seconds",
                                       "From the arrival of a request to its end, of those that "
                                       "succeeded")),
      queue_seconds_(HistogramFamily(registry_, "denoised_queue_seconds",
                                     "From the arrival of a request to its first slot")),
      first_preview_seconds_(
          HistogramFamily(registry_, "denoised_first_preview_seconds",
                          "From the queueing of a request to its first preview")),
      images_(CounterFamily(registry_, "denoised_images_total", "Images drawn")),
      encoding_seconds_(HistogramFamily(registry_, "denoised_encoding_seconds",
                                        "Time to encode one image, by format")),
      model_info_(GaugeFamily(registry_, "denoised_model_info",
                              "1, with a label of what the model multiplies in")),
      model_load_seconds_(GaugeFamily(registry_, "denoised_model_load_seconds",
                                      "Time to load and warm up the model")),
      evaluation_rows_(HistogramFamily(registry_, "denoised_evaluation_rows",
                                       "Rows that did work in one model evaluation")),
      evaluation_seconds_(HistogramFamily(registry_, "denoised_evaluation_seconds",
                                          "Device time of one model evaluation")),
      padding_rows_(CounterFamily(registry_, "denoised_padding_rows_total",
                                  "Rows of evaluations that were only padding")),
      stage_seconds_(HistogramFamily(registry_, "denoised_stage_seconds",
                                     "Device time of one run of a stage other than denoising")),
      stage_items_(CounterFamily(registry_, "denoised_stage_items_total",
                                 "Prompts or images that went through a stage")),
      prompts_(CounterFamily(registry_, "denoised_prompts_total",
                             "Prompts that images took, by whether they were known")),
      nonfinite_images_(CounterFamily(registry_, "denoised_nonfinite_images_total",
                                      "Images that had NaN or infinity")) {
  // Start at 0: alerts need a series before the first event.
  for (Counters* counter : {&connections_, &refused_connections_, &stalled_readers_}) {
    counter->Add({});
  }
  http_replies_.Add({{"code", "200"}});
  http_connections_.Add({});
}

void Metrics::CallStarted(const MethodDescriptor* method) {
  started_.Add(CallLabels(method)).Increment();
}

void Metrics::CallEnded(const MethodDescriptor* method, const std::string& code,
                        const std::string& client, double seconds) {
  prometheus::Labels labels = CallLabels(method);
  handling_seconds_.Add(labels, LatencyBuckets()).Observe(seconds);
  labels["grpc_code"] = code;
  handled_.Add(labels).Increment();
  MutexLock lock(&mutex_);
  client_calls_.Add({{"client", ClientLabel(client)}, {"grpc_code", code}}).Increment();
}

void Metrics::CallRefused(const MethodDescriptor* method) {
  prometheus::Labels labels = CallLabels(method);
  started_.Add(labels).Increment();
  labels["grpc_code"] = "UNAUTHENTICATED";
  handled_.Add(labels).Increment();
}

std::string Metrics::ClientLabel(const std::string& client) {
  constexpr size_t kMaxClients = 100;
  if (clients_.size() < kMaxClients) clients_.insert(client);
  return clients_.count(client) ? client : "other";
}

void Metrics::Touch(const std::string& model) {
  if (!model.empty()) versions_.try_emplace(model, Clock::now());
}

void Metrics::RequestEnded(const std::string& model, const std::string& code, double seconds) {
  MutexLock lock(&mutex_);
  Touch(model);
  requests_.Get(model, {{"code", code}}).Increment();
  if (code == "OK") request_seconds_.Get(model, {}, LatencyBuckets()).Observe(seconds);
}

void Metrics::JobStarted(const std::string& model, Priority priority, double seconds) {
  MutexLock lock(&mutex_);
  Touch(model);
  queue_seconds_.Get(model, {{"priority", PriorityLabel(priority)}}, LatencyBuckets())
      .Observe(seconds);
}

void Metrics::FirstPreview(const std::string& model, double seconds) {
  MutexLock lock(&mutex_);
  Touch(model);
  first_preview_seconds_.Get(model, {}, LatencyBuckets()).Observe(seconds);
}

void Metrics::ImageDone(const std::string& model, const std::string& client) {
  MutexLock lock(&mutex_);
  Touch(model);
  images_.Get(model, {}).Increment();
  const std::string name = ModelLabel(model);
  auto& of_client = client_images_.Add({{"client", ClientLabel(client)}, {"model", name}});
  of_client.Increment();
  if (!model.empty()) client_images_of_[name].insert(&of_client);
}

void Metrics::ConnectionAccepted() { connections_.Add({}).Increment(); }
void Metrics::ConnectionRefused() { refused_connections_.Add({}).Increment(); }

void Metrics::HttpReplied(int code) {
  http_replies_.Add({{"code", std::to_string(code)}}).Increment();
}
void Metrics::HttpConnectionOpened() { http_connections_.Add({}).Increment(); }
void Metrics::HttpConnectionClosed() { http_connections_.Add({}).Decrement(); }

void Metrics::Encoded(const std::string& model, const char* format, double seconds) {
  MutexLock lock(&mutex_);
  Touch(model);
  encoding_seconds_.Get(model, {{"format", format}}, ShortBuckets()).Observe(seconds);
}

void Metrics::ReaderStalled() { stalled_readers_.Add({}).Increment(); }

void Metrics::ModelLoaded(const std::string& model, const std::string& precision, double seconds) {
  MutexLock lock(&mutex_);
  Touch(model);
  model_info_.Remove(model);  // of a version of this name that was unloaded
  model_info_.Get(model, {{"precision", precision}}).Set(1);
  model_load_seconds_.Get(model, {}).Set(seconds);
}

void Metrics::FirstServed(double seconds) { startup_seconds_.Add({}).Set(seconds); }

void Metrics::OnEvaluation(const std::string& model, const std::string& device, int rows,
                           int bucket, double seconds) {
  const prometheus::Labels labels = {{"device", device}};
  MutexLock lock(&mutex_);
  Touch(model);
  evaluation_rows_.Get(model, labels, RowBuckets()).Observe(rows);
  padding_rows_.Get(model, labels).Increment(bucket - rows);
  nonfinite_images_.Get(model, {});  // starts the series at 0, for alerts
  auto& seconds_of_all = evaluation_seconds_.Get(model, labels, ShortBuckets());
  if (seconds >= 0) seconds_of_all.Observe(seconds);
}

void Metrics::OnStage(const std::string& model, const std::string& device, Stage stage, int count,
                      double seconds) {
  const prometheus::Labels labels = {{"device", device}, {"stage", StageName(stage)}};
  MutexLock lock(&mutex_);
  Touch(model);
  stage_items_.Get(model, labels).Increment(count);
  auto& seconds_of_all = stage_seconds_.Get(model, labels, ShortBuckets());
  if (seconds >= 0) seconds_of_all.Observe(seconds);
}

void Metrics::OnPrompts(const std::string& model, const std::string& device, int known, int made) {
  MutexLock lock(&mutex_);
  Touch(model);
  prompts_.Get(model, {{"device", device}, {"cache", "hit"}}).Increment(known);
  prompts_.Get(model, {{"device", device}, {"cache", "miss"}}).Increment(made);
}

void Metrics::Retain(const std::set<std::string>& models, Clock::time_point now) {
  MutexLock lock(&mutex_);
  for (auto version = versions_.begin(); version != versions_.end();) {
    const std::string& model = version->first;
    if (models.count(model) > 0) version->second = now;
    if (now - version->second < kRetention) {
      ++version;
      continue;
    }
    requests_.Remove(model);
    request_seconds_.Remove(model);
    queue_seconds_.Remove(model);
    first_preview_seconds_.Remove(model);
    images_.Remove(model);
    encoding_seconds_.Remove(model);
    model_info_.Remove(model);
    model_load_seconds_.Remove(model);
    evaluation_rows_.Remove(model);
    evaluation_seconds_.Remove(model);
    padding_rows_.Remove(model);
    stage_seconds_.Remove(model);
    stage_items_.Remove(model);
    prompts_.Remove(model);
    nonfinite_images_.Remove(model);
    version = versions_.erase(version);
  }
  std::set<std::string> names;
  for (const auto& [model, seen] : versions_) names.insert(ModelLabel(model));
  std::erase_if(client_images_of_, [&](const auto& each) {
    if (names.contains(each.first)) return false;
    for (prometheus::Counter* const metric : each.second) client_images_.Remove(metric);
    return true;
  });
}

void Metrics::OnNonfiniteImage(const std::string& model, const std::string&) {
  MutexLock lock(&mutex_);
  Touch(model);
  nonfinite_images_.Get(model, {}).Increment();
}

}  // namespace denoised
