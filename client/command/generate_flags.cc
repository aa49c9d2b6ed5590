// SPDX-License-Identifier: Apache-2.0
#include "command/generate_flags.h"

#include <fmt/format.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "command/completion.h"
#include "denoised/generation.h"
#include "flags/flags.h"

namespace denoised::command {
namespace {

/// As the server checks it, whose messages have ASCII only and so cannot quote a wrong one.
CLI::Validator IsARequestId() {
  return CLI::Validator(
      [](const std::string& id) {
        const bool printable = std::all_of(id.begin(), id.end(), absl::ascii_isprint);
        if (printable && id.size() <= 128) return std::string();
        return fmt::format("\"{}\" is not 1 to 128 printable ASCII characters; use another id", id);
      },
      "");
}

template <typename Enum>
std::vector<std::string> Names(const std::vector<Enum>& values) {
  std::vector<std::string> names;
  names.reserve(values.size());
  for (const Enum value : values) names.emplace_back(client::Name(value));
  return names;
}

void AddContentFlags(CLI::App& command, GenerateFlags& flags) {
  command.option_defaults()->group("What to generate");
  command
      .add_option(
          "-m,--model", flags.model,
          "Model: name, name@version or alias. Default: the server's only model that reads the "
          "given prompt or labels")
      ->type_name(kModel);
  command.add_option(
      "PROMPT", flags.prompts,
      "What the images should show, for models that read text. Several: one for each "
      "image");
  command.add_option("--negative", flags.negative,
                     "What the images should not show. Default: the model's");
  command
      .add_option(
          "-l,--labels", flags.labels,
          "Class of each image, by index or name: 3,1,4 or cat,dog. Repeats in order if there "
          "are more images than classes. Default: random")
      ->delimiter(',')
      ->allow_extra_args(false);  // what follows is a PROMPT
  command
      .add_option(
          "--class-vectors", flags.class_vectors,
          "Class condition as numbers, for models that take numbers (see denoise models NAME): one "
          "vector for all images, or one for each")
      ->delimiter(',')
      ->allow_extra_args(false);  // what follows is a PROMPT
  command
      .add_option("-n,--count", flags.count,
                  "Number of images. Default: 1, or one per label or seed")
      ->check(flags::Between(1, INT32_MAX));
  command.add_option("-g,--grid", flags.grid,
                     "Generate COLUMNSxROWS images and save them as one PNG contact sheet: 4x4");
  command
      .add_option(
          "-s,--seed", flags.seeds,
          "Seed of the first image; image i uses seed + i. Or a seed for each image: 7,9,12. "
          "The same seed gives the same bytes. Default: random")
      ->delimiter(',')
      ->allow_extra_args(false);  // what follows is a PROMPT
  command.add_option(
      "--size", flags.size,
      "Size in pixels: 64 or WIDTHxHEIGHT. Default: that of --init-image if there is one "
      "and no --mask, else the model's");
  command
      .add_option("--init-image", flags.init_image,
                  "Start from this picture (PNG, JPEG, WebP or .npy) instead of noise")
      ->type_name(kFile)
      ->check(NamesAFile());
  command.add_option("--strength", flags.strength,
                     "How much of --init-image to change: above 0, up to 1 (keeps nothing of it). "
                     "Default: the model's, mostly 0.8, and 1 with --mask");
  command
      .add_option("--mask", flags.mask,
                  "Redraw only a part of --init-image: a picture of the same size, white where to "
                  "redraw (PNG, JPEG, WebP or .npy)")
      ->type_name(kFile)
      ->check(NamesAFile());
  command
      .add_option(
          "--noise", flags.noise,
          "Start from this noise: a file of float32 [count, height, width, channels] with unit "
          "variance, .npy or raw")
      ->type_name(kFile)
      ->check(NamesAFile());

  command.add_option(
      "--prompt-2", flags.prompt_2,
      "Prompt for the second text encoder, of models that have two. Default: PROMPT");
  command.add_option("--negative-2", flags.negative_2,
                     "--negative for the second text encoder. Default: --negative");
}

void AddSamplingFlags(CLI::App& command, GenerateFlags& flags) {
  command.option_defaults()->group(
      "Sampling (other defaults: the model's; see denoise models NAME)");
  command.add_option("--steps", flags.steps, "Number of denoising steps");
  command.add_option("--sampler", flags.sampler, "Sampling algorithm")
      ->check(flags::OneOf(Names(client::AllSamplers())));
  command.add_option("--schedule", flags.schedule, "Spacing of the noise levels")
      ->check(flags::OneOf(Names(client::AllNoiseSchedules())));
  command.add_option(
      "--guidance", flags.guidance,
      "Classifier-free guidance scale: above 1 the images follow the prompt or class more closely, "
      "at twice the cost. 1: off");
  command.add_option(
      "--image-guidance", flags.image_guidance,
      "How closely the images follow --init-image, for models that edit pictures; above "
      "1 a step costs three times as much as without guidance, at 1 twice");
  command.add_option(
      "--guidance-rescale", flags.guidance_rescale,
      "How much to undo the contrast that guidance adds, 0 (not at all) to 1. Default: "
      "0");
  command.add_option(
      "--guidance-start", flags.guidance_start,
      "Start guidance after this fraction of the steps; steps before it are cheaper. "
      "Default: 0");
  command.add_option(
      "--guidance-stop", flags.guidance_stop,
      "Stop guidance after this fraction of the steps; steps after it are cheaper. Default: 1");
  command.add_option("--eta", flags.eta,
                     "Noise added by ddim and tcd, from 0 (none) to 1. Default: 0");
  command.add_option("--churn", flags.churn,
                     "Noise added by euler, heun and edm_euler (s_churn). Default: 0, none");
  command.add_option("--churn-min", flags.churn_min,
                     "Add churn only at this noise level (sigma) and above. Default: 0");
  command.add_option("--churn-max", flags.churn_max,
                     "Add churn only at this noise level (sigma) and below. Default: no limit");
  command.add_option("--churn-noise", flags.churn_noise,
                     "Scale of the noise that churn adds (s_noise). Default: 1");
  command.add_option("--clip-skip", flags.clip_skip,
                     "Number of layers to skip at the end of the text encoder. Default: 0");
  command.add_option(
      "--max-chunks", flags.max_chunks,
      "Maximum number of chunks (75 tokens for CLIP) read from each prompt; diffusers "
      "reads 1. Default: as many as the server allows");
  command.add_option("--order", flags.order,
                     "Order of deis, uni_pc and the samplers named dpm_solver: 1, 2 or 3");
}

void AddOutputFlags(CLI::App& command, GenerateFlags& flags) {
  command.option_defaults()->group("Output and request");
  command
      .add_option(
          "-o,--out", flags.out,
          "Output file; {index}, {seed}, {label} and {model} are replaced, and what would be one "
          "file for two images gets -{index}, too; - is stdout. "
          "Default: denoised.png, or denoised-{index}.png for several images")
      ->type_name(kFile)
      ->check(NamesAFile());
  command
      .add_option(
          "--format", flags.format,
          "File format; npy: a NumPy array of float32 in [-1, 1]; raw: the same without a header. "
          "Default: what the name of --out ends in, else png")
      ->check(flags::OneOf({"png", "jpeg", "webp", "npy", "raw"}));
  command.add_option("--quality", flags.quality,
                     "Quality of jpeg and webp files, 1 to 100. Default: 90");
  CLI::Option* const previews = command.add_flag_function(
      "-p,--previews", [&flags](int64_t given) { flags.previews = given > 0; },
      "Show the images in the terminal while they are denoised. Default: in a terminal with "
      "colours, unless --request-id is given");
  command
      .add_flag_function(
          "--no-previews", [&flags](int64_t given) { flags.previews = given <= 0; },
          "Show only the progress")
      ->excludes(previews);
  command
      .add_option("--preview-every", flags.preview_every,
                  "Make a preview every N evaluations of the model. Default: 1 with --previews "
                  "or --animate, else 4")
      ->check(flags::Between(1, INT32_MAX));
  command
      .add_option("--preview-kind", flags.preview_kind,
                  "What previews show: the model's prediction of the final image, or the noisy "
                  "state. Default: predicted_x0")
      ->check(flags::OneOf({"predicted_x0", "noisy_state"}));
  command
      .add_option(
          "--preview-decoder", flags.preview_decoder,
          "How previews of latents are decoded: \"linear\", one colour per latent pixel, or "
          "\"tiny\", a small autoencoder. Default: tiny if the model has it")
      ->check(flags::OneOf({"linear", "tiny"}));
  command
      .add_option(
          "-a,--animate", flags.animate,
          "Save the denoising as an animation, a .webp file with a frame for each preview. "
          "The server may leave previews out: beyond its --max-previews-per-second, and for "
          "a slow connection")
      ->type_name(kFile)
      ->check(NamesAFile());
  command.add_flag("--json", flags.json,
                   "Print JSON: a line for each file, then a line for the request");
  command
      .add_option("--timeout", flags.timeout_seconds,
                  "Give up after this many seconds. Default: never")
      ->check(flags::Between(0.001, 1e6));
  command
      .add_option("--request-id", flags.request_id,
                  "Id of the request, also in the server's log. The same request with the same id "
                  "returns the same images and is computed once. Default: the server makes one")
      ->check(IsARequestId());
  command
      .add_option("--priority", flags.priority,
                  "Priority in the queue, highest first. Default: normal")
      ->check(flags::OneOf(Names(client::AllPriorities())));
  command.add_flag(
      "--detach", flags.detach,
      "Print the id of the request as soon as it is queued, and exit. The job goes on; see "
      "denoise jobs --help");
  command
      .add_flag(
          "--timings", flags.timings,
          "With --json: add \"timeline\", the times at which the request was queued, evaluated and "
          "sent")
      ->needs("--json");
}

}  // namespace

CLI::Validator NamesAFile() {
  return CLI::Validator(
      [](const std::string& path) { return path.empty() ? "it is empty; name a file" : ""; }, "");
}

void AddGenerateFlags(CLI::App& command, GenerateFlags& flags) {
  AddContentFlags(command, flags);
  AddSamplingFlags(command, flags);
  AddOutputFlags(command, flags);
  command.footer(
      R"(Examples, with the two models that ship with denoised: a prompt is for emoji-64, a label for mnist-32.
  denoise generate "a red apple" --negative leaf      one image, denoised.png
  denoise generate "a green heart" --grid 4x4         sixteen images on one sheet
  denoise generate "pizza" "rocket" -o "{index}.png"  two prompts, two images
  denoise generate -l 0,1,2,3 --seed 42 -o "{label}.png"
  denoise generate -l 7 --seed 3,14,15 -o "{seed}.png"
  denoise generate -l 3 --steps 40 --sampler heun --churn 10 --animate denoising.webp
  denoise generate "a blue apple" --init-image denoised.png --strength 0.6 -o blue.png
  denoise generate -l 7 -n 100 -o "{seed}.webp" --json | jq -r '.path // empty')");
}

}  // namespace denoised::command
