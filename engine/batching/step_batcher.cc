#include "engine/batching/step_batcher.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "engine/batching/first_reached.h"

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

/// DataLoss and not Internal: gRPC makes Internal by itself for faults on the way, which a client
/// may retry, and DataLoss never. The same request has the same bits, so a retry draws the same
/// image.
absl::Status NonfiniteImage(const EffectiveJob& job, const ImageResult& image, int evaluation) {
  return DataLoss(
      "model '{}' drew an image that is not finite: image {} (seed {}{}) has NaN or infinity since "
      "evaluation {} of {}; the same request draws the same image again; check the model's weights "
      "and configuration, or use another sampler, schedule, guidance scale or number of steps "
      "(--allow-nonfinite delivers such images for debugging)",
      job.spec.model, image.index, image.seed,
      image.label < 0 ? "" : fmt::format(", class label {}", image.label), evaluation,
      job.evaluations);
}

}  // namespace

struct StepBatcher::Lane {
  BatchedModel model;
  bool first_size = false;  // never evicted
  std::unique_ptr<Evaluator> evaluator;
  Admission::Lane* share = nullptr;
  std::vector<std::shared_ptr<Image>> slots;  // null: free
  int active = 0, rows = 0;                   // images in slots, and their rows

  bool HasRoom(const Job& job) const {
    return active < static_cast<int>(slots.size()) && rows + job.rows() <= model.max_rows;
  }
  void Take(int slot, std::shared_ptr<Image> image) {
    ++active;
    rows += image->job->rows();
    slots[slot] = std::move(image);
  }
  void Free(int slot) {
    --active;
    rows -= slots[slot]->job->rows();
    slots[slot].reset();
  }
};

/// An evaluation on the device, and what is to be told when it is done.
struct StepBatcher::Evaluated {
  struct Row {
    std::shared_ptr<Image> image;
    int slot = 0;
    int evaluation = 0;  // 1-based
    float preview_scale = 1;
    std::unique_ptr<Download> preview, result;
  };

  std::string model;
  Admission::Lane* share = nullptr;
  Admission::Charge charge;
  int rows = 0, bucket = 0;
  std::unique_ptr<Marker> begin, end;
  double seconds = 0;  // of its share of the device before others ended
  std::vector<Row> images;
  std::unique_ptr<Download> nonfinite;         // by slot; null: no pixels are on their way
  std::vector<std::shared_ptr<Image>> parked;  // before it
};

/// A size that is on its way to a lane.
struct StepBatcher::Opening {
  JobQueue::Size size;
  std::unique_ptr<Lane> lane;  // null: nothing is taken yet
};

StepBatcher::StepBatcher(Backend& backend, Admission& admission, JobQueue& queue,
                         EngineObserver* observer, const Options& options)
    : backend_(backend),
      admission_(admission),
      queue_(queue),
      observer_(observer),
      options_(options),
      device_name_(backend.name()) {}

StepBatcher::~StepBatcher() = default;

Backend& StepBatcher::BackendOf(const BatchedModel& model) const {
  return model.backend ? *model.backend : backend_;
}

absl::Status StepBatcher::status() const {
  absl::Status status = backend_.status();
  for (const auto& [name, model] : models_) status.Update(BackendOf(model).status());
  return status;
}

absl::Status StepBatcher::AddModel(const BatchedModel& model, int height, int width) {
  auto lane = MakeLane(model, height, width);
  if (!lane.ok()) return lane.status();
  (*lane)->first_size = true;
  models_[model.name] = model;
  queue_.AddModel(model.name, options_.device);
  queue_.Opened({(*lane)->share, model.name, height, width}, options_.device, absl::OkStatus());
  lanes_.push_front(*std::move(lane));
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
  // It is measured, so nothing may run beside it.
  for (const Evaluated& evaluated : evaluated_) DENOISED_RETURN_IF_ERROR(evaluated.end->Wait());
  DENOISED_ASSIGN_OR_RETURN(const Evaluator::Warmed warmed, lane.evaluator->WarmUp());
  admission_.Measured(*lane.share, warmed.bucket, warmed.seconds);
  return warmed.more;
}

