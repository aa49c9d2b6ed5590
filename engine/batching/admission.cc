// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/admission.h"

#include <algorithm>
#include <cmath>

#include "engine/core/step_plan.h"

namespace denoised {
namespace {

// Weight of the newest measurement of a stage: an average, since most prompts take no time.
constexpr double kNewest = 0.2;
// Clients without jobs, and sizes without lanes, are forgotten when this many are known.
constexpr size_t kClientsBeforeSweep = 64, kSizesBeforeSweep = 64;
// A refused client is told to retry once this part of the queue is done, within these bounds.
constexpr double kRetryShare = 0.1, kShortestRetry = 0.25, kLongestRetry = 60;
// How often an idle lane tries a job that its estimate would refuse.
constexpr std::chrono::seconds kBetweenTrials{30};

size_t TextBytes(const JobSpec& spec) {
  size_t bytes = 0;
  for (const TextPrompt& prompt : spec.prompts) {
    bytes += sizeof(TextPrompt) + prompt.text.size();
    for (const auto* text : {&prompt.negative, &prompt.text_2, &prompt.negative_2})
      if (*text) bytes += (*text)->size();
  }
  return 2 * bytes;  // and the texts that were cut off, at most as long
}

size_t HostBytes(const EffectiveJob& job) {
  const JobSpec& spec = job.spec;
  return sizeof(EffectiveJob) + TextBytes(spec) +
         job.plan->evaluations.size() * sizeof(Evaluation<double>) +
         spec.class_labels.size() * sizeof(int) + spec.class_values.size() * sizeof(float) +
         (spec.initial_noise ? spec.initial_noise.bytes() : 0) +
         (spec.init_image ? spec.init_image.bytes() : 0) + (spec.mask ? spec.mask.bytes() : 0);
}

}  // namespace

/// The median of the last few measurements, so that one that was disturbed, such as at a busy
/// warm-up, soon does not count. Quick enough to follow a device that slows down as it warms up.
class Admission::Recent {
 public:
  void Add(double seconds, bool of_work) {
    of_work_ |= of_work;
    last_[count_++ % last_.size()] = seconds;
    std::array<double, kLast> sorted = last_;
    const size_t known = std::min(count_, kLast);
    std::sort(sorted.begin(), sorted.begin() + known);
    // Of two the shorter one, since what disturbs an evaluation makes it longer.
    median_ = sorted[(known - 1) / 2];
  }
  double seconds() const { return median_; }
  /// Of a job, not of warm-up alone.
  bool of_work() const { return of_work_; }

 private:
  static constexpr size_t kLast = 5;
  std::array<double, kLast> last_{};
  size_t count_ = 0;
  double median_ = 0;
  bool of_work_ = false;
};

/// One client at one priority in one lane.
struct Admission::Client {
  double weight = 0;
  double served = 0;  // virtual time up to which it has used its share
  int jobs = 0;       // unfinished
};

struct Admission::Model {
  std::shared_ptr<Lane> own_size;
  int devices = 1;
  std::map<std::pair<int, int>, std::weak_ptr<Lane>> lanes;  // by height, width
  size_t sweep_at = kSizesBeforeSweep;
  std::map<JobId, TimePoint> unstarted;  // jobs that never had a slot
  Totals totals;
};

class Admission::Lane {
 public:
  Lane(Model* model_in, int64_t pixels_in) : model(model_in), pixels(pixels_in) {
    if (model->own_size) room = model->own_size->room;
  }

