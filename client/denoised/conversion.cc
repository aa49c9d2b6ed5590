// SPDX-License-Identifier: Apache-2.0
#include "denoised/conversion.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"

namespace denoised::client {
namespace {

// The plain enums carry the numbers of the contract, so conversion is a cast.
static_assert(int{v1::SAMPLER_SCORE_SDE_VE} == static_cast<int>(Sampler::kScoreSdeVe));
static_assert(v1::Sampler_MAX == v1::SAMPLER_SCORE_SDE_VE);
static_assert(int{v1::NOISE_SCHEDULE_BETA} == static_cast<int>(NoiseSchedule::kBeta));
static_assert(v1::NoiseSchedule_MAX == v1::NOISE_SCHEDULE_BETA);
static_assert(int{v1::IMAGE_FORMAT_RAW_UINT8} == static_cast<int>(ImageFormat::kRawUint8));
static_assert(int{v1::MODEL_STATE_UNLOADING} == static_cast<int>(ModelState::kUnloading));
static_assert(int{v1::PRIORITY_BATCH} == static_cast<int>(Priority::kBatch));
static_assert(int{v1::JOB_STATE_CANCELLED} == static_cast<int>(JobState::kCancelled));
static_assert(int{v1::TimelineEntry::MILESTONE_STAGE} ==
              static_cast<int>(TimelineEntry::Milestone::kStage));
static_assert(int{v1::PREVIEW_DECODER_TINY} == static_cast<int>(PreviewDecoder::kTiny));
static_assert(int{v1::STAGE_DECODE} == static_cast<int>(Stage::kDecode));
static_assert(int{v1::DATA_TYPE_UINT8} == static_cast<int>(Tensor::Type::kUint8));

template <typename Wire, typename Plain>
Wire Cast(Plain value) {
  return static_cast<Wire>(static_cast<int>(value));
}

// A number that this version has no name for.
template <typename Plain>
Plain KnownOr0(int value, int max) {
  return static_cast<Plain>(value <= max ? value : 0);
}

void SetTensor(const Tensor& tensor, v1::Tensor* proto) {
  proto->set_data_type(Cast<v1::DataType>(tensor.type));
  proto->mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  proto->set_data(tensor.data);
}

Tensor FromProto(v1::Tensor&& proto) {
  Tensor tensor;
  tensor.type = Cast<Tensor::Type>(proto.data_type());
  tensor.shape.assign(proto.shape().begin(), proto.shape().end());
  tensor.data = std::move(*proto.mutable_data());
  return tensor;
}

Timing FromProto(const v1::Timing& timing) {
  return {.queued_seconds = timing.queued_seconds(), .total_seconds = timing.total_seconds()};
}

std::vector<TimelineEntry> FromProto(const v1::Timeline& timeline) {
  std::vector<TimelineEntry> entries;
  for (const v1::TimelineEntry& proto : timeline.entries()) {
    TimelineEntry& entry = entries.emplace_back();
    entry.milestone =
        KnownOr0<TimelineEntry::Milestone>(proto.milestone(), v1::TimelineEntry::Milestone_MAX);
    entry.seconds = proto.seconds();
    if (proto.has_evaluations()) entry.evaluations = proto.evaluations();
    if (proto.has_image_index()) entry.image_index = proto.image_index();
    entry.stage = KnownOr0<Stage>(proto.stage(), v1::Stage_MAX);
    if (proto.has_device_seconds()) entry.device_seconds = proto.device_seconds();
  }
  return entries;
}

double FromProto(const google::protobuf::Timestamp& time) {
  return static_cast<double>(time.seconds()) + time.nanos() * 1e-9;
}

/// "SERVER_FEATURE_TLS" without its prefix, in lower case.
std::string LowerName(const std::string& name, size_t prefix) {
  return absl::AsciiStrToLower(name.substr(std::min(prefix, name.size())));
}

/// Sets the source of an InitImage or a Mask.
template <typename Message>
void SetSource(const std::variant<std::string, Tensor>& source, Message* to) {
  if (const auto* file = std::get_if<std::string>(&source)) {
    if (!file->empty()) to->set_encoded(*file);
  } else {
    SetTensor(std::get<Tensor>(source), to->mutable_tensor());
  }
}

void SetSize(const std::array<int, 2>& size, v1::ImageSize* to) {
  to->set_height(size[0]);
  to->set_width(size[1]);
}

/// `params` as they are sent again.
Generation FromProto(const v1::GenerationParams& params) {
  Generation generation;
  generation.model = params.model();
  generation.request_id = params.request_id();
  generation.seeds.assign(params.seeds().begin(), params.seeds().end());
  if (generation.seeds.empty() && params.has_seed()) generation.seed = params.seed();
  if (params.has_count()) generation.count = params.count();
  for (const v1::Condition& condition : params.conditions()) {
    if (condition.has_class_label()) generation.class_labels.push_back(condition.class_label());
    if (const auto& vector = condition.class_vector(); !vector.empty())
      generation.class_vectors.emplace_back(vector.begin(), vector.end());
    if (!condition.has_text()) continue;
    Prompt& prompt = generation.prompts.emplace_back();
    prompt.text = condition.text();
    if (condition.has_negative_text()) prompt.negative = condition.negative_text();
    if (condition.has_text_2()) prompt.text_2 = condition.text_2();
    if (condition.has_negative_text_2()) prompt.negative_2 = condition.negative_text_2();
  }
  const v1::TextOptions& text = params.text_options();
  if (text.has_clip_skip()) generation.clip_skip = text.clip_skip();
  if (text.has_max_chunks()) generation.max_chunks = text.max_chunks();
  const v1::SizeConditions& sizes = params.size_conditions();
  if (sizes.has_original_size())
    generation.sizes.original_size = {sizes.original_size().height(),
                                      sizes.original_size().width()};
  if (sizes.has_target_size())
    generation.sizes.target_size = {sizes.target_size().height(), sizes.target_size().width()};
  if (sizes.has_crop()) generation.sizes.crop = {sizes.crop().top(), sizes.crop().left()};
  if (params.has_guidance_scale()) generation.guidance_scale = params.guidance_scale();
  if (params.has_image_guidance_scale())
    generation.image_guidance_scale = params.image_guidance_scale();
  if (params.has_guidance_rescale()) generation.guidance_rescale = params.guidance_rescale();
  if (params.has_guidance_start()) generation.guidance_start = params.guidance_start();
  if (params.has_guidance_stop()) generation.guidance_stop = params.guidance_stop();
  if (params.has_steps()) generation.steps = params.steps();
  if (params.sampler()) generation.sampler = Cast<Sampler>(params.sampler());
  if (params.noise_schedule())
    generation.noise_schedule = Cast<NoiseSchedule>(params.noise_schedule());
  if (params.has_eta()) generation.eta = params.eta();
  if (params.has_s_churn()) generation.s_churn = params.s_churn();
  if (params.has_s_tmin()) generation.s_tmin = params.s_tmin();
  if (params.has_s_tmax()) generation.s_tmax = params.s_tmax();
  if (params.has_s_noise()) generation.s_noise = params.s_noise();
  if (params.has_solver_order()) generation.solver_order = params.solver_order();
  if (params.has_width()) generation.width = params.width();
  if (params.has_height()) generation.height = params.height();
  const v1::OutputOptions& output = params.output();
  if (output.format()) generation.format = Cast<ImageFormat>(output.format());
  if (output.has_quality()) generation.quality = output.quality();
  if (output.has_embed_metadata()) generation.embed_metadata = output.embed_metadata();
  if (params.has_initial_noise())
    generation.initial_noise = FromProto(v1::Tensor(params.initial_noise()));
  if (params.has_init_image()) {
    generation.init_image.emplace();
    if (params.init_image().has_strength())
      generation.init_image->strength = params.init_image().strength();
  }
  if (params.has_mask()) generation.mask.emplace();
  if (params.priority()) generation.priority = Cast<Priority>(params.priority());
  generation.survives = params.disconnect_policy() == v1::DISCONNECT_POLICY_CONTINUE;
  generation.include_timings = params.include_timings();
  return generation;
}

}  // namespace

absl::Status CheckUtf8(
    std::initializer_list<std::pair<std::string_view, std::string_view>> texts_by_field) {
  for (const auto& [field, text] : texts_by_field) {
    if (google::protobuf::internal::IsStructurallyValidUTF8(text.data(),
                                                            static_cast<int>(text.size()))) {
      continue;
    }
    return absl::InvalidArgumentError(fmt::format("{} is not UTF-8; encode it so", field));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::GenerationParams> ToProto(const Generation& generation) {
  if (!generation.class_labels.empty() + !generation.class_vectors.empty() +
          !generation.prompts.empty() >
      1) {
    return absl::InvalidArgumentError(
        "more than one of class_labels, class_vectors and prompts is given; give the one that the "
        "model takes");
  }
  if (absl::Status status = CheckUtf8(
          {{"params.model", generation.model}, {"params.request_id", generation.request_id}});
      !status.ok()) {
    return status;
  }
  for (size_t i = 0; i < generation.prompts.size(); ++i) {
    const Prompt& prompt = generation.prompts[i];
    const auto name = [i](const char* field) { return fmt::format("prompts[{}].{}", i, field); };
    if (absl::Status status = CheckUtf8({{name("text"), prompt.text},
                                         {name("negative"), prompt.negative.value_or("")},
                                         {name("text_2"), prompt.text_2.value_or("")},
                                         {name("negative_2"), prompt.negative_2.value_or("")}});
        !status.ok()) {
      return status;
    }
  }
  v1::GenerationParams params;
  params.set_model(generation.model);
  params.set_request_id(generation.request_id);
  if (generation.seed) params.set_seed(*generation.seed);
  params.mutable_seeds()->Add(generation.seeds.begin(), generation.seeds.end());
  if (generation.count) params.set_count(*generation.count);
  for (const int label : generation.class_labels) params.add_conditions()->set_class_label(label);
  for (const std::vector<float>& vector : generation.class_vectors) {
    params.add_conditions()->mutable_class_vector()->Add(vector.begin(), vector.end());
  }
  for (const Prompt& prompt : generation.prompts) {
    v1::Condition& condition = *params.add_conditions();
    condition.set_text(prompt.text);
    if (prompt.negative) condition.set_negative_text(*prompt.negative);
    if (prompt.text_2) condition.set_text_2(*prompt.text_2);
    if (prompt.negative_2) condition.set_negative_text_2(*prompt.negative_2);
  }
  if (generation.clip_skip) params.mutable_text_options()->set_clip_skip(*generation.clip_skip);
  if (generation.max_chunks) params.mutable_text_options()->set_max_chunks(*generation.max_chunks);
  const SizeConditions& sizes = generation.sizes;
  if (sizes.original_size)
    SetSize(*sizes.original_size, params.mutable_size_conditions()->mutable_original_size());
  if (sizes.target_size)
    SetSize(*sizes.target_size, params.mutable_size_conditions()->mutable_target_size());
  if (sizes.crop) {
    params.mutable_size_conditions()->mutable_crop()->set_top((*sizes.crop)[0]);
    params.mutable_size_conditions()->mutable_crop()->set_left((*sizes.crop)[1]);
  }
  if (generation.guidance_scale) params.set_guidance_scale(*generation.guidance_scale);
  if (generation.image_guidance_scale)
    params.set_image_guidance_scale(*generation.image_guidance_scale);
  if (generation.guidance_rescale) params.set_guidance_rescale(*generation.guidance_rescale);
  if (generation.guidance_start) params.set_guidance_start(*generation.guidance_start);
  if (generation.guidance_stop) params.set_guidance_stop(*generation.guidance_stop);
  if (generation.steps) params.set_steps(*generation.steps);
  if (generation.sampler) params.set_sampler(Cast<v1::Sampler>(*generation.sampler));
  if (generation.noise_schedule) {
    params.set_noise_schedule(Cast<v1::NoiseSchedule>(*generation.noise_schedule));
  }
  if (generation.eta) params.set_eta(*generation.eta);
  if (generation.s_churn) params.set_s_churn(*generation.s_churn);
  if (generation.s_tmin) params.set_s_tmin(*generation.s_tmin);
  if (generation.s_tmax) params.set_s_tmax(*generation.s_tmax);
  if (generation.s_noise) params.set_s_noise(*generation.s_noise);
  if (generation.solver_order) params.set_solver_order(*generation.solver_order);
  if (generation.width) params.set_width(*generation.width);
  if (generation.height) params.set_height(*generation.height);
  v1::OutputOptions* output = params.mutable_output();
  if (generation.format) output->set_format(Cast<v1::ImageFormat>(*generation.format));
  if (generation.quality) output->set_quality(*generation.quality);
  if (generation.embed_metadata) output->set_embed_metadata(*generation.embed_metadata);
  if (generation.initial_noise) {
    SetTensor(*generation.initial_noise, params.mutable_initial_noise());
  }
  if (generation.init_image) {
    v1::InitImage* init = params.mutable_init_image();
    SetSource(generation.init_image->source, init);
    if (generation.init_image->strength) init->set_strength(*generation.init_image->strength);
  }
  if (generation.mask) SetSource(generation.mask->source, params.mutable_mask());
  if (generation.priority) params.set_priority(Cast<v1::Priority>(*generation.priority));
  if (generation.survives) params.set_disconnect_policy(v1::DISCONNECT_POLICY_CONTINUE);
  if (generation.include_timings) params.set_include_timings(true);
  return params;
}

v1::PreviewOptions ToProto(const PreviewOptions& preview) {
  v1::PreviewOptions proto;
  proto.set_kind(Cast<v1::PreviewKind>(preview.kind));
  if (preview.every_evaluations) proto.set_every_evaluations(*preview.every_evaluations);
  if (preview.max_edge) proto.set_max_edge(*preview.max_edge);
  if (preview.format) proto.set_format(Cast<v1::ImageFormat>(*preview.format));
  if (preview.decoder) proto.set_decoder(Cast<v1::PreviewDecoder>(*preview.decoder));
  return proto;
}

EffectiveParams FromProto(const v1::GenerationParams& proto, const v1::Run& run) {
  EffectiveParams params;
  params.request = FromProto(proto);
  params.model = proto.model();
  params.model_version = run.model_version();
  params.request_id = proto.request_id();
  params.seed = proto.seed();
  params.seeds = params.request.seeds;
  params.count = proto.count();
  params.class_labels = params.request.class_labels;
  params.class_vectors = params.request.class_vectors;
  params.prompts = params.request.prompts;
  for (const v1::TextRead& text : run.texts()) {
    params.texts.push_back({.tokens = text.tokens(),
                            .cut_off = text.cut_off(),
                            .negative_cut_off = text.negative_cut_off(),
                            .text_2_cut_off = text.cut_off_2(),
                            .negative_2_cut_off = text.negative_cut_off_2()});
  }
  params.max_chunks = proto.text_options().max_chunks();
  params.guidance_scale = proto.guidance_scale();
  params.image_guidance_scale = params.request.image_guidance_scale;
  params.guidance_rescale = params.request.guidance_rescale;
  params.guidance_start = params.request.guidance_start;
  params.guidance_stop = params.request.guidance_stop;
  params.steps = run.steps();
  params.evaluations = run.evaluations();
  params.sampler = KnownOr0<Sampler>(proto.sampler(), v1::Sampler_MAX);
  params.noise_schedule = KnownOr0<NoiseSchedule>(proto.noise_schedule(), v1::NoiseSchedule_MAX);
  params.width = proto.width();
  params.height = proto.height();
  params.strength = proto.init_image().has_strength() ? proto.init_image().strength() : 1;
  params.masked = proto.has_mask();
  params.eta = proto.eta();
  params.s_churn = proto.s_churn();
  params.s_tmin = params.request.s_tmin;
  params.s_tmax = params.request.s_tmax;
  params.s_noise = params.request.s_noise;
  params.solver_order = params.request.solver_order;
  return params;
}

Image FromProto(v1::Image&& proto) {
  Image image;
  image.index = proto.index();
  image.seed = proto.seed();
  if (proto.has_class_label()) image.class_label = proto.class_label();
  image.mime_type = proto.mime_type();
  image.width = proto.width();
  image.height = proto.height();
  if (proto.has_tensor()) {
    image.content = FromProto(std::move(*proto.mutable_tensor()));
  } else {
    image.content = std::move(*proto.mutable_encoded());
  }
  return image;
}

GenerationResult FromProto(v1::GenerateResponse&& response) {
  GenerationResult result;
  result.params = FromProto(response.params(), response.run());
  for (v1::Image& image : *response.mutable_images()) {
    result.images.push_back(FromProto(std::move(image)));
  }
  result.timing = FromProto(response.timing());
  result.timeline = FromProto(response.timeline());
  return result;
}

std::optional<Event> FromProto(v1::StreamGenerateResponse&& response) {
  switch (response.event_case()) {
    case v1::StreamGenerateResponse::kQueued: {
      const v1::QueuedEvent& proto = response.queued();
      Queued queued{FromProto(proto.params(), proto.run()), proto.images_ahead(), proto.position()};
      if (proto.has_estimated_start_seconds()) {
        queued.estimated_start_seconds = proto.estimated_start_seconds();
      }
      if (proto.has_estimated_total_seconds()) {
        queued.estimated_total_seconds = proto.estimated_total_seconds();
      }
      return queued;
    }
    case v1::StreamGenerateResponse::kStarted:
      return Started{response.started().queued_seconds()};
    case v1::StreamGenerateResponse::kProgress:
      return Progress{response.progress().evaluations_done(),
                      response.progress().evaluations_total()};
    case v1::StreamGenerateResponse::kPreview:
      return Preview{response.preview().evaluation(), response.preview().evaluations(),
                     FromProto(std::move(*response.mutable_preview()->mutable_image()))};
    case v1::StreamGenerateResponse::kImage:
      return FromProto(std::move(*response.mutable_image()->mutable_image()));
    case v1::StreamGenerateResponse::kCompleted:
      return Completed{FromProto(response.completed().params(), response.completed().run()),
                       FromProto(response.completed().timing()),
                       FromProto(response.completed().timeline())};
    case v1::StreamGenerateResponse::EVENT_NOT_SET:
      return std::nullopt;
  }
  return std::nullopt;
}

Job FromProto(const v1::Job& proto) {
  Job job;
  job.request_id = proto.request_id();
  job.client = proto.client();
  job.state = KnownOr0<JobState>(proto.state(), v1::JobState_MAX);
  job.params = FromProto(proto.params(), proto.run());
  job.create_time = FromProto(proto.create_time());
  if (proto.has_start_time()) job.start_time = FromProto(proto.start_time());
  if (proto.has_end_time()) job.end_time = FromProto(proto.end_time());
  if (proto.has_expire_time()) job.expire_time = FromProto(proto.expire_time());
  job.progress = {proto.progress().evaluations_done(), proto.progress().evaluations_total()};
  job.images_done = proto.images_done();
  job.last_sequence = proto.last_sequence();
  job.error = proto.error().message();
  return job;
}

ServerInfo FromProto(const v1::GetServerInfoResponse& proto) {
  ServerInfo info;
  info.version = proto.version();
  info.build = proto.build();
  info.state = LowerName(v1::ServerState_Name(proto.state()), sizeof("SERVER_STATE_") - 1);
  info.device = proto.device();
  info.device_description = proto.device_description();
  for (const v1::Device& device : proto.devices())
    info.devices.push_back({device.name(), device.description(), device.error()});
  // An older server has one and lists none.
  if (info.devices.empty()) info.devices = {{info.device, info.device_description, ""}};
  info.uptime_seconds = proto.uptime_seconds();
  info.batching = proto.batching();
  info.client = proto.client();
  for (const int feature : proto.features()) {
    info.features.push_back(
        LowerName(v1::ServerFeature_Name(static_cast<v1::ServerFeature>(feature)),
                  sizeof("SERVER_FEATURE_") - 1));
  }
  // All limits are numbers, so that new ones need no code here.
  const google::protobuf::Reflection& reflection = *proto.limits().GetReflection();
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection.ListFields(proto.limits(), &fields);
  for (const google::protobuf::FieldDescriptor* field : fields) {
    using Field = google::protobuf::FieldDescriptor;
    const v1::ServerLimits& limits = proto.limits();
    const double value = field->cpp_type() == Field::CPPTYPE_INT32
                             ? reflection.GetInt32(limits, field)
                         : field->cpp_type() == Field::CPPTYPE_INT64
                             ? static_cast<double>(reflection.GetInt64(limits, field))
                             : reflection.GetDouble(limits, field);
    info.limits.emplace_back(field->name(), value);
  }
  return info;
}

v1::LoadModelRequest ToProto(const ModelLoad& load) {
  v1::LoadModelRequest request;
  request.set_name(load.name);
  request.set_directory(load.directory);
  request.set_version(load.version);
  request.set_keep_current(load.keep_current);
  request.set_unload_previous(load.unload_previous);
  return request;
}

Model FromProto(const v1::Model& proto) {
  Model model;
  model.name = proto.name();
  model.version = proto.version();
  model.current = proto.current();
  model.aliases.assign(proto.aliases().begin(), proto.aliases().end());
  model.state = KnownOr0<ModelState>(proto.state(), v1::ModelState_MAX);
  model.error = proto.error();
  model.architecture = proto.architecture();
  model.pipeline = proto.pipeline();
  model.parameters = proto.parameters();
  const v1::ModelCapabilities& can = proto.capabilities();
  model.capabilities = {.text = can.text(),
                        .second_text = can.second_text(),
                        .class_label = can.class_label(),
                        .class_vector = can.class_vector(),
                        .size_conditions = can.size_conditions(),
                        .guidance = can.guidance(),
                        .guidance_interval = can.guidance_interval(),
                        .guidance_rescale = can.guidance_rescale(),
                        .image_guidance = can.image_guidance(),
                        .init_image = can.init_image(),
                        .init_image_required = can.init_image_required(),
                        .strength = can.strength(),
                        .mask = can.mask(),
                        .mask_required = can.mask_required()};
  model.precision = proto.precision();
  model.labels.assign(proto.labels().begin(), proto.labels().end());
  const v1::ModelDefaults& defaults = proto.defaults();
  model.defaults = {
      .sampler = KnownOr0<Sampler>(defaults.sampler(), v1::Sampler_MAX),
      .noise_schedule = KnownOr0<NoiseSchedule>(defaults.noise_schedule(), v1::NoiseSchedule_MAX),
      .steps = defaults.steps(),
      .guidance_scale = defaults.guidance_scale(),
      .width = defaults.width(),
      .height = defaults.height(),
      .strength = defaults.strength(),
      .image_guidance_scale = defaults.image_guidance_scale()};
  const v1::ModelLimits& limits = proto.limits();
  model.limits = {.max_steps = limits.max_steps(),
                  .max_count = limits.max_count(),
                  .num_classes = limits.num_classes(),
                  .class_vector_size = limits.class_vector_size(),
                  .size_multiple = limits.size_multiple(),
                  .max_edge = limits.max_edge(),
                  .channels = limits.channels(),
                  .max_request_bytes = limits.max_request_bytes(),
                  .latent_factor = std::max(1, limits.latent_factor()),
                  .latent_channels = limits.latent_channels(),
                  .max_clip_skip = limits.max_clip_skip(),
                  .max_chunks = limits.max_chunks(),
                  .chunk_tokens = limits.chunk_tokens()};
  for (const int sampler : proto.samplers()) {
    model.samplers.push_back(KnownOr0<Sampler>(sampler, v1::Sampler_MAX));
  }
  for (const int schedule : proto.noise_schedules()) {
    model.noise_schedules.push_back(KnownOr0<NoiseSchedule>(schedule, v1::NoiseSchedule_MAX));
  }
  for (const int stage : proto.stages()) {
    model.stages.push_back(KnownOr0<Stage>(stage, v1::Stage_MAX));
  }
  for (const int decoder : proto.preview_decoders()) {
    model.preview_decoders.push_back(KnownOr0<PreviewDecoder>(decoder, v1::PreviewDecoder_MAX));
  }
  model.memory_bytes = proto.memory_bytes();
  model.device = proto.device();
  return model;
}

}  // namespace denoised::client
