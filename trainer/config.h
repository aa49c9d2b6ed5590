// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "engine/models/unet2d.h"
#include "engine/training/nccl.h"
#include "engine/training/trainer.h"
#include "trainer/text_to_image.h"

namespace denoised::trainer {

/// Everything that the command line and --config say.
struct RunConfig {
  std::string data, labels;
  std::string output;
  std::string init_from;  // a diffusers directory whose weights are the first
  std::optional<training::ObjectiveOptions> start;  // as its scheduler samples them, if it has one
  std::string start_scheduler_file;
  std::string start_unused;     // why its scheduler does not say it
  std::string start_lost;       // why a resume, whose checkpoint has no "sampler", cannot ask it
  nlohmann::json network_json;  // a UNet2DModel's config.json
  training::NetworkConfig network;
  training::TrainerOptions trainer;
  std::optional<PipelineParts> pipeline;  // a run of a StableDiffusionPipeline
  Stage stage = Stage::kDiffusion;        // of it
  std::vector<std::string> prompts;       // of the grids; empty: captions
  std::vector<std::string> class_names;   // by label; empty: those of folders
  int default_steps = 0;                  // of the served model; 0: by the objective
  std::optional<double> default_guidance_scale;
  bool half = false;  // the model's files are fp16
  int canvas = 0;     // edge of the stored pictures; 0: sample_size
  bool pad = false, skip_bad_files = false;
  int64_t data_memory = 0;     // MiB of pictures that stay in memory; 0: by what is free
  std::string metrics_listen;  // host:port, or empty

  int64_t checkpoint_steps = 1000, sample_steps = 0, log_steps = 10;
  int keep = 3;
  std::string resume;         // "latest", a checkpoint's folder, or empty
  nlohmann::json flags;       // all that were given, or are --init-from's, for a later resume;
                              // paths are absolute
  std::string resumed_flags;  // those of them that are the checkpoint's, for people; or empty
  std::vector<std::string> unknown_flags;  // of the checkpoint: another version's
  std::vector<std::string> unsaved_flags;  // paths that JSON cannot hold
  int sample_count = 16;
  int max_skipped = 50;  // steps in a row
  bool dry_run = false;

  bool cuda = false;
  training::CudaOptions cuda_options;  // the device is LOCAL_RANK of the environment

  // From the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or their substitutes.
  int rank = 0, ranks = 1;
  int local_ranks = 1;  // that share this host's memory
  std::string address;
  int rank_seconds = 300;  // for which ranks wait for each other
  int stop_exit_code = 0;  // of the process
  training::ExchangeKind exchange = training::ExchangeKind::kAuto;

  /// The shape of the pictures that the run reads, in pixels.
  Shape picture() const;
  /// The settings that the bits of a run depend on, for run.json.
  nlohmann::json Fingerprint() const;
};

/// A Fingerprint(), also one of an older version, by the flags and with the values that a user
/// would type. Some of its fields are lists of several flags' values.
nlohmann::json AsFlags(const nlohmann::json& fingerprint);

/// InvalidArgument if requests could not name a class so. `where` is the flag that does, and
/// `remedy` says what to change there.
absl::Status CheckClassName(const std::string& name, const std::string& where,
                            const std::string& remedy);

/// Flags win over the JSON object of --config, whose fields are the flags' names. Without --config,
/// a resume takes what no flag gives from its checkpoint. InvalidArgument and NotFound name the
/// flag or field, its value and the remedy. For --help and --version, sets `print` to the text to
/// print instead of a run; the result is then incomplete.
absl::StatusOr<RunConfig> ParseCommandLine(int argc, const char* const* argv,
                                           std::optional<std::string>* print);

}  // namespace denoised::trainer
