// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/job_queue.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace denoised {
namespace {

// Places are told at most so often, to so many jobs after an evaluation.
constexpr auto kPlacesPeriod = std::chrono::seconds(1);
constexpr int kPlacesPerEvaluation = 64;

// Evaluations for which a device leaves images beyond its share to the others. One may just have
// begun on each of them.
constexpr double kPatience = 2;

/// As listeners count: at most what an int holds.
int Saturated(int64_t count) {
  return static_cast<int>(std::min<int64_t>(count, std::numeric_limits<int>::max()));
}

}  // namespace

JobQueue::Job::Job(JobId id_in, EffectiveJob effective_in, Clock::time_point submitted_in,
                   std::shared_ptr<Admission::Ticket> ticket_in,
                   std::shared_ptr<JobListener> listener_in)
    : id(id_in),
      effective(std::move(effective_in)),
      submitted(submitted_in),
      ticket(std::move(ticket_in)),
      listener(std::move(listener_in)) {}

const std::vector<DeviceEvaluation>& JobQueue::Job::plan() {
  std::call_once(plan_made,
                 [this] { device_plan = ToDevice(*effective.plan, effective.puts_back); });
  return device_plan;
}

absl::StatusOr<JobId> JobQueue::Submit(EffectiveJob effective,
                                       std::shared_ptr<JobListener> listener, Estimate* estimate) {
  const Clock::time_point now = now_();
  JobId id;
  Estimate expected;
  if (!estimate) estimate = &expected;
  {
    MutexLock lock(&mutex_);
    id = last_id_ + 1;
    DENOISED_ASSIGN_OR_RETURN(std::shared_ptr<Admission::Ticket> ticket,
                              admission_.Enter(id, effective, now, estimate));
    last_id_ = id;
    const std::shared_ptr<Job> job(
        new Job(id, std::move(effective), now, std::move(ticket), std::move(listener)));
    job->told = *estimate;
    if (const auto& deadline = job->effective.spec.deadline) deadlines_.emplace(*deadline, id);
    jobs_.emplace(id, job);
    Wait(job);
  }
  Wake();
  return id;
}

void JobQueue::Wait(const std::shared_ptr<Job>& job) {
  const JobSpec& spec = job->effective.spec;
  const std::shared_ptr<Admission::Lane>& lane = Admission::LaneOf(*job->ticket);
  LaneQueue& queue = queues_[lane];
  queue.size = {lane, spec.model, spec.height, spec.width};
  queue.waiting.emplace(job->key(), job);
}

void JobQueue::StopWaiting(const Job& job) {
  const auto found = queues_.find(Admission::LaneOf(*job.ticket));
  if (found == queues_.end()) return;
  LaneQueue& queue = found->second;
  queue.waiting.erase(job.key());
  // A device that has no memory for the size now may have some for later jobs.
  if (queue.waiting.empty()) {
    queue.refused.clear();
    queue.later.clear();
    queue.waits.reset();
    queue.left.reset();
  }
  if (!queue.needed()) queues_.erase(found);
}

/// From now on no device takes an image of the job.
void JobQueue::StartEnding(Job& job) {
  job.ending = true;
  admission_.Withdraw(*job.ticket);
  StopWaiting(job);
}

void JobQueue::Wake() {
  if (wake_) wake_();
}

void JobQueue::End(JobId id, const absl::Status& status, EndReason reason) {
  {
    MutexLock lock(&mutex_);
    const auto found = jobs_.find(id);
    if (found == jobs_.end() || found->second->ending) return;
    StartEnding(*found->second);
    endings_.push_back({found->second, status, reason});
  }
  Wake();
}

JobQueue::~JobQueue() {
  // Images and their jobs have shared pointers to each other.
  for (const auto& [id, job] : jobs_) {
    job->again.clear();
    job->devices.clear();
  }
}

void JobQueue::EndAll(const absl::Status& status, EndReason reason) {
  std::map<JobId, std::shared_ptr<Job>> jobs;
  {
    MutexLock lock(&mutex_);
    jobs = jobs_;
  }
  for (const auto& [id, job] : jobs) Finish(*job, status, reason);
}

bool JobQueue::HasJobs(const std::string* model) const {
  return std::any_of(jobs_.begin(), jobs_.end(), [&](const auto& entry) {
    return model == nullptr || entry.second->effective.spec.model == *model;
  });
}