  /// Expected seconds of an evaluation; 0 before the first measurement. The cost of a bucket that
  /// was not measured is interpolated between its measured neighbours, because an evaluation takes
  /// a fixed time plus a time for each row. It is at most proportional to the smaller neighbour,
  /// because the time of a row never grows with their number. Warm-up runs no bucket larger than
  /// one that fills the device, so the cost of more rows than the largest measured bucket is
  /// extrapolated from the two largest. If only one bucket was measured, they cost as much as that
  /// bucket: the estimate is then too low, so no deadline that can be met is refused. At another
  /// size, fewer rows than were measured cost no more than at the model's own size, by pixels.
  double Cost(int rows) const {
    if (seconds.empty()) return OfOwnSize() * model->own_size->MeasuredCost(rows);
    return MeasuredCost(rows);
  }
  double MeasuredCost(int rows) const {
    if (seconds.empty()) return 0;
    const std::vector<int>& buckets = room.buckets;
    const auto padded = std::lower_bound(buckets.begin(), buckets.end(), rows);
    const int bucket = padded == buckets.end() ? rows : *padded;
    auto above = seconds.lower_bound(bucket);
    if (above == seconds.end()) --above;
    const double slower = Least(above);
    if (above->first == bucket) return slower;
    if (above == seconds.begin()) {
      const Lane& own = *model->own_size;
      if (this == &own || own.seconds.empty()) return slower;
      return std::min(slower, OfOwnSize() * own.MeasuredCost(rows));
    }
    const auto below = std::prev(above);
    const int fewer = below->first, more = above->first;
    const double quicker = Least(below);
    const double between =
        quicker + (slower - quicker) * (bucket - fewer) / static_cast<double>(more - fewer);
    return std::min(between, quicker * bucket / fewer);
  }

  /// What this bucket takes at most, by what is known of others: one that was disturbed when it was
  /// measured, and not used since, is not believed. Fewer rows never take longer than more. And
  /// until a job has used the bucket, it is at most proportional to each smaller one.
  double Least(std::map<int, Recent>::const_iterator bucket) const {
    double least = bucket->second.seconds();
    for (auto more = bucket; more != seconds.end(); ++more)
      least = std::min(least, more->second.seconds());
    if (bucket->second.of_work()) return least;
    for (auto fewer = seconds.begin(); fewer != bucket; ++fewer)
      least = std::min(least, fewer->second.seconds() * bucket->first / fewer->first);
    return least;
  }

  /// Whether a job is to be admitted although its deadline cannot be met by the estimate.
  bool Tries(TimePoint now) {
    if (jobs > 0 || (tried && now < *tried + kBetweenTrials)) return false;
    tried = now;
    return true;
  }

  int demand() const { return active_rows + waiting_rows; }
  int images() const { return active_images + waiting_images; }
  /// Whether `images` images with `rows` rows in total need more room than `devices` devices have.
  bool Exceeds(int rows, int images, int devices) const {
    return rows > devices * room.rows || images > devices * room.slots;
  }
  /// How many of these rows one device evaluates at a time: all that it has room for, or, if slots
  /// run out first, the rows of as many average images as it has slots.
  double Carried(int rows, int images) const {
    if (images <= room.slots) return room.rows;
    return std::min<double>(room.rows, double{1} * room.slots * rows / images);
  }
  double CostOf(double rows) const { return Cost(static_cast<int>(std::ceil(rows))); }
  /// False before anything was measured.
  bool HasCosts() const { return !seconds.empty() || !model->own_size->seconds.empty(); }
  double StageCost(Stage stage) const {
    // Prompts do not depend on the size.
    const Lane& own = *model->own_size;
    if (stage == Stage::kCondition) return own.stage_seconds[static_cast<size_t>(stage)];
    const double measured = stage_seconds[static_cast<size_t>(stage)];
    return measured > 0 ? measured : OfOwnSize() * own.stage_seconds[static_cast<size_t>(stage)];
  }
  double OfOwnSize() const {
    return static_cast<double>(pixels) / static_cast<double>(model->own_size->pixels);
  }

  Model* const model;
  const int64_t pixels;
  Room room;
  std::map<int, Recent> seconds;                // of an evaluation, by bucket
  std::array<double, kStages> stage_seconds{};  // of an image, by stage; 0: not measured
  std::array<bool, kStages> stage_of_work{};    // measured of a job, not of warm-up alone
  std::optional<TimePoint> tried;               // when Tries() last said yes
  std::map<std::pair<Priority, std::string>, Client> clients;
  size_t sweep_at = kClientsBeforeSweep;
  int jobs = 0;              // unfinished
  double weight = 0;         // of the clients that have one
  double virtual_time = 0;   // V
  double turn = 0;           // seconds had, each divided by the weight at its time
  int waiting_rows = 0;      // of images without a slot
  int waiting_images = 0;    // images without a slot
  int waiting_pictures = 0;  // jobs with an init image that have images without a slot
  int64_t waiting_work = 0;  // row evaluations of images without a slot
  int active_rows = 0;       // of images in slots
  int active_images = 0;     // images in slots
};

class Admission::Ticket {
 public:
  JobId id = 0;
  std::shared_ptr<Lane> lane;
  Client* client = nullptr;
  Priority priority = Priority::kNormal;
  double weight = 1;
  double entered = 0, key = 0;  // virtual times
  size_t bytes = 0, parked_bytes = 0;
  int rows = 0, evaluations = 0, count = 0;  // rows at a time and evaluations of one image
  int64_t row_evaluations = 0;               // of one image
  int waiting = 0, active = 0;               // images
  int64_t waiting_work = 0;                  // row evaluations of those that wait
  bool withdrawn = false, over = false;
  bool picture = false;  // it has an init image, which its images share

