// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/step_batcher.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>

#include "engine/batching/first_reached.h"

namespace denoised {
namespace {

// Evaluations that may be queued on the device while the host reports an earlier one: enough that
// the device never waits for the host, few enough that a cancellation takes effect at the next.
constexpr size_t kRunAhead = 1;

// Evaluations that may be unreported at a time. Each may have a download under way for every slot.
constexpr int kUnderWay = static_cast<int>(kRunAhead) + 1;

// Images that may lose their slot before one evaluation: their copies delay it.
constexpr int kParksPerEvaluation = 4;

// Condition sets of a model beyond those that its slots may use at one size.
constexpr int kCachedPrompts = 16;

// Images that are decoded after one evaluation: other jobs wait for it.
constexpr size_t kDecodesPerEvaluation = 1;

// Sizes, beside a model's own, that are kept for later requests.
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

bool AllFinite(const Tensor& pixels) {
  const auto values = pixels.span<float>();
  return std::all_of(values.begin(), values.end(),
                     [](float value) { return std::isfinite(value); });
}

}  // namespace

/// The images of one lane that are in flight on this device, with the memory for them.
struct StepBatcher::Batch {
  BatchedModel model;
  bool first_size = false;  // the model's own size, never evicted
  std::unique_ptr<Evaluator> evaluator;
  Admission::Lane* lane = nullptr;
  std::vector<std::shared_ptr<Image>> slots;  // null: free
  Conditioner* conditioner = nullptr;         // null: the model reads no text
  struct Sets {
    int condition = -1, negative = -1;
  };
  std::vector<Sets> sets;    // by slot: the condition sets of its image
  std::deque<int> drawn;     // slots of images that only wait to be decoded
  int active = 0, rows = 0;  // images in slots, and the rows of those that are not drawn

  bool HasRoom(const Job& job) const {
    return active < static_cast<int>(slots.size()) && rows + job.rows() <= model.max_rows &&
           (!conditioner || conditioner->HasRoom(job.rows()));
  }
  void Take(int slot, std::shared_ptr<Image> image) {
    ++active;
    rows += image->job->rows();
    if (conditioner) {
      const EffectiveJob& job = image->job->effective;
      sets[slot].condition = conditioner->Acquire(job.PromptOf(image->index));
      if (job.guided) sets[slot].negative = conditioner->Acquire(job.NegativeOf(image->index));
    }
    slots[slot] = std::move(image);
  }
  bool Drawn(int slot) const { return std::find(drawn.begin(), drawn.end(), slot) != drawn.end(); }
  /// Its image takes no more rows.
  void Finish(int slot) {
    rows -= slots[slot]->job->rows();
    drawn.push_back(slot);
  }
  void Free(int slot) {
    --active;
    if (Drawn(slot)) {
      std::erase(drawn, slot);
    } else {
      rows -= slots[slot]->job->rows();
    }
    for (int* const set : {&sets[slot].condition, &sets[slot].negative})
      if (*set >= 0) conditioner->Release(std::exchange(*set, -1));
    slots[slot].reset();
  }
};

/// An evaluation on the device, and what to report when it is done.
struct StepBatcher::Evaluated {
  struct Row {
    std::shared_ptr<Image> image;
    int slot = 0;
    int evaluation = 0;  // 1-based
    float preview_scale = 1;
    std::unique_ptr<Download> preview, result;
  };

