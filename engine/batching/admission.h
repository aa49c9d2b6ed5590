// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/core/mutex.h"
#include "engine/job.h"

namespace denoised {

inline double ToSeconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

/// The limits of the queue, the order in which jobs are served, and estimates of when they will be
/// done. Thread-safe: any thread may enter a job, and the devices' threads report when its images
/// take and leave slots. No call costs more than O(log jobs + lanes with jobs).
///
/// Order. A lane is a model at one image size. Its next job is the one that would end first if all
/// its jobs shared the device, each client according to its weight: the "fair sojourn protocol"
/// (Friedman and Henderson, SIGMETRICS 2003) with weights. A short job need not wait for a long
/// one, yet no job ends later than it would under sharing, and none starves. Virtual time V is the
/// work that a client of weight 1 would have received under sharing; it grows with every
/// evaluation. A job that arrives at time V with `work` row evaluations to do gets the key
///
///     max(V, what its client has received) + (the client's unfinished jobs) · work / weight
///
/// which never changes, so two jobs never displace each other in turn. What a client has received
/// grows when one of its jobs ends, by the rows that were really spent on the job.
///
/// Lanes share the devices by measured seconds: the next evaluation of any device goes to the lane
/// with the fewest seconds. Each second is divided by the weight of the clients that the lane had
/// at the time.
///
/// Wrong estimates become right. Only what is admitted is measured. So if warm-up was disturbed (a
/// busy machine, a process that was stopped) and every request had a deadline that the estimate
/// refuses, nothing would ever be admitted nor measured. Therefore a lane without jobs admits,
/// twice a minute at most, a job whose deadline is estimated not to be met. Its evaluations are
/// measured, and so the jobs that follow are judged rightly. If the estimate was right, the
/// deadline ends the job; what it took was idle time, or its fair share. A lane with jobs needs
/// none of this, because it measures them. The first evaluation of a job corrects what warm-up
/// measured, the third what jobs did.
class Admission {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  struct Limits {
    int requests = 4096;
    int images = 4096;
    size_t bytes = size_t{1} << 30;
    std::array<double, kPriorities> weights = {16, 4, 1};
  };

  class Lane;
  class Ticket;

  /// The room that one device has for one size of a model.
  struct Room {
    int rows = 0;              // of one evaluation
    int slots = 0;             // images in flight
    std::vector<int> buckets;  // what rows are padded to, ascending; empty: every count is one
  };

  explicit Admission(const Limits& limits);
  ~Admission();

  /// The lane of this model and size. The first size of a model is its own, and its lane lives as
  /// long as the model. The lane of another size lives as long as a device or a job has it. Such a
  /// size is assumed to have the same room, and costs in proportion to its pixels, until it is
  /// opened and measured.
  std::shared_ptr<Lane> Open(const std::string& model, int height, int width, const Room& room);
  /// How many devices draw the model from now on; 1 before the first call.
  void SetDevices(const std::string& model, int devices);
  /// Forgets a model that has no jobs. Lanes that a device has can still be used if `keeps_lanes`,
  /// because a lost device may return from a hang and report on them.
  void Close(const std::string& model, bool keeps_lanes = false);

  /// Lets a job into the queue, or says which limit it would exceed (ResourceExhausted), that its
  /// deadline cannot be met (DeadlineExceeded; but see above for a lane without jobs) or that there
  /// is no such model (NotFound).
  /// `estimate` is filled in either way; it may be null.
  absl::StatusOr<std::shared_ptr<Ticket>> Enter(JobId id, const EffectiveJob& job, TimePoint now,
                                                Estimate* estimate);
  /// The times of `estimate` anew, for a job that waits with all its images.
  void Expect(const Ticket& ticket, Estimate* estimate) const;
  /// The job's place in its lane: the smallest key goes first.
  static std::pair<double, JobId> Key(const Ticket& ticket);
  static const std::shared_ptr<Lane>& LaneOf(const Ticket& ticket);