absl::Status StepBatcher::RemoveModel(const std::string& model) {
  // Its last evaluation may be on the device still, though nobody waits for it.
  absl::Status status;
  if (const auto known = models_.find(model); known != models_.end())
    status = BackendOf(known->second).Synchronize();
  std::erase_if(evaluated_, [&](const auto& evaluated) { return evaluated.model == model; });
  std::erase_if(lanes_, [&](const auto& lane) { return lane->model.name == model; });
  if (opening_ && opening_->size.model == model) opening_.reset();  // its jobs were cancelled
  models_.erase(model);
  queue_.RemoveModel(model, options_.device);
  return status;
}

/// Does one part of what a size that came up takes, so that the lanes there are have their turn
/// before the next. When there is no memory, the jobs that no device can draw end with
/// ResourceExhausted. Whether there was anything to do.
absl::StatusOr<bool> StepBatcher::OpenSizes() {
  if (!opening_) {
    const auto size = queue_.ToOpen(options_.device);
    if (!size) return false;
    const auto extra = std::count_if(lanes_.begin(), lanes_.end(), [&](const auto& lane) {
      return lane->model.name == size->model && !lane->first_size;
    });
    if (extra >= kExtraSizes) EvictIdleLane(&size->model);
    opening_ = std::make_unique<Opening>(Opening{.size = *size});
  }
  auto more = OpenPart();
  // Sizes that nobody draws now make room, of any model, and it starts anew.
  while (more.status().code() == absl::StatusCode::kResourceExhausted) {
    opening_->lane.reset();
    if (!EvictIdleLane(nullptr)) break;
    more = OpenPart();
  }
  DENOISED_RETURN_IF_ERROR(this->status());
  if (more.ok() && *more) return true;
  const std::unique_ptr<Opening> opened = std::move(opening_);
  if (more.ok()) lanes_.push_front(std::move(opened->lane));
  queue_.Opened(opened->size, options_.device, more.status());
  return true;
}

/// Memory and the first graph, then one graph more a call; whether any are left. A lane has them
/// all before it draws: no evaluation of a job takes memory.
absl::StatusOr<bool> StepBatcher::OpenPart() {
  const JobQueue::Size& size = opening_->size;
  if (!opening_->lane) {
    DENOISED_ASSIGN_OR_RETURN(opening_->lane,
                              MakeLane(models_.at(size.model), size.height, size.width));
  }
  return WarmUp(*opening_->lane);
}

absl::StatusOr<std::unique_ptr<StepBatcher::Lane>> StepBatcher::MakeLane(const BatchedModel& model,
                                                                         int height, int width) {
  auto lane = std::make_unique<Lane>();
  lane->model = model;
  DENOISED_ASSIGN_OR_RETURN(lane->evaluator,
                            Evaluator::Create(BackendOf(model), model.denoiser,
                                              {.height = height,
                                               .width = width,
                                               .max_rows = model.max_rows,
                                               .slots = model.slots,
                                               .max_evaluations = model.max_evaluations,
                                               .downloads = kUnderWay * model.slots,
                                               .flag_downloads = kUnderWay,
                                               .parks = kUnderWay * kParksPerEvaluation}));
  lane->slots.resize(model.slots);
  lane->share = admission_.Open(
      model.name, height, width,
      {.rows = model.max_rows, .slots = model.slots, .buckets = lane->evaluator->buckets()});
  return lane;
}

/// Gives up the longest unused lane of a size that is not its model's first; of any model when
/// `model` is null. False when there is none.
bool StepBatcher::EvictIdleLane(const std::string* model) {
  for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
    const Lane& candidate = **lane;
    const bool evaluating =
        std::any_of(evaluated_.begin(), evaluated_.end(),
                    [&](const auto& evaluated) { return evaluated.share == candidate.share; });
    if (candidate.first_size || candidate.active > 0 || evaluating ||
        (model && candidate.model.name != *model) ||
        !queue_.Close(candidate.share, options_.device))
      continue;
    // The next Step reports it.
    if (!BackendOf(candidate.model).Synchronize().ok()) return false;
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

bool StepBatcher::busy() const {
  return opening_ || !evaluated_.empty() || queue_.HasWork(options_.device) ||
         std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->active; });
}

