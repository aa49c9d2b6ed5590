// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "command/generate_flags.h"
#include "denoised/client.h"

namespace denoised::command {

/// What `denoise generate` asks of the server.
struct GenerateRequest {
  client::Generation generation;
  std::optional<client::PreviewOptions> preview;
  int grid_columns = 0;  // 0: a file for each image
};

/// Sets a format that was not given: what the name of --out ends in, else png. InvalidArgument if
/// both are given and differ.
absl::Status CompleteFormat(GenerateFlags& flags);

/// Sets the format to that of a job. InvalidArgument if --out ends in another one.
absl::Status TakeFormat(GenerateFlags& flags, client::ImageFormat format);

/// The format for a value of --format; npy and raw are float32.
client::ImageFormat FormatOf(const std::string& name);

/// "4x3" -> {4, 3}; both >= 1. `flag` names it in errors.
absl::StatusOr<std::pair<int, int>> ParseExtents(const std::string& flag, const std::string& text);

/// Classes by index or by name, one for each of `count` images: they repeat in order. A single one
/// stays single.
absl::StatusOr<std::vector<int>> ResolveLabels(const std::vector<std::string>& words,
                                               const std::vector<std::string>& names, int count);

/// Reads the files that the flags name, and asks the server about the model where the flags leave
/// it open: for names of classes, and for the shape of raw noise. With `live`, previews are wanted
/// for the terminal.
absl::StatusOr<GenerateRequest> MakeRequest(const GenerateFlags& flags, bool live,
                                            const client::Client& client,
                                            const client::CallOptions& options);

}  // namespace denoised::command
