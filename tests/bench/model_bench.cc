// SPDX-License-Identifier: Apache-2.0
// One evaluation of a UNet, sampler step included, or the decoding of images, by rows: milliseconds
// and FLOP/s.
//
//   denoised-bench [--device=cpu|cuda] [--fp32] [--generic] [--autotune=off|DIRECTORY]
//                  [--precision=fp8] --config=DIR/config.json --rows=1,16,64 [--edge=N]
//                  [--weights=FILE.safetensors] [--beside=DIR/config.json] [--guided] [--turns]
//                  [Google Benchmark's flags, e.g. --benchmark_out=FILE]
//
// The config is that of a UNet2DModel, of a UNet2DConditionModel, whose rows have a prompt of their
// own each, or of a codec (AutoencoderKL, AutoencoderTiny, VQModel), which decodes. --edge is the
// height and width of the state or the latents; default: the config's.
//
// Weights are synthetic: outputs of layers have unit size. Times are the device's own, between
// markers around each evaluation, with the host one ahead, and the figure is their median; FLOPs
// are counted by the dry run that plans memory. MiB_device is what the model, its activations,
// images and graph took of the device; s_first the seconds of the first evaluation, with what was
// measured to choose kernels and the capture; ms_forward the time of the model alone, measured in
// turns with the evaluation. Kernels are chosen as by the server; --autotune=DIRECTORY keeps what
// was measured there.
//
// --weights takes them from a file, as synthetic-model writes one, and tells how fast they were on
// the device in the form of its kernels: from the page cache, if the file was touched just before.
//
// --precision=fp8 has every layer of a UNet that may be in e4m3 multiply in it, with input scales
// for inputs of unit size.
//
// --guided gives each image two rows, as classifier-free guidance does: 32 rows are 16 images.
//
// --turns measures when its standard input says so (turns.h); a NAME is "rows:16".
//
// --beside runs a second model, or a codec, at the same time, in a queue of its own: milliseconds
// of an evaluation of each, alone and together, by the host's clock; `shares` is how much of its
// speed alone each keeps, summed up: 1 is what taking turns would give.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "engine/backend/counting.h"
#include "engine/batching/evaluator.h"
#include "engine/core/config_reader.h"
#include "engine/core/precision.h"
#include "engine/models/registry.h"
#include "engine/sampling/sampler.h"
#include "tests/bench/device_timing.h"
#include "tests/bench/turns.h"

namespace denoised {
namespace {

struct Options {
  BackendOptions backend = {.autotune = true};
  std::string config, weights, beside;
  std::vector<int> rows;
  int edge = 0;  // 0: the config's
  bool guided = false, turns = false;
  Precision precision = Precision::kDefault;
};

absl::Status ParseFlags(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&](const char* name) -> const char* {
      const size_t length = std::strlen(name);
      return flag.compare(0, length, name) == 0 ? argv[i] + length : nullptr;
    };
    if (const char* device = value("--device=")) {
      options->backend.device = device;
    } else if (flag == "--fp32") {
      options->backend.fp32 = true;
    } else if (flag == "--generic") {
      options->backend.generic_kernels = true;
    } else if (flag == "--precision=fp8") {
      options->precision = Precision::kFp8;
    } else if (flag == "--guided") {
      options->guided = true;
    } else if (flag == "--turns") {
      options->turns = true;
    } else if (flag == "--autotune=off") {
      options->backend.autotune = false;
    } else if (const char* directory = value("--autotune=")) {
      options->backend.autotune_cache = directory;
    } else if (const char* config = value("--config=")) {
      options->config = config;
    } else if (const char* weights = value("--weights=")) {
      options->weights = weights;
    } else if (const char* beside = value("--beside=")) {
      options->beside = beside;
    } else if (const char* edge = value("--edge=")) {
      options->edge = static_cast<int>(std::strtol(edge, nullptr, 10));
      if (options->edge < 1) return InvalidArgument("{}: an edge is a number ≥ 1", flag);
    } else if (const char* rows = value("--rows=")) {
      for (char* at = const_cast<char*>(rows); *at;) {
        options->rows.push_back(static_cast<int>(std::strtol(at, &at, 10)));
        if (options->rows.back() < 1) return InvalidArgument("{}: rows are numbers ≥ 1", flag);
        if (*at == ',') ++at;
      }
    } else {
      return InvalidArgument("unknown flag '{}'; see the head of tests/bench/model_bench.cc", flag);
    }
  }
  if (options->config.empty()) return InvalidArgument("--config=FILE is missing");
  if (options->rows.empty())
    options->rows = options->guided ? std::vector{2, 32} : std::vector{1, 16};
  if (options->turns && !options->beside.empty())
    return InvalidArgument("--turns and --beside cannot be combined");
  for (const int rows : options->rows)
    if (options->guided && rows % 2 != 0)
      return InvalidArgument("--guided needs an even number of rows; {} is odd", rows);
  return absl::OkStatus();
}

