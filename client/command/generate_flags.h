// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace denoised::command {

/// The flags of `denoise generate`, as given.
struct GenerateFlags {
  std::string model;
  std::string request_id;
  std::string priority;  // empty: the server's default
  bool detach = false;
  bool timings = false;
  std::vector<std::string> prompts;
  std::optional<std::string> negative, prompt_2, negative_2;
  std::optional<int> clip_skip, max_chunks;
  std::vector<std::string> labels;  // indices or names
  std::vector<float> class_vectors;
  std::optional<int> count;
  std::string grid;  // "4x3"
  std::optional<int> steps;
  std::string sampler;
  std::string schedule;
  std::optional<double> guidance, image_guidance, guidance_rescale, guidance_start, guidance_stop;
  std::vector<uint64_t> seeds;  // one: the first image's; more: one for each
  std::optional<double> eta;
  std::optional<double> churn, churn_min, churn_max, churn_noise;
  std::optional<int> order;
  std::string size;  // "64" or "64x48"
  std::string init_image, mask;
  std::optional<double> strength;
  std::string noise;
  std::string format;  // empty until CompleteFormat()
  std::optional<int> quality;
  std::string out;
  std::optional<bool> previews;  // unset: where they show well
  std::optional<int> preview_every;
  std::string preview_kind;     // empty: predicted_x0
  std::string preview_decoder;  // empty: the model's default
  std::string animate;
  bool json = false;
  std::optional<double> timeout_seconds;
};

/// Refuses an empty value, of an option that names a file.
CLI::Validator NamesAFile();

/// Adds the flags, with their help, to the subcommand; `flags` outlives it.
void AddGenerateFlags(CLI::App& command, GenerateFlags& flags);

}  // namespace denoised::command
