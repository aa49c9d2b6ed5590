// SPDX-License-Identifier: Apache-2.0
#include "trainer/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <system_error>

#include "engine/core/address.h"
#include "engine/core/config_reader.h"
#include "engine/text/unicode.h"
#include "flags/flags.h"
#include "trainer/checkpoint.h"
#include "trainer/data/pictures.h"
#include "trainer/differences.h"
#include "trainer/version.h"

namespace denoised::trainer {
namespace {

using training::AverageOptions;
using training::ObjectiveOptions;
using training::RateSchedule;

/// As RateSchedule::Kind counts them.
constexpr std::string_view kSchedules[] = {"constant", "cosine", "inverse-sqrt"};

/// The fields of --config as arguments, without those that the command line sets itself.
absl::StatusOr<std::vector<std::string>> ArgumentsOf(const CLI::App& app,
                                                     const nlohmann::json& config,
                                                     const std::string& file,
                                                     const std::vector<std::string>& given,
                                                     nlohmann::json* network) {
  std::vector<std::string> arguments;
  std::map<const CLI::Option*, std::string> fields;
  for (const auto& item : config.items()) {
    // No structured binding: clang 14 does not capture those in lambdas.
    const std::string& field = item.key();
    const nlohmann::json& value = item.value();
    const std::string flag = "--" + field;
    if (field == "config" || field == "help" || field == "version")
      return InvalidArgument("{}: field '{}' is a flag of the command line alone; remove it", file,
                             field);
    const bool overridden = std::any_of(given.begin(), given.end(), [&](const std::string& text) {
      return text == flag || text.rfind(flag + "=", 0) == 0;
    });
    if (overridden) continue;
    if (field == "network" && value.is_object()) {
      *network = value;
      continue;
    }
    const CLI::Option* const option = app.get_option_no_throw(flag);
    if (option == nullptr) {
      std::string meant = field;
      std::replace(meant.begin(), meant.end(), '_', '-');
      const bool known = app.get_option_no_throw("--" + meant) != nullptr;
      return InvalidArgument(
          "{}: unknown field '{}'; {}", file, field,
          known ? fmt::format("write '{}'", meant)
                : "the fields are the names of the flags, without --. See denoise-train --help");
    }
    if (const auto [other, is_new] = fields.emplace(option, field); !is_new)
      return InvalidArgument("{}: fields '{}' and '{}' are the same setting; give one of them",
                             file, other->second, field);
    const bool repeats = option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
    if (repeats && value.is_array() && value.empty())
      return InvalidArgument(
          "{}: field '{}' is an empty list; give a value, or leave the field out", file, field);
    const bool list = repeats && value.is_array();
    for (const nlohmann::json& one : list ? value : nlohmann::json::array({value})) {
      const std::optional<std::string> text = FlagText(one);
      if (!text)
        return InvalidArgument("{}: field '{}' is {}; use a string, a number, true or false{}",
                               file, field, one.dump(), field == "network" ? ", or an object" : "");
      // What reads it as a C string would take the beginning alone.
      if (text->find('\0') != std::string::npos)
        return InvalidArgument("{}: field '{}' is {}; a text may not have a zero character", file,
                               field, one.dump());
      arguments.push_back(fmt::format("{}={}", flag, *text));
    }
  }
  return arguments;
}

/// Takes what only another version knows out of a checkpoint's flags, and names it.
std::vector<std::string> TakeUnknown(const CLI::App& app, nlohmann::json* settings) {
  std::vector<std::string> unknown;
  for (const auto& item : settings->items())
    if (app.get_option_no_throw("--" + item.key()) == nullptr) unknown.push_back("--" + item.key());
  for (const std::string& flag : unknown) settings->erase(flag.substr(2));
  return unknown;
}

/// For a resume in another folder, also if the folder of this start is gone.
std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  const std::filesystem::path whole = std::filesystem::absolute(path, error),
                              shorter = whole.lexically_normal();
  // It is another path where a link comes before "..".
  return std::filesystem::equivalent(whole, shorter, error) ? shorter : whole;
}

/// All flags that were given, as a --config that gives them again, but for those that it cannot
/// hold.
nlohmann::json GivenFlags(const CLI::App& app, std::vector<std::string>* unsaved) {
  static const std::set<std::string> kOfOneCall = {"config", "output", "resume"};
  static const std::set<std::string> kPaths = {"data", "labels", "pipeline", "init-from",
                                               "autotune-cache"};
  nlohmann::json given = nlohmann::json::object();
  for (const CLI::Option* const option : app.get_options()) {
    const std::string& name = option->get_lnames().front();
    if (option->count() == 0 || kOfOneCall.contains(name)) continue;
    std::vector<std::string> values = option->results();
    if (kPaths.contains(name)) values.back() = AbsolutePath(values.back());
    // JSON has no other texts: such a path is to be given again.
    if (!std::ranges::all_of(values, [](const auto& text) { return DecodeUtf8(text).ok(); })) {
      unsaved->push_back("--" + name);
      continue;
    }
    if (option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll) {
      given[name] = values;
    } else {
      given[name] = values.back();
    }
  }
  return given;
}

absl::StatusOr<AverageOptions> ParseAverage(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  AverageOptions average;
  if (kind == "decay") {
    average.kind = AverageOptions::Kind::kDecay;
  } else if (kind == "warmup") {
    average.kind = AverageOptions::Kind::kWarmup;
  } else if (kind == "power") {
    average.kind = AverageOptions::Kind::kPower;
  } else {
    return InvalidArgument(
        "--average: \"{}\" is not warmup:D, decay:D or power:WIDTH, such as warmup:0.999", text);
  }
  char* end = nullptr;
  const std::string number = colon == std::string::npos ? "" : text.substr(colon + 1);
  average.value = std::strtod(number.c_str(), &end);
  if (number.empty() || *end != '\0')
    return InvalidArgument("--average: \"{}\" needs a number after a colon, such as {}:{}{}", text,
                           kind, kind == "power" ? "0.05" : "0.999",
                           number.empty() ? "" : fmt::format("; \"{}\" is none", number));
  if (const absl::Status status = average.Check(); !status.ok())
    return Annotate(status, "--average");
  return average;
}

/// The first of the variables that is set, and its value.
struct Variable {
  std::string name, value;
};
std::optional<Variable> FirstSet(std::initializer_list<const char*> names) {
  for (const char* const name : names)
    if (const char* const value = std::getenv(name); value != nullptr && *value != '\0')
      return Variable{name, value};
  return std::nullopt;
}

absl::StatusOr<int> IntOf(const std::optional<Variable>& variable, int otherwise, int low,
                          int high) {
  if (!variable) return otherwise;
  char* end = nullptr;
  const long value = std::strtol(variable->value.c_str(), &end, 10);
  if (*end != '\0' || value < low || value > high)
    return InvalidArgument("the environment's {} is \"{}\"; use {} to {}", variable->name,
                           variable->value, low, high);
  return static_cast<int>(value);
}

/// The variables of a launcher, in the order in which they count: torchrun, which may be started by
/// one of the others; Kubeflow Trainer's torch policy; Open MPI; MPICH and Intel MPI.
struct Launcher {
  const char *size, *rank;
};
constexpr Launcher kLaunchers[] = {{"WORLD_SIZE", "RANK"},
                                   {"PET_NNODES", "PET_NODE_RANK"},
                                   {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                   {"PMI_SIZE", "PMI_RANK"}};
/// An indexed Job of Kubernetes sets this alone. It may mean something else than a rank.
constexpr char kJobIndex[] = "JOB_COMPLETION_INDEX";

/// No other launcher may contradict what is taken from one: with WORLD_SIZE=4 in a shell, mpirun's
/// two ranks would wait for two more.
absl::Status CheckAgree(const Variable& taken, const char* other) {
  const std::optional<Variable> also = FirstSet({other});
  if (!also || also->value == taken.value) return absl::OkStatus();
  return InvalidArgument(
      "the environment's {} is {}, but {} is {}: one of them is of another program; unset it",
      taken.name, taken.value, also->name, also->value);
}

absl::Status ReadEnvironment(RunConfig* config) {
  std::optional<Variable> size, rank;
  for (const Launcher& launcher : kLaunchers) {
    if (!size) size = FirstSet({launcher.size});
    if (!rank) rank = FirstSet({launcher.rank});
  }
  DENOISED_ASSIGN_OR_RETURN(config->ranks, IntOf(size, 1, 1, 1 << 16));
  if (rank && !size)
    return InvalidArgument(
        "the environment's {} is {}, but no variable says how many ranks there are; set "
        "WORLD_SIZE, or unset {}",
        rank->name, rank->value, rank->name);
  // torchrun starts ranks of its own on each node on which another launcher started it.
  const std::optional<Variable> torchrun = FirstSet({"TORCHELASTIC_USE_AGENT_STORE"});
  for (const Launcher& launcher : kLaunchers) {
    if (torchrun) break;
    if (size) DENOISED_RETURN_IF_ERROR(CheckAgree(*size, launcher.size));
    if (rank) DENOISED_RETURN_IF_ERROR(CheckAgree(*rank, launcher.rank));
  }
  if (config->ranks > 1 && !rank) rank = FirstSet({kJobIndex});
  if (config->ranks > 1 && !rank)
    return InvalidArgument(
        "the environment's {} is {}, but no variable says which rank this is; set RANK", size->name,
        config->ranks);
  if (rank) {
    DENOISED_ASSIGN_OR_RETURN(config->rank, IntOf(rank, 0, 0, 1 << 16));
    if (config->rank >= config->ranks)
      return InvalidArgument("the environment's {} is {}, but {} is {}; ranks count from 0",
                             rank->name, config->rank, size->name, config->ranks);
  }
  // torchrun starts several processes on a node, and sets RANK; Trainer alone starts one.
  if (size && size->name == "PET_NNODES") {
    const std::optional<Variable> processes = FirstSet({"PET_NPROC_PER_NODE"});
    if (processes && processes->value != "1" && std::atoi(processes->value.c_str()) > 0)
      return InvalidArgument(
          "the environment's PET_NPROC_PER_NODE is {}, but one process runs on each node: set the "
          "TrainJob's numProcPerNode to 1, or start torchrun --no-python denoise-train",
          processes->value);
  }
  DENOISED_ASSIGN_OR_RETURN(const int port,
                            IntOf(FirstSet({"MASTER_PORT", "PET_MASTER_PORT"}), 29500, 1, 65535));
  // torchrun itself then listens on MASTER_PORT.
  const bool taken = config->ranks > 1 && torchrun && torchrun->value == "True";
  if (taken && port == 65535)
    return InvalidArgument(
        "the environment's MASTER_PORT is 65535, but torchrun listens there and ranks on the next; "
        "use at most 65534");
  const std::optional<Variable> host = FirstSet({"MASTER_ADDR", "PET_MASTER_ADDR"});
  const std::optional<Variable> local =
      FirstSet({"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"});
  DENOISED_ASSIGN_OR_RETURN(config->cuda_options.number, IntOf(local, 0, 0, 1 << 16));
  const bool here = !host || host->value == "localhost" || host->value == "127.0.0.1";
  const std::optional<Variable> local_size =
      FirstSet({"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"});
  DENOISED_ASSIGN_OR_RETURN(config->local_ranks,
                            IntOf(local_size, here ? config->ranks : 1, 1, 1 << 16));
  // Ranks elsewhere would look for rank 0 on their own host until --rank-seconds are over.
  const std::optional<Variable> elsewhere = config->local_ranks < config->ranks ? local_size
                                            : config->ranks > 1 && rank && rank->name == kJobIndex
                                                ? rank
                                                : std::nullopt;
  if (!host && elsewhere)
    return InvalidArgument(
        "the environment's {} is {}, so not all {} ranks are on this host, but MASTER_ADDR is not "
        "set; set it to the host of rank 0",
        elsewhere->name, elsewhere->value, config->ranks);
  config->address = fmt::format("{}:{}", host ? host->value : "127.0.0.1", taken ? port + 1 : port);
  return absl::OkStatus();
}

/// A StableDiffusionPipeline instead of one network.
absl::Status ReadPipeline(const std::string& directory, const std::string& stage, bool freeze_text,
                          double kl, double edges, RunConfig* config) {
  if (stage == "vae") {
    config->stage = Stage::kAutoencoder;
  } else if (stage != "diffusion") {
    return InvalidArgument("--stage is \"{}\"; use vae, then diffusion", stage);
  }
  DENOISED_ASSIGN_OR_RETURN(PipelineParts parts, PipelineParts::Read(directory, config->stage));
  for (const auto& [flag, value] :
       {std::pair{"--kl-weight", kl}, std::pair{"--edge-weight", edges}})
    if (!(value >= 0 && std::isfinite(value)))
      return InvalidArgument("{} is {}; use a finite number of at least 0", flag, value);
  if (config->stage == Stage::kAutoencoder)
    for (const auto& [field, value] :
         {std::pair{"use_quant_conv", parts.vae.use_quant_conv},
          std::pair{"use_post_quant_conv", parts.vae.use_post_quant_conv}})
      if (!value)
        return InvalidArgument(
            "{}: {} is false; stage vae needs true, because what latents are scaled by is put into "
            "that convolution; set it to true",
            parts.directory.components.at("vae").config_file, field);
  parts.network.train_text = !freeze_text;
  config->network = parts.Network(config->stage);
  config->network_json = {{"stage", stage},
                          {"unet", parts.config("unet")},
                          {"text_encoder", parts.config("text_encoder")},
                          {"vae", parts.config("vae")},
                          {"freeze-text", freeze_text}};
  if (auto* autoencoder = std::get_if<training::AutoencoderConfig>(&config->network)) {
    autoencoder->kl = kl;
    autoencoder->edges = edges;
    config->network_json["loss"] = {kl, edges};
    if (config->sample_steps > 0)
      return InvalidArgument("--sample-steps is {}, but stage vae draws no samples; leave it out",
                             config->sample_steps);
  }
  training::ObjectiveOptions& objective = config->trainer.objective;
  parts.objective.min_snr = objective.min_snr;
  parts.objective.cap_snr = objective.cap_snr;
  objective = parts.objective;
  config->pipeline = std::move(parts);
  return absl::OkStatus();
}

/// `run` is the run.json of a checkpoint to resume, or null.
absl::Status ReadNetwork(const std::string& path, const nlohmann::json& run, RunConfig* config) {
  std::string file = "network";
  if (config->network_json.is_null() && path.empty() && !config->init_from.empty() &&
      run.contains("configuration") && run["configuration"].is_object())
    config->network_json = run["configuration"].value("network", nlohmann::json());
  if (config->network_json.is_null()) {
    std::string from = path;
    if (from.empty() && !config->init_from.empty()) {
      from = config->init_from + "/unet/config.json";
      std::error_code error;
      if (!std::filesystem::exists(from, error)) from = config->init_from + "/config.json";
    }
    if (from.empty())
      return InvalidArgument(
          "--network is missing: give a UNet2DModel's config.json, such as "
          "models/mnist-32/unet/config.json");
    file = from;
    absl::StatusOr<nlohmann::json> json = ReadJsonFile(from);
    if (!json.ok())
      return Annotate(json.status(),
                      !path.empty() ? "--network"
                                    : "--init-from needs the folder of a model, such as run/model");
    config->network_json = *std::move(json);
  }
  DENOISED_ASSIGN_OR_RETURN(const UNet2DConfig network,
                            UNet2DConfig::Parse(config->network_json, file));
  DENOISED_RETURN_IF_ERROR(CheckChannels(network.in_channels, file));
  config->network = network;
  return absl::OkStatus();
}

/// The fields by which the same weights would compute something else: those whose value in the
/// start's config changes what `parse` reads of ours.
template <typename Parse>
absl::Status CheckStartConfig(const nlohmann::json& ours, const nlohmann::json& starts,
                              const std::string& file, const std::string& remedy,
                              const Parse& parse) {
  const auto own = parse(ours);
  const auto matters = [&](const std::string& field) {
    nlohmann::json changed = ours;
    if (starts.contains(field)) {
      changed[field] = starts[field];
    } else {
      changed.erase(field);
    }
    return parse(changed) != own;
  };
  const std::string differences = Differences(starts, ours, "{} was {} and is {}", matters);
  if (differences.empty()) return absl::OkStatus();
  return InvalidArgument(
      "--init-from: with {} its weights would not compute what they learned: {}. Use the same, {}",
      file, differences, remedy);
}

/// The scheduler's config that lies in a start, if there is one.
absl::Status ReadStartScheduler(ModelDirectory* start) {
  std::error_code error;
  for (const char* const where : {"/scheduler", ""}) {
    start->scheduler_config_file = start->root + where + "/scheduler_config.json";
    if (!std::filesystem::exists(start->scheduler_config_file, error)) continue;
    DENOISED_ASSIGN_OR_RETURN(start->scheduler_config, ReadJsonFile(start->scheduler_config_file));
    break;
  }
  return absl::OkStatus();
}

/// Reads the directory start->root. A start need not be a whole model: without model_index.json,
/// only the parts that lie there.
absl::Status ReadStartDirectory(ModelDirectory* start) {
  absl::StatusOr<ModelDirectory> whole = ModelDirectory::Read(start->root);
  std::error_code error;
  if (whole.ok()) {
    *start = *std::move(whole);
    return absl::OkStatus();
  }
  if (!absl::IsNotFound(whole.status()) ||
      std::filesystem::exists(start->root + "/model_index.json", error))
    return whole.status();
  const std::string folder = start->root + "/unet", file = folder + "/config.json";
  if (std::filesystem::exists(file, error)) {
    DENOISED_ASSIGN_OR_RETURN(nlohmann::json json, ReadJsonFile(file));
    start->components["unet"] = {
        .directory = folder, .config_file = file, .config = std::move(json)};
  }
  return ReadStartScheduler(start);
}

/// The parts of a start that a run with --pipeline loads, from where it loads their weights:
/// model_index.json, if there is one, may name others.
absl::Status CheckStartParts(const PipelineParts& ours, Stage stage, const std::string& root) {
  const auto check = [&](const char* part, const auto& parse) -> absl::Status {
    const std::string file = fmt::format("{}/{}/config.json", root, part);
    std::error_code error;
    if (!std::filesystem::exists(file, error))
      return NotFound("--init-from: there is no {}; give a directory of a StableDiffusionPipeline",
                      file);
    DENOISED_ASSIGN_OR_RETURN(const nlohmann::json config, ReadJsonFile(file));
    return CheckStartConfig(ours.config(part), config,
                            ours.directory.components.at(part).config_file,
                            "or choose another start", parse);
  };
  if (stage == Stage::kAutoencoder)
    return check("vae", [](nlohmann::json json) -> std::optional<AutoencoderKLConfig> {
      // How latents are scaled, which the stage measures anew.
      for (const char* const field :
           {"scaling_factor", "shift_factor", "latents_mean", "latents_std"})
        json.erase(field);
      auto parsed = AutoencoderKLConfig::Parse(json, "");
      if (!parsed.ok()) return std::nullopt;
      return *std::move(parsed);
    });
  DENOISED_RETURN_IF_ERROR(
      check("unet", [](const nlohmann::json& json) -> std::optional<UNet2DConditionConfig> {
        auto parsed = UNet2DConditionConfig::Parse(json, "");
        if (!parsed.ok()) return std::nullopt;
        parsed->sample_height = parsed->sample_width = 0;  // of the pictures
        return *std::move(parsed);
      }));
  const std::string& text_class = ours.directory.components.at("text_encoder").class_name;
  return check("text_encoder", [&](const nlohmann::json& json) -> std::optional<ClipTextConfig> {
    auto parsed = ClipTextConfig::Parse(json, "", text_class);
    if (!parsed.ok()) return std::nullopt;
    parsed->eos_token_id = 0, parsed->projection_dim = 1;  // of the pooled state, which none reads
    return *std::move(parsed);
  });
}

/// Takes what no flag chooses. It is then among the flags, so that a resume has it, too.
void TakeNoise(const CLI::App& app, const ObjectiveOptions& noise, RunConfig* config) {
  ObjectiveOptions& own = config->trainer.objective;
  if (app.count("--objective") == 0) {
    own.kind = noise.kind;
    config->flags["objective"] = training::Name(own.kind);
  }
  if (own.kind != noise.kind && !(training::IsDdpm(own.kind) && training::IsDdpm(noise.kind)))
    return;
  const auto take = [&](const std::string& name, auto ObjectiveOptions::*field) {
    if (app.count("--" + name) > 0 || own.*field == noise.*field) return;
    own.*field = noise.*field;
    config->flags[name] = fmt::to_string(own.*field);
  };
  take("timesteps", &ObjectiveOptions::timesteps);
  take("beta-schedule", &ObjectiveOptions::beta_schedule);
  take("beta-start", &ObjectiveOptions::beta_start);
  take("beta-end", &ObjectiveOptions::beta_end);
  take("sigma-data", &ObjectiveOptions::sigma_data);
  take("sigma-min", &ObjectiveOptions::score_sigma_min);
  take("sigma-max", &ObjectiveOptions::score_sigma_max);
  own.sigma_min = noise.sigma_min;  // of EDM's sampler
  own.sigma_max = noise.sigma_max;
}

/// What the directory of --init-from says of its weights. The noise that no flag chooses is what
/// its scheduler says.
absl::Status ReadStart(const CLI::App& app, RunConfig* config) {
  if (config->init_from.empty()) return absl::OkStatus();
  ModelDirectory start;
  start.root = config->init_from;
  if (config->pipeline) {
    DENOISED_RETURN_IF_ERROR(CheckStartParts(*config->pipeline, config->stage, start.root));
    if (config->stage == Stage::kAutoencoder) return absl::OkStatus();  // without noise
    DENOISED_RETURN_IF_ERROR(Annotate(ReadStartScheduler(&start), "--init-from"));
  } else {
    DENOISED_RETURN_IF_ERROR(Annotate(ReadStartDirectory(&start), "--init-from"));
  }
  if (start.components.contains("unet")) {
    DENOISED_RETURN_IF_ERROR(CheckStartConfig(
        config->network_json, start.unet().config, "this --network", "or leave --network out",
        [](const nlohmann::json& json) -> std::optional<UNet2DConfig> {
          auto parsed = UNet2DConfig::Parse(json, "");
          if (!parsed.ok()) return std::nullopt;
          parsed->sample_height = parsed->sample_width = 0;
          return *std::move(parsed);
        }));
  }
  if (!start.scheduler_config) return absl::OkStatus();
  config->start_scheduler_file = start.scheduler_config_file;
  const absl::StatusOr<ObjectiveOptions> objective =
      training::ObjectiveOfScheduler(*start.scheduler_config, start.scheduler_config_file);
  const bool chosen = config->pipeline || app.count("--objective") > 0;
  if (!objective.ok()) {
    config->start_unused = std::string(objective.status().message());
    if (chosen) return absl::OkStatus();
    return InvalidArgument("--init-from: {}; or choose an --objective, with the noise of the flags",
                           config->start_unused);
  }
  config->start = *objective;
  if (!config->pipeline) TakeNoise(app, *objective, config);
  return absl::OkStatus();
}

/// `noise` with what the settings of a checkpoint say.
ObjectiveOptions NoiseOf(const nlohmann::json& configuration, ObjectiveOptions noise) {
  if (!configuration.is_object()) return noise;
  const nlohmann::json saved = AsFlags(configuration);
  const auto read = [&](const char* flag, auto* number) {
    const nlohmann::json value = saved.value(flag, nlohmann::json());
    if (value.is_number()) value.get_to(*number);
  };
  read("--timesteps", &noise.timesteps);
  read("--beta-start", &noise.beta_start);
  read("--beta-end", &noise.beta_end);
  read("--sigma-data", &noise.sigma_data);
  read("--sigma-min", &noise.score_sigma_min);
  read("--sigma-max", &noise.score_sigma_max);
  const nlohmann::json kind = saved.value("--objective", nlohmann::json()),
                       betas = saved.value("--beta-schedule", nlohmann::json());
  if (kind.is_string())
    noise.kind = training::ObjectiveFromName(kind.get<std::string>()).value_or(noise.kind);
  if (betas.is_string()) betas.get_to(noise.beta_schedule);
  return noise;
}

/// What a run took from --init-from is in its checkpoint, whose run.json is `run`: the directory
/// may be gone, or be another model by now.
absl::Status ResumeStart(const CLI::App& app, const nlohmann::json& run, RunConfig* config) {
  if (config->pipeline) return absl::OkStatus();
  ObjectiveOptions& own = config->trainer.objective;
  const std::string& from = config->init_from;
  if (!from.empty())
    TakeNoise(app, NoiseOf(run.value("configuration", nlohmann::json()), own), config);
  if (own.kind != ObjectiveOptions::Kind::kEdm) return absl::OkStatus();
  const nlohmann::json sampler = run.value("sampler", nlohmann::json());
  if (sampler.is_object()) {
    own.sigma_min = sampler.value("sigma_min", own.sigma_min);
    own.sigma_max = sampler.value("sigma_max", own.sigma_max);
    return absl::OkStatus();
  }
  if (from.empty()) return absl::OkStatus();
  // Checkpoints of earlier versions do not say it.
  ModelDirectory start;
  start.root = from;
  std::error_code error;
  absl::Status read = std::filesystem::is_directory(from, error)
                          ? ReadStartDirectory(&start)
                          : NotFound("{}: there is no such directory", from);
  if (read.ok() && start.scheduler_config) {
    const absl::StatusOr<ObjectiveOptions> noise =
        training::ObjectiveOfScheduler(*start.scheduler_config, start.scheduler_config_file);
    if (noise.ok() && noise->kind == own.kind) {
      own.sigma_min = noise->sigma_min;
      own.sigma_max = noise->sigma_max;
    }
    read = noise.status();
  }
  config->start_lost = std::string(read.message());
  return absl::OkStatus();
}

/// The type of a number whose range is checked with other settings, for --help: these are the
/// ranges of TrainerOptions::Check and Objective::Make.
std::string In(double low, double high) { return fmt::format("FLOAT:[{} - {}]", low, high); }
std::string WholeIn(int64_t low, int64_t high) { return fmt::format("INT:[{} - {}]", low, high); }
constexpr char kAtLeastOne[] = "INT:[1 - inf)", kCount[] = "INT:[0 - inf)";
constexpr char kNotNegative[] = "FLOAT:[0 - inf)", kPositive[] = "FLOAT:(0 - inf)",
               kFraction[] = "FLOAT:(0 - 1)";

/// What the flags say, before Finish() resolves and checks it.
struct Flags {
  RunConfig config;
  std::string config_file, network, pipeline, objective = "edm", schedule = "constant";
  std::string stage = "diffusion", device = "auto", dtype, exchange = "auto", model_dtype = "fp32";
  std::string norms = "auto";
  std::vector<std::string> averages;
  double min_snr = 0, cap_snr = 0, dropout = 0, kl_weight = 1e-4, edge_weight = 0.5;
  bool flow_uniform = false, freeze_text = false;
  nlohmann::json run;  // run.json of the checkpoint to resume, or null

  bool resumes() const {
    return !config.resume.empty() && (config.resume != "latest" || !config.output.empty());
  }
  /// Whether a checkpoint says what no flag gives.
  bool ask_checkpoint() const { return config_file.empty() && resumes(); }
};

void AddRunFlags(CLI::App& app, Flags* flags) {
  app.add_option("--config", flags->config_file,
                 "JSON object whose fields are the flags below, without --. Flags on the command "
                 "line take precedence");
  app.add_flag("--dry-run", flags->config.dry_run,
               "Print memory, steps and hours, without training");
}

void AddDataFlags(CLI::App& app, Flags* flags) {
  RunConfig& config = flags->config;
  training::TrainerOptions& t = flags->config.trainer;
  app.option_defaults()->group("Data");
  app.add_option("--data", config.data,
                 "Folder of PNG, JPEG and WebP files, EDM's ZIP, IDX (MNIST), .npy or .npz");
  app.add_option("--labels", config.labels, "File of labels, for IDX and .npy");
  app.add_option("--canvas", config.canvas,
                 "Edge of the stored pictures. If larger than sample_size, pictures are randomly "
                 "cropped")
      ->type_name(WholeIn(1, 16384))
      ->default_str("");
  app.add_flag("--pad", config.pad,
               "Add a black border to smaller pictures instead of scaling them up");
  app.add_flag("--flip", t.flip, "Mirror half of the pictures. Not with --augment, which does so");
  app.add_option("--augment", t.augment,
                 "Probability of each EDM augmentation; the augmentation is an input of the "
                 "network. 0.12 in the paper; 0: none")
      ->type_name(In(0, 1));
  app.add_flag("--skip-bad-files", config.skip_bad_files,
               "Report and skip bad files, and in stage diffusion pictures without a caption");
  app.add_option("--data-memory", config.data_memory,
                 "Limit in MiB of decoded pictures in memory; larger data sets are kept in a file "
                 "in --output and read ahead. 0: half of the free memory, divided by the ranks of "
                 "this host")
      ->check(flags::Between(int64_t{0}, int64_t{1} << 40));
  app.add_option("--prefetch-threads", t.prefetch_threads,
                 "Threads that prepare the pictures of the next step. 0: 2 if pictures are on disk "
                 "or augmented, else none")
      ->type_name(WholeIn(0, 1024));
}

void AddModelFlags(CLI::App& app, Flags* flags) {
  RunConfig& config = flags->config;
  app.option_defaults()->group("Model");
  app.add_option("--network", flags->network, "config.json of a UNet2DModel");
  app.add_option("--pipeline", flags->pipeline,
                 "Instead of --network: a StableDiffusionPipeline directory with the configs, the "
                 "tokenizer and the weights that are not trained");
  app.add_option("--stage", flags->stage,
                 "With --pipeline: \"vae\" trains the autoencoder, \"diffusion\" the UNet and text "
                 "encoder");
  app.add_flag("--freeze-text", flags->freeze_text,
               "Stage diffusion: do not train the text encoder");
  app.add_option("--init-from", config.init_from,
                 "Start from the weights of this diffusers directory. Settings of noise that no "
                 "flag gives are those of its scheduler_config.json");
  app.add_option("--dropout", flags->dropout,
                 "Dropout of the resnets. Default: the network's config")
      ->type_name(In(0, 0.999))
      ->default_str("");
  app.add_option("--model-dtype", flags->model_dtype, "dtype of the written model: fp32 or fp16");
  app.add_option("--class-name", config.class_names,
                 "Name of a class; repeat for all classes, in the order of the labels. Default: "
                 "names of folders")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false);
  app.add_option("--default-steps", config.default_steps,
                 "Sampling steps that the server uses by default; 0: depends on the objective")
      ->check(flags::Between(0, 1000));
  app.add_option("--default-guidance-scale", config.default_guidance_scale,
                 "Guidance scale that the server uses by default; above 1, a --network needs "
                 "--class-dropout. Default: none")
      ->check(flags::Between(0.0, 100.0));
}

void AddObjectiveFlags(CLI::App& app, Flags* flags) {
  training::TrainerOptions& t = flags->config.trainer;
  app.option_defaults()->group("Objective");
  app.add_option(
      "--objective", flags->objective,
      "What the network learns to predict: edm (Karras et al. 2022), DDPM's epsilon, v or "
      "x0, flow (flow matching), or score (Song et al. 2021; for NCSN++). Default with "
      "--init-from: as its scheduler_config.json says");
  app.add_option("--class-dropout,--caption-dropout", t.class_dropout,
                 "Fraction of pictures trained with the null class, or with an empty caption, for "
                 "guidance")
      ->type_name(In(0, 1));
  app.add_option("--null-class", t.null_class,
                 "Label of the null class. Default: the last of num_class_embeds")
      ->default_str("");
  app.add_option("--sigma-data", t.objective.sigma_data, "EDM: standard deviation of the pictures")
      ->type_name(In(1e-3, 1e3));
  app.add_option("--log-sigma-mean", t.objective.log_sigma_mean, "EDM: mean of ln sigma")
      ->type_name(In(-10, 10));
  app.add_option("--log-sigma-deviation", t.objective.log_sigma_deviation,
                 "EDM: standard deviation of ln sigma")
      ->type_name(In(1e-3, 10));
  app.add_option("--timesteps", t.objective.timesteps, "DDPM and flow: number of noise levels")
      ->type_name(WholeIn(1, training::kMaxTimesteps));
  app.add_option("--beta-schedule", t.objective.beta_schedule,
                 "DDPM: linear, scaled_linear or squaredcos_cap_v2");
  app.add_option("--beta-start", t.objective.beta_start, "DDPM: first beta, at most --beta-end")
      ->type_name(kFraction);
  app.add_option("--beta-end", t.objective.beta_end, "DDPM: last beta")->type_name(kFraction);
  app.add_option("--min-snr", flags->min_snr, "DDPM: gamma of min-SNR weighting; 0: none")
      ->type_name(kNotNegative);
  app.add_option("--cap-snr", flags->cap_snr, "Objective v: cap the loss weight SNR + 1; 0: no cap")
      ->type_name(kNotNegative);
  app.add_option("--variance-weight", t.objective.variance_weight,
                 "DDPM with a learned variance (out_channels twice in_channels): weight of L_vlb")
      ->type_name(kPositive);
  app.add_flag("--flow-uniform", flags->flow_uniform,
               "Objective flow: uniform noise levels instead of logit-normal");
  app.add_option("--sigma-min", t.objective.score_sigma_min, "Score: least noise level")
      ->type_name(kPositive);
  app.add_option("--sigma-max", t.objective.score_sigma_max,
                 "Score: largest noise level; the paper's is the largest distance of two pictures "
                 "in [0, 1]: 50 at 32x32, 348 at 256x256, 1348 at 1024x1024")
      ->type_name(kPositive);
  app.add_option("--kl-weight", flags->kl_weight, "Stage vae: weight of the KL divergence")
      ->type_name(kNotNegative);
  app.add_option("--edge-weight", flags->edge_weight,
                 "Stage vae: weight of the edge loss (differences of neighbouring pixels)")
      ->type_name(kNotNegative);
}

void AddOptimizerFlags(CLI::App& app, Flags* flags) {
  RunConfig& config = flags->config;
  training::TrainerOptions& t = flags->config.trainer;
  app.option_defaults()->group("Steps and optimizer");
  app.add_option("--steps", t.steps, "Number of steps")->type_name(WholeIn(1, 4000000000));
  app.add_option("--batch", t.batch, "Pictures per step, over all ranks")
      ->type_name(WholeIn(1, 1 << 24));
  app.add_option("--accumulation", t.accumulation, "Micro-batches per step; more need less memory")
      ->type_name(WholeIn(1, 1 << 24));
  app.add_option(
      "--chunks", t.chunks,
      "Parts of a batch whose gradients are added as a tree; a power of two that divides "
      "--batch. The result "
      "depends on this number, but not on ranks, cores or accumulation");
  app.add_option("--seed", t.seed, "Seed of all random numbers");
  app.add_option("--learning-rate", t.rate.rate, "Learning rate of AdamW")->type_name(In(0, 1e3));
  app.add_option("--schedule", flags->schedule,
                 "Learning rate after the warm-up: constant, cosine or inverse-sqrt");
  app.add_option("--warmup-steps", t.rate.warmup_steps,
                 "Steps in which the learning rate rises from 0; at most --steps")
      ->type_name(kCount);
  app.add_option("--reference-steps", t.rate.reference_steps,
                 "Schedule inverse-sqrt: steps before the rate falls")
      ->type_name(WholeIn(1, 4000000000));
  app.add_option("--beta1", t.beta1, "beta1 of AdamW")->type_name(In(0, 0.9999999));
  app.add_option("--beta2", t.beta2, "beta2 of AdamW")->type_name(In(0, 0.9999999));
  app.add_option("--adam-eps", t.eps, "eps of AdamW")->type_name(In(1e-16, 1));
  app.add_option("--weight-decay", t.weight_decay, "Weight decay of AdamW")->type_name(In(0, 1e3));
  app.add_option("--clip", t.clip, "Clip the gradient to this global norm; 0: no clipping")
      ->type_name(In(0, 1e9));
  app.add_option("--average", flags->averages,
                 "Moving average of the weights: warmup:0.999 (its decay rises), decay:0.999 or "
                 "power:0.05 (EDM2). Decays are below 1, widths below 0.28. Up to eight; the first "
                 "is written to model/. Default: warmup:0.999")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false);
  app.add_option("--max-skipped", config.max_skipped,
                 "End the run after this many consecutive steps without a finite gradient")
      ->type_name(kAtLeastOne);
}