bool JobQueue::WaitForNone(const std::string* model, std::optional<Clock::time_point> deadline) {
  MutexLock lock(&mutex_);
  while (HasJobs(model)) {
    if (!deadline) {
      job_ended_.Wait(&mutex_);
    } else if (Clock::now() < *deadline) {
      job_ended_.WaitUntil(&mutex_, *deadline);
    } else {
      return false;
    }
  }
  return true;
}

void JobQueue::AddModel(const std::string& name, int device) {
  MutexLock lock(&mutex_);
  Model& model = models_[name];
  if (lost_.contains(device)) {
    model.lost = true;
  } else {
    model.devices.insert(device);
  }
  admission_.SetDevices(name, static_cast<int>(model.devices.size()));
}

void JobQueue::RemoveModel(const std::string& name, int device) {
  MutexLock lock(&mutex_);
  const auto model = models_.find(name);
  if (model == models_.end()) return;
  model->second.devices.erase(device);
  for (auto& [lane, queue] : queues_) {
    if (queue.size.model != name) continue;
    queue.open.erase(device);
    if (queue.opening == device) queue.opening.reset();
  }
  TryAgain(device);
  std::erase_if(queues_, [](const auto& entry) { return !entry.second.needed(); });
  admission_.SetDevices(name, static_cast<int>(model->second.devices.size()));
  if (!model->second.devices.empty()) return;
  std::erase_if(queues_, [&](const auto& entry) { return entry.second.size.model == name; });
  admission_.Close(name, model->second.lost);
  models_.erase(model);
}

void JobQueue::Lose(int device) {
  std::vector<std::shared_ptr<Image>> images;
  {
    MutexLock lock(&mutex_);
    lost_.insert(device);
    for (auto& [name, model] : models_) {
      if (model.devices.erase(device) == 0) continue;
      model.lost = true;
      admission_.SetDevices(name, static_cast<int>(model.devices.size()));
    }
    for (auto& [lane, queue] : queues_) {
      queue.open.erase(device);
      queue.refused.clear();  // these devices try again: they may be the only ones left
      queue.later.erase(device);
      if (queue.opening == device) queue.opening.reset();
    }
    std::erase_if(queues_, [](const auto& entry) { return !entry.second.needed(); });
    for (const auto& [id, job] : jobs_)
      std::erase_if(job->devices, [&](const auto& entry) {
        if (entry.second == device) images.push_back(entry.first);
        return entry.second == device;
      });
  }
  for (const std::shared_ptr<Image>& image : images) {
    const std::shared_ptr<Job>& job = image->job;
    MutexLock listening(&job->listener_mutex);
    image->lost = true;
    const int64_t rows = image->rows_launched;
    MutexLock lock(&mutex_);
    if (job->over) continue;
    if (image->delivered) {  // between the two locks
      if (image->in_slot) admission_.Drawn(*job->ticket);
      continue;
    }
    job->rows_launched -= rows;
    admission_.Lost(*job->ticket, image->in_slot, rows);
    if (job->ending) continue;
    job->again.emplace_back(new Image(job, image->index, image->reported));
    Wait(job);
  }
  Wake();
}

void JobQueue::EndDueJobs() {
  std::vector<Ending> endings;
  std::vector<std::shared_ptr<Job>> late;
  {
    MutexLock lock(&mutex_);
    endings.swap(endings_);
    const Clock::time_point now = now_();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      late.push_back(jobs_.at(deadlines_.begin()->second));
      deadlines_.erase(deadlines_.begin());
    }
  }
  for (const Ending& ending : endings) Finish(*ending.job, ending.status, ending.reason);
  for (const std::shared_ptr<Job>& job : late) {
    MutexLock listening(&job->listener_mutex);
    FinishLocked(*job,
                 DeadlineExceeded("the deadline passed after {} of {} evaluations; allow more "
                                  "time, or ask for fewer steps or images",
                                  job->evaluations_done, job->evaluations()),
                 EndReason::kDeadline);
  }
}

void JobQueue::Finish(Job& job, const absl::Status& status, std::optional<EndReason> reason) {
  MutexLock listening(&job.listener_mutex);
  FinishLocked(job, status, reason);
}

