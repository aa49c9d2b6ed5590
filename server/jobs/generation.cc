// SPDX-License-Identifier: Apache-2.0
#include "server/jobs/generation.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "server/jobs/jobs.h"
#include "server/status/model_name.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

grpc::Status Draining(const std::string& request_id) {
  return ToGrpcStatus(Unavailable("the server is shutting down; try another replica or try again"),
                      reason::kDraining, request_id, std::chrono::seconds(1));
}

google::protobuf::Timestamp ToTimestamp(std::chrono::system_clock::time_point time) {
  const auto since = time.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
  google::protobuf::Timestamp timestamp;
  timestamp.set_seconds(seconds.count());
  timestamp.set_nanos(static_cast<int32_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(since - seconds).count()));
  return timestamp;
}

constexpr std::chrono::system_clock::time_point kNever{};

constexpr int kAttempts = 3;  // to find a version that is not just being replaced

/// Between two deliveries of nothing but progress, and from the start to the first. A message for
/// every evaluation of every job is more than anybody can see, and costs both sides more than the
/// images do.
constexpr std::chrono::milliseconds kProgressPeriod{100};

}  // namespace

Generation::Generation(const JobContext& context, Jobs* jobs, Origin origin)
    : context_(context),
      jobs_(jobs),
      origin_(std::move(origin)),
      log_(origin_.request_id, jobs->event_bytes()) {}

double Generation::SecondsSinceArrival() const {
  return std::chrono::duration<double>(Clock::now() - origin_.arrival).count();
}

grpc::Status Generation::Refusal(const absl::Status& status, const Estimate& estimate) const {
  std::optional<std::chrono::milliseconds> retry;
  if (estimate.retry_seconds) {
    retry = std::chrono::milliseconds(static_cast<int64_t>(*estimate.retry_seconds * 1e3));
  }
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
      return ToGrpcStatus(
          FailedPrecondition("the model was replaced {} times while the request was checked; try "
                             "again",
                             kAttempts),
          reason::kModelUnloading, origin_.request_id, std::chrono::seconds(1));
    case absl::StatusCode::kResourceExhausted:
      return ToGrpcStatus(status, reason::kQueueFull, origin_.request_id, retry);
    case absl::StatusCode::kDeadlineExceeded:
      return ToGrpcStatus(status, reason::kDeadlineExceeded, origin_.request_id, retry);
    case absl::StatusCode::kUnavailable:
      return context_.drain->draining() ? Draining(origin_.request_id) : ToStatus(status);
    default:
      return ToStatus(status);
  }
}

grpc::Status Generation::ToStatus(const absl::Status& status) const {
  // The engine is unavailable in a drain, or when its last device is lost.
  if (absl::IsUnavailable(status) && !context_.drain->draining()) {
    return ToGrpcStatus(status, reason::kDeviceLost, origin_.request_id);
  }
  return JobStatus(status, origin_.request_id);
}

