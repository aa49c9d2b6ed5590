#include "engine/batching/step_batcher.h"

#include <algorithm>

namespace denoised {
namespace {

// Evaluations the device may have queued while the host reports an earlier one: enough that it
// never waits for the host, few enough that a cancellation takes effect at the next.
constexpr size_t kRunAhead = 1;

// Evaluations that have not been reported; every slot may have a download under way for each.
constexpr int kUnderWay = static_cast<int>(kRunAhead) + 1;

// Images that lose their slot before an evaluation, at most: their copies take time from it.
constexpr int kParksPerEvaluation = 4;

// Sizes other than a model's first, kept at most for the next request of that size.
constexpr int kExtraSizes = 2;

double Seconds(StepBatcher::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

/// An image that lost its slot before it was done.
struct StepBatcher::ParkedImage {
  int image = 0;
  int evaluation = 0;  // next in the plan
  std::unique_ptr<Evaluator::Parked> state;
};

struct StepBatcher::Job {
  JobId id = 0;
  EffectiveJob effective;
  std::shared_ptr<JobListener> listener;
  std::shared_ptr<Admission::Ticket> ticket;
  Lane* lane = nullptr;
  std::vector<DeviceEvaluation> plan;  // made when the first image has a slot
  Clock::time_point submitted;
  JobTiming timing;
  int next_image = 0;  // the first that has not had a slot
  std::deque<std::shared_ptr<ParkedImage>> parked;
  int evaluations_done = 0;  // over all images, as reported
  int64_t rows_launched = 0;
  int images_done = 0;
  bool started = false, over = false;

  int count() const { return effective.spec.count; }
  int waiting() const { return count() - next_image + static_cast<int>(parked.size()); }
  bool guided() const { return *effective.spec.guidance_scale > 1; }
  int rows() const { return guided() ? 2 : 1; }
  std::pair<double, JobId> key() const { return Admission::Key(*ticket); }
};

struct StepBatcher::Lane {
  struct Slot {
    std::shared_ptr<Job> job;  // null: free
    int image = 0;
    int evaluation = 0;  // next in the plan

    int evaluations_left() const { return job->effective.evaluations - evaluation; }
  };

  BatchedModel model;
  bool first_size = false;  // never evicted
  std::unique_ptr<Evaluator> evaluator;
  Admission::Lane* share = nullptr;
  std::vector<Slot> slots;
  int jobs = 0;              // unfinished
  int active = 0, rows = 0;  // images in slots, and their rows
  std::map<std::pair<double, JobId>, std::shared_ptr<Job>> waiting;  // jobs with images, in order

  bool ready() const { return active > 0 || !waiting.empty(); }
  bool HasRoom(const Job& job) const {
    return active < static_cast<int>(slots.size()) && rows + job.rows() <= model.max_rows;
  }
  void Take(int slot, const std::shared_ptr<Job>& job, int image, int evaluation) {
    slots[slot] = {.job = job, .image = image, .evaluation = evaluation};
    ++active;
    rows += job->rows();
  }
  void Free(int slot) {
    --active;
    rows -= slots[slot].job->rows();
    slots[slot] = Slot();
  }
  void Forget(const Job& job) {
    for (int slot = 0; slot < static_cast<int>(slots.size()); ++slot)
      if (slots[slot].job.get() == &job) Free(slot);
    waiting.erase(job.key());
    --jobs;
  }
};

/// An evaluation on the device, and what is to be told when it is done.
struct StepBatcher::Evaluated {
  struct Image {
    std::shared_ptr<Job> job;
    int image = 0;
    int evaluation = 0;  // 1-based
    float preview_scale = 1;
    std::unique_ptr<Download> preview, result;
  };

  std::string model;
  Admission::Lane* share = nullptr;
  int rows = 0, bucket = 0;
  std::unique_ptr<Marker> begin, end;
  std::vector<Image> images;
  std::vector<std::shared_ptr<ParkedImage>> parked;  // before it
};

StepBatcher::StepBatcher(Backend& backend, Admission& admission, EngineObserver* observer,
                         const Options& options)
    : backend_(backend), admission_(admission), observer_(observer), options_(options) {}

StepBatcher::~StepBatcher() = default;

absl::Status StepBatcher::AddModel(const BatchedModel& model, int height, int width) {
  auto lane = MakeLane(model, height, width);
  if (!lane.ok()) return lane.status();
  (*lane)->first_size = true;
  lanes_.push_front(*std::move(lane));
  models_[model.name] = model;
  return absl::OkStatus();
}

absl::StatusOr<bool> StepBatcher::WarmUp(const std::string& model) {
  const auto lane = std::find_if(lanes_.begin(), lanes_.end(), [&](const auto& each) {
    return each->model.name == model && each->first_size;
  });
  DENOISED_CHECK(lane != lanes_.end(), "model {}", model);
  return WarmUp(**lane);
}

absl::StatusOr<bool> StepBatcher::WarmUp(Lane& lane) {
  DENOISED_ASSIGN_OR_RETURN(const Evaluator::Warmed warmed, lane.evaluator->WarmUp());
  admission_.Measured(*lane.share, warmed.bucket, warmed.seconds);
  return warmed.more;
}

bool StepBatcher::HasJobs(const std::string& model) const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [&](const auto& lane) { return lane->model.name == model && lane->jobs > 0; });
}

absl::Status StepBatcher::RemoveModel(const std::string& model) {
  DENOISED_CHECK(!HasJobs(model), "model {} has jobs", model);
  // Its last evaluation may be on the device still, though nobody waits for it.
  const absl::Status status = backend_.Synchronize();
  std::erase_if(evaluated_, [&](const auto& evaluated) { return evaluated.model == model; });
  std::erase_if(lanes_, [&](const auto& lane) { return lane->model.name == model; });
  models_.erase(model);
  admission_.Close(model);
  return status;
}

absl::StatusOr<StepBatcher::Lane*> StepBatcher::LaneFor(const std::string& model, int height,
                                                        int width) {
  int extra = 0;
  for (const auto& lane : lanes_) {
    if (lane->model.name != model) continue;
    const Evaluator::Options& options = lane->evaluator->options();
    if (options.height == height && options.width == width) return lane.get();
    if (!lane->first_size) ++extra;
  }
  if (extra >= kExtraSizes) EvictIdleLane(&model);
  auto lane = MakeLane(models_.at(model), height, width);
  // Sizes that nobody draws now make room, of any model.
  while (lane.status().code() == absl::StatusCode::kResourceExhausted && EvictIdleLane(nullptr))
    lane = MakeLane(models_.at(model), height, width);
  if (!lane.ok()) return lane.status();
  // Captured now: no evaluation of a job takes memory.
  bool more = true;
  while (more) {
    DENOISED_ASSIGN_OR_RETURN(more, WarmUp(**lane));
  }
  lanes_.push_front(*std::move(lane));
  return lanes_.front().get();
}

absl::StatusOr<std::unique_ptr<StepBatcher::Lane>> StepBatcher::MakeLane(const BatchedModel& model,
                                                                         int height, int width) {
  auto lane = std::make_unique<Lane>();
  lane->model = model;
  DENOISED_ASSIGN_OR_RETURN(lane->evaluator,
                            Evaluator::Create(backend_, model.denoiser,
                                              {.height = height,
                                               .width = width,
                                               .max_rows = model.max_rows,
                                               .slots = model.slots,
                                               .max_evaluations = model.max_evaluations,
                                               .downloads = kUnderWay * model.slots,
                                               .parks = kUnderWay * kParksPerEvaluation}));
  lane->slots.resize(model.slots);
  lane->share = admission_.Open(model.name, height, width, model.max_rows);
  return lane;
}

/// Gives up the longest unused lane of a size that is not its model's first; of any model when
/// `model` is null. False when there is none.
bool StepBatcher::EvictIdleLane(const std::string* model) {
  for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
    if ((*lane)->first_size || (*lane)->jobs > 0 || (model && (*lane)->model.name != *model))
      continue;
    if (!backend_.Synchronize().ok()) return false;  // the next Step reports it
    lanes_.erase(lane);
    return true;
  }
  return false;
}

