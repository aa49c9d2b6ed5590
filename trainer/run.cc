// SPDX-License-Identifier: Apache-2.0
#include "trainer/run.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "engine/engine.h"
#include "engine/sampling/sampler.h"
#include "engine/training/latents.h"
#include "engine/training/peak.h"
#include "flags/printable.h"
#include "trainer/checkpoint.h"
#include "trainer/data/archive.h"
#include "trainer/data/pictures.h"
#include "trainer/differences.h"
#include "trainer/event_file.h"
#include "trainer/metrics.h"
#include "trainer/ranks.h"
#include "trainer/samples.h"
#include "trainer/version.h"

namespace denoised::trainer {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using training::StepReport;
using training::Trainer;
using training::TrainerState;

double Since(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}

std::string Duration(double seconds) {
  if (!(seconds < 1e9)) return "?";
  const auto s = static_cast<int64_t>(seconds);
  if (s >= 3600) return fmt::format("{}h{:02}m", s / 3600, s / 60 % 60);
  if (s >= 60) return fmt::format("{}m{:02}s", s / 60, s % 60);
  return fmt::format("{}s", s);
}

/// Pictures by which stage vae measures latents.
constexpr int64_t kMeasuredPictures = 256;
/// Steps of a GPU that --dry-run measures.
constexpr int kDryRunSteps = 20;

absl::Status CheckSame(const nlohmann::json& saved, const nlohmann::json& now) {
  if (!saved.is_object())
    return InvalidArgument(
        "--resume: the checkpoint's run.json has no settings; resume from another checkpoint");
  const std::string differences = Differences(AsFlags(saved), AsFlags(now), "{} was {} and is {}");
  if (differences.empty()) return absl::OkStatus();
  return InvalidArgument(
      "--resume: the checkpoint is of another run: {}. Give the same settings, or start anew in "
      "another --output",
      differences);
}

/// Extends a CRC-32 by these bytes; start with 0.
uLong Checksum(uLong checksum, const void* data, size_t bytes) {
  // zlib takes a null pointer, as an empty vector may have, for a new beginning.
  return bytes == 0 ? checksum : crc32_z(checksum, static_cast<const Bytef*>(data), bytes);
}
uLong Checksum(uLong checksum, const Tensor& tensor) {
  return tensor ? Checksum(checksum, tensor.data(), tensor.bytes()) : checksum;
}
template <typename T>
uLong Checksum(uLong checksum, const std::vector<T>& values) {
  return Checksum(checksum, values.data(), values.size() * sizeof(T));
}

class Session {
 public:
  Session(const RunConfig& config, const std::atomic<bool>& stop)
      : config_(config), stop_(stop), folder_(config.output), fingerprint_(config.Fingerprint()) {}
  ~Session() {
    for (const int fd : {lock_, opened_})
      if (fd >= 0) close(fd);
  }
  absl::Status Run();

 private:
  template <typename... Args>
  void Say(fmt::format_string<Args...> format, Args&&... args) const {
    const std::string line = WithOutput(fmt::format(format, std::forward<Args>(args)...));
    std::fputs((PrintableLines(line) + "\n").c_str(), stderr);
  }
  /// The run can do without TensorBoard's events.
  void SayLost(const absl::Status& written) const {
    if (!written.ok()) Say("{}. The run goes on", std::string(written.message()));
  }
  absl::Status RunHere();
  absl::Status ReadTexts(const Captions& captions, uLong* checksum);
  absl::Status NameClasses(const std::vector<std::string>& of_folders,
                           const std::vector<int32_t>& labels);
  void SayUnclearNames() const;
  absl::Status CheckClasses(const training::Dataset& labels,
                            const std::vector<std::string>& of_folders);
  absl::Status ReadData(const std::atomic<bool>& stop);
  absl::Status EncodePictures(const std::atomic<bool>& stop);
  int DefaultSteps() const;
  absl::Status CheckSchedule() const;
  const char* PixelPipelineClass() const;
  absl::StatusOr<Pipeline> PixelPipeline(const std::map<std::string, Tensor>& weights) const;
  Tensor SomePictures() const;
  absl::Status OpenBackend();
  absl::Status CheckOutput() const;
  absl::Status CheckCanWrite() const;
  absl::Status CheckEarlierRun() const;
  absl::Status OpenOutput();
  absl::Status CheckFolder();
  absl::Status DryRun();
  absl::StatusOr<std::map<std::string, Weights>> OpenFirstWeights() const;
  absl::Status LoadFirstWeights(const std::map<std::string, Weights>& opened);
  void SayFirstParts() const;
  void SayNoiseOfStart() const;
  absl::Status Begin();
  absl::Status Prepare(const std::atomic<bool>& stop);
  absl::StatusOr<std::optional<Checkpoint>> OpenCheckpoint() const;
  absl::Status Resume(const Checkpoint& checkpoint);
  absl::Status CheckRanks();
  absl::Status Loop();
  absl::Status CheckLearned() const;
  absl::Status Save();
  absl::Status WriteModels(const TrainerState& state);
  void Sample(const std::atomic<bool>& stop);
  std::string Machine() const;
  void Log(const StepReport& report, double images_per_second);
  void ShortenLog(int64_t steps) const;
  bool first() const { return config_.rank == 0; }
  std::string Output(const std::string& name) const { return folder_ + "/" + name; }
  /// What people read has --output in place of folder_.
  std::string WithOutput(const std::string& text) const {
    return opened_ < 0 ? text : absl::StrReplaceAll(text, {{folder_, config_.output}});
  }
  bool text_to_image() const { return config_.pipeline && config_.stage == Stage::kDiffusion; }
  std::string SnapshotDirectory(size_t average) const {
    if (average == 0) return Output("model");
    return Output("models/" + config_.trainer.averages[average].Name());
  }

