// SPDX-License-Identifier: Apache-2.0
#include "trainer/samples.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "engine/engine.h"
#include "engine/images/png.h"

namespace denoised::trainer {
namespace {

constexpr uint64_t kFirstSeed = 1000;
/// In which a signal, which notifies nobody, is noticed.
constexpr auto kSignalInterval = std::chrono::milliseconds(100);

class Collector final : public JobListener {
 public:
  explicit Collector(int count) : images_(count) {}
  void OnImage(ImageResult image) override { images_[image.index] = std::move(image.pixels); }
  void OnDone(const absl::Status& status, const JobTiming&) override {
    MutexLock lock(&mutex_);
    status_ = status;
    done_ = true;
    changed_.NotifyAll();
  }
  absl::StatusOr<std::vector<Tensor>> Wait(Engine& engine, JobId job,
                                           const std::atomic<bool>& stop) {
    {
      MutexLock lock(&mutex_);
      while (!done_ && !stop)
        changed_.WaitUntil(&mutex_, std::chrono::steady_clock::now() + kSignalInterval);
    }
    if (stop) engine.Cancel(job);
    MutexLock lock(&mutex_);
    while (!done_) changed_.Wait(&mutex_);
    if (absl::IsCancelled(status_)) return Cancelled("stopped by a signal");
    if (!status_.ok()) return status_;
    return images_;
  }

 private:
  std::vector<Tensor> images_;  // written before OnDone, read after it
  Mutex mutex_;
  ConditionVariable changed_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<Grid> DrawGrid(const std::string& directory,
                              const std::optional<training::CudaOptions>& gpu, int count,
                              std::vector<float> class_values,
                              const std::vector<std::string>& prompts,
                              const std::atomic<bool>& stop) {
  EngineOptions options;
  options.device = gpu ? "cuda" : "cpu";
  if (gpu) options.devices = {gpu->number};
  options.fp32 = gpu && gpu->fp32;
  options.autotune = false;  // it would take longer than the pictures
  // The engine takes no fewer than 2.
  options.max_rows = std::clamp(count, 2, 16);
  options.watchdog_seconds = 0;
  options.allow_nonfinite = true;  // a young model may draw anything
  DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine, Engine::Create(options));
  DENOISED_RETURN_IF_ERROR(engine->Open("model", directory));
  JobSpec spec;
  spec.model = "model";
  spec.count = count;
  spec.seed = kFirstSeed;
  spec.class_values = std::move(class_values);
  const auto info = engine->Find("model");
  for (int i = 0; info->condition == ClassCondition::kLabel && i < count; ++i)
    spec.class_labels.push_back(i % std::max(1, info->num_classes));
  for (int i = 0; !prompts.empty() && i < count; ++i)
    spec.prompts.push_back({.text = prompts[i % prompts.size()]});
  std::vector<FieldViolation> violations;
  DENOISED_ASSIGN_OR_RETURN(EffectiveJob job, engine->Resolve(spec, &violations));
  if (!violations.empty())
    return InvalidArgument("{}: cannot be sampled: {}: {}", directory, violations[0].field,
                           violations[0].description);
  const auto collector = std::make_shared<Collector>(count);
  DENOISED_ASSIGN_OR_RETURN(const JobId id, engine->Submit(std::move(job), collector));
  DENOISED_ASSIGN_OR_RETURN(const std::vector<Tensor> images, collector->Wait(*engine, id, stop));

  const auto columns = static_cast<int>(std::ceil(std::sqrt(static_cast<double>(count))));
  const int rows = (count + columns - 1) / columns;
  const auto h = static_cast<int>(images[0].dim(0)), w = static_cast<int>(images[0].dim(1)),
             c = static_cast<int>(images[0].dim(2));
  if (c != 1 && c != 3) return Unimplemented("pictures of {} channels have no PNG", c);
  Pixels grid{columns * w, rows * h, c, {}};
  grid.samples.assign(static_cast<size_t>(grid.width) * grid.height * c, 0);
  for (int i = 0; i < count; ++i) {
    const std::vector<uint8_t> bytes = ToBytes(images[i]);
    for (int y = 0; y < h; ++y)
      std::copy_n(
          bytes.data() + static_cast<size_t>(y) * w * c, static_cast<size_t>(w) * c,
          grid.samples.data() +
              (static_cast<size_t>(i / columns * h + y) * grid.width + i % columns * w) * c);
  }
  DENOISED_ASSIGN_OR_RETURN(std::string png, EncodePng(grid, {}));
  return Grid{std::move(png), grid.width, grid.height, c};
}

}  // namespace denoised::trainer