void Generation::Start(const JobRequest& request) {
  if (context_.drain->draining()) return End(Draining(origin_.request_id));
  auto place = context_.client_load->Admit(ClientLoad::kQueued, origin_.caller, origin_.peer);
  if (!place.ok()) {
    return End(ToGrpcStatus(place.status(), reason::kClientLimit, origin_.request_id,
                            context_.queue_wait->RetryDelay()));
  }
  {
    MutexLock lock(&mutex_);
    queue_place_ = *std::move(place);
  }
  include_timings_ = request.params.include_timings();

  Estimate estimate;
  absl::StatusOr<JobId> id = absl::NotFoundError("");
  bool queued = false;
  // The version may be replaced meanwhile: then its successor is there.
  for (int attempt = 1; attempt <= kAttempts && absl::IsNotFound(id.status()); ++attempt) {
    PreparedJob prepared;  // its memory: until the engine has the tensors and counts them itself
    const grpc::Status status = context_.preparer->Prepare(request, origin_.request_id, &prepared);
    {
      MutexLock lock(&mutex_);
      model_ = prepared.model;
      params_ = prepared.params;
      params_.set_model(ModelOf(model_));
      run_ = prepared.run;
      run_.set_model_version(VersionOf(model_));
    }
    if (prepared.replaced) continue;
    if (!status.ok()) return End(status);
    image_rendering_ = prepared.image;
    preview_rendering_ = prepared.preview;
    job_ = prepared.job;
    // What is only needed to start need not be kept until the end.
    job_.spec.initial_noise = Tensor();
    job_.spec.init_image = Tensor();
    job_.spec.mask = Tensor();
    {
      MutexLock lock(&mutex_);
      if (job_.spec.sampler.sampler) sampler_ = Name(*job_.spec.sampler.sampler);
      priority_ = job_.spec.priority;
      if (include_timings_ && !std::exchange(queued, true)) {
        timeline_.Add(v1::TimelineEntry::MILESTONE_QUEUED, SecondsSinceArrival());
      }
    }
    id = context_.engine->Submit(std::move(prepared.job), shared_from_this(), &estimate);
  }
  if (!id.ok()) return End(Refusal(id.status(), estimate));
  std::optional<EndReason> cancelled;
  bool deliver = false;
  {
    MutexLock lock(&mutex_);
    id_ = *id;
    cancelled = cancelled_;
    LogQueued(estimate);
    accepted_ = true;
    deliver = TakeDelivery();
  }
  TellWatchers();
  if (cancelled) context_.engine->Cancel(*id, *cancelled);
  if (deliver) Deliver();
}

void Generation::Cancel(EndReason reason) {
  std::optional<JobId> id;
  {
    MutexLock lock(&mutex_);
    cancelled_ = reason;
    id = id_;
  }
  if (id) context_.engine->Cancel(*id, reason);
}

void Generation::Watch(std::shared_ptr<GenerationWatcher> watcher) {
  MutexLock lock(&mutex_);
  watchers_.push_back({std::move(watcher)});
}

bool Generation::Join(const std::shared_ptr<GenerationWatcher>& watcher) {
  MutexLock lock(&mutex_);
  if (end_ ? !end_->ok() : cancelled_.has_value()) return false;
  watchers_.push_back({watcher});
  return true;
}

void Generation::Leave(const GenerationWatcher* watcher) {
  std::optional<JobId> id;
  {
    MutexLock lock(&mutex_);
    std::erase_if(watchers_, [&](const Watching& each) { return each.watcher.get() == watcher; });
    if (!watchers_.empty() || origin_.survives || end_) return;
    cancelled_ = EndReason::kDisconnected;  // under the lock that Join() asks it under
    id = id_;
  }
  if (id) context_.engine->Cancel(*id, EndReason::kDisconnected);
}

Generation::News Generation::Next(const GenerationWatcher* watcher, uint64_t sequence) {
  MutexLock lock(&mutex_);
  if (!origin_.kept) {
    uint64_t known = log_.last_sequence();
    for (Watching& each : watchers_) {
      if (each.watcher.get() == watcher) each.sequence = sequence;
      known = std::min(known, each.sequence);
    }
    log_.Forget(known);
  }
  News news{log_.After(sequence), std::nullopt};
  if (news.event == nullptr) news.end = end_;
  return news;
}

std::optional<grpc::Status> Generation::end() const {
  MutexLock lock(&mutex_);
  return end_;
}

Priority Generation::priority() const {
  MutexLock lock(&mutex_);
  return priority_;
}

