#include "command/generate_flags.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdint>

#include "denoised/generation.h"

namespace denoised::command {
namespace {

template <typename Enum>
std::vector<std::string> Names(const std::vector<Enum>& values) {
  std::vector<std::string> names;
  for (const Enum value : values) names.emplace_back(client::Name(value));
  return names;
}

/// What is too large, and what is negative, CLI11 would wrap.
CLI::Validator Seed() {
  return CLI::Validator(
      [](std::string& text) {
        uint64_t seed = 0;
        const char* const end = text.data() + text.size();
        const auto [read, error] = std::from_chars(text.data(), end, seed);
        if (error == std::errc() && read == end) return std::string();
        return fmt::format("{} is no seed; use a whole number from 0 to {}", text, UINT64_MAX);
      },
      "");
}

}  // namespace

void AddGenerateFlags(CLI::App& command, GenerateFlags& flags) {
  constexpr char kWhat[] = "What to draw";
  command.add_option("-m,--model", flags.model, "Model; needed when the server holds several")
      ->group(kWhat);
  command
      .add_option("-l,--labels", flags.labels,
                  "Classes, by index or by name: 3,1,4 or cat,dog. With more images than classes "
                  "they repeat in order")
      ->delimiter(',')
      ->group(kWhat);
  command
      .add_option("--class-vectors", flags.class_vectors,
                  "Class condition as numbers, for models that take them")
      ->delimiter(',')
      ->group(kWhat);
  command.add_option("-n,--count", flags.count, "Number of images")->group(kWhat);
  command
      .add_option("-g,--grid", flags.grid,
                  "Draw COLUMNSxROWS images into one PNG, a contact sheet: 4x4")
      ->group(kWhat);
  command
      .add_option(
          "-s,--seed", flags.seeds,
          "Image i has seed + i; several, 7,9,12, are one for each image. The same seed, the "
          "same bytes")
      ->delimiter(',')
      ->check(Seed())
      ->group(kWhat);
  command.add_option("--size", flags.size, "Pixels: 64 or WIDTHxHEIGHT")->group(kWhat);
  command
      .add_option("--init-image", flags.init_image,
                  "Start from this picture (PNG, JPEG, WebP or .npy) instead of noise")
      ->group(kWhat);
  command
      .add_option("--strength", flags.strength,
                  "How much of --init-image is drawn anew, above 0 up to 1")
      ->group(kWhat);
  command
      .add_option(
          "--noise", flags.noise,
          "Start from this noise: .npy, or raw float32; [count, height, width, channels] in "
          "standard normal scale")
      ->group(kWhat);

  constexpr char kHow[] = "How to draw it (unset: as the model prefers; see denoise models NAME)";
  command.add_option("--steps", flags.steps, "Denoising steps")->group(kHow);
  command.add_option("--sampler", flags.sampler, "How one state follows from another")
      ->check(CLI::IsMember(Names(client::AllSamplers())))
      ->group(kHow);
  command.add_option("--schedule", flags.schedule, "How noise levels are spaced")
      ->check(CLI::IsMember(Names(client::AllNoiseSchedules())))
      ->group(kHow);
  command
      .add_option(
          "--guidance", flags.guidance,
          "Classifier-free guidance: above 1 the class shows more clearly, at twice the cost")
      ->group(kHow);
  command.add_option("--eta", flags.eta, "Noise of ddim, 0 to 1")->group(kHow);
  command.add_option("--churn", flags.churn, "Noise of euler, heun and edm_euler")->group(kHow);
  command.add_option("--churn-min", flags.churn_min, "Churn at this noise level and above")
      ->group(kHow);
  command.add_option("--churn-max", flags.churn_max, "Churn at this noise level and below")
      ->group(kHow);
  command.add_option("--churn-noise", flags.churn_noise, "Inflation of the noise that churn adds")
      ->group(kHow);
  command.add_option("--order", flags.order, "Order of dpm_solver and uni_pc, 1 to 3")->group(kHow);

  constexpr char kOutput[] = "Where it goes";
  command
      .add_option("-o,--out", flags.out,
                  "File; {index}, {seed}, {label} and {model} are filled in; - is stdout. "
                  "Default: denoised.png, or denoised-{index}.png")
      ->group(kOutput);
  command
      .add_option("--format", flags.format,
                  "npy: a NumPy array of float32 in [-1, 1]; raw: the same without a header")
      ->check(CLI::IsMember({"png", "jpeg", "webp", "npy", "raw"}))
      ->capture_default_str()
      ->group(kOutput);
  command.add_option("--quality", flags.quality, "Of jpeg and webp, 1 to 100")->group(kOutput);
  command.add_flag("-p,--previews", flags.previews, "Show the denoising live in the terminal")
      ->group(kOutput);
  command
      .add_option("--preview-every", flags.preview_every,
                  "A preview every so many evaluations of the model")
      ->group(kOutput);
  command
      .add_option("--preview-kind", flags.preview_kind,
                  "What previews show: the picture that the model predicts, or the noisy state")
      ->check(CLI::IsMember({"predicted_x0", "noisy_state"}))
      ->capture_default_str()
      ->group(kOutput);
  command.add_option("-a,--animate", flags.animate, "Save the denoising as an animated .webp file")
      ->group(kOutput);
  command
      .add_flag("--json", flags.json,
                "On stdout a JSON object in a line for each file, then one for the whole")
      ->group(kOutput);
  command.add_option("--timeout", flags.timeout_seconds, "Give up after so many seconds")
      ->check(CLI::Range(0.001, 1e6))
      ->group(kOutput);
  command
      .add_option("--request-id", flags.request_id,
                  "Name of the request in the server's log; the same request again gets the same "
                  "images without drawing them twice")
      ->group(kOutput);
  command
      .add_option("--priority", flags.priority,
                  "interactive goes before normal, normal before batch")
      ->check(CLI::IsMember(Names(client::AllPriorities())))
      ->group(kOutput);
  command
      .add_flag(
          "--detach", flags.detach,
          "Return once the request is queued and print its id, for denoise jobs; with several "
          "servers it is known to the one that took it")
      ->group(kOutput);
  command
      .add_flag("--timings", flags.timings, "With --json: when what happened, under \"timeline\"")
      ->needs("--json")
      ->group(kOutput);

  command.footer(R"(Examples:
  denoise generate                                    one picture, denoised.png
  denoise generate --grid 4x4 --previews              sixteen, watched as they come
  denoise generate -l 0,1,2,3 --seed 42 -o "{label}.png"
  denoise generate -l 7 --seed 3,14,15 -o "{seed}.png"
  denoise generate --steps 40 --sampler heun --churn 10 --animate denoising.webp
  denoise generate --init-image sketch.png --strength 0.6
  denoise generate -n 100 -o "{seed}.webp" --format webp --json | jq -r .path)");
}

}  // namespace denoised::command
