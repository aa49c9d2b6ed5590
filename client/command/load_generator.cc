// SPDX-License-Identifier: Apache-2.0
#include "command/load_generator.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "denoised/mutex.h"

namespace denoised::command {
namespace {

using std::chrono::steady_clock;

constexpr double kProgressSeconds = 0.25;
constexpr int kSentAtOnce = 64;

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// A unary call that reports its result as a stream does.
class UnaryCall : public client::StreamCall {
 public:
  UnaryCall(const client::Client& client, const client::Generation& generation,
            const client::StreamListener& listener, client::CallOptions options) {
    options.stop = stop_.get_token();
    done_ = std::async(std::launch::async, [=] {
      const auto result = client.Generate(generation, options);
      if (result.ok()) {
        for (const client::Image& image : result->images) listener.on_event(image);
        listener.on_event(client::Completed{result->params, result->timing});
      }
      listener.on_done(result.status());
      return result.status();
    });
  }
  ~UnaryCall() override {
    stop_.request_stop();
    done_.wait();
  }
  void Cancel() override { stop_.request_stop(); }
  absl::Status Wait() override { return done_.get(); }

 private:
  std::stop_source stop_;
  std::shared_future<absl::Status> done_;
};

class LoadGenerator {
 public:
  LoadGenerator(const std::vector<client::Client>& clients, Workload workload,
                const LoadOptions& options, const std::function<void(const Arrival&)>& on_sent,
                const std::function<void(const LoadProgress&)>& on_progress)
      : clients_(clients),
        workload_(std::move(workload)),
        options_(options),
        on_sent_(on_sent),
        on_progress_(on_progress) {}

  LoadResult Run(const std::stop_token& stop);

 private:
  struct ReceivedImage {
    client::Image image;  // without its content
    uint64_t hash;
    double at_seconds;
  };
  /// A request under way. Its listener alone writes `outcome`, `params` and `images` until it is in
  /// ended_; the rest belongs to the thread of Run.
  struct Request {
    std::list<Request>::iterator self;
    std::multimap<double, Request*>::iterator cancel_at;
    bool counts = false;
    double end_seconds = 0;
    Outcome outcome;
    client::EffectiveParams params;
    std::vector<ReceivedImage> images;
    std::unique_ptr<client::StreamCall> call;
  };

  double Now() const { return std::chrono::duration<double>(steady_clock::now() - start_).count(); }
  const Arrival* Next();
  void Send();
  void OnEvent(Request* request, const client::Event& event) const;
  void Reap(Request* request);
  void Cancel(Request* request);
  LoadProgress Progress(double now) const;

  const std::vector<client::Client>& clients_;
  Workload workload_;
  const LoadOptions& options_;
  const std::function<void(const Arrival&)>& on_sent_;
  const std::function<void(const LoadProgress&)>& on_progress_;
  const steady_clock::time_point start_ = steady_clock::now();

  bool arriving_ = true;
  std::optional<Arrival> next_;
  std::multiset<double> places_;  // of a closed loop: since or from when each is free
  double last_place_ = 0;         // that was taken
  std::list<Request> under_way_;
  std::multimap<double, Request*> cancels_;
  int64_t sent_ = 0, counted_ = 0, succeeded_ = 0, failed_ = 0;
  std::vector<double> image_times_, success_times_, in_time_times_;
  LoadResult result_;

