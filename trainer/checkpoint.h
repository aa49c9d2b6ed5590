// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "engine/core/status.h"
#include "engine/training/trainer.h"

/// What a run leaves on the disk. A checkpoint is a folder of `checkpoints/`:
///
///   step-000001000/state.safetensors   weights, moments and averages, flat
///   step-000001000/run.json            step, counters, settings, flags, sampler, machine
///   step-000001000/DONE                sizes and checksums of the two; written last
///
/// It is written under a temporary name, synced and renamed: whenever the process or the machine
/// dies, the checkpoints with a valid DONE are whole.

namespace denoised::trainer {

struct Checkpoint {
  training::TrainerState state;
  nlohmann::json run;           // run.json's "configuration"
  std::string machine = {};     // on which the step was made; empty in older checkpoints
  nlohmann::json flags = {};    // of its process, as --config has them; null in older checkpoints
  nlohmann::json sampler = {};  // EDM's sigma_min and sigma_max, which no flag has; null without
                                // EDM, and in older checkpoints
};

/// Writes `checkpoint` below `folder`, and then removes what is older than the `keep` newest whole
/// ones (their sizes are right), and what killed processes left.
/// ResourceExhausted or Internal when the disk refuses; nothing older is touched then.
absl::Status SaveCheckpoint(const std::string& folder, const Checkpoint& checkpoint, int keep);

/// Whether there are checkpoints below `folder`, whole or damaged.
bool HasCheckpoints(const std::string& folder);

/// The newest whole checkpoint below `folder`, or nothing. `broken` receives what is wrong with
/// newer ones that were passed over. Unavailable if one of them cannot be read.
absl::StatusOr<std::optional<Checkpoint>> LoadLatestCheckpoint(const std::string& folder,
                                                               std::vector<std::string>* broken);
/// One checkpoint. DataLoss names the file that is damaged, Unavailable the one that cannot be
/// read; NotFound.
absl::StatusOr<Checkpoint> LoadCheckpoint(const std::string& directory);
/// An error of LoadCheckpoint() or FlagsOf() for the user: InvalidArgument where repeating would
/// not help.
absl::Status CannotResume(const absl::Status& status);

/// Settings as --config has them, and the file that has them.
struct SettingsFile {
  std::string file;
  nlohmann::json settings;  // null if there are none
  nlohmann::json run = {};  // all of a checkpoint's run.json
};
/// The flags in a checkpoint, of which only run.json and the sizes of all files are checked.
/// Checkpoints of earlier versions have none. Errors as LoadCheckpoint().
absl::StatusOr<SettingsFile> FlagsOf(const std::string& directory);
/// The same of the newest whole checkpoint below `folder`: an older one may be of a process with
/// other settings. Unavailable if a newer one cannot be read; if none is whole, the newest one's
/// error. Without checkpoints there are no settings.
absl::StatusOr<SettingsFile> LatestFlags(const std::string& folder);

/// A served model.
struct Pipeline {
  struct Part {
    std::string folder;                     // "unet"
    nlohmann::json config;                  // its config.json
    std::string file;                       // of weights, without .safetensors
    std::map<std::string, Tensor> weights;  // by checkpoint name
  };
  nlohmann::json scheduler;  // scheduler/scheduler_config.json; null if it is copied
  nlohmann::json index;      // model_index.json
  std::vector<Part> parts;
  std::vector<std::string> copied;  // folders that are copied as they are, under their own names
  DType dtype = DType::kF32;        // of the weights in the files: kF32 or kF16, to nearest
};

/// Writes a diffusers directory that the server loads as it is. Files appear whole, the weights of
/// `parts` last and at once, so that a server that looks for changes may read it meanwhile. Before
/// them, copied folders get the files of their sources that they lack: a network learned the
/// latents of the autoencoder that it began with, even if another run now improves that one.
absl::Status WritePipeline(const std::string& directory, const Pipeline& pipeline);

/// Makes the names in a folder survive a power cut.
absl::Status SyncFolder(const std::string& path);

/// Writes `text` under a temporary name, syncs it, and renames it.
absl::Status WriteFileWhole(const std::string& path, const std::string& text);

}  // namespace denoised::trainer