using Clock = std::chrono::steady_clock;

constexpr Samples kSamples = {.least = 9, .most = 99, .longest_seconds = 2};
constexpr Samples kTurn = {.least = 9, .most = 99, .longest_seconds = 1};
constexpr int kLongestPlan = 1000;
constexpr float kGuidanceScale = 1.25F;

/// A model with a queue of its own on the device: a denoiser or a codec.
struct Resident {
  std::unique_ptr<Backend> backend;
  size_t free_before = 0;  // bytes of the device
  std::shared_ptr<const Denoiser> model;
  std::shared_ptr<const Codec> codec;
  int height = 0, width = 0;  // of the state or the latents
};

/// Of a prompt of CLIP.
constexpr int kPromptTokens = 77;

/// A UNet or a codec, by its class.
absl::Status LoadPart(Backend& backend, const std::string& file, const Weights& weights,
                      Resident* resident) {
  DENOISED_ASSIGN_OR_RETURN(const auto json, ReadJsonFile(file));
  const ModelDirectory::Component part = {
      .class_name = json.value("_class_name", "UNet2DModel"), .config_file = file, .config = json};
  ModelDirectory directory;
  directory.components = {{"unet", part}, {"vae", part}};
  if (const auto codec = FindCodec(directory, "vae"); codec.ok()) {
    DENOISED_ASSIGN_OR_RETURN(resident->codec, (*codec)->load(backend, part, weights));
    return absl::OkStatus();
  }
  const auto number = [&](const char* field) {  // absent or null where there is none
    return json.contains(field) && json[field].is_number() ? json[field].get<int>() : 0;
  };
  // The text encoders are those that fit.
  const TextStates text = {.features = number("cross_attention_dim"),
                           .pooled_features = number("projection_class_embeddings_input_dim") -
                                              6 * number("addition_time_embed_dim")};
  DENOISED_ASSIGN_OR_RETURN(const DenoiserClass* const denoiser, FindDenoiser(directory));
  DENOISED_ASSIGN_OR_RETURN(resident->model, denoiser->load(backend, part, text, weights));
  return absl::OkStatus();
}

/// The names of the layers that may be in e4m3.
class LayerNames final : public CountingBackend {
 public:
  using CountingBackend::CountingBackend;
  absl::StatusOr<std::unique_ptr<PackedConv2d>> PackConv2d(const Tensor& weight, const Tensor& bias,
                                                           bool upsample2x,
                                                           const E4m3Layer& e4m3) override {
    names_.insert(e4m3.name);
    return CountingBackend::PackConv2d(weight, bias, upsample2x, e4m3);
  }
  absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(const std::vector<Tensor>& weights,
                                                           const std::vector<Tensor>& biases,
                                                           const E4m3Layer& e4m3,
                                                           bool gated) override {
    names_.insert(e4m3.name);
    return CountingBackend::PackLinear(weights, biases, e4m3, gated);
  }
  const std::set<std::string>& names() const { return names_; }

 private:
  std::set<std::string> names_;
};

/// Scales for inputs of unit size, which seldom exceed seven.
absl::StatusOr<std::map<std::string, float>> InputScales(const Backend& backend,
                                                         const std::string& file) {
  constexpr float kScale = 0x1p-6F;
  LayerNames layers(backend);
  const Weights weights = Weights::SyntheticToWrite(1);
  weights.SetInputScales(std::nullopt);
  Resident nothing;
  DENOISED_RETURN_IF_ERROR(LoadPart(layers, file, weights, &nothing));
  std::map<std::string, float> scales;
  for (const std::string& name : layers.names())
    if (!name.empty()) scales[name] = kScale;
  return scales;
}