  int64_t work() const { return row_evaluations * count; }
  /// The share of its evaluations that have `rows` rows for an image; the others have one.
  double GuidedShare() const {
    if (rows == 1) return 1;
    return static_cast<double>(row_evaluations - evaluations) /
           (double{1} * evaluations * (rows - 1));
  }
  /// Row evaluations of an image with this many evaluations left, if all have the same rows.
  int64_t WorkOf(int evaluations_left) const {
    return row_evaluations * evaluations_left / evaluations;
  }
};

Admission::Admission(const Limits& limits) : limits_(limits) {}
Admission::~Admission() = default;

std::shared_ptr<Admission::Lane> Admission::Open(const std::string& name, int height, int width,
                                                 const Room& room) {
  MutexLock lock(&mutex_);
  std::unique_ptr<Model>& model = models_[name];
  if (!model) model = std::make_unique<Model>();
  std::shared_ptr<Lane> lane = LaneOfSize(*model, height, width);
  if (!model->own_size) model->own_size = lane;
  lane->room = room;
  return lane;
}

std::shared_ptr<Admission::Lane> Admission::LaneOfSize(Model& model, int height, int width) {
  if (model.lanes.size() >= model.sweep_at) {
    std::erase_if(model.lanes, [](const auto& entry) { return entry.second.expired(); });
    model.sweep_at = std::max(kSizesBeforeSweep, 2 * model.lanes.size());
  }
  std::weak_ptr<Lane>& known = model.lanes[{height, width}];
  std::shared_ptr<Lane> lane = known.lock();
  if (lane) return lane;
  // Not make_shared: its memory would stay as long as the weak pointer.
  lane.reset(new Lane(&model, int64_t{height} * width));
  known = lane;
  return lane;
}

void Admission::SetDevices(const std::string& model, int devices) {
  MutexLock lock(&mutex_);
  if (const auto found = models_.find(model); found != models_.end())
    found->second->devices = std::max(1, devices);
}

void Admission::Close(const std::string& name, bool keeps_lanes) {
  MutexLock lock(&mutex_);
  const auto model = models_.find(name);
  if (model == models_.end()) return;
  if (keeps_lanes) closed_.push_back(std::move(model->second));
  models_.erase(model);
}

Admission::Client& Admission::ClientOf(Lane& lane, const JobSpec& spec) {
  if (lane.clients.size() >= lane.sweep_at) {
    std::erase_if(lane.clients, [&](const auto& entry) {
      return entry.second.jobs == 0 && entry.second.served <= lane.virtual_time;
    });
    lane.sweep_at = std::max(kClientsBeforeSweep, 2 * lane.clients.size());
  }
  return lane.clients[{spec.priority, spec.client}];
}

absl::StatusOr<std::shared_ptr<Admission::Ticket>> Admission::Enter(JobId id,
                                                                    const EffectiveJob& job,
                                                                    TimePoint now,
                                                                    Estimate* estimate) {
  MutexLock lock(&mutex_);
  const JobSpec& spec = job.spec;
  DENOISED_CHECK(spec.client_weight > 0, "client {}", spec.client);
  const auto found = models_.find(spec.model);
  if (found == models_.end()) return NotFound("model '{}' is not on this device", spec.model);
  Model& model = *found->second;
  auto ticket = std::make_shared<Ticket>();
  ticket->lane = LaneOfSize(model, spec.height, spec.width);
  Lane& lane = *ticket->lane;
  Client& client = ClientOf(lane, spec);
  ticket->id = id;
  ticket->client = &client;
  ticket->priority = spec.priority;
  ticket->bytes = HostBytes(job);
  ticket->rows = job.MostRows();
  ticket->evaluations = job.evaluations;
  ticket->row_evaluations = job.RowsUntil(job.evaluations);
  ticket->count = ticket->waiting = spec.count;
  ticket->picture = spec.init_image.defined();
  ticket->waiting_work = ticket->work();
  ticket->weight = limits_.weights[static_cast<size_t>(spec.priority)] * spec.client_weight;
  ticket->entered = lane.virtual_time;
  ticket->key = std::max(lane.virtual_time, client.served) +
                static_cast<double>((client.jobs + 1) * ticket->work()) / ticket->weight;

  Estimate expected;
  for (size_t level = 0; level <= static_cast<size_t>(spec.priority); ++level) {
    expected.jobs_ahead += model.totals.queued_requests[level];
    expected.images_ahead += model.totals.queued_images[level];
  }
  Predict(*ticket, false, &expected);
  // For a refused job: `share` of the queue must be done before there is room for it.
  const auto retry = [&](double share) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    expected.retry_seconds =
        std::clamp(DrainSeconds() * std::max(share, kRetryShare), kShortestRetry, kLongestRetry);
  };
  absl::Status refusal;
  if (queued_requests_ >= limits_.requests) {
    retry(1.0 / limits_.requests);
    refusal = ResourceExhausted("{} requests are queued, the limit is {}; retry later",
                                queued_requests_, limits_.requests);
  } else if (queued_images_ + spec.count > limits_.images) {
    if (spec.count <= limits_.images) retry(double{1} * spec.count / limits_.images);
    refusal =
        ResourceExhausted("{} images are queued, and {} more would exceed the limit of {}; {}",
                          queued_images_, spec.count, limits_.images,
                          spec.count <= limits_.images ? "retry later" : "ask for fewer images");
  } else if (queued_bytes_ + ticket->bytes > limits_.bytes) {
    if (ticket->bytes <= limits_.bytes) retry(double{1} * ticket->bytes / limits_.bytes);
    refusal = ResourceExhausted(
        "queued requests hold {} bytes, and {} more would exceed the limit of {}; {}",
        queued_bytes_, ticket->bytes, limits_.bytes,
        ticket->bytes <= limits_.bytes ? "retry later" : "ask for fewer images at a time");
  } else if (spec.deadline && now >= *spec.deadline) {
    refusal = DeadlineExceeded("the deadline had passed before the request was queued");
  } else if (spec.deadline && expected.total_seconds &&
             *expected.total_seconds > ToSeconds(*spec.deadline - now) && !lane.Tries(now)) {
    const double allowed = ToSeconds(*spec.deadline - now);
    const double alone = *expected.total_seconds - *expected.start_seconds;
    if (alone <= allowed)
      expected.retry_seconds =
          std::clamp(*expected.total_seconds - allowed, kShortestRetry, kLongestRetry);
    refusal = DeadlineExceeded(
        "the deadline is in {:.3g} s, but {} evaluations of {} images would take {:.3g} s, after "
        "{:.3g} s in the queue; allow more time, or ask for fewer steps or images",
        allowed, job.evaluations, spec.count, alone, *expected.start_seconds);
  }
  if (estimate) *estimate = expected;
  if (!refusal.ok()) return refusal;