  RunConfig config_;
  const std::atomic<bool>& stop_;
  std::string folder_;  // --output, or what the first rank has opened, also if it is moved
  int opened_ = -1, lock_ = -1;
  Pictures pictures_;
  std::vector<std::string> prompts_;  // of the grids
  training::AutoencoderWeights vae_weights_;
  nlohmann::json fingerprint_;
  std::unique_ptr<training::Backend> backend_;
  std::unique_ptr<training::Exchange> exchange_;
  std::unique_ptr<Trainer> trainer_;
  std::optional<EventFile> events_;
  std::unique_ptr<RunMetrics> metrics_;  // of the first rank, if asked for
  int64_t step_ = 0, saved_step_ = -1, skipped_ = 0, skipped_in_row_ = 0;
  double step_flops_ = 0;
  double peak_flops_ = 0;    // of all ranks, FLOP/s; 0: not known
  bool log_failed_ = false;  // said once
  bool log_cut_ = false;     // the last time
  bool moved_ = false;       // likewise
};

absl::Status Session::ReadData(const std::atomic<bool>& stop) {
  const Clock::time_point start = Clock::now();
  // A resume may have the paths of its checkpoint, which no flag of this call names.
  for (const auto& [flag, path] :
       {std::pair{"--data", config_.data}, std::pair{"--labels", config_.labels}})
    if (std::error_code error; !path.empty() && !fs::exists(path, error)) {
      if (!error) error = std::make_error_code(std::errc::no_such_file_or_directory);
      return NotFound("{} {}: cannot be read: {}; check the path and its permissions", flag, path,
                      error.message());
    }
  PictureOptions options;
  const Shape picture = config_.picture();
  options.channels = static_cast<int>(picture[2]);
  options.height = static_cast<int>(config_.canvas != 0 ? config_.canvas : picture[0]);
  options.width = static_cast<int>(config_.canvas != 0 ? config_.canvas : picture[1]);
  options.pad = config_.pad;
  options.stop = &stop;
  if (first()) options.note = [this](const std::string& what) { Say("{}", what); };
  if (const auto* const pixels = std::get_if<UNet2DConfig>(&config_.network)) {
    options.wants_labels = pixels->condition == ClassCondition::kLabel;
    options.wants_vectors =
        pixels->condition == ClassCondition::kValue || pixels->condition == ClassCondition::kVector;
  }
  options.check = [this](const training::Dataset& labels,
                         const std::vector<std::string>& names) -> absl::Status {
    // A picture that is left out may have any label, and any weight.
    if (!config_.skip_bad_files)
      DENOISED_RETURN_IF_ERROR(training::CheckPictureWeights(labels.weights));
    if (config_.pipeline) return absl::OkStatus();
    return config_.skip_bad_files ? NameClasses(names, {}) : CheckClasses(labels, names);
  };
  options.skip_bad = config_.skip_bad_files;
  options.memory = config_.data_memory > 0
                       ? static_cast<size_t>(config_.data_memory) << 20
                       : training::FreeHostMemory() / 2 / static_cast<size_t>(config_.local_ranks);
  // A picture that needs more is decoded alone. Decoders take about five times as much in all.
  options.decoding_memory =
      std::min(options.decoding_memory,
               static_cast<int64_t>(training::FreeHostMemory() / 16 / config_.local_ranks));
  options.scratch = folder_;
  if (config_.dry_run) {
    std::error_code error;
    options.scratch = fs::temp_directory_path(error).string();
    if (error)
      return InvalidArgument("the folder for temporary files cannot be used: {}; set TMPDIR to one",
                             error.message());
  }
  Captions captions;
  if (text_to_image()) {
    std::error_code error;
    if (!fs::is_directory(config_.data, error))
      return InvalidArgument("--data {}: pictures with captions are a folder; unpack it",
                             config_.data);
    // All lines of metadata.jsonl, else the .txt of each picture, when it is its turn.
    const bool has_lines = fs::exists(config_.data + "/metadata.jsonl", error);
    DENOISED_ASSIGN_OR_RETURN(const Weights weights,
                              config_.pipeline->directory.components.at("vae").OpenWeights());
    const auto vae = training::ReadAutoencoder(config_.pipeline->vae, weights);
    DENOISED_RETURN_IF_ERROR(Annotate(vae.status(), "--pipeline"));
    vae_weights_ = *vae;
    DENOISED_ASSIGN_OR_RETURN(captions, ReadCaptions(config_.data, {}));
    options.refuse = [this, has_lines, &captions](const std::string& file) {
      absl::StatusOr<Captions> own = Captions();
      if (!has_lines) own = ReadCaptions(config_.data, {file});
      if (!own.ok()) return std::string(own.status().message());
      captions.merge(*own);
      return CheckCaptions(captions, file);
    };
  }
  DENOISED_ASSIGN_OR_RETURN(pictures_, ReadPictures(config_.data, config_.labels, options));
  for (const std::string& bad : pictures_.bad) Say("skipped {}", bad);
  const Tensor& images = pictures_.dataset.images;
  if (first())
    Say("{} pictures of {} × {} × {}, {} MiB{}, {} skipped, read in {:.1f} s", images.dim(0),
        images.dim(2), images.dim(1), images.dim(3), images.bytes() >> 20,
        pictures_.dataset.on_disk ? " on disk" : "", pictures_.bad.size(), Since(start));
  if (!config_.pipeline)
    DENOISED_RETURN_IF_ERROR(CheckClasses(pictures_.dataset, pictures_.class_names));
  if (first()) SayUnclearNames();
  // Another data set under the same settings is another run.
  uLong checksum = Checksum(0, images);
  checksum = Checksum(checksum, pictures_.dataset.labels);
  checksum = Checksum(checksum, pictures_.dataset.vectors);
  checksum = Checksum(checksum, pictures_.dataset.weights);
  if (text_to_image()) DENOISED_RETURN_IF_ERROR(ReadTexts(captions, &checksum));
  fingerprint_["data"] = {{"pictures", images.dim(0)}, {"crc32", checksum}};
  return absl::OkStatus();
}

/// Whether names and labels, or vectors, fit the network.
absl::Status Session::CheckClasses(const training::Dataset& dataset,
                                   const std::vector<std::string>& of_folders) {
  const std::vector<int32_t>& labels = dataset.labels;
  if (!config_.class_names.empty() && !labels.empty()) {
    const int32_t largest = *std::max_element(labels.begin(), labels.end());
    if (static_cast<size_t>(largest) >= config_.class_names.size())
      return InvalidArgument(
          "--class-name: there are {} names, but a picture has label {}; name every class",
          config_.class_names.size(), largest);
  }
  DENOISED_RETURN_IF_ERROR(NameClasses(of_folders, labels));
  return training::CheckLabels(std::get<UNet2DConfig>(config_.network), config_.trainer, dataset);
}

/// Names that the server would refuse in a model are refused before the run. `labels` are those of
/// the pictures, or empty if they are not known yet.
absl::Status Session::NameClasses(const std::vector<std::string>& of_folders,
                                  const std::vector<int32_t>& labels) {
  const auto& network = std::get<UNet2DConfig>(config_.network);
  const bool classes = network.condition == ClassCondition::kLabel;
  std::vector<std::string>& names = config_.class_names;
  if (names.empty() && classes) {
    for (const std::string& name : of_folders)
      DENOISED_RETURN_IF_ERROR(CheckClassName(name, "--data " + config_.data,
                                              "rename it, or name all classes with --class-name"));
    names = of_folders;
  }
  if (names.empty()) return absl::OkStatus();
  if (!classes)
    return InvalidArgument("--class-name: the network has no classes; set num_class_embeds to {}",
                           names.size());
  std::map<std::string, size_t> by_name;
  for (size_t label = 0; label < names.size(); ++label)
    if (const auto [same, is_new] = by_name.emplace(names[label], label); !is_new)
      return InvalidArgument(
          "--class-name: classes {} and {} are both named \"{}\", so requests with that name would "
          "always get class {}; give each class a name of its own",
          same->second, label, names[label], same->second);
  const int embeddings = network.num_class_embeds, count = static_cast<int>(names.size());
  if (config_.trainer.class_dropout == 0) {
    if (count == embeddings) return absl::OkStatus();
    return InvalidArgument(
        "{} classes have names, but the network's num_class_embeds is {}; set it to {}{}", count,
        embeddings, count, embeddings > count ? ", or name every class with --class-name" : "");
  }
  // The null class comes last and has no name, as the server expects it; but --null-class may be
  // one of those before the last that --class-name names, if it is the class of no picture.
  const int null_class = config_.trainer.null_class;
  const bool null_given = config_.flags.contains("null-class");
  const bool null_named = null_given && names != of_folders && null_class + 1 < count &&
                          std::ranges::count(labels, null_class) == 0;
  const int needed = null_named ? count : count + 1;
  if (embeddings == needed && (null_named || null_class == count)) return absl::OkStatus();
  if (embeddings == needed)
    return InvalidArgument(
        "--null-class is {}, which is the class \"{}\"; leave --null-class out, so that it is {}, "
        "the last of num_class_embeds",
        null_class, names[null_class], count);
  std::string also;
  if (!null_named) also += ", with the null class";
  if (!null_named && null_given && null_class != count) also += ", and leave --null-class out";
  if (embeddings > needed && null_class + 1 == embeddings)
    also += ", or name every class with --class-name";
  return InvalidArgument(
      "{} classes have names, but the network's num_class_embeds is {}; set it to {}{}", count,
      embeddings, needed, also);
}

/// Names that the command cannot give, or takes for another class.
void Session::SayUnclearNames() const {
  std::vector<std::string> unclear;
  const std::vector<std::string>& names = config_.class_names;
  for (size_t i = 0; i < names.size(); ++i)
    if (int64_t number = 0;
        names[i].find(',') != std::string::npos ||
        (absl::SimpleAtoi(names[i], &number) && number != static_cast<int64_t>(i)))
      unclear.push_back(fmt::format("\"{}\" (class {})", names[i], i));
  if (unclear.empty()) return;
  const size_t more = unclear.size() - std::min<size_t>(unclear.size(), 3);
  unclear.resize(unclear.size() - more);
  Say("warning: denoise --labels separates names at commas, and takes a number for that of a "
      "class, so it cannot name {}{}; give the number of the class there, or another name with "
      "--class-name",
      fmt::join(unclear, ", "), more > 0 ? fmt::format(", and {} more", more) : "");
}

absl::Status Session::ReadTexts(const Captions& captions, uLong* checksum) {
  training::Dataset& dataset = pictures_.dataset;
  DENOISED_ASSIGN_OR_RETURN(const int64_t cut,
                            Tokenize(*config_.pipeline, pictures_.files, captions, &dataset));
  *checksum = Checksum(*checksum, dataset.tokens);
  *checksum = Checksum(*checksum, dataset.first_caption);
  if (first()) Say("{} captions of {} tokens", dataset.tokens.dim(0) - 1, dataset.tokens.dim(1));
  if (first() && cut > 0)
    Say("warning: {} of the captions {} longer; their ends are left out", cut,
        cut == 1 ? "is" : "are");
  for (size_t i = 0; config_.prompts.empty() && i < static_cast<size_t>(config_.sample_count); ++i)
    prompts_.push_back(
        captions.at(pictures_.files[i * pictures_.files.size() / config_.sample_count]).front());
  if (!config_.prompts.empty()) prompts_ = config_.prompts;
  // A network is a function of the latents that it learned.
  for (const auto& [name, tensor] : vae_weights_) *checksum = Checksum(*checksum, tensor);
  return absl::OkStatus();
}

/// Latents are computed once: the autoencoder is not trained any more.
absl::Status Session::EncodePictures(const std::atomic<bool>& stop) {
  const Clock::time_point start = Clock::now();
  training::Dataset& dataset = pictures_.dataset;
  if (config_.dry_run) {
    const VaeConfig& vae = config_.pipeline->vae.vae;
    const Shape shape{dataset.size() * (config_.trainer.flip ? 2 : 1),
                      config_.pipeline->height() / vae.factor(),
                      config_.pipeline->width() / vae.factor(), 2 * int64_t{vae.latent_channels}};
    dataset.posteriors = Tensor::HostF32(shape, std::vector<float>(shape.elements()));
  } else {
    DENOISED_ASSIGN_OR_RETURN(
        dataset.posteriors,
        training::EncodePosteriors(*backend_, config_.pipeline->vae, vae_weights_, dataset.images,
                                   config_.trainer.flip, &stop));
    if (first()) Say("{} pictures encoded in {:.1f} s", dataset.size(), Since(start));
  }
  dataset.images = {};
  return absl::OkStatus();
}

/// Also refuses passes that the device cannot compute.
absl::Status Session::OpenBackend() {
  DENOISED_ASSIGN_OR_RETURN(backend_, config_.cuda ? training::OpenCudaBackend(config_.cuda_options)
                                                   : training::OpenCpuBackend());
  return Trainer::CheckPasses(*backend_, config_.trainer, config_.ranks);
}

absl::Status Session::DryRun() {
  const training::TrainerOptions& t = config_.trainer;
  // What a run refuses, a dry run refuses too. Without --output there is no latest checkpoint.
  std::optional<Checkpoint> checkpoint;
  if (!config_.output.empty()) DENOISED_RETURN_IF_ERROR(CheckEarlierRun());
  if (!config_.output.empty() || config_.resume != "latest") {
    DENOISED_ASSIGN_OR_RETURN(checkpoint, OpenCheckpoint());
  }
  std::map<std::string, Weights> first_weights;
  if (!checkpoint) {
    DENOISED_ASSIGN_OR_RETURN(first_weights, OpenFirstWeights());
  }
  DENOISED_RETURN_IF_ERROR(OpenBackend());
  DENOISED_RETURN_IF_ERROR(ReadData(stop_));
  if (checkpoint) DENOISED_RETURN_IF_ERROR(CheckSame(checkpoint->run, fingerprint_));
  checkpoint.reset();
  if (text_to_image()) DENOISED_RETURN_IF_ERROR(EncodePictures(stop_));
  DENOISED_ASSIGN_OR_RETURN(
      const training::TrainerPlan plan,
      Trainer::Plan(*backend_, config_.network, t, pictures_.dataset, config_.ranks));
  // A save copies the state to the host.
  size_t saving = config_.cuda ? 0 : plan.state_bytes, encoding = 0;
  if (config_.pipeline) {
    // Stage diffusion encodes all pictures before its first step, stage vae some at each save.
    const Shape picture = config_.picture();
    const int64_t size = pictures_.dataset.size(),
                  count = text_to_image() ? size : std::min(kMeasuredPictures, size);
    DENOISED_ASSIGN_OR_RETURN(encoding,
                              training::EncodingBytes(*backend_, config_.pipeline->vae,
                                                      {count, picture[0], picture[1], picture[2]},
                                                      /*mirrored=*/text_to_image() && t.flip));
    if (!text_to_image()) saving += encoding;
  }
  const auto mib = [](size_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  fmt::print("device       {}, {}\n", backend_->name(), backend_->description());
  fmt::print("parameters   {}\n", plan.parameters);
  fmt::print(
      "memory       {:.0f} MiB: weights {:.0f}, activations {:.0f}, pictures {:.0f}, saving "
      "{:.0f}\n",
      mib(plan.weight_bytes + plan.activation_bytes + plan.dataset_bytes + saving),
      mib(plan.weight_bytes), mib(plan.activation_bytes), mib(plan.dataset_bytes), mib(saving));
  if (text_to_image())
    fmt::print("encoding     {:.0f} MiB, before the first step\n", mib(encoding));
  fmt::print("steps        {} of {} pictures: {:.1f} times the data set\n", t.steps, t.batch,
             static_cast<double>(t.steps) * static_cast<double>(t.batch) /
                 static_cast<double>(pictures_.dataset.size()));
  fmt::print("work         {:.1f} GFLOP a step\n", plan.step_flops / 1e9);
  std::fflush(stdout);
  // The others are not there, so one rank does its share of a step without them.
  exchange_ = training::NewSoleExchange();
  training::TrainerOptions share = t;
  share.batch /= config_.ranks;
  share.chunks /= config_.ranks;
  DENOISED_ASSIGN_OR_RETURN(
      trainer_, Trainer::Make(*backend_, *exchange_, config_.network, share, pictures_.dataset));
  DENOISED_RETURN_IF_ERROR(LoadFirstWeights(first_weights));
  // The first prepares the kernels, the second records them.
  const int before = config_.cuda ? 2 : 1, steps = config_.cuda ? kDryRunSteps : 1;
  Clock::time_point start;
  for (int i = -before; i < steps; ++i) {
    if (i == 0) start = Clock::now();
    if (stop_) return Cancelled("stopped by a signal before all steps were measured");
    DENOISED_RETURN_IF_ERROR(trainer_->Step().status());
  }
  const double seconds = Since(start) / steps;
  if (config_.cuda)
    fmt::print("GPU memory   {:.0f} MiB in use, by all processes\n", mib(backend_->MemoryInUse()));
  const char* const without =
      config_.ranks > 1 ? " without the exchange of gradients: at least" : ":";
  fmt::print("time         {:.5f} s a step ({} measured){} {:.2f} hours\n", seconds, steps, without,
             seconds * static_cast<double>(t.steps) / 3600);
  // The engine draws them, which plans its memory and chooses its kernels by itself.
  const int64_t every = config_.sample_steps, grids = every > 0 ? (t.steps - 1) / every + 1 : 0;
  fmt::print("not included {}the time of checkpoints\n",
             grids == 0 ? ""
                        : fmt::format("memory and time of {} sample grid{} of {} picture{}, ",
                                      grids, grids == 1 ? "" : "s", config_.sample_count,
                                      config_.sample_count == 1 ? "" : "s"));
  return absl::OkStatus();
}

/// Of --init-from, and of what text to image never trains, by the prefix of their parameters.
absl::StatusOr<std::map<std::string, Weights>> Session::OpenFirstWeights() const {
  std::map<std::string, Weights> opened;
  if (config_.pipeline) {
    DENOISED_ASSIGN_OR_RETURN(opened,
                              OpenParts(*config_.pipeline, config_.stage, config_.init_from));
  } else if (!config_.init_from.empty()) {
    std::string folder = config_.init_from + "/unet";
    std::error_code error;
    if (!fs::is_directory(folder, error)) folder = config_.init_from;
    DENOISED_ASSIGN_OR_RETURN(Safetensors tensors,
                              Safetensors::OpenDirectory(folder, "diffusion_pytorch_model"));
    opened.emplace("", Weights(std::move(tensors), folder));
  }
  for (const auto& [prefix, weights] : opened)
    DENOISED_RETURN_IF_ERROR(
        Annotate(training::CheckWeights(config_.network, config_.trainer, prefix, weights),
                 config_.init_from.empty() ? "--pipeline" : "--init-from"));
  return opened;
}

absl::Status Session::LoadFirstWeights(const std::map<std::string, Weights>& opened) {
  for (const auto& [prefix, weights] : opened)
    DENOISED_RETURN_IF_ERROR(trainer_->LoadWeights(prefix, weights));
  return absl::OkStatus();
}

/// Where the weights of a pipeline's parts come from.
void Session::SayFirstParts() const {
  const std::string& from = config_.init_from;
  const bool text_alone = from.empty() && !config_.pipeline->network.train_text;
  const char* const parts = !text_to_image() ? "vae" : text_alone ? "unet" : "unet, text_encoder";
  Say("{}: {}", parts,
      from.empty() ? "random weights (--init-from starts from a pipeline's)"
                   : "weights of " + from);
  if (!text_to_image() && config_.pipeline->directory.components.contains(ModelDirectory::kTinyVae))
    Say("{} is left out of the model: it decodes the latents of another autoencoder",
        ModelDirectory::kTinyVae);
  if (text_alone && text_to_image())
    Say("text_encoder: weights of {}, not trained", config_.pipeline->directory.root);
}

/// Whether the weights of --init-from learned the same noise.
void Session::SayNoiseOfStart() const {
  const std::string& from = config_.init_from;
  const training::ObjectiveOptions& own = config_.trainer.objective;
  if (!config_.start) {
    if (!config_.start_unused.empty())
      Say("--init-from {}: its scheduler_config.json is not used: {}; the noise is that of {}",
          from, config_.start_unused, config_.pipeline ? "the pipeline" : "the flags");
    else if (!config_.pipeline)
      Say("--init-from {}: no scheduler_config.json says how it was trained; the objective is {}",
          from, Name(own.kind));
    return;
  }
  const auto scheduler_of = [](const training::ObjectiveOptions& options) {
    const auto objective = training::Objective::Make(options);
    return objective.ok() ? objective->SchedulerConfig() : nlohmann::json::object();
  };
  training::ObjectiveOptions start = *config_.start;
  start.learned_variance = own.learned_variance;  // of the network
  const std::string differences =
      Differences(scheduler_of(start), scheduler_of(own), "{} was {} and is {}");
  if (start.kind != own.kind) {
    Say("--init-from {}: trained for the objective {}, and this run is for {}", from,
        Name(start.kind), Name(own.kind));
  } else if (!differences.empty()) {
    Say("--init-from {}: trained with other noise: {}", from, differences);
  } else if (!config_.pipeline) {
    Say("--init-from {}: objective {} and noise as in its scheduler_config.json", from,
        Name(own.kind));
  }
}

/// --output must not lie where another run removes what is old, or where this one would read it:
/// grids would be pictures when the run is resumed, and with classes a class.
absl::Status Session::CheckOutput() const {
  if (config_.output.empty()) return absl::OkStatus();
  std::error_code error;
  const fs::path output = fs::weakly_canonical(fs::absolute(config_.output, error), error);
  const std::set<fs::path> own = {"checkpoints", "model", "models", "samples", "events"};
  for (fs::path at = output; at.has_relative_path(); at = at.parent_path())
    if (own.contains(at.filename()) && HasCheckpoints(at.parent_path() / "checkpoints"))
      return InvalidArgument(
          "--output {} lies in {}, where the run in {} keeps its own files; use another folder",
          config_.output, at.string(), at.parent_path().string());
  if (!fs::is_directory(config_.data, error)) return absl::OkStatus();
  const fs::path below = output.lexically_relative(fs::canonical(config_.data, error));
  if (below.empty() || *below.begin() == ".." ||
      std::any_of(below.begin(), below.end(), [](const fs::path& part) { return IsHidden(part); }))
    return absl::OkStatus();
  return InvalidArgument(
      "--output {} lies in --data {}, where its grids would count as pictures; use a folder "
      "outside of it",
      config_.output, config_.data);
}

/// Whether OpenOutput() can make its folders. Changes nothing, so that a dry run can ask, too.
absl::Status Session::CheckCanWrite() const {
  if (config_.output.empty()) return absl::OkStatus();
  for (const std::string& folder : {config_.output, Output("checkpoints")}) {
    std::error_code error;
    fs::path there = fs::absolute(folder, error);  // or the nearest folder around it
    while (fs::symlink_status(there, error).type() == fs::file_type::not_found &&
           there.has_relative_path())
      there = there.parent_path();
    const bool is_folder = fs::is_directory(there, error);
    if (!is_folder && !error) error = std::make_error_code(std::errc::not_a_directory);
    if (is_folder && first() && access(there.c_str(), W_OK | X_OK) != 0)
      error.assign(errno, std::generic_category());
    if (error)
      return InvalidArgument("--output {}: cannot be written: {}: {}; choose another folder",
                             config_.output, there.string(), error.message());
  }
  return absl::OkStatus();
}

/// Whether this run may write beside what an earlier one left.
absl::Status Session::CheckEarlierRun() const {
  const std::string checkpoints = Output("checkpoints");
  std::error_code error;
  const bool used = fs::is_directory(checkpoints, error) && !fs::is_empty(checkpoints, error);
  if (error && error != std::errc::no_such_file_or_directory)
    return InvalidArgument("--output {}: cannot be read: {}", config_.output, error.message());
  const char* const or_none = config_.dry_run ? ", or leave --output out to measure only" : "";
  if (used && config_.resume.empty())
    return InvalidArgument(
        "--output {} has checkpoints of an earlier run; pass --resume latest, or choose another "
        "folder{}",
        config_.output, or_none);
  // A checkpoint is written before the model of its step, so these have been taken away.
  for (const char* const model : {"model/model_index.json", "models"})
    if (!used && fs::exists(Output(model), error))
      return InvalidArgument(
          "--output {} has a model of an earlier run in {}, and no checkpoint of it; move it away, "
          "or choose another folder{}",
          config_.output, fs::path(model).begin()->string(), or_none);
  // Checkpoints of two runs would be mixed, and the older steps of one removed for the other.
  if (used && config_.resume != "latest" && fs::exists(config_.resume + "/DONE", error) &&
      !fs::equivalent(fs::path(config_.resume) / "..", checkpoints, error) &&
      HasCheckpoints(checkpoints))
    return InvalidArgument(
        "--resume {}: --output {} has checkpoints of its own; pass --resume latest, or choose "
        "another --output{}",
        config_.resume, config_.output, or_none);
  return absl::OkStatus();
}

absl::Status Session::OpenOutput() {
  std::error_code error;
  fs::create_directories(config_.output, error);
  if (error)
    return InvalidArgument("--output {}: cannot be created: {}", config_.output, error.message());
  if (first()) {
    const auto cannot = [&](const char* what) {
      return InvalidArgument("--output {}: {}: {}; choose another folder", config_.output, what,
                             std::generic_category().message(errno));
    };
    opened_ = open(config_.output.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (opened_ < 0) return cannot("cannot be opened");
    // Two runs would mix their files. The lock ends with the process. Of a file, because NFS locks
    // a folder for one host alone.
    lock_ = openat(opened_, ".lock", O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock_ < 0) return cannot("cannot be written");
    if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK)
        return FailedPrecondition(
            "--output {}: another denoise-train writes there; wait until it ends, or choose "
            "another folder",
            config_.output);
      Say("warning: --output {}: cannot be locked: {}; see that no other run writes there",
          config_.output, std::generic_category().message(errno));
    }
    // The path may lead to another folder later, in which another run may write.
    const std::string locked = fmt::format("/proc/self/fd/{}", opened_);
    if (fs::is_directory(locked, error)) folder_ = locked;
  }
  DENOISED_RETURN_IF_ERROR(CheckEarlierRun());
  fs::create_directories(Output("checkpoints"), error);
  if (first() && error)
    return InvalidArgument("--output {}: cannot be written: {}", config_.output, error.message());
  if (!first()) return absl::OkStatus();
  // The names of these folders would be lost with the machine.
  SyncFolder(fs::absolute(config_.output, error).parent_path()).IgnoreError();  // of others
  return SyncFolder(folder_);
}

/// A folder that was moved is written to as before. One that was removed can take no files. What
/// cannot be looked at, as on a file system that is away for a moment, is left to the next save.
absl::Status Session::CheckFolder() {
  struct stat locked, there;
  if (opened_ < 0 || folder_ == config_.output || fstat(opened_, &locked) != 0)
    return absl::OkStatus();
  if (locked.st_nlink == 0)
    return InvalidArgument(
        "--output {}: the folder of this run was removed, with all that it had saved, so the run "
        "ends at step {}",
        config_.output, step_);
  const bool found = stat(config_.output.c_str(), &there) == 0;
  const bool other = found && (locked.st_dev != there.st_dev || locked.st_ino != there.st_ino);
  const bool none = !found && (errno == ENOENT || errno == ENOTDIR);
  if ((other || none) && !std::exchange(moved_, true))
    Say("--output {}: the folder of this run was moved, and {} there now. The run goes on writing "
        "to its own folder; to resume it, give the new path as --output",
        config_.output, other ? "another folder is" : "nothing is");
  return absl::OkStatus();
}

/// What each rank does in a time of its own.
absl::Status Session::Prepare(const std::atomic<bool>& stop) {
  DENOISED_ASSIGN_OR_RETURN(const std::optional<Checkpoint> checkpoint, OpenCheckpoint());
  std::map<std::string, Weights> first_weights;
  if (!checkpoint) {
    DENOISED_ASSIGN_OR_RETURN(first_weights, OpenFirstWeights());
  }
  DENOISED_RETURN_IF_ERROR(ReadData(stop));
  if (text_to_image()) DENOISED_RETURN_IF_ERROR(EncodePictures(stop));
  DENOISED_ASSIGN_OR_RETURN(trainer_, Trainer::Make(*backend_, *exchange_, config_.network,
                                                    config_.trainer, pictures_.dataset));
  return checkpoint ? Resume(*checkpoint) : LoadFirstWeights(first_weights);
}

absl::Status Session::Begin() {
  DENOISED_RETURN_IF_ERROR(OpenBackend());
  DENOISED_ASSIGN_OR_RETURN(
      std::unique_ptr<training::Exchange> tcp,
      ConnectRanks(config_.rank, config_.ranks, config_.address, config_.rank_seconds, stop_));
  DENOISED_ASSIGN_OR_RETURN(
      training::ChosenExchange chosen,
      training::ChooseExchange(config_.exchange, *backend_, std::move(tcp), config_.rank_seconds));
  exchange_ = std::move(chosen.exchange);
  {
    Pulse pulse(exchange_->host(), stop_);
    absl::Status prepared = Prepare(pulse.ended());
    if (prepared.ok() || absl::IsCancelled(prepared)) prepared = pulse.WaitForAll();
    DENOISED_RETURN_IF_ERROR(prepared);
  }
  DENOISED_RETURN_IF_ERROR(CheckRanks());
  if (!first()) return absl::OkStatus();
  DENOISED_ASSIGN_OR_RETURN(
      const training::TrainerPlan plan,
      Trainer::Plan(*backend_, config_.network, config_.trainer, pictures_.dataset, config_.ranks));
  step_flops_ = plan.step_flops;
  peak_flops_ = backend_->peak_flops() * config_.ranks;
  ShortenLog(step_);
  absl::StatusOr<EventFile> events = EventFile::Create(Output("events"), step_ + 1);
  SayLost(events.status());
  if (events.ok()) events_.emplace(*std::move(events));
  if (step_ >= config_.trainer.steps) return absl::OkStatus();
  if (step_ == 0 && config_.pipeline) SayFirstParts();
  if (step_ == 0 && !config_.init_from.empty()) SayNoiseOfStart();
  const std::string ranks =
      config_.ranks == 1 ? "1 rank"
                         : fmt::format("{} ranks over {}", config_.ranks, chosen.description);
  Say("{}, {}: {} parameters, steps {} to {} of {} pictures in {} chunks, {}", backend_->name(),
      backend_->description(), trainer_->parameters().count(), step_ + 1, config_.trainer.steps,
      config_.trainer.batch, config_.trainer.chunks, ranks);
  return absl::OkStatus();
}

/// What --resume names, if there is one. Its settings are those of this run; its pictures may be
/// others.
absl::StatusOr<std::optional<Checkpoint>> Session::OpenCheckpoint() const {
  std::optional<Checkpoint> checkpoint;
  if (config_.resume.empty()) return checkpoint;
  if (config_.resume == "latest") {
    std::vector<std::string> broken;
    auto latest = LoadLatestCheckpoint(Output("checkpoints"), &broken);
    for (const std::string& what : broken) Say("checkpoint skipped: {}", what);
    DENOISED_ASSIGN_OR_RETURN(checkpoint, std::move(latest));
    if (!checkpoint && !broken.empty())
      return InvalidArgument(
          "no checkpoint in {} is whole; to start with step 1, choose another --output",
          Output("checkpoints"));
    if (!checkpoint) {
      Say("no checkpoint in {} yet: starting with step 1", Output("checkpoints"));
      return checkpoint;
    }
  } else {
    absl::StatusOr<Checkpoint> loaded = LoadCheckpoint(config_.resume);
    DENOISED_RETURN_IF_ERROR(CannotResume(loaded.status()));
    checkpoint = *std::move(loaded);
  }
  nlohmann::json now = fingerprint_;
  if (checkpoint->run.contains("data")) now["data"] = checkpoint->run["data"];  // not read yet
  DENOISED_RETURN_IF_ERROR(CheckSame(checkpoint->run, now));
  return checkpoint;
}

absl::Status Session::Resume(const Checkpoint& checkpoint) {
  DENOISED_RETURN_IF_ERROR(CheckSame(checkpoint.run, fingerprint_));
  const absl::Status restored = trainer_->Restore(checkpoint.state);
  if (absl::IsFailedPrecondition(restored))
    return InvalidArgument("--resume: {}; resume from another checkpoint",
                           std::string(restored.message()));
  DENOISED_RETURN_IF_ERROR(restored);
  step_ = saved_step_ = checkpoint.state.step;
  skipped_ = checkpoint.state.skipped;
  skipped_in_row_ = checkpoint.state.skipped_in_row;
  if (!first()) return absl::OkStatus();
  Say("resumed at step {}", step_);
  if (!checkpoint.machine.empty() && checkpoint.machine != Machine())
    Say("warning: from here on not the bits of an uninterrupted run: "
        "they were {}'s, and this is {}",
        checkpoint.machine, Machine());
  return absl::OkStatus();
}

/// On what the bits of a run depend besides its settings.
std::string Session::Machine() const {
  return fmt::format("denoise-train {} on {}", kVersion, backend_->arithmetic());
}

/// Ranks that train different things would add gradients of different networks, and those that save
/// at different steps would wait for each other.
absl::Status Session::CheckRanks() {
  nlohmann::json mine = AsFlags(fingerprint_);
  mine["step"] = step_;
  mine["--steps"] = config_.trainer.steps;
  mine["--checkpoint-steps"] = config_.checkpoint_steps;
  mine["--sample-steps"] = config_.sample_steps;
  mine["--init-from"] = !config_.init_from.empty();  // folders may have other names elsewhere
  mine["machine"] = Machine();
  if (config_.ranks > 1) {
    DENOISED_ASSIGN_OR_RETURN(const TrainerState state, trainer_->State());
    uLong checksum = 0;
    for (const Tensor* const part : {&state.trained, &state.fixed, &state.m, &state.v})
      checksum = Checksum(checksum, *part);
    mine["the checksum of the weights"] = checksum;
  }
  DENOISED_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                            training::GatherTexts(mine.dump(), exchange_->host()));
  const nlohmann::json firsts = nlohmann::json::parse(all[0]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const nlohmann::json others = nlohmann::json::parse(all[rank]);
    const auto counts = [](const std::string& field) { return field != "machine"; };
    const std::string differences = Differences(firsts, others, "{} is {} and {}", counts);
    if (first() && others["machine"] != firsts["machine"])
      Say("warning: not the bits that one rank would have: rank {} is {}, and rank 0 {}", rank,
          others["machine"].get<std::string>(), firsts["machine"].get<std::string>());
    // A file system over a network may show a rank its newest checkpoint a minute later.
    if (firsts["step"] != 0 && others["step"] != 0 && firsts["step"] != others["step"])
      return Unavailable(
          "rank 0 resumes at step {} and rank {} at step {}: all ranks read the first's --output, "
          "so wait until all see its newest checkpoint, and start again",
          firsts["step"].dump(), rank, others["step"].dump());
    if (!differences.empty())
      return InvalidArgument(
          "ranks 0 and {} do not train the same: {}. Give all ranks the same settings, --data and "
          "--init-from, and, if they resume, the first's --output",
          rank, differences);
  }
  return absl::OkStatus();
}