void AddOutputFlags(CLI::App& app, Flags* flags) {
  RunConfig& config = flags->config;
  app.option_defaults()->group("Output");
  app.add_option("--output", config.output, "Folder for checkpoints, logs and the model");
  app.add_option(
      "--resume", config.resume,
      "Resume from the latest checkpoint in --output (\"latest\"; starts anew if none) "
      "or from this folder. Without --config, flags that are not given are as they were");
  app.add_option("--checkpoint-steps", config.checkpoint_steps,
                 "Steps between checkpoints; each grid has one before it")
      ->type_name(kAtLeastOne);
  app.add_option("--keep", config.keep, "Number of checkpoints to keep, with those of grids")
      ->type_name(kAtLeastOne);
  app.add_option("--sample-steps", config.sample_steps, "Steps between sample grids; 0: no grids")
      ->type_name(kCount);
  app.add_option("--sample-count", config.sample_count, "Pictures per grid")
      ->type_name(WholeIn(1, 256));
  app.add_option("--prompt", config.prompts,
                 "With --pipeline: prompt for the sample grids. May be repeated. Default: captions")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false);
  app.add_option("--log-steps", config.log_steps, "Steps between log lines")
      ->type_name(kAtLeastOne);
  app.add_option("--metrics-listen", config.metrics_listen,
                 "Serve Prometheus /metrics on host:port; \"\": do not")
      ->default_str("");
  app.add_option("--stop-exit-code", config.stop_exit_code,
                 "Exit code after a stop by a signal before the last step, of all ranks. 75 "
                 "(EX_TEMPFAIL) has a scheduler that restarts failures go on with the run")
      ->check(flags::Between(0, 125));
}