absl::Status StepBatcher::Step() {
  queue_.Settle();
  FreeEnded();
  DENOISED_ASSIGN_OR_RETURN(const bool opened, OpenSizes());
  if (opened && options_.part_done) options_.part_done();
  auto next = lanes_.end();
  double first_turn = 0;
  for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
    if ((*lane)->active == 0 && !queue_.First((*lane)->share, options_.device, 0)) continue;
    const double turn = admission_.Turn(*(*lane)->share);
    if (next != lanes_.end() && turn >= first_turn) continue;
    next = lane;
    first_turn = turn;
  }
  if (next != lanes_.end()) DENOISED_RETURN_IF_ERROR(Admit(**next));
  // Other devices may have taken all that waited.
  const bool launched = next != lanes_.end() && (*next)->active > 0;
  if (launched) {
    DENOISED_RETURN_IF_ERROR(Launch(**next));
    lanes_.splice(lanes_.end(), lanes_, next);
  }
  // The CPU has computed when Launch returns: nothing to run ahead of.
  const size_t ahead = launched && backend_.device() != Device::kCpu ? kRunAhead : 0;
  while (evaluated_.size() > ahead) DENOISED_RETURN_IF_ERROR(Report());
  return absl::OkStatus();
}

/// Frees the slots of jobs that ended before their images were done.
void StepBatcher::FreeEnded() {
  for (const auto& lane : lanes_)
    for (int slot = 0; slot < static_cast<int>(lane->slots.size()); ++slot)
      if (lane->slots[slot] && lane->slots[slot]->job->over) lane->Free(slot);
}

absl::Status StepBatcher::Admit(Lane& lane) {
  const bool whole_batches = options_.batching == Batching::kRequest;
  if (whole_batches && lane.active > 0) return absl::OkStatus();
  size_t may_park = whole_batches ? 0 : kParksPerEvaluation;
  int slot = 0;
  while (const auto job = queue_.First(lane.share, options_.device, lane.rows)) {
    std::vector<int> victims;
    if (!lane.HasRoom(*job)) {
      may_park = std::min(may_park, RoomToPark(lane));
      victims = Victims(lane, *job, may_park);
      if (victims.empty()) break;
    }
    std::shared_ptr<Image> image = queue_.Take(job, options_.device);
    if (!image) continue;  // another device was quicker
    for (const int victim : victims) Park(lane, victim);
    may_park -= victims.size();
    if (!victims.empty()) slot = 0;
    while (lane.slots[slot]) ++slot;
    Begin(lane, slot, std::move(image));
  }
  return BackendOf(lane.model).status();
}

