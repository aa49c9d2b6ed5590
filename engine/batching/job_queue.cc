#include "engine/batching/job_queue.h"

#include <algorithm>
#include <limits>

namespace denoised {
namespace {

double Seconds(JobQueue::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

/// As listeners count.
int Saturated(int64_t count) {
  return static_cast<int>(std::min<int64_t>(count, std::numeric_limits<int>::max()));
}

}  // namespace

JobQueue::Job::Job(JobId id_in, EffectiveJob effective_in, Clock::time_point submitted_in,
                   std::shared_ptr<Admission::Ticket> ticket_in)
    : id(id_in),
      effective(std::move(effective_in)),
      submitted(submitted_in),
      ticket(std::move(ticket_in)) {}

const std::vector<DeviceEvaluation>& JobQueue::Job::plan() {
  std::call_once(plan_made, [this] { device_plan = ToDevice(*effective.plan); });
  return device_plan;
}

absl::StatusOr<JobId> JobQueue::Submit(EffectiveJob effective,
                                       std::shared_ptr<JobListener> listener, Estimate* estimate) {
  const Clock::time_point now = now_();
  JobId id;
  {
    std::lock_guard lock(mutex_);
    id = last_id_ + 1;
    DENOISED_ASSIGN_OR_RETURN(std::shared_ptr<Admission::Ticket> ticket,
                              admission_.Enter(id, effective, now, estimate));
    last_id_ = id;
    const std::shared_ptr<Job> job(new Job(id, std::move(effective), now, std::move(ticket)));
    job->listener = std::move(listener);
    const JobSpec& spec = job->effective.spec;
    Admission::Lane* const lane = Admission::LaneOf(*job->ticket);
    lines_[lane].size = {lane, spec.model, spec.height, spec.width};
    if (spec.deadline) deadlines_.emplace(*spec.deadline, id);
    jobs_.emplace(id, job);
    Wait(job);
  }
  Wake();
  return id;
}

/// Under mutex_.
void JobQueue::Wait(const std::shared_ptr<Job>& job) {
  LineOf(*job).waiting.emplace(job->key(), job);
}

/// Under mutex_.
void JobQueue::StopWaiting(const Job& job) {
  Line& line = LineOf(job);
  line.waiting.erase(job.key());
  // Who has no memory for the size now may have some for the next that ask for it.
  if (line.waiting.empty()) line.refused.clear();
}

/// Nobody takes an image of it any more. Under mutex_.
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
    std::lock_guard lock(mutex_);
    const auto found = jobs_.find(id);
    if (found == jobs_.end() || found->second->ending) return;
    StartEnding(*found->second);
    ended_.push_back({found->second, status, reason});
  }
  Wake();
}

JobQueue::~JobQueue() {
  // Images and their jobs hold each other.
  for (const auto& [id, job] : jobs_) {
    job->again.clear();
    job->devices.clear();
  }
}

void JobQueue::EndAll(const absl::Status& status, EndReason reason) {
  std::map<JobId, std::shared_ptr<Job>> jobs;
  {
    std::lock_guard lock(mutex_);
    jobs = jobs_;
  }
  for (const auto& [id, job] : jobs) Finish(job, status, reason);
}

bool JobQueue::WaitForNone(const std::string* model, std::optional<Clock::time_point> deadline) {
  std::unique_lock lock(mutex_);
  const auto none = [&] {
    return std::none_of(jobs_.begin(), jobs_.end(), [&](const auto& entry) {
      return model == nullptr || entry.second->effective.spec.model == *model;
    });
  };
  if (deadline) return none_.wait_until(lock, *deadline, none);
  none_.wait(lock, none);
  return true;
}

void JobQueue::AddModel(const std::string& name, int device) {
  std::lock_guard lock(mutex_);
  Model& model = models_[name];
  model.devices.insert(device);
  admission_.SetDevices(name, static_cast<int>(model.devices.size()));
}

void JobQueue::RemoveModel(const std::string& name, int device) {
  std::lock_guard lock(mutex_);
  const auto model = models_.find(name);
  if (model == models_.end()) return;
  model->second.devices.erase(device);
  for (auto& [lane, line] : lines_) {
    if (line.size.model != name) continue;
    line.open.erase(device);
    if (line.opening == device) line.opening.reset();
  }
  admission_.SetDevices(name, static_cast<int>(model->second.devices.size()));
  if (!model->second.devices.empty() || model->second.lost) return;
  std::erase_if(lines_, [&](const auto& entry) { return entry.second.size.model == name; });
  models_.erase(model);
  admission_.Close(name);
}

