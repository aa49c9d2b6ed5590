// SPDX-License-Identifier: Apache-2.0
#include "command/generate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "command/call_options.h"
#include "command/codec.h"
#include "command/drawing.h"
#include "command/files.h"
#include "command/generate_request.h"
#include "command/json.h"
#include "command/npy.h"
#include "command/progress.h"
#include "command/table.h"
#include "command/terminal.h"
#include "denoised/backoff.h"
#include "flags/printable.h"

namespace denoised::command {
namespace {

namespace fs = std::filesystem;

constexpr int kFrameMs = 80;
constexpr int kLastFrameMs = 2000;
constexpr size_t kShownText = 80;        // bytes of a prompt in a message
constexpr int kSmallestAnimation = 256;  // pixels; smaller pictures are enlarged to be seen

std::string DefaultPath(const GenerateFlags& flags) {
  const std::string extension = flags.format == "jpeg" ? "jpg" : flags.format;
  return "denoised." + extension;
}

template <typename T>
bool HasRepeated(std::vector<T> values) {
  std::sort(values.begin(), values.end());
  return std::adjacent_find(values.begin(), values.end()) != values.end();
}

/// Of what was asked for. Without a label for each image, two may have the same, or none.
Repeats RepeatsOf(const std::vector<uint64_t>& seeds, const std::vector<int>& labels, int count) {
  return {.seeds = HasRepeated(seeds),
          .labels = static_cast<int>(labels.size()) < count || HasRepeated(labels)};
}

std::string FrameCount(size_t frames) {
  return fmt::format("{} {}", frames, frames == 1 ? "frame" : "frames");
}

/// Files that no image may take the place of: those that the request was made of, and the
/// animation.
class FilesInUse {
 public:
  explicit FilesInUse(const GenerateFlags& flags) {
    for (const auto& [flag, path] :
         {std::pair{"--init-image", &flags.init_image}, std::pair{"--mask", &flags.mask},
          std::pair{"--noise", &flags.noise}}) {
      if (!path->empty()) files_.emplace_back(flag, FileOf(*path));
    }
  }
  bool empty() const { return files_.empty(); }
  absl::Status Check(const char* flag, const std::string& path) const {
    const fs::path file = FileOf(path);
    const auto other = std::find_if(files_.begin(), files_.end(),
                                    [&file](const auto& each) { return each.second == file; });
    if (other == files_.end()) return absl::OkStatus();
    return absl::InvalidArgumentError(fmt::format(
        "{} and {} are both {}; use another file for one of them", other->first, flag, path));
  }
  absl::Status Add(const char* flag, const std::string& path) {
    absl::Status status = Check(flag, path);
    files_.emplace_back(flag, FileOf(path));
    return status;
  }

 private:
  static fs::path FileOf(const std::string& path) {
    std::error_code ignored;
    return fs::weakly_canonical(fs::absolute(path, ignored), ignored);
  }

  std::vector<std::pair<const char*, fs::path>> files_;
};

/// The parts of `denoise generate` that write, in the order they are told.
class Saver {
 public:
  Saver(const GenerateFlags& flags, const Drawing& drawing)
      : flags_(flags),
        drawing_(drawing),
        pattern_(flags.out.empty() ? DefaultPath(flags) : flags.out),
        repeats_(RepeatsOf(drawing.params().seeds, drawing.params().class_labels,
                           drawing.params().count)),
        in_use_(flags) {
    if (!flags.animate.empty()) in_use_.Add("--animate", flags.animate).IgnoreError();
  }

  absl::Status SaveImage(const client::Image& image) {
    const auto path = PathOf(image);
    if (!path.ok()) return path.status();
    if (absl::Status status = Write(*path, BytesOf(image)); !status.ok()) return status;
    nlohmann::json json = ToJson(image);
    json["type"] = "image";
    std::string text = fmt::format("seed {}", image.seed);
    if (image.class_label) text += fmt::format("  label {}", *image.class_label);
    Tell(*path, std::move(json), text);
    return absl::OkStatus();
  }

