// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/evaluator.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "engine/backend/counting.h"
#include "engine/core/philox.h"

namespace denoised {
namespace {

// Decoding twice as many images together must save this share of the time per image.
constexpr double kDecodeGain = 0.05;
// Several images count as taking the time of one image if they take at most this much longer.
constexpr double kOneImage = 1.1;
// A run that takes this many seconds fills the device: with more rows, or images, the time of each
// stays the same.
constexpr double kFillsDevice = 0.03;
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

}  // namespace

Evaluator::Evaluator(Backend& backend, std::shared_ptr<const Denoiser> denoiser,
                     const Options& options)
    : backend_(backend),
      denoiser_(std::move(denoiser)),
      options_(options),
      buckets_(Buckets(backend.capabilities().pads_rows, options.max_rows)) {}

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
  } else if (!options_.codec || options_.codec->traits().encodes) {
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
  encode_arena_.emplace(activations_);
  arena_.emplace(activations_);

  Shape pixels = image;
  int decodes = 1;  // together
  if (options_.codec) {
    const CodecTraits& codec = options_.codec->traits();
    pixels = {height * codec.factor, width * codec.factor, codec.image_channels};
    DENOISED_RETURN_IF_ERROR(take(&pixels_, pixels, DType::kF32, "init image"));
    // The memory that evaluations need anyway may have room for more images at a time.
    while (2 * decodes <= options_.max_decodes &&
           DecodeBytes(*options_.codec, 2 * decodes) <= activations_.bytes())
      decodes *= 2;
    for (int count = 1; count <= decodes; count *= 2) decodings_[count];
    DENOISED_RETURN_IF_ERROR(
        take(&latents_, {decodes, height, width, channels}, DType::kF32, "latents to decode"));
  }
  if (options_.preview_codec)
    DENOISED_RETURN_IF_ERROR(
        take(&preview_latents_, {1, height, width, channels}, DType::kF32, "latents of previews"));
  // The warm-up decodes them and is timed; a CPU is slow with the denormal numbers that may lie in
  // fresh memory.
  for (const Tensor& latents : {latents_, preview_latents_}) {
    if (!latents) continue;
    const std::vector<float> zeros(latents.elements());
    backend_.Upload(zeros.data(), latents.bytes(), latents);
  }

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
  if (options_.codec)
    DENOISED_RETURN_IF_ERROR(reserve(pixel_bytes, options_.max_decodes * options_.decodes));
  if (options_.preview_codec) DENOISED_RETURN_IF_ERROR(reserve(pixel_bytes, options_.previews));
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
  if (options_.codec) {
    codecs = DecodeBytes(*options_.codec, 1);
    if (const CodecTraits& codec = options_.codec->traits(); codec.encodes) {
      CountingBackend counting(backend_);
      Arena measuring = Arena::Measuring(backend_.device());
      nn::Context context{counting, measuring};
      const int64_t height = options_.height, width = options_.width;
      options_.codec->Encode(
          context,
          measuring.New({1, height * codec.factor, width * codec.factor, codec.image_channels},
                        DType::kF32),
          noise_.Reshape({1, height, width, noise_.dim(2)}));
      codecs = std::max(codecs, measuring.peak());
    }
  }
  if (options_.preview_codec) codecs = std::max(codecs, DecodeBytes(*options_.preview_codec, 1));
  size_t rows = plan();
  if (options_.activations)
    while (rows > options_.activations.bytes() && buckets_.back() > options_.least_rows) {
      buckets_.pop_back();
      rows = plan();
    }
  return std::max(rows, codecs);
}