void AddDeviceFlags(CLI::App& app, Flags* flags) {
  RunConfig& config = flags->config;
  app.option_defaults()->group("Device and ranks");
  app.add_option("--device", flags->device,
                 "cpu, cuda, or auto: CUDA if this build supports the GPU, else the CPU");
  app.add_option("--dtype", flags->dtype,
                 "CUDA: bf16, or fp32 for debugging. The CPU computes in fp32")
      ->default_str("");
  app.add_option("--norms", flags->norms,
                 "Outputs of norms, for the backward pass: keep, recompute (less memory, a little "
                 "slower, the same bits), or auto: recompute from 100 million parameters on");
  app.add_option("--autotune-cache", config.cuda_options.autotune_cache,
                 "CUDA: folder in which measurements of kernels are kept");
  app.add_option("--exchange", flags->exchange,
                 "How ranks exchange gradients: tcp, nccl, or auto: NCCL where its library is and "
                 "every rank has a GPU of its own, else TCP");
  app.add_option("--rank-seconds", config.rank_seconds,
                 "Seconds that ranks wait for each other, at the start and in a step. Reading and "
                 "encoding pictures may take longer")
      ->check(flags::Between(1, 86400));
}

/// However it is written: 0.02 or 2e-2.
bool HasDefault(const CLI::Option& option) {
  if (option.get_expected_min() == 0) return !option.as<bool>();
  const auto given = option.as<std::string>(), standard = option.get_default_str();
  double number = 0, standard_number = 0;
  if (CLI::detail::lexical_cast(given, number) &&
      CLI::detail::lexical_cast(standard, standard_number))
    return number == standard_number;
  return given == standard;
}