void JobQueue::Lose(int device) {
  std::vector<std::shared_ptr<Image>> images;
  {
    std::lock_guard lock(mutex_);
    for (auto& [name, model] : models_) {
      if (model.devices.erase(device) == 0) continue;
      model.lost = true;
      admission_.SetDevices(name, static_cast<int>(model.devices.size()));
    }
    for (auto& [lane, line] : lines_) {
      line.open.erase(device);
      line.refused.clear();  // who had no memory has to try again, or say that nobody has
      if (line.opening == device) line.opening.reset();
    }
    for (const auto& [id, job] : jobs_)
      std::erase_if(job->devices, [&](const auto& entry) {
        if (entry.second == device) images.push_back(entry.first);
        return entry.second == device;
      });
  }
  for (const std::shared_ptr<Image>& image : images) {
    const std::shared_ptr<Job>& job = image->job;
    std::lock_guard telling(job->telling);
    image->lost = true;
    if (image->told == job->effective.evaluations) continue;
    const int64_t rows = int64_t{1} * image->told * job->rows();
    std::lock_guard lock(mutex_);
    if (job->over) continue;
    job->rows_launched -= rows;
    admission_.Lost(*job->ticket, image->in_slot, rows);
    if (job->ending) continue;
    job->again.emplace_back(new Image(job, image->index, image->told));
    Wait(job);
  }
  Wake();
}

void JobQueue::Settle() {
  std::vector<Ending> endings;
  std::vector<std::shared_ptr<Job>> late;
  {
    std::lock_guard lock(mutex_);
    endings.swap(ended_);
    const Clock::time_point now = now_();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      late.push_back(jobs_.at(deadlines_.begin()->second));
      deadlines_.erase(deadlines_.begin());
    }
  }
  for (const Ending& ending : endings) Finish(ending.job, ending.status, ending.reason);
  for (const std::shared_ptr<Job>& job : late) {
    std::lock_guard telling(job->telling);
    FinishLocked(job,
                 DeadlineExceeded("the deadline passed after {} of {} evaluations; allow more "
                                  "time, or ask for fewer steps or images",
                                  job->evaluations_done, job->evaluations()),
                 EndReason::kDeadline);
  }
}

void JobQueue::Finish(const std::shared_ptr<Job>& job, const absl::Status& status,
                      std::optional<EndReason> reason) {
  std::lock_guard telling(job->telling);
  FinishLocked(job, status, reason);
}

/// Under job->telling.
void JobQueue::FinishLocked(const std::shared_ptr<Job>& job, const absl::Status& status,
                            std::optional<EndReason> reason) {
  if (!job->listener) return;
  {
    std::lock_guard lock(mutex_);
    job->over = true;
    StopWaiting(*job);
    job->again.clear();
    job->devices.clear();
    const JobSpec& spec = job->effective.spec;
    if (spec.deadline) deadlines_.erase({*spec.deadline, job->id});
    admission_.Left(*job->ticket, job->rows_launched, reason);
  }
  job->timing.total_seconds = Seconds(now_() - job->submitted);
  const std::shared_ptr<JobListener> listener = std::move(job->listener);
  listener->OnDone(status, job->timing);
  {
    std::lock_guard lock(mutex_);
    jobs_.erase(job->id);
  }
  none_.notify_all();
}

/// Under mutex_.
bool JobQueue::MayOpen(const Line& line, int device) const {
  return models_.at(line.size.model).devices.count(device) && !line.opening &&
         !line.refused.count(device) &&
         (line.open.empty() ||
          admission_.Exceeds(*line.size.lane, static_cast<int>(line.open.size())));
}

bool JobQueue::HasWork(int device) const {
  std::lock_guard lock(mutex_);
  if (!ended_.empty()) return true;
  return std::any_of(lines_.begin(), lines_.end(), [&](const auto& entry) {
    const Line& line = entry.second;
    return !line.waiting.empty() && (line.open.count(device) || MayOpen(line, device));
  });
}

std::optional<JobQueue::Size> JobQueue::ToOpen(int device) {
  std::lock_guard lock(mutex_);
  for (auto& [lane, line] : lines_) {
    if (line.waiting.empty() || line.open.count(device) || !MayOpen(line, device)) continue;
    line.opening = device;
    return line.size;
  }
  return std::nullopt;
}

