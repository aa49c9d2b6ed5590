// SPDX-License-Identifier: Apache-2.0
// A model directory for benchmarks of an architecture that has no checkpoint here.
//
//   synthetic-model [--dtype=f32|f16|bf16] [--part=NAME=SOURCE]… SOURCE DIRECTORY
//
// SOURCE is a model directory as the server reads one, whose weights need not be there, or the
// config.json of a UNet2DModel. tests/models/pipelines and tests/models/configs have published
// ones. DIRECTORY gets its configs and tokenizers, random weights, and a DDIM scheduler where a
// lone model has none beside it. --part takes one of a pipeline's parts from another place, or adds
// vae_tiny:
//
//   synthetic-model --dtype=f16 --part=vae_tiny=tests/models/configs/taesd
//     tests/models/pipelines/sdxl out/sdxl
//
// The images are noise. All cores draw the weights.

#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/core/config_reader.h"
#include "tests/synthetic_directory.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::vector<std::string> paths;
  std::vector<std::pair<std::string, fs::path>> parts;
  DType dtype = DType::kF32;
};

std::optional<Options> ParseFlags(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--dtype=f32") {
      options.dtype = DType::kF32;
    } else if (argument == "--dtype=f16") {
      options.dtype = DType::kF16;
    } else if (argument == "--dtype=bf16") {
      options.dtype = DType::kBF16;
    } else if (argument.starts_with("--part=")) {
      const std::string_view part = argument.substr(sizeof("--part=") - 1);
      const size_t equals = part.find('=');
      if (equals == std::string_view::npos) return std::nullopt;
      options.parts.emplace_back(part.substr(0, equals), part.substr(equals + 1));
    } else if (argument.starts_with("--")) {
      return std::nullopt;
    } else {
      options.paths.emplace_back(argument);
    }
  }
  if (options.paths.size() != 2) return std::nullopt;
  return options;
}

absl::Status Write(const Options& options) {
  std::error_code error;
  fs::path source = options.paths[0];
  if (source.filename() == "config.json") source = source.parent_path();
  if (source.empty()) source = ".";
  DENOISED_ASSIGN_OR_RETURN(ModelDirectory directory, ModelDirectory::Read(source.string()));
  if (!options.parts.empty() && directory.index.is_null())
    return InvalidArgument("{}: is no pipeline, so it has no parts to replace", source.string());
  for (const auto& [name, folder] : options.parts) {
    const std::string file = (folder / "config.json").string();
    DENOISED_ASSIGN_OR_RETURN(const nlohmann::json config, ReadJsonFile(file));
    const std::string class_name = config.value("_class_name", "");
    directory.components[name] = {class_name, folder.string(), file, config};
    if (name != ModelDirectory::kTinyVae) directory.index[name] = {"diffusers", class_name};
  }
  return WriteSynthetic(std::move(directory), options.paths[1], options.dtype);
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) {
  const auto options = denoised::ParseFlags(argc, argv);
  if (!options) {
    std::fputs(
        "usage: synthetic-model [--dtype=f32|f16|bf16] [--part=NAME=SOURCE]... SOURCE DIRECTORY\n"
        "The head of tests/bench/synthetic_model.cc says more.\n",
        stderr);
    return 2;
  }
  const absl::Status status = denoised::Write(*options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}