void JobQueue::FinishLocked(Job& job, const absl::Status& status, std::optional<EndReason> reason) {
  if (!job.listener) return;
  {
    MutexLock lock(&mutex_);
    job.over = true;
    StopWaiting(job);
    job.again.clear();
    job.devices.clear();
    const JobSpec& spec = job.effective.spec;
    if (spec.deadline) deadlines_.erase({*spec.deadline, job.id});
    admission_.Left(*job.ticket, job.rows_launched, reason);
  }
  job.timing.total_seconds = ToSeconds(now_() - job.submitted);
  const std::shared_ptr<JobListener> listener = std::move(job.listener);
  listener->OnDone(status, job.timing);
  {
    MutexLock lock(&mutex_);
    jobs_.erase(job.id);
  }
  job_ended_.NotifyAll();
}

void JobQueue::MayHaveRoom(int device, const std::string& of_model) {
  MutexLock lock(&mutex_);
  for (auto& [lane, queue] : queues_)
    if (queue.WaitsFor(device, of_model)) queue.later.erase(device);
}

void JobQueue::TryAgain(int device) {
  for (auto& [lane, queue] : queues_) {
    queue.refused.erase(device);
    queue.later.erase(device);
  }
}

bool JobQueue::WaitsForRoom(int device, const std::string& of_model) const {
  MutexLock lock(&mutex_);
  return std::any_of(queues_.begin(), queues_.end(), [&](const auto& entry) {
    return !entry.second.waiting.empty() && entry.second.WaitsFor(device, of_model);
  });
}

bool JobQueue::MayOpen(const LaneQueue& queue, int device) const {
  return models_.at(queue.size.model).devices.count(device) && !queue.opening &&
         !queue.refused.count(device) && (!queue.later.count(device) || HasWaited(queue)) &&
         (queue.open.empty() ||
          admission_.Exceeds(*queue.size.lane, static_cast<int>(queue.open.size())));
}

bool JobQueue::HasWork(int device) const {
  MutexLock lock(&mutex_);
  if (!endings_.empty()) return true;
  for (const auto& [lane, queue] : queues_)
    if (!queue.waiting.empty() && (queue.open.count(device) || MayOpen(queue, device))) return true;
  return false;
}

std::optional<JobQueue::Size> JobQueue::ToOpen(int device) {
  MutexLock lock(&mutex_);
  const auto next_job = [](const LaneQueue& queue) { return queue.waiting.begin()->second->id; };
  // Younger jobs of a model take no room that an older one waits for.
  std::map<std::string, JobId> waits;
  for (const auto& [lane, queue] : queues_) {
    if (queue.waiting.empty() || !queue.later.contains(device)) continue;
    const auto oldest = waits.try_emplace(queue.size.model, next_job(queue)).first;
    oldest->second = std::min(oldest->second, next_job(queue));
  }
  LaneQueue* first = nullptr;
  for (auto& [lane, queue] : queues_) {
    if (queue.waiting.empty() || queue.open.count(device) || !MayOpen(queue, device)) continue;
    const auto older = waits.find(queue.size.model);
    if (older != waits.end() && older->second < next_job(queue) && !HasWaited(queue)) {
      if (!queue.waits) queue.waits = now_();
      continue;
    }
    if (!first || next_job(queue) < next_job(*first)) first = &queue;
  }
  if (!first) return std::nullopt;
  first->opening = device;
  Size size = first->size;
  size.waited = HasWaited(*first);
  return size;
}

void JobQueue::OpenLater(const Size& size, int device, Lack lack) {
  {
    MutexLock lock(&mutex_);
    const auto found = queues_.find(size.lane);
    if (found == queues_.end()) return;
    LaneQueue& queue = found->second;
    if (queue.opening == device) queue.opening.reset();
    if (!queue.waiting.empty()) {
      queue.later[device] = lack;
      if (!queue.waits) queue.waits = now_();
    }
    if (!queue.needed()) queues_.erase(found);
  }
  Wake();  // another device may have room
}

