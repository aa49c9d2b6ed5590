// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/batching/step_batcher.h"
#include "tests/batching/fake_codec.h"
#include "tests/batching/fake_denoiser.h"
#include "tests/batching/simulated_backend.h"

namespace denoised {

/// What a job told, and when by the simulation's clock.
struct Heard {
  FakeClock::TimePoint submitted;
  std::optional<FakeClock::TimePoint> first_preview, ended;
  int submitted_at = 0;  // evaluations launched before
  std::optional<int> started_at, ended_at;
  std::vector<std::pair<FakeClock::TimePoint, Estimate>> places;  // of OnQueued
  std::vector<int> progress;
  std::vector<std::pair<int, int>> previews;  // image, evaluation
  std::map<int, std::vector<float>> images;
  std::optional<absl::Status> done;
  std::vector<std::tuple<int, Stage, double>> stages;  // image, stage, seconds

  double seconds() const {
    return std::chrono::duration<double>(ended.value() - submitted).count();
  }
};

/// The job queue and a step batcher for each of some simulated devices: what happens depends on
/// what is asked alone, and an evaluation of `rows` rows takes cost(rows) seconds of a clock that
/// nobody waits for. Devices work side by side, though one after the other is computed.
class Simulation : public EngineObserver {
 public:
  struct Options {
    int devices = 1;
    int max_rows = 16;
    int slots = 0;  // 0: as max_rows
    std::function<double(int rows)> cost = [](int rows) { return 0.001 + 0.0001 * rows; };
    Admission::Limits limits;
    Batching batching = Batching::kStep;
    int keep_evaluations = 4;
    std::optional<int> broken_class;  // images of it are NaN
    bool pads_rows = false;           // to powers of two, as on a GPU; needs warm_up
    std::optional<int> huge_class;    // latents of it are finite, and their pixels are not
    bool allow_nonfinite = false;     // as StepBatcher::Options::allow_nonfinite
    bool warm_up = false;  // as the engine does, instead of being told what each bucket costs
    /// Models have a codec, and this many images decoded side by side take so long.
    std::function<double(int images)> decode_cost;
    /// With decode_cost: the codec encodes, too.
    std::function<double(int images)> encode_cost;
    bool graphs = true;               // false: there is never memory for one
    std::function<void()> part_done;  // as StepBatcher::Options::part_done
  };
  struct Request {
    int steps = 4;  // an evaluation each
    uint64_t seed = 0;
    int count = 1;
    double guidance = 1;
    std::string model = "fake";
    int size = kSize;
    int width = 0;            // 0: as size
    bool init_image = false;  // drawn by the seed; images begin in the middle of the steps
    bool previews = false;
    Priority priority = Priority::kNormal;
    std::string client;
    double client_weight = 1;
    std::optional<double> deadline_seconds;  // from now
  };
  static constexpr int kSize = 4;

  struct Device {
    std::unique_ptr<SimulatedBackend> backend;
    std::unique_ptr<StepBatcher> batcher;
    FakeClock::TimePoint free;  // when its last evaluation was done
    bool lost = false;
  };

  explicit Simulation(const Options& options)
      : options_(options),
        admission(options.limits),
        queue(admission, [this] { return clock.now; }) {
    for (int i = 0; i < options.devices; ++i) {
      auto cpu = OpenBackend({.device = "cpu"});
      DENOISED_CHECK(cpu.ok(), "{}", cpu.status().ToString());
      Device device;
      device.backend = std::make_unique<SimulatedBackend>(*std::move(cpu), &clock, options.cost,
                                                          fmt::format("simulated:{}", i));
      device.backend->decode_cost = options.decode_cost;
      device.backend->encode_cost = options.encode_cost;
      device.backend->graphs = options.graphs;
      device.backend->splits_rows = false;
      device.backend->can.pads_rows = options.pads_rows;
      device.batcher = std::make_unique<StepBatcher>(
          *device.backend, admission, queue, this,
          StepBatcher::Options{.device = i,
                               .batching = options.batching,
                               .keep_evaluations = options.keep_evaluations,
                               .allow_nonfinite = options.allow_nonfinite,
                               .part_done = options.part_done});
      devices.push_back(std::move(device));
    }
    Add("fake");
    auto scheduler = SchedulerConfig::Parse({{"_class_name", "EDMEulerScheduler"}}, "scheduler");
    DENOISED_CHECK(scheduler.ok(), "{}", scheduler.status().ToString());
    scheduler_ = std::make_unique<SchedulerConfig>(*std::move(scheduler));
  }