  if (lane.jobs++ == 0) {
    // It goes next, but does not catch up on what others received while it was idle, nor, if all
    // are idle now, on what they had received.
    std::optional<double> first;
    for (const Lane* other : busy_) first = std::min(first.value_or(other->turn), other->turn);
    lane.turn = std::max(lane.turn, first.value_or(idle_turn_));
    busy_.insert(&lane);
  }
  lane.weight += client.jobs++ == 0 ? ticket->weight : ticket->weight - client.weight;
  client.weight = ticket->weight;
  lane.waiting_rows += ticket->rows * ticket->count;
  lane.waiting_images += ticket->count;
  if (ticket->picture) ++lane.waiting_pictures;
  lane.waiting_work += ticket->waiting_work;
  model.unstarted.emplace(id, now);
  ++model.totals.queued_requests[static_cast<size_t>(spec.priority)];
  model.totals.queued_images[static_cast<size_t>(spec.priority)] += spec.count;
  ++queued_requests_;
  queued_images_ += spec.count;
  queued_bytes_ += ticket->bytes;
  return ticket;
}

std::pair<double, JobId> Admission::Key(const Ticket& ticket) { return {ticket.key, ticket.id}; }
const std::shared_ptr<Admission::Lane>& Admission::LaneOf(const Ticket& ticket) {
  return ticket.lane;
}