size_t StepBatcher::ActivationBytes(const std::string& model) const {
  size_t bytes = 0;
  for (const auto& lane : lanes_)
    if (lane->model.name == model) bytes += lane->evaluator->activation_bytes();
  return bytes;
}

size_t StepBatcher::SlotBytes(const std::string& model) const {
  size_t bytes = 0;
  for (const auto& lane : lanes_)
    if (lane->model.name == model) bytes += lane->evaluator->slot_bytes();
  return bytes;
}

void StepBatcher::Submit(JobId id, EffectiveJob effective, std::shared_ptr<JobListener> listener,
                         Clock::time_point submitted, std::shared_ptr<Admission::Ticket> ticket) {
  auto job = std::make_shared<Job>();
  job->id = id;
  job->effective = std::move(effective);
  job->listener = std::move(listener);
  job->ticket = std::move(ticket);
  job->submitted = submitted;
  jobs_[id] = job;
  const JobSpec& spec = job->effective.spec;
  if (spec.deadline) deadlines_.emplace(*spec.deadline, id);
  if (!models_.count(spec.model)) {
    Finish(*job, NotFound("model '{}' is not on this device", spec.model), EndReason::kFailed);
    return;
  }
  const auto lane = LaneFor(spec.model, spec.height, spec.width);
  if (!lane.ok()) {
    Finish(*job, lane.status(), EndReason::kFailed);
    return;
  }
  job->lane = *lane;
  ++job->lane->jobs;
  job->lane->waiting.emplace(job->key(), job);
}