/// Refuses settings of another objective, schedule or stage, which would have no effect.
absl::Status CheckUsed(const CLI::App& app, const Flags& flags) {
  using Kind = ObjectiveOptions::Kind;
  const RunConfig& config = flags.config;
  const ObjectiveOptions& objective = config.trainer.objective;
  const bool pipeline = config.pipeline.has_value();
  const bool vae = pipeline && config.stage == Stage::kAutoencoder;
  const bool edm = !vae && objective.kind == Kind::kEdm;
  const bool flow = !vae && objective.kind == Kind::kFlow;
  const bool ddpm = !vae && training::IsDdpm(objective.kind);
  const bool score = !vae && objective.kind == Kind::kScore;
  const std::string stage = vae ? "stage vae" : pipeline ? "stage diffusion" : "no --pipeline";
  const std::string kind = vae ? stage : fmt::format("the objective {}", Name(objective.kind));
  const struct {
    const char* flag;
    bool used;
    const char* needs;
    std::string has;  // this run
  } settings[] = {
      {"--sigma-data", edm, "the objective edm", kind},
      {"--log-sigma-mean", edm, "the objective edm", kind},
      {"--log-sigma-deviation", edm, "the objective edm", kind},
      {"--sigma-min", score, "the objective score", kind},
      {"--sigma-max", score, "the objective score", kind},
      {"--timesteps", ddpm || flow, "the objective epsilon, v, x0 or flow", kind},
      {"--beta-schedule", ddpm, "the objective epsilon, v or x0", kind},
      {"--beta-start", ddpm, "the objective epsilon, v or x0", kind},
      {"--beta-end", ddpm, "the objective epsilon, v or x0", kind},
      {"--min-snr", ddpm, "the objective epsilon, v or x0", kind},
      {"--cap-snr", ddpm && objective.kind == Kind::kV, "the objective v", kind},
      {"--variance-weight", ddpm && objective.learned_variance,
       "the objective epsilon, v or x0 and a network with twice the outputs, for the variance",
       kind},
      {"--flow-uniform", flow, "the objective flow", kind},
      {"--stage", pipeline, "a --pipeline", stage},
      {"--prefetch-threads", vae || !pipeline, "stage vae or a --network", stage},
      {"--kl-weight", vae, "stage vae", stage},
      {"--edge-weight", vae, "stage vae", stage},
      {"--freeze-text", pipeline && !vae, "stage diffusion", stage},
      {"--prompt", pipeline && !vae, "stage diffusion", stage},
      {"--reference-steps", config.trainer.rate.kind == RateSchedule::Kind::kInverseSqrt,
       "--schedule inverse-sqrt", fmt::format("--schedule {}", flags.schedule)},
      {"--null-class", !pipeline && config.trainer.class_dropout > 0,
       "a --network with classes and --class-dropout",
       pipeline ? "a --pipeline" : "--class-dropout 0"},
      // The server refuses a model with such a scale and no null class.
      {"--default-guidance-scale",
       pipeline || config.trainer.class_dropout > 0 ||
           config.default_guidance_scale.value_or(1) <= 1,
       "a --pipeline, or a --network with classes and --class-dropout", "--class-dropout 0"},
  };
  for (const auto& [flag, used, needs, has] : settings) {
    const CLI::Option& option = *app[flag];
    if (used || option.count() == 0 || HasDefault(option)) continue;
    return InvalidArgument("{} needs {}, but this run has {}; leave it out", flag, needs, has);
  }
  return absl::OkStatus();
}