v1::Job Generation::Describe() const {
  MutexLock lock(&mutex_);
  v1::Job job;
  job.set_request_id(origin_.request_id);
  job.set_client(origin_.caller.name);
  *job.mutable_params() = params_;
  *job.mutable_run() = run_;
  *job.mutable_create_time() = ToTimestamp(created_);
  if (started_ != kNever) *job.mutable_start_time() = ToTimestamp(started_);
  if (ended_ != kNever) *job.mutable_end_time() = ToTimestamp(ended_);
  if (progress_) {
    job.mutable_progress()->set_evaluations_done(progress_->done);
    job.mutable_progress()->set_evaluations_total(progress_->total);
  }
  job.set_images_done(images_done_);
  job.set_traceparent(origin_.traceparent);
  job.set_last_sequence(log_.last_sequence());
  job.set_state(State());
  if (end_ && !end_->ok()) job.mutable_error()->ParseFromString(end_->error_details());
  return job;
}

v1::GenerationParams Generation::Params() const {
  MutexLock lock(&mutex_);
  return params_;
}

v1::JobState Generation::State() const {
  if (!end_) return started_ == kNever ? v1::JOB_STATE_QUEUED : v1::JOB_STATE_RUNNING;
  if (end_->ok()) return v1::JOB_STATE_SUCCEEDED;
  return end_->error_code() == grpc::StatusCode::CANCELLED ? v1::JOB_STATE_CANCELLED
                                                           : v1::JOB_STATE_FAILED;
}

Generation::Summary Generation::Summarise() const {
  MutexLock lock(&mutex_);
  return {.request_id = origin_.request_id,
          .model = params_.model(),
          .sampler = sampler_,
          .count = params_.count(),
          .steps = params_.steps(),
          .queued_seconds = queued_seconds_};
}

std::pair<std::string, v1::JobState> Generation::ModelAndState() const {
  MutexLock lock(&mutex_);
  return {params_.model(), State()};
}

bool Generation::accepted() const {
  MutexLock lock(&mutex_);
  return accepted_;
}

uint64_t Generation::last_sequence() const {
  MutexLock lock(&mutex_);
  return log_.last_sequence();
}

size_t Generation::bytes() const {
  MutexLock lock(&mutex_);
  return log_.bytes();
}

void Generation::LogQueued(const Estimate& estimate) {
  EventLog::Event event;
  v1::QueuedEvent& queued = *event.mutable_queued();
  *queued.mutable_params() = params_;
  *queued.mutable_run() = run_;
  queued.set_images_ahead(estimate.images_ahead);
  queued.set_position(estimate.jobs_ahead);
  if (estimate.start_seconds) queued.set_estimated_start_seconds(*estimate.start_seconds);
  if (estimate.total_seconds) queued.set_estimated_total_seconds(*estimate.total_seconds);
  queued.set_traceparent(origin_.traceparent);
  log_.Push(std::move(event));
}

void Generation::OnQueued(const Estimate& estimate) {
  MutexLock lock(&mutex_);
  inbox_.queued = estimate;
  ScheduleDelivery();
}

void Generation::OnStarted() {
  const double queued = SecondsSinceArrival();
  context_.queue_wait->JobStarted(queued);
  context_.metrics->JobStarted(job_.spec.model, job_.spec.priority, queued);
  MutexLock lock(&mutex_);
  queue_place_ = {};
  inbox_.started = queued;
  if (include_timings_) timeline_.Add(v1::TimelineEntry::MILESTONE_ADMITTED, queued);
  last_progress_ = Clock::now();
  ScheduleDelivery();
}

void Generation::OnProgress(int done, int total) {
  MutexLock lock(&mutex_);
  inbox_.progress = progress_ = {done, total};
  if (include_timings_) timeline_.AddEvaluation(SecondsSinceArrival(), done, total);
  const auto now = Clock::now();
  if (now - last_progress_ < kProgressPeriod) return;  // it goes with what comes next
  last_progress_ = now;
  ScheduleDelivery();
}

void Generation::OnStage(int image, Stage stage, double seconds) {
  MutexLock lock(&mutex_);
  if (include_timings_) timeline_.AddStage(SecondsSinceArrival(), image, stage, seconds);
}