/// Drops what an earlier process logged beyond the checkpoint: those steps are made again.
void Session::ShortenLog(int64_t steps) const {
  const std::string path = Output("log.jsonl");
  std::error_code error;
  if (!fs::exists(path, error) && !error) return;
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok())
    return Say("{}. It keeps its lines, also of steps that are made again",
               std::string(text.status().message()));
  std::string kept;
  for (const std::string& line : LinesOf(*text)) {
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const nlohmann::json step =
        json.is_object() ? json.value("step", nlohmann::json()) : nlohmann::json();
    if (step.is_number_integer() && step <= steps) kept += line + "\n";
  }
  if (const absl::Status status = WriteFileWhole(path, kept); !status.ok())
    Say("{}", std::string(status.message()));
}

void Session::Log(const StepReport& report, double images_per_second) {
  const training::TrainerOptions& t = config_.trainer;
  const double steps_per_second = images_per_second / static_cast<double>(t.batch);
  // The sign of what is not a number means nothing.
  const auto unsigned_nan = [](double value) {
    return std::isnan(value) ? std::abs(value) : value;
  };
  Say("step {}/{}  {} images  loss {:.4f}  gradient norm {:.3f}  learning rate {:.2e}  {:.1f} "
      "images/s  {}  {} left{}",
      report.step, t.steps, report.step * t.batch, unsigned_nan(report.loss),
      unsigned_nan(report.gradient_norm), report.rate, images_per_second,
      training::DescribeWork(step_flops_ * steps_per_second, peak_flops_),
      Duration(static_cast<double>(t.steps - report.step) / steps_per_second),
      skipped_ > 0 ? fmt::format("  {} step{} skipped", skipped_, skipped_ == 1 ? "" : "s") : "");
  const auto number = [](double value) {
    return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json();
  };
  const nlohmann::json entry = {
      {"step", report.step},         {"images", report.step * t.batch},
      {"loss", number(report.loss)}, {"gradient_norm", number(report.gradient_norm)},
      {"rate", report.rate},         {"images_per_second", number(images_per_second)},
      {"skipped", skipped_}};
  errno = 0;
  std::ofstream log(Output("log.jsonl"), std::ios::app);
  // Half of a line may have been written.
  const bool written(log << (log_cut_ ? "\n" : "") << entry.dump() << "\n" << std::flush);
  log_cut_ = !written;
  if (!written && !std::exchange(log_failed_, true))
    Say("{}: cannot be written from step {} on: {}. The run goes on", Output("log.jsonl"),
        report.step, std::generic_category().message(errno));
  if (!events_) return;
  SayLost(events_->Scalars(report.step, {{"loss", report.loss},
                                         {"gradient_norm", report.gradient_norm},
                                         {"rate", report.rate},
                                         {"images_per_second", images_per_second},
                                         {"skipped", static_cast<double>(skipped_)}}));
}