void StepBatcher::End(JobId id, const absl::Status& status, EndReason reason) {
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) return;
  const std::shared_ptr<Job> job = found->second;
  Finish(*job, status, reason);
}

void StepBatcher::EndAll(const absl::Status& status, EndReason reason) {
  while (!jobs_.empty()) End(jobs_.begin()->first, status, reason);
}

void StepBatcher::Finish(Job& job, const absl::Status& status, std::optional<EndReason> reason) {
  job.over = true;
  if (job.lane) job.lane->Forget(job);
  job.parked.clear();
  if (job.effective.spec.deadline) deadlines_.erase({*job.effective.spec.deadline, job.id});
  admission_.Left(*job.ticket, job.rows_launched, reason);
  job.timing.total_seconds = Seconds(options_.now() - job.submitted);
  const std::shared_ptr<JobListener> listener = std::move(job.listener);
  listener->OnDone(status, job.timing);
  jobs_.erase(job.id);
}

bool StepBatcher::busy() const { return !jobs_.empty() || !evaluated_.empty(); }

absl::Status StepBatcher::Step() {
  EndExpired();
  auto next = lanes_.end();
  double first_turn = 0;
  for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
    if (!(*lane)->ready()) continue;
    const double turn = admission_.Turn(*(*lane)->share);
    if (next != lanes_.end() && turn >= first_turn) continue;
    next = lane;
    first_turn = turn;
  }
  const bool launched = next != lanes_.end();
  if (launched) {
    DENOISED_RETURN_IF_ERROR(Admit(**next));
    DENOISED_RETURN_IF_ERROR(Launch(**next));
    lanes_.splice(lanes_.end(), lanes_, next);
  }
  // The CPU has computed when Launch returns: nothing to run ahead of.
  const size_t ahead = launched && backend_.device() != Device::kCpu ? kRunAhead : 0;
  while (evaluated_.size() > ahead) DENOISED_RETURN_IF_ERROR(Report());
  return absl::OkStatus();
}

void StepBatcher::EndExpired() {
  const Clock::time_point now = options_.now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const std::shared_ptr<Job> job = jobs_.at(deadlines_.begin()->second);
    Finish(*job,
           DeadlineExceeded("the deadline passed after {} of {} evaluations; allow more time, or "
                            "ask for fewer steps or images",
                            job->evaluations_done, job->count() * job->effective.evaluations),
           EndReason::kDeadline);
  }
}

absl::Status StepBatcher::Admit(Lane& lane) {
  const bool whole_batches = options_.batching == Batching::kRequest;
  if (whole_batches && lane.active > 0) return absl::OkStatus();
  size_t may_park = whole_batches ? 0 : kParksPerEvaluation;
  int slot = 0;
  while (!lane.waiting.empty()) {
    const std::shared_ptr<Job> job = lane.waiting.begin()->second;
    if (!lane.HasRoom(*job)) {
      const int before = lane.active;
      may_park = std::min(may_park, admission_.RoomToPark(lane.evaluator->parked_bytes()));
      if (!MakeRoom(lane, *job, may_park)) break;
      may_park -= static_cast<size_t>(before - lane.active);
      slot = 0;
    }
    while (lane.slots[slot].job) ++slot;
    DENOISED_RETURN_IF_ERROR(Begin(lane, slot, job));
    if (job->waiting() == 0) lane.waiting.erase(lane.waiting.begin());
  }
  return absl::OkStatus();
}