  absl::Status SaveGrid(int columns) {
    std::vector<Pixels> cells(drawing_.params().count, Pixels{1, 1, 1, {0}});
    for (const client::Image& image : drawing_.images()) {
      auto pixels = Decode(image);
      if (!pixels.ok()) return pixels.status();
      if (image.index >= 0 && image.index < static_cast<int>(cells.size())) {
        cells[image.index] = *std::move(pixels);
      }
    }
    const Pixels sheet = ContactSheet(cells, columns);
    const client::EffectiveParams& params = drawing_.params();
    // What draws the same sheet again. The name of this one request is left out: equal sheets are
    // equal files.
    nlohmann::json parameters = ToJson(params);
    parameters.erase("request_id");
    const auto file = EncodePng(sheet, {{"Software", "denoised"},
                                        {"model", params.model},
                                        {"seed", std::to_string(params.seed)},
                                        {"sampler", std::string(client::Name(params.sampler))},
                                        {"steps", std::to_string(params.steps)},
                                        {"parameters", PrintableJson(parameters)}});
    if (!file.ok()) return file.status();
    const auto path =
        FillPath(pattern_, {.seed = params.seed, .label = "grid", .model = params.model});
    if (!path.ok()) return path.status();
    if (absl::Status status = Write(*path, *file); !status.ok()) return status;
    Tell(*path, {{"type", "grid"}, {"width", sheet.width}, {"height", sheet.height}},
         fmt::format("{} images  {}", drawing_.images().size(),
                     params.seeds.empty() ? fmt::format("seeds {} and up", params.seed)
                                          : fmt::format("seeds {}", fmt::join(params.seeds, ","))));
    return absl::OkStatus();
  }

  absl::Status SaveAnimation() {
    std::vector<Pixels> frames = drawing_.Frames();
    const int edge = std::max(frames.front().width, frames.front().height);
    if (const int times = kSmallestAnimation / edge; times > 1) {
      for (Pixels& frame : frames) {
        frame = Resized(frame, times * frame.width, times * frame.height);
      }
    }
    const auto file = EncodeAnimation(frames, kFrameMs, kLastFrameMs);
    if (!file.ok()) return file.status();
    if (absl::Status status = WriteFile(flags_.animate, *file); !status.ok()) return status;
    const int evaluations = drawing_.params().evaluations;
    Tell(flags_.animate,
         {{"type", "animation"}, {"frames", frames.size()}, {"evaluations", evaluations}},
         FrameCount(frames.size()));
    if (!drawing_.completed()) return absl::OkStatus();  // what ended it is told
    // A frame for each preview, and one for the finished image.
    const int every = std::max(flags_.preview_every.value_or(1), 1);
    const int all = evaluations / every + (evaluations % every > 0 ? 1 : 0);
    if (const int missing = all - static_cast<int>(frames.size()); missing > 0) {
      std::fputs(
          fmt::format("note: {} has {} of {} evaluations, {} {} missing: the server left out "
                      "previews beyond its --max-previews-per-second, or that came faster "
                      "than they could be sent, or the job had already run\n",
                      Printable(flags_.animate), FrameCount(frames.size()), evaluations, missing,
                      missing == 1 ? "is" : "are")
              .c_str(),
          stderr);
    }
    return absl::OkStatus();
  }

  void TellCompleted() {
    const client::EffectiveParams& params = drawing_.params();
    for (const client::TextRead& read : params.texts) {
      for (const auto& [name, cut_off] :
           {std::pair{"the prompt", &read.cut_off}, std::pair{"--negative", &read.negative_cut_off},
            std::pair{"--prompt-2", &read.text_2_cut_off},
            std::pair{"--negative-2", &read.negative_2_cut_off}})
        if (!cut_off->empty())
          std::fputs(fmt::format("The model does not read the end of {}: \"{}\"\n", name,
                                 Shortened(*cut_off, kShownText))
                         .c_str(),
                     stderr);
    }
    const client::Timing& timing = drawing_.completed()->timing;
    if (flags_.json) {
      nlohmann::json json = {
          {"type", "completed"}, {"params", ToJson(params)}, {"timing", ToJson(timing)}};
      const auto& timeline = drawing_.completed()->timeline;
      if (!timeline.empty()) json["timeline"] = ToJson(timeline);
      std::puts(PrintableJson(json).c_str());
    } else if (!to_stdout()) {
      std::puts(fmt::format("{} {} in {}: {}, {} on {} noise levels, {} {}", params.count,
                            params.count == 1 ? "image" : "images",
                            HumanDuration(std::chrono::duration<double>(timing.total_seconds)),
                            Printable(params.model), client::Name(params.sampler),
                            client::Name(params.noise_schedule), params.steps,
                            params.steps == 1 ? "step" : "steps")
                    .c_str());
    }
  }

