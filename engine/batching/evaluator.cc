// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/evaluator.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "engine/backend/counting.h"
#include "engine/core/philox.h"

namespace denoised {
namespace {

constexpr EvaluationRow kPadding = {.slot = -1, .label = 0, .unconditional_row = -1, .advances = 0};

// Powers of two if rows are padded; otherwise every count is a bucket of its own.
std::vector<int> Buckets(bool pads, int max_rows) {
  std::vector<int> buckets;
  for (int rows = 1; rows < max_rows; rows = pads ? rows * 2 : rows + 1) buckets.push_back(rows);
  buckets.push_back(max_rows);
  return buckets;
}

/// An image as a batch of one.
Tensor AsRow(const Tensor& image) {
  return image.Reshape({1, image.dim(0), image.dim(1), image.dim(2)});
}

InitImages::Picture WholeOf(const Evaluator::Start& start) {
  return {.id = start.source_id, .pixels = start.source};
}
InitImages::Picture MaskedOf(const Evaluator::Start& start) {
  return {.id = start.source_id, .pixels = start.source, .mask = start.mask};
}

}  // namespace

Evaluator::Evaluator(Backend& backend, std::shared_ptr<const Denoiser> denoiser,
                     const Options& options)
    : backend_(backend),
      denoiser_(std::move(denoiser)),
      options_(options),
      buckets_(Buckets(backend.capabilities().pads_rows, options.max_rows)) {
  const auto make_decoder = [&](const std::shared_ptr<const Codec>& codec,
                                std::optional<CodecStage>* stage) {
    if (!codec) return;
    stage->emplace(
        backend_,
        [codec](nn::Context& context, const Tensor& latents) {
          return codec->Decode(context, latents);
        },
        Shape{options_.height, options_.width, codec->traits().latent_channels});
  };
  make_decoder(options_.codec, &decoding_);
  make_decoder(options_.preview_codec, &preview_);
  if (options_.codec && options_.codec->traits().encodes())
    init_images_.emplace(backend_, options_.codec, options_.height, options_.width);
}

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
  DENOISED_RETURN_IF_ERROR(take(&state_.guidance, {slots, kGuidanceNumbers}, DType::kF32, "slots"));
  if (traits.class_vector_size > 0)
    DENOISED_RETURN_IF_ERROR(
        take(&state_.embedding, {slots, traits.class_vector_size}, DType::kF32, "class vectors"));
  if (traits.extra_channels > 0) {
    DENOISED_RETURN_IF_ERROR(take(&state_.extra, {slots, height, width, traits.extra_channels},
                                  DType::kF32, "what the model reads of init images"));
  } else if (!options_.codec || options_.codec->traits().encodes()) {
    DENOISED_RETURN_IF_ERROR(
        take(&state_.known, {slots, 2, height, width, channels}, DType::kF32, "images with masks"));
    DENOISED_RETURN_IF_ERROR(take(&state_.mask, {slots, height, width}, DType::kF32, "masks"));
  }
  if (options_.measures_outputs)
    DENOISED_RETURN_IF_ERROR(take(&factors_, {options_.max_rows, kOutputFactors}, DType::kF32,
                                  "factors of whole outputs"));
  const Shape image{height, width, channels};
  DENOISED_RETURN_IF_ERROR(take(&source_, image, DType::kF32, "init image"));
  DENOISED_RETURN_IF_ERROR(take(&noise_, image, DType::kF32, "initial noise"));
  DENOISED_RETURN_IF_ERROR(
      take(&rows_, {options_.max_rows, kRowNumbers}, DType::kI32, "rows of an evaluation"));

