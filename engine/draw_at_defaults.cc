// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "engine/engine.h"

namespace denoised {
namespace {

constexpr uint64_t kSeed = 1;

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
JobSpec RequestOf(const ModelInfo& model, int count) {
  JobSpec spec{.model = model.name, .seed = kSeed, .count = count};
  for (int i = 0; i < spec.count && model.condition == ClassCondition::kLabel; ++i)
    spec.class_labels.push_back(model.num_classes > spec.count
                                    ? static_cast<int>(int64_t{i} * model.num_classes / spec.count)
                                    : i % model.num_classes);
  const int first = count == 1;  // alone, an image needs a text that is not empty
  for (int i = 0; i < spec.count && model.text; ++i)
    spec.prompts.push_back(
        {.text = kPrompts[static_cast<size_t>(i + first) % std::size(kPrompts)]});
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

}  // namespace

absl::Status DrawAtDefaults(Engine& engine, const std::string& name, int count, int max_steps) {
  const auto model = engine.Find(name);
  if (model == nullptr) return NotFound("there is no model \"{}\"", name);
  JobSpec spec = RequestOf(*model, count);
  if (max_steps > 0 && max_steps < model->default_steps) spec.sampler.steps = max_steps;
  std::vector<FieldViolation> violations;
  DENOISED_ASSIGN_OR_RETURN(EffectiveJob job, engine.Resolve(spec, &violations));
  if (!violations.empty() && spec.sampler.steps != 0) {  // too few for this sampler
    violations.clear();
    spec.sampler.steps = 0;
    DENOISED_ASSIGN_OR_RETURN(job, engine.Resolve(spec, &violations));
  }
  if (!violations.empty())
    return FailedPrecondition("the model cannot draw at its defaults: {} {}", violations[0].field,
                              violations[0].description);
  const auto waiter = std::make_shared<Waiter>();
  DENOISED_RETURN_IF_ERROR(engine.Submit(std::move(job), waiter).status());
  return waiter->Wait();
}

}  // namespace denoised
