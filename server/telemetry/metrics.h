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

/// Counts and times everything for Prometheus. Names are grpc_server_* as gRPC's own interceptors
/// use them, and denoised_<what>_<unit>; docs/metrics.md lists them. Labels hold nothing that a
/// client can choose freely. `model` is everywhere the engine's name of a version, "digits@2",
/// which becomes the labels model and version; empty for a request that named no model there is.
/// The series of versions that are gone are removed by Retain. Thread-safe.
class Metrics : public EngineObserver {
 public:
  using Clock = std::chrono::steady_clock;

  Metrics();

  void CallStarted(const google::protobuf::MethodDescriptor* method);
  void CallEnded(const google::protobuf::MethodDescriptor* method, const std::string& code,
                 const std::string& client, double seconds);
  /// A call that ended with UNAUTHENTICATED before it began. `method` is null for those that there
  /// are not.
  void CallRefused(const google::protobuf::MethodDescriptor* method);

  /// A request for images has ended with a gRPC code such as "OK", so long after it arrived.
  void RequestEnded(const std::string& model, const std::string& code, double seconds);
  /// Its first image has a slot, so long after the request arrived.
  void JobStarted(const std::string& model, Priority priority, double seconds);
  void FirstPreview(const std::string& model, double seconds);
  void ImageDone(const std::string& model, const std::string& client);
  void Encoded(const std::string& model, const char* format, double seconds);
  void ReaderStalled();
  void ConnectionAccepted();
  void ConnectionRefused();
  void ModelLoaded(const std::string& model, double seconds);
  /// From the start of the process until it served its first model.
  void FirstServed(double seconds);

  void OnEvaluation(const std::string& model, const std::string& device, int rows, int bucket,
                    double seconds) override;

  /// Removes the series of versions that are not among `models` (names of the engine) and were not
  /// for kRetention: so long a scraper has time to see the last numbers. To be called now and then.
  void Retain(const std::set<std::string>& models, Clock::time_point now = Clock::now());
  static constexpr std::chrono::minutes kRetention{10};

  /// The same requests as Triton's clients want to know them.
  RequestTotals& totals() { return totals_; }

  /// All series of this class.
  std::vector<prometheus::MetricFamily> Collect() const { return registry_.Collect(); }

 private:
  using Histograms = prometheus::Family<prometheus::Histogram>;
  using Counters = prometheus::Family<prometheus::Counter>;
  using Gauges = prometheus::Family<prometheus::Gauge>;

  /// A family whose series belong to a version of a model. Not synchronised, and what Get returned
  /// is used under the same lock: Remove deletes it.
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

  /// The names of certificates are as many as their authority wants: beyond a hundred clients the
  /// rest is one, "other".
  std::string ClientLabel(const std::string& client) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Remembers that a version has series.
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
  Gauges& startup_seconds_;

  Mutex mutex_;
  ByVersion<prometheus::Counter> requests_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> request_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> queue_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> first_preview_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Counter> images_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> encoding_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Gauge> model_load_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> evaluation_rows_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Histogram> evaluation_seconds_ ABSL_GUARDED_BY(mutex_);
  ByVersion<prometheus::Counter> padding_rows_ ABSL_GUARDED_BY(mutex_);
  /// When each version with series was last held, as far as Retain knows.
  std::map<std::string, Clock::time_point> versions_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> clients_ ABSL_GUARDED_BY(mutex_);  // those with a label
};

}  // namespace denoised