  DENOISED_ASSIGN_OR_RETURN(const size_t needed, PlanActivations());
  if (options_.activations && needed <= options_.activations.bytes()) {
    activations_ = options_.activations;
  } else {
    activation_bytes_ = needed;
    DENOISED_ASSIGN_OR_RETURN(
        activations_, backend_.Allocate({static_cast<int64_t>(needed)}, DType::kU8,
                                        fmt::format("activations of {} rows of {}×{}", max_rows(),
                                                    options_.width, options_.height)));
  }
  if (workers_ > 0)
    DENOISED_RETURN_IF_ERROR(take(&outputs_, {max_rows(), height, width, traits.output_channels},
                                  DType::kF32, "predictions"));
  for (int worker = 0; worker < workers_; ++worker)
    part_arenas_.emplace_back(activations_.Slice(static_cast<int64_t>(worker * part_bytes_),
                                                 static_cast<int64_t>(part_bytes_)));
  arena_.emplace(activations_);

  Shape pixels = image;
  if (decoding_) {
    const CodecTraits& codec = options_.codec->traits();
    pixels = {height * codec.factor, width * codec.factor, codec.image_channels};
    // The memory that evaluations need anyway may have room for several images.
    decoding_->Use(activations_, options_.max_images);
  }
  if (init_images_) {
    init_images_->stage().Use(activations_, options_.max_images);
    DENOISED_RETURN_IF_ERROR(init_images_->Allocate(&slot_bytes_));
  }
  if (preview_) preview_->Use(activations_, 1);

  const auto reserve = [&](int64_t bytes, int count) -> absl::Status {
    DENOISED_ASSIGN_OR_RETURN(auto reserved, backend_.ReserveDownloads(bytes, count));
    if (reserved) slot_bytes_ += bytes * count;
    downloads_.push_back(std::move(reserved));
    return absl::OkStatus();
  };
  const int64_t image_bytes = image.elements() * int64_t{sizeof(float)},
                pixel_bytes = pixels.elements() * int64_t{sizeof(float)};
  DENOISED_RETURN_IF_ERROR(reserve(image_bytes, options_.downloads + options_.parks));
  DENOISED_RETURN_IF_ERROR(
      reserve(slots * int64_t{sizeof(int32_t)}, options_.flag_downloads + options_.parks));
  DENOISED_RETURN_IF_ERROR(reserve(kRegisters * image_bytes, options_.parks));
  if (decoding_)
    DENOISED_RETURN_IF_ERROR(reserve(pixel_bytes, options_.max_images * options_.decodes));
  if (preview_) DENOISED_RETURN_IF_ERROR(reserve(pixel_bytes, options_.previews));
  return backend_.status();
}

/// The bytes of activations that are needed: for all buckets, or, if their memory is given, for the
/// buckets that fit into it.
absl::StatusOr<size_t> Evaluator::PlanActivations() {
  std::map<int, size_t> measured;
  const auto measure = [&](int rows) {
    if (const auto known = measured.find(rows); known != measured.end()) return known->second;
    CountingBackend counting(backend_);
    Arena measuring = Arena::Measuring(backend_.device());
    const Tensor output = Predict(counting, measuring, 0, rows);
    counting.Advance({.state = state_, .rows = rows_.Slice(0, rows), .model_output = output});
    return measured[rows] = measuring.peak();
  };
  // Fewer rows may fragment the arena more than more rows do, so every number of rows is measured.
  const auto plan = [&] {
    int part = 0;
    std::set<int> together;
    workers_ = 0;
    for (const int bucket : buckets_) {
      const RowSplit split = backend_.SplitRows(bucket);
      if (split.apart > 0) workers_ = split.workers;
      part = std::max(part, split.part);
      if (split.apart < bucket) together.insert(bucket - split.apart);
    }
    part_bytes_ = 0;
    for (int rows = 1; rows <= part; ++rows) part_bytes_ = std::max(part_bytes_, measure(rows));
    size_t bytes = part_bytes_ * workers_;
    for (const int rows : together) bytes = std::max(bytes, measure(rows));
    return bytes;
  };
  size_t codecs = 0;
  if (decoding_) codecs = decoding_->Bytes(1);
  if (init_images_) codecs = std::max(codecs, init_images_->stage().Bytes(1));
  if (preview_) codecs = std::max(codecs, preview_->Bytes(1));
  size_t rows = plan();
  if (options_.activations)
    while (rows > options_.activations.bytes() && buckets_.back() > options_.least_rows) {
      buckets_.pop_back();
      rows = plan();
    }
  return std::max(rows, codecs);
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
  // A row may read another row's output, so rows advance only when all outputs are there.
  const Tensor rows = rows_.Slice(0, bucket);
  Tensor factors;
  if (factors_) {
    factors = factors_.Slice(0, bucket);
    backend_.MeasureOutputs(
        {.state = state_, .rows = rows, .model_output = output, .factors = factors});
  }
  backend_.Advance({.state = state_, .rows = rows, .model_output = output, .factors = factors});
}