void JobQueue::Opened(const Size& size, int device, const absl::Status& status) {
  std::vector<std::shared_ptr<Job>> hopeless;
  {
    std::lock_guard lock(mutex_);
    const auto found = models_.find(size.model);
    if (found == models_.end() || !found->second.devices.count(device)) return;  // lost meanwhile
    Line& line = lines_[size.lane];
    line.size = size;
    if (line.opening == device) line.opening.reset();
    if (status.ok()) {
      line.open.insert(device);
    } else {
      line.refused.insert(device);
      const std::set<int>& devices = found->second.devices;
      if (line.open.empty() &&
          std::includes(line.refused.begin(), line.refused.end(), devices.begin(), devices.end()))
        for (const auto& [key, job] : line.waiting) hopeless.push_back(job);
      for (const std::shared_ptr<Job>& job : hopeless) StartEnding(*job);
    }
  }
  for (const std::shared_ptr<Job>& job : hopeless) Finish(job, status, EndReason::kFailed);
  Wake();
}

bool JobQueue::Close(Admission::Lane* lane, int device) {
  std::lock_guard lock(mutex_);
  Line& line = lines_.at(lane);
  if (!line.waiting.empty()) return false;
  line.open.erase(device);
  return true;
}

std::shared_ptr<JobQueue::Job> JobQueue::First(Admission::Lane* lane, int device,
                                               int own_rows) const {
  std::lock_guard lock(mutex_);
  const auto found = lines_.find(lane);
  if (found == lines_.end()) return nullptr;
  const Line& line = found->second;
  if (line.waiting.empty() || !line.open.count(device) ||
      own_rows >= admission_.RowsForEach(*lane, static_cast<int>(line.open.size())))
    return nullptr;
  return line.waiting.begin()->second;
}

std::shared_ptr<JobQueue::Image> JobQueue::Take(const std::shared_ptr<Job>& job, int device) {
  std::lock_guard lock(mutex_);
  if (job->over || job->ending || job->waiting() == 0 || !LineOf(*job).open.count(device))
    return nullptr;
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
  std::lock_guard telling(job.telling);
  if (job.started || !job.listener) return;
  job.started = true;
  job.timing.queued_seconds = Seconds(now_() - job.submitted);
  job.listener->OnStarted();
}

void JobQueue::Drawn(const std::shared_ptr<Image>& image) {
  std::lock_guard lock(mutex_);
  if (!image->job->devices.count(image)) return;  // the job is over, or the device lost
  image->in_slot = false;
  admission_.Drawn(*image->job->ticket);
}

void JobQueue::GiveBack(std::shared_ptr<Image> image) {
  {
    std::lock_guard lock(mutex_);
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

void JobQueue::Tell(std::vector<Outcome> outcomes) {
  std::stable_sort(outcomes.begin(), outcomes.end(), [](const Outcome& a, const Outcome& b) {
    return a.image->job->id < b.image->job->id;
  });
  for (auto first = outcomes.begin(); first != outcomes.end();) {
    const std::shared_ptr<Job> job = first->image->job;
    const auto end = std::find_if(
        first, outcomes.end(), [&](const Outcome& outcome) { return outcome.image->job != job; });
    std::lock_guard telling(job->telling);
    const auto news = std::stable_partition(first, end, [&](const Outcome& outcome) {
      return !job->listener || outcome.image->lost || outcome.evaluation <= outcome.image->told;
    });
    for (auto outcome = news; outcome != end; ++outcome) {
      outcome->image->told = outcome->evaluation;
      ++job->evaluations_done;
    }
    if (news != end)
      job->listener->OnProgress(Saturated(job->evaluations_done), Saturated(job->evaluations()));
    for (auto outcome = news; outcome != end; ++outcome) {
      if (!outcome->error.ok()) {
        FinishLocked(job, outcome->error, EndReason::kFailed);
        break;
      }
      if (outcome->preview) {
        if (job->timing.first_preview_seconds < 0)
          job->timing.first_preview_seconds = Seconds(now_() - job->submitted);
        job->listener->OnPreview(*outcome->preview, outcome->evaluation);
      }
      if (!outcome->result) continue;
      {
        std::lock_guard lock(mutex_);
        job->devices.erase(outcome->image);
      }
      job->listener->OnImage(*std::move(outcome->result));
      if (++job->images_done == job->count()) FinishLocked(job, absl::OkStatus(), std::nullopt);
    }
    first = end;
  }
}

}  // namespace denoised