 private:
  bool to_stdout() const { return pattern_ == "-"; }

  absl::Status Write(const std::string& path, std::string_view bytes) const {
    if (!to_stdout()) {
      if (absl::Status status = in_use_.Check("--out", path); !status.ok()) return status;
    }
    return WriteFile(path, bytes);
  }

  absl::StatusOr<std::string> PathOf(const client::Image& image) const {
    if (to_stdout()) return pattern_;
    return FillPath(pattern_,
                    {.index = image.index,
                     .count = drawing_.params().count,
                     .seed = image.seed,
                     .label = image.class_label ? std::to_string(*image.class_label) : "none",
                     .model = drawing_.params().model,
                     .repeats = repeats_});
  }

  std::string BytesOf(const client::Image& image) const {
    const auto* tensor = std::get_if<client::Tensor>(&image.content);
    if (tensor == nullptr) return std::get<std::string>(image.content);
    return flags_.format == "npy" ? WriteNpy(*tensor) : tensor->data;
  }

  void Tell(const std::string& path, nlohmann::json json, const std::string& text) const {
    if (flags_.json) {
      json["path"] = path;
      std::puts(PrintableJson(json).c_str());
    } else if (!to_stdout()) {
      std::puts(fmt::format("{}  {}", Printable(path), text).c_str());
    }
  }