Tensor Evaluator::Predict(Backend& backend, Arena& arena, int begin, int count) {
  const DenoiserTraits& traits = denoiser_->traits();
  nn::Context context{backend, arena};
  const Tensor rows = rows_.Slice(begin, count);
  DenoiserInput input;
  input.x = context.New(
      {count, options_.height, options_.width, traits.channels + traits.extra_channels});
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

CapturedRun& Evaluator::RunOf(int bucket) {
  return runs_.try_emplace(bucket, backend_, [this, bucket] { Enqueue(bucket); }).first->second;
}

absl::StatusOr<Evaluator::Warmed> Evaluator::WarmUp() {
  struct OfCodec {
    CodecStage* codec;
    Stage stage;
    bool estimated;  // previews are not
  };
  const OfCodec stages[] = {{decoding_ ? &*decoding_ : nullptr, Stage::kDecode, true},
                            {init_images_ ? &init_images_->stage() : nullptr, Stage::kEncode, true},
                            {preview_ ? &*preview_ : nullptr, Stage::kDecode, false}};
  for (const auto& [codec, stage, estimated] : stages) {
    if (!codec || codec->warm()) continue;
    DENOISED_ASSIGN_OR_RETURN(const CodecStage::Warmed warmed, codec->WarmUp());
    return Warmed{.stage = stage,
                  .count = warmed.images,
                  .seconds = estimated ? warmed.seconds : -1,
                  .more = true};
  }
  if (filled_) return CaptureNext();
  const int bucket = buckets_[warm_buckets_];
  const std::vector<EvaluationRow> padding(bucket, kPadding);
  CapturedRun::Ran ran;
  DENOISED_RETURN_IF_ERROR(Evaluate(padding, &ran).status());
  DENOISED_RETURN_IF_ERROR(ran.end->Wait());
  Warmed warmed{.count = bucket, .seconds = -1, .more = true};
  const auto measured = warm_runs_.Add(ran.end->SecondsSince(*ran.begin));
  if (!measured) return warmed;
  warmed.seconds = *measured;
  filled_ = warmed.seconds >= kFillsDevice;
  ++warm_buckets_;
  // Without padding all buckets run the same primitives row by row: warming up one is enough.
  warmed.more = backend_.capabilities().pads_rows && warm_buckets_ < buckets_.size();
  return warmed;
}

/// Captures the next bucket without running it, because that would take long. A request that runs
/// it first finds cold caches, but does not wait for the capture.
absl::StatusOr<Evaluator::Warmed> Evaluator::CaptureNext() {
  const int bucket = buckets_[warm_buckets_++];
  DENOISED_RETURN_IF_ERROR(RunOf(bucket).Capture());
  return Warmed{.count = bucket, .seconds = -1, .more = warm_buckets_ < buckets_.size()};
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
  backend_.Upload(&start.guidance, sizeof(Guidance), SlotOf(state_.guidance, slot));
  if (!start.embedding.empty())
    backend_.Upload(start.embedding.data(), start.embedding.size_bytes(),
                    SlotOf(state_.embedding, slot));
}

/// Whether the slot needs the init image. What is prepared from it has the same bits each time, so
/// the state of a parked image does not have it.
bool Evaluator::ReadsSource(const Start& start) const {
  return start.source && (!start.parked || state_.extra || start.mask);
}

/// Whether it needs the latents of the whole init image: it starts from them or keeps a part.
bool Evaluator::KeepsSource(const Start& start) const {
  return start.source_scale != 0 || (start.mask && state_.known);
}

std::vector<InitImages::Picture> Evaluator::PicturesOf(const Start& start) const {
  std::vector<InitImages::Picture> pictures;
  if (!init_images_ || !ReadsSource(start)) return pictures;
  if (options_.image_input == ImageInput::kWhole || KeepsSource(start))
    pictures.push_back(WholeOf(start));
  if (options_.image_input == ImageInput::kMasked) pictures.push_back(MaskedOf(start));
  return pictures;
}

void Evaluator::Begin(int slot, const Start& start) {
  UploadStart(slot, start);
  const bool reads_source = ReadsSource(start);
  if (reads_source) ReadSource(slot, start);
  if (!start.parked || reads_source) {
    if (start.noise) backend_.Upload(start.noise, noise_.bytes(), noise_);
    backend_.BeginSlot({.state = state_,
                        .slot = slot,
                        .source = KeepsSource(start) ? source_ : Tensor(),
                        .noise = start.noise ? noise_ : Tensor(),
                        .source_scale = start.source_scale,
                        .noise_scale = start.noise_scale,
                        .churn_scale = start.churn_scale,
                        .shift = start.shift,
                        .keeps_known = start.mask && state_.known});
  }
  if (!start.parked) return;
  const Parked& parked = *start.parked;
  backend_.Upload(parked.x.data(), parked.x.bytes(), SlotOf(state_.x, slot));
  backend_.Upload(parked.registers.data(), parked.registers.bytes(),
                  state_.registers.Slice(slot, 1));
  backend_.Upload(parked.nonfinite.data(), parked.nonfinite.bytes(),
                  SlotOf(state_.nonfinite, slot));
  const int32_t next = start.evaluations_done;
  backend_.Upload(&next, sizeof(next), SlotOf(state_.evaluation, slot));
}

/// Prepares everything that the slot needs from its init image. Fills source_ if KeepsSource().
void Evaluator::ReadSource(int slot, const Start& start) {
  const std::vector<float> mask = MaskOf(start);
  if (options_.image_input == ImageInput::kWhole) {
    options_.codec->SampleLatents(backend_, {.encoded = init_images_->Encoded(WholeOf(start)),
                                             .unscaled = true,
                                             .out = state_.extra.Slice(slot, 1)});
  } else if (options_.image_input == ImageInput::kMasked) {
    DENOISED_CHECK(start.mask != nullptr);
    // The model reads the columns [mask, latents], which arrive in separate memory.
    const Tensor extra =
        state_.extra.Slice(slot, 1).Reshape({noise_.dim(0) * noise_.dim(1), state_.extra.dim(3)});
    SampleSource(start, MaskedOf(start), kMaskedEncoderDraw);
    backend_.Copy(source_.Reshape({extra.dim(0), noise_.dim(2)}), extra.Columns(1, noise_.dim(2)));
    const Tensor uploaded = noise_.Reshape({noise_.elements()}).Slice(0, extra.dim(0));
    backend_.Upload(mask.data(), uploaded.bytes(), uploaded);
    backend_.Copy(uploaded.Reshape({extra.dim(0), 1}), extra.Columns(0, 1));
  } else if (start.mask) {
    backend_.Upload(mask.data(), mask.size() * sizeof(float), state_.mask.Slice(slot, 1));
  }
  if (!KeepsSource(start)) return;
  if (init_images_) {
    SampleSource(start, WholeOf(start), kEncoderDraw);
  } else {
    backend_.Upload(start.source, source_.bytes(), source_);
  }
}

/// Fills source_ with latents of an init image. The encoder's noise is a separate draw of the
/// image's seed.
void Evaluator::SampleSource(const Start& start, const InitImages::Picture& picture,
                             uint32_t draw) {
  std::vector<float> noise(noise_.elements());
  for (size_t i = 0; i < noise.size(); i += 4) {
    const Normal4 normal = PhiloxNormal(start.seed, draw, i / 4);
    for (size_t j = 0; j < 4 && i + j < noise.size(); ++j) noise[i + j] = normal.v[j];
  }
  backend_.Upload(noise.data(), noise_.bytes(), noise_);
  options_.codec->SampleLatents(
      backend_,
      {.encoded = init_images_->Encoded(picture), .noise = AsRow(noise_), .out = AsRow(source_)});
}

/// The mask, if any, at the size of the state: the nearest pixel decides, chosen as torch's
/// "nearest" does.
std::vector<float> Evaluator::MaskOf(const Start& start) const {
  std::vector<float> mask;
  const int factor = options_.codec ? options_.codec->traits().factor : 1;
  const int64_t width = int64_t{options_.width} * factor;
  for (int y = 0; start.mask && y < options_.height; ++y)
    for (int x = 0; x < options_.width; ++x)
      mask.push_back(start.mask[y * factor * width + x * factor] < 0.5f ? 0.0f : 1.0f);
  return mask;
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

absl::StatusOr<int> Evaluator::Evaluate(std::span<const EvaluationRow> rows,
                                        CapturedRun::Ran* ran) {
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
  CapturedRun& run = RunOf(bucket);
  DENOISED_RETURN_IF_ERROR(run.Capture());
  DENOISED_ASSIGN_OR_RETURN(*ran, run.Run());
  return bucket;
}

std::unique_ptr<Download> Evaluator::DownloadState(int slot) {
  return backend_.BeginDownload(SlotOf(state_.x, slot));
}

std::vector<int> Evaluator::Decodes(int drawn, double seconds) const {
  if (drawn == 0) return {};
  if (!decoding_) return {drawn};
  return decoding_->NextRuns(std::min(drawn, options_.max_images), seconds);
}

absl::StatusOr<std::vector<std::unique_ptr<Download>>> Evaluator::DownloadImages(
    std::span<const int> slots, CapturedRun::Ran* ran) {
  std::vector<std::unique_ptr<Download>> downloads;
  if (!decoding_) {
    for (const int slot : slots) downloads.push_back(DownloadState(slot));
    return downloads;
  }
  const int count = static_cast<int>(slots.size());
  DENOISED_ASSIGN_OR_RETURN(const Tensor latents, decoding_->Input(count));
  for (int i = 0; i < count; ++i) backend_.Copy(state_.x.Slice(slots[i], 1), latents.Slice(i, 1));
  DENOISED_ASSIGN_OR_RETURN(*ran, decoding_->Run(count));
  for (int i = 0; i < count; ++i)
    downloads.push_back(backend_.BeginDownload(SlotOf(decoding_->output(count), i)));
  return downloads;
}

absl::StatusOr<std::unique_ptr<Download>> Evaluator::DownloadPreview(int slot, bool predicted,
                                                                     float scale) {
  DENOISED_ASSIGN_OR_RETURN(const Tensor latents, preview_->Input(1));
  if (predicted) {
    backend_.Copy(state_.x0.Slice(slot, 1), latents);
  } else {
    backend_.Add(state_.x.Slice(slot, 1), scale, Tensor(), 0.0f, Activation::kNone, latents);
  }
  DENOISED_RETURN_IF_ERROR(preview_->Run(1).status());
  return backend_.BeginDownload(SlotOf(preview_->output(1), 0));
}

std::unique_ptr<Download> Evaluator::DownloadX0(int slot) {
  return backend_.BeginDownload(SlotOf(state_.x0, slot));
}

std::unique_ptr<Download> Evaluator::DownloadNonfinite() {
  return backend_.BeginDownload(state_.nonfinite);
}

}  // namespace denoised