/// Of a pixel network's pictures.
int Session::DefaultSteps() const {
  if (config_.default_steps > 0) return config_.default_steps;
  using Kind = training::ObjectiveOptions::Kind;
  const training::ObjectiveOptions& objective = config_.trainer.objective;
  if (objective.kind == Kind::kEdm) return 18;
  if (objective.kind == Kind::kScore) return 200;  // each takes two evaluations
  // Other samplers take no more steps than there are timesteps.
  return std::min(objective.timesteps, objective.kind == Kind::kFlow ? 28
                                       : objective.learned_variance  ? 100
                                                                     : 50);
}

/// Whether the server can draw with the noise levels that the network learns.
absl::Status Session::CheckSchedule() const {
  if (config_.pipeline) {
    PipelineFiles served = config_.pipeline->served;
    if (config_.default_steps > 0) served.directory.default_steps = config_.default_steps;
    const auto steps = served.DefaultSteps(EngineOptions().max_evaluations,
                                           config_.default_steps > 0 ? "--default-steps" : "");
    // A request could name another sampler, but the grids and most requests name none.
    absl::Status drawn =
        steps.ok() ? served.scheduler.Compile({.steps = *steps}).status() : steps.status();
    // The messages of DefaultSteps() name the file that is to be corrected, but for a flag.
    if (std::string(drawn.message()).starts_with(served.directory.root)) return drawn;
    return Annotate(drawn, fmt::format("{}: the server could not draw with it",
                                       served.directory.scheduler_config_file));
  }
  DENOISED_ASSIGN_OR_RETURN(const training::Objective objective,
                            training::Objective::Make(config_.trainer.objective));
  DENOISED_ASSIGN_OR_RETURN(
      const SchedulerConfig scheduler,
      SchedulerConfig::Parse(objective.SchedulerConfig(), "scheduler_config.json"));
  const auto plan = scheduler.Compile({.steps = DefaultSteps()});
  if (plan.ok()) return absl::OkStatus();
  using Kind = training::ObjectiveOptions::Kind;
  const Kind kind = config_.trainer.objective.kind;
  const char* const flags = kind == Kind::kScore ? "--sigma-min, --sigma-max or --default-steps"
                            : kind == Kind::kEdm ? "--default-steps"
                            : kind == Kind::kFlow
                                ? "--timesteps or --default-steps"
                                : "--beta-start, --beta-end, --beta-schedule, --timesteps or "
                                  "--default-steps";
  if (config_.start) {
    training::ObjectiveOptions of_start = *config_.start;
    of_start.learned_variance = config_.trainer.objective.learned_variance;  // of the network
    const auto start = training::Objective::Make(of_start);
    if (start.ok() && start->SchedulerConfig() == objective.SchedulerConfig())
      return InvalidArgument(
          "--init-from: {}: the server could not draw with this noise schedule ({}); choose "
          "another start, or give {}",
          config_.start_scheduler_file, std::string(plan.status().message()), flags);
  }
  return InvalidArgument("the server could not draw with this noise schedule ({}); change {}",
                         std::string(plan.status().message()), flags);
}

