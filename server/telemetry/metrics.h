#pragma once

#include <google/protobuf/descriptor.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "engine/engine.h"

namespace prometheus {
class Exposer;
}

namespace denoised {

class ProcessSnapshot;
class ServingSnapshot;
struct Serving;

/// Counts and times everything for Prometheus. Names are grpc_server_* as gRPC's own interceptors
/// use them, process_* as Prometheus' clients do, and denoised_<what>_<unit>; docs/metrics.md lists
/// them. Labels hold nothing that a client can choose freely. Thread-safe.
class Metrics : public EngineObserver {
 public:
  Metrics();
  ~Metrics() override;

  /// Serves GET /metrics on `address` until destruction; what `serving` points to is read at each
  /// scrape until Detach(). Null: there is nothing yet. InvalidArgument when the address cannot be
  /// bound.
  absl::Status Serve(const std::string& address, const Serving* serving);
  /// `serving` is not read from now on.
  void Detach();
  /// 0 when there is none.
  int port() const;

  void CallStarted(const google::protobuf::MethodDescriptor* method);
  void CallEnded(const google::protobuf::MethodDescriptor* method, const char* code,
                 const std::string& client, double seconds);
  /// A call that ended with UNAUTHENTICATED before it began. `method` is null for those that there
  /// are not.
  void CallRefused(const google::protobuf::MethodDescriptor* method);

  /// Its first image has a slot, so long after the request arrived.
  void JobStarted(const std::string& model, Priority priority, double seconds);
  void FirstPreview(const std::string& model, double seconds);
  void ImageDone(const std::string& model, const std::string& client);
  void Encoded(const char* format, double seconds);
  void ReaderStalled();
  void ConnectionAccepted();
  void ConnectionRefused();
  void ModelLoaded(const std::string& model, double seconds);
  /// From the start of the process until it served its first model.
  void FirstServed(double seconds);

  void OnEvaluation(const std::string& model, const std::string& device, int rows, int bucket,
                    double seconds) override;
  void OnNonfiniteImage(const std::string& model, const std::string& device) override;

  prometheus::Registry& registry() { return *registry_; }

 private:
  using Histograms = prometheus::Family<prometheus::Histogram>;
  using Counters = prometheus::Family<prometheus::Counter>;
  using Gauges = prometheus::Family<prometheus::Gauge>;

  /// The names of certificates are as many as their authority wants: beyond a hundred clients the
  /// rest is one, "other".
  std::string ClientLabel(const std::string& client);

  struct EvaluationSeries {
    prometheus::Histogram* rows;
    prometheus::Histogram* seconds;
    prometheus::Counter* padding;
  };

  std::shared_ptr<prometheus::Registry> registry_;
  Counters& started_;
  Counters& handled_;
  Counters& client_calls_;
  Histograms& handling_seconds_;
  Histograms& queue_seconds_;
  Histograms& first_preview_seconds_;
  Counters& client_images_;
  Counters& connections_;
  Counters& refused_connections_;
  Counters& images_;
  Histograms& encoding_seconds_;
  Counters& stalled_readers_;
  Gauges& model_load_seconds_;
  Gauges& startup_seconds_;
  Histograms& evaluation_rows_;
  Histograms& evaluation_seconds_;
  Counters& padding_rows_;
  Counters& nonfinite_images_;

  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<std::pair<std::string, std::string>, EvaluationSeries> evaluations_;  // model, device
  std::set<std::string> clients_;  // those with a label

  std::shared_ptr<ServingSnapshot> snapshot_;
  std::shared_ptr<ProcessSnapshot> process_;
  std::unique_ptr<prometheus::Exposer> exposer_;  // takes a second or two to stop
};

}  // namespace denoised
