// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/evaluator.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "engine/backend/counting.h"
#include "engine/core/philox.h"

namespace denoised {
namespace {

constexpr int kRowFields = sizeof(EvaluationRow) / sizeof(int32_t);
constexpr EvaluationRow kPadding = {.slot = -1, .label = 0, .unconditional_row = -1, .advances = 0};

// On a GPU padding rows are cheap and captures are not: powers of two. On the CPU a graph costs
// nothing and a padding row as much as any other, so every count is a bucket of its own.
std::vector<int> Buckets(Device device, int max_rows) {
  std::vector<int> buckets;
  for (int rows = 1; rows < max_rows; rows = device == Device::kCpu ? rows + 1 : rows * 2)
    buckets.push_back(rows);
  buckets.push_back(max_rows);
  return buckets;
}

}  // namespace

Evaluator::Evaluator(Backend& backend, std::shared_ptr<const Denoiser> denoiser,
                     const Options& options)
    : backend_(backend),
      denoiser_(std::move(denoiser)),
      options_(options),
      buckets_(Buckets(backend.device(), options.max_rows)) {}

absl::StatusOr<std::unique_ptr<Evaluator>> Evaluator::Create(
    Backend& backend, std::shared_ptr<const Denoiser> denoiser, const Options& options) {
  std::unique_ptr<Evaluator> evaluator(new Evaluator(backend, std::move(denoiser), options));
  DENOISED_RETURN_IF_ERROR(evaluator->Allocate());
  return evaluator;
}

absl::Status Evaluator::Allocate() {
  const DenoiserTraits& traits = denoiser_->traits();
  const int64_t slots = options_.slots, height = options_.height, width = options_.width,
                channels = traits.channels;
  const auto take = [&](Tensor* tensor, const Shape& shape, DType dtype,
                        const char* purpose) -> absl::Status {
    DENOISED_ASSIGN_OR_RETURN(*tensor, backend_.Allocate(shape, dtype, purpose));
    slot_bytes_ += tensor->bytes();
    return absl::OkStatus();
  };
  const Shape images{slots, height, width, channels};
  DENOISED_RETURN_IF_ERROR(take(&state_.x, images, DType::kF32, "states of images in flight"));
  DENOISED_RETURN_IF_ERROR(take(&state_.registers, {slots, kRegisters, height, width, channels},
                                DType::kF32, "sampler registers"));
  DENOISED_RETURN_IF_ERROR(take(&state_.x0, images, DType::kF32, "predicted images"));
  DENOISED_RETURN_IF_ERROR(take(
      &state_.plans, {slots, int64_t{options_.max_evaluations} * int64_t{sizeof(DeviceEvaluation)}},
      DType::kU8, "step plans"));
  DENOISED_RETURN_IF_ERROR(take(&state_.evaluation, {slots}, DType::kI32, "slots"));
  DENOISED_RETURN_IF_ERROR(take(&state_.nonfinite, {slots}, DType::kI32, "slots"));
  DENOISED_RETURN_IF_ERROR(take(&state_.seed, {slots}, DType::kI64, "slots"));
  DENOISED_RETURN_IF_ERROR(take(&state_.guidance, {slots}, DType::kF32, "slots"));
  if (traits.class_vector_size > 0)
    DENOISED_RETURN_IF_ERROR(
        take(&state_.embedding, {slots, traits.class_vector_size}, DType::kF32, "class vectors"));
  const Shape image{height, width, channels};
  DENOISED_RETURN_IF_ERROR(take(&source_, image, DType::kF32, "init image"));
  DENOISED_RETURN_IF_ERROR(take(&noise_, image, DType::kF32, "initial noise"));
  DENOISED_RETURN_IF_ERROR(
      take(&rows_, {options_.max_rows, kRowFields}, DType::kI32, "rows of an evaluation"));

  Shape pixels = image;
  if (options_.codec) {
    const CodecTraits& codec = options_.codec->traits();
    pixels = {height * codec.factor, width * codec.factor, codec.image_channels};
    DENOISED_RETURN_IF_ERROR(take(&pixels_, pixels, DType::kF32, "init image"));
    DENOISED_RETURN_IF_ERROR(
        take(&latents_, {1, height, width, channels}, DType::kF32, "latents to decode"));
  }

  const auto reserve = [&](int64_t bytes, int count) -> absl::Status {
    DENOISED_ASSIGN_OR_RETURN(auto reserved, backend_.ReserveDownloads(bytes, count));
    if (reserved) slot_bytes_ += bytes * count;
    downloads_.push_back(std::move(reserved));
    return absl::OkStatus();
  };
  const int64_t image_bytes = image.elements() * int64_t{sizeof(float)};
  DENOISED_RETURN_IF_ERROR(reserve(image_bytes, options_.downloads + options_.parks));
  DENOISED_RETURN_IF_ERROR(
      reserve(slots * int64_t{sizeof(int32_t)}, options_.flag_downloads + options_.parks));
  DENOISED_RETURN_IF_ERROR(reserve(kRegisters * image_bytes, options_.parks));
  if (options_.codec)
    DENOISED_RETURN_IF_ERROR(reserve(pixels.elements() * int64_t{sizeof(float)}, options_.decodes));

  const auto measure = [&](int rows) {
    CountingBackend counting(backend_);
    Arena measuring = Arena::Measuring(backend_.device());
    const Tensor output = Predict(counting, measuring, 0, rows);
    counting.Advance({.state = state_, .rows = rows_.Slice(0, rows), .model_output = output});
    flops_per_row_ = counting.work().flops / rows;
    return measuring.peak();
  };
  int workers = 0, part = 0;
  std::set<int> together;
  for (const int bucket : buckets_) {
    const RowSplit split = backend_.SplitRows(bucket);
    if (split.apart > 0) workers = split.workers;
    part = std::max(part, split.part);
    if (split.apart < bucket) together.insert(bucket - split.apart);
  }
  // Fewer rows may fragment the arena more than more rows do, so every number of rows is measured.
  size_t part_bytes = 0;
  for (int rows = 1; rows <= part; ++rows) part_bytes = std::max(part_bytes, measure(rows));
  activation_bytes_ = part_bytes * workers;
  for (const int rows : together) activation_bytes_ = std::max(activation_bytes_, measure(rows));
  if (options_.codec) {
    for (const bool encodes : {false, true}) {
      if (encodes && !options_.codec->traits().encodes) continue;
      CountingBackend counting(backend_);
      Arena measuring = Arena::Measuring(backend_.device());
      nn::Context context{counting, measuring};
      if (encodes) {
        options_.codec->Encode(context, pixels_.Reshape({1, pixels[0], pixels[1], pixels[2]}),
                               noise_.Reshape({1, height, width, channels}));
      } else {
        Decode(counting, measuring, latents_);
      }
      activation_bytes_ = std::max(activation_bytes_, measuring.peak());
    }
  }
  if (workers > 0)
    DENOISED_RETURN_IF_ERROR(take(&outputs_,
                                  {options_.max_rows, height, width, traits.output_channels},
                                  DType::kF32, "predictions"));
  DENOISED_ASSIGN_OR_RETURN(
      Tensor block,
      backend_.Allocate({static_cast<int64_t>(activation_bytes_)}, DType::kU8,
                        fmt::format("activations of {} rows of {}×{}", options_.max_rows,
                                    options_.width, options_.height)));
  for (int worker = 0; worker < workers; ++worker)
    part_arenas_.emplace_back(
        block.Slice(static_cast<int64_t>(worker * part_bytes), static_cast<int64_t>(part_bytes)));
  decode_arena_.emplace(block);
  encode_arena_.emplace(block);
  arena_.emplace(std::move(block));
  return backend_.status();
}

Tensor Evaluator::Decode(Backend& backend, Arena& arena, const Tensor& latents) {
  nn::Context context{backend, arena};
  return options_.codec->Decode(context, latents);
}

void Evaluator::Enqueue(int bucket) {
  const RowSplit split = backend_.SplitRows(bucket);
  Tensor output;
  if (split.apart == 0) {
    output = Predict(backend_, *arena_, 0, bucket);
  } else {
    output = outputs_.Slice(0, bucket);
    backend_.ForEachPart(split, [&](int begin, int count, int worker) {
      backend_.Copy(Predict(backend_, part_arenas_[worker], begin, count),
                    output.Slice(begin, count));
    });
    const int together = bucket - split.apart;
    if (together > 0)
      backend_.Copy(Predict(backend_, *arena_, split.apart, together),
                    output.Slice(split.apart, together));
  }
  // A row may read another row's output, so rows advance when all outputs are there.
  backend_.Advance({.state = state_, .rows = rows_.Slice(0, bucket), .model_output = output});
}

Tensor Evaluator::Predict(Backend& backend, Arena& arena, int begin, int count) {
  const DenoiserTraits& traits = denoiser_->traits();
  nn::Context context{backend, arena};
  const Tensor rows = rows_.Slice(begin, count);
  DenoiserInput input;
  input.x = context.New({count, options_.height, options_.width, traits.channels});
  input.condition = context.NewF32({count});
  if (traits.condition == ClassCondition::kLabel || traits.text_features > 0)
    input.label = arena.New({count}, DType::kI32);
  if (traits.class_vector_size > 0)
    input.embedding = context.NewF32({count, traits.class_vector_size});
  backend.Gather({.state = state_,
                  .rows = rows,
                  .x = input.x,
                  .condition = input.condition,
                  .label = input.label,
                  .embedding = input.embedding});
  input.sets = options_.sets;
  return denoiser_->Forward(context, input);
}

absl::StatusOr<Graph*> Evaluator::GraphFor(int bucket) {
  std::unique_ptr<Graph>& graph = graphs_[bucket];
  if (!graph) {
    DENOISED_ASSIGN_OR_RETURN(graph, backend_.Capture([this, bucket] { Enqueue(bucket); }));
  }
  return graph.get();
}

absl::StatusOr<Evaluator::Warmed> Evaluator::WarmUp() {
  const bool decodes = options_.codec && !decode_warm_;
  const int bucket = decodes ? 0 : buckets_[warm_buckets_];
  const std::vector<EvaluationRow> padding(bucket, kPadding);
  const auto begin = backend_.Mark();
  DENOISED_RETURN_IF_ERROR(decodes ? LaunchDecode() : Evaluate(padding).status());
  const auto end = backend_.Mark();
  DENOISED_RETURN_IF_ERROR(end->Wait());
  captured_next_ = !captured_next_;
  // The first is not measured, because caches are cold.
  if (captured_next_) return Warmed{.bucket = bucket, .seconds = -1, .more = true};
  if (decodes) {
    decode_warm_ = true;
    return Warmed{.bucket = 0, .seconds = end->SecondsSince(*begin), .more = true};
  }
  ++warm_buckets_;
  // On the CPU all buckets run the same primitives row by row, so warming up one is enough.
  const bool more = backend_.device() != Device::kCpu && warm_buckets_ < buckets_.size();
  return Warmed{.bucket = bucket, .seconds = end->SecondsSince(*begin), .more = more};
}

Tensor Evaluator::SlotOf(const Tensor& per_slot, int slot) const {
  Tensor row = per_slot.Slice(slot, 1);
  if (row.shape().rank() != 4) return row;
  return row.Reshape({row.dim(1), row.dim(2), row.dim(3)});
}

void Evaluator::UploadStart(int slot, const Start& start) {
  const std::vector<DeviceEvaluation>& plan = *start.plan;
  DENOISED_CHECK(!plan.empty() && static_cast<int>(plan.size()) <= options_.max_evaluations);
  const size_t plan_bytes = plan.size() * sizeof(DeviceEvaluation);
  backend_.Upload(plan.data(), plan_bytes, SlotOf(state_.plans, slot));
  const int64_t seed = static_cast<int64_t>(start.seed);
  backend_.Upload(&seed, sizeof(seed), SlotOf(state_.seed, slot));
  backend_.Upload(&start.guidance_scale, sizeof(float), SlotOf(state_.guidance, slot));
  if (!start.embedding.empty())
    backend_.Upload(start.embedding.data(), start.embedding.size_bytes(),
                    SlotOf(state_.embedding, slot));
}

void Evaluator::Begin(int slot, const Start& start) {
  UploadStart(slot, start);
  if (start.source && options_.codec) {
    EncodeSource(start);
  } else if (start.source) {
    backend_.Upload(start.source, source_.bytes(), source_);
  }
  if (start.noise) backend_.Upload(start.noise, noise_.bytes(), noise_);
  backend_.BeginSlot({.state = state_,
                      .slot = slot,
                      .source = start.source ? source_ : Tensor(),
                      .noise = start.noise ? noise_ : Tensor(),
                      .source_scale = start.source_scale,
                      .noise_scale = start.noise_scale,
                      .churn_scale = start.churn_scale});
}

/// Pixels become latents in source_. The encoder's noise is a draw of the image's own.
void Evaluator::EncodeSource(const Start& start) {
  backend_.Upload(start.source, pixels_.bytes(), pixels_);
  std::vector<float> noise(noise_.elements());
  for (size_t i = 0; i < noise.size(); i += 4) {
    const Normal4 normal = PhiloxNormal(start.seed, kEncoderDraw, i / 4);
    for (size_t j = 0; j < 4 && i + j < noise.size(); ++j) noise[i + j] = normal.v[j];
  }
  backend_.Upload(noise.data(), noise_.bytes(), noise_);
  nn::Context context{backend_, *encode_arena_};
  const auto as_row = [](const Tensor& image) {
    return image.Reshape({1, image.dim(0), image.dim(1), image.dim(2)});
  };
  backend_.Copy(options_.codec->Encode(context, as_row(pixels_), as_row(noise_)), source_);
}

std::unique_ptr<Evaluator::Parked> Evaluator::Park(int slot) {
  auto parked = std::make_unique<Parked>();
  parked->x_download = backend_.BeginDownload(SlotOf(state_.x, slot));
  parked->registers_download = backend_.BeginDownload(state_.registers.Slice(slot, 1));
  parked->nonfinite_download = backend_.BeginDownload(state_.nonfinite.Slice(slot, 1));
  return parked;
}

absl::Status Evaluator::Parked::Arrive() {
  DENOISED_ASSIGN_OR_RETURN(x, x_download->Wait());
  DENOISED_ASSIGN_OR_RETURN(registers, registers_download->Wait());
  DENOISED_ASSIGN_OR_RETURN(nonfinite, nonfinite_download->Wait());
  nonfinite_download.reset();
  x_download.reset();
  registers_download.reset();
  return absl::OkStatus();
}

void Evaluator::Resume(int slot, const Start& start, int evaluations_done, const Parked& parked) {
  UploadStart(slot, start);
  backend_.Upload(parked.x.data(), parked.x.bytes(), SlotOf(state_.x, slot));
  backend_.Upload(parked.registers.data(), parked.registers.bytes(),
                  state_.registers.Slice(slot, 1));
  backend_.Upload(parked.nonfinite.data(), parked.nonfinite.bytes(),
                  SlotOf(state_.nonfinite, slot));
  const int32_t next = evaluations_done;
  backend_.Upload(&next, sizeof(next), SlotOf(state_.evaluation, slot));
}

absl::StatusOr<int> Evaluator::Evaluate(std::span<const EvaluationRow> rows) {
  const auto padded_to =
      std::lower_bound(buckets_.begin(), buckets_.end(), static_cast<int>(rows.size()));
  DENOISED_CHECK(padded_to != buckets_.end(), "{} rows, at most {}", rows.size(),
                 options_.max_rows);
  const int bucket = *padded_to;
  std::vector<EvaluationRow> padded(rows.begin(), rows.end());
  padded.resize(bucket, kPadding);
  const bool same =
      padded.size() <= uploaded_rows_.size() &&
      std::memcmp(padded.data(), uploaded_rows_.data(), padded.size() * sizeof(EvaluationRow)) == 0;
  if (!same) {
    backend_.Upload(padded.data(), padded.size() * sizeof(EvaluationRow), rows_);
    uploaded_rows_ = padded;
  }
  DENOISED_ASSIGN_OR_RETURN(Graph * graph, GraphFor(bucket));
  backend_.Launch(*graph);
  DENOISED_RETURN_IF_ERROR(backend_.status());
  return bucket;
}

std::unique_ptr<Download> Evaluator::DownloadState(int slot) {
  return backend_.BeginDownload(SlotOf(state_.x, slot));
}

absl::StatusOr<std::unique_ptr<Download>> Evaluator::DownloadImage(int slot) {
  if (!options_.codec) return DownloadState(slot);
  backend_.Copy(SlotOf(state_.x, slot), latents_);
  DENOISED_RETURN_IF_ERROR(LaunchDecode());
  return backend_.BeginDownload(
      decoded_.Reshape({decoded_.dim(1), decoded_.dim(2), decoded_.dim(3)}));
}

absl::Status Evaluator::LaunchDecode() {
  if (!decode_) {
    DENOISED_ASSIGN_OR_RETURN(decode_, backend_.Capture([this] {
      // Nothing else is in this arena, so the result has the same address each time.
      decoded_ = Tensor();
      decoded_ = Decode(backend_, *decode_arena_, latents_);
    }));
  }
  backend_.Launch(*decode_);
  return backend_.status();
}

std::unique_ptr<Download> Evaluator::DownloadX0(int slot) {
  return backend_.BeginDownload(SlotOf(state_.x0, slot));
}

std::unique_ptr<Download> Evaluator::DownloadNonfinite() {
  return backend_.BeginDownload(state_.nonfinite);
}

}  // namespace denoised