/// diffusers' pipeline of a pixel network; the base class where it has none: for classes, and for
/// the schedulers of edm and flow.
const char* Session::PixelPipelineClass() const {
  using Kind = training::ObjectiveOptions::Kind;
  const training::ObjectiveOptions& objective = config_.trainer.objective;
  const auto& network = std::get<UNet2DConfig>(config_.network);
  if (network.condition == ClassCondition::kNone) {
    // It draws squares of three channels alone.
    if (objective.kind == Kind::kScore && network.in_channels == 3 &&
        config_.network_json["sample_size"].is_number())
      return "ScoreSdeVePipeline";
    if (training::IsDdpm(objective.kind))
      return objective.learned_variance ? "DDPMPipeline" : "DDIMPipeline";
  }
  return "DiffusionPipeline";
}

absl::StatusOr<Pipeline> Session::PixelPipeline(
    const std::map<std::string, Tensor>& weights) const {
  Pipeline pipeline;
  nlohmann::json network = config_.network_json;
  network["_class_name"] = "UNet2DModel";
  pipeline.parts = {{"unet", network, "diffusion_pytorch_model", weights}};
  DENOISED_ASSIGN_OR_RETURN(const training::Objective objective,
                            training::Objective::Make(config_.trainer.objective));
  pipeline.scheduler = objective.SchedulerConfig();
  nlohmann::json ours = {{"default_steps", DefaultSteps()}};
  if (config_.trainer.class_dropout > 0) ours["null_class"] = config_.trainer.null_class;
  pipeline.index = {{"_class_name", PixelPipelineClass()},
                    {"unet", {"diffusers", "UNet2DModel"}},
                    {"scheduler", {"diffusers", pipeline.scheduler["_class_name"]}},
                    {"_denoised", ours}};
  const std::vector<std::string>& names = config_.class_names;
  for (size_t i = 0; i < names.size(); ++i)
    pipeline.index["id2label"][std::to_string(i)] = names[i];
  return pipeline;
}

