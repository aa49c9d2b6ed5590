// SPDX-License-Identifier: Apache-2.0
#include <google/protobuf/stubs/logging.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "engine/io/model_directory.h"
#include "engine/pipelines/prompt_reader.h"
#include "engine/resolve.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/api/translate.h"
#include "server/jobs/job_request.h"
#include "server/status/status_details.h"
#include "tests/fuzz/message_mutator.h"

namespace {

using namespace denoised;  // NOLINT: a program of one file

constexpr size_t kMaxTrailer = 8192;  // what gRPC's peers accept by default

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

ModelInfo Model(const char* name, const char* scheduler_config, int channels) {
  auto scheduler = SchedulerConfig::Parse(nlohmann::json::parse(scheduler_config), name);
  Require(scheduler.ok(), "the model's scheduler is one we can run");
  ModelInfo model{.name = name, .state = ModelState::kReady};
  model.height = model.width = 8;
  model.size_multiple = 4;
  model.max_edge = 32;
  model.channels = model.latent_channels = channels;
  model.default_sampler = scheduler->default_sampler();
  model.default_schedule = scheduler->default_schedule();
  model.samplers = scheduler->samplers();
  model.schedules = scheduler->schedules(model.default_sampler);
  model.default_steps = 18;
  model.max_steps = scheduler->max_steps(model.default_sampler);
  model.max_evaluations = 200;
  model.max_count = 8;
  model.images = {.init = true,
                  .strength = true,
                  .mask = true,
                  .default_strength = 0.8,
                  .default_masked_strength = 1};
  model.scheduler = std::make_shared<const SchedulerConfig>(*std::move(scheduler));
  return model;
}

/// With two tokenizers, as SDXL has them.
ModelInfo TextToImage() {
  ModelInfo model = Model("texts", R"({"_class_name": "EulerDiscreteScheduler"})", 3);
  model.latent_factor = 2;
  model.latent_channels = 4;
  model.preview_decoders = {PreviewDecoder::kTiny, PreviewDecoder::kLinear};
  const auto directory = ModelDirectory::Read(DENOISED_SOURCE_DIR "/tests/models/latent/sdxl");
  Require(directory.ok(), "the model's directory can be read");
  auto prompts = PromptReader::Load(*directory, {.zeros_without_negative = true,
                                                 .skip_layers = 1,
                                                 .layers = 4,
                                                 .size_numbers = 6,
                                                 .max_chunks = 3});
  Require(prompts.ok(), "the model's tokenizers can be read");
  model.text = prompts->traits();
  model.prompts = std::make_shared<const PromptReader>(*std::move(prompts));
  model.guidance = model.guidance_rescale = true;
  model.default_guidance_scale = 5;
  return model;
}

/// Labels and guidance on an EDM model; an unconditional RGB model on betas; numbers as condition
/// and channels that no picture has; texts and sizes, and latents.
std::array<ModelInfo, 4> Models() {
  ModelInfo digits = Model("digits", R"({"_class_name": "EDMEulerScheduler"})", 1);
  digits.condition = ClassCondition::kLabel;
  digits.num_classes = 10;
  digits.guidance = true;
  digits.default_guidance_scale = 1.5;
  const ModelInfo faces = Model("faces", R"({"_class_name": "DDPMScheduler"})", 3);
  ModelInfo vectors = Model("vectors", R"({"_class_name": "DPMSolverMultistepScheduler",
                                           "use_karras_sigmas": true})",
                            4);
  vectors.condition = ClassCondition::kVector;
  vectors.class_vector_size = 3;
  vectors.images = {.init = true, .required = true, .guidance = true};
  vectors.images.default_guidance_scale = 1.5;
  vectors.guidance = vectors.guidance_rescale = true;
  return {digits, faces, vectors, TextToImage()};
}

/// In the range of the device's floats.
bool IsFinite(double value) { return std::isfinite(static_cast<float>(value)); }

void CheckPlan(const StepPlan& plan) {
  Require(!plan.evaluations.empty(), "a plan has evaluations");
  Require(plan.step.size() == plan.evaluations.size(), "every evaluation belongs to a step");
  for (const Evaluation<double>& row : plan.evaluations) {
    for (const double value : {row.input_scale, row.condition, row.x0_from_x, row.x0_from_model,
                               row.clip, row.log_variance_min, row.log_variance_max}) {
      Require(IsFinite(value), "coefficients are finite");
    }
    for (const auto& weights : row.weights) {
      for (const double weight : weights) Require(IsFinite(weight), "weights are finite");
    }
  }
  for (const double scale :
       {plan.initial_source_scale, plan.initial_noise_scale, plan.initial_churn_scale}) {
    Require(IsFinite(scale), "initial scales are finite");
  }
}

void CheckFinite(const Tensor& tensor) {
  for (const float value : tensor.span<float>()) Require(std::isfinite(value), "images are finite");
}

