// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>

#include "engine/core/condition_variable.h"
#include "engine/core/e4m3.h"
#include "engine/core/mutex.h"
#include "engine/device_engine.h"
#include "engine/io/calibration.h"
#include "engine/io/model_directory.h"

/// Draws images with the model as it is, all their noise levels, and records the largest input of
/// each layer that may be in e4m3.

namespace denoised {
namespace {

constexpr int kImages = 16;
constexpr uint64_t kSeed = 1;
/// Inputs of other seeds are seldom larger than twice the largest that was seen. The room costs no
/// accuracy, as e4m3 is a floating-point type.
constexpr float kRoom = 2;

/// For models that read text: short and long, things, people and scenes.
constexpr const char* kPrompts[] = {
    "",
    "a red apple",
    "a photo of a dog in the snow",
    "a portrait of an old woman, oil on canvas",
    "a city at night, neon lights, rain, reflections on wet streets, highly detailed",
    "a bowl of fruit on a wooden table, soft morning light",
    "a blue circle on a white background",
    "mountains and a lake at sunset, wide angle, dramatic clouds, 8k",
};

class Waiter final : public JobListener {
 public:
  void OnImage(ImageResult /*image*/) override {}
  void OnDone(const absl::Status& status, const JobTiming& /*timing*/) override {
    MutexLock lock(&mutex_);
    done_ = true;
    status_ = status;
    changed_.NotifyAll();
  }
  absl::Status Wait() {
    MutexLock lock(&mutex_);
    while (!done_) changed_.Wait(&mutex_);
    return status_;
  }

 private:
  Mutex mutex_;
  ConditionVariable changed_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

/// Everything at the model's defaults; as many conditions as it has, spread over the images.
JobSpec RequestOf(const ModelInfo& model) {
  JobSpec spec{.model = model.name, .seed = kSeed, .count = std::min(kImages, model.max_count)};
  for (int i = 0; i < spec.count && model.condition == ClassCondition::kLabel; ++i)
    spec.class_labels.push_back(model.num_classes > spec.count
                                    ? static_cast<int>(int64_t{i} * model.num_classes / spec.count)
                                    : i % model.num_classes);
  for (int i = 0; i < spec.count && model.text; ++i)
    spec.prompts.push_back({.text = kPrompts[static_cast<size_t>(i) % std::size(kPrompts)]});
  std::mt19937 random(kSeed);
  if (model.condition == ClassCondition::kVector || model.condition == ClassCondition::kValue) {
    std::normal_distribution<float> normal;
    const bool positive = model.condition == ClassCondition::kValue && model.logarithmic_time;
    for (int i = 0; i < spec.count * model.class_vector_size; ++i)
      spec.class_values.push_back(positive ? std::abs(normal(random)) : normal(random));
  }
  if (model.images.required) {
    spec.init_image = Tensor::Host({model.height, model.width, model.channels}, DType::kF32);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (float& value : spec.init_image.span<float>()) value = uniform(random);
  }
  if (model.images.mask_required) {
    spec.mask = Tensor::Host({model.height, model.width}, DType::kF32);
    const std::span<float> mask = spec.mask.span<float>();
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = i < mask.size() / 2 ? 1.0f : 0.0f;
  }
  return spec;
}

absl::Status Draw(Engine& engine, const std::string& name) {
  std::vector<FieldViolation> violations;
  DENOISED_ASSIGN_OR_RETURN(const EffectiveJob job,
                            engine.Resolve(RequestOf(*engine.Find(name)), &violations));
  if (!violations.empty())
    return FailedPrecondition("the model cannot be calibrated at its defaults: {} {}",
                              violations[0].field, violations[0].description);
  const auto waiter = std::make_shared<Waiter>();
  DENOISED_RETURN_IF_ERROR(engine.Submit(job, waiter).status());
  return waiter->Wait();
}

absl::Status Write(const std::string& path, const std::string& text) {
  std::error_code error;
  const auto parent = std::filesystem::path(path).parent_path();
  std::filesystem::create_directories(parent, error);
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (file.good()) return absl::OkStatus();
  return FailedPrecondition(
      "{} cannot be written; make {} writable, or give another directory with --calibrations", path,
      parent.string());
}

}  // namespace

absl::StatusOr<std::string> Calibrate(const std::string& directory, const EngineOptions& options) {
  DENOISED_ASSIGN_OR_RETURN(const ModelDirectory model, ModelDirectory::Read(directory));
  DENOISED_ASSIGN_OR_RETURN(const Weights weights, model.unet().OpenWeights());
  EngineOptions on_one = options;
  on_one.devices.resize(1);
  on_one.watchdog_seconds = 0;
  const auto ranges = std::make_shared<InputRanges>();
  const BackendOpener open = [&ranges](BackendOptions backend) {
    backend.input_ranges = ranges;
    return OpenBackend(backend);
  };
  DENOISED_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, CreateEngine(on_one, open));
  const std::string name = "model";
  DENOISED_RETURN_IF_ERROR(engine->Open(name, directory, Precision::kDefault));
  ranges->Start();
  DENOISED_RETURN_IF_ERROR(Draw(*engine, name));
  engine.reset();  // a GPU tells its ranges when it is closed
  Calibration calibration{.weights = weights.Fingerprint(), .input_scales = {}};
  DENOISED_ASSIGN_OR_RETURN(const auto largest_inputs, ranges->largest());
  for (const auto& [layer, largest] : largest_inputs)
    calibration.input_scales[layer] = E4m3Scale(kRoom * largest);
  if (calibration.input_scales.empty())
    return FailedPrecondition("{}: no layer's input was seen", directory);
  const std::string path = Calibration::Path(directory, options.calibrations, calibration.weights);
  DENOISED_RETURN_IF_ERROR(Write(path, calibration.ToJson().dump(2) + "\n"));
  return path;
}

}  // namespace denoised