/// Parks at most `most` images that come after `job` in the order, the last first, until it has
/// room; none when that would not do.
bool StepBatcher::MakeRoom(Lane& lane, const Job& job, size_t most) {
  std::vector<int> victims;
  for (int slot = 0; slot < static_cast<int>(lane.slots.size()); ++slot) {
    const Lane::Slot& taken = lane.slots[slot];
    if (taken.job && taken.job->key() > job.key() &&
        taken.evaluations_left() > options_.keep_evaluations)
      victims.push_back(slot);
  }
  // Of one job, those that have the longest way to go.
  const auto later = [&](int a, int b) {
    const Lane::Slot &first = lane.slots[a], &second = lane.slots[b];
    return std::pair(first.job->key(), first.evaluations_left()) >
           std::pair(second.job->key(), second.evaluations_left());
  };
  most = std::min(most, victims.size());
  std::partial_sort(victims.begin(), victims.begin() + static_cast<std::ptrdiff_t>(most),
                    victims.end(), later);
  int rows = lane.rows;
  size_t parks = 0;
  const auto enough = [&] {
    return lane.active - static_cast<int>(parks) < static_cast<int>(lane.slots.size()) &&
           rows + job.rows() <= lane.model.max_rows;
  };
  while (!enough() && parks < most) rows -= lane.slots[victims[parks++]].job->rows();
  if (!enough()) return false;
  for (size_t i = 0; i < parks; ++i) Park(lane, victims[i]);
  return true;
}

void StepBatcher::Park(Lane& lane, int slot) {
  const Lane::Slot taken = lane.slots[slot];
  auto parked = std::make_shared<ParkedImage>();
  parked->image = taken.image;
  parked->evaluation = taken.evaluation;
  parked->state = lane.evaluator->Park(slot);
  admission_.Parked(*taken.job->ticket, taken.evaluations_left(), lane.evaluator->parked_bytes());
  lane.Free(slot);
  if (taken.job->waiting() == 0) lane.waiting.emplace(taken.job->key(), taken.job);
  taken.job->parked.push_back(parked);
  parked_.push_back(std::move(parked));
}

absl::Status StepBatcher::Begin(Lane& lane, int slot, const std::shared_ptr<Job>& job) {
  std::shared_ptr<ParkedImage> parked;
  if (!job->parked.empty()) {
    parked = job->parked.front();
    job->parked.pop_front();
  }
  const JobSpec& spec = job->effective.spec;
  const StepPlan& plan = *job->effective.plan;
  const int image = parked ? parked->image : job->next_image++;
  lane.Take(slot, job, image, parked ? parked->evaluation : 0);
  admission_.Began(*job->ticket, lane.slots[slot].evaluations_left(),
                   parked ? lane.evaluator->parked_bytes() : 0);

  if (job->plan.empty()) job->plan = ToDevice(plan);
  Evaluator::Start start;
  start.plan = &job->plan;
  start.seed = spec.SeedOf(image);
  start.guidance_scale = static_cast<float>(*spec.guidance_scale);
  if (!spec.class_values.empty()) {
    const size_t size = spec.class_values.size() / job->count();
    start.embedding = std::span(spec.class_values).subspan(image * size, size);
  }
  if (spec.init_image) start.source = spec.init_image.as<float>();
  if (spec.initial_noise) start.noise = spec.initial_noise.Slice(image, 1).as<float>();
  start.source_scale = static_cast<float>(plan.initial_source_scale);
  start.noise_scale = static_cast<float>(plan.initial_noise_scale);
  start.churn_scale = static_cast<float>(plan.initial_churn_scale);
  if (parked) return lane.evaluator->Resume(slot, start, parked->evaluation, parked->state.get());
  lane.evaluator->Begin(slot, start);

  if (!job->started) {
    job->started = true;
    job->timing.queued_seconds = Seconds(options_.now() - job->submitted);
    job->listener->OnStarted();
  }
  return absl::OkStatus();
}