  std::string model;
  Admission::Lane* lane = nullptr;
  Admission::Charge charge;
  int rows = 0, bucket = 0;
  std::unique_ptr<Marker> begin, end;  // of the evaluation
  std::unique_ptr<Marker> done;        // of images that were decoded after it
  double seconds = 0;  // its part of the device's time until the evaluation reported last
  std::vector<Row> images;
  std::unique_ptr<Download> nonfinite;         // by slot
  std::vector<std::shared_ptr<Image>> parked;  // before this evaluation
};

/// A size that is being opened.
struct StepBatcher::Opening {
  JobQueue::Size size;
  std::unique_ptr<Batch> batch;  // null: no memory was taken yet
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
  if (!model.text_encoders.models.empty()) {
    // For images in flight at the native size with a prompt and a negative each; the rest is cache.
    DENOISED_ASSIGN_OR_RETURN(
        auto conditioner, Conditioner::Create(BackendOf(model), model.denoiser, model.text_encoders,
                                              2 * model.slots + kCachedPrompts));
    conditioners_[model.name] = std::move(conditioner);
  }
  auto batch = MakeBatch(model, height, width);
  if (!batch.ok()) {
    conditioners_.erase(model.name);
    return batch.status();
  }
  (*batch)->first_size = true;
  models_[model.name] = model;
  queue_.AddModel(model.name, options_.device);
  queue_.Opened({(*batch)->lane, model.name, height, width}, options_.device, absl::OkStatus());
  batches_.push_front(*std::move(batch));
  return absl::OkStatus();
}

absl::StatusOr<bool> StepBatcher::WarmUp(const std::string& model) {
  const auto batch = std::find_if(batches_.begin(), batches_.end(), [&](const auto& each) {
    return each->model.name == model && each->first_size;
  });
  DENOISED_CHECK(batch != batches_.end(), "model {}", model);
  return WarmUp(**batch);
}

absl::StatusOr<bool> StepBatcher::WarmUp(Batch& batch) {
  // Nothing may run beside an evaluation that is measured.
  for (const Evaluated& evaluated : evaluated_) DENOISED_RETURN_IF_ERROR(evaluated.end->Wait());
  DENOISED_ASSIGN_OR_RETURN(const Evaluator::Warmed warmed, batch.evaluator->WarmUp());
  if (warmed.bucket == 0) {
    admission_.MeasuredDecode(*batch.lane, warmed.seconds);
  } else {
    admission_.Measured(*batch.lane, warmed.bucket, warmed.seconds);
  }
  return warmed.more;
}

absl::Status StepBatcher::RemoveModel(const std::string& model) {
  // Its last evaluation may still run on the device, though nobody waits for its result.
  absl::Status status;
  if (const auto known = models_.find(model); known != models_.end())
    status = BackendOf(known->second).Synchronize();
  std::erase_if(evaluated_, [&](const auto& evaluated) { return evaluated.model == model; });
  std::erase_if(batches_, [&](const auto& batch) { return batch->model.name == model; });
  if (opening_ && opening_->size.model == model) opening_.reset();  // its jobs were cancelled
  conditioners_.erase(model);
  models_.erase(model);
  queue_.RemoveModel(model, options_.device);
  return status;
}

/// Does one part of opening a new size, so that other batches are evaluated between the parts. If
/// there is no memory, the jobs that no device can draw end with ResourceExhausted. False if there
/// was nothing to do.
absl::StatusOr<bool> StepBatcher::OpenSizes() {
  if (!opening_) {
    const auto size = queue_.ToOpen(options_.device);
    if (!size) return false;
    const auto extra = std::count_if(batches_.begin(), batches_.end(), [&](const auto& batch) {
      return batch->model.name == size->model && !batch->first_size;
    });
    if (extra >= kExtraSizes) EvictIdleBatch(&size->model);
    opening_ = std::make_unique<Opening>(Opening{.size = *size});
  }
  auto more = OpenPart();
  // Evict idle sizes of any model and start again.
  while (more.status().code() == absl::StatusCode::kResourceExhausted) {
    opening_->batch.reset();
    if (!EvictIdleBatch(nullptr)) break;
    more = OpenPart();
  }
  DENOISED_RETURN_IF_ERROR(this->status());
  if (more.ok() && *more) return true;
  const std::unique_ptr<Opening> opened = std::move(opening_);
  if (more.ok()) batches_.push_front(std::move(opened->batch));
  queue_.Opened(opened->size, options_.device, more.status());
  return true;
}

/// Takes memory and captures the first graph, then one more graph a call; false after the last. A
/// batch draws only when it has all of them, so that no evaluation of a job takes memory.
absl::StatusOr<bool> StepBatcher::OpenPart() {
  const JobQueue::Size& size = opening_->size;
  if (!opening_->batch) {
    DENOISED_ASSIGN_OR_RETURN(opening_->batch,
                              MakeBatch(models_.at(size.model), size.height, size.width));
  }
  return WarmUp(*opening_->batch);
}

absl::StatusOr<std::unique_ptr<StepBatcher::Batch>> StepBatcher::MakeBatch(
    const BatchedModel& model, int height, int width) {
  auto batch = std::make_unique<Batch>();
  batch->model = model;
  if (const auto known = conditioners_.find(model.name); known != conditioners_.end())
    batch->conditioner = known->second.get();
  const int factor = model.codec ? model.codec->traits().factor : 1;
  Evaluator::Options options{.height = height / factor,
                             .width = width / factor,
                             .max_rows = model.max_rows,
                             .slots = model.slots,
                             .max_evaluations = model.max_evaluations,
                             .downloads = kUnderWay * model.slots,
                             .flag_downloads = kUnderWay,
                             .parks = kUnderWay * kParksPerEvaluation,
                             .decodes = kUnderWay * static_cast<int>(kDecodesPerEvaluation),
                             .codec = model.codec};
  if (batch->conditioner) options.sets = batch->conditioner->sets();
  DENOISED_ASSIGN_OR_RETURN(batch->evaluator,
                            Evaluator::Create(BackendOf(model), model.denoiser, options));
  batch->slots.resize(model.slots);
  batch->sets.resize(model.slots);
  batch->lane = admission_.Open(
      model.name, height, width,
      {.rows = model.max_rows, .slots = model.slots, .buckets = batch->evaluator->buckets()});
  return batch;
}

/// Frees the least recently used idle batch that is not of its model's own size; of any model if
/// `model` is null. False if there is none.
bool StepBatcher::EvictIdleBatch(const std::string* model) {
  for (auto batch = batches_.begin(); batch != batches_.end(); ++batch) {
    const Batch& candidate = **batch;
    const bool evaluating =
        std::any_of(evaluated_.begin(), evaluated_.end(),
                    [&](const auto& evaluated) { return evaluated.lane == candidate.lane; });
    if (candidate.first_size || candidate.active > 0 || evaluating ||
        (model && candidate.model.name != *model) || !queue_.Close(candidate.lane, options_.device))
      continue;
    // The next Step returns the error.
    if (!BackendOf(candidate.model).Synchronize().ok()) return false;
    batches_.erase(batch);
    return true;
  }
  return false;
}

size_t StepBatcher::ActivationBytes(const std::string& model) const {
  size_t bytes = 0;
  for (const auto& batch : batches_)
    if (batch->model.name == model) bytes += batch->evaluator->activation_bytes();
  return bytes;
}

size_t StepBatcher::SlotBytes(const std::string& model) const {
  size_t bytes = 0;
  for (const auto& batch : batches_)
    if (batch->model.name == model) bytes += batch->evaluator->slot_bytes();
  if (const auto known = conditioners_.find(model); known != conditioners_.end())
    bytes += known->second->bytes();
  return bytes;
}

bool StepBatcher::busy() const {
  return opening_ || !evaluated_.empty() || queue_.HasWork(options_.device) ||
         std::any_of(batches_.begin(), batches_.end(),
                     [](const auto& batch) { return batch->active; });
}

absl::Status StepBatcher::Step() {
  queue_.EndDueJobs();
  FreeEnded();
  DENOISED_ASSIGN_OR_RETURN(const bool opened, OpenSizes());
  if (opened && options_.part_done) options_.part_done();
  auto next = batches_.end();
  double first_turn = 0;
  for (auto batch = batches_.begin(); batch != batches_.end(); ++batch) {
    if ((*batch)->active == 0 && !queue_.First((*batch)->lane, options_.device, 0)) continue;
    const double turn = admission_.Turn(*(*batch)->lane);
    if (next != batches_.end() && turn >= first_turn) continue;
    next = batch;
    first_turn = turn;
  }
  if (next != batches_.end()) DENOISED_RETURN_IF_ERROR(Admit(**next));
  // Other devices may have taken all that waited.
  const bool launched = next != batches_.end() && (*next)->active > 0;
  if (launched) {
    DENOISED_RETURN_IF_ERROR(Launch(**next));
    batches_.splice(batches_.end(), batches_, next);
  }
  // On the CPU an evaluation is done when Launch returns, so there is nothing to run ahead of.
  const size_t ahead = launched && backend_.device() != Device::kCpu ? kRunAhead : 0;
  while (evaluated_.size() > ahead) DENOISED_RETURN_IF_ERROR(Report());
  return absl::OkStatus();
}

/// Frees the slots of jobs that ended before their images were done.
void StepBatcher::FreeEnded() {
  for (const auto& batch : batches_)
    for (int slot = 0; slot < static_cast<int>(batch->slots.size()); ++slot)
      if (batch->slots[slot] && batch->slots[slot]->job->over) batch->Free(slot);
}

absl::Status StepBatcher::Admit(Batch& batch) {
  const bool whole_batches = options_.batching == Batching::kRequest;
  if (whole_batches && batch.active > 0) return absl::OkStatus();
  size_t may_park = whole_batches ? 0 : kParksPerEvaluation;
  int slot = 0;
  while (const auto job = queue_.First(batch.lane, options_.device, batch.rows)) {
    std::vector<int> victims;
    if (!batch.HasRoom(*job)) {
      may_park = std::min(may_park, RoomToPark(batch));
      victims = Victims(batch, *job, may_park);
      if (victims.empty()) break;
    }
    std::shared_ptr<Image> image = queue_.Take(job, options_.device);
    if (!image) continue;  // another device took it
    for (const int victim : victims) Park(batch, victim);
    may_park -= victims.size();
    if (!victims.empty()) slot = 0;
    while (batch.slots[slot]) ++slot;
    Begin(batch, slot, std::move(image));
  }
  if (batch.conditioner) DENOISED_RETURN_IF_ERROR(batch.conditioner->Encode());
  return BackendOf(batch.model).status();
}

/// The slots of images to park so that `job` has room: at most `most` images that come after it in
/// the order, the last first. Empty if that would not be enough.
std::vector<int> StepBatcher::Victims(const Batch& batch, const Job& job, size_t most) const {
  std::vector<int> victims;
  for (int slot = 0; slot < static_cast<int>(batch.slots.size()); ++slot) {
    const Image* image = batch.slots[slot].get();
    if (image && image->job->key() > job.key() &&
        image->evaluations_left() > options_.keep_evaluations)
      victims.push_back(slot);
  }
  // Within one job, the image with the most evaluations left goes last.
  const auto later = [&](int a, int b) {
    const Image &first = *batch.slots[a], &second = *batch.slots[b];
    return std::pair(first.job->key(), first.evaluations_left()) >
           std::pair(second.job->key(), second.evaluations_left());
  };
  most = std::min(most, victims.size());
  std::partial_sort(victims.begin(), victims.begin() + static_cast<std::ptrdiff_t>(most),
                    victims.end(), later);
  int rows = batch.rows;
  size_t parks = 0;
  const auto enough = [&] {
    return batch.active - static_cast<int>(parks) < static_cast<int>(batch.slots.size()) &&
           rows + job.rows() <= batch.model.max_rows &&
           // Parking may free no set: another image may have the same prompt.
           (!batch.conditioner || batch.conditioner->HasRoom(job.rows()));
  };
  while (!enough() && parks < most) rows -= batch.slots[victims[parks++]]->job->rows();
  victims.resize(enough() ? parks : 0);
  return victims;
}

/// How many more images may be parked within the limit of bytes.
size_t StepBatcher::RoomToPark(const Batch& batch) const {
  size_t under_way = parked_.size();
  for (const Evaluated& evaluated : evaluated_) under_way += evaluated.parked.size();
  const size_t room = admission_.RoomToPark(batch.evaluator->parked_bytes());
  return room - std::min(room, under_way);
}

void StepBatcher::Park(Batch& batch, int slot) {
  const std::shared_ptr<Image>& image = batch.slots[slot];
  image->parked = batch.evaluator->Park(slot);
  parked_.push_back(image);
  batch.Free(slot);
}

void StepBatcher::Begin(Batch& batch, int slot, std::shared_ptr<Image> image) {
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
    batch.evaluator->Resume(slot, start, image->evaluation, *parked);
  } else {
    batch.evaluator->Begin(slot, start);
  }
  queue_.Began(job);
  batch.Take(slot, std::move(image));
}