bool AreSame(const StepPlan& a, const StepPlan& b) {
  if (a.initial_source_scale != b.initial_source_scale ||
      a.initial_noise_scale != b.initial_noise_scale ||
      a.initial_churn_scale != b.initial_churn_scale)
    return false;
  const auto x = ToDevice(a), y = ToDevice(b);
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0;
}

/// What the conditioner relies on.
void CheckPrompts(const ModelInfo& model, const EffectiveJob& job) {
  const size_t prompts = job.spec.prompts.size();
  const bool one_or_each = prompts == 1 || prompts == static_cast<size_t>(job.spec.count);
  Require(model.text ? one_or_each : prompts == 0, "one prompt for all images, or one for each");
  Require(job.prompts.size() == prompts && job.prompts_read.size() == prompts,
          "every prompt is read");
  Require(job.negatives.size() == (model.text && job.guided ? prompts : 0),
          "guided prompts have negatives");
  if (!model.text) return;
  const size_t length = static_cast<size_t>(model.text->chunk_tokens) + 2;
  for (const std::vector<TokenizedPrompt>* all : {&job.prompts, &job.negatives}) {
    for (const TokenizedPrompt& prompt : *all) {
      Require(prompt.sizes.size() == 6, "there are six sizes");
      for (const float size : prompt.sizes) Require(std::isfinite(size), "sizes are finite");
      Require(prompt.skip_layers >= 1 && prompt.skip_layers <= 1 + model.text->max_clip_skip,
              "layers are skipped within the limit");
      Require(prompt.ids.size() == prompt.ends.size(), "every text has an end");
      Require(prompt.ids.empty() || (prompt.ids.size() == 2 && prompt.chunks >= 1 &&
                                     prompt.chunks <= model.text->max_chunks),
              "both tokenizers read the prompt");
      for (const std::vector<int32_t>& ids : prompt.ids) {
        Require(ids.size() == prompt.chunks * length, "both have all chunks");
      }
    }
  }
}

/// What the step batcher relies on.
void CheckJob(const ModelInfo& model, const EffectiveJob& job) {
  const JobSpec& spec = job.spec;
  Require(job.plan != nullptr, "an accepted job has a plan");
  CheckPlan(*job.plan);
  Require(job.evaluations == static_cast<int>(job.plan->evaluations.size()) &&
              job.evaluations <= model.max_evaluations,
          "evaluations are within the limit");
  Require(job.steps >= 1 && job.steps <= model.max_steps, "steps are within the limit");
  Require(spec.seed.has_value(), "there is a seed");
  Require(spec.count >= 1 && spec.count <= model.max_count, "the count is within the limit");
  for (const int edge : {spec.width, spec.height}) {
    Require(
        edge >= model.size_multiple && edge <= model.max_edge && edge % model.size_multiple == 0,
        "the size is within the limits");
  }
  const size_t count = static_cast<size_t>(spec.count);
  Require(spec.seeds.empty() || spec.seeds.size() == count, "one seed for each image, or none");
  const bool labels = model.condition == ClassCondition::kLabel;
  Require(spec.class_labels.size() == (labels ? count : 0), "one label for each image");
  for (const int label : spec.class_labels) {
    Require(label >= 0 && label < model.num_classes, "labels are in range");
  }
  Require(spec.class_values.size() == count * static_cast<size_t>(model.class_vector_size),
          "one vector for each image");
  for (const float value : spec.class_values) Require(std::isfinite(value), "vectors are finite");
  Require(*spec.guidance_scale >= 1 && *spec.guidance_scale <= (model.guidance ? 100 : 1),
          "guidance is in range");
  CheckPrompts(model, job);
  Require(!spec.previews || spec.preview_every >= 1, "previews have an interval");
  if (spec.initial_noise) {
    const int factor = model.latent_factor;
    Require(spec.initial_noise.shape() == Shape({spec.count, spec.height / factor,
                                                 spec.width / factor, model.latent_channels}),
            "the noise has the shape of the job");
    CheckFinite(spec.initial_noise);
  }
  if (spec.init_image) {
    Require(spec.init_image.shape() == Shape({spec.height, spec.width, model.channels}),
            "the init image has the size of the job");
    CheckFinite(spec.init_image);
  }
}

void CheckLimits(const RequestLimits& limits, const ModelInfo& model, const EffectiveJob& job) {
  Require(job.spec.count <= limits.max_count, "the count is within the server's limit");
  Require(job.steps <= limits.max_steps, "steps are within the server's limit");
  const int64_t pixels = int64_t{job.spec.width} * job.spec.height;
  Require(pixels <= limits.max_image_pixels, "the size is within the server's limit");
  Require(pixels * model.channels * 4 * job.spec.count <= limits.max_tensor_bytes,
          "all images are within the server's limit");
}

