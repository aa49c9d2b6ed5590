// SPDX-License-Identifier: Apache-2.0
#include "engine/training/trainer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include "engine/core/mutex.h"
#include "engine/training/augment.h"
#include "engine/training/random.h"

namespace denoised::training {
namespace {

/// Elements after a gradient, which are exchanged with it: the loss, the number of ranks that want
/// to stop, and padding.
constexpr int64_t kLossElements = 16;
constexpr int kMaxAverages = 8;
/// Threads that prepare pictures ahead where none were asked for.
constexpr int kPrefetchThreads = 2;
constexpr int64_t kScratchMargin = 256 << 20;  // bytes

bool RecomputesNorms(const TrainerOptions& options, const Parameters& parameters) {
  return options.recompute_norms.value_or(parameters.trained_elements() >= 100'000'000);
}

/// Gradients that a rank holds at a time if passes end in their order: one in each level of the
/// tree that sums them, and one in the hands of each worker but one.
int64_t GradientsAtOnce(int64_t passes, int64_t workers) {
  return std::bit_width(static_cast<uint64_t>(passes)) + workers - 1;
}

/// The pictures or posteriors that a step draws from.
const Tensor& PicturesOf(const Dataset& dataset) {
  return dataset.posteriors ? dataset.posteriors : dataset.images;
}

/// Augmented pictures differ in every step. Posteriors are small and stay in memory.
bool Prefetches(const TrainerOptions& options, const Dataset& dataset) {
  return !dataset.posteriors &&
         (options.prefetch_threads > 0 || options.augment > 0 || dataset.on_disk);
}

int AugmentLabels(const TrainerOptions& options) {
  return options.augment > 0 ? kAugmentLabels : 0;
}

bool LearnsTime(const UNet2DConfig& config) {
  return config.time_embedding_type == UNet2DConfig::Time::kLearned;
}

/// Numbers in the class vector that the network reads; 0: none.
int64_t VectorSize(const UNet2DConfig& config) {
  if (config.condition == ClassCondition::kVector) return config.time_embedding_dim;
  return config.condition == ClassCondition::kValue ? 1 : 0;
}

/// class_embed_type of a network that reads one.
const char* TypeOfVectors(const UNet2DConfig& config) {
  return config.condition == ClassCondition::kValue ? "timestep" : "identity";
}

absl::StatusOr<Samples> NewSamples(Backend& backend, const NetworkConfig& config,
                                   const TrainerOptions& options, const Dataset& dataset,
                                   int64_t rows) {
  Samples samples;
  DENOISED_ASSIGN_OR_RETURN(
      samples.rows, backend.Allocate({rows, kSampleNumbers}, DType::kI32, "the plan of a batch"));
  const auto* const pixels = std::get_if<UNet2DConfig>(&config);
  if (pixels != nullptr && LearnsTime(*pixels)) {
    DENOISED_ASSIGN_OR_RETURN(samples.timesteps,
                              backend.Allocate({rows}, DType::kI32, "timesteps"));
  }
  if (const int64_t size = pixels != nullptr ? VectorSize(*pixels) : 0; size > 0) {
    DENOISED_ASSIGN_OR_RETURN(samples.vectors,
                              backend.Allocate({rows, size}, DType::kF32, "class vectors"));
  }
  if (options.augment > 0) {
    DENOISED_ASSIGN_OR_RETURN(samples.augment, backend.Allocate({rows, kAugmentLabels}, DType::kF32,
                                                                "labels of augmentations"));
  }
  if (dataset.tokens) {
    const Shape shape{rows, dataset.tokens.dim(1)};
    DENOISED_ASSIGN_OR_RETURN(samples.tokens, backend.Allocate(shape, DType::kI32, "captions"));
    DENOISED_ASSIGN_OR_RETURN(samples.positions, backend.Allocate(shape, DType::kI32, "positions"));
  }
  return samples;
}

/// The memory and work of a pass, by counting.
struct PassCount {
  int64_t parameters = 0, trained_elements = 0, fixed_elements = 0;
  size_t activation_bytes = 0;
  Cost cost;
};
absl::StatusOr<PassCount> CountPass(const NetworkConfig& config, const TrainerOptions& options,
                                    const Dataset& dataset, int64_t pass_rows, DType activation,
                                    denoised::Device device) {
  PassCount count;
  const std::unique_ptr<Backend> backend = NewCountingBackend(activation, &count.cost);
  Parameters parameters;
  DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<Task> task,
                            Task::Make(*backend, parameters, config, AugmentLabels(options)));
  count.parameters = parameters.count();
  count.trained_elements = parameters.trained_elements();
  count.fixed_elements = parameters.fixed_elements();
  Arena arena = Arena::Measuring(device);
  DENOISED_ASSIGN_OR_RETURN(const Tensor trained,
                            backend->Allocate({count.trained_elements}, DType::kF32, ""));
  DENOISED_ASSIGN_OR_RETURN(
      const Tensor fixed,
      backend->Allocate({std::max<int64_t>(16, parameters.fixed_elements())}, DType::kF32, ""));
  DENOISED_ASSIGN_OR_RETURN(
      const Tensor gradient,
      backend->Allocate({count.trained_elements + kLossElements}, DType::kF32, ""));
  DENOISED_ASSIGN_OR_RETURN(const Samples samples,
                            NewSamples(*backend, config, options, dataset, pass_rows));
  Pass pass{.backend = *backend,
            .arena = arena,
            .parameters = parameters,
            .trained = trained,
            .fixed = fixed,
            .gradient = gradient,
            .rows = samples.rows,
            .dropout = static_cast<float>(options.dropout),
            .recompute_norms = RecomputesNorms(options, parameters)};
  task->Run(pass, {.images = PicturesOf(dataset),
                   .samples = samples,
                   .loss = gradient.Slice(count.trained_elements, 1)});
  count.activation_bytes = arena.peak();
  return count;
}

absl::StatusOr<Parameters> DeclareParameters(const NetworkConfig& config,
                                             const TrainerOptions& options) {
  Cost cost;
  const std::unique_ptr<Backend> backend = NewCountingBackend(DType::kF32, &cost);
  Parameters parameters;
  DENOISED_RETURN_IF_ERROR(
      Task::Make(*backend, parameters, config, AugmentLabels(options)).status());
  return parameters;
}

std::vector<double> Cumulative(const std::vector<double>& weights) {
  std::vector<double> sums(weights.size());
  std::partial_sum(weights.begin(), weights.end(), sums.begin());
  return sums;
}

absl::Status CheckPictures(const Shape& sample, const Tensor& images) {
  DENOISED_CHECK(images && images.dtype() == DType::kU8 && images.shape().rank() == 4);
  if (sample[0] == 0)
    return InvalidArgument("sample_size is missing or 0 in the network's config; set it");
  if (images.dim(3) != sample[2])
    return InvalidArgument("the pictures have {} channels, but in_channels is {}", images.dim(3),
                           sample[2]);
  if (images.dim(1) < sample[0] || images.dim(2) < sample[1])
    return InvalidArgument("the pictures are {} × {}, smaller than sample_size {} × {}",
                           images.dim(2), images.dim(1), sample[1], sample[0]);
  return absl::OkStatus();
}

/// Options that only a UNet2DModel supports.
absl::Status CheckNoPixelOptions(const char* what, const TrainerOptions& options) {
  if (options.augment > 0)
    return InvalidArgument("--augment is {}, which {} cannot be trained with; use 0",
                           options.augment, what);
  if (options.dropout > 0)
    return InvalidArgument("dropout is {}, which {} cannot be trained with; use 0", options.dropout,
                           what);
  return absl::OkStatus();
}

/// Of numbers that a Fourier embedding takes the logarithm of.
absl::Status CheckPositive(const Dataset& dataset) {
  const std::vector<int32_t>& labels = dataset.labels;
  const float least =
      dataset.vectors ? *std::min_element(dataset.vectors.as<float>(),
                                          dataset.vectors.as<float>() + dataset.vectors.elements())
                      : static_cast<float>(*std::min_element(labels.begin(), labels.end()));
  if (least > 0) return absl::OkStatus();
  return InvalidArgument(
      "a picture has the class vector {}, but the network takes its logarithm (class_embed_type "
      "\"timestep\" with time_embedding_type \"fourier\"); give numbers above 0",
      least);
}

absl::Status CheckSettingsOf(const UNet2DConfig& config, const TrainerOptions& options) {
  const bool learned_variance = options.objective.learned_variance;
  if (config.out_channels != (learned_variance ? 2 : 1) * config.in_channels)
    return InvalidArgument(
        "out_channels is {} and in_channels {}; make them equal, or out_channels twice in_channels "
        "for a learned variance",
        config.out_channels, config.in_channels);
  if (LearnsTime(config)) {
    if (!IsDdpm(options.objective.kind))
      return InvalidArgument(
          "time_embedding_type is \"learned\", a table of whole timesteps, which \"{}\" does not "
          "have; use --objective epsilon, v or x0, or \"positional\"",
          Name(options.objective.kind));
    if (options.objective.timesteps > config.num_train_timesteps)
      return InvalidArgument(
          "--timesteps is {}, but the network has num_train_timesteps {}; use at most as many",
          options.objective.timesteps, config.num_train_timesteps);
  }
  const bool fourier = config.time_embedding_type == UNet2DConfig::Time::kFourier;
  const bool score = options.objective.kind == ObjectiveOptions::Kind::kScore;
  if (fourier && !score)
    return InvalidArgument(
        "time_embedding_type is \"fourier\": such a network takes the logarithm of what it is told "
        "about the noise and divides its output by it, so it must be σ itself, which \"{}\" does "
        "not tell it; use --objective score, or \"positional\"",
        Name(options.objective.kind));
  if (score && !fourier)
    return InvalidArgument(
        "--objective is \"score\", which needs a network that divides its output by σ; set "
        "time_embedding_type to \"fourier\", or use another objective");
  if (options.class_dropout == 0) return absl::OkStatus();
  switch (config.condition) {
    case ClassCondition::kNone:
      return InvalidArgument(
          "--class-dropout is {}, but the network has no classes; leave it out, or set "
          "num_class_embeds to the number of classes and one more",
          options.class_dropout);
    case ClassCondition::kLabel:
      if (options.null_class < 0 || options.null_class >= config.num_class_embeds)
        return InvalidArgument(
            "--class-dropout needs a --null-class from 0 to {}; it is {}. Give the network one "
            "class more than the pictures have",
            config.num_class_embeds - 1, options.null_class);
      break;
    case ClassCondition::kValue:
    case ClassCondition::kVector:
      return InvalidArgument(
          "--class-dropout is {}, but the network reads class vectors (class_embed_type \"{}\"), "
          "which have no null class; leave it out",
          options.class_dropout, TypeOfVectors(config));
  }
  return absl::OkStatus();
}

absl::Status CheckSettingsOf(const AutoencoderConfig&, const TrainerOptions& options) {
  DENOISED_RETURN_IF_ERROR(CheckNoPixelOptions("an autoencoder", options));
  if (options.class_dropout > 0)
    return InvalidArgument("--class-dropout is {}, but an autoencoder has no classes; use 0",
                           options.class_dropout);
  return absl::OkStatus();
}

absl::Status CheckSettingsOf(const TextToImageConfig& config, const TrainerOptions& options) {
  DENOISED_RETURN_IF_ERROR(CheckNoPixelOptions("a UNet2DConditionModel", options));
  if (config.unet.out_channels != config.unet.in_channels)
    return InvalidArgument(
        "out_channels is {} and in_channels {}: only a network that reads and predicts latents "
        "alone can be trained; make them equal",
        config.unet.out_channels, config.unet.in_channels);
  return absl::OkStatus();
}

absl::Status CheckDatasetOf(const UNet2DConfig& config, const TrainerOptions& options,
                            const Dataset& dataset) {
  DENOISED_RETURN_IF_ERROR(CheckPictures(SampleShape(config), dataset.images));
  return CheckLabels(config, options, dataset);
}

absl::Status CheckDatasetOf(const AutoencoderConfig& config, const TrainerOptions&,
                            const Dataset& dataset) {
  return CheckPictures(SampleShape(config), dataset.images);
}

absl::Status CheckDatasetOf(const TextToImageConfig& config, const TrainerOptions& options,
                            const Dataset& dataset) {
  const Tensor& posteriors = dataset.posteriors;
  const Tensor& tokens = dataset.tokens;
  DENOISED_CHECK(posteriors && tokens && !dataset.first_caption.empty());
  const Shape sample = SampleShape(config);
  if (sample[0] == 0)
    return InvalidArgument("sample_size is missing or 0 in the network's config; set it");
  if (posteriors.dim(3) != 2 * sample[2] || posteriors.dim(1) != sample[0] ||
      posteriors.dim(2) != sample[1])
    return InvalidArgument(
        "the autoencoder makes latents of {} × {} × {}, but the network reads {} × {} × {} "
        "(sample_size, in_channels)",
        posteriors.dim(2), posteriors.dim(1), posteriors.dim(3) / 2, sample[1], sample[0],
        sample[2]);
  DENOISED_CHECK(posteriors.dim(0) == dataset.size() * (options.flip ? 2 : 1));
  if (tokens.dim(1) > config.text.max_position_embeddings)
    return InvalidArgument(
        "captions are {} tokens long, but the text encoder's max_position_embeddings is {}",
        tokens.dim(1), config.text.max_position_embeddings);
  for (int64_t i = 0; i < tokens.elements(); ++i)
    if (tokens.as<int32_t>()[i] >= config.text.vocab_size)
      return InvalidArgument(
          "the tokenizer has a token {}, but the text encoder's vocab_size is {}: they do not "
          "belong together",
          tokens.as<int32_t>()[i], config.text.vocab_size);
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckLabels(const UNet2DConfig& config, const TrainerOptions& options,
                         const Dataset& dataset) {
  switch (config.condition) {
    case ClassCondition::kNone:
      break;
    case ClassCondition::kLabel: {
      if (dataset.labels.empty())
        return InvalidArgument(
            "the network has num_class_embeds {}, but the pictures have no labels; put them into a "
            "folder for each class, or set num_class_embeds to null",
            config.num_class_embeds);
      const int32_t largest = *std::max_element(dataset.labels.begin(), dataset.labels.end());
      const bool null = options.class_dropout > 0;
      if (largest >= config.num_class_embeds)
        return InvalidArgument(
            "a picture has label {}, but the network's num_class_embeds is {}; set it to more than "
            "{}{}, or correct the labels",
            largest, config.num_class_embeds, largest + (null ? 1 : 0),
            null ? ", with the null class" : "");
      if (null && std::count(dataset.labels.begin(), dataset.labels.end(), options.null_class) > 0)
        return InvalidArgument(
            "--null-class is {}, which is the class of a picture too; {}leave --null-class out",
            options.null_class,
            largest + 2 > config.num_class_embeds
                ? fmt::format("set num_class_embeds to {}, and ", largest + 2)
                : "");
      break;
    }
    case ClassCondition::kValue:
    case ClassCondition::kVector: {
      const int64_t size = VectorSize(config);
      if (!dataset.vectors && (size != 1 || dataset.labels.empty()))
        return InvalidArgument(
            "the network has class_embed_type \"{}\", but the pictures have no class vectors; give "
            "each {} number{} as its label, in metadata.jsonl, dataset.json or a second .npy",
            TypeOfVectors(config), size, size == 1 ? "" : "s");
      if (dataset.vectors && dataset.vectors.dim(1) != size)
        return InvalidArgument(
            "the pictures have class vectors of {} numbers, but the network reads {}{}; give as "
            "many",
            dataset.vectors.dim(1), size,
            config.condition == ClassCondition::kVector ? " (its time_embedding_dim)" : "");
      if (config.condition == ClassCondition::kValue &&
          config.time_embedding_type == UNet2DConfig::Time::kFourier)
        DENOISED_RETURN_IF_ERROR(CheckPositive(dataset));
      break;
    }
  }
  return absl::OkStatus();
}

// Messages name the flags of denoise-train; dropout is also a field of the network's config.
absl::Status TrainerOptions::Check(int ranks) const {
  const auto between = [](const char* field, double value, double low, double high) {
    if (value >= low && value <= high) return absl::OkStatus();
    return InvalidArgument("{} is {}; use {} to {}", field, value, low, high);
  };
  DENOISED_RETURN_IF_ERROR(between("--steps", static_cast<double>(steps), 1, 4e9));
  DENOISED_RETURN_IF_ERROR(between("--batch", static_cast<double>(batch), 1, 1 << 24));
  DENOISED_RETURN_IF_ERROR(
      between("--accumulation", static_cast<double>(accumulation), 1, 1 << 24));
  if (chunks < 1 || !std::has_single_bit(static_cast<uint64_t>(chunks)) || batch % chunks != 0)
    return InvalidArgument(
        "--chunks is {}; use a power of two that divides the batch of {}, such as {}", chunks,
        batch, std::min<int64_t>(8, batch & -batch));
  if (!std::has_single_bit(static_cast<uint64_t>(ranks)) || ranks > chunks)
    return InvalidArgument(
        "there are {} ranks; use a power of two, at most the {} chunks of a batch", ranks, chunks);
  if (chunks / ranks % accumulation != 0)
    return InvalidArgument(
        "--accumulation is {}; it must divide the {} chunks of a rank (chunks / ranks)",
        accumulation, chunks / ranks);
  DENOISED_RETURN_IF_ERROR(between("--learning-rate", rate.rate, 0, 1e3));
  DENOISED_RETURN_IF_ERROR(
      between("--warmup-steps", static_cast<double>(rate.warmup_steps), 0, 4e9));
  DENOISED_RETURN_IF_ERROR(
      between("--reference-steps", static_cast<double>(rate.reference_steps), 1, 4e9));
  DENOISED_RETURN_IF_ERROR(between("--beta1", beta1, 0, 0.9999999));
  DENOISED_RETURN_IF_ERROR(between("--beta2", beta2, 0, 0.9999999));
  // Squares below float32's range are 0; eps then bounds the step.
  DENOISED_RETURN_IF_ERROR(between("--adam-eps", eps, 1e-16, 1));
  DENOISED_RETURN_IF_ERROR(between("--weight-decay", weight_decay, 0, 1e3));
  DENOISED_RETURN_IF_ERROR(between("--clip", clip, 0, 1e9));
  DENOISED_RETURN_IF_ERROR(between("--dropout", dropout, 0, 0.999));
  DENOISED_RETURN_IF_ERROR(between("--class-dropout", class_dropout, 0, 1));
  DENOISED_RETURN_IF_ERROR(between("--augment", augment, 0, 1));
  // Mirrored after it is augmented, a sample would not be what its labels tell the network.
  if (flip && augment > 0)
    return InvalidArgument(
        "--flip cannot be given with --augment, which mirrors half of the samples and tells the "
        "network so; leave --flip out");
  DENOISED_RETURN_IF_ERROR(between("--prefetch-threads", prefetch_threads, 0, 1024));
  if (averages.size() > kMaxAverages)
    return InvalidArgument("there are {} averages; at most {} are kept", averages.size(),
                           kMaxAverages);
  for (const AverageOptions& average : averages) DENOISED_RETURN_IF_ERROR(average.Check());
  return absl::OkStatus();
}

/// Adds the gradients of passes as they arrive, in the order of the tree. Passes end on any thread.
class Trainer::Tree {
 public:
  Tree(Backend& backend, int64_t elements) : backend_(backend), elements_(elements) {}

  absl::StatusOr<Tensor> Take() {
    {
      MutexLock lock(&mutex_);
      if (!free_.empty()) {
        Tensor tensor = std::move(free_.back());
        free_.pop_back();
        return tensor;
      }
    }
    return New();
  }
  /// Makes the first `count` that Take() will give.
  absl::Status Reserve(int64_t count) {
    MutexLock lock(&mutex_);
    for (int64_t i = 0; i < count; ++i) {
      DENOISED_ASSIGN_OR_RETURN(Tensor tensor, New());
      free_.push_back(std::move(tensor));
    }
    return absl::OkStatus();
  }
  /// Takes the sum of pass `leaf`. The call that completes a pair adds it and continues upwards.
  void Add(int64_t leaf, Tensor sum) {
    for (int level = 0;; ++level, leaf /= 2) {
      Tensor other;
      {
        MutexLock lock(&mutex_);
        if ((int64_t{1} << level) == leaves_) {
          root_ = std::move(sum);
          return;
        }
        const auto found = waiting_.find({level, leaf ^ 1});
        if (found == waiting_.end()) {
          waiting_[{level, leaf}] = std::move(sum);
          return;
        }
        other = std::move(found->second);
        waiting_.erase(found);
      }
      backend_.Accumulate(sum, other);  // a + b and b + a have the same bits
      MutexLock lock(&mutex_);
      free_.push_back(std::move(other));
    }
  }
  void Begin(int64_t leaves) {
    MutexLock lock(&mutex_);
    leaves_ = leaves;
    for (auto& [node, tensor] : waiting_) free_.push_back(std::move(tensor));
    waiting_.clear();
    // The same passes use the same tensors in every step, since a recording has their addresses.
    std::sort(free_.begin(), free_.end(),
              [](const Tensor& a, const Tensor& b) { return a.data() < b.data(); });
  }
  Tensor TakeRoot() {
    MutexLock lock(&mutex_);
    return std::move(root_);
  }
  void Free(Tensor tensor) {
    MutexLock lock(&mutex_);
    free_.push_back(std::move(tensor));
  }

 private:
  absl::StatusOr<Tensor> New() { return backend_.Allocate({elements_}, DType::kF32, "a gradient"); }

  Backend& backend_;
  const int64_t elements_;
  Mutex mutex_;
  int64_t leaves_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<std::pair<int, int64_t>, Tensor> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<Tensor> free_ ABSL_GUARDED_BY(mutex_);
  Tensor root_ ABSL_GUARDED_BY(mutex_);
};

Trainer::Trainer(Backend& backend, Exchange& exchange, const NetworkConfig& config,
                 const TrainerOptions& options, Objective objective, const Dataset& dataset)
    : backend_(backend),
      exchange_(exchange),
      config_(config),
      options_(options),
      objective_(std::move(objective)),
      dataset_(dataset),
      cumulative_(Cumulative(dataset.weights)) {}

Trainer::~Trainer() { static_cast<void>(backend_.status()); }  // before memory goes

absl::Status Trainer::CheckDataset(const NetworkConfig& config, const TrainerOptions& options,
                                   const Dataset& dataset) {
  DENOISED_RETURN_IF_ERROR(
      std::visit([&](const auto& one) { return CheckSettingsOf(one, options); }, config));
  DENOISED_CHECK(dataset.weights.empty() ||
                 static_cast<int64_t>(dataset.weights.size()) == dataset.size());
  DENOISED_RETURN_IF_ERROR(CheckPictureWeights(dataset.weights));
  return std::visit([&](const auto& one) { return CheckDatasetOf(one, options, dataset); }, config);
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Make(Backend& backend, Exchange& exchange,
                                                       const NetworkConfig& config,
                                                       const TrainerOptions& options,
                                                       const Dataset& dataset) {
  DENOISED_RETURN_IF_ERROR(options.Check(exchange.ranks()));
  DENOISED_RETURN_IF_ERROR(CheckDataset(config, options, dataset));
  DENOISED_ASSIGN_OR_RETURN(Objective objective, Objective::Make(options.objective));
  std::unique_ptr<Trainer> trainer(
      new Trainer(backend, exchange, config, options, std::move(objective), dataset));
  DENOISED_ASSIGN_OR_RETURN(
      trainer->task_, Task::Make(backend, trainer->parameters_, config, AugmentLabels(options)));
  DENOISED_RETURN_IF_ERROR(trainer->Allocate());
  return trainer;
}

absl::Status CheckSettings(const NetworkConfig& config, const TrainerOptions& options) {
  DENOISED_RETURN_IF_ERROR(
      std::visit([&](const auto& one) { return CheckSettingsOf(one, options); }, config));
  return DeclareParameters(config, options).status();
}

absl::Status CheckWeights(const NetworkConfig& config, const TrainerOptions& options,
                          const std::string& prefix, const Weights& weights) {
  DENOISED_ASSIGN_OR_RETURN(const Parameters parameters, DeclareParameters(config, options));
  return parameters.Check(weights, prefix);
}

absl::Status CheckPictureWeights(const std::vector<double>& weights) {
  if (weights.empty()) return absl::OkStatus();
  const double sum = Cumulative(weights).back();
  if (sum >= kLeastWeights && std::isfinite(sum)) return absl::OkStatus();
  return InvalidArgument(
      "the weights of the pictures sum up to {}; use weights with a finite sum of at least {}", sum,
      kLeastWeights);
}

absl::Status CheckPassRows(denoised::Device device, int64_t rows) {
  constexpr int64_t kMost = 65535;  // CUDA's limit of gridDim.y, where kernels count rows
  if (device == denoised::Device::kCpu || rows <= kMost) return absl::OkStatus();
  return InvalidArgument(
      "a pass has {} samples, but on a GPU at most {}: a smaller --batch, or a larger "
      "--accumulation, makes passes smaller",
      rows, kMost);
}

absl::Status Trainer::CheckPasses(const Backend& backend, const TrainerOptions& options,
                                  int ranks) {
  const int64_t chunks = backend.PassChunks(options.chunks / ranks / options.accumulation);
  return CheckPassRows(backend.device(), options.batch / options.chunks * chunks);
}

absl::StatusOr<TrainerPlan> Trainer::Plan(const Backend& backend, const NetworkConfig& config,
                                          const TrainerOptions& options, const Dataset& dataset,
                                          int ranks) {
  DENOISED_RETURN_IF_ERROR(options.Check(ranks));
  DENOISED_RETURN_IF_ERROR(CheckDataset(config, options, dataset));
  TrainerPlan plan;
  const int64_t local_chunks = options.chunks / ranks;
  const int64_t pass_chunks = backend.PassChunks(local_chunks / options.accumulation);
  const int64_t rows = options.batch / options.chunks * pass_chunks;
  DENOISED_RETURN_IF_ERROR(CheckPasses(backend, options, ranks));
  DENOISED_ASSIGN_OR_RETURN(
      const PassCount pass,
      CountPass(config, options, dataset, rows, backend.activation_dtype(), backend.device()));
  plan.parameters = pass.parameters;
  const int64_t passes = local_chunks / options.accumulation / pass_chunks;
  const int64_t workers = std::min<int64_t>(backend.workers(), passes);
  plan.activation_bytes = pass.activation_bytes * workers;
  const Tensor& pictures = PicturesOf(dataset);
  const auto picture = static_cast<int64_t>(pictures.bytes()) / pictures.dim(0);
  const bool cpu = backend.device() == denoised::Device::kCpu;
  const int64_t samples = options.batch / ranks;
  plan.dataset_bytes = pictures.bytes();
  if (Prefetches(options, dataset)) {
    plan.dataset_bytes = static_cast<size_t>(samples * picture);  // of a step
    if (cpu) {
      plan.dataset_bytes += Prefetcher::MemoryFor(samples, picture);
      if (!dataset.on_disk) plan.dataset_bytes += pictures.bytes();
    }
  }
  if (dataset.vectors) plan.dataset_bytes += dataset.vectors.bytes();
  // Weights, two moments, averages, gradients, and another rank's.
  const int64_t copies = 3 + static_cast<int64_t>(options.averages.size()) +
                         GradientsAtOnce(local_chunks / pass_chunks, workers) + (ranks > 1);
  const int64_t elements = pass.trained_elements + pass.fixed_elements;
  plan.weight_bytes =
      static_cast<size_t>(pass.trained_elements * copies + pass.fixed_elements) * sizeof(float) +
      PackedBytes(backend, elements, pass.cost);
  plan.state_bytes = static_cast<size_t>(pass.trained_elements *
                                             (3 + static_cast<int64_t>(options.averages.size())) +
                                         std::max<int64_t>(16, pass.fixed_elements)) *
                     sizeof(float);
  plan.step_flops = 2 * pass.cost.multiply_adds * static_cast<double>(options.chunks / pass_chunks);
  return plan;
}

absl::Status Trainer::Allocate() {
  const int64_t local_chunks = options_.chunks / exchange_.ranks();
  backend_.SetChunkRows(options_.batch / options_.chunks);
  pass_chunks_ = backend_.PassChunks(local_chunks / options_.accumulation);
  DENOISED_RETURN_IF_ERROR(CheckPasses(backend_, options_, exchange_.ranks()));
  const int64_t elements = parameters_.trained_elements();
  const auto flat = [&](const char* purpose) {
    return backend_.Allocate({elements}, DType::kF32, purpose);
  };
  DENOISED_ASSIGN_OR_RETURN(trained_, flat("the weights"));
  DENOISED_ASSIGN_OR_RETURN(m_, flat("the first moments"));
  DENOISED_ASSIGN_OR_RETURN(v_, flat("the second moments"));
  DENOISED_ASSIGN_OR_RETURN(
      fixed_, backend_.Allocate({std::max<int64_t>(16, parameters_.fixed_elements())}, DType::kF32,
                                "the fixed weights"));
  for (size_t i = 0; i < options_.averages.size(); ++i) {
    DENOISED_ASSIGN_OR_RETURN(Tensor average, flat("an average of the weights"));
    averages_.push_back(std::move(average));
  }
  tree_ = std::make_unique<Tree>(backend_, elements + kLossElements);
  DENOISED_ASSIGN_OR_RETURN(samples_,
                            NewSamples(backend_, config_, options_, dataset_, local_samples()));
  planned_ = samples_.Map([](const Tensor& like) {
    return like ? Tensor::Host(like.shape(), like.dtype()) : Tensor();
  });
  if (const Tensor& positions = planned_.positions) {
    for (int64_t i = 0; i < positions.elements(); ++i)
      positions.as<int32_t>()[i] = static_cast<int32_t>(i % positions.dim(1));
    backend_.Upload(positions.data(), positions.bytes(), samples_.positions);
  }
  passes_recording_ = backend_.NewRecording();
  update_recording_ = backend_.NewRecording();
  DENOISED_ASSIGN_OR_RETURN(step_tensor_, backend_.Allocate({1}, DType::kI32, "the step"));
  DENOISED_ASSIGN_OR_RETURN(squared_norm_, backend_.Allocate({1}, DType::kF32, "the norm"));
  DENOISED_ASSIGN_OR_RETURN(scalars_, backend_.Allocate({16}, DType::kF32, "the rates"));
  if (exchange_.ranks() > 1) {
    DENOISED_ASSIGN_OR_RETURN(received_, backend_.Allocate({elements + kLossElements}, DType::kF32,
                                                           "another rank's gradient"));
  }
  DENOISED_ASSIGN_OR_RETURN(const PassCount pass,
                            CountPass(config_, options_, dataset_, pass_rows(),
                                      backend_.activation_dtype(), backend_.device()));
  const int64_t passes = local_chunks / options_.accumulation / pass_chunks_;
  const auto workers = static_cast<int>(std::min<int64_t>(backend_.workers(), passes));
  for (int worker = 0; worker < workers; ++worker) {
    DENOISED_ASSIGN_OR_RETURN(
        Tensor block, backend_.Allocate({static_cast<int64_t>(pass.activation_bytes)}, DType::kU8,
                                        "activations of a pass"));
    free_arenas_.emplace_back(std::move(block));
  }
  DENOISED_RETURN_IF_ERROR(tree_->Reserve(GradientsAtOnce(local_chunks / pass_chunks_, workers)));
  // Last, since they may stay on the host if a GPU has no room for them.
  DENOISED_RETURN_IF_ERROR(AllocatePictures());

  const Tensor trained = Tensor::Host({elements}, DType::kF32),
               fixed = Tensor::Host(fixed_.shape(), DType::kF32);
  std::memset(fixed.data(), 0, fixed.bytes());  // it has elements even if no parameter is fixed
  parameters_.Initialize(options_.seed, trained, fixed);
  DENOISED_RETURN_IF_ERROR(UploadFlat(trained, trained_));
  DENOISED_RETURN_IF_ERROR(UploadFlat(fixed, fixed_));
  for (const Tensor& average : averages_) DENOISED_RETURN_IF_ERROR(UploadFlat(trained, average));
  Pack();  // the moments are zeros since Allocate()
  return backend_.status();
}

absl::Status Trainer::AllocatePictures() {
  const Tensor& all = PicturesOf(dataset_);
  if (!Prefetches(options_, dataset_)) {
    images_ = all;
    if (backend_.device() == denoised::Device::kCpu) return absl::OkStatus();
    const absl::StatusOr<Tensor> resident =
        backend_.Allocate(all.shape(), all.dtype(), "the pictures");
    // Ops allocate scratch memory in the first step.
    const bool fits =
        resident.ok() &&
        (dataset_.posteriors || backend_.Allocate({kScratchMargin}, DType::kU8, "a margin").ok());
    if (fits) {
      images_ = *resident;
      backend_.Upload(all.data(), all.bytes(), images_);
      return absl::OkStatus();
    }
    if (!resident.ok() && (dataset_.posteriors || !absl::IsResourceExhausted(resident.status())))
      return resident.status();
  }
  const int64_t bytes = static_cast<int64_t>(all.bytes()) / all.dim(0);
  DENOISED_ASSIGN_OR_RETURN(
      images_, backend_.Allocate({local_samples(), all.dim(1), all.dim(2), all.dim(3)}, DType::kU8,
                                 "the pictures of a step"));
  prefetcher_.emplace(options_.prefetch_threads > 0 ? options_.prefetch_threads : kPrefetchThreads,
                      local_samples(), bytes, [this](int64_t step, int64_t sample, uint8_t* to) {
                        PreparePicture(step, sample, to);
                      });
  return absl::OkStatus();
}

int64_t Trainer::PictureOf(int64_t step, int64_t local_sample) const {
  const int64_t pictures = dataset_.size();
  const int64_t sample = exchange_.rank() * local_samples() + local_sample;
  if (!cumulative_.empty())
    return DrawWeighted(options_.seed, static_cast<uint32_t>(step), static_cast<uint32_t>(sample),
                        cumulative_);
  const int64_t at = step * options_.batch + sample;
  return Permute(options_.seed, static_cast<uint32_t>(at / pictures), pictures, at % pictures);
}

/// Runs on a thread of the prefetcher.
void Trainer::PreparePicture(int64_t step, int64_t local_sample, uint8_t* to) const {
  const Tensor& all = dataset_.images;
  const int64_t bytes = static_cast<int64_t>(all.bytes()) / all.dim(0);
  const uint8_t* const from = all.as<uint8_t>() + PictureOf(step, local_sample) * bytes;
  if (options_.augment == 0) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  const auto sample = static_cast<uint32_t>(exchange_.rank() * local_samples() + local_sample);
  Augment(PlanAugmentation(options_.seed, static_cast<uint32_t>(step), sample, options_.augment,
                           all.dim(1), all.dim(2)),
          from, all.dim(1), all.dim(2), all.dim(3), to);
}

absl::Status Trainer::Restore(const TrainerState& state) {
  ahead_.reset();
  if (state.averages.size() != averages_.size())
    return FailedPrecondition("the state has {} averages, but the run {}", state.averages.size(),
                              averages_.size());
  DENOISED_RETURN_IF_ERROR(UploadFlat(state.trained, trained_));
  DENOISED_RETURN_IF_ERROR(UploadFlat(state.fixed, fixed_));
  DENOISED_RETURN_IF_ERROR(UploadFlat(state.m, m_));
  DENOISED_RETURN_IF_ERROR(UploadFlat(state.v, v_));
  for (size_t i = 0; i < averages_.size(); ++i)
    DENOISED_RETURN_IF_ERROR(UploadFlat(state.averages[i], averages_[i]));
  step_ = state.step;
  skipped_ = state.skipped;
  skipped_in_row_ = state.skipped_in_row;
  Pack();
  return backend_.status();
}

absl::Status Trainer::UploadFlat(const Tensor& from, const Tensor& to) const {
  if (from.elements() != to.elements())
    return FailedPrecondition("a state has {} elements where the network has {}", from.elements(),
                              to.elements());
  backend_.Upload(from.data(), from.bytes(), to);
  return absl::OkStatus();
}

absl::Status Trainer::LoadWeights(const std::string& prefix, const Weights& weights) {
  DENOISED_ASSIGN_OR_RETURN(TrainerState state, State());
  DENOISED_RETURN_IF_ERROR(parameters_.Load(weights, state.trained, state.fixed, prefix));
  for (Tensor& average : state.averages)
    average = Tensor::HostF32(state.trained.shape(), state.trained.span<float>());
  return Restore(state);
}

absl::StatusOr<TrainerState> Trainer::State() const {
  TrainerState state;
  state.step = step_;
  state.skipped = skipped_;
  state.skipped_in_row = skipped_in_row_;
  DENOISED_ASSIGN_OR_RETURN(state.trained, backend_.Download(trained_));
  DENOISED_ASSIGN_OR_RETURN(state.fixed, backend_.Download(fixed_));
  DENOISED_ASSIGN_OR_RETURN(state.m, backend_.Download(m_));
  DENOISED_ASSIGN_OR_RETURN(state.v, backend_.Download(v_));
  for (const Tensor& average : averages_) {
    DENOISED_ASSIGN_OR_RETURN(Tensor copy, backend_.Download(average));
    state.averages.push_back(std::move(copy));
  }
  return state;
}

/// Writes the sample's row of planned_.
void Trainer::PlanSample(int64_t local_sample) {
  SampleRow& row = reinterpret_cast<SampleRow*>(planned_.rows.as<int32_t>())[local_sample] = {};
  const auto step = static_cast<uint32_t>(step_);
  const int64_t picture = PictureOf(step_, local_sample);
  row.sample = static_cast<uint32_t>(exchange_.rank() * local_samples() + local_sample);
  row.image = prefetcher_ ? local_sample : picture;
  const auto below = [](uint32_t word, int64_t count) {
    return static_cast<int32_t>(uint64_t{word} * static_cast<uint64_t>(count) >> 32);
  };
  const bool captions = !dataset_.first_caption.empty();
  row.label = dataset_.labels.empty() ? -1 : dataset_.labels[picture];
  if (captions) {
    const int32_t first = dataset_.first_caption[picture],
                  count = dataset_.first_caption[picture + 1] - first;
    const Philox4 bits = Draw(options_.seed, Purpose::kCaption, step, row.sample, 0);
    row.label = first + below(bits.v[0], count);
  }
  if (options_.class_dropout > 0 &&
      UniformOf(Draw(options_.seed, Purpose::kClass, step, row.sample, 0).v[0]) <
          options_.class_dropout)
    row.label = captions ? dataset_.first_caption.back() : options_.null_class;
  const Philox4 bits = Draw(options_.seed, Purpose::kAugment, step, row.sample, 0);
  row.flip = options_.flip ? static_cast<int32_t>(bits.v[0] >> 31) : 0;
  if (dataset_.posteriors) {
    row.image += row.flip * dataset_.size();
    row.flip = 0;
  } else {
    const Shape sample = SampleShape(config_);
    row.top = below(bits.v[1], dataset_.images.dim(1) - sample[0] + 1);
    row.left = below(bits.v[2], dataset_.images.dim(2) - sample[1] + 1);
  }
  if (std::holds_alternative<AutoencoderConfig>(config_)) {
    row.noise = row.target_noise = 0;
    row.target_signal = 1;
  } else {
    objective_.Plan(options_.seed, step, row.sample, &row);
  }
  if (planned_.timesteps)
    planned_.timesteps.as<int32_t>()[local_sample] = static_cast<int32_t>(row.condition);
  if (planned_.vectors) {
    const int64_t size = planned_.vectors.dim(1);
    float* const to = planned_.vectors.as<float>() + local_sample * size;
    if (dataset_.vectors) {
      std::copy_n(dataset_.vectors.as<float>() + picture * size, size, to);
    } else {
      *to = static_cast<float>(row.label);
    }
  }
  if (planned_.augment)
    std::copy_n(PlanAugmentation(options_.seed, step, row.sample, options_.augment,
                                 dataset_.images.dim(1), dataset_.images.dim(2))
                    .labels,
                kAugmentLabels, planned_.augment.as<float>() + local_sample * kAugmentLabels);
  if (planned_.tokens) {
    const int64_t width = planned_.tokens.dim(1);
    std::copy_n(dataset_.tokens.as<int32_t>() + row.label * width, width,
                planned_.tokens.as<int32_t>() + local_sample * width);
  }
}

void Trainer::UploadSamples() {
  for (int64_t i = 0; i < local_samples(); ++i) PlanSample(i);
  for (const auto& [from, to] : {std::pair{&planned_.rows, &samples_.rows},
                                 std::pair{&planned_.timesteps, &samples_.timesteps},
                                 std::pair{&planned_.vectors, &samples_.vectors},
                                 std::pair{&planned_.augment, &samples_.augment},
                                 std::pair{&planned_.tokens, &samples_.tokens}})
    if (*to) backend_.Upload(from->data(), from->bytes(), *to);
  if (prefetcher_) backend_.Upload(prefetcher_->Take(step_), images_.bytes(), images_);
}

void Trainer::RunPass(int64_t pass_index, Arena& arena, const Tensor& gradient) const {
  const Samples samples = samples_.Map([&](const Tensor& of) {
    return of ? of.Slice(pass_index * pass_rows(), pass_rows()) : Tensor();
  });
  Pass pass{.backend = backend_,
            .arena = arena,
            .parameters = parameters_,
            .trained = trained_,
            .fixed = fixed_,
            .gradient = gradient,
            .rows = samples.rows,
            .step = step_tensor_,
            .seed = options_.seed,
            .dropout = static_cast<float>(options_.dropout),
            .recompute_norms = RecomputesNorms(options_, parameters_)};
  task_->Run(pass, {.images = images_,
                    .samples = samples,
                    .scale = 1.0f / static_cast<float>(options_.batch),
                    .variance_weight = static_cast<float>(objective_.VarianceWeight()),
                    .loss = gradient.Slice(parameters_.trained_elements(), 1)});
}

absl::Status Trainer::RunPasses() {
  if (sum_) tree_->Free(std::move(sum_));
  sum_ = {};
  const int64_t passes = options_.chunks / exchange_.ranks() / pass_chunks_;
  const int64_t micro = passes / options_.accumulation;
  tree_->Begin(passes);
  Mutex mutex;
  absl::Status failure;
  for (int64_t begin = 0; begin < passes; begin += micro) {
    backend_.ForEachPass(micro, [&](int64_t pass, int) {
      absl::StatusOr<Tensor> gradient = tree_->Take();
      if (!gradient.ok()) {
        MutexLock lock(&mutex);
        failure.Update(gradient.status());
        return;
      }
      std::optional<Arena> arena;
      {
        MutexLock lock(&mutex);
        arena = std::move(free_arenas_.back());
        free_arenas_.pop_back();
      }
      RunPass(begin + pass, *arena, *gradient);
      {
        MutexLock lock(&mutex);
        free_arenas_.push_back(*std::move(arena));
      }
      tree_->Add(begin + pass, *std::move(gradient));
    });
    DENOISED_RETURN_IF_ERROR(failure);
  }
  sum_ = tree_->TakeRoot();
  return absl::OkStatus();
}

absl::Status Trainer::AddOtherRanks() {
  for (int width = 1; width < exchange_.ranks(); width *= 2) {
    const int partner = exchange_.rank() ^ width;
    if (exchange_.device() == backend_.device()) {
      DENOISED_RETURN_IF_ERROR(exchange_.Swap(sum_, received_, partner));
    } else {
      DENOISED_ASSIGN_OR_RETURN(const Tensor mine, backend_.Download(sum_));
      const Tensor theirs = Tensor::Host(mine.shape(), DType::kF32);
      DENOISED_RETURN_IF_ERROR(exchange_.Swap(mine, theirs, partner));
      backend_.Upload(theirs.data(), theirs.bytes(), received_);
    }
    backend_.Accumulate(sum_, received_);
  }
  return absl::OkStatus();
}

void Trainer::Pack() {
  backend_.PackTogether([&] { task_->Pack({backend_, parameters_, trained_, fixed_}); });
}

void Trainer::Update() {
  const Tensor gradient = sum_.Slice(0, parameters_.trained_elements());
  backend_.SquaredNorm(gradient, squared_norm_);
  backend_.Update({.master = trained_,
                   .gradient = gradient,
                   .m = m_,
                   .v = v_,
                   .averages = averages_,
                   .squared_norm = squared_norm_,
                   .scalars = scalars_,
                   .beta1 = options_.beta1,
                   .beta2 = options_.beta2,
                   .eps = static_cast<float>(options_.eps),
                   .weight_decay = static_cast<float>(options_.weight_decay),
                   .clip = static_cast<float>(options_.clip)});
  Pack();
}

absl::Status Trainer::EnqueuePasses() {
  UploadSamples();
  const auto step_number = static_cast<int32_t>(step_);
  backend_.Upload(&step_number, sizeof step_number, step_tensor_);
  absl::Status passed;
  backend_.Run(passes_recording_.get(), [&] { passed = RunPasses(); });
  ++passes_enqueued_;
  if (passed.ok() && !sum_) return backend_.status();  // an earlier error: nothing was run
  return passed;
}

absl::StatusOr<StepReport> Trainer::Step(bool wants_stop) {
  const absl::Status enqueued = ahead_ ? *std::exchange(ahead_, std::nullopt) : EnqueuePasses();
  DENOISED_RETURN_IF_ERROR(enqueued);
  DENOISED_CHECK(sum_.defined());
  // A rank whose passes failed exchanges nothing, and the time that passes take is not one in which
  // a partner has exchanged nothing.
  if (exchange_.ranks() > 1) DENOISED_RETURN_IF_ERROR(backend_.status());
  const int64_t elements = parameters_.trained_elements();
  const float stops = wants_stop ? 1 : 0;
  backend_.Upload(&stops, sizeof stops, sum_.Slice(elements + 1, 1));
  DENOISED_RETURN_IF_ERROR(AddOtherRanks());
  if (gradient_factor_ != 1) {
    const Tensor part = parameters_.Part(sum_, parameters_.first_trained());
    backend_.Add(part, gradient_factor_, Tensor(), 0, 0, part);
    gradient_factor_ = 1;
  }

  StepReport report;
  report.step = step_ + 1;
  report.rate = options_.rate.At(step_, options_.steps);
  UpdateScalars scalars;
  scalars.rate = static_cast<float>(report.rate);
  // Adam and the averages count updates: a skipped step leaves them as they are.
  const int64_t update = report.step - skipped_;
  const auto t = static_cast<double>(update);
  scalars.correction1 = static_cast<float>(1 - std::pow(options_.beta1, t));
  scalars.correction2 = static_cast<float>(1 - std::pow(options_.beta2, t));
  for (size_t i = 0; i < averages_.size(); ++i)
    scalars.average_share[i] = static_cast<float>(1 - options_.averages[i].DecayAt(update));
  backend_.Upload(&scalars, sizeof scalars, scalars_);
  backend_.Run(update_recording_.get(), [&] { Update(); });

  const auto download_squared = backend_.BeginDownload(squared_norm_);
  const auto download_loss = backend_.BeginDownload(sum_.Slice(elements, 2));
  ++step_;
  // A GPU goes on with the next passes while the host waits for this step's report and reads it.
  // The first passes prepare their kernels and the second measure them: this step's report would
  // have to wait for that.
  constexpr int64_t kSlowPasses = 2;
  if (backend_.device() != denoised::Device::kCpu && passes_enqueued_ >= kSlowPasses &&
      step_ < options_.steps) {
    ahead_ = EnqueuePasses();
  }
  DENOISED_ASSIGN_OR_RETURN(const Tensor squared, download_squared->Wait());
  DENOISED_ASSIGN_OR_RETURN(const Tensor loss, download_loss->Wait());
  report.loss = loss.as<float>()[0];
  report.stop = loss.as<float>()[1] != 0;
  report.gradient_norm = std::sqrt(static_cast<double>(squared.as<float>()[0]));
  report.skipped = !std::isfinite(squared.as<float>()[0]);
  skipped_ += report.skipped;
  skipped_in_row_ = report.skipped ? skipped_in_row_ + 1 : 0;
  return report;
}

}  // namespace denoised::training