/// Pictures from all over the data set, cropped around their middle.
Tensor Session::SomePictures() const {
  const Tensor& all = pictures_.dataset.images;
  const Shape to = config_.picture();
  const int64_t count = std::min(kMeasuredPictures, all.dim(0)), top = (all.dim(1) - to[0]) / 2,
                left = (all.dim(2) - to[1]) / 2;
  Tensor some = Tensor::Host({count, to[0], to[1], to[2]}, DType::kU8);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t y = 0; y < to[0]; ++y)
      std::copy_n(all.as<uint8_t>() +
                      ((i * all.dim(0) / count * all.dim(1) + top + y) * all.dim(2) + left) * to[2],
                  to[1] * to[2], some.as<uint8_t>() + (i * to[0] + y) * to[1] * to[2]);
  }
  return some;
}

/// Whether all of a flat tensor of F32 is finite.
bool IsFinite(const Tensor& values) {
  const float* const begin = values.as<float>();
  return std::all_of(begin, begin + values.elements(), [](float v) { return std::isfinite(v); });
}

absl::Status Session::Save() {
  if (!first()) {
    saved_step_ = step_;
    return absl::OkStatus();
  }
  DENOISED_ASSIGN_OR_RETURN(TrainerState state, trainer_->State());
  if (!IsFinite(state.trained) ||
      !std::all_of(state.averages.begin(), state.averages.end(), IsFinite))
    return InvalidArgument(
        "the weights are not finite at step {}: the run has diverged. Nothing was saved since step "
        "{}. Lower --learning-rate or raise --adam-eps, and start anew in another --output",
        step_, std::max<int64_t>(saved_step_, 0));
  saved_step_ = step_;
  Checkpoint checkpoint{state, fingerprint_, Machine(), config_.flags};
  const training::ObjectiveOptions& noise = config_.trainer.objective;
  if (!config_.pipeline && noise.kind == training::ObjectiveOptions::Kind::kEdm &&
      config_.start_lost.empty())
    checkpoint.sampler = {{"sigma_min", noise.sigma_min}, {"sigma_max", noise.sigma_max}};
  DENOISED_RETURN_IF_ERROR(SaveCheckpoint(Output("checkpoints"), checkpoint, config_.keep));
  const absl::Status models = WriteModels(state);
  // Later weights may be fit for a model, but there are none after the last step.
  const bool later = step_ < config_.trainer.steps && absl::IsFailedPrecondition(models);
  const std::string without = fmt::format("step {} has a checkpoint, but no model", step_);
  if (!models.ok() && !later) return Annotate(models, without);
  if (later) Say("{}: {}", without, std::string(models.message()));
  Say("saved step {}", step_);
  if (metrics_) metrics_->Saved(step_);
  return absl::OkStatus();
}