void Generation::OnPreview(const ImageResult& image, int evaluation) {
  MutexLock lock(&mutex_);
  if (cancelled_ || IsTooSoon(image.index)) return;
  inbox_.previews.insert_or_assign(image.index, Preview{image, evaluation});
  ScheduleDelivery();
}

bool Generation::IsTooSoon(int image) {
  const double rate = context_.max_previews_per_second;
  const auto now = Clock::now();
  const auto [last, first] = last_preview_.try_emplace(image, now);
  if (first || rate == 0) return false;
  if (std::chrono::duration<double>(now - last->second).count() < 1 / rate) return true;
  last->second = now;
  return false;
}

void Generation::OnImage(ImageResult image) {
  context_.metrics->ImageDone(job_.spec.model, origin_.caller.name);
  {
    MutexLock lock(&mutex_);
    if (cancelled_) {
      images_dropped_ = true;
      return;
    }
    inbox_.previews.erase(image.index);
    ++encoding_;
  }
  context_.workers->Post(
      job_.spec.priority, ClientKey(origin_.caller, origin_.peer),
      [self = shared_from_this(), image = std::move(image)] { self->Encode(image); });
}

void Generation::OnDone(const absl::Status& status, const JobTiming& timing) {
  if (timing.first_preview_seconds >= 0) {
    context_.metrics->FirstPreview(job_.spec.model, timing.first_preview_seconds);
  }
  MutexLock lock(&mutex_);
  done_ = status;
  ScheduleDelivery();
}

ParallelFor Generation::OnWorkers() const {
  return [this](int count, const std::function<void(int)>& task) {
    context_.workers->ForEach(job_.spec.priority, ClientKey(origin_.caller, origin_.peer), count,
                              task);
  };
}

void Generation::Encode(const ImageResult& image) {
  const auto start = Clock::now();
  auto rendered =
      Render(image, image_rendering_,
             image_rendering_.metadata ? Metadata(job_, image) : TextEntries{}, OnWorkers());
  context_.metrics->Encoded(job_.spec.model, FormatLabel(image_rendering_.format),
                            std::chrono::duration<double>(Clock::now() - start).count());
  bool deliver = false;
  {
    MutexLock lock(&mutex_);
    --encoding_;
    if (rendered.ok()) {
      inbox_.images.push_back(std::move(rendered).value());
      if (include_timings_) {
        timeline_.AddImage(v1::TimelineEntry::MILESTONE_DECODED, SecondsSinceArrival(),
                           image.index);
      }
    } else {
      encode_error_ = rendered.status();
    }
    deliver = TakeDelivery();
  }
  if (deliver) Deliver();  // here: another worker would have to be woken
}

bool Generation::TakeDelivery() {
  if (!accepted_ || delivering_ || (inbox_.empty() && !AllIn())) return false;
  delivering_ = true;
  return true;
}

void Generation::ScheduleDelivery() {
  if (!TakeDelivery()) return;
  context_.workers->Post(job_.spec.priority, ClientKey(origin_.caller, origin_.peer),
                         [self = shared_from_this()] { self->Deliver(); });
}

void Generation::Deliver() {
  absl::Status status;
  while (true) {
    Inbox inbox;
    bool ended = false, cancelled = false;
    {
      MutexLock lock(&mutex_);
      inbox = std::exchange(inbox_, {});
      ended = AllIn();
      cancelled = cancelled_.has_value();
      if (inbox.empty() && !ended) {
        delivering_ = false;
        return;
      }
    }
    std::vector<v1::PreviewEvent> previews;
    for (auto& [index, preview] : inbox.previews) {
      if (cancelled) break;
      auto image = Render(preview.image, preview_rendering_, {}, OnWorkers());
      // A preview that cannot be encoded is not worth failing for; the image itself will say so.
      if (!image.ok()) continue;
      v1::PreviewEvent& event = previews.emplace_back();
      event.set_evaluation(preview.evaluation);
      event.set_evaluations(job_.evaluations);
      *event.mutable_image() = std::move(image).value();
    }
    {
      MutexLock lock(&mutex_);
      Write(std::move(inbox), std::move(previews));
      if (ended) {
        // delivering_ stays true: nothing follows.
        status = EndStatus();
        if (status.ok()) Complete();
        break;
      }
    }
    TellWatchers();
  }
  End(status.ok() ? grpc::Status::OK : ToStatus(status));
}