void JobQueue::Opened(const Size& size, int device, const absl::Status& status) {
  std::vector<std::shared_ptr<Job>> hopeless;
  {
    MutexLock lock(&mutex_);
    const auto found = models_.find(size.model);
    if (found == models_.end() || !found->second.devices.count(device)) return;  // lost meanwhile
    LaneQueue& queue = queues_[size.lane];
    queue.size = size;
    if (queue.opening == device) queue.opening.reset();
    if (status.ok()) {
      queue.open.insert(device);
      queue.waits.reset();
    } else {
      queue.refused.insert(device);
      const std::set<int>& devices = found->second.devices;
      if (queue.open.empty() &&
          std::includes(queue.refused.begin(), queue.refused.end(), devices.begin(), devices.end()))
        for (const auto& [key, job] : queue.waiting) hopeless.push_back(job);
      // Its jobs may all have ended while it was being opened.
      if (!queue.needed()) queues_.erase(size.lane);
      for (const std::shared_ptr<Job>& job : hopeless) StartEnding(*job);
    }
  }
  for (const std::shared_ptr<Job>& job : hopeless) Finish(*job, status, EndReason::kFailed);
  Wake();
}

bool JobQueue::Close(const std::shared_ptr<Admission::Lane>& lane, int device) {
  MutexLock lock(&mutex_);
  const auto found = queues_.find(lane);
  if (found == queues_.end()) return true;  // the device is lost
  LaneQueue& queue = found->second;
  if (!queue.waiting.empty()) return false;
  queue.open.erase(device);
  if (!queue.needed()) queues_.erase(found);
  TryAgain(device);
  return true;
}

std::shared_ptr<JobQueue::Job> JobQueue::First(const std::shared_ptr<Admission::Lane>& lane,
                                               int device, int own_rows) {
  MutexLock lock(&mutex_);
  const auto found = queues_.find(lane);
  if (found == queues_.end()) return nullptr;
  LaneQueue& queue = found->second;
  if (queue.waiting.empty() || !queue.open.count(device)) return nullptr;
  const int share = admission_.RowsForEach(*lane, static_cast<int>(queue.open.size()));
  if (own_rows >= share) {
    const Clock::time_point now = now_();
    if (!queue.left) queue.left = {device, now};
    const double patience = kPatience * admission_.Cost(*lane, share);
    if (patience == 0 || ToSeconds(now - queue.left->second) < patience) return nullptr;
  }
  return queue.waiting.begin()->second;
}

std::shared_ptr<JobQueue::Image> JobQueue::Take(const std::shared_ptr<Job>& job, int device) {
  MutexLock lock(&mutex_);
  if (job->over || job->ending || job->waiting() == 0) return nullptr;
  const auto queue = queues_.find(Admission::LaneOf(*job->ticket));
  if (queue == queues_.end() || !queue->second.open.count(device)) return nullptr;
  if (queue->second.left && queue->second.left->first != device) queue->second.left.reset();
  std::shared_ptr<Image> image;
  if (!job->again.empty()) {
    image = job->again.front();
    job->again.pop_front();
  } else {
    image.reset(new Image(job, job->next_image++, 0));
  }
  if (job->waiting() == 0) StopWaiting(*job);
  image->in_slot = true;
  job->devices.emplace(image, device);
  admission_.Began(*job->ticket, image->evaluations_left(),
                   image->parked ? image->parked->bytes() : 0);
  return image;
}

void JobQueue::Began(Job& job) {
  MutexLock listening(&job.listener_mutex);
  if (job.started || !job.listener) return;
  job.started = true;
  job.timing.queued_seconds = ToSeconds(now_() - job.submitted);
  job.listener->OnStarted();
}

void JobQueue::Drawn(const std::shared_ptr<Image>& image) {
  MutexLock lock(&mutex_);
  if (!image->job->devices.count(image)) return;  // the job is over, or the device lost
  image->in_slot = false;
  admission_.Drawn(*image->job->ticket);
}

void JobQueue::Requeue(const std::shared_ptr<Image>& image) {
  {
    MutexLock lock(&mutex_);
    const std::shared_ptr<Job>& job = image->job;
    if (job->devices.erase(image) == 0) return;  // the job is over, or the device lost
    image->in_slot = false;
    admission_.Parked(*job->ticket, image->evaluations_left(), image->parked->bytes());
    if (job->ending) return;
    job->again.push_back(image);
    Wait(job);
  }
  Wake();
}