/// Resolves what depends on several flags, and checks it.
absl::Status Finish(const CLI::App& app, Flags& flags) {
  RunConfig& config = flags.config;
  training::TrainerOptions& t = config.trainer;
  if (flags.device != "auto" && flags.device != "cpu" && flags.device != "cuda")
    return InvalidArgument("--device is \"{}\"; use auto, cpu or cuda", flags.device);
  if (!flags.dtype.empty() && flags.dtype != "fp32" && flags.dtype != "bf16")
    return InvalidArgument("--dtype is \"{}\"; use bf16 or fp32", flags.dtype);
  config.cuda_options.fp32 = flags.dtype == "fp32";
  if (flags.norms == "keep" || flags.norms == "recompute") {
    t.recompute_norms = flags.norms == "recompute";
  } else if (flags.norms != "auto") {
    return InvalidArgument("--norms is \"{}\"; use auto, keep or recompute", flags.norms);
  }
  if (flags.exchange == "tcp") {
    config.exchange = training::ExchangeKind::kTcp;
  } else if (flags.exchange == "nccl") {
    config.exchange = training::ExchangeKind::kNccl;
  } else if (flags.exchange != "auto") {
    return InvalidArgument("--exchange is \"{}\"; use auto, tcp or nccl", flags.exchange);
  }
  if (flags.model_dtype != "fp32" && flags.model_dtype != "fp16")
    return InvalidArgument("--model-dtype is \"{}\"; use fp32 or fp16", flags.model_dtype);
  config.half = flags.model_dtype == "fp16";
  if (config.output.empty() && !config.dry_run)
    return InvalidArgument("--output is missing: give a folder for checkpoints and the model");
  if (config.data.empty())
    return InvalidArgument("--data is missing{}: give a folder of pictures, or a file",
                           flags.ask_checkpoint() ? ", and no checkpoint says it" : "");
  const auto kind = training::ObjectiveFromName(flags.objective);
  if (!kind)
    return InvalidArgument("--objective is \"{}\"; use edm, epsilon, v, x0, flow or score",
                           flags.objective);
  t.objective.kind = *kind;
  if (flags.min_snr != 0) t.objective.min_snr = flags.min_snr;
  if (flags.cap_snr != 0) t.objective.cap_snr = flags.cap_snr;
  t.objective.logit_normal = !flags.flow_uniform;
  const auto* const schedule = std::ranges::find(kSchedules, flags.schedule);
  if (schedule == std::end(kSchedules))
    return InvalidArgument("--schedule is \"{}\"; use constant, cosine or inverse-sqrt",
                           flags.schedule);
  t.rate.kind = static_cast<RateSchedule::Kind>(schedule - std::begin(kSchedules));
  if (!flags.averages.empty()) t.averages.clear();
  for (const std::string& text : flags.averages) {
    DENOISED_ASSIGN_OR_RETURN(const AverageOptions average, ParseAverage(text));
    for (const AverageOptions& other : t.averages)
      if (other.Name() == average.Name())
        return InvalidArgument(
            "--average: {} is given twice, and both would be written to one folder; give it once",
            text);
    t.averages.push_back(average);
  }
  for (const auto& [flag, value] :
       {std::pair{"--checkpoint-steps", config.checkpoint_steps},
        std::pair{"--keep", int64_t{config.keep}}, std::pair{"--log-steps", config.log_steps},
        std::pair{"--sample-count", int64_t{config.sample_count}},
        std::pair{"--max-skipped", int64_t{config.max_skipped}}})
    if (value < 1) return InvalidArgument("{} is {}; use at least 1", flag, value);
  if (config.sample_steps < 0)
    return InvalidArgument("--sample-steps is {}; use 0 or more", config.sample_steps);
  if (config.sample_count > 256)
    return InvalidArgument("--sample-count is {}; use at most 256", config.sample_count);
  for (const std::string& prompt : config.prompts)
    if (const absl::Status status = DecodeUtf8(prompt).status(); !status.ok())
      return InvalidArgument("--prompt \"{}\": {}", ReplaceInvalidUtf8(prompt),
                             std::string(status.message()));
  for (const std::string& name : config.class_names)
    DENOISED_RETURN_IF_ERROR(CheckClassName(name, "--class-name", "give another name"));
  if (!config.metrics_listen.empty())
    DENOISED_RETURN_IF_ERROR(CheckAddress("--metrics-listen", config.metrics_listen, 9092));
  DENOISED_RETURN_IF_ERROR(ReadEnvironment(&config));
  if (flags.device != "cpu") {
    const absl::Status cuda = training::CheckCuda(config.cuda_options);
    if (flags.device == "cuda") {
      // What this build or machine does not have will not be there the next time either.
      if (absl::IsFailedPrecondition(cuda))
        return InvalidArgument("--device: {}", std::string(cuda.message()));
      DENOISED_RETURN_IF_ERROR(Annotate(cuda, "--device"));
    }
    config.cuda = cuda.ok();
  }
  if (flags.dtype == "bf16" && !config.cuda)
    return InvalidArgument(
        "--dtype is \"bf16\", but the CPU trains in fp32; use a machine with a GPU and --device "
        "cuda");
  if (flags.pipeline.empty()) {
    DENOISED_RETURN_IF_ERROR(ReadNetwork(flags.network, flags.run, &config));
  } else {
    if (!flags.network.empty() || !config.network_json.is_null())
      return InvalidArgument("give either --network or --pipeline");
    if (!config.class_names.empty())
      return InvalidArgument("--class-name cannot be given with --pipeline, which has no classes");
    for (const char* const flag : {"--objective", "--timesteps", "--beta-schedule", "--beta-start",
                                   "--beta-end", "--flow-uniform"})
      if (app.count(flag) > 0)
        return InvalidArgument(
            "{} cannot be given with --pipeline, whose scheduler_config.json says it", flag);
    DENOISED_RETURN_IF_ERROR(ReadPipeline(flags.pipeline, flags.stage, flags.freeze_text,
                                          flags.kl_weight, flags.edge_weight, &config));
    if (config.canvas != 0 && config.stage == Stage::kDiffusion)
      return InvalidArgument(
          "--canvas is {}, but latents are computed once: stage diffusion cannot crop at random",
          config.canvas);
  }
  DENOISED_RETURN_IF_ERROR(flags.run.is_null() ? ReadStart(app, &config)
                                               : ResumeStart(app, flags.run, &config));
  const Shape picture = config.picture();
  if (picture[0] == 0)
    return InvalidArgument("sample_size is missing or 0 in the network's config; set it");
  const auto least = static_cast<int>(std::max(picture[0], picture[1]));
  if (config.canvas != 0 && (config.canvas < least || config.canvas > 16384))
    return InvalidArgument("--canvas is {}; use {} (sample_size) to 16384", config.canvas, least);
  const auto* const pixels = std::get_if<UNet2DConfig>(&config.network);
  t.objective.learned_variance =
      pixels != nullptr && pixels->out_channels == 2 * pixels->in_channels;
  const bool classes = pixels != nullptr && pixels->condition == ClassCondition::kLabel;
  if (classes && t.class_dropout > 0) {
    const int last = pixels->num_class_embeds - 1;
    if (app.count("--null-class") == 0) t.null_class = last;
    if (t.null_class < 0 || t.null_class > last)
      return InvalidArgument(
          "--null-class is {}; use 0 to {}, the last of num_class_embeds, and the class of no "
          "picture, or leave it out",
          t.null_class, last);
  }
  const nlohmann::json in_network = config.network_json.value("dropout", nlohmann::json());
  const double of_network = in_network.is_number() ? in_network.get<double>() : 0;
  if (!(in_network.is_null() || in_network.is_number()) || !(of_network >= 0 && of_network < 1))
    return InvalidArgument(
        "the network's config: field 'dropout' is {}; use a number from 0 to below 1",
        in_network.dump());
  t.dropout = app.count("--dropout") > 0 ? flags.dropout : of_network;
  DENOISED_RETURN_IF_ERROR(CheckUsed(app, flags));
  DENOISED_RETURN_IF_ERROR(t.Check(config.ranks));
  if (t.rate.warmup_steps > t.steps)
    return InvalidArgument(
        "--warmup-steps is {}, but --steps is {}, so the rate would never reach --learning-rate; "
        "use at most {}",
        t.rate.warmup_steps, t.steps, t.steps);
  DENOISED_RETURN_IF_ERROR(training::Objective::Make(t.objective).status());
  using Kind = ObjectiveOptions::Kind;
  if ((training::IsDdpm(t.objective.kind) || t.objective.kind == Kind::kFlow) &&
      config.default_steps > t.objective.timesteps)
    return InvalidArgument("--default-steps is {}, but there are {} timesteps; use at most as many",
                           config.default_steps, t.objective.timesteps);
  return absl::OkStatus();
}

}  // namespace