void Admission::Expect(const Ticket& ticket, Estimate* estimate) const {
  MutexLock lock(&mutex_);
  Predict(ticket, true, estimate);
}

void Admission::Predict(const Ticket& ticket, bool entered, Estimate* estimate) const {
  const Lane& lane = *ticket.lane;
  if (!lane.HasCosts()) return;
  const Client& client = *ticket.client;
  const double lane_weight =
      client.jobs == 0 ? lane.weight + ticket.weight : lane.weight - client.weight + ticket.weight;
  double other_weights = 0;
  for (const Lane* other : busy_)
    if (other != &lane) other_weights += other->weight;
  const int devices = lane.model->devices;
  const int demand = lane.demand() + (entered ? 0 : ticket.rows * ticket.count);
  const int images = lane.images() + (entered ? 0 : ticket.count);
  const int64_t others_work = lane.waiting_work - (entered ? ticket.waiting_work : 0);
  // A lane that fits on one device competes only with the lanes on that device.
  double slowdown = (lane_weight + other_weights) / lane_weight;
  if (!lane.Exceeds(demand, images, 1)) slowdown = std::max(1.0, slowdown / devices);

  const double carried = lane.Carried(demand, images);
  const auto cost_of = [&](int rows) {
    return lane.CostOf(std::min<double>(carried, (rows + devices - 1) / devices));
  };
  // Guidance may be in a part of the evaluations. Without it, an image has one row.
  const double guided = ticket.GuidedShare();
  const double evaluation = (guided * cost_of(demand) +
                             (1 - guided) * cost_of(demand - (ticket.rows - 1) * ticket.count)) *
                            slowdown;
  const Room& room = lane.room;
  const int images_at_once = devices * std::min(room.slots, room.rows / ticket.rows);
  const int rounds = (ticket.count + images_at_once - 1) / images_at_once;
  double ahead = 0;  // row evaluations
  if (lane.Exceeds(demand, images, devices))
    ahead = std::clamp((ticket.key - lane.virtual_time) * lane_weight - ticket.work(), 0.0,
                       static_cast<double>(others_work));
  const double images_ahead = ahead * ticket.count / static_cast<double>(ticket.work());
  const double stages_ahead = StagesOfImage(lane) + lane.StageCost(Stage::kEncode) *
                                                        lane.waiting_pictures /
                                                        std::max(1, lane.waiting_images);
  estimate->start_seconds =
      (ahead / (devices * carried) * lane.CostOf(carried) + images_ahead * stages_ahead / devices) *
      slowdown;
  estimate->total_seconds =
      *estimate->start_seconds + double{1} * rounds * ticket.evaluations * evaluation +
      std::max<double>(ticket.count, devices) * StagesOfImage(lane) * slowdown / devices;
  // Each device that draws some of the images encodes for itself, at the same time.
  if (ticket.picture) *estimate->total_seconds += lane.StageCost(Stage::kEncode) * slowdown;
}

double Admission::StagesOfImage(const Lane& lane) {
  return lane.StageCost(Stage::kCondition) + lane.StageCost(Stage::kDecode);
}

/// Seconds until everything that waits now is drawn.
double Admission::DrainSeconds() const {
  double seconds = 0;
  for (const Lane* lane : busy_) {
    const double carried = lane->Carried(lane->demand(), lane->images());
    seconds += static_cast<double>(lane->waiting_work) / (lane->model->devices * carried) *
                   lane->CostOf(carried) +
               (lane->waiting_images * StagesOfImage(*lane) +
                lane->waiting_pictures * lane->StageCost(Stage::kEncode)) /
                   lane->model->devices;
  }
  return seconds;
}