void JobQueue::Report(std::vector<Outcome> outcomes) {
  // Sorted by job and image, so that neither the images that are delivered before a job ends nor
  // the error that ends it depend on slots.
  const auto place = [](const Outcome& outcome) {
    return std::tuple(outcome.image->job->id, !outcome.error.ok(), outcome.image->index);
  };
  std::stable_sort(outcomes.begin(), outcomes.end(),
                   [&](const Outcome& a, const Outcome& b) { return place(a) < place(b); });
  for (auto first = outcomes.begin(); first != outcomes.end();) {
    const std::shared_ptr<Job> job = first->image->job;
    const auto end = std::find_if(
        first, outcomes.end(), [&](const Outcome& outcome) { return outcome.image->job != job; });
    MutexLock listening(&job->listener_mutex);
    const bool over = job->listener == nullptr;
    // An image may be decoded after its last evaluation was reported.
    const auto news = std::stable_partition(first, end, [over](const Outcome& outcome) {
      const bool ends = outcome.result || !outcome.error.ok();
      return over || outcome.image->lost ||
             (outcome.evaluation <= outcome.image->reported && !ends);
    });
    bool progress = false;
    for (auto outcome = news; outcome != end; ++outcome) {
      if (outcome->evaluation <= outcome->image->reported) continue;
      outcome->image->reported = outcome->evaluation;
      if (outcome->evaluation == job->effective.evaluations)
        outcome->stages.emplace_back(Stage::kDenoise, -1);
      ++job->evaluations_done;
      progress = true;
    }
    for (auto outcome = news; outcome != end; ++outcome) {
      std::sort(outcome->stages.begin(), outcome->stages.end());
      for (const auto& [stage, seconds] : outcome->stages)
        job->listener->OnStage(outcome->image->index, stage, seconds);
    }
    if (progress)
      job->listener->OnProgress(Saturated(job->evaluations_done), Saturated(job->evaluations()));
    for (auto outcome = news; outcome != end; ++outcome) {
      if (!outcome->error.ok()) {
        FinishLocked(*job, outcome->error, EndReason::kFailed);
        break;
      }
      if (outcome->preview) {
        if (job->timing.first_preview_seconds < 0)
          job->timing.first_preview_seconds = ToSeconds(now_() - job->submitted);
        job->listener->OnPreview(*outcome->preview, outcome->evaluation);
      }
      if (!outcome->result) continue;
      {
        MutexLock lock(&mutex_);
        job->devices.erase(outcome->image);
      }
      outcome->image->delivered = true;
      job->listener->OnImage(*std::move(outcome->result));
      if (++job->images_done == job->count()) FinishLocked(*job, absl::OkStatus(), std::nullopt);
    }
    first = end;
  }
  if (!outcomes.empty()) TellPlaces(Admission::LaneOf(*outcomes.front().image->job->ticket));
}

void JobQueue::TellPlaces(const std::shared_ptr<Admission::Lane>& lane) {
  std::vector<std::pair<std::shared_ptr<Job>, Estimate>> moved;
  {
    MutexLock lock(&mutex_);
    const auto found = queues_.find(lane);
    if (found == queues_.end()) return;
    const auto& waiting = found->second.waiting;
    Round& round = found->second.round;
    auto next = waiting.end();
    if (round.next) {
      next = waiting.lower_bound(*round.next);
    } else if (const auto now = now_(); !round.begun || now - *round.begun >= kPlacesPeriod) {
      round = {.begun = now};
      next = waiting.begin();
    }
    for (int i = 0; i < kPlacesPerEvaluation && next != waiting.end(); ++i, ++next) {
      const std::shared_ptr<Job>& job = next->second;
      Estimate& told = job->told;
      if (job->next_image == 0 &&
          std::pair(told.jobs_ahead, told.images_ahead) != std::pair(round.jobs, round.images)) {
        told = {.jobs_ahead = round.jobs, .images_ahead = round.images};
        admission_.Expect(*job->ticket, &told);
        moved.emplace_back(job, told);
      }
      ++round.jobs;
      round.images += job->waiting();
    }
    round.next.reset();
    if (next != waiting.end()) round.next = next->first;
  }
  for (const auto& [job, estimate] : moved) {
    MutexLock listening(&job->listener_mutex);
    if (job->listener && !job->started) job->listener->OnQueued(estimate);
  }
}

}  // namespace denoised