// The server takes any text: models of others may have other names.
absl::Status CheckClassName(const std::string& name, const std::string& where,
                            const std::string& remedy) {
  std::string why;
  if (const absl::Status text = DecodeUtf8(name).status(); !text.ok()) {
    why = std::string(text.message());
  } else if (name.find_first_not_of(" \t\r\n") == std::string::npos) {
    why = "it is blank, so no request could give it";
  } else {
    return absl::OkStatus();
  }
  return InvalidArgument("{}: the name of class \"{}\" cannot be used: {}; {}",
                         ReplaceInvalidUtf8(where), ReplaceInvalidUtf8(name), why, remedy);
}

Shape RunConfig::picture() const {
  if (pipeline) return {pipeline->height(), pipeline->width(), pipeline->vae.vae.in_channels};
  return training::SampleShape(network);
}

nlohmann::json RunConfig::Fingerprint() const {
  const training::TrainerOptions& t = trainer;
  nlohmann::json averages = nlohmann::json::array();
  for (const AverageOptions& average : t.averages) averages.push_back(average.Name());
  nlohmann::json print = {
      {"network", network_json},
      {"device", !cuda               ? "cpu"
                 : cuda_options.fp32 ? "cuda, fp32"
                                     : "cuda, bf16"},
      {"batch", t.batch},
      {"chunks", t.chunks},
      {"seed", t.seed},
      {"objective", training::Name(t.objective.kind)},
      {"objective-numbers",
       {t.objective.sigma_data, t.objective.log_sigma_mean, t.objective.log_sigma_deviation,
        t.objective.timesteps, t.objective.beta_start, t.objective.beta_end,
        t.objective.min_snr.value_or(0), t.objective.logit_normal}},
      {"beta-schedule", t.objective.beta_schedule},
      {"learning-rate", t.rate.rate},
      {"schedule", static_cast<int>(t.rate.kind)},
      {"warmup-steps", t.rate.warmup_steps},
      {"adam", {t.beta1, t.beta2, t.eps}},
      {"weight-decay", t.weight_decay},
      {"clip", t.clip},
      {"average", averages},
      {"dropout", t.dropout},
      {"class-dropout", t.class_dropout},
      {"null-class", t.null_class},
      {"flip", t.flip},
      {"canvas", canvas},
      {"pad", pad}};
  if (t.augment > 0) print["augment"] = t.augment;
  if (t.objective.learned_variance) print["variance-weight"] = t.objective.variance_weight;
  if (t.objective.kind == ObjectiveOptions::Kind::kScore)
    print["sigmas"] = {t.objective.score_sigma_min, t.objective.score_sigma_max};
  if (t.objective.cap_snr) print["cap-snr"] = *t.objective.cap_snr;
  if (t.rate.kind == RateSchedule::Kind::kCosine) print["steps"] = t.steps;
  if (t.rate.kind == RateSchedule::Kind::kInverseSqrt)
    print["reference-steps"] = t.rate.reference_steps;
  return print;
}