absl::StatusOr<Resident> Load(const Options& options, const std::string& file,
                              const std::string& weights_file) {
  Resident resident;
  DENOISED_ASSIGN_OR_RETURN(resident.backend, OpenBackend(options.backend));
  resident.free_before = resident.backend->memory().free;
  const Clock::time_point begin = Clock::now();
  Weights weights = Weights::Synthetic(1);
  if (!weights_file.empty()) {
    DENOISED_ASSIGN_OR_RETURN(Safetensors tensors, Safetensors::Open(weights_file));
    weights = Weights(std::move(tensors), weights_file);
  }
  if (options.precision == Precision::kFp8) {
    if (!resident.backend->MultipliesE4m3())
      return FailedPrecondition("{} does not multiply in fp8", resident.backend->description());
    DENOISED_ASSIGN_OR_RETURN(auto scales, InputScales(*resident.backend, file));
    weights.SetInputScales(std::move(scales));
  }
  DENOISED_RETURN_IF_ERROR(LoadPart(*resident.backend, file, weights, &resident));
  DENOISED_RETURN_IF_ERROR(resident.backend->Synchronize());
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  if (!weights_file.empty()) {
    const auto bytes = static_cast<double>(std::filesystem::file_size(weights_file));
    benchmark::AddCustomContext("weights_bytes", fmt::format("{:.0f}", bytes));
    benchmark::AddCustomContext("weights_seconds", fmt::format("{:.4f}", seconds));
  }
  resident.height = resident.width = options.edge;
  if (options.edge == 0 && resident.model) {
    resident.height = resident.model->traits().height;
    resident.width = resident.model->traits().width;
  } else if (options.edge == 0) {
    return InvalidArgument("{} is a codec's: give --edge, the edge of its latents", file);
  }
  return resident;
}

/// A tensor on the device of normally distributed numbers; zeros where they are integers.
absl::StatusOr<Tensor> RandomInput(Backend& backend, const Shape& shape, DType dtype) {
  DENOISED_ASSIGN_OR_RETURN(const Tensor input,
                            backend.Allocate(shape, dtype, "a benchmark's input"));
  std::mt19937 bits{7};
  std::normal_distribution<float> normal;
  const Tensor host = Tensor::Host(shape, dtype);
  for (int64_t i = 0; i < shape.elements(); ++i) {
    if (dtype == DType::kI32) host.as<int32_t>()[i] = 0;
    if (dtype == DType::kF32) host.as<float>()[i] = normal(bits);
    if (dtype == DType::kBF16) host.as<uint16_t>()[i] = FloatToBFloat16(normal(bits));
  }
  backend.Upload(host.data(), host.bytes(), input);
  return input;
}

/// A condition set for each row; undefined tensors for a model that reads no text.
absl::StatusOr<ConditionSets> RandomSets(Backend& backend, const DenoiserTraits& traits, int rows) {
  ConditionSets sets;
  if (traits.text_features == 0) return sets;
  const DType dtype = backend.activation_dtype();
  DENOISED_ASSIGN_OR_RETURN(
      sets.keys_values,
      RandomInput(backend, {rows, kPromptTokens, traits.key_value_columns}, dtype));
  DENOISED_ASSIGN_OR_RETURN(sets.key_counts,
                            backend.Allocate({rows}, DType::kI32, "a benchmark's input"));
  const std::vector<int32_t> counts(rows, kPromptTokens);
  backend.Upload(counts.data(), counts.size() * sizeof(int32_t), sets.key_counts);
  if (traits.vector_features > 0) {
    DENOISED_ASSIGN_OR_RETURN(sets.vectors,
                              RandomInput(backend, {rows, traits.vector_features}, dtype));
  }
  if (traits.time_features > 0) {
    DENOISED_ASSIGN_OR_RETURN(sets.times,
                              RandomInput(backend, {rows, traits.time_features}, dtype));
  }
  return sets;
}

