// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/step_batcher.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>
#include <tuple>

#include "engine/batching/first_reached.h"

namespace denoised {
namespace {

// Evaluations that may be queued on the device while the host reports an earlier one: enough to
// keep the device from waiting for the host, few enough for a cancellation to take effect at the
// next one.
constexpr size_t kRunAhead = 1;

// Evaluations that may be unreported at a time. Each may have a download under way for every slot.
constexpr int kUnderWay = static_cast<int>(kRunAhead) + 1;

// Images that may lose their slot before one evaluation. There is a limit because their copies
// delay the evaluation.
constexpr int kParksPerEvaluation = 4;

// Condition sets of a model beyond those that the rows of one evaluation use.
constexpr int kCachedPrompts = 16;

// Previews that a small autoencoder decodes after one evaluation. If more images want one, they
// take turns.
constexpr int kPreviewsPerEvaluation = 8;

// The memory for slots of all other sizes, as a multiple of the memory for slots of the model's own
// size; and the share of what is left of it that a new size takes. So the first other size has as
// many slots as the model's own, and each of forty sizes has at least four.
constexpr double kSizesMemory = 12, kSizeShare = 1.0 / 12;
constexpr int kLeastSlots = 4;

/// DataLoss and not Internal: gRPC itself reports transport faults as Internal, and a client may
/// retry these, but never DataLoss. A retry would draw the same image, since the same request has
/// the same bits.
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
  // To the end: GCC does not vectorise a loop that may stop early, and the client waits for it.
  int nonfinite = 0;
  for (const float value : pixels.span<float>()) nonfinite |= std::isfinite(value) ? 0 : 1;
  return nonfinite == 0;
}

}  // namespace

/// A run on the device of a stage other than evaluations.
struct StepBatcher::StageRun {
  Stage stage;
  int count = 0;                               // prompts, or images
  CapturedRun::Ran ran;                        // null: it took no time
  std::vector<std::shared_ptr<Image>> images;  // the images that it was for
  std::vector<std::shared_ptr<Image>> others;  // those whose prompts or pictures were kept
};

/// An image that takes a slot.
struct StepBatcher::Starting {
  std::shared_ptr<Image> image;
  Evaluator::Start start;
  std::vector<InitImages::Picture> pictures;  // that it needs encoded
};

/// The images of one lane that are in flight on this device, with the memory for them.
struct StepBatcher::Batch {
  BatchedModel model;
  int height = 0, width = 0;         // pixels
  JobQueue::Clock::time_point used;  // when it had an image last
  std::vector<StageRun> runs;        // since the last launch
  int previewed = 0;                 // the slot whose preview was decoded last
  bool first_size = false;           // the model's own size, never evicted
  std::unique_ptr<Evaluator> evaluator;
  std::shared_ptr<Admission::Lane> lane;
  std::vector<std::shared_ptr<Image>> slots;  // null: free
  Conditioner* conditioner = nullptr;         // null: the model reads no text
  struct Sets {
    int condition = -1, negative = -1;
  };
  std::vector<Sets> sets;    // by slot: the condition sets of its image
  std::deque<int> drawn;     // slots of images that only wait to be decoded
  int active = 0, rows = 0;  // images in slots, and the rows of those that are not drawn
  int prompts = 0;           // prompts of images that took a slot since the last launch