nlohmann::json AsFlags(const nlohmann::json& fingerprint) {
  static const std::map<std::string, std::vector<std::string>> kLists = {
      {"objective-numbers",
       {"sigma-data", "log-sigma-mean", "log-sigma-deviation", "timesteps", "beta-start",
        "beta-end", "min-snr", "flow-uniform"}},
      {"adam", {"beta1", "beta2", "adam-eps"}},
      {"sigmas", {"sigma-min", "sigma-max"}},
      {"loss", {"kl-weight", "edge-weight"}}};
  nlohmann::json settings = fingerprint, flags;
  nlohmann::json network = nlohmann::json::object();
  if (settings.contains("network") && settings["network"].is_object())
    network = settings["network"];
  settings.erase("network");
  const bool pipeline = network.contains("stage");
  for (const auto& item : network.items()) {
    if (!pipeline) {
      flags[item.key() + " of --network"] = item.value();
    } else if (item.value().is_object()) {  // a part's config
      for (const auto& field : item.value().items())
        flags[fmt::format("{} of --pipeline's {}", field.key(), item.key())] = field.value();
    } else {
      settings[item.key()] = item.value();
    }
  }
  for (const auto& [list, names] : kLists) {
    const nlohmann::json values = settings.value(list, nlohmann::json());
    if (values.size() != names.size()) continue;  // of another version
    settings.erase(list);
    for (size_t i = 0; i < names.size(); ++i) settings[names[i]] = values[i];
  }
  if (const nlohmann::json data = settings.value("data", nlohmann::json()); data.is_object()) {
    settings.erase("data");
    flags["the number of pictures in --data"] = data.value("pictures", nlohmann::json());
    flags["the checksum of --data"] = data.value("crc32", nlohmann::json());
  }
  for (const auto& item : settings.items()) {
    const std::string& name = item.key();
    nlohmann::json& value = item.value();
    std::string flag = "--" + name;
    if (pipeline && (name == "objective" || name == "timesteps" || name.starts_with("beta-")))
      flag = name + " of --pipeline's scheduler";
    if (pipeline && name == "class-dropout") flag = "--caption-dropout";
    if (name == "flow-uniform" && value.is_boolean()) value = !value.get<bool>();
    if (name == "schedule" && value.is_number_integer() && value >= 0 &&
        value < std::size(kSchedules))
      value = kSchedules[value.get<size_t>()];
    if (name == "average" && value.is_array())
      for (nlohmann::json& average : value)
        if (average.is_string()) {
          auto text = average.get<std::string>();
          std::ranges::replace(text, '_', ':');
          average = text;
        }
    flags[flag] = value;
  }
  return flags;
}