/// A model on a device, and `rows` images of it that are drawn over and over.
class Drawing {
 public:
  static absl::StatusOr<std::unique_ptr<Drawing>> Create(const Resident& resident, int rows,
                                                         bool guided) {
    auto drawing = std::make_unique<Drawing>();
    Backend& backend = *resident.backend;
    DENOISED_ASSIGN_OR_RETURN(const ConditionSets sets,
                              RandomSets(backend, resident.model->traits(), rows));
    DENOISED_ASSIGN_OR_RETURN(drawing->evaluator_,
                              Evaluator::Create(backend, resident.model,
                                                {.height = resident.height,
                                                 .width = resident.width,
                                                 .max_rows = rows,
                                                 .slots = rows,
                                                 .max_evaluations = kLongestPlan,
                                                 .sets = sets}));
    DENOISED_ASSIGN_OR_RETURN(
        const SchedulerConfig scheduler,
        SchedulerConfig::Parse(nlohmann::json{{"_class_name", "DDIMScheduler"}}, "scheduler"));
    DENOISED_ASSIGN_OR_RETURN(const StepPlan plan, scheduler.Compile({.steps = kLongestPlan}));
    drawing->plan_ = ToDevice(plan);
    for (int row = 0; row < rows; ++row) {
      const bool unconditional = guided && row % 2 != 0;
      drawing->table_.push_back({.slot = guided ? row / 2 : row,
                                 .label = sets.keys_values ? row : 0,
                                 .unconditional_row = guided && !unconditional ? row + 1 : -1,
                                 .advances = unconditional ? 0 : 1});
    }
    if (guided) drawing->guidance_scale_ = kGuidanceScale;
    DENOISED_RETURN_IF_ERROR(backend.Synchronize());
    const Clock::time_point before_first = Clock::now();
    for (int warm = 0; warm < 3; ++warm) {
      DENOISED_RETURN_IF_ERROR(drawing->Evaluate());
      DENOISED_RETURN_IF_ERROR(backend.Synchronize());
      if (warm == 0) {
        drawing->first_seconds_ =
            std::chrono::duration<double>(Clock::now() - before_first).count();
      }
    }
    return drawing;
  }

  absl::Status Evaluate() {
    if (done_ == kLongestPlan) done_ = 0;
    if (done_++ == 0) {
      for (const EvaluationRow& row : table_)
        evaluator_->Begin(row.slot, {.plan = &plan_,
                                     .seed = static_cast<uint64_t>(row.slot),
                                     .guidance = {.scale = guidance_scale_}});
    }
    CapturedRun::Ran ran;
    return evaluator_->Evaluate(table_, &ran).status();
  }

  const Evaluator& evaluator() const { return *evaluator_; }
  double first_seconds() const { return first_seconds_; }

 private:
  std::unique_ptr<Evaluator> evaluator_;
  std::vector<DeviceEvaluation> plan_;
  std::vector<EvaluationRow> table_;
  float guidance_scale_ = 1;
  int done_ = 0;
  double first_seconds_ = 0;
};

/// A graph of the model alone, with nothing around it that gathers, samples or scatters: a
/// denoiser's prediction, or a codec's image.
class Forward {
 public:
  static absl::StatusOr<std::unique_ptr<Forward>> Create(const Resident& resident, int rows) {
    auto forward = std::make_unique<Forward>();
    forward->resident_ = &resident;
    Backend& backend = *resident.backend;
    DenoiserInput& input = forward->input_;
    const int channels = resident.codec ? resident.codec->traits().latent_channels
                                        : resident.model->traits().channels;
    const DType dtype = resident.codec ? DType::kF32 : backend.activation_dtype();
    DENOISED_ASSIGN_OR_RETURN(
        input.x, RandomInput(backend, {rows, resident.height, resident.width, channels}, dtype));
    if (resident.model) {
      const DenoiserTraits& traits = resident.model->traits();
      DENOISED_ASSIGN_OR_RETURN(input.condition, RandomInput(backend, {rows}, DType::kF32));
      if (traits.condition == ClassCondition::kLabel || traits.text_features > 0) {
        DENOISED_ASSIGN_OR_RETURN(input.label, RandomInput(backend, {rows}, DType::kI32));
      }
      if (traits.class_vector_size > 0) {
        DENOISED_ASSIGN_OR_RETURN(
            input.embedding, RandomInput(backend, {rows, traits.class_vector_size}, DType::kF32));
      }
      DENOISED_ASSIGN_OR_RETURN(input.sets, RandomSets(backend, traits, rows));
    }
    CountingBackend counting(backend);
    Arena measuring = Arena::Measuring(backend.device());
    forward->Run(counting, measuring);
    forward->flop_ = counting.work().flops;
    DENOISED_ASSIGN_OR_RETURN(Tensor block,
                              backend.Allocate({static_cast<int64_t>(measuring.peak())}, DType::kU8,
                                               "a benchmark's activations"));
    forward->arena_.emplace(std::move(block));
    DENOISED_ASSIGN_OR_RETURN(forward->graph_, backend.Capture([&backend, forward = forward.get()] {
      forward->Run(backend, *forward->arena_);
    }));
    return forward;
  }

  Graph& graph() { return *graph_; }
  double flop() const { return flop_; }
  size_t activation_bytes() const { return static_cast<size_t>(arena_->peak()); }