  /// A model of kSize; of any size when it has no classes.
  void Add(const std::string& model, int classes = 5) {
    for (const Device& device : devices) {
      const auto denoiser = std::make_shared<FakeDenoiser>(kSize, 1, classes);
      if (options_.broken_class && classes > 0) denoiser->BreakClass(*options_.broken_class);
      if (options_.huge_class && classes > 0) denoiser->FillClass(*options_.huge_class, 1e30f);
      BatchedModel batched{.name = model,
                           .denoiser = denoiser,
                           .null_label = classes - 1,
                           .max_rows = options_.max_rows,
                           .slots = Slots(),
                           .max_evaluations = 2000};
      if (options_.decode_cost) {
        batched.codec = std::make_shared<FakeCodec>(1, options_.encode_cost != nullptr);
        batched.max_images = 8;
      }
      const absl::Status added = device.batcher->AddModel(batched, size(), size());
      DENOISED_CHECK(added.ok(), "{}", added.ToString());
    }
    if (options_.warm_up) {
      for (const Device& device : devices) {
        for (bool more = true; more;) {
          const auto warmed = device.batcher->WarmUp(model);
          DENOISED_CHECK(warmed.ok(), "{}", warmed.status().ToString());
          more = *warmed;
        }
      }
      return;
    }
    // The CPU warms up its smallest bucket alone, as rows cost it their full time; this one is
    // told.
    const auto lane =
        admission.Open(model, size(), size(), {.rows = options_.max_rows, .slots = Slots()});
    for (int rows = 1; rows <= options_.max_rows; ++rows)
      admission.Measured(*lane, rows, options_.cost(rows));
  }

  EffectiveJob Job(const Request& request) {
    const double strength = request.init_image ? 0.5 : 1;
    std::shared_ptr<const StepPlan>& plan = plans_[{request.steps, strength}];
    if (!plan) {
      auto compiled = scheduler_->Compile(
          {.sampler = Sampler::kEdmEuler, .steps = request.steps, .strength = strength});
      DENOISED_CHECK(compiled.ok(), "{}", compiled.status().ToString());
      plan = std::make_shared<const StepPlan>(*std::move(compiled));
    }
    EffectiveJob job{.steps = request.steps,
                     .evaluations = static_cast<int>(plan->evaluations.size()),
                     .plan = plan,
                     .guided = request.guidance > 1};
    job.spec = {.model = request.model,
                .seed = request.seed,
                .count = request.count,
                .guidance_scale = request.guidance};
    const int factor = options_.decode_cost ? 2 : 1;
    job.spec.height = factor * request.size;
    job.spec.width = factor * (request.width ? request.width : request.size);
    job.spec.class_labels.assign(request.count, static_cast<int>(request.seed % 4));
    if (request.init_image) {
      job.spec.init_image = Tensor::Host({job.spec.height, job.spec.width, 1}, DType::kF32);
      for (int64_t i = 0; i < job.spec.init_image.elements(); ++i)
        job.spec.init_image.as<float>()[i] =
            std::sin(static_cast<float>(i * (request.seed % 16 + 1)));
    }
    job.spec.previews = request.previews;
    job.spec.priority = request.priority;
    job.spec.client = request.client;
    job.spec.client_weight = request.client_weight;
    if (request.deadline_seconds) {
      FakeClock deadline = clock;
      deadline.Advance(*request.deadline_seconds);
      job.spec.deadline = deadline.now;
    }
    return job;
  }

  absl::StatusOr<std::shared_ptr<Heard>> TrySubmit(const Request& request,
                                                   Estimate* estimate = nullptr) {
    auto heard = std::make_shared<Heard>();
    heard->submitted = clock.now;
    heard->submitted_at = evaluations;
    DENOISED_ASSIGN_OR_RETURN(
        last_id, queue.Submit(Job(request), std::make_shared<Recorder>(this, heard), estimate));
    return heard;
  }
  std::shared_ptr<Heard> Submit(const Request& request) {
    auto heard = TrySubmit(request);
    DENOISED_CHECK(heard.ok(), "{}", heard.status().ToString());
    return *heard;
  }

  void End(JobId id, EndReason reason) {
    queue.End(id, Cancelled("the request was cancelled"), reason);
    queue.EndDueJobs();
  }

