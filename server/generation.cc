#include "server/generation.h"

#include <fmt/format.h>

#include <random>
#include <set>
#include <utility>

#include "server/catalog.h"
#include "server/metrics.h"
#include "server/status_details.h"
#include "server/worker_pool.h"

namespace denoised {
namespace {

/// 64 random bits: unique enough to find a request in the logs.
std::string MakeRequestId() {
  thread_local std::mt19937_64 random{(uint64_t{std::random_device{}()} << 32) ^
                                      std::random_device{}()};
  return fmt::format("{:016x}", random());
}

const char* FormatLabel(v1::ImageFormat format) {
  switch (format) {
    case v1::IMAGE_FORMAT_PNG:
      return "png";
    case v1::IMAGE_FORMAT_JPEG:
      return "jpeg";
    case v1::IMAGE_FORMAT_WEBP:
      return "webp";
    default:
      return "raw";
  }
}

/// The engine's complaints after the server's own, each field once.
void Merge(const std::vector<FieldViolation>& engine, std::vector<FieldViolation>* all) {
  std::set<std::string> fields;
  for (const FieldViolation& violation : *all) fields.insert(violation.field);
  for (const FieldViolation& violation : engine) {
    std::string field = ProtoField(violation.field);
    if (fields.insert(field).second) all->push_back({std::move(field), violation.description});
  }
}

grpc::Status Draining(const std::string& request_id) {
  return ToGrpcStatus(Unavailable("the server is shutting down; try another replica or try again"),
                      reason::kDraining, request_id, std::chrono::seconds(1));
}

}  // namespace

Generation::Generation(Serving* serving, const v1::GenerationParams& params,
                       const v1::PreviewOptions* preview, bool together,
                       std::optional<std::chrono::steady_clock::time_point> deadline,
                       CallRecord* record, GenerationSink* sink)
    : serving_(serving),
      params_(params),
      preview_(preview),
      together_(together),
      deadline_(deadline),
      record_(record),
      sink_(sink) {}

std::optional<EffectiveJob> Generation::Prepare(grpc::Status* refusal) {
  std::string& request_id = record_->request_id;
  request_id = IsRequestId(params_.request_id()) ? params_.request_id() : MakeRequestId();
  if (serving_->draining) {
    *refusal = Draining(request_id);
    return std::nullopt;
  }
  const auto model =
      serving_->catalog->Select(params_.model(), "params.model", request_id, refusal);
  if (model == nullptr) return std::nullopt;
  record_->model = model->name;
  *refusal = CheckReady(*model, request_id);
  if (!refusal->ok()) return std::nullopt;

  auto lease = serving_->client_load->Admit(record_->caller(), record_->peer());
  if (!lease.ok()) {
    *refusal =
        ToGrpcStatus(lease.status(), reason::kClientLimit, request_id, serving_->RetryDelay());
    return std::nullopt;
  }
  lease_ = *std::move(lease);

  std::vector<FieldViolation> violations;
  Translation translation =
      Translate(params_, preview_, together_, request_id, *model,
                Within(record_->caller().limits, serving_->limits), &violations);
  translation.spec.deadline = deadline_;
  image_rendering_ = translation.image;
  preview_rendering_ = translation.preview;
  std::vector<FieldViolation> engine_violations;
  auto job = serving_->engine->Resolve(translation.spec, &engine_violations);
  Merge(engine_violations, &violations);
  if (!violations.empty()) {
    *refusal = InvalidFields(violations, request_id);
    return std::nullopt;
  }
  if (!job.ok()) {
    const bool gone = job.status().code() == absl::StatusCode::kNotFound;
    const bool loading = job.status().code() == absl::StatusCode::kFailedPrecondition;
    *refusal = ToGrpcStatus(job.status(),
                            gone      ? reason::kModelNotFound
                            : loading ? reason::kModelLoading
                                      : reason::kServerError,
                            request_id);
    return std::nullopt;
  }
  return std::move(job).value();
}

void Generation::Start() {
  grpc::Status refusal;
  std::optional<EffectiveJob> job = Prepare(&refusal);
  if (!job) return End(refusal);
  job_ = *job;
  // What is only needed to start need not be kept until the end.
  job_.spec.initial_noise = Tensor();
  job_.spec.init_image = Tensor();
  record_->count = job_.spec.count;
  record_->steps = job_.steps;
  if (job_.spec.sampler.sampler) record_->sampler = Label(*job_.spec.sampler.sampler);

  const int ahead = serving_->engine->QueuedImages(job_.spec.model);
  const auto id = serving_->engine->Submit(*std::move(job), shared_from_this());
  if (!id.ok()) {
    switch (id.status().code()) {
      case absl::StatusCode::kResourceExhausted:
        return End(ToGrpcStatus(id.status(), reason::kQueueFull, record_->request_id,
                                serving_->RetryDelay()));
      case absl::StatusCode::kUnavailable:
        return End(Draining(record_->request_id));
      default:
        return End(JobStatus(id.status(), record_->request_id));
    }
  }
  sink_->OnQueued(ToProto(job_), ahead);

  // Once delivery is allowed, the call may end and take the sink and the record with it.
  bool cancelled;
  {
    std::lock_guard lock(mutex_);
    id_ = *id;
    cancelled = cancelled_;
    accepted_ = true;
    ScheduleDelivery();
  }
  if (cancelled) serving_->engine->Cancel(*id);
}

void Generation::Cancel() {
  std::optional<JobId> id;
  {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    id = id_;
  }
  if (id) serving_->engine->Cancel(*id);
}

void Generation::OnStarted() {
  const double queued = record_->SecondsSinceArrival();
  serving_->recent_queue_seconds = queued;
  serving_->metrics->JobQueued(job_.spec.model, queued);
  lease_.Started();
  std::lock_guard lock(mutex_);
  inbox_.started = queued;
  ScheduleDelivery();
}

void Generation::OnProgress(int done, int total) {
  std::lock_guard lock(mutex_);
  inbox_.progress = {done, total};
  ScheduleDelivery();
}

void Generation::OnPreview(const ImageResult& image, int evaluation) {
  std::lock_guard lock(mutex_);
  if (cancelled_ || IsTooSoon(image.index)) return;
  inbox_.previews.insert_or_assign(image.index, Preview{image, evaluation});
  ScheduleDelivery();
}

bool Generation::IsTooSoon(int image) {
  const double rate = serving_->limits.max_previews_per_second;
  const auto now = std::chrono::steady_clock::now();
  const auto [last, first] = last_preview_.try_emplace(image, now);
  if (first || rate == 0) return false;
  if (std::chrono::duration<double>(now - last->second).count() < 1 / rate) return true;
  last->second = now;
  return false;
}

void Generation::OnImage(ImageResult image) {
  serving_->metrics->ImageDone(job_.spec.model);
  {
    std::lock_guard lock(mutex_);
    if (cancelled_) {
      images_dropped_ = true;
      return;
    }
    inbox_.previews.erase(image.index);
    ++encoding_;
  }
  serving_->workers->Post(
      [self = shared_from_this(), image = std::move(image)] { self->Encode(image); });
}

void Generation::OnDone(const absl::Status& status, const JobTiming& timing) {
  if (timing.first_preview_seconds >= 0) {
    serving_->metrics->FirstPreview(job_.spec.model, timing.first_preview_seconds);
  }
  std::lock_guard lock(mutex_);
  done_ = status;
  ScheduleDelivery();
}

void Generation::Encode(const ImageResult& image) {
  const auto start = std::chrono::steady_clock::now();
  auto rendered = Render(image, image_rendering_,
                         image_rendering_.metadata ? Metadata(job_, image) : TextEntries{});
  serving_->metrics->Encoded(
      FormatLabel(image_rendering_.format),
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  std::lock_guard lock(mutex_);
  --encoding_;
  if (rendered.ok()) {
    inbox_.images.push_back(std::move(rendered).value());
  } else {
    encode_error_ = rendered.status();
  }
  ScheduleDelivery();
}

void Generation::ScheduleDelivery() {
  if (!accepted_ || delivering_) return;
  delivering_ = true;
  serving_->workers->Post([self = shared_from_this()] { self->Deliver(); });
}

void Generation::Deliver() {
  std::unique_lock lock(mutex_);
  while (true) {
    Inbox inbox = std::exchange(inbox_, {});
    const bool ended = done_ && encoding_ == 0;
    if (inbox.empty() && !ended) {
      delivering_ = false;
      return;
    }
    const bool cancelled = cancelled_;
    lock.unlock();
    if (inbox.started) {
      record_->queued_seconds = *inbox.started;
      sink_->OnStarted(*inbox.started);
    }
    for (auto& [index, preview] : inbox.previews) {
      if (cancelled) break;
      auto image = Render(preview.image, preview_rendering_, {});
      // A preview that cannot be encoded is not worth failing for; the image itself will say so.
      if (image.ok()) {
        sink_->OnPreview(preview.evaluation, job_.evaluations, std::move(image).value());
      }
    }
    if (inbox.progress) sink_->OnProgress(inbox.progress->done, inbox.progress->total);
    for (v1::Image& image : inbox.images) sink_->OnImage(std::move(image));
    lock.lock();
    if (ended) break;
  }
  // delivering_ stays true: nothing follows.
  absl::Status status = done_->ok() ? encode_error_ : *done_;
  // The engine may have finished before it heard of the cancel.
  if (status.ok() && images_dropped_) status = Cancelled("the request was cancelled");
  lock.unlock();
  if (status.code() == absl::StatusCode::kCancelled && deadline_ &&
      std::chrono::steady_clock::now() >= *deadline_) {
    // gRPC tells a passed deadline as a cancellation, and may do so before the engine notices.
    status = DeadlineExceeded(
        "the call's deadline passed before all images were done; allow more "
        "time or ask for fewer steps or images");
  }
  End(status.ok() ? grpc::Status::OK : JobStatus(status, record_->request_id));
}

void Generation::End(const grpc::Status& status) {
  v1::Timing timing;
  timing.set_queued_seconds(std::max(0.0, record_->queued_seconds));
  timing.set_total_seconds(record_->SecondsSinceArrival());
  sink_->OnEnd(status, timing);
}

}  // namespace denoised