void Generation::Write(Inbox inbox, std::vector<v1::PreviewEvent> previews) {
  if (inbox.queued && !inbox.started) LogQueued(*inbox.queued);
  if (inbox.started) {
    queued_seconds_ = *inbox.started;
    started_ = std::chrono::system_clock::now();
    EventLog::Event event;
    event.mutable_started()->set_queued_seconds(queued_seconds_);
    log_.Push(std::move(event));
  }
  for (v1::PreviewEvent& preview : previews) {
    EventLog::Event event;
    *event.mutable_preview() = std::move(preview);
    log_.Push(std::move(event));
  }
  if (inbox.progress) {
    EventLog::Event event;
    event.mutable_progress()->set_evaluations_done(inbox.progress->done);
    event.mutable_progress()->set_evaluations_total(inbox.progress->total);
    log_.Push(std::move(event));
  }
  for (v1::Image& image : inbox.images) {
    EventLog::Event event;
    *event.mutable_image()->mutable_image() = std::move(image);
    log_.Push(std::move(event));
    ++images_done_;
  }
}

void Generation::Complete() {
  EventLog::Event event;
  v1::CompletedEvent& completed = *event.mutable_completed();
  *completed.mutable_params() = params_;
  *completed.mutable_run() = run_;
  completed.mutable_timing()->set_queued_seconds(std::max(0.0, queued_seconds_));
  completed.mutable_timing()->set_total_seconds(SecondsSinceArrival());
  if (include_timings_) *completed.mutable_timeline() = timeline_.ToProto();
  log_.Push(std::move(event));
}

absl::Status Generation::EndStatus() const {
  absl::Status status = done_->ok() ? encode_error_ : *done_;
  // The engine may have finished before it heard of the cancel.
  if (status.ok() && images_dropped_) status = Cancelled("the request was cancelled");
  if (status.code() == absl::StatusCode::kCancelled && !origin_.survives && origin_.deadline &&
      Clock::now() >= *origin_.deadline) {
    // gRPC tells a passed deadline as a cancellation, and may do so before the engine notices.
    status = DeadlineExceeded(
        "the call's deadline passed before all images were done; allow more "
        "time or ask for fewer steps or images");
  }
  return status;
}

void Generation::End(const grpc::Status& status) {
  const double seconds = SecondsSinceArrival();
  const auto nanoseconds = [](double time) {
    return std::chrono::nanoseconds(static_cast<int64_t>(time * 1e9));
  };
  std::string model;
  RequestTotals::Request request{.ok = status.ok(), .total = nanoseconds(seconds)};
  {
    MutexLock lock(&mutex_);
    end_ = status;
    ended_ = std::chrono::system_clock::now();
    job_ = {};
    queue_place_ = {};
    model = model_;
    request.queued = nanoseconds(std::max(0.0, queued_seconds_));
    request.images = images_done_;
  }
  context_.metrics->RequestEnded(
      model, absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code())), seconds);
  context_.metrics->totals().Add(model, request);
  // Before the watchers hear of it: a client that was told the end finds the job as it ended.
  jobs_->Ended(shared_from_this());
  TellWatchers();
}

void Generation::TellWatchers() {
  std::vector<std::shared_ptr<GenerationWatcher>> watchers;
  {
    MutexLock lock(&mutex_);
    for (const Watching& each : watchers_) watchers.push_back(each.watcher);
  }
  for (const auto& watcher : watchers) watcher->OnNews();
}

}  // namespace denoised