  // One image of the job, with `evaluations_left` to go, took a slot, lost its slot to another
  // image, or left it after its last evaluation. `parked_bytes`: host memory of its state while it
  // has no slot; 0 if it begins from the start.
  void Began(Ticket& ticket, int evaluations_left, size_t parked_bytes);
  void Parked(Ticket& ticket, int evaluations_left, size_t parked_bytes);
  void Drawn(Ticket& ticket);
  /// The image's device is lost. The image has to be drawn again, and `rows` rows were wasted.
  /// `in_slot`: it had not been Drawn.
  void Lost(Ticket& ticket, bool in_slot, int64_t rows);
  /// How many images of `parked_bytes` each may be parked within the limit of bytes.
  size_t RoomToPark(size_t parked_bytes) const;

  /// Frees the job's place in the queue. Left must follow.
  void Withdraw(Ticket& ticket);
  /// The job is over after `rows` row evaluations; `reason` is set if it was not completed.
  void Left(Ticket& ticket, int64_t rows, std::optional<EndReason> reason);

  /// The charge for an evaluation of a lane: the expected seconds, and the weight of the clients
  /// that the lane had at the time.
  struct Charge {
    double seconds = 0, weight = 0;
  };
  /// Expected seconds of an evaluation of so many rows; 0: nothing was measured yet.
  double Cost(const Lane& lane, int rows) const;
  /// An evaluation of the lane was launched: `rows` rows, padded to `bucket`.
  Charge Launched(Lane& lane, int rows, int bucket);
  /// An evaluation of `bucket` rows took `seconds`; negative: not measured. Warm-up passes no
  /// charge, because no lane was charged for it.
  void Measured(Lane& lane, int bucket, double seconds, const Charge* charge = nullptr);
  /// A stage other than evaluations took `seconds` for `images` images together, or init images;
  /// negative: not measured. It counts for estimates. If `charged`, the lane pays for it; nobody
  /// pays for warm-up. Report condition sets that were found in the cache with 0 seconds, so that
  /// the average of the stage includes them.
  void MeasuredStage(Lane& lane, Stage stage, int images, double seconds, bool charged);
  /// Expected seconds of such a stage for one image, or init image; 0: nothing was measured yet.
  double StageCost(const Lane& lane, Stage stage) const;
  /// Measured seconds of each stage at the model's own size: of one image, or of an evaluation of
  /// one row; 0: not measured.
  std::array<double, kStages> StageSeconds(const std::string& model) const;
  /// The lane's place among the lanes: the smallest goes first.
  double Turn(const Lane& lane) const;
  /// An equal share of the lane's rows for each of `devices` devices. A device that has as many
  /// leaves the waiting images to the others.
  int RowsForEach(const Lane& lane, int devices) const;
  /// Whether the lane has more rows or images than `devices` devices can hold at a time.
  bool Exceeds(const Lane& lane, int devices) const;

  struct Totals {  // of one model
    std::array<int, kPriorities> queued_requests{}, queued_images{};
    int active_images = 0;
    double oldest_wait_seconds = 0;
    uint64_t evaluations = 0, rows = 0, padding_rows = 0, parked_images = 0;
    std::array<uint64_t, kEndReasons> wasted_rows{};
  };
  Totals Read(const std::string& model, TimePoint now) const;

 private:
  class Recent;
  struct Client;
  struct Model;

  static std::shared_ptr<Lane> LaneOfSize(Model& model, int height, int width);
  /// Expected seconds of one image's stages, but for evaluations and its init image.
  static double StagesOfImage(const Lane& lane);
  void WaitAgain(Ticket& ticket, int evaluations_left) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Fills in the times. `entered`: the ticket is among what waits in the lane.
  void Predict(const Ticket& ticket, bool entered, Estimate* estimate) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  double DrainSeconds() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Unqueue(Ticket& ticket, int images, int64_t work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Client& ClientOf(Lane& lane, const JobSpec& spec) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Limits limits_;
  // Also guards lanes and tickets.
  mutable Mutex mutex_;
  std::map<std::string, std::unique_ptr<Model>> models_ ABSL_GUARDED_BY(mutex_);
  /// Those that were closed and whose lanes a lost device may have.
  std::vector<std::unique_ptr<Model>> closed_ ABSL_GUARDED_BY(mutex_);
  /// Lanes with unfinished jobs, which hold them.
  std::set<const Lane*> busy_ ABSL_GUARDED_BY(mutex_);
  double idle_turn_ ABSL_GUARDED_BY(mutex_) = 0;  // the largest of a lane when its last job left
  int queued_requests_ ABSL_GUARDED_BY(mutex_) = 0, queued_images_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace denoised