/// The images, at most `most`, that have to be parked for `job` to have room, of those that come
/// after it in the order; the last first. None when that would not do.
std::vector<int> StepBatcher::Victims(const Lane& lane, const Job& job, size_t most) const {
  std::vector<int> victims;
  for (int slot = 0; slot < static_cast<int>(lane.slots.size()); ++slot) {
    const Image* image = lane.slots[slot].get();
    if (image && image->job->key() > job.key() &&
        image->evaluations_left() > options_.keep_evaluations)
      victims.push_back(slot);
  }
  // Of one job, those that have the longest way to go.
  const auto later = [&](int a, int b) {
    const Image &first = *lane.slots[a], &second = *lane.slots[b];
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
  while (!enough() && parks < most) rows -= lane.slots[victims[parks++]]->job->rows();
  victims.resize(enough() ? parks : 0);
  return victims;
}

/// Images that may be parked within the limit of bytes, less those that are on their way.
size_t StepBatcher::RoomToPark(const Lane& lane) const {
  size_t under_way = parked_.size();
  for (const Evaluated& evaluated : evaluated_) under_way += evaluated.parked.size();
  const size_t room = admission_.RoomToPark(lane.evaluator->parked_bytes());
  return room - std::min(room, under_way);
}

void StepBatcher::Park(Lane& lane, int slot) {
  const std::shared_ptr<Image>& image = lane.slots[slot];
  image->parked = lane.evaluator->Park(slot);
  parked_.push_back(image);
  lane.Free(slot);
}

void StepBatcher::Begin(Lane& lane, int slot, std::shared_ptr<Image> image) {
  Job& job = *image->job;
  const JobSpec& spec = job.effective.spec;
  const StepPlan& plan = *job.effective.plan;
  Evaluator::Start start;
  start.plan = &job.plan();
  start.seed = spec.SeedOf(image->index);
  start.guidance_scale = static_cast<float>(*spec.guidance_scale);
  if (!spec.class_values.empty()) {
    const size_t size = spec.class_values.size() / job.count();
    start.embedding = std::span(spec.class_values).subspan(image->index * size, size);
  }
  if (spec.init_image) start.source = spec.init_image.as<float>();
  if (spec.initial_noise) start.noise = spec.initial_noise.Slice(image->index, 1).as<float>();
  start.source_scale = static_cast<float>(plan.initial_source_scale);
  start.noise_scale = static_cast<float>(plan.initial_noise_scale);
  start.churn_scale = static_cast<float>(plan.initial_churn_scale);
  if (const auto parked = std::move(image->parked)) {
    lane.evaluator->Resume(slot, start, image->evaluation, *parked);
  } else {
    lane.evaluator->Begin(slot, start);
  }
  queue_.Began(job);
  lane.Take(slot, std::move(image));
}

absl::Status StepBatcher::Launch(Lane& lane) {
  std::vector<EvaluationRow> rows;
  for (int s = 0; s < static_cast<int>(lane.slots.size()); ++s) {
    if (!lane.slots[s]) continue;
    const Image& image = *lane.slots[s];
    const JobSpec& spec = image.job->effective.spec;
    const int label = spec.class_labels.empty() ? 0 : spec.class_labels[image.index];
    const int row = static_cast<int>(rows.size());
    const bool guided = image.job->guided();
    rows.push_back(
        {.slot = s, .label = label, .unconditional_row = guided ? row + 1 : -1, .advances = 1});
    if (guided)
      rows.push_back(
          {.slot = s, .label = lane.model.null_label, .unconditional_row = -1, .advances = 0});
  }

  Evaluated evaluated{
      .model = lane.model.name, .share = lane.share, .rows = static_cast<int>(rows.size())};
  evaluated.parked.swap(parked_);
  Backend& backend = BackendOf(lane.model);
  evaluated.begin = backend.Mark();
  DENOISED_ASSIGN_OR_RETURN(evaluated.bucket, lane.evaluator->Evaluate(rows));
  evaluated.end = backend.Mark();
  evaluated.charge = admission_.Launched(*lane.share, evaluated.rows, evaluated.bucket);

  for (int s = 0; s < static_cast<int>(lane.slots.size()); ++s) {
    const std::shared_ptr<Image> image = lane.slots[s];
    if (!image) continue;
    Job& job = *image->job;
    const JobSpec& spec = job.effective.spec;
    const std::vector<DeviceEvaluation>& plan = job.plan();
    job.rows_launched += job.rows();
    const int done = ++image->evaluation;
    const bool last = done == static_cast<int>(plan.size());
    Evaluated::Row row{.image = image, .slot = s, .evaluation = done};
    if (last) {
      row.result = lane.evaluator->DownloadState(s);
    } else if (spec.previews && done % spec.preview_every == 0) {
      if (spec.preview_kind == PreviewKind::kPredictedX0) {
        row.preview = lane.evaluator->DownloadX0(s);
      } else {
        row.preview = lane.evaluator->DownloadState(s);
        row.preview_scale = plan[done].input_scale;
      }
    }
    if (!evaluated.nonfinite && (row.result || row.preview))
      evaluated.nonfinite = lane.evaluator->DownloadNonfinite();
    evaluated.images.push_back(std::move(row));
    if (!last) continue;
    queue_.Drawn(image);
    lane.Free(s);
  }
  evaluated_.push_back(std::move(evaluated));
  return absl::OkStatus();
}

/// Waits for the evaluation that ends next. Those of one model end in their order.
absl::StatusOr<StepBatcher::Evaluated> StepBatcher::NextToEnd() {
  // The oldest of each model.
  std::vector<Marker*> ends;
  std::vector<size_t> indices;
  std::set<std::string_view> models;
  for (size_t i = 0; i < evaluated_.size(); ++i) {
    if (!models.insert(evaluated_[i].model).second) continue;
    ends.push_back(evaluated_[i].end.get());
    indices.push_back(i);
  }
  const auto next = evaluated_.begin() + static_cast<std::ptrdiff_t>(indices[FirstReached(ends)]);
  DENOISED_RETURN_IF_ERROR(next->end->Wait());
  Evaluated evaluated = std::move(*next);
  evaluated_.erase(next);
  return evaluated;
}

absl::Status StepBatcher::Report() {
  DENOISED_ASSIGN_OR_RETURN(Evaluated evaluated, NextToEnd());
  // Time in which two models were evaluated is divided among them, so that the seconds of
  // evaluations never add up to more than passed.
  const auto ran = [&](const Evaluated& each) {  // since an end was last reported
    double seconds = evaluated.end->SecondsSince(*each.begin);
    if (last_end_) seconds = std::min(seconds, evaluated.end->SecondsSince(*last_end_));
    return std::max(seconds, 0.0);
  };
  double alone = ran(evaluated);
  for (Evaluated& other : evaluated_) {
    if (!other.begin->reached()) continue;
    const double seconds = ran(other), together = std::min(alone, seconds);
    other.seconds += seconds - together / 2;
    alone -= together / 2;
  }
  const double seconds = evaluated.seconds + alone;
  last_end_ = std::move(evaluated.end);
  admission_.Measured(*evaluated.share, evaluated.bucket, seconds, &evaluated.charge);
  if (observer_)
    observer_->OnEvaluation(evaluated.model, device_name_, evaluated.rows, evaluated.bucket,
                            seconds);
  for (const auto& image : evaluated.parked) {
    DENOISED_RETURN_IF_ERROR(image->parked->Arrive());
    queue_.GiveBack(image);
  }

  Tensor nonfinite;
  if (evaluated.nonfinite) {
    DENOISED_ASSIGN_OR_RETURN(nonfinite, evaluated.nonfinite->Wait());
  }
  std::vector<JobQueue::Outcome> outcomes;
  for (Evaluated::Row& row : evaluated.images) {
    const Image& image = *row.image;
    if (image.job->over) continue;
    outcomes.push_back({.image = row.image, .evaluation = row.evaluation});
    const JobSpec& spec = image.job->effective.spec;
    ImageResult result{.index = image.index, .seed = spec.SeedOf(image.index)};
    if (!spec.class_labels.empty()) result.label = spec.class_labels[image.index];
    const int first_nonfinite = nonfinite ? nonfinite.as<int32_t>()[row.slot] : 0;
    if (first_nonfinite > 0 && (row.result || !options_.allow_nonfinite)) {
      if (observer_) observer_->OnNonfiniteImage(evaluated.model, device_name_);
    }
    if (first_nonfinite > 0 && !options_.allow_nonfinite) {
      outcomes.back().error = NonfiniteImage(image.job->effective, result, first_nonfinite);
      continue;
    }
    Download* download = row.result ? row.result.get() : row.preview.get();
    if (!download) continue;
    DENOISED_ASSIGN_OR_RETURN(result.pixels, download->Wait());
    if (row.preview)
      for (float& value : result.pixels.span<float>()) value *= row.preview_scale;
    (row.result ? outcomes.back().result : outcomes.back().preview) = std::move(result);
  }
  queue_.Tell(std::move(outcomes));
  return absl::OkStatus();
}

}  // namespace denoised