  bool HasRoom(const Job& job) const {
    return active < static_cast<int>(slots.size()) && rows + job.rows() <= evaluator->max_rows() &&
           (!conditioner || conditioner->HasRoom(job.prompts()));
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
  /// The slot's image needs no more rows and no longer reads its prompts.
  void Finish(int slot) {
    rows -= slots[slot]->job->rows();
    drawn.push_back(slot);
    ReleaseSets(slot);
  }
  void Free(int slot) {
    --active;
    if (Drawn(slot)) {
      std::erase(drawn, slot);
    } else {
      rows -= slots[slot]->job->rows();
    }
    ReleaseSets(slot);
    slots[slot].reset();
  }
  void ReleaseSets(int slot) {
    for (int* const set : {&sets[slot].condition, &sets[slot].negative})
      if (*set >= 0) conditioner->Release(std::exchange(*set, -1));
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
    bool tiny_preview = false;  // its preview is decoded already
  };

  std::string model;
  std::shared_ptr<Admission::Lane> lane;
  Admission::Charge charge;
  int rows = 0, bucket = 0;
  CapturedRun::Ran ran;          // of the evaluation
  std::unique_ptr<Marker> done;  // of images that were decoded after it
  std::vector<StageRun> runs;    // before and after it
  int known_prompts = 0, made_prompts = 0;
  double seconds = 0;  // its part of the device's time until the evaluation reported last
  std::vector<Row> images;
  std::unique_ptr<Download> nonfinite;         // by slot
  std::vector<std::shared_ptr<Image>> parked;  // before this evaluation
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

/// What `take` returns, which takes memory. While there is too little, idle sizes of any model are
/// evicted.
template <typename Take>
auto StepBatcher::MakingRoom(Take take) -> decltype(take()) {
  auto taken = take();
  while (absl::IsResourceExhausted(taken.status()) && EvictIdleBatch(nullptr)) taken = take();
  return taken;
}

absl::Status StepBatcher::AddModel(const BatchedModel& model, int height, int width) {
  if (!model.text_encoders.models.empty()) {
    // A row has one set, so max_rows sets suffice for the images in flight at one size. The rest is
    // cache.
    DENOISED_ASSIGN_OR_RETURN(auto conditioner, MakingRoom([&] {
                                return Conditioner::Create(BackendOf(model), model.denoiser,
                                                           model.text_encoders,
                                                           model.max_rows + kCachedPrompts);
                              }));
    conditioners_[model.name] = std::move(conditioner);
  }
  auto batch = MakingRoom([&] { return MakeBatch(model, height, width, model.slots); });
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
  Batch& batch = OwnSizeOf(model);
  // Nothing may run beside what is measured, not even decodes. What other threads do, such as
  // packing a model, cannot be excluded: therefore the shortest run counts (WarmRuns).
  for (const Evaluated& evaluated : evaluated_) DENOISED_RETURN_IF_ERROR(evaluated.done->Wait());
  if (batch.conditioner && !batch.conditioner->warm()) {
    DENOISED_ASSIGN_OR_RETURN(const auto seconds, batch.conditioner->WarmUp());
    if (seconds) admission_.MeasuredStage(*batch.lane, Stage::kCondition, 1, *seconds, false);
    return true;
  }
  DENOISED_ASSIGN_OR_RETURN(const Evaluator::Warmed warmed, batch.evaluator->WarmUp());
  if (warmed.stage == Stage::kDenoise) {
    admission_.Measured(*batch.lane, warmed.count, warmed.seconds);
  } else {
    admission_.MeasuredStage(*batch.lane, warmed.stage, warmed.count, warmed.seconds, false);
  }
  return warmed.more;
}

StepBatcher::Batch& StepBatcher::OwnSizeOf(const std::string& model) {
  const auto batch = std::find_if(batches_.begin(), batches_.end(), [&](const auto& each) {
    return each->model.name == model && each->first_size;
  });
  DENOISED_CHECK(batch != batches_.end(), "model {}", model);
  return **batch;
}

absl::Status StepBatcher::RemoveModel(const std::string& model) {
  // Its last evaluation may still run on the device, though nobody waits for its result.
  absl::Status status;
  if (const auto known = models_.find(model); known != models_.end())
    status = BackendOf(known->second).Synchronize();
  std::erase_if(evaluated_, [&](const auto& evaluated) { return evaluated.model == model; });
  std::erase_if(batches_, [&](const auto& batch) { return batch->model.name == model; });
  conditioners_.erase(model);
  models_.erase(model);
  queue_.RemoveModel(model, options_.device);
  return status;
}

/// Takes memory for a size that was asked for. If sizes that are in use leave too little, its jobs
/// wait until one of them is idle. If there is none, or they have waited long, the jobs that no
/// device can draw end with ResourceExhausted. False if there was nothing to do.
absl::StatusOr<bool> StepBatcher::OpenSizes() {
  for (const auto& batch : batches_)
    if (IsIdle(*batch)) queue_.MayHaveRoom(options_.device, batch->model.name);
  const auto size = queue_.ToOpen(options_.device);
  if (!size) return false;
  const BatchedModel& model = models_.at(size->model);
  const int slots = SlotsOfNewSize(*size);
  absl::StatusOr<std::unique_ptr<Batch>> batch;
  if (slots > 0)
    batch = MakingRoom([&] { return MakeBatch(model, size->height, size->width, slots); });
  DENOISED_RETURN_IF_ERROR(this->status());
  // MakingRoom() has evicted what was idle.
  const bool others_in_use = std::any_of(batches_.begin(), batches_.end(),
                                         [](const auto& other) { return !other->first_size; });
  if (slots == 0 || (absl::IsResourceExhausted(batch.status()) && others_in_use && !size->waited)) {
    queue_.OpenLater(*size, options_.device,
                     slots == 0 ? JobQueue::Lack::kShare : JobQueue::Lack::kMemory);
    return true;
  }
  const absl::Status status = batch.status();
  if (status.ok()) batches_.push_back(*std::move(batch));
  queue_.Opened(*size, options_.device, status);
  return true;
}

/// How many images in flight a size other than the model's own gets, so that the memory of all such
/// sizes stays within bounds. Idle sizes are evicted to make room. 0: those in use leave too
/// little; it may have more than the budget when it has waited for that.
int StepBatcher::SlotsOfNewSize(const JobQueue::Size& size) {
  const Batch& own = OwnSizeOf(size.model);
  const double of_own = static_cast<double>(own.evaluator->slot_bytes()),
               pixels = static_cast<double>(int64_t{size.height} * size.width),
               own_pixels = static_cast<double>(int64_t{own.height} * own.width),
               slot = of_own / own.model.slots * std::max(1.0, pixels / own_pixels);
  const int least = std::min(kLeastSlots, own.model.slots);
  bool others = false;
  const auto left = [&] {
    double bytes = kSizesMemory * of_own;
    others = false;
    for (const auto& batch : batches_) {
      if (batch->model.name != size.model || batch->first_size) continue;
      others = true;
      bytes -= static_cast<double>(batch->evaluator->slot_bytes());
    }
    return bytes;
  };
  while (left() < least * slot && EvictIdleBatch(&size.model)) {
  }
  if (others && !size.waited && left() < least * slot) return 0;
  return std::clamp(static_cast<int>(kSizeShare * left() / slot), least, own.model.slots);
}

absl::StatusOr<std::unique_ptr<StepBatcher::Batch>> StepBatcher::MakeBatch(
    const BatchedModel& model, int height, int width, int slots) {
  auto batch = std::make_unique<Batch>();
  batch->model = model;
  batch->height = height;
  batch->width = width;
  batch->used = queue_.Now();
  if (const auto known = conditioners_.find(model.name); known != conditioners_.end())
    batch->conditioner = known->second.get();
  const int factor = model.codec ? model.codec->traits().factor : 1;
  Evaluator::Options options{.height = height / factor,
                             .width = width / factor,
                             .max_rows = model.max_rows,
                             .slots = slots,
                             .max_evaluations = model.max_evaluations,
                             .downloads = kUnderWay * slots,
                             .flag_downloads = kUnderWay,
                             .parks = kUnderWay * kParksPerEvaluation,
                             .decodes = kUnderWay,
                             .previews = kUnderWay * std::min(slots, kPreviewsPerEvaluation),
                             .codec = model.codec,
                             .max_images = model.max_images,
                             .preview_codec = model.preview_codec,
                             .image_input = model.image_input,
                             .measures_outputs = model.measures_outputs};
  if (const bool own_size = !models_.contains(model.name); !own_size) {
    options.activations = OwnSizeOf(model.name).evaluator->activations();
    options.max_images = 1;
  }
  if (batch->conditioner) options.sets = batch->conditioner->sets();
  DENOISED_ASSIGN_OR_RETURN(batch->evaluator,
                            Evaluator::Create(BackendOf(model), model.denoiser, options));
  batch->slots.resize(slots);
  batch->sets.resize(slots);
  batch->lane = admission_.Open(model.name, height, width,
                                {.rows = batch->evaluator->max_rows(),
                                 .slots = slots,
                                 .buckets = batch->evaluator->buckets()});
  return batch;
}

/// Whether it is of a size other than the model's own, and has no image in flight.
bool StepBatcher::IsIdle(const Batch& batch) const {
  return !batch.first_size && batch.active == 0 &&
         std::none_of(evaluated_.begin(), evaluated_.end(),
                      [&](const auto& evaluated) { return evaluated.lane == batch.lane; });
}

/// Whether a size waits for room, and another one is idle that may give it.
bool StepBatcher::CanMakeRoom() const {
  return std::any_of(batches_.begin(), batches_.end(), [this](const auto& batch) {
    return IsIdle(*batch) && queue_.WaitsForRoom(options_.device, batch->model.name);
  });
}

/// Frees the least recently used idle batch of `model`, or of any model if it is null, whose size
/// is not the model's own. False if there is none.
bool StepBatcher::EvictIdleBatch(const std::string* model) {
  for (auto batch = batches_.begin(); batch != batches_.end(); ++batch) {
    const Batch& candidate = **batch;
    if (!IsIdle(candidate) || (model && candidate.model.name != *model) ||
        !queue_.Close(candidate.lane, options_.device))
      continue;
    // The next Step returns the error.
    if (!BackendOf(candidate.model).Synchronize().ok()) return false;
    batches_.erase(batch);
    return true;
  }
  return false;
}

bool StepBatcher::EvictIdle() {
  bool any = false;
  while (EvictIdleBatch(nullptr)) any = true;
  return any;
}

std::optional<JobQueue::Clock::time_point> StepBatcher::NextEviction() const {
  std::optional<JobQueue::Clock::time_point> next;
  for (const auto& batch : batches_)
    if (!batch->first_size && batch->active == 0)
      next = std::min(next.value_or(batch->used + kUnused), batch->used + kUnused);
  return next;
}

void StepBatcher::EvictUnused() {
  const auto before = queue_.Now() - kUnused;
  for (const auto& batch : batches_) {
    if (batch->first_size || batch->active > 0 || batch->used > before) continue;
    // The list is in the order of use, so this evicts that batch or another one as old. If jobs
    // wait for all of them, they are about to be used.
    if (!EvictIdleBatch(&batch->model.name)) batch->used = queue_.Now();
    return;
  }
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
  return bytes;
}

size_t StepBatcher::PromptBytes(const std::string& model) const {
  const auto known = conditioners_.find(model);
  return known == conditioners_.end() ? 0 : known->second->bytes();
}

bool StepBatcher::busy() const {
  return !evaluated_.empty() || queue_.HasWork(options_.device) || CanMakeRoom() ||
         std::any_of(batches_.begin(), batches_.end(),
                     [](const auto& batch) { return batch->active; });
}

absl::Status StepBatcher::Step() {
  queue_.EndDueJobs();
  FreeEnded();
  EvictUnused();
  DENOISED_ASSIGN_OR_RETURN(const bool opened, OpenSizes());
  if (opened && options_.part_done) options_.part_done();
  std::vector<std::pair<double, std::list<std::unique_ptr<Batch>>::iterator>> turns;
  for (auto batch = batches_.begin(); batch != batches_.end(); ++batch) {
    if ((*batch)->active == 0 && !queue_.First((*batch)->lane, options_.device, 0)) continue;
    turns.emplace_back(admission_.Turn(*(*batch)->lane), batch);
  }
  std::stable_sort(turns.begin(), turns.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  // The first lane may have nothing to launch, because other devices took all its images, or
  // because other sizes hold the condition sets that its images need, until their evaluations are
  // done.
  auto next = batches_.end();
  for (const auto& [turn, batch] : turns) {
    DENOISED_RETURN_IF_ERROR(Admit(**batch));
    if ((*batch)->active == 0) continue;
    next = batch;
    break;
  }
  const bool launched = next != batches_.end();
  if (launched) {
    DENOISED_RETURN_IF_ERROR(Launch(**next));
    (*next)->used = queue_.Now();
    batches_.splice(batches_.end(), batches_, next);
  }
  const bool runs_ahead = backend_.capabilities().runs_ahead;
  const size_t ahead = launched && runs_ahead ? kRunAhead : 0;
  while (evaluated_.size() > ahead) DENOISED_RETURN_IF_ERROR(Report());
  return absl::OkStatus();
}

/// Frees the slots of jobs that ended before their images were done.
void StepBatcher::FreeEnded() {
  for (const auto& batch : batches_)
    for (int slot = 0; slot < static_cast<int>(batch->slots.size()); ++slot)
      if (batch->slots[slot] && batch->slots[slot]->job->over) batch->Free(slot);
}

/// Whether images may join those in flight.
bool StepBatcher::Admits(const Batch& batch) const {
  return options_.batching == Batching::kStep || batch.active == 0;
}

absl::Status StepBatcher::Admit(Batch& batch) {
  if (!Admits(batch)) return absl::OkStatus();
  size_t may_park = options_.batching == Batching::kRequest ? 0 : kParksPerEvaluation;
  int slot = 0;
  std::vector<int> begun, taken;  // slots; those taken do not have their images yet
  // Encoding init images delays the evaluations that could run without them: by the time of the
  // longest of these, or by one picture.
  std::set<JobId> encoding;   // jobs whose pictures are not kept
  int pictures = 0;           // of these jobs
  int ready = batch.rows;     // rows of images that need no picture
  const auto longest = [&] {  // seconds; 0: none could run
    double seconds = ready > 0 ? admission_.Cost(*batch.lane, ready) : 0;
    for (const auto& each : batches_)
      if (each.get() != &batch && each->rows > 0)
        seconds = std::max(seconds, admission_.Cost(*each->lane, each->rows));
    return seconds;
  };
  while (const auto job = queue_.First(batch.lane, options_.device, batch.rows)) {
    const int missing = encoding.contains(job->id) ? 0 : MissingPictures(batch, *job);
    if (missing > 0 && pictures > 0) {
      const double encode = admission_.StageCost(*batch.lane, Stage::kEncode), allowed = longest();
      if (allowed > 0 && (pictures + missing) * encode > allowed) break;
    }
    std::vector<int> victims;
    if (!batch.HasRoom(*job)) {
      may_park = std::min(may_park, RoomToPark(batch));
      victims = Victims(batch, *job, may_park);
      if (victims.empty()) break;
    }
    std::shared_ptr<Image> image = queue_.Take(job, options_.device);
    if (!image) continue;  // another device took it
    if (!victims.empty()) DENOISED_RETURN_IF_ERROR(Begin(batch, std::exchange(taken, {})));
    for (const int victim : victims) {
      Park(batch, victim);
      std::erase(begun, victim);  // the slot may have begun just now
    }
    may_park -= victims.size();
    if (!victims.empty()) slot = 0;
    while (batch.slots[slot]) ++slot;
    queue_.Began(*job);
    batch.Take(slot, std::move(image));
    begun.push_back(slot);
    taken.push_back(slot);
    if (missing > 0) {
      encoding.insert(job->id);
      pictures += missing;
    } else if (!encoding.contains(job->id)) {
      ready += job->rows();
    }
  }
  DENOISED_RETURN_IF_ERROR(Begin(batch, taken));
  if (batch.conditioner && !begun.empty()) {
    StageRun run{.stage = Stage::kCondition};
    for (const int each : begun) {
      const Batch::Sets& sets = batch.sets[each];
      const bool made = batch.conditioner->Pending(sets.condition) ||
                        (sets.negative >= 0 && batch.conditioner->Pending(sets.negative));
      (made ? run.images : run.others).push_back(batch.slots[each]);
      batch.prompts += sets.negative >= 0 ? 2 : 1;
    }
    DENOISED_ASSIGN_OR_RETURN(run.count, batch.conditioner->Encode(&run.ran));
    batch.runs.push_back(std::move(run));
  }
  return BackendOf(batch.model).status();
}

/// The slots of the images to park to make room for `job`: at most `most` images that come after it
/// in the order, the last one first. Empty if that would not be enough.
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
           rows + job.rows() <= batch.evaluator->max_rows() &&
           // Parking may free no set: another image may have the same prompt.
           (!batch.conditioner || batch.conditioner->HasRoom(job.prompts()));
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

Evaluator::Start StepBatcher::StartOf(Job& job, int image) {
  const JobSpec& spec = job.effective.spec;
  const StepPlan& plan = *job.effective.plan;
  Evaluator::Start start;
  start.plan = &job.plan();
  start.seed = spec.SeedOf(image);
  start.guidance = {.scale = static_cast<float>(*spec.guidance_scale),
                    .image_scale = static_cast<float>(spec.image_guidance_scale.value_or(1)),
                    .rescale = static_cast<float>(spec.guidance_rescale.value_or(0))};
  if (!spec.class_values.empty()) {
    const size_t size = spec.class_values.size() / job.count();
    start.embedding = std::span(spec.class_values).subspan(image * size, size);
  }
  if (spec.init_image) start.source = spec.init_image.as<float>();
  start.source_id = job.id;
  if (spec.mask) start.mask = spec.mask.as<float>();
  if (spec.initial_noise) start.noise = spec.initial_noise.Slice(image, 1).as<float>();
  start.source_scale = static_cast<float>(plan.initial_source_scale);
  start.noise_scale = static_cast<float>(plan.initial_noise_scale);
  start.churn_scale = static_cast<float>(plan.initial_churn_scale);
  start.shift = static_cast<float>(plan.initial_shift);
  return start;
}

/// How many pictures the job's images need encoded that are not kept.
int StepBatcher::MissingPictures(Batch& batch, Job& job) {
  if (!job.effective.spec.init_image) return 0;
  int missing = 0;
  for (const InitImages::Picture& picture : batch.evaluator->PicturesOf(StartOf(job, 0)))
    missing += batch.evaluator->init_images().Keeps(picture) ? 0 : 1;
  return missing;
}

/// Puts the images of these slots there. First their init images are encoded, for as many images at
/// a time as have room among the pictures that are kept.
absl::Status StepBatcher::Begin(Batch& batch, const std::vector<int>& slots) {
  for (size_t first = 0; first < slots.size();) {
    std::vector<Starting> starting;
    std::set<std::pair<uint64_t, bool>> keys;
    for (size_t i = first; i < slots.size(); ++i) {
      Starting next{.image = batch.slots[slots[i]]};
      next.start = StartOf(*next.image->job, next.image->index);
      next.start.parked = next.image->parked.get();
      next.start.evaluations_done = next.image->evaluation;
      next.pictures = batch.evaluator->PicturesOf(next.start);
      for (const InitImages::Picture& picture : next.pictures) keys.insert(picture.key());
      if (keys.size() > InitImages::kKept) break;
      starting.push_back(std::move(next));
    }
    if (!keys.empty()) DENOISED_RETURN_IF_ERROR(Encode(batch, starting));
    for (const Starting& each : starting) {
      batch.evaluator->Begin(slots[first++], each.start);
      each.image->parked.reset();
    }
  }
  return absl::OkStatus();
}

/// Encodes the pictures of these images that are not kept.
absl::Status StepBatcher::Encode(Batch& batch, const std::vector<Starting>& starting) {
  InitImages& init_images = batch.evaluator->init_images();
  std::vector<InitImages::Picture> pictures;
  StageRun known{.stage = Stage::kEncode};
  const auto missing = [&](const Starting& image) {
    return std::count_if(image.pictures.begin(), image.pictures.end(),
                         [&](const auto& picture) { return !init_images.Keeps(picture); });
  };
  std::vector<ptrdiff_t> left;
  for (const Starting& each : starting) {
    pictures.insert(pictures.end(), each.pictures.begin(), each.pictures.end());
    left.push_back(missing(each));
    if (left.back() == 0 && !each.pictures.empty()) known.others.push_back(each.image);
  }
  if (!known.others.empty()) batch.runs.push_back(std::move(known));
  while (true) {
    StageRun run{.stage = Stage::kEncode};
    DENOISED_ASSIGN_OR_RETURN(run.count, init_images.EncodeNext(pictures, &run.ran));
    if (run.count == 0) return absl::OkStatus();
    for (size_t i = 0; i < starting.size(); ++i) {
      const ptrdiff_t now = missing(starting[i]);
      if (now < std::exchange(left[i], now)) run.images.push_back(starting[i].image);
    }
    batch.runs.push_back(std::move(run));
  }
}

/// The slots of the images that the next evaluation advances: all that are not drawn, or, if these
/// would be padded, the first in the order that fit into the next smaller bucket, where that and
/// the rest take less time by what was measured. Where the device is full, eight rows and then
/// three take less time than eleven padded to sixteen, and eight images end sooner.
std::vector<int> StepBatcher::Chosen(const Batch& batch) const {
  std::vector<int> all;
  const auto rows_of = [&](int slot) {
    const Image& image = *batch.slots[slot];
    return image.job->effective.RowsAt(image.evaluation);
  };
  int rows = 0;
  for (int slot = 0; slot < static_cast<int>(batch.slots.size()); ++slot) {
    if (!batch.slots[slot] || batch.Drawn(slot)) continue;
    all.push_back(slot);
    rows += rows_of(slot);
  }
  const std::vector<int>& buckets = batch.evaluator->buckets();
  const auto above = std::lower_bound(buckets.begin(), buckets.end(), rows);
  if (options_.batching != Batching::kStep || all.size() < 2 || *above == rows) return all;

  std::vector<int> order = all;
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const Image &first = *batch.slots[a], &second = *batch.slots[b];
    return std::tuple(first.job->key(), first.evaluations_left(), a) <
           std::tuple(second.job->key(), second.evaluations_left(), b);
  });
  const int bucket = *std::prev(above);  // two images have more rows than the smallest
  if (rows_of(order.front()) > bucket) return all;
  std::vector<int> fit;
  int taken = 0;
  for (const int slot : order) {
    if (taken + rows_of(slot) > bucket) continue;
    taken += rows_of(slot);
    fit.push_back(slot);
  }
  const double apart =
      admission_.Cost(*batch.lane, bucket) + LeastSeconds(*batch.lane, buckets, rows - taken);
  return apart < admission_.Cost(*batch.lane, rows) ? fit : all;
}

/// Expected seconds of so many rows, in one evaluation or in several, whichever takes less.
double StepBatcher::LeastSeconds(const Admission::Lane& lane, const std::vector<int>& buckets,
                                 int rows) const {
  const double together = admission_.Cost(lane, rows);
  const auto above = std::lower_bound(buckets.begin(), buckets.end(), rows);
  if (above == buckets.begin() || *above == rows) return together;
  const int bucket = *std::prev(above);
  return std::min(together,
                  admission_.Cost(lane, bucket) + LeastSeconds(lane, buckets, rows - bucket));
}

absl::Status StepBatcher::Launch(Batch& batch) {
  const std::vector<int> chosen = Chosen(batch);
  std::vector<EvaluationRow> rows;
  for (const int s : chosen) {
    const Image& image = *batch.slots[s];
    const JobSpec& spec = image.job->effective.spec;
    int label = spec.class_labels.empty() ? 0 : spec.class_labels[image.index];
    int null_label = batch.model.null_label;
    if (batch.conditioner) {
      label = batch.sets[s].condition;
      null_label = batch.sets[s].negative;
    }
    const int row = static_cast<int>(rows.size());
    const int branches = image.job->effective.RowsAt(image.evaluation);
    rows.push_back({.slot = s,
                    .label = label,
                    .unconditional_row = branches > 1 ? row + 1 : -1,
                    .advances = 1,
                    .imageless_row = branches > 2 ? row + 2 : -1});
    for (int branch = 1; branch < branches; ++branch)
      rows.push_back({.slot = s,
                      .label = null_label,
                      .unconditional_row = -1,
                      .advances = 0,
                      .no_extra = branch == 2});
  }

  Evaluated evaluated{
      .model = batch.model.name, .lane = batch.lane, .rows = static_cast<int>(rows.size())};
  evaluated.parked.swap(parked_);
  evaluated.runs = std::exchange(batch.runs, {});
  for (const StageRun& run : evaluated.runs)
    if (run.stage == Stage::kCondition) evaluated.made_prompts += run.count;
  evaluated.known_prompts = std::exchange(batch.prompts, 0) - evaluated.made_prompts;
  Backend& backend = BackendOf(batch.model);
  if (rows.empty()) {
    evaluated.ran = {backend.Mark(), backend.Mark()};
  } else {
    DENOISED_ASSIGN_OR_RETURN(evaluated.bucket, batch.evaluator->Evaluate(rows, &evaluated.ran));
  }
  // After every evaluation, so that a job ends at the same evaluation alone and in any batch.
  evaluated.nonfinite = batch.evaluator->DownloadNonfinite();
  if (!rows.empty())
    evaluated.charge = admission_.Launched(*batch.lane, evaluated.rows, evaluated.bucket);

  for (const int s : chosen) {
    const std::shared_ptr<Image> image = batch.slots[s];
    Job& job = *image->job;
    const JobSpec& spec = job.effective.spec;
    const std::vector<DeviceEvaluation>& plan = job.plan();
    image->Launched();
    const int done = image->evaluation;
    Evaluated::Row row{.image = image, .slot = s, .evaluation = done};
    if (done == static_cast<int>(plan.size())) {
      batch.Finish(s);
    } else if (spec.previews && done % spec.preview_every == 0) {
      if (spec.preview_kind == PreviewKind::kNoisyState)
        row.preview_scale = static_cast<float>(job.effective.plan->preview_scale[done]);
      if (batch.model.preview_codec && spec.preview_decoder != PreviewDecoder::kLinear) {
        row.tiny_preview = true;  // see Preview()
      } else {
        row.preview = spec.preview_kind == PreviewKind::kPredictedX0
                          ? batch.evaluator->DownloadX0(s)
                          : batch.evaluator->DownloadState(s);
      }
    }
    evaluated.images.push_back(std::move(row));
  }
  DENOISED_RETURN_IF_ERROR(Preview(batch, &evaluated));
  DENOISED_RETURN_IF_ERROR(Decode(batch, &evaluated));
  evaluated.done = backend.Mark();
  evaluated_.push_back(std::move(evaluated));
  return absl::OkStatus();
}

/// Decodes previews with the small autoencoder, beginning after the slot that had the last turn.
absl::Status StepBatcher::Preview(Batch& batch, Evaluated* evaluated) {
  std::vector<Evaluated::Row*> rows;
  for (Evaluated::Row& row : evaluated->images)
    if (row.tiny_preview) rows.push_back(&row);
  const auto turn = [&](const Evaluated::Row* row) {
    return std::pair(row->slot <= batch.previewed, row->slot);
  };
  std::sort(rows.begin(), rows.end(), [&](auto* a, auto* b) { return turn(a) < turn(b); });
  if (static_cast<int>(rows.size()) > kPreviewsPerEvaluation) rows.resize(kPreviewsPerEvaluation);
  for (Evaluated::Row* row : rows) {
    const bool predicted =
        row->image->job->effective.spec.preview_kind == PreviewKind::kPredictedX0;
    DENOISED_ASSIGN_OR_RETURN(
        row->preview, batch.evaluator->DownloadPreview(row->slot, predicted, row->preview_scale));
    row->preview_scale = 1;
    batch.previewed = row->slot;
  }
  return absl::OkStatus();
}

/// Whether an evaluation could be launched now. Images that wait for slots do not count if the
/// slots are taken by images that wait to be decoded.
bool StepBatcher::EvaluationsWait() const {
  return std::any_of(batches_.begin(), batches_.end(), [&](const auto& batch) {
    if (batch->rows > 0) return true;
    if (!Admits(*batch)) return false;
    const auto job = queue_.First(batch->lane, options_.device, 0);
    return job && batch->HasRoom(*job);
  });
}

/// Pixels need no decoding, so these images leave at once. Latents are decoded: as many images as
/// take no longer than the evaluation, but at least one. If no evaluation could run before slots
/// are free, max_images images are decoded; if no work waits at all, as many as is fastest per
/// image, so that each image is reported soon.
absl::Status StepBatcher::Decode(Batch& batch, Evaluated* evaluated) {
  if (batch.drawn.empty()) return absl::OkStatus();
  const bool evaluations_wait = EvaluationsWait();
  std::vector<int> calls =
      batch.evaluator->Decodes(static_cast<int>(batch.drawn.size()),
                               evaluations_wait ? evaluated->charge.seconds : INFINITY);
  if (!evaluations_wait && !queue_.HasWork(options_.device)) calls.resize(1);
  for (const int count : calls) DENOISED_RETURN_IF_ERROR(DecodeNext(batch, count, evaluated));
  return absl::OkStatus();
}

/// Decodes the first `count` of the waiting images together.
absl::Status StepBatcher::DecodeNext(Batch& batch, int count, Evaluated* evaluated) {
  const std::vector<int> slots(batch.drawn.begin(), batch.drawn.begin() + count);
  StageRun run{.stage = Stage::kDecode, .count = count};
  DENOISED_ASSIGN_OR_RETURN(auto downloads, batch.evaluator->DownloadImages(slots, &run.ran));
  for (int i = 0; i < count; ++i) {
    const int s = slots[i];
    const std::shared_ptr<Image> image = batch.slots[s];
    auto row = std::find_if(evaluated->images.begin(), evaluated->images.end(),
                            [&](const auto& each) { return each.slot == s; });
    if (row == evaluated->images.end())
      row = evaluated->images.insert(row,
                                     {.image = image, .slot = s, .evaluation = image->evaluation});
    row->result = std::move(downloads[i]);
    run.images.push_back(image);
    queue_.Drawn(image);
    batch.Free(s);
  }
  if (batch.model.codec) evaluated->runs.push_back(std::move(run));
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
    double seconds = evaluated.ran.end->SecondsSince(*each.ran.begin);
    if (last_end_) seconds = std::min(seconds, evaluated.ran.end->SecondsSince(*last_end_));
    return std::max(seconds, 0.0);
  };
  double alone = ran(evaluated);
  for (Evaluated& other : evaluated_) {
    if (!other.ran.begin->reached()) continue;
    const double seconds = ran(other), together = std::min(alone, seconds);
    other.seconds += seconds - together / 2;
    alone -= together / 2;
  }
  const double seconds = evaluated.seconds + alone;
  last_end_ = std::move(evaluated.ran.end);
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
  if (observer_ && evaluated.known_prompts + evaluated.made_prompts > 0)
    observer_->OnPrompts(evaluated.model, device_name_, evaluated.known_prompts,
                         evaluated.made_prompts);
  std::map<const Image*, std::map<Stage, double>> stages;  // whole and masked are encoded apart
  for (const StageRun& run : evaluated.runs) {
    const double took = run.count > 0 ? run.ran.end->SecondsSince(*run.ran.begin) : 0;
    // A prompt that was kept counts as 0 s in the average. An init image counts when it is encoded,
    // however many images share it.
    const int measured = run.stage == Stage::kEncode
                             ? run.count
                             : static_cast<int>(run.images.size() + run.others.size());
    admission_.MeasuredStage(*evaluated.lane, run.stage, measured, took, true);
    if (observer_ && run.count > 0)
      observer_->OnStage(evaluated.model, device_name_, run.stage, run.count, took);
    for (const auto& image : run.images) stages[image.get()][run.stage] += took;
    for (const auto& image : run.others) stages[image.get()].emplace(run.stage, 0.0);
  }
  for (Evaluated::Row& row : evaluated.images) {
    const Image& image = *row.image;
    if (image.job->over) continue;
    outcomes.push_back({.image = row.image, .evaluation = row.evaluation});
    for (const auto& stage : stages[&image]) outcomes.back().stages.emplace_back(stage);
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
    if (row.result && first_nonfinite == 0 && !AllFinite(result.pixels)) {
      // The state was finite, so the codec made it non-finite.
      if (observer_) observer_->OnNonfiniteImage(evaluated.model, device_name_);
      if (!options_.allow_nonfinite) {
        outcomes.back().error =
            NonfiniteImage(image.job->effective, result, image.job->effective.evaluations);
        continue;
      }
    }
    if (row.preview) {
      if (row.preview_scale != 1)
        for (float& value : result.pixels.span<float>()) value *= row.preview_scale;
      if (const auto model = models_.find(evaluated.model);
          model->second.codec && !row.tiny_preview)
        result.pixels = model->second.preview.Draw(result.pixels);
    }
    (row.result ? outcomes.back().result : outcomes.back().preview) = std::move(result);
  }
  queue_.Report(std::move(outcomes));
  return absl::OkStatus();
}

}  // namespace denoised