 private:
  void Run(Backend& backend, Arena& arena) const {
    nn::Context context{backend, arena};
    if (resident_->codec) {
      resident_->codec->Decode(context, input_.x);
    } else {
      resident_->model->Forward(context, input_);
    }
  }

  const Resident* resident_ = nullptr;
  DenoiserInput input_;
  std::optional<Arena> arena_;
  std::unique_ptr<Graph> graph_;
  double flop_ = 0;
};

/// A model at a number of rows, ready to be measured any number of times.
class Measurement {
 public:
  static absl::StatusOr<std::unique_ptr<Measurement>> Create(const Resident& resident, int rows,
                                                             bool guided) {
    auto measurement = std::make_unique<Measurement>();
    Backend& backend = *resident.backend;
    measurement->backend_ = &backend;
    const Clock::time_point begin = Clock::now();
    if (resident.model) {
      DENOISED_ASSIGN_OR_RETURN(measurement->drawing_, Drawing::Create(resident, rows, guided));
      measurement->counters_["s_first"] = measurement->drawing_->first_seconds();
      if (backend.device() == Device::kCuda) {
        measurement->counters_["MiB_device"] = (static_cast<double>(resident.free_before) -
                                                static_cast<double>(backend.memory().free)) /
                                               (1 << 20);
      }
    }
    DENOISED_ASSIGN_OR_RETURN(measurement->forward_, Forward::Create(resident, rows));
    if (!resident.model) {
      backend.Launch(measurement->forward_->graph());
      DENOISED_RETURN_IF_ERROR(backend.Synchronize());
      measurement->counters_["s_first"] =
          std::chrono::duration<double>(Clock::now() - begin).count();
    }
    measurement->counters_["MiB_activations"] =
        static_cast<double>(measurement->forward_->activation_bytes()) / (1 << 20);
    return measurement;
  }

  /// Median seconds of an evaluation and of the model alone, in turns; of a codec, which has no
  /// evaluation, twice the same.
  absl::StatusOr<std::vector<double>> Seconds(const Samples& samples) {
    std::vector<std::function<absl::Status()>> works = {[&] { return RunModel(); }};
    if (drawing_) works.insert(works.begin(), [&] { return drawing_->Evaluate(); });
    DENOISED_ASSIGN_OR_RETURN(std::vector<double> seconds,
                              MedianDeviceSeconds(*backend_, works, samples));
    if (seconds.size() == 1) seconds.push_back(seconds[0]);
    return seconds;
  }
  /// An evaluation; of a codec, what it makes of its rows.
  absl::Status Run() { return drawing_ ? drawing_->Evaluate() : RunModel(); }
  Backend& backend() { return *backend_; }
  double flop() const { return forward_->flop(); }
  const std::map<std::string, double>& counters() const { return counters_; }

 private:
  absl::Status RunModel() {
    backend_->Launch(forward_->graph());
    return backend_->status();
  }

  Backend* backend_ = nullptr;
  std::unique_ptr<Drawing> drawing_;  // null for a codec
  std::unique_ptr<Forward> forward_;
  std::map<std::string, double> counters_;
};

absl::Status Measure(const Resident& resident, int rows, bool guided, benchmark::State& state) {
  DENOISED_ASSIGN_OR_RETURN(const auto measurement, Measurement::Create(resident, rows, guided));
  for (auto _ : state) {
    DENOISED_ASSIGN_OR_RETURN(const std::vector<double> seconds, measurement->Seconds(kSamples));
    state.SetIterationTime(seconds[0]);
    state.counters["ms_forward"] = 1e3 * seconds[1];
  }
  state.counters["FLOP/s"] =
      benchmark::Counter(measurement->flop(), benchmark::Counter::kIsIterationInvariantRate);
  for (const auto& [name, value] : measurement->counters()) state.counters[name] = value;
  state.SetItemsProcessed(state.iterations() * rows);
  return absl::OkStatus();
}

