#pragma once

#include <array>
#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/core/mutex.h"
#include "engine/job.h"

namespace denoised {

/// What waits and what may: the limits of the queue, the order in which jobs are served, and what
/// they have to expect. Thread-safe: whoever submits a job enters it here at once, and the devices'
/// threads tell of its way through their slots. No call costs more than O(log jobs).
///
/// Order. A lane (a model at one image size) serves first the job that would end first if all its
/// jobs were served side by side, each client with a share by its weight: the "fair sojourn
/// protocol" (Friedman and Henderson, SIGMETRICS 2003) with weights. So a short job need not wait
/// for a long one, yet none ends later than it would under sharing, and none starves: virtual time
/// V, the work that sharing would have given to a client of weight 1, grows with every evaluation,
/// and a job that arrives at V with `work` row evaluations to do has the key
///
///     max(V, what its client has had) + (the client's unfinished jobs) · work / weight
///
/// which never changes: two jobs never displace each other in turn. What a client has had counts
/// when a job of it ends, by the rows that were spent on it and not by the requests.
///
/// Lanes share the devices by measured seconds: the next evaluation of any device goes to the lane
/// whose seconds, each divided by the weight of the clients it then had, are fewest.
class Admission {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  struct Limits {
    int requests = 4096;
    int images = 4096;
    size_t bytes = size_t{1} << 30;
    int requests_per_client = 0;  // 0: as requests
    std::array<double, kPriorities> weights = {16, 4, 1};
  };

  class Lane;
  class Ticket;

  /// What one device has room for, at each size of a model.
  struct Room {
    int rows = 0;              // of one evaluation
    int slots = 0;             // images in flight
    std::vector<int> buckets;  // what rows are padded to, ascending; empty: every count is one
  };

  explicit Admission(const Limits& limits);
  ~Admission();

  /// A lane for jobs of this size; the one there is when there is one. Lives as long as the model.
  Lane* Open(const std::string& model, int height, int width, const Room& room);
  /// How many devices draw the model from now on; one until it is said.
  void SetDevices(const std::string& model, int devices);
  /// Forgets a model that has no jobs.
  void Close(const std::string& model);

  /// Lets a job into the queue, or says which limit it would exceed (ResourceExhausted), that its
  /// deadline cannot be met (DeadlineExceeded) or that there is no such model (NotFound).
  /// `estimate` is filled in either way; it may be null.
  absl::StatusOr<std::shared_ptr<Ticket>> Enter(JobId id, const EffectiveJob& job, TimePoint now,
                                                Estimate* estimate);
  /// Where the job stands, and in which lane: the smallest goes first.
  static std::pair<double, JobId> Key(const Ticket& ticket);
  static Lane* LaneOf(const Ticket& ticket);

  // About one image of the job with so many evaluations to go: it took a slot, lost it to another
  // image, or left it after its last evaluation. `parked_bytes` is what its state takes while it
  // has lost its slot; 0 for one that begins.
  void Began(Ticket& ticket, int evaluations_left, size_t parked_bytes);
  void Parked(Ticket& ticket, int evaluations_left, size_t parked_bytes);
  void Drawn(Ticket& ticket);
  /// Its device is lost: it has to be drawn again, and so many rows were for nothing. `in_slot`:
  /// it was not Drawn.
  void Lost(Ticket& ticket, bool in_slot, int64_t rows);
  /// How many images of such a state may be parked within the limit of bytes.
  size_t RoomToPark(size_t parked_bytes) const;

  /// Frees the job's place in the queue at once; the rest follows with Left.
  void Withdraw(Ticket& ticket);
  /// The job is over after so many row evaluations; `reason` when it was not completed.
  void Left(Ticket& ticket, int64_t rows, std::optional<EndReason> reason);

  /// The expected seconds of an evaluation, and the weight of the clients that the lane then had.
  struct Charge {
    double seconds = 0, weight = 0;
  };
  /// An evaluation of the lane was launched, with `rows` of `bucket` rows at work.
  Charge Launched(Lane& lane, int rows, int bucket);
  /// It took so long; also called for each bucket at warm-up, which nobody is charged for.
  /// Negative: not measured.
  void Measured(Lane& lane, int bucket, double seconds, const Charge* charge = nullptr);
  /// Whose turn it is: the smallest goes first.
  double Turn(const Lane& lane) const;
  /// Rows that each of so many devices should have of the lane, for all to have alike: one that has
  /// as many leaves what waits to the others.
  int RowsForEach(const Lane& lane, int devices) const;
  /// Whether the lane has more rows or images than so many devices carry at a time.
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
  struct Client;
  struct Model;

  Lane& LaneOf(Model& model, int height, int width);
  void WaitAgain(Ticket& ticket, int evaluations_left);
  Estimate Predict(const Lane& lane, const Ticket& ticket) const;
  double DrainSeconds() const;
  void Unqueue(Ticket& ticket, int images, int64_t work);
  Client& ClientOf(Lane& lane, const JobSpec& spec);

  const Limits limits_;
  mutable std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Model>> models_;
  std::set<const Lane*> busy_;  // with unfinished jobs: few, whatever the sizes that ever came up
  int queued_requests_ = 0, queued_images_ = 0;
  size_t queued_bytes_ = 0;
  std::map<std::string, int> queued_requests_of_;  // by client; absent: none
};

}  // namespace denoised