  const GenerateFlags& flags_;
  const Drawing& drawing_;
  const std::string pattern_;
  const Repeats repeats_;
  FilesInUse in_use_;
};

/// Where an image will be saved, or nullopt if the pattern has the seed and the server chooses it.
/// A class or a model that the server chooses is written as in the pattern.
absl::StatusOr<std::optional<std::string>> ExpectedPath(const std::string& pattern,
                                                        const client::Generation& generation,
                                                        const Repeats& repeats, int index,
                                                        bool grid) {
  PathFields fields = {.index = index,
                       .count = generation.count.value_or(1),
                       .model = "{model}",
                       .repeats = repeats};
  if (!generation.seeds.empty()) {
    fields.seed = generation.seeds[index];
  } else if (generation.seed) {
    fields.seed = *generation.seed + index;
  } else if (pattern.find("{seed}") != std::string::npos) {
    return std::nullopt;
  }
  const auto& labels = generation.class_labels;
  if (!labels.empty()) {
    fields.label = std::to_string(labels[index % labels.size()]);
  } else {
    // Without any of the three, it is the model that decides.
    const bool no_label = !generation.prompts.empty() || !generation.class_vectors.empty();
    fields.label = no_label ? "none" : "{label}";
  }
  if (grid) fields = {.seed = fields.seed, .label = "grid", .model = fields.model};
  return FillPath(pattern, fields);
}

/// Before anything is drawn; what is not known until then is checked by Saver.
absl::Status CheckOverwrites(const GenerateFlags& flags, const std::string& pattern,
                             const client::Generation& generation, bool grid) {
  FilesInUse in_use(flags);
  if (!flags.animate.empty()) {
    if (absl::Status status = in_use.Add("--animate", flags.animate); !status.ok()) return status;
  }
  if (in_use.empty() || pattern == "-") return absl::OkStatus();
  constexpr int kMost = 1 << 16;  // no server's --max-count is larger
  const int count = generation.count.value_or(1);
  const Repeats repeats = RepeatsOf(generation.seeds, generation.class_labels, count);
  const int files = grid ? 1 : std::min(count, kMost);
  for (int i = 0; i < files; ++i) {
    const auto path = ExpectedPath(pattern, generation, repeats, i, grid);
    if (!path.ok()) return path.status();
    if (!*path) return absl::OkStatus();
    if (absl::Status status = in_use.Check("--out", **path); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckOutputs(const GenerateFlags& flags, const client::Generation& generation,
                          bool grid) {
  const std::string pattern = flags.out.empty() ? DefaultPath(flags) : flags.out;
  // With every placeholder filled in, so that an unknown one is known now.
  const auto path = FillPath(pattern, {.label = "0", .model = "model"});
  if (!path.ok()) return path.status();
  if (absl::Status status = CheckWritable(*path); !status.ok()) return status;
  if (flags.json && flags.out == "-") {
    return absl::InvalidArgumentError("--json and --out - both want stdout; give --out a file");
  }
  if (flags.out == "-" && !grid && generation.count.value_or(1) > 1) {
    return absl::InvalidArgumentError(
        "--out - can take one image; use a file for each, or --grid of generate");
  }
  if (absl::Status status = CheckOverwrites(flags, pattern, generation, grid); !status.ok()) {
    return status;
  }
  return flags.animate.empty() ? absl::OkStatus() : CheckWritable(flags.animate);
}

/// Saves what can be saved, and tells of the rest. Returns the code of the first error.
ExitCode Save(const GenerateFlags& flags, int grid_columns, const Drawing& drawing) {
  if (drawing.images().empty()) return kOk;
  // The files are wanted also where nobody reads the lines about them any more.
  std::signal(SIGPIPE, SIG_IGN);
  Saver saver(flags, drawing);
  ExitCode code = kOk;
  const auto tell = [&flags, &code](const absl::Status& status) {
    const ExitCode of_this = Report(status, flags.json);
    if (code == kOk) code = of_this;
  };
  if (grid_columns > 0) {
    tell(saver.SaveGrid(grid_columns));
  } else {
    for (const client::Image& image : drawing.images()) tell(saver.SaveImage(image));
  }
  if (!flags.animate.empty()) tell(saver.SaveAnimation());
  if (drawing.completed()) saver.TellCompleted();
  return code;
}

/// Why --previews has no effect.
std::string WhyNoPreviews(const GenerateFlags& flags) {
  if (flags.json || flags.out == "-") {
    return fmt::format("--previews and {} both want stdout", flags.json ? "--json" : "--out -");
  }
  if (!isatty(STDOUT_FILENO)) return "--previews needs a terminal, and stdout is none";
  const char* const term = std::getenv("TERM");
  return fmt::format(
      "--previews needs a terminal whose cursor can be moved, and TERM is {}; set it to what "
      "the terminal is, such as xterm-256color",
      term == nullptr || *term == '\0' ? "not set" : fmt::format("\"{}\"", Printable(term)));
}

/// The flags that say how previews are made, as far as they are given.
std::vector<std::string> PreviewFlags(const GenerateFlags& flags) {
  std::vector<std::string> given;
  if (flags.preview_every) given.emplace_back("--preview-every");
  if (!flags.preview_kind.empty()) given.emplace_back("--preview-kind");
  if (!flags.preview_decoder.empty()) given.emplace_back("--preview-decoder");
  return given;
}

/// Returns once the request is queued; the server goes on with it.
ExitCode Detach(const client::Client& client, const GenerateRequest& request, bool json,
                const client::CallOptions& options) {
  // The listener's calls come one at a time, and the last one before Wait returns.
  std::optional<client::Queued> queued;
  std::promise<void> known;
  bool answered = false;
  const auto answer = [&known, &answered] {
    if (!std::exchange(answered, true)) known.set_value();
  };
  const auto call =
      client.StreamGenerate(request.generation, std::nullopt,
                            {.on_event =
                                 [&](const client::Event& event) {
                                   if (const auto* first = std::get_if<client::Queued>(&event)) {
                                     queued = *first;
                                     answer();
                                   }
                                 },
                             .on_done = [&](const absl::Status&) { answer(); }},
                            options);
  known.get_future().wait();
  call->Cancel();
  const absl::Status status = call->Wait();
  if (!queued) return Report(status, json);
  if (json) {
    nlohmann::json line = {{"type", "queued"},
                           {"request_id", queued->params.request_id},
                           {"server", queued->server},
                           {"images_ahead", queued->images_ahead},
                           {"params", ToJson(queued->params)}};
    if (queued->estimated_total_seconds) {
      line["estimated_total_seconds"] = *queued->estimated_total_seconds;
    }
    std::puts(PrintableJson(line).c_str());
  } else {
    std::puts(Printable(queued->params.request_id).c_str());
    std::fputs(fmt::format("note: only this server knows the job: --server {}\n",
                           Printable(queued->server))
                   .c_str(),
               stderr);
  }
  return kOk;
}

}  // namespace

ExitCode Generate(const client::Client& client, GenerateFlags flags,
                  const client::CallOptions& call) {
  if (absl::Status status = CompleteFormat(flags); !status.ok()) return Report(status, flags.json);
  const bool terminal = IsTerminal(STDOUT_FILENO) && !flags.json;
  const TerminalColours colours = TerminalColoursOfEnvironment();
  // Requests with one id must be the same, wherever they are made.
  const bool by_default = colours != TerminalColours::kGreys && flags.request_id.empty();
  const bool live = terminal && flags.previews.value_or(by_default);
  if (flags.previews.value_or(false) && !live) {
    std::fputs(fmt::format("note: {}; no previews are shown\n", WhyNoPreviews(flags)).c_str(),
               stderr);
  }
  const std::vector<std::string> unused = PreviewFlags(flags);
  if (!unused.empty() && !live && flags.animate.empty()) {
    std::fputs(fmt::format("note: no previews are shown or animated, so {} {} no effect\n",
                           fmt::join(unused, ", "), unused.size() == 1 ? "has" : "have")
                   .c_str(),
               stderr);
  }
  client::CallOptions options = call;
  if (flags.timeout_seconds) {
    options.timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(*flags.timeout_seconds));
  }
  // Of all calls together.
  std::optional<std::chrono::system_clock::time_point> deadline;
  if (options.timeout) deadline = client::DeadlineAfter(*options.timeout);
  const auto request = MakeRequest(flags, live, client, options);
  if (!request.ok()) return Report(request.status(), flags.json);
  options.timeout = client::Remaining(deadline);
  if (flags.detach) return Detach(client, *request, flags.json, options);
  if (absl::Status status = CheckOutputs(flags, request->generation, request->grid_columns > 0);
      !status.ok()) {
    return Report(status, flags.json);
  }

  std::unique_ptr<LiveView> view;
  if (terminal) view = std::make_unique<LiveView>(stdout, colours);
  Drawing drawing({.columns = request->grid_columns,
                   .max_edge = flags.animate.empty() ? 128 : 512,
                   .pictures = request->preview.has_value(),
                   .show = live,
                   .animate = !flags.animate.empty()},
                  view.get());
  const auto stream = client.StreamGenerate(
      request->generation, request->preview,
      {.on_event = [&drawing](const client::Event& event) { drawing.OnEvent(event); }}, options);
  const absl::Status drawn = stream->Wait();
  drawing.Finish();
  view.reset();

  const ExitCode save_code = Save(flags, request->grid_columns, drawing);
  if (drawn.ok()) return save_code;
  const ExitCode code = Report(drawn, flags.json);
  if (!flags.grid.empty() && !flags.count &&
      drawn.message().find("params.count") != std::string::npos)
    std::fputs(fmt::format("note: --grid {} asks for {} images\n", Printable(flags.grid),
                           request->generation.count.value_or(1))
                   .c_str(),
               stderr);
  return code;
}

ExitCode Watch(const client::Client& client, const std::string& request_id, uint64_t after_sequence,
               GenerateFlags flags, const client::CallOptions& call) {
  const auto job = client.GetJob(request_id, WithTimeout(call, kQuestionTimeout));
  if (!job.ok()) return Report(job.status(), flags.json);
  client::Generation generation = job->params.request;
  generation.count = job->params.count;
  absl::Status fits = TakeFormat(flags, generation.format.value_or(client::ImageFormat::kPng));
  if (fits.ok()) fits = CheckOutputs(flags, generation, /*grid=*/false);
  if (!fits.ok()) return Report(fits, flags.json);
  const bool terminal = IsTerminal(STDOUT_FILENO) && !flags.json;
  std::unique_ptr<LiveView> view;
  if (terminal) view = std::make_unique<LiveView>(stdout, TerminalColoursOfEnvironment());
  Drawing drawing({}, view.get());
  const auto stream = client.WatchJob(
      request_id, after_sequence,
      {.on_event = [&drawing](const client::Event& event) { drawing.OnEvent(event); }}, call);
  const absl::Status drawn = stream->Wait();
  drawing.Finish();
  view.reset();
  const ExitCode save_code = Save(flags, /*grid_columns=*/0, drawing);
  return drawn.ok() ? save_code : Report(drawn, flags.json);
}

}  // namespace denoised::command