absl::Status Session::WriteModels(const TrainerState& state) {
  for (size_t i = 0; i < std::max<size_t>(1, state.averages.size()); ++i) {
    const std::map<std::string, Tensor> weights = trainer_->parameters().Named(
        state.averages.empty() ? state.trained : state.averages[i], state.fixed);
    DENOISED_ASSIGN_OR_RETURN(
        Pipeline pipeline, config_.pipeline
                               ? MakeSnapshot(*config_.pipeline, config_.stage, weights, *backend_,
                                              text_to_image() ? Tensor() : SomePictures())
                               : PixelPipeline(weights));
    if (config_.default_steps > 0)
      pipeline.index["_denoised"]["default_steps"] = config_.default_steps;
    if (config_.default_guidance_scale)
      pipeline.index["_denoised"]["default_guidance_scale"] = *config_.default_guidance_scale;
    if (config_.half) pipeline.dtype = DType::kF16;
    DENOISED_RETURN_IF_ERROR(WritePipeline(SnapshotDirectory(i), pipeline));
  }
  return absl::OkStatus();
}

/// Samples are for people: when they cannot be drawn, the run goes on.
void Session::Sample(const std::atomic<bool>& stop) {
  if (stop_) return Say("no samples: stopped by a signal");
  // A network that reads class vectors gets those of pictures spread over the data set.
  std::vector<float> class_values;
  if (const Tensor& vectors = pictures_.dataset.vectors) {
    for (int i = 0; i < config_.sample_count; ++i) {
      const auto vector = vectors.Slice(i * vectors.dim(0) / config_.sample_count, 1).ToFloats();
      class_values.insert(class_values.end(), vector.begin(), vector.end());
    }
  }
  const absl::StatusOr<Grid> grid = DrawGrid(
      SnapshotDirectory(0), config_.cuda ? std::optional(config_.cuda_options) : std::nullopt,
      config_.sample_count, std::move(class_values), prompts_, stop);
  if (!grid.ok()) return Say("no samples: {}", std::string(grid.status().message()));
  std::error_code error;
  fs::create_directories(Output("samples"), error);
  const std::string path = Output(fmt::format("samples/step-{:09}.png", step_));
  if (const absl::Status status = WriteFileWhole(path, grid->png); !status.ok())
    return Say("no samples: {}", std::string(status.message()));
  if (events_)
    SayLost(events_->Image(step_, "samples", grid->png, grid->width, grid->height, grid->channels));
  Say("drew {}", path);
}

