#include "engine/batching/step_batcher.h"

#include <algorithm>

namespace denoised {
namespace {

// Evaluations the device may have queued while the host reports an earlier one: enough that it
// never waits for the host, few enough that a cancellation takes effect at the next.
constexpr size_t kRunAhead = 1;

// A slot may have one under way for every evaluation that has not been reported.
constexpr int kDownloadsPerSlot = static_cast<int>(kRunAhead) + 1;

// Sizes other than a model's first, kept at most for the next request of that size.
constexpr int kExtraSizes = 2;

double Seconds(StepBatcher::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

struct StepBatcher::Job {
  JobId id = 0;
  EffectiveJob effective;
  std::shared_ptr<JobListener> listener;
  std::vector<DeviceEvaluation> plan;
  Clock::time_point submitted;
  JobTiming timing;
  int next_image = 0;        // the first that has not had a slot
  int evaluations_done = 0;  // over all images, as reported
  int images_done = 0;
  bool started = false, over = false;

  int count() const { return effective.spec.count; }
  int waiting() const { return over ? 0 : count() - next_image; }
  bool guided() const { return *effective.spec.guidance_scale > 1; }
  int rows() const { return guided() ? 2 : 1; }
};

struct StepBatcher::Lane {
  struct Slot {
    std::shared_ptr<Job> job;  // null: free
    int image = 0;
    int evaluation = 0;  // next in the plan
  };

  BatchedModel model;
  bool first_size = false;  // never evicted
  std::unique_ptr<Evaluator> evaluator;
  std::vector<Slot> slots;
  std::deque<std::shared_ptr<Job>> waiting;  // jobs with images that had no slot, in turn

  int active() const {
    return static_cast<int>(std::count_if(slots.begin(), slots.end(),
                                          [](const Slot& slot) { return slot.job != nullptr; }));
  }
  int rows() const {
    int rows = 0;
    for (const Slot& slot : slots) rows += slot.job ? slot.job->rows() : 0;
    return rows;
  }
  void Forget(const Job& job) {
    for (Slot& slot : slots)
      if (slot.job.get() == &job) slot = Slot();
    std::erase_if(waiting, [&](const auto& waiting_job) { return waiting_job.get() == &job; });
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
  int rows = 0, bucket = 0;
  std::unique_ptr<Marker> begin, end;
  std::vector<Image> images;
};

StepBatcher::StepBatcher(Backend& backend, EngineObserver* observer)
    : backend_(backend), observer_(observer) {}

StepBatcher::~StepBatcher() = default;

absl::Status StepBatcher::AddModel(const BatchedModel& model, int height, int width) {
  models_[model.name] = model;
  const auto lane = LaneFor(model.name, height, width);
  if (lane.ok()) {
    (*lane)->first_size = true;
  } else {
    models_.erase(model.name);
  }
  return lane.status();
}

absl::StatusOr<bool> StepBatcher::WarmUp(const std::string& model) {
  const auto lane = std::find_if(lanes_.begin(), lanes_.end(), [&](const auto& each) {
    return each->model.name == model && each->first_size;
  });
  DENOISED_CHECK(lane != lanes_.end(), "model {}", model);
  return (*lane)->evaluator->WarmUp();
}

bool StepBatcher::HasJobs(const std::string& model) const {
  return std::any_of(jobs_.begin(), jobs_.end(), [&](const auto& entry) {
    return entry.second->effective.spec.model == model;
  });
}

absl::Status StepBatcher::RemoveModel(const std::string& model) {
  DENOISED_CHECK(!HasJobs(model), "model {} has jobs", model);
  // Its last evaluation may be on the device still, though nobody waits for it.
  const absl::Status status = backend_.Synchronize();
  std::erase_if(lanes_, [&](const auto& lane) { return lane->model.name == model; });
  models_.erase(model);
  return status;
}

absl::StatusOr<StepBatcher::Lane*> StepBatcher::LaneFor(const std::string& model, int height,
                                                        int width) {
  std::vector<Lane*> extra;
  for (const auto& lane : lanes_) {
    if (lane->model.name != model) continue;
    const Evaluator::Options& options = lane->evaluator->options();
    if (options.height == height && options.width == width) return lane.get();
    if (!lane->first_size) extra.push_back(lane.get());
  }
  if (extra.size() >= kExtraSizes) {
    for (Lane* idle : extra) {
      if (idle->active() > 0 || !idle->waiting.empty()) continue;
      DENOISED_RETURN_IF_ERROR(backend_.Synchronize());
      std::erase_if(lanes_, [&](const auto& lane) { return lane.get() == idle; });
      break;
    }
  }
  auto lane = std::make_unique<Lane>();
  lane->model = models_.at(model);
  DENOISED_ASSIGN_OR_RETURN(
      lane->evaluator, Evaluator::Create(backend_, lane->model.denoiser,
                                         {.height = height,
                                          .width = width,
                                          .max_rows = lane->model.max_rows,
                                          .slots = lane->model.slots,
                                          .max_evaluations = lane->model.max_evaluations,
                                          .downloads = kDownloadsPerSlot * lane->model.slots}));
  lane->slots.resize(lane->model.slots);
  lanes_.push_back(std::move(lane));
  return lanes_.back().get();
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
                         Clock::time_point submitted) {
  auto job = std::make_shared<Job>();
  job->id = id;
  job->effective = std::move(effective);
  job->listener = std::move(listener);
  job->plan = ToDevice(*job->effective.plan);
  job->submitted = submitted;
  jobs_[id] = job;
  const JobSpec& spec = job->effective.spec;
  if (!models_.count(spec.model)) {
    Finish(*job, NotFound("model '{}' is not on this device", spec.model));
    return;
  }
  const auto lane = LaneFor(spec.model, spec.height, spec.width);
  if (!lane.ok()) {
    Finish(*job, lane.status());
    return;
  }
  (*lane)->waiting.push_back(job);
}

void StepBatcher::End(JobId id, const absl::Status& status) {
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) return;
  const std::shared_ptr<Job> job = found->second;
  Finish(*job, status);
}

void StepBatcher::EndAll(const absl::Status& status) {
  while (!jobs_.empty()) End(jobs_.begin()->first, status);
}

void StepBatcher::Finish(Job& job, const absl::Status& status) {
  job.over = true;
  for (const auto& lane : lanes_) lane->Forget(job);
  job.timing.total_seconds = Seconds(Clock::now() - job.submitted);
  const std::shared_ptr<JobListener> listener = std::move(job.listener);
  listener->OnDone(status, job.timing);
  jobs_.erase(job.id);
}

bool StepBatcher::busy() const { return !jobs_.empty() || !evaluated_.empty(); }

absl::Status StepBatcher::Step() {
  EndExpired();
  for (const auto& lane : lanes_) Admit(*lane);
  bool launched = false;
  for (auto lane = lanes_.begin(); lane != lanes_.end() && !launched; ++lane) {
    if ((*lane)->active() == 0) continue;
    DENOISED_RETURN_IF_ERROR(Launch(**lane));
    launched = true;
    lanes_.splice(lanes_.end(), lanes_, lane);  // its next turn comes after everyone else's
    break;
  }
  // The CPU has computed when Launch returns: nothing to run ahead of.
  const size_t ahead = launched && backend_.device() != Device::kCpu ? kRunAhead : 0;
  while (evaluated_.size() > ahead) DENOISED_RETURN_IF_ERROR(Report());
  return absl::OkStatus();
}

void StepBatcher::EndExpired() {
  const Clock::time_point now = Clock::now();
  std::vector<JobId> expired;
  for (const auto& [id, job] : jobs_)
    if (job->effective.spec.deadline && *job->effective.spec.deadline <= now) expired.push_back(id);
  for (const JobId id : expired)
    End(id, DeadlineExceeded("the deadline passed after {} of {} evaluations; allow more time, or "
                             "ask for fewer steps or images",
                             jobs_.at(id)->evaluations_done,
                             jobs_.at(id)->count() * jobs_.at(id)->effective.evaluations));
}

void StepBatcher::Admit(Lane& lane) {
  int rows = lane.rows();
  for (int slot = 0; slot < static_cast<int>(lane.slots.size()) && !lane.waiting.empty(); ++slot) {
    if (lane.slots[slot].job) continue;
    const std::shared_ptr<Job> job = lane.waiting.front();
    if (rows + job->rows() > lane.model.max_rows) return;
    lane.waiting.pop_front();
    rows += job->rows();
    Begin(lane, slot, job);
    if (job->waiting() > 0) lane.waiting.push_back(job);
  }
}

void StepBatcher::Begin(Lane& lane, int slot, const std::shared_ptr<Job>& job) {
  const JobSpec& spec = job->effective.spec;
  const StepPlan& plan = *job->effective.plan;
  const int image = job->next_image++;
  lane.slots[slot] = {.job = job, .image = image};

  Evaluator::Start start;
  start.plan = &job->plan;
  start.seed = *spec.seed + static_cast<uint64_t>(image);
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
  lane.evaluator->Begin(slot, start);

  if (!job->started) {
    job->started = true;
    job->timing.queued_seconds = Seconds(Clock::now() - job->submitted);
    job->listener->OnStarted();
  }
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

  Evaluated evaluated{.model = lane.model.name, .rows = static_cast<int>(rows.size())};
  evaluated.begin = backend_.Mark();
  DENOISED_ASSIGN_OR_RETURN(evaluated.bucket, lane.evaluator->Evaluate(rows));
  evaluated.end = backend_.Mark();

  for (int s = 0; s < static_cast<int>(lane.slots.size()); ++s) {
    Lane::Slot& slot = lane.slots[s];
    if (!slot.job) continue;
    const JobSpec& spec = slot.job->effective.spec;
    const std::vector<DeviceEvaluation>& plan = slot.job->plan;
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
    if (last) slot = Lane::Slot();
  }
  evaluated_.push_back(std::move(evaluated));
  return absl::OkStatus();
}

absl::Status StepBatcher::Report() {
  Evaluated evaluated = std::move(evaluated_.front());
  evaluated_.pop_front();
  DENOISED_RETURN_IF_ERROR(evaluated.end->Wait());
  if (observer_)
    observer_->OnEvaluation(evaluated.model, evaluated.rows, evaluated.bucket,
                            evaluated.end->SecondsSince(*evaluated.begin));

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
    ImageResult result{.index = image.image,
                       .seed = *spec.seed + static_cast<uint64_t>(image.image)};
    if (!spec.class_labels.empty()) result.label = spec.class_labels[image.image];
    DENOISED_ASSIGN_OR_RETURN(result.pixels, download->Wait());
    if (image.preview) {
      for (float& value : result.pixels.span<float>()) value *= image.preview_scale;
      if (job.timing.first_preview_seconds < 0)
        job.timing.first_preview_seconds = Seconds(Clock::now() - job.submitted);
      job.listener->OnPreview(result, image.evaluation);
      continue;
    }
    job.listener->OnImage(std::move(result));
    if (++job.images_done == job.count()) Finish(job, absl::OkStatus());
  }
  return absl::OkStatus();
}

int StepBatcher::waiting_images(JobId id) const {
  const auto found = jobs_.find(id);
  return found == jobs_.end() ? 0 : found->second->waiting();
}

int StepBatcher::active_images(const std::string& model) const {
  int images = 0;
  for (const auto& lane : lanes_)
    if (lane->model.name == model) images += lane->active();
  return images;
}

}  // namespace denoised