/// `images` of the job's images stop waiting.
void Admission::Unqueue(Ticket& ticket, int images, int64_t work) {
  if (images == 0) return;
  Totals& totals = ticket.lane->model->totals;
  ticket.waiting -= images;
  ticket.waiting_work -= work;
  ticket.lane->waiting_rows -= images * ticket.rows;
  ticket.lane->waiting_images -= images;
  ticket.lane->waiting_work -= work;
  totals.queued_images[static_cast<size_t>(ticket.priority)] -= images;
  queued_images_ -= images;
  if (ticket.waiting > 0) return;
  if (ticket.picture) --ticket.lane->waiting_pictures;
  --totals.queued_requests[static_cast<size_t>(ticket.priority)];
  --queued_requests_;
  queued_bytes_ -= ticket.bytes;
}

void Admission::Began(Ticket& ticket, int evaluations_left, size_t parked_bytes) {
  MutexLock lock(&mutex_);
  ticket.parked_bytes -= parked_bytes;
  queued_bytes_ -= parked_bytes;
  ticket.lane->model->unstarted.erase(ticket.id);
  ++ticket.active;
  ++ticket.lane->model->totals.active_images;
  ticket.lane->active_rows += ticket.rows;
  ++ticket.lane->active_images;
  if (!ticket.withdrawn) Unqueue(ticket, 1, ticket.WorkOf(evaluations_left));
}

void Admission::Parked(Ticket& ticket, int evaluations_left, size_t parked_bytes) {
  MutexLock lock(&mutex_);
  ticket.parked_bytes += parked_bytes;
  queued_bytes_ += parked_bytes;
  ++ticket.lane->model->totals.parked_images;
  --ticket.active;
  --ticket.lane->model->totals.active_images;
  ticket.lane->active_rows -= ticket.rows;
  --ticket.lane->active_images;
  WaitAgain(ticket, evaluations_left);
}

void Admission::Lost(Ticket& ticket, bool in_slot, int64_t rows) {
  MutexLock lock(&mutex_);
  Totals& totals = ticket.lane->model->totals;
  totals.wasted_rows[static_cast<size_t>(EndReason::kFailed)] += rows;
  if (in_slot) {
    --ticket.active;
    --totals.active_images;
    ticket.lane->active_rows -= ticket.rows;
    --ticket.lane->active_images;
  }
  WaitAgain(ticket, ticket.evaluations);
}

/// An image that had a slot waits again.
void Admission::WaitAgain(Ticket& ticket, int evaluations_left) {
  if (ticket.withdrawn) return;
  Totals& totals = ticket.lane->model->totals;
  const int64_t work = ticket.WorkOf(evaluations_left);
  if (ticket.waiting++ == 0) {
    if (ticket.picture) ++ticket.lane->waiting_pictures;
    ++totals.queued_requests[static_cast<size_t>(ticket.priority)];
    ++queued_requests_;
    queued_bytes_ += ticket.bytes;
  }
  ticket.waiting_work += work;
  ticket.lane->waiting_rows += ticket.rows;
  ++ticket.lane->waiting_images;
  ticket.lane->waiting_work += work;
  ++totals.queued_images[static_cast<size_t>(ticket.priority)];
  ++queued_images_;
}

void Admission::Drawn(Ticket& ticket) {
  MutexLock lock(&mutex_);
  --ticket.active;
  --ticket.lane->model->totals.active_images;
  ticket.lane->active_rows -= ticket.rows;
  --ticket.lane->active_images;
}

size_t Admission::RoomToPark(size_t parked_bytes) const {
  MutexLock lock(&mutex_);
  return queued_bytes_ < limits_.bytes ? (limits_.bytes - queued_bytes_) / parked_bytes : 0;
}

void Admission::Withdraw(Ticket& ticket) {
  MutexLock lock(&mutex_);
  if (ticket.over || ticket.withdrawn) return;
  ticket.withdrawn = true;
  ticket.lane->model->unstarted.erase(ticket.id);
  Unqueue(ticket, ticket.waiting, ticket.waiting_work);
}