/// Measures when standard input says so; see turns.h.
void TakeTurns(const Resident& resident, bool guided) {
  std::map<std::string, std::unique_ptr<Measurement>> measurements;
  const auto prepared = [&](const std::string& name) -> absl::StatusOr<Measurement*> {
    std::unique_ptr<Measurement>& measurement = measurements[name];
    if (measurement) return measurement.get();
    int rows = 0;
    if (std::sscanf(name.c_str(), "rows:%d", &rows) != 1 || rows < 1 || (guided && rows % 2 != 0))
      return InvalidArgument("'{}' is not rows:N", name);
    DENOISED_ASSIGN_OR_RETURN(measurement, Measurement::Create(resident, rows, guided));
    return measurement.get();
  };
  const auto answer = [&](const Request& request) -> absl::StatusOr<nlohmann::json> {
    DENOISED_ASSIGN_OR_RETURN(Measurement * measurement, prepared(request.name));
    if (request.verb == "prepare") {
      nlohmann::json made = measurement->counters();
      made["flop"] = measurement->flop();
      return made;
    }
    if (request.verb != "measure") return InvalidArgument("unknown request '{}'", request.verb);
    DENOISED_ASSIGN_OR_RETURN(const std::vector<double> seconds, measurement->Seconds(kTurn));
    return nlohmann::json{{"ms", 1e3 * seconds[0]}, {"ms_forward", 1e3 * seconds[1]}};
  };
  Answer(nlohmann::json{{"ready", {{"device", resident.backend->description()}}}});
  for (Request request; ReadRequest(&request);) Answer(answer(request));
}

/// How many runs the device makes within the time, the host one ahead as in the engine.
absl::StatusOr<int> CountRuns(Measurement& measurement, double seconds) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::unique_ptr<Marker> last;
  int count = 0;
  for (; Clock::now() < end; ++count) {
    DENOISED_RETURN_IF_ERROR(measurement.Run());
    auto marker = measurement.backend().Mark();
    if (last) DENOISED_RETURN_IF_ERROR(last->Wait());
    last = std::move(marker);
  }
  return count;
}

/// Two models at a time, each in a queue of its own: the sum of what they get of the device, as
/// shares of what each has alone. 1 is what taking turns gives.
absl::Status MeasureBeside(const Resident& one, const Resident& other, int rows,
                           benchmark::State& state) {
  constexpr double kSeconds = 1;
  const std::array<const Resident*, 2> residents = {&one, &other};
  std::array<std::unique_ptr<Measurement>, 2> measurements;
  std::array<double, 2> alone;
  std::array<absl::StatusOr<int>, 2> counts;
  for (size_t i = 0; i < 2; ++i) {
    DENOISED_ASSIGN_OR_RETURN(measurements[i], Measurement::Create(*residents[i], rows, false));
    DENOISED_ASSIGN_OR_RETURN(const int count, CountRuns(*measurements[i], kSeconds));
    alone[i] = kSeconds / count;
  }
  for (auto _ : state) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 2; ++i)
      threads.emplace_back([&, i] { counts[i] = CountRuns(*measurements[i], kSeconds); });
    for (std::thread& thread : threads) thread.join();
    double sum = 0;
    for (size_t i = 0; i < 2; ++i) {
      DENOISED_RETURN_IF_ERROR(counts[i].status());
      sum += alone[i] * *counts[i] / kSeconds;
      state.counters[i == 0 ? "ms_alone" : "ms_other_alone"] = 1e3 * alone[i];
    }
    state.SetIterationTime(kSeconds / *counts[0]);
    state.counters["ms_other"] = 1e3 * kSeconds / *counts[1];
    state.counters["shares"] = sum;
  }
  return absl::OkStatus();
}

absl::Status Run(const Options& options) {
  DENOISED_ASSIGN_OR_RETURN(const Resident resident,
                            Load(options, options.config, options.weights));
  if (options.turns) {
    TakeTurns(resident, options.guided);
    return absl::OkStatus();
  }
  benchmark::AddCustomContext("device", resident.backend->description());
  Resident other;
  if (!options.beside.empty()) {
    DENOISED_ASSIGN_OR_RETURN(other, Load(options, options.beside, ""));
  }
  for (const int rows : options.rows) {
    const std::string name = fmt::format("{}{}{}/rows:{}", options.config,
                                         options.beside.empty() ? "" : "+", options.beside, rows);
    benchmark::RegisterBenchmark(name.c_str(),
                                 [&, rows](benchmark::State& state) {
                                   const absl::Status status =
                                       options.beside.empty()
                                           ? Measure(resident, rows, options.guided, state)
                                           : MeasureBeside(resident, other, rows, state);
                                   if (!status.ok())
                                     state.SkipWithError(std::string(status.message()).c_str());
                                 })
        ->Iterations(1)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
  benchmark::RunSpecifiedBenchmarks();
  return absl::OkStatus();
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  denoised::Options options;
  absl::Status status = denoised::ParseFlags(argc, argv, &options);
  if (status.ok()) status = denoised::Run(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}