absl::Status StepBatcher::Launch(Batch& batch) {
  std::vector<EvaluationRow> rows;
  for (int s = 0; s < static_cast<int>(batch.slots.size()); ++s) {
    if (!batch.slots[s] || batch.Drawn(s)) continue;
    const Image& image = *batch.slots[s];
    const JobSpec& spec = image.job->effective.spec;
    int label = spec.class_labels.empty() ? 0 : spec.class_labels[image.index];
    int null_label = batch.model.null_label;
    if (batch.conditioner) {
      label = batch.sets[s].condition;
      null_label = batch.sets[s].negative;
    }
    const int row = static_cast<int>(rows.size());
    const bool guided = image.job->guided();
    rows.push_back(
        {.slot = s, .label = label, .unconditional_row = guided ? row + 1 : -1, .advances = 1});
    if (guided)
      rows.push_back({.slot = s, .label = null_label, .unconditional_row = -1, .advances = 0});
  }

  Evaluated evaluated{
      .model = batch.model.name, .lane = batch.lane, .rows = static_cast<int>(rows.size())};
  evaluated.parked.swap(parked_);
  Backend& backend = BackendOf(batch.model);
  evaluated.begin = backend.Mark();
  if (!rows.empty()) {
    const absl::StatusOr<int> bucket = batch.evaluator->Evaluate(rows);
    DENOISED_RETURN_IF_ERROR(bucket.status());
    evaluated.bucket = *bucket;
  }
  evaluated.end = backend.Mark();
  // Of every evaluation: a job ends at the same one alone as in company.
  evaluated.nonfinite = batch.evaluator->DownloadNonfinite();
  if (!rows.empty())
    evaluated.charge = admission_.Launched(*batch.lane, evaluated.rows, evaluated.bucket);

  for (int s = 0; s < static_cast<int>(batch.slots.size()); ++s) {
    const std::shared_ptr<Image> image = batch.slots[s];
    if (!image || batch.Drawn(s)) continue;
    Job& job = *image->job;
    const JobSpec& spec = job.effective.spec;
    const std::vector<DeviceEvaluation>& plan = job.plan();
    job.rows_launched += job.rows();
    const int done = ++image->evaluation;
    Evaluated::Row row{.image = image, .slot = s, .evaluation = done};
    if (done == static_cast<int>(plan.size())) {
      batch.Finish(s);
    } else if (spec.previews && done % spec.preview_every == 0) {
      if (spec.preview_kind == PreviewKind::kPredictedX0) {
        row.preview = batch.evaluator->DownloadX0(s);
      } else {
        row.preview = batch.evaluator->DownloadState(s);
        row.preview_scale = plan[done].input_scale;
      }
    }
    evaluated.images.push_back(std::move(row));
  }
  // Pixels need no decoding, so they leave at once.
  size_t most = batch.model.codec ? kDecodesPerEvaluation : batch.drawn.size();
  for (; most > 0 && !batch.drawn.empty(); --most) {
    const int s = batch.drawn.front();
    const std::shared_ptr<Image> image = batch.slots[s];
    auto row = std::find_if(evaluated.images.begin(), evaluated.images.end(),
                            [&](const auto& each) { return each.slot == s; });
    if (row == evaluated.images.end())
      row = evaluated.images.insert(row,
                                    {.image = image, .slot = s, .evaluation = image->evaluation});
    DENOISED_ASSIGN_OR_RETURN(row->result, batch.evaluator->DownloadImage(s));
    if (batch.model.codec) admission_.LaunchedDecode(*batch.lane);
    queue_.Drawn(image);
    batch.Free(s);
  }
  evaluated.done = backend.Mark();
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
    ends.push_back(evaluated_[i].done.get());
    indices.push_back(i);
  }
  const auto next = evaluated_.begin() + static_cast<std::ptrdiff_t>(indices[FirstReached(ends)]);
  DENOISED_RETURN_IF_ERROR(next->done->Wait());
  Evaluated evaluated = std::move(*next);
  evaluated_.erase(next);
  return evaluated;
}