void Admission::Left(Ticket& ticket, int64_t rows, std::optional<EndReason> reason) {
  MutexLock lock(&mutex_);
  if (ticket.over) return;
  ticket.over = true;
  Lane& lane = *ticket.lane;
  lane.model->unstarted.erase(ticket.id);
  Unqueue(ticket, ticket.waiting, ticket.waiting_work);
  queued_bytes_ -= ticket.parked_bytes;
  lane.model->totals.active_images -= ticket.active;
  lane.active_rows -= ticket.active * ticket.rows;
  lane.active_images -= ticket.active;
  if (reason) lane.model->totals.wasted_rows[static_cast<size_t>(*reason)] += rows;

  Client& client = *ticket.client;
  client.served =
      std::max(client.served, ticket.entered) + static_cast<double>(rows) / ticket.weight;
  if (--client.jobs == 0) lane.weight -= client.weight;
  if (--lane.jobs > 0) return;
  // Nobody has work in an idle lane, so its sums restart at zero, without rounding errors.
  busy_.erase(&lane);
  idle_turn_ = std::max(idle_turn_, lane.turn);
  lane.clients.clear();
  lane.weight = lane.virtual_time = lane.waiting_work = 0;
}

double Admission::Cost(const Lane& lane, int rows) const {
  MutexLock lock(&mutex_);
  return lane.Cost(rows);
}

Admission::Charge Admission::Launched(Lane& lane, int rows, int bucket) {
  MutexLock lock(&mutex_);
  Totals& totals = lane.model->totals;
  ++totals.evaluations;
  totals.rows += rows;
  totals.padding_rows += bucket - rows;
  // All its jobs may have ended after the rows were chosen.
  if (lane.jobs == 0) return {};
  const Charge charge{lane.Cost(bucket), lane.weight};
  lane.virtual_time += rows / charge.weight;
  lane.turn += charge.seconds / charge.weight;
  return charge;
}

void Admission::Measured(Lane& lane, int bucket, double seconds, const Charge* charge) {
  MutexLock lock(&mutex_);
  if (seconds < 0) return;
  if (charge && charge->weight > 0) lane.turn += (seconds - charge->seconds) / charge->weight;
  lane.seconds[bucket].Add(seconds, charge != nullptr);
}

void Admission::MeasuredStage(Lane& lane, Stage stage, int images, double seconds, bool charged) {
  MutexLock lock(&mutex_);
  if (seconds < 0 || images == 0) return;
  if (charged && lane.weight > 0) lane.turn += seconds / lane.weight;
  Lane& of = stage == Stage::kCondition ? *lane.model->own_size : lane;
  double& known = of.stage_seconds[static_cast<size_t>(stage)];
  const double each = seconds / images;
  bool& of_work = of.stage_of_work[static_cast<size_t>(stage)];
  // The first that a job takes corrects a busy warm-up. Nothing is learnt from the cache.
  const bool corrects = charged && seconds > 0 && !of_work && each < known;
  of_work |= charged && seconds > 0;
  known = known > 0 && !corrects ? known + kNewest * (each - known) : each;
}

double Admission::StageCost(const Lane& lane, Stage stage) const {
  MutexLock lock(&mutex_);
  return lane.StageCost(stage);
}

std::array<double, kStages> Admission::StageSeconds(const std::string& name) const {
  MutexLock lock(&mutex_);
  const auto model = models_.find(name);
  if (model == models_.end()) return {};
  const Lane& own = *model->second->own_size;
  std::array<double, kStages> seconds = own.stage_seconds;
  seconds[static_cast<size_t>(Stage::kDenoise)] = own.MeasuredCost(1);
  return seconds;
}

double Admission::Turn(const Lane& lane) const {
  MutexLock lock(&mutex_);
  return lane.turn;
}

int Admission::RowsForEach(const Lane& lane, int devices) const {
  MutexLock lock(&mutex_);
  return (lane.demand() + devices - 1) / devices;
}

bool Admission::Exceeds(const Lane& lane, int devices) const {
  MutexLock lock(&mutex_);
  return lane.Exceeds(lane.demand(), lane.images(), devices);
}

Admission::Totals Admission::Read(const std::string& name, TimePoint now) const {
  MutexLock lock(&mutex_);
  const auto model = models_.find(name);
  if (model == models_.end()) return {};
  Totals totals = model->second->totals;
  const std::map<JobId, TimePoint>& unstarted = model->second->unstarted;
  if (!unstarted.empty()) totals.oldest_wait_seconds = ToSeconds(now - unstarted.begin()->second);
  return totals;
}

}  // namespace denoised