  bool busy() const {
    return std::any_of(devices.begin(), devices.end(),
                       [](const Device& device) { return !device.lost && device.batcher->busy(); });
  }
  /// One evaluation of the device that is free first. A device that fails is lost, if there are
  /// others.
  void Step() {
    Device* next = nullptr;
    for (Device& device : devices) {
      if (device.lost || !device.batcher->busy()) continue;
      device.free = std::max(device.free, clock.now);
      if (!next || device.free < next->free) next = &device;
    }
    if (!next) return;
    const FakeClock::TimePoint began = clock.now;
    clock.now = next->free;
    const absl::Status status = next->batcher->Step();
    next->free = clock.now;
    if (!status.ok()) {
      DENOISED_CHECK(devices.size() > 1, "{}", status.ToString());
      next->lost = true;
      queue.Lose(static_cast<int>(next - devices.data()));
    }
    // What comes next may come as soon as any device has something to do, or when all have ended.
    std::optional<FakeClock::TimePoint> soonest;
    for (const Device& device : devices) {
      if (device.lost || !device.batcher->busy()) continue;
      const FakeClock::TimePoint free = std::max(device.free, began);
      soonest = std::min(soonest.value_or(free), free);
    }
    for (const Device& device : devices)
      clock.now = soonest ? *soonest : std::max(clock.now, device.free);
  }
  void RunAll() {
    while (busy()) Step();
  }
  Admission::Totals Totals(const std::string& model = "fake") {
    return admission.Read(model, clock.now);
  }

  void OnEvaluation(const std::string& model, const std::string& device, int rows, int bucket,
                    double seconds) override {
    evaluations_on[device] += 1;
    ++evaluations;
    row_evaluations += rows;
    evaluations_of[model] += 1;
    seconds_of[model] += seconds;
    widest = std::max(widest, rows);
  }
  void OnNonfiniteImage(const std::string&, const std::string&) override { ++nonfinite_images; }
  void OnStage(const std::string&, const std::string&, Stage stage, int count,
               double seconds) override {
    if (stage == Stage::kDecode) decoded_together.push_back(count);
    if (stage == Stage::kEncode) encoded_together.push_back(count);
    stage_seconds += seconds;
  }

 private:
  class Recorder : public JobListener {
   public:
    Recorder(Simulation* simulation, std::shared_ptr<Heard> heard)
        : simulation_(simulation), heard_(std::move(heard)) {}
    void OnQueued(const Estimate& estimate) override {
      DENOISED_CHECK(!heard_->started_at && !heard_->done);
      heard_->places.emplace_back(simulation_->clock.now, estimate);
    }
    void OnStarted() override { heard_->started_at = simulation_->evaluations; }
    void OnProgress(int done, int total) override {
      DENOISED_CHECK(done <= total);
      heard_->progress.push_back(done);
    }
    void OnStage(int image, Stage stage, double seconds) override {
      heard_->stages.emplace_back(image, stage, seconds);
    }
    void OnPreview(const ImageResult& image, int evaluation) override {
      if (!heard_->first_preview) heard_->first_preview = simulation_->clock.now;
      heard_->previews.emplace_back(image.index, evaluation);
    }
    void OnImage(ImageResult image) override {
      DENOISED_CHECK(!heard_->done);
      heard_->images[image.index] = image.pixels.ToFloats();
    }
    void OnDone(const absl::Status& status, const JobTiming&) override {
      DENOISED_CHECK(!heard_->done, "OnDone comes once");
      heard_->done = status;
      heard_->ended = simulation_->clock.now;
      heard_->ended_at = simulation_->evaluations;
    }

   private:
    Simulation* simulation_;
    const std::shared_ptr<Heard> heard_;
  };

  /// Of the models, in pixels.
  int size() const { return options_.decode_cost ? 2 * kSize : kSize; }
  int Slots() const { return options_.slots ? options_.slots : options_.max_rows; }

  const Options options_;

 public:
  FakeClock clock;
  Admission admission;
  JobQueue queue;
  std::vector<Device> devices;
  JobId last_id = 0;
  int evaluations = 0, nonfinite_images = 0;
  int64_t row_evaluations = 0;
  int widest = 0;
  std::vector<int> decoded_together, encoded_together;  // images, each time
  double stage_seconds = 0;
  std::map<std::string, int> evaluations_of, evaluations_on;  // by model, by device
  std::map<std::string, double> seconds_of;

 private:
  std::unique_ptr<SchedulerConfig> scheduler_;
  std::map<std::pair<int, double>, std::shared_ptr<const StepPlan>> plans_;  // by steps, strength
};

}  // namespace denoised
