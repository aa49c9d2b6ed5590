#include "server/telemetry/metrics.h"

#include <prometheus/exposer.h>

#include "server/api/translate.h"
#include "server/models/catalog.h"
#include "server/snapshots.h"

namespace denoised {
namespace {

prometheus::Histogram::BucketBoundaries Doubling(double first, int count) {
  prometheus::Histogram::BucketBoundaries bounds;
  for (int i = 0; i < count; ++i) bounds.push_back(first * (1 << i));
  return bounds;
}

/// 5 ms to 82 s: what people and their deadlines wait for.
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

}  // namespace

Metrics::Metrics()
    : registry_(std::make_shared<prometheus::Registry>()),
      started_(CounterFamily(*registry_, "grpc_server_started_total", "Calls that began")),
      handled_(CounterFamily(*registry_, "grpc_server_handled_total", "Calls that ended, by code")),
      client_calls_(CounterFamily(*registry_, "denoised_client_calls_total",
                                  "Calls that ended, by client and code")),
      handling_seconds_(HistogramFamily(*registry_, "grpc_server_handling_seconds",
                                        "From the arrival of a call to its end")),
      queue_seconds_(HistogramFamily(*registry_, "denoised_queue_seconds",
                                     "From the arrival of a request to its first slot")),
      first_preview_seconds_(
          HistogramFamily(*registry_, "denoised_first_preview_seconds",
                          "From the queueing of a request to its first preview")),
      client_images_(
          CounterFamily(*registry_, "denoised_client_images_total", "Images drawn, by client")),
      connections_(CounterFamily(*registry_, "denoised_connections_total",
                                 "Connections that were accepted")),
      refused_connections_(CounterFamily(*registry_, "denoised_refused_connections_total",
                                         "Connections closed since there were too many")),
      images_(CounterFamily(*registry_, "denoised_images_total", "Images drawn")),
      encoding_seconds_(HistogramFamily(*registry_, "denoised_encoding_seconds",
                                        "Time to encode one image or preview, by format")),
      stalled_readers_(CounterFamily(*registry_, "denoised_stalled_readers_total",
                                     "Streams cancelled because nobody read them")),
      model_load_seconds_(GaugeFamily(*registry_, "denoised_model_load_seconds",
                                      "Time to load and warm up the model")),
      startup_seconds_(GaugeFamily(*registry_, "denoised_startup_seconds",
                                   "From the start of the process until it served")),
      evaluation_rows_(HistogramFamily(*registry_, "denoised_evaluation_rows",
                                       "Rows that did work in one model evaluation")),
      evaluation_seconds_(HistogramFamily(*registry_, "denoised_evaluation_seconds",
                                          "Device time of one model evaluation")),
      padding_rows_(CounterFamily(*registry_, "denoised_padding_rows_total",
                                  "Rows of evaluations that were only padding")),
      nonfinite_images_(CounterFamily(*registry_, "denoised_nonfinite_images_total",
                                      "Images that had NaN or infinity")) {
  // A series that is 0 before the first event can be alerted on.
  for (Counters* counter : {&connections_, &refused_connections_, &stalled_readers_}) {
    counter->Add({});
  }
}

Metrics::~Metrics() { Detach(); }

absl::Status Metrics::Serve(const std::string& address, const Serving* serving) {
  snapshot_ = std::make_shared<ServingSnapshot>(serving);
  process_ = std::make_shared<ProcessSnapshot>();
  // An idle connection holds a thread until it times out: with Prometheus and a few people who
  // look, two threads are soon taken.
  const std::vector<std::string> options = {"listening_ports",    address, "num_threads", "16",
                                            "request_timeout_ms", "3000"};
  // civetweb reports a port in use by an exception.
  try {
    exposer_ = std::make_unique<prometheus::Exposer>(options);
  } catch (const std::exception& error) {
    return Unavailable(
        "--metrics-listen {}: {}; choose a free port, in IPv4 where civetweb is built without IPv6 "
        "as Debian's is, or \"\" for none",
        address, error.what());
  }
  exposer_->RegisterCollectable(registry_);
  exposer_->RegisterCollectable(snapshot_);
  exposer_->RegisterCollectable(process_);
  return absl::OkStatus();
}

void Metrics::Detach() {
  if (snapshot_) snapshot_->Detach();
}

int Metrics::port() const {
  return exposer_ == nullptr ? 0 : exposer_->GetListeningPorts().front();
}

void Metrics::CallStarted(const MethodDescriptor* method) {
  started_.Add(CallLabels(method)).Increment();
}

void Metrics::CallEnded(const MethodDescriptor* method, const char* code, const std::string& client,
                        double seconds) {
  prometheus::Labels labels = CallLabels(method);
  handling_seconds_.Add(labels, LatencyBuckets()).Observe(seconds);
  labels["grpc_code"] = code;
  handled_.Add(labels).Increment();
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
  std::lock_guard lock(mutex_);
  if (clients_.size() < kMaxClients) clients_.insert(client);
  return clients_.count(client) ? client : "other";
}

void Metrics::JobStarted(const std::string& model, Priority priority, double seconds) {
  queue_seconds_.Add({{"model", ModelOf(model)}, {"priority", Label(priority)}}, LatencyBuckets())
      .Observe(seconds);
}

void Metrics::FirstPreview(const std::string& model, double seconds) {
  first_preview_seconds_.Add({{"model", ModelOf(model)}}, LatencyBuckets()).Observe(seconds);
}

void Metrics::ImageDone(const std::string& model, const std::string& client) {
  images_.Add({{"model", ModelOf(model)}}).Increment();
  client_images_.Add({{"client", ClientLabel(client)}}).Increment();
}

void Metrics::ConnectionAccepted() { connections_.Add({}).Increment(); }
void Metrics::ConnectionRefused() { refused_connections_.Add({}).Increment(); }

void Metrics::Encoded(const char* format, double seconds) {
  encoding_seconds_.Add({{"format", format}}, ShortBuckets()).Observe(seconds);
}

void Metrics::ReaderStalled() { stalled_readers_.Add({}).Increment(); }

void Metrics::ModelLoaded(const std::string& model, double seconds) {
  model_load_seconds_.Add({{"model", ModelOf(model)}}).Set(seconds);
}

void Metrics::FirstServed(double seconds) { startup_seconds_.Add({}).Set(seconds); }

void Metrics::OnEvaluation(const std::string& model, const std::string& device, int rows,
                           int bucket, double seconds) {
  EvaluationSeries series;
  {
    std::lock_guard lock(mutex_);
    auto it = evaluations_.find({model, device});
    if (it == evaluations_.end()) {
      const prometheus::Labels labels = {{"device", device}, {"model", ModelOf(model)}};
      it = evaluations_
               .emplace(std::pair(model, device),
                        EvaluationSeries{&evaluation_rows_.Add(labels, RowBuckets()),
                                         &evaluation_seconds_.Add(labels, ShortBuckets()),
                                         &padding_rows_.Add(labels)})
               .first;
      nonfinite_images_.Add({{"model", ModelOf(model)}});
    }
    series = it->second;
  }
  series.rows->Observe(rows);
  series.padding->Increment(bucket - rows);
  if (seconds >= 0) series.seconds->Observe(seconds);
}

void Metrics::OnNonfiniteImage(const std::string& model, const std::string&) {
  nonfinite_images_.Add({{"model", ModelOf(model)}}).Increment();
}

}  // namespace denoised