  client::Mutex mutex_;
  std::condition_variable_any wake_;
  std::deque<Request*> ended_ ABSL_GUARDED_BY(mutex_);
};

/// The next request to send, or null while there is none or, in a closed loop, no free place.
const Arrival* LoadGenerator::Next() {
  if (next_) return &*next_;
  if (options_.requests && counted_ >= *options_.requests) arriving_ = false;
  const bool closed = options_.concurrency > 0;
  if (!arriving_ || (closed && (places_.empty() || *places_.begin() > Now()))) return nullptr;
  next_ = workload_.Next();
  if (next_ && closed) {
    // In order, as in a trace: of two requests that ended, the later one may be reported first.
    last_place_ = std::max(last_place_, *places_.begin());
    next_->at_seconds = last_place_;
    places_.erase(places_.begin());
  }
  if (!next_ || (options_.duration_seconds &&
                 next_->at_seconds >= options_.warm_up_seconds + *options_.duration_seconds)) {
    next_.reset();
    arriving_ = false;
    return nullptr;
  }
  return &*next_;
}

void LoadGenerator::Send() {
  const Arrival& arrival = *next_;
  Request& request = under_way_.emplace_back();
  request.self = std::prev(under_way_.end());
  request.counts = arrival.at_seconds >= options_.warm_up_seconds;
  request.outcome.kind = arrival.kind;
  request.outcome.arrival_seconds = arrival.at_seconds;
  request.outcome.deadline_seconds = arrival.deadline_seconds;
  request.cancel_at = arrival.cancel_seconds
                          ? cancels_.emplace(arrival.at_seconds + *arrival.cancel_seconds, &request)
                          : cancels_.end();

  client::StreamListener listener = {
      .on_event = [this, &request](const client::Event& event) { OnEvent(&request, event); },
      .on_done =
          [this, &request](const absl::Status& status) {
            request.end_seconds = Now();
            request.outcome.status = status;
            client::MutexLock lock(&mutex_);
            ended_.push_back(&request);
            wake_.notify_one();
          }};
  client::CallOptions call = {.metadata = options_.metadata, .traceparent = options_.traceparent};
  const double now = Now();
  request.outcome.sent_late_seconds = now - arrival.at_seconds;
  if (arrival.deadline_seconds) {
    call.timeout =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(
            std::max(arrival.at_seconds + *arrival.deadline_seconds - now, 0.0)));
  }
  const client::Client& client = clients_[static_cast<size_t>(sent_) % clients_.size()];
  if (options_.unary) {
    request.call =
        std::make_unique<UnaryCall>(client, arrival.generation, std::move(listener), call);
  } else {
    request.call =
        client.StreamGenerate(arrival.generation, arrival.preview, std::move(listener), call);
  }
  ++sent_;
  counted_ += request.counts;
  if (on_sent_) on_sent_(arrival);
  next_.reset();
}

void LoadGenerator::OnEvent(Request* request, const client::Event& event) const {
  Outcome& outcome = request->outcome;
  if (const auto* queued = std::get_if<client::Queued>(&event)) {
    request->params = queued->params;
  } else if (const auto* started = std::get_if<client::Started>(&event)) {
    outcome.queued_seconds = started->queued_seconds;
  } else if (std::holds_alternative<client::Preview>(event)) {
    if (!outcome.first_preview_seconds) {
      outcome.first_preview_seconds = Now() - outcome.arrival_seconds;
    }
  } else if (const auto* image = std::get_if<client::Image>(&event)) {
    ReceivedImage received = {.at_seconds = Now()};  // before the time that the hash takes
    received.hash = HashOf(*image);
    received.image = {.index = image->index,
                      .seed = image->seed,
                      .class_label = image->class_label,
                      .mime_type = image->mime_type,
                      .width = image->width,
                      .height = image->height};
    request->images.push_back(std::move(received));
  } else if (const auto* completed = std::get_if<client::Completed>(&event)) {
    request->params = completed->params;
    outcome.queued_seconds = completed->timing.queued_seconds;
  }
}

/// Records a request that has ended, and forgets it.
void LoadGenerator::Reap(Request* request) {
  request->call.reset();
  if (request->cancel_at != cancels_.end()) cancels_.erase(request->cancel_at);
  Outcome& outcome = request->outcome;
  outcome.latency_seconds = request->end_seconds - outcome.arrival_seconds;
  outcome.images = static_cast<int>(request->images.size());
  for (const ReceivedImage& received : request->images) {
    result_.hashes.Add(ImageKey(request->params, received.image), received.hash);
    image_times_.push_back(received.at_seconds);
  }
  if (outcome.status.ok()) {
    outcome.cancelled = false;  // too late
    ++succeeded_;
    success_times_.push_back(request->end_seconds);
    if (IsInTime(outcome)) in_time_times_.push_back(request->end_seconds);
  } else if (!outcome.cancelled) {
    ++failed_;
  }
  if (options_.concurrency > 0) places_.insert(request->end_seconds);
  if (request->counts) result_.outcomes.push_back(std::move(outcome));
  under_way_.erase(request->self);
}

void LoadGenerator::Cancel(Request* request) {
  request->outcome.cancelled = true;
  request->call->Cancel();
}

LoadProgress LoadGenerator::Progress(double now) const {
  return {.elapsed_seconds = now,
          .sent = sent_,
          .under_way = static_cast<int64_t>(under_way_.size()),
          .succeeded = succeeded_,
          .failed = failed_,
          .images = static_cast<int64_t>(image_times_.size())};
}

LoadResult LoadGenerator::Run(const std::stop_token& stop) {
  const double cpu = CpuSeconds();
  // Places open one after another, so that the requests are at different steps.
  for (int i = 0; i < options_.concurrency; ++i) {
    places_.insert(options_.warm_up_seconds * i / options_.concurrency);
  }
  bool stopped = false;
  double progress_at = 0;
  while (true) {
    if (stop.stop_requested() && !stopped) {
      stopped = true;
      arriving_ = false;
      next_.reset();
      for (Request& request : under_way_) Cancel(&request);
    }
    // Where requests arrive faster than they can be sent there is always another one, and those
    // that have ended would never be reaped.
    for (int sent = 0; Next() != nullptr && next_->at_seconds <= Now() && sent < kSentAtOnce &&
                       !stop.stop_requested();
         ++sent) {
      Send();
    }
    while (!cancels_.empty() && cancels_.begin()->first <= Now()) {
      Request* request = cancels_.begin()->second;
      cancels_.erase(cancels_.begin());
      request->cancel_at = cancels_.end();
      Cancel(request);
    }
    const double now = Now();
    if (now >= progress_at && on_progress_) {
      on_progress_(Progress(now));
      progress_at = now + kProgressSeconds;
    }
    if (!arriving_ && under_way_.empty()) break;

    double until = now + kProgressSeconds;
    if (next_) until = std::min(until, next_->at_seconds);
    if (arriving_ && !places_.empty()) until = std::min(until, *places_.begin());
    if (!cancels_.empty()) until = std::min(until, cancels_.begin()->first);
    std::deque<Request*> ended;
    {
      client::MutexLock lock(&mutex_);
      const auto wake_at = start_ + std::chrono::duration_cast<steady_clock::duration>(
                                        std::chrono::duration<double>(until));
      // After a stop request the token would end every wait at once.
      const auto some_ended = [this]()
                                  ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !ended_.empty(); };
      if (stopped) {
        wake_.wait_until(mutex_, wake_at, some_ended);
      } else {
        wake_.wait_until(mutex_, stop, wake_at, some_ended);
      }
      ended.swap(ended_);
    }
    for (Request* request : ended) Reap(request);
  }

  const double begin = options_.warm_up_seconds;
  const double end = options_.duration_seconds && !stopped ? begin + *options_.duration_seconds
                                                           : std::max(Now(), begin);
  const auto in_window = [&](double at) { return at >= begin && at < end; };
  result_.window_seconds = end - begin;
  result_.window_images = std::count_if(image_times_.begin(), image_times_.end(), in_window);
  result_.window_requests = std::count_if(success_times_.begin(), success_times_.end(), in_window);
  result_.window_in_time = std::count_if(in_time_times_.begin(), in_time_times_.end(), in_window);
  result_.images = static_cast<int64_t>(image_times_.size());
  result_.cpu_seconds = CpuSeconds() - cpu;
  return std::move(result_);
}

}  // namespace

LoadResult RunLoad(const std::vector<client::Client>& clients, Workload workload,
                   const LoadOptions& options, const std::function<void(const Arrival&)>& on_sent,
                   const std::function<void(const LoadProgress&)>& on_progress,
                   const std::stop_token& stop) {
  return LoadGenerator(clients, std::move(workload), options, on_sent, on_progress).Run(stop);
}

}  // namespace denoised::command