absl::Status StepBatcher::Launch(Lane& lane) {
  std::vector<EvaluationRow> rows;
  for (int s = 0; s < static_cast<int>(lane.slots.size()); ++s) {
    const Lane::Slot& slot = lane.slots[s];
    if (!slot.job) continue;
    const JobSpec& spec = slot.job->effective.spec;
    const int label = spec.class_labels.empty() ? 0 : spec.class_labels[slot.image];
    const int row = static_cast<int>(rows.size());
    const bool guided = slot.job->guided();
    rows.push_back(
        {.slot = s, .label = label, .unconditional_row = guided ? row + 1 : -1, .advances = 1});
    if (guided)
      rows.push_back(
          {.slot = s, .label = lane.model.null_label, .unconditional_row = -1, .advances = 0});
  }

  Evaluated evaluated{
      .model = lane.model.name, .share = lane.share, .rows = static_cast<int>(rows.size())};
  evaluated.parked.swap(parked_);
  evaluated.begin = backend_.Mark();
  DENOISED_ASSIGN_OR_RETURN(evaluated.bucket, lane.evaluator->Evaluate(rows));
  evaluated.end = backend_.Mark();
  admission_.Launched(*lane.share, evaluated.rows, evaluated.bucket);

  for (int s = 0; s < static_cast<int>(lane.slots.size()); ++s) {
    Lane::Slot& slot = lane.slots[s];
    if (!slot.job) continue;
    const JobSpec& spec = slot.job->effective.spec;
    const std::vector<DeviceEvaluation>& plan = slot.job->plan;
    slot.job->rows_launched += slot.job->rows();
    const int done = ++slot.evaluation;
    const bool last = done == static_cast<int>(plan.size());
    Evaluated::Image image{.job = slot.job, .image = slot.image, .evaluation = done};
    if (last) {
      image.result = lane.evaluator->DownloadState(s);
    } else if (spec.previews && done % spec.preview_every == 0) {
      if (spec.preview_kind == PreviewKind::kPredictedX0) {
        image.preview = lane.evaluator->DownloadX0(s);
      } else {
        image.preview = lane.evaluator->DownloadState(s);
        image.preview_scale = plan[done].input_scale;
      }
    }
    evaluated.images.push_back(std::move(image));
    if (!last) continue;
    admission_.Drawn(*slot.job->ticket);
    lane.Free(s);
  }
  evaluated_.push_back(std::move(evaluated));
  return absl::OkStatus();
}

absl::Status StepBatcher::Report() {
  Evaluated evaluated = std::move(evaluated_.front());
  evaluated_.pop_front();
  DENOISED_RETURN_IF_ERROR(evaluated.end->Wait());
  const double seconds = evaluated.end->SecondsSince(*evaluated.begin);
  admission_.Measured(*evaluated.share, evaluated.bucket, seconds);
  if (observer_)
    observer_->OnEvaluation(evaluated.model, evaluated.rows, evaluated.bucket, seconds);
  for (const auto& parked : evaluated.parked) DENOISED_RETURN_IF_ERROR(parked->state->Arrive());

  std::vector<Job*> progressed;
  for (Evaluated::Image& image : evaluated.images) {
    Job& job = *image.job;
    if (job.over) continue;
    ++job.evaluations_done;
    if (std::find(progressed.begin(), progressed.end(), &job) == progressed.end())
      progressed.push_back(&job);
  }
  for (Job* job : progressed)
    job->listener->OnProgress(job->evaluations_done, job->count() * job->effective.evaluations);

  for (Evaluated::Image& image : evaluated.images) {
    Job& job = *image.job;
    Download* download = image.result ? image.result.get() : image.preview.get();
    if (job.over || !download) continue;
    const JobSpec& spec = job.effective.spec;
    ImageResult result{.index = image.image, .seed = spec.SeedOf(image.image)};
    if (!spec.class_labels.empty()) result.label = spec.class_labels[image.image];
    DENOISED_ASSIGN_OR_RETURN(result.pixels, download->Wait());
    if (image.preview) {
      for (float& value : result.pixels.span<float>()) value *= image.preview_scale;
      if (job.timing.first_preview_seconds < 0)
        job.timing.first_preview_seconds = Seconds(options_.now() - job.submitted);
      job.listener->OnPreview(result, image.evaluation);
      continue;
    }
    job.listener->OnImage(std::move(result));
    if (++job.images_done == job.count()) Finish(job, absl::OkStatus(), std::nullopt);
  }
  return absl::OkStatus();
}

}  // namespace denoised
