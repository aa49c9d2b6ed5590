// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/images/pixels.h"
#include "engine/training/backend.h"
#include "engine/training/trainer.h"

namespace denoised::trainer {

/// How pictures become a data set.
struct PictureOptions {
  int channels = 3;           // 1 or 3
  int height = 0, width = 0;  // of the result: pictures are scaled to cover it, and cropped around
                              // their middle
  bool pad = false;           // smaller pictures get a black border instead of being scaled up
  bool wants_labels = false;
  bool wants_vectors = false;  // of numbers as labels: a class vector for each picture
  bool skip_bad = false;       // otherwise bad files are an error, which names the first ones
  /// What else is wrong with a picture of a folder, by its path below the folder; or "".
  std::function<std::string(const std::string& file)> refuse;
  /// Whether a run can have these weights, labels or vectors, and names of classes: called before
  /// pictures are decoded, with those of all that may be read, unless a label is missing; or null.
  /// Its errors end the reading.
  std::function<absl::Status(const training::Dataset& labels,
                             const std::vector<std::string>& class_names)>
      check;
  /// Called with what the user should know, also if an error follows; or null.
  std::function<void(const std::string& what)> note;
  /// What takes more bytes than this is kept in a file below `scratch`, which has no name
  /// (Dataset::on_disk).
  size_t memory = SIZE_MAX;
  std::string scratch;
  const std::atomic<bool>* stop = nullptr;            // when it becomes true, Cancelled
  ParallelFor parallel_for = training::OnCpuThreads;  // decodes; pictures do not depend on it
  /// What the decoders of pictures take together, in bytes; a picture that needs more is decoded
  /// alone. The floats that follow take about four times as much.
  int64_t decoding_memory = int64_t{1} << 29;
};

struct Pictures {
  training::Dataset dataset;
  std::vector<std::string> class_names;  // by label, of folders; else empty
  std::vector<std::string> bad;          // what was skipped: file and reason
  std::vector<std::string> files;        // of a folder, by picture: its path below the folder
};

/// InvalidArgument if no picture has as many channels as the network of this config reads.
absl::Status CheckChannels(int in_channels, const std::string& config_file);

/// Reads all pictures of `path` into uint8 once:
///
///   a folder   .png, .jpg, .jpeg, .jpe, .jfif and .webp files below it, in the order of their
///              names, without those that are hidden (".x", "__MACOSX") and have no line in
///              metadata.jsonl. Labels: of metadata.jsonl ({"file_name": "a.png", "label": 3}) if
///              it has any, else each folder right below is a class, in the order of their names.
///              "weight": 0.5 in metadata.jsonl is how often a picture is drawn, 1 where it is
///              not said
///   .zip       the same files; labels of dataset.json ({"labels": [["a.png", 3], …]}), as EDM's
///              dataset_tool.py writes them
///   IDX        MNIST's files, .gz or not; `labels_path` is the file of labels
///   .npy       uint8 [M, H, W] or [M, H, W, C]; `labels_path` is a .npy of whole numbers [M]
///   .npz       the arrays "images" and, for labels, "labels"
///
/// With wants_vectors, a label is a list of numbers, all of one length, or in arrays [M, D] of
/// floats; a single number is a list of one.
///
/// InvalidArgument or NotFound name the file and the remedy.
absl::StatusOr<Pictures> ReadPictures(const std::string& path, const std::string& labels_path,
                                      const PictureOptions& options);

/// What editors and systems keep beside pictures: ".ipynb_checkpoints", "._a.png", "__MACOSX". It
/// is read only where metadata.jsonl or dataset.json names it.
bool IsHidden(const std::string& name);

/// The lines of a text, without white space at their ends and a byte order mark before the first.
std::vector<std::string> LinesOf(const std::string& text);

/// A line of metadata.jsonl: an object with a "file_name". InvalidArgument names file and line.
absl::StatusOr<nlohmann::json> ParseMetadataLine(const std::string& line, const std::string& file,
                                                 int number);

/// A "file_name" of metadata.jsonl as in Pictures::files: "./a//1.png" is "a/1.png".
std::string PictureName(const std::string& name);

}  // namespace denoised::trainer