void CheckRendering(const Rendering& rendering, const ModelInfo& model) {
  Require(rendering.quality >= 1 && rendering.quality <= 100, "the quality is in range");
  Require(rendering.max_edge >= 0, "the edge is in range");
  const bool raw = rendering.format == v1::IMAGE_FORMAT_RAW_FLOAT32 ||
                   rendering.format == v1::IMAGE_FORMAT_RAW_UINT8;
  Require(v1::ImageFormat_IsValid(rendering.format) && rendering.format != 0 &&
              (raw || model.channels <= 3),
          "the format can hold the image");
}

/// Whether "params.conditions[2].class_label" is a path of `type`.
bool IsField(std::string path, const google::protobuf::Descriptor* type) {
  while (!path.empty()) {
    const size_t dot = std::min(path.find('.'), path.size());
    const std::string name = path.substr(0, std::min(dot, path.find('[')));
    path.erase(0, dot + 1);
    if (type == nullptr) return false;
    const google::protobuf::FieldDescriptor* field = type->FindFieldByName(name);
    if (field == nullptr) return false;
    type = field->message_type();
  }
  return true;
}

/// A refusal names fields of the contract and reaches the client whole.
void CheckRefusal(const std::vector<FieldViolation>& violations) {
  for (const FieldViolation& violation : violations) {
    Require(IsField(violation.field, v1::StreamGenerateRequest::descriptor()),
            violation.field.c_str());
    Require(!violation.description.empty(), "a violation is described");
  }
  const grpc::Status status = InvalidFields(violations, "fuzz");
  google::rpc::Status details;
  google::rpc::BadRequest bad;
  Require(status.error_details().size() <= kMaxTrailer, "the details fit into a trailer");
  Require(details.ParseFromString(status.error_details()), "the details parse");
  bool named = false;
  for (const auto& detail : details.details()) {
    named |= detail.UnpackTo(&bad) && bad.field_violations_size() > 0;
  }
  Require(named, "the details name the fields");
}

void Ask(const ModelInfo& model, const v1::GenerationParams& params,
         const v1::PreviewOptions* preview, bool together) {
  static MemoryBudget memory(1 << 20);
  RequestLimits limits;
  limits.max_init_pixels = 4096;
  limits.max_image_pixels = 24 * 24;
  limits.max_tensor_bytes = 1 << 14;
  limits.max_reply_bytes = 1 << 13;
  limits.max_count = 6;
  limits.max_steps = 80;
  std::vector<FieldViolation> violations, of_engine;
  const Translation translation =
      Translate(params, preview, together, "fuzz", model, limits, &memory, &violations);
  EffectiveJob job;
  ResolveJob(model, translation.spec, &job, &of_engine);
  for (const FieldViolation& violation : of_engine) {
    violations.push_back({ProtoField(violation.field), violation.description});
  }
  if (!violations.empty()) return CheckRefusal(violations);
  CheckJob(model, job);
  CheckLimits(limits, model, job);
  CheckRendering(translation.image, model);
  if (preview != nullptr) CheckRendering(translation.preview, model);
  Require(IsRequestId(job.spec.request_id), "the request has an id");
  v1::GenerationParams effective;
  Require(effective.ParseFromString(ToProto(job, translation.image).SerializeAsString()),
          "the reply parses");
  // What was run, asked for again, is run again: so the reply tells the truth.
  EffectiveJob again;
  ResolveJob(model, job.spec, &again, &violations);
  Require(violations.empty(), violations.empty() ? "" : violations[0].description.c_str());
  Require(AreSame(*again.plan, *job.plan), "the same plan again");
  if (job.spec.init_image || job.spec.initial_noise) return;  // the reply has no bytes of uploads
  const Translation sent =
      Translate(effective, preview, together, "fuzz", model, limits, &memory, &violations);
  Require(violations.empty(), violations.empty() ? "" : violations[0].description.c_str());
  ResolveJob(model, sent.spec, &again, &violations);
  Require(violations.empty(), violations.empty() ? "" : violations[0].description.c_str());
  Require(AreSame(*again.plan, *job.plan), "the same plan from the reply");
  Require(ToProto(again, sent.image).SerializeAsString() == effective.SerializeAsString(),
          "the reply, sent again, gets itself");
}

}  // namespace

/// Any bytes that are a request are refused with a message, or become a job that can be run.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::array<ModelInfo, 4> models = Models();
  google::protobuf::SetLogHandler(nullptr);  // it would tell of every message that does not parse
  v1::GenerateRequest unary;
  if (unary.ParseFromArray(data, static_cast<int>(size))) {
    for (const ModelInfo& model : models) Ask(model, unary.params(), nullptr, true);
  }
  v1::StreamGenerateRequest stream;
  if (stream.ParseFromArray(data, static_cast<int>(size))) {
    const v1::PreviewOptions* preview = stream.has_preview() ? &stream.preview() : nullptr;
    for (const ModelInfo& model : models) Ask(model, stream.params(), preview, false);
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  v1::StreamGenerateRequest request;
  return MutateSerialized(&request, data, size, max_size, seed);
}