absl::StatusOr<RunConfig> ParseCommandLine(int argc, const char* const* argv,
                                           std::optional<std::string>* print) {
  Flags flags;
  CLI::App app{
      "denoise-train trains a diffusion model on pictures and writes a directory that the denoised "
      "server can load.\n"
      "Example: denoise-train --data pictures --network network.json --output run --resume latest",
      "denoise-train"};
  app.option_defaults()->always_capture_default()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  app.set_version_flag("--version", fmt::format("denoise-train {}", kVersion));
  AddRunFlags(app, &flags);
  AddDataFlags(app, &flags);
  AddModelFlags(app, &flags);
  AddObjectiveFlags(app, &flags);
  AddOptimizerFlags(app, &flags);
  AddOutputFlags(app, &flags);
  AddDeviceFlags(app, &flags);
  flags::CheckNumbers(app);

  std::vector<std::string> given(argv + 1, argv + argc);
  const auto parse = [&](const std::vector<std::string>& settings) -> absl::Status {
    std::vector<std::string> arguments = flags::ForCli11(app, settings);
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
    try {
      app.parse(arguments);
    } catch (const CLI::CallForHelp&) {
      *print = app.help();
    } catch (const CLI::CallForVersion&) {
      *print = fmt::format("denoise-train {} ({})\n", kVersion, kBuild);
    } catch (const CLI::ParseError& error) {
      return InvalidArgument("{} (see denoise-train --help)", flags::Explain(app, error));
    }
    return absl::OkStatus();
  };
  DENOISED_RETURN_IF_ERROR(parse(given));
  if (*print) return flags.config;
  const auto read_checkpoint = [&resume = flags.config.resume, &output = flags.config.output] {
    return resume == "latest" ? LatestFlags(output + "/checkpoints") : FlagsOf(resume);
  };
  SettingsFile file;
  if (!flags.config_file.empty()) {
    DENOISED_ASSIGN_OR_RETURN(nlohmann::json json, ReadJsonFile(flags.config_file));
    file = {flags.config_file, std::move(json)};
  } else if (flags.ask_checkpoint()) {
    auto saved = read_checkpoint();
    // Else a run without the flags of a checkpoint says it when it reads the checkpoint.
    if (!saved.ok() && flags.config.data.empty()) return CannotResume(saved.status());
    if (saved.ok()) file = *std::move(saved);
  }
  if (file.settings.is_object()) {
    if (flags.ask_checkpoint()) flags.config.unknown_flags = TakeUnknown(app, &file.settings);
    nlohmann::json& network = flags.config.network_json;
    DENOISED_ASSIGN_OR_RETURN(std::vector<std::string> arguments,
                              ArgumentsOf(app, file.settings, file.file, given, &network));
    std::string& said = flags.config.resumed_flags;
    if (flags.config_file.empty() && !(arguments.empty() && network.is_null()))
      said = fmt::format("{}: {}{}", file.file, fmt::join(arguments, " "),
                         network.is_null() ? "" : " --network");
    std::ranges::replace(said, '\n', ' ');  // of a prompt, or a name
    arguments.insert(arguments.end(), given.begin(), given.end());
    flags.averages.clear();
    flags.config.prompts.clear();
    flags.config.class_names.clear();
    DENOISED_RETURN_IF_ERROR(Annotate(parse(arguments), file.file));
  }
  if (flags.resumes())
    if (auto saved = read_checkpoint(); saved.ok()) flags.run = std::move(saved->run);

  const absl::Status finished = Finish(app, flags);
  if (const std::string& others = flags.config.resumed_flags; !finished.ok() && !others.empty())
    return absl::Status(finished.code(), fmt::format("{} (what no flag gives is of {})",
                                                     std::string(finished.message()), others));
  DENOISED_RETURN_IF_ERROR(finished);
  flags.config.flags.update(GivenFlags(app, &flags.config.unsaved_flags));
  if (!flags.config.pipeline) flags.config.flags["network"] = flags.config.network_json;
  return std::move(flags.config);
}

}  // namespace denoised::trainer