absl::Status Session::Loop() {
  Clock::time_point since = Clock::now();
  int64_t logged = step_;
  bool stopped = false;
  while (step_ < config_.trainer.steps && !stopped) {
    const Clock::time_point start = Clock::now();
    DENOISED_ASSIGN_OR_RETURN(const StepReport report, trainer_->Step(stop_));
    if (metrics_) metrics_->Stepped(report, config_.trainer.batch, Since(start));
    step_ = report.step;
    stopped = report.stop;
    skipped_ += report.skipped;
    skipped_in_row_ = report.skipped ? skipped_in_row_ + 1 : 0;
    const bool last = step_ == config_.trainer.steps || stopped;
    if (first() && (step_ % config_.log_steps == 0 || last)) {
      DENOISED_RETURN_IF_ERROR(CheckFolder());
      Log(report, static_cast<double>((step_ - logged) * config_.trainer.batch) / Since(since));
      logged = step_;
      since = Clock::now();
    }
    if (skipped_in_row_ >= config_.max_skipped)
      return InvalidArgument(
          "the gradient was not finite in {} steps in a row, up to step {}: the run has diverged. "
          "Lower --learning-rate or raise --warmup-steps, and start anew in another --output{}",
          skipped_in_row_, step_,
          saved_step_ < 0 ? ""
                          : fmt::format("; --init-from {} starts from the weights of step {}",
                                        SnapshotDirectory(0), saved_step_));
    const bool sample = config_.sample_steps > 0 &&
                        (step_ % config_.sample_steps == 0 || step_ == config_.trainer.steps);
    if (step_ % config_.checkpoint_steps == 0 || last || sample) {
      if (absl::Status saved = Save(); !saved.ok()) {
        DENOISED_RETURN_IF_ERROR(CheckFolder());  // the reason, if it is gone
        return saved;
      }
      DENOISED_RETURN_IF_ERROR(exchange_->WaitForFirst());
      if (sample) {
        // A grid may take minutes, for which nobody waits who stops a run, whichever its rank.
        Pulse pulse(exchange_->host(), stop_);
        if (first()) Sample(pulse.ended());
        absl::Status drawn = pulse.WaitForAll();
        if (!drawn.ok() && !absl::IsCancelled(drawn)) return drawn;  // a signal: one more step
      }
      since = Clock::now();
      logged = step_;
    }
  }
  if (step_ < config_.trainer.steps) return Cancelled("stopped by a signal after step {}", step_);
  return CheckLearned();
}

/// After the last step, whichever process made it.
absl::Status Session::CheckLearned() const {
  if (2 * skipped_ <= step_) return absl::OkStatus();
  return InvalidArgument(
      "the gradient was not finite in {} of {} steps, so these changed nothing, and hardly "
      "anything was learned. Lower --learning-rate or raise --warmup-steps, and start anew in "
      "another --output",
      skipped_, step_);
}

absl::Status Session::Run() {
  const absl::Status status = RunHere();
  return absl::Status(status.code(), WithOutput(std::string(status.message())));
}

absl::Status Session::RunHere() {
  if (first() && !config_.resumed_flags.empty()) Say("settings of {}", config_.resumed_flags);
  if (first() && !config_.unknown_flags.empty())
    Say("warning: settings of another version are passed over: {}",
        fmt::join(config_.unknown_flags, " "));
  if (first() && !config_.unsaved_flags.empty())
    Say("warning: {} {} not UTF-8, which checkpoints cannot keep: give {} again with --resume",
        fmt::join(config_.unsaved_flags, " and "), config_.unsaved_flags.size() == 1 ? "is" : "are",
        config_.unsaved_flags.size() == 1 ? "it" : "them");
  if (first() && !config_.start_lost.empty())
    Say("warning: the checkpoint is of an earlier version and does not say with which noise EDM's "
        "sampler begins and ends, and --init-from cannot say it either: {}. The model has the "
        "defaults, sigma_min {} and sigma_max {}; a resume with that directory corrects them",
        config_.start_lost, config_.trainer.objective.sigma_min,
        config_.trainer.objective.sigma_max);
  // What can be refused at once is refused before the pictures are read, which may take minutes.
  DENOISED_RETURN_IF_ERROR(CheckSchedule());
  DENOISED_RETURN_IF_ERROR(training::CheckSettings(config_.network, config_.trainer));
  DENOISED_RETURN_IF_ERROR(CheckOutput());
  DENOISED_RETURN_IF_ERROR(CheckCanWrite());
  if (!config_.dry_run) DENOISED_RETURN_IF_ERROR(OpenOutput());
  if (first() && !config_.metrics_listen.empty()) {
    auto metrics = RunMetrics::Listen(config_.metrics_listen, config_.trainer.steps);
    // It may be the very run of this --output that listens there.
    if (config_.dry_run && !metrics.ok())
      Say("warning: {}", std::string(metrics.status().message()));
    if (!config_.dry_run) {
      DENOISED_ASSIGN_OR_RETURN(metrics_, std::move(metrics));
      Say("metrics on port {}", metrics_->port());
    }
  }
  if (config_.dry_run) return DryRun();
  DENOISED_RETURN_IF_ERROR(Begin());
  if (metrics_) metrics_->Began(step_);
  if (step_ >= config_.trainer.steps) {
    Say("{} steps were already done, and --steps is {}: only the model is written", step_,
        config_.trainer.steps);
    if (!first()) return CheckLearned();
    // The process may have ended after its last checkpoint and before its model.
    DENOISED_ASSIGN_OR_RETURN(const TrainerState state, trainer_->State());
    DENOISED_RETURN_IF_ERROR(WriteModels(state));
    return CheckLearned();
  }
  return Loop();
}

}  // namespace

absl::Status Run(const RunConfig& config, const std::atomic<bool>& stop) {
  return Session(config, stop).Run();
}

}  // namespace denoised::trainer
