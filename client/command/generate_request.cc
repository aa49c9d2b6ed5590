// SPDX-License-Identifier: Apache-2.0
#include "command/generate_request.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "absl/strings/ascii.h"
#include "command/files.h"
#include "command/npy.h"
#include "command/ready_models.h"

namespace denoised::command {
namespace {

using client::ImageFormat;

std::optional<int> ParseInt(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool HasExtension(const std::string& path, std::string_view extension) {
  return path.size() >= extension.size() &&
         path.compare(path.size() - extension.size(), extension.size(), extension) == 0;
}

/// The same error with another message; it keeps what the server says beyond that.
absl::Status WithMessage(const std::string& message, const absl::Status& status) {
  absl::Status changed(status.code(), message);
  status.ForEachPayload([&changed](absl::string_view type, const absl::Cord& payload) {
    changed.SetPayload(type, payload);
  });
  return changed;
}

absl::Status WithFlag(const std::string& flag, const absl::Status& status) {
  return WithMessage(fmt::format("{}: {}", flag, std::string(status.message())), status);
}

/// A picture as a file, or an array.
absl::StatusOr<std::variant<std::string, client::Tensor>> ReadPicture(const std::string& flag,
                                                                      const std::string& path) {
  auto file = ReadFile(path);
  if (!file.ok()) return WithFlag(flag, file.status());
  if (file->empty()) {
    return absl::InvalidArgumentError(
        fmt::format("{} {} is empty; use a PNG, JPEG, WebP or .npy file", flag, path));
  }
  if (!HasExtension(path, ".npy")) return *std::move(file);
  auto tensor = ReadNpy(*file);
  if (!tensor.ok()) return WithFlag(flag + " " + path, tensor.status());
  return *std::move(tensor);
}

/// Raw noise has the shape of the request, which needs the model's size and channels.
absl::StatusOr<client::Tensor> ReadNoise(const std::string& path,
                                         const client::Generation& generation,
                                         const client::Model& model) {
  auto file = ReadFile(path);
  if (!file.ok()) return WithFlag("--noise", file.status());
  if (HasExtension(path, ".npy")) {
    auto tensor = ReadNpy(*file);
    if (!tensor.ok()) return WithFlag("--noise " + path, tensor.status());
    return tensor;
  }
  client::Tensor noise;
  const int factor = model.limits.latent_factor;
  noise.shape = {generation.count.value_or(1),
                 generation.height.value_or(model.defaults.height) / factor,
                 generation.width.value_or(model.defaults.width) / factor,
                 factor == 1 ? model.limits.channels : model.limits.latent_channels};
  int64_t bytes = sizeof(float);
  for (const int64_t extent : noise.shape) bytes *= extent;
  if (static_cast<int64_t>(file->size()) != bytes) {
    return absl::InvalidArgumentError(fmt::format("--noise {} has {} bytes; use {}: float32 [{}]",
                                                  path, file->size(), bytes,
                                                  fmt::join(noise.shape, ", ")));
  }
  noise.data = *std::move(file);
  return noise;
}

/// The model that the server will take: without --model the only one that reads what is given.
absl::StatusOr<client::Model> ModelOf(const GenerateFlags& flags, const client::Client& client,
                                      const client::CallOptions& options) {
  if (!flags.model.empty()) {
    auto model = GetReadyModel(client, flags.model, options);
    if (model.ok()) return model;
    // It is said of GetModel's own field; a request that names the model is told of its.
    constexpr std::string_view kField = "name";
    const std::string message(model.status().message());
    if (!message.starts_with("name: ") && !message.starts_with("name is ")) return model;
    return WithMessage("params.model" + message.substr(kField.size()), model.status());
  }
  const auto reads = [&flags](const client::Model& model) {
    return (flags.prompts.empty() || model.capabilities.text) &&
           (flags.labels.empty() || model.capabilities.class_label) &&
           (flags.class_vectors.empty() || model.capabilities.class_vector);
  };
  auto models = ListReadyModels(client, reads, options);
  if (!models.ok()) return models.status();
  if (models->size() == 1) return std::move(models->front());
  std::vector<std::string> names;
  for (const client::Model& model : *models) names.push_back(model.name);
  return absl::InvalidArgumentError(
      names.empty() ? "--model is not set, and no model of the server reads what is given"
                    : fmt::format("--model is not set; use one of: {}", fmt::join(names, ", ")));
}

/// The format that a path's extension means, or empty.
std::string FormatOfPath(std::string path) {
  absl::AsciiStrToLower(&path);
  for (const auto& [extension, format] :
       {std::pair{".png", "png"}, std::pair{".jpg", "jpeg"}, std::pair{".jpeg", "jpeg"},
        std::pair{".webp", "webp"}, std::pair{".npy", "npy"}, std::pair{".raw", "raw"}})
    if (HasExtension(path, extension)) return format;
  return "";
}

absl::Status CheckTogether(const GenerateFlags& flags) {
  if (flags.prompts.empty() && (flags.negative || flags.prompt_2 || flags.negative_2 ||
                                flags.clip_skip || flags.max_chunks)) {
    return absl::InvalidArgumentError(
        "--negative, --prompt-2, --negative-2, --clip-skip and --max-chunks are for a PROMPT; give "
        "one, \"\" if it is to be empty");
  }
  if (!flags.prompts.empty() + !flags.labels.empty() + !flags.class_vectors.empty() > 1) {
    return absl::InvalidArgumentError(
        "PROMPT, --labels and --class-vectors exclude each other; give the one that the model "
        "reads");
  }
  if (!flags.grid.empty() && flags.format != "png") {
    return absl::InvalidArgumentError(
        "--grid makes one PNG; let --out end in .png, and leave --format out");
  }
  if (flags.quality && !flags.grid.empty()) {
    return absl::InvalidArgumentError(fmt::format(
        "--quality is {}, but --grid makes one PNG, which loses nothing; leave --quality out",
        *flags.quality));
  }
  if (flags.quality && flags.format != "jpeg" && flags.format != "webp") {
    return absl::InvalidArgumentError(fmt::format(
        "--quality is {}, but --format is {}, which loses nothing; leave --quality out, "
        "or use --format jpeg or webp",
        *flags.quality, flags.format));
  }
  if (!flags.animate.empty() && !HasExtension(flags.animate, ".webp")) {
    return absl::InvalidArgumentError(
        fmt::format("--animate is {}; use a path that ends in .webp", flags.animate));
  }
  if (flags.strength && flags.init_image.empty()) {
    return absl::InvalidArgumentError("--strength is for --init-image FILE; give both");
  }
  if (!flags.mask.empty() && flags.init_image.empty()) {
    return absl::InvalidArgumentError("--mask is for --init-image FILE; give both");
  }
  if (flags.detach && (!flags.out.empty() || !flags.grid.empty() || !flags.animate.empty() ||
                       flags.previews.value_or(false))) {
    return absl::InvalidArgumentError(
        "--detach waits for no pictures; leave --out, --grid, --animate and --previews out, and "
        "save them with denoise jobs watch");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CompleteFormat(GenerateFlags& flags) {
  const std::string of_path = FormatOfPath(flags.out);
  const std::string extension = std::filesystem::path(flags.out).extension().string();
  if (flags.format.empty() && of_path.empty() && extension.size() > 1) {
    return absl::InvalidArgumentError(
        fmt::format("--out is {}, and {} is no format; let it end in .png, .jpg, .webp, .npy or "
                    ".raw, or say what it is with --format",
                    flags.out, extension));
  }
  if (flags.format.empty()) flags.format = of_path.empty() ? "png" : of_path;
  if (of_path.empty() || of_path == flags.format) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("--out is {}, but --format is {}; leave --format out, or change the name",
                  flags.out, flags.format));
}

absl::Status TakeFormat(GenerateFlags& flags, ImageFormat format) {
  const std::string of_path = FormatOfPath(flags.out);
  // Both kinds of tensors become arrays.
  const ImageFormat wanted = format == ImageFormat::kRawUint8 ? ImageFormat::kRawFloat32 : format;
  flags.format = wanted == ImageFormat::kJpeg   ? "jpeg"
                 : wanted == ImageFormat::kWebp ? "webp"
                 : wanted == ImageFormat::kPng  ? "png"
                                                : "npy";
  const bool ends = std::filesystem::path(flags.out).extension().string().size() > 1;
  if (of_path.empty() ? ends : FormatOf(of_path) != wanted) {
    return absl::InvalidArgumentError(
        fmt::format("--out is {}, but the images of the job are {}; let it end in .{}", flags.out,
                    flags.format, flags.format));
  }
  if (!of_path.empty()) flags.format = of_path;
  return absl::OkStatus();
}

ImageFormat FormatOf(const std::string& name) {
  if (name == "jpeg") return ImageFormat::kJpeg;
  if (name == "webp") return ImageFormat::kWebp;
  return name == "png" ? ImageFormat::kPng : ImageFormat::kRawFloat32;
}

absl::StatusOr<std::pair<int, int>> ParseExtents(const std::string& flag, const std::string& text) {
  constexpr int kMost = 65536;
  const size_t x = text.find('x');
  if (x != std::string::npos) {
    const auto first = ParseInt(std::string_view(text).substr(0, x));
    const auto second = ParseInt(std::string_view(text).substr(x + 1));
    if (first && second && *first >= 1 && *second >= 1 && *first <= kMost && *second <= kMost) {
      return std::pair(*first, *second);
    }
  }
  return absl::InvalidArgumentError(
      fmt::format("{} is {}; use two numbers from 1 to {}, such as 4x3", flag, text, kMost));
}

absl::StatusOr<std::vector<int>> ResolveLabels(const std::vector<std::string>& words,
                                               const std::vector<std::string>& names, int count) {
  std::vector<int> labels;
  for (const std::string& word : words) {
    if (const auto index = ParseInt(word)) {
      labels.push_back(*index);
      continue;
    }
    const auto found = std::find(names.begin(), names.end(), word);
    if (found == names.end()) {
      return absl::InvalidArgumentError(
          names.empty() ? fmt::format("--labels: {} is no number, and the model's classes have no "
                                      "names; use their indices",
                                      word)
                        : fmt::format("--labels: the model has no class {}; use one of {}", word,
                                      fmt::join(names, ", ")));
    }
    labels.push_back(static_cast<int>(found - names.begin()));
  }
  const size_t given = labels.size();
  if (static_cast<int64_t>(given) > count) {
    return absl::InvalidArgumentError(fmt::format(
        "--labels names {} classes for {} images; raise --count or name fewer", given, count));
  }
  for (size_t i = 0; given > 1 && static_cast<int64_t>(labels.size()) < count; ++i) {
    labels.push_back(labels[i % given]);
  }
  return labels;
}

absl::StatusOr<GenerateRequest> MakeRequest(const GenerateFlags& flags, bool live,
                                            const client::Client& client,
                                            const client::CallOptions& options) {
  if (absl::Status status = CheckTogether(flags); !status.ok()) return status;
  GenerateRequest request;
  client::Generation& generation = request.generation;
  generation.model = flags.model;
  generation.request_id = flags.request_id;
  if (flags.seeds.size() == 1) {
    generation.seed = flags.seeds[0];
  } else {
    generation.seeds = flags.seeds;
  }
  generation.count = flags.count;
  for (const std::string& prompt : flags.prompts) {
    generation.prompts.push_back({.text = prompt,
                                  .negative = flags.negative,
                                  .text_2 = flags.prompt_2,
                                  .negative_2 = flags.negative_2});
  }
  generation.clip_skip = flags.clip_skip;
  generation.max_chunks = flags.max_chunks;
  generation.guidance_scale = flags.guidance;
  generation.image_guidance_scale = flags.image_guidance;
  generation.guidance_rescale = flags.guidance_rescale;
  generation.guidance_start = flags.guidance_start;
  generation.guidance_stop = flags.guidance_stop;
  generation.steps = flags.steps;
  generation.sampler = client::SamplerFromName(flags.sampler);
  generation.noise_schedule = client::NoiseScheduleFromName(flags.schedule);
  generation.eta = flags.eta;
  generation.s_churn = flags.churn;
  generation.s_tmin = flags.churn_min;
  generation.s_tmax = flags.churn_max;
  generation.s_noise = flags.churn_noise;
  generation.solver_order = flags.order;
  generation.quality = flags.quality;
  generation.priority = client::PriorityFromName(flags.priority);
  generation.survives = flags.detach;
  generation.include_timings = flags.timings;
  // A contact sheet is made of pixels.
  generation.format = flags.grid.empty() ? FormatOf(flags.format) : ImageFormat::kRawUint8;

  if (!flags.grid.empty()) {
    const auto grid = ParseExtents("--grid", flags.grid);
    if (!grid.ok()) return grid.status();
    const int64_t cells = int64_t{grid->first} * grid->second;
    if (generation.count.value_or(1) > cells) {
      return absl::InvalidArgumentError(
          fmt::format("--count is {}, but --grid {} has {} places; leave --count out",
                      *generation.count, flags.grid, cells));
    }
    request.grid_columns = grid->first;
    // Beyond int no server's limit reaches; it is refused there by name.
    if (!generation.count) generation.count = static_cast<int>(std::min<int64_t>(cells, INT32_MAX));
  }
  const size_t named_images =
      std::max({flags.labels.size(), flags.seeds.size(), flags.prompts.size()});
  if (!generation.count && (!flags.labels.empty() || named_images > 1)) {
    generation.count = static_cast<int>(named_images);
  }
  if (flags.seeds.size() > 1 && static_cast<int>(flags.seeds.size()) != *generation.count) {
    return absl::InvalidArgumentError(
        fmt::format("--seed names {} seeds for {} images; name one for each, or only the first's",
                    flags.seeds.size(), *generation.count));
  }
  if (!flags.size.empty()) {
    const auto size = ParseExtents("--size", flags.size.find('x') == std::string::npos
                                                 ? flags.size + "x" + flags.size
                                                 : flags.size);
    if (!size.ok()) return size.status();
    generation.width = size->first;
    generation.height = size->second;
  }

  const bool named = std::any_of(flags.labels.begin(), flags.labels.end(),
                                 [](const std::string& word) { return !ParseInt(word); });
  const bool raw_noise = !flags.noise.empty() && !HasExtension(flags.noise, ".npy");
  client::Model model;
  if (named || raw_noise || !flags.class_vectors.empty()) {
    auto found = ModelOf(flags, client, options);
    if (!found.ok()) return found.status();
    model = *std::move(found);
  }
  if (!flags.labels.empty()) {
    auto labels = ResolveLabels(flags.labels, model.labels, *generation.count);
    if (!labels.ok()) return labels.status();
    generation.class_labels = *std::move(labels);
  }
  // One for all images, or one for each.
  const size_t numbers = flags.class_vectors.size();
  const auto size = static_cast<size_t>(std::max(0, model.limits.class_vector_size));
  for (size_t begin = 0; begin<numbers; begin += size> 0 ? size : numbers) {
    const auto first = flags.class_vectors.begin() + static_cast<ptrdiff_t>(begin);
    const size_t count = size > 0 ? std::min(size, numbers - begin) : numbers;
    generation.class_vectors.emplace_back(first, first + static_cast<ptrdiff_t>(count));
  }
  if (!flags.noise.empty()) {
    if (raw_noise && !generation.width && !flags.init_image.empty() && flags.mask.empty()) {
      return absl::InvalidArgumentError(
          "--noise has the size of the images, and without --size that is the size of "
          "--init-image; give --size, or the noise as .npy");
    }
    auto noise = ReadNoise(flags.noise, generation, model);
    if (!noise.ok()) return noise.status();
    generation.initial_noise = *std::move(noise);
  }
  if (!flags.init_image.empty()) {
    auto picture = ReadPicture("--init-image", flags.init_image);
    if (!picture.ok()) return picture.status();
    generation.init_image = {.source = *std::move(picture), .strength = flags.strength};
  }
  if (!flags.mask.empty()) {
    auto picture = ReadPicture("--mask", flags.mask);
    if (!picture.ok()) return picture.status();
    generation.mask = {.source = *std::move(picture)};
  }
  if (live || !flags.animate.empty()) {
    // Nobody asked for previews that are shown by default, so they cost the server less.
    constexpr int kEveryByDefault = 4;
    const bool asked = flags.previews.value_or(false) || !flags.animate.empty();
    // Raw pixels need no decoding, and at the size of a terminal they are small.
    request.preview = {
        .kind = flags.preview_kind == "noisy_state" ? client::PreviewKind::kNoisyState
                                                    : client::PreviewKind::kPredictedX0,
        .every_evaluations = flags.preview_every || asked ? flags.preview_every : kEveryByDefault,
        .max_edge = flags.animate.empty() ? 128 : 512,
        .format = ImageFormat::kRawUint8,
        .decoder = {}};
    if (!flags.preview_decoder.empty())
      request.preview->decoder = flags.preview_decoder == "tiny" ? client::PreviewDecoder::kTiny
                                                                 : client::PreviewDecoder::kLinear;
  }
  return request;
}

}  // namespace denoised::command