/// Bytes of activations needed to decode `images` images together.
size_t Evaluator::DecodeBytes(const Codec& codec, int images) {
  CountingBackend counting(backend_);
  Arena measuring = Arena::Measuring(backend_.device());
  nn::Context context{counting, measuring};
  codec.Decode(context, measuring.New({images, options_.height, options_.width,
                                       codec.traits().latent_channels},
                                      DType::kF32));
  return measuring.peak();
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

absl::StatusOr<Graph*> Evaluator::GraphFor(int bucket) {
  std::unique_ptr<Graph>& graph = graphs_[bucket];
  if (!graph) {
    DENOISED_ASSIGN_OR_RETURN(graph, backend_.Capture([this, bucket] { Enqueue(bucket); }));
  }
  return graph.get();
}

absl::StatusOr<Evaluator::Warmed> Evaluator::WarmUp() {
  const bool decodes = options_.codec && warming_decodes_ > 0;
  const bool preview = !decodes && options_.preview_codec && !preview_warm_;
  if (!decodes && !preview && filled_) return CaptureNext();
  const int bucket = buckets_[warm_buckets_];
  const std::vector<EvaluationRow> padding(bucket, kPadding);
  const auto begin = backend_.Mark();
  DENOISED_RETURN_IF_ERROR(decodes   ? DecodeImages(warming_decodes_)
                           : preview ? Decode(preview_, *options_.preview_codec, preview_latents_)
                                     : Evaluate(padding).status());
  const auto end = backend_.Mark();
  DENOISED_RETURN_IF_ERROR(end->Wait());
  Warmed warmed{.stage = decodes ? Stage::kDecode : Stage::kDenoise,
                .count = decodes ? warming_decodes_ : bucket,
                .seconds = -1,
                .more = true};
  if (preview) {
    preview_warm_ = true;
    return warmed;
  }
  const auto measured = warm_runs_.Add(end->SecondsSince(*begin));
  if (!measured) return warmed;
  warmed.seconds = *measured;
  if (decodes) {
    const auto decoding = decodings_.find(warming_decodes_);
    decoding->second.seconds = warmed.seconds;
    // Half as many images, twice.
    const bool gains =
        warming_decodes_ == 1 ||
        warmed.seconds <= (1 - kDecodeGain) * 2 * std::prev(decoding)->second.seconds;
    if (!gains) warmed.seconds = -1;
    if (!gains || warmed.seconds >= kFillsDevice)
      decodings_.erase(gains ? std::next(decoding) : decoding, decodings_.end());
    warming_decodes_ = decodings_.contains(2 * warming_decodes_) ? 2 * warming_decodes_ : 0;
    return warmed;
  }
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
  if (const auto graph = GraphFor(bucket);
      !graph.ok() && !absl::IsResourceExhausted(graph.status()))
    return graph.status();
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

void Evaluator::Begin(int slot, const Start& start) {
  UploadStart(slot, start);
  if (start.source) ReadSource(slot, start);
  if (start.noise) backend_.Upload(start.noise, noise_.bytes(), noise_);
  const bool keeps_known = start.mask && state_.known;
  backend_.BeginSlot({.state = state_,
                      .slot = slot,
                      .source = start.source_scale != 0 || keeps_known ? source_ : Tensor(),
                      .noise = start.noise ? noise_ : Tensor(),
                      .source_scale = start.source_scale,
                      .noise_scale = start.noise_scale,
                      .churn_scale = start.churn_scale,
                      .shift = start.shift,
                      .keeps_known = keeps_known});
}

/// Prepares everything that the slot needs from its init image. Fills source_ if the slot starts
/// from the image or keeps a part of it.
void Evaluator::ReadSource(int slot, const Start& start) {
  std::vector<float> mask;
  if (start.mask) MaskOf(start, &mask);
  if (options_.image_input == ImageInput::kWhole) {
    backend_.Upload(start.source, pixels_.bytes(), pixels_);
    nn::Context context{backend_, *encode_arena_};
    backend_.Copy(options_.codec->EncodeUnscaled(context, AsRow(pixels_)),
                  state_.extra.Slice(slot, 1));
  } else if (options_.image_input == ImageInput::kMasked) {
    DENOISED_CHECK(start.mask != nullptr);
    const Tensor pixels = Tensor::Host(pixels_.shape(), DType::kF32);
    const int64_t channels = pixels.dim(2);
    for (int64_t i = 0; i < pixels.elements(); ++i)
      pixels.as<float>()[i] = start.mask[i / channels] < 0.5f ? start.source[i] : 0.0f;
    // The model reads the columns [mask, latents], which arrive in separate memory.
    const Tensor extra =
        state_.extra.Slice(slot, 1).Reshape({noise_.dim(0) * noise_.dim(1), state_.extra.dim(3)});
    EncodeSource(start, pixels.as<float>(), kMaskedEncoderDraw, source_);
    backend_.Copy(source_.Reshape({extra.dim(0), noise_.dim(2)}), extra.Columns(1, noise_.dim(2)));
    const Tensor uploaded = noise_.Reshape({noise_.elements()}).Slice(0, extra.dim(0));
    backend_.Upload(mask.data(), uploaded.bytes(), uploaded);
    backend_.Copy(uploaded.Reshape({extra.dim(0), 1}), extra.Columns(0, 1));
  } else if (start.mask) {
    backend_.Upload(mask.data(), mask.size() * sizeof(float), state_.mask.Slice(slot, 1));
  }
  if (start.source_scale == 0 && !(start.mask && state_.known)) return;
  if (options_.codec) {
    EncodeSource(start, start.source, kEncoderDraw, source_);
  } else {
    backend_.Upload(start.source, source_.bytes(), source_);
  }
}

/// Encodes pixels into latents. The encoder's noise is a separate draw of the image's seed.
void Evaluator::EncodeSource(const Start& start, const float* pixels, uint32_t draw,
                             const Tensor& latents) {
  backend_.Upload(pixels, pixels_.bytes(), pixels_);
  std::vector<float> noise(noise_.elements());
  for (size_t i = 0; i < noise.size(); i += 4) {
    const Normal4 normal = PhiloxNormal(start.seed, draw, i / 4);
    for (size_t j = 0; j < 4 && i + j < noise.size(); ++j) noise[i + j] = normal.v[j];
  }
  backend_.Upload(noise.data(), noise_.bytes(), noise_);
  nn::Context context{backend_, *encode_arena_};
  backend_.Copy(options_.codec->Encode(context, AsRow(pixels_), AsRow(noise_)), latents);
}

/// The mask at the size of the state: the nearest pixel decides, chosen as torch's "nearest" does.
void Evaluator::MaskOf(const Start& start, std::vector<float>* mask) const {
  const int factor = options_.codec ? options_.codec->traits().factor : 1;
  const int64_t width = int64_t{options_.width} * factor;
  for (int y = 0; y < options_.height; ++y)
    for (int x = 0; x < options_.width; ++x)
      mask->push_back(start.mask[y * factor * width + x * factor] < 0.5f ? 0.0f : 1.0f);
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

bool Evaluator::Resume(int slot, const Start& start, int evaluations_done, const Parked& parked) {
  // What is prepared from an init image has the same bits each time.
  const bool reads_source = start.source && (state_.extra || start.mask);
  if (reads_source) {
    Begin(slot, start);
  } else {
    UploadStart(slot, start);
  }
  backend_.Upload(parked.x.data(), parked.x.bytes(), SlotOf(state_.x, slot));
  backend_.Upload(parked.registers.data(), parked.registers.bytes(),
                  state_.registers.Slice(slot, 1));
  backend_.Upload(parked.nonfinite.data(), parked.nonfinite.bytes(),
                  SlotOf(state_.nonfinite, slot));
  const int32_t next = evaluations_done;
  backend_.Upload(&next, sizeof(next), SlotOf(state_.evaluation, slot));
  return reads_source;
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
  const absl::StatusOr<Graph*> graph = GraphFor(bucket);
  if (graph.ok()) {
    backend_.Launch(**graph);
  } else if (absl::IsResourceExhausted(graph.status())) {
    Enqueue(bucket);  // without a graph: slower, with the same bits
  } else {
    return graph.status();
  }
  DENOISED_RETURN_IF_ERROR(backend_.status());
  return bucket;
}

std::unique_ptr<Download> Evaluator::DownloadState(int slot) {
  return backend_.BeginDownload(SlotOf(state_.x, slot));
}

std::vector<int> Evaluator::Decodes(int drawn, double seconds) const {
  if (drawn == 0) return {};
  if (!options_.codec) return {drawn};
  std::vector<int> calls;
  int left = std::min(drawn, options_.max_decodes);
  double allowed = std::max(seconds, kOneImage * decodings_.at(1).seconds);
  while (left > 0) {
    int most = calls.empty() ? 1 : 0;
    for (const auto& [count, decoding] : decodings_) {
      if (count > left || decoding.seconds < 0) break;
      if (decoding.seconds <= allowed) most = count;
    }
    if (most == 0) break;
    calls.push_back(most);
    if (decodings_.at(most).seconds < 0) break;
    left -= most;
    seconds -= decodings_.at(most).seconds;
    allowed = seconds;
  }
  return calls;
}

absl::StatusOr<std::vector<std::unique_ptr<Download>>> Evaluator::DownloadImages(
    std::span<const int> slots) {
  std::vector<std::unique_ptr<Download>> downloads;
  if (!options_.codec) {
    for (const int slot : slots) downloads.push_back(DownloadState(slot));
    return downloads;
  }
  for (size_t i = 0; i < slots.size(); ++i)
    backend_.Copy(state_.x.Slice(slots[i], 1), latents_.Slice(static_cast<int64_t>(i), 1));
  const int count = static_cast<int>(slots.size());
  DENOISED_RETURN_IF_ERROR(DecodeImages(count));
  const Tensor& pixels = decodings_.at(count).pixels;
  for (int i = 0; i < count; ++i) downloads.push_back(backend_.BeginDownload(SlotOf(pixels, i)));
  return downloads;
}

absl::Status Evaluator::DecodeImages(int count) {
  const auto decoding = decodings_.find(count);
  DENOISED_CHECK(decoding != decodings_.end(), "{} images side by side", count);
  return Decode(decoding->second, *options_.codec, latents_.Slice(0, count));
}

absl::Status Evaluator::Decode(Decoding& decoding, const Codec& codec, const Tensor& latents) {
  const auto decode = [this, &decoding, &codec, latents] {
    // Nothing else is in this arena, so the result has the same address each time.
    decoding.pixels = Tensor();
    nn::Context context{backend_, *decoding.arena};
    decoding.pixels = codec.Decode(context, latents);
  };
  if (!decoding.graph) {
    decoding.arena.emplace(activations_);
    absl::StatusOr<std::unique_ptr<Graph>> graph = backend_.Capture(decode);
    if (absl::IsResourceExhausted(graph.status())) {
      decode();  // without a graph: slower, with the same bits
      return backend_.status();
    }
    DENOISED_RETURN_IF_ERROR(graph.status());
    decoding.graph = *std::move(graph);
  }
  backend_.Launch(*decoding.graph);
  return backend_.status();
}

absl::StatusOr<std::unique_ptr<Download>> Evaluator::DownloadPreview(int slot, bool predicted,
                                                                     float scale) {
  if (predicted) {
    backend_.Copy(state_.x0.Slice(slot, 1), preview_latents_);
  } else {
    backend_.Add(state_.x.Slice(slot, 1), scale, Tensor(), 0.0f, Activation::kNone,
                 preview_latents_);
  }
  DENOISED_RETURN_IF_ERROR(Decode(preview_, *options_.preview_codec, preview_latents_));
  return backend_.BeginDownload(SlotOf(preview_.pixels, 0));
}

std::unique_ptr<Download> Evaluator::DownloadX0(int slot) {
  return backend_.BeginDownload(SlotOf(state_.x0, slot));
}

std::unique_ptr<Download> Evaluator::DownloadNonfinite() {
  return backend_.BeginDownload(state_.nonfinite);
}

}  // namespace denoised