absl::Status StepBatcher::Report() {
  DENOISED_ASSIGN_OR_RETURN(Evaluated evaluated, NextToEnd());
  // Time in which two models were evaluated is split between them, so that the seconds of
  // evaluations never add up to more than the time that passed.
  const auto ran = [&](const Evaluated& each) {  // since the end that was reported last
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
  if (evaluated.rows > 0)
    admission_.Measured(*evaluated.lane, evaluated.bucket, seconds, &evaluated.charge);
  if (observer_ && evaluated.rows > 0)
    observer_->OnEvaluation(evaluated.model, device_name_, evaluated.rows, evaluated.bucket,
                            seconds);
  for (const auto& image : evaluated.parked) {
    DENOISED_RETURN_IF_ERROR(image->parked->Arrive());
    queue_.Requeue(image);
  }

  DENOISED_ASSIGN_OR_RETURN(const Tensor nonfinite, evaluated.nonfinite->Wait());
  std::vector<JobQueue::Outcome> outcomes;
  for (Evaluated::Row& row : evaluated.images) {
    const Image& image = *row.image;
    if (image.job->over) continue;
    outcomes.push_back({.image = row.image, .evaluation = row.evaluation});
    const JobSpec& spec = image.job->effective.spec;
    ImageResult result{.index = image.index, .seed = spec.SeedOf(image.index)};
    if (!spec.class_labels.empty()) result.label = spec.class_labels[image.index];
    const int first_nonfinite = nonfinite.as<int32_t>()[row.slot];
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
    if (row.result && !options_.allow_nonfinite && !AllFinite(result.pixels)) {
      // The state was finite: the codec made it so.
      if (observer_) observer_->OnNonfiniteImage(evaluated.model, device_name_);
      outcomes.back().error =
          NonfiniteImage(image.job->effective, result, image.job->effective.evaluations);
      continue;
    }
    if (row.preview) {
      for (float& value : result.pixels.span<float>()) value *= row.preview_scale;
      if (const auto model = models_.find(evaluated.model); model->second.codec)
        result.pixels = model->second.preview.Draw(result.pixels);
    }
    (row.result ? outcomes.back().result : outcomes.back().preview) = std::move(result);
  }
  queue_.Report(std::move(outcomes));
  return absl::OkStatus();
}

}  // namespace denoised
