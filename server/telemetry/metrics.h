// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <google/protobuf/descriptor.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/core/mutex.h"
#include "engine/engine.h"
#include "server/telemetry/request_totals.h"

namespace denoised {

/// "interactive", "normal" or "batch".
const char* PriorityLabel(Priority priority);
/// "condition", "encode", "denoise" or "decode".
const char* StageName(Stage stage);

/// Counters and histograms for Prometheus. Names are grpc_server_*, as gRPC's own interceptors use
/// them, and denoised_<what>_<unit>; docs/metrics.md lists them. No label holds text that a client
/// can choose freely. `model` is always the engine's name of a version, "digits@2", which becomes
/// the labels model and version; it is empty for a request of a model that does not exist. Retain
/// removes the series of unloaded versions. Thread-safe.
class Metrics : public EngineObserver {
 public:
  using Clock = std::chrono::steady_clock;

  Metrics();

  void CallStarted(const google::protobuf::MethodDescriptor* method);
  void CallEnded(const google::protobuf::MethodDescriptor* method, const std::string& code,
                 const std::string& client, double seconds);
  /// A call that was refused with UNAUTHENTICATED. `method` is null if it does not exist.
  void CallRefused(const google::protobuf::MethodDescriptor* method);

  /// A request for images ended with a gRPC code such as "OK", `seconds` after it arrived.
  void RequestEnded(const std::string& model, const std::string& code, double seconds);
  /// Its first image got a slot, `seconds` after the request arrived.
  void JobStarted(const std::string& model, Priority priority, double seconds);
  void FirstPreview(const std::string& model, double seconds);
  void ImageDone(const std::string& model, const std::string& client);
  void Encoded(const std::string& model, const char* format, double seconds);
  void ReaderStalled();
  void ConnectionAccepted();
  void ConnectionRefused();
  /// The HTTP port replied with a code such as 404, whether or not a method was called.
  void HttpReplied(int code);
  void HttpConnectionOpened();
  void HttpConnectionClosed();
  void ModelLoaded(const std::string& model, const std::string& precision, double seconds);
  /// Seconds from the start of the process until it served its first model.
  void FirstServed(double seconds);

  void OnEvaluation(const std::string& model, const std::string& device, int rows, int bucket,
                    double seconds) override;
  void OnStage(const std::string& model, const std::string& device, Stage stage, int count,
               double seconds) override;
  void OnPrompts(const std::string& model, const std::string& device, int known, int made) override;
  void OnNonfiniteImage(const std::string& model, const std::string& device) override;

  /// Removes the series of versions that have not been in `models` (the engine's names) for
  /// kRetention, which gives scrapers time to see the last numbers. denoised_client_images_total
  /// has no version and goes with the last of a model. Call it periodically.
  void Retain(const std::set<std::string>& models, Clock::time_point now = Clock::now());
  static constexpr std::chrono::minutes kRetention{10};

  /// Totals of the same requests for Triton's clients.
  RequestTotals& totals() { return totals_; }

  /// All series of this class.
  std::vector<prometheus::MetricFamily> Collect() const { return registry_.Collect(); }

 private:
  using Histograms = prometheus::Family<prometheus::Histogram>;
  using Counters = prometheus::Family<prometheus::Counter>;
  using Gauges = prometheus::Family<prometheus::Gauge>;

  /// A family with series for each version of a model. Not synchronised. Use the result of Get
  /// under the same lock, because Remove deletes it.
  template <typename Metric>
  class ByVersion {
   public:
    explicit ByVersion(prometheus::Family<Metric>& family) : family_(family) {}

    template <typename... Arguments>
    Metric& Get(const std::string& model, prometheus::Labels labels, Arguments&&... arguments);
    void Remove(const std::string& model);

   private:
    prometheus::Family<Metric>& family_;
    std::map<std::string, std::set<Metric*>> series_;  // by the engine's name
  };

  /// The label of a client. A certificate authority can issue any number of names, so all clients
  /// beyond the first hundred share the label "other".
  std::string ClientLabel(const std::string& client) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Records that a version has series.
  void Touch(const std::string& model) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  RequestTotals totals_;
  prometheus::Registry registry_;
  Counters& started_;
  Counters& handled_;
  Counters& client_calls_;
  Histograms& handling_seconds_;
  Counters& client_images_;
  Counters& connections_;
  Counters& refused_connections_;
  Counters& stalled_readers_;
  Counters& http_replies_;
  Gauges& http_connections_;
  Gauges& startup_seconds_;

  Mutex mutex_;
  ByVersion<prometheus::Counter> requests_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> request_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> queue_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> first_preview_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Counter> images_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> encoding_seconds_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::set<prometheus::Counter*>> client_images_of_
      ABSL_GUARDED_BY(mutex_);  // those of client_images_, by the name of the model
  ByVersion<prometheus::Gauge> model_info_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Gauge> model_load_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> evaluation_rows_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> evaluation_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Counter> padding_rows_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> stage_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Counter> stage_items_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Counter> prompts_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Counter> nonfinite_images_ ABSL_GUARDED_BY(mutex_);
  /// When Retain last saw each version with series.
  std::map<std::string, Clock::time_point> versions_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> clients_ ABSL_GUARDED_BY(mutex_);  // with a label of their own
};

}  // namespace denoised
