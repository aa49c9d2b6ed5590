// SPDX-License-Identifier: Apache-2.0
// What a part of a pipeline, or all of it, makes of given inputs, for comparison with diffusers.
//
//   model-outputs --model=DIRECTORY --inputs=FILE --outputs=FILE [--device=cpu|cuda] [--fp32]
//                 [--prompt=TEXT]… [--steps=N] [--guidance=SCALE] PART
//
// Both files are safetensors. Inputs are F32, ids I32; images and latents are [N, H, W, C]. The
// output is one F32 tensor, "output".
//
//   PART          inputs                                            output
//   text_encoder  ids [N, tokens]                                   states after the final norm
//   unet          sample; timestep [N]; states [N, tokens, C];      prediction
//                 SDXL: pooled [N, C] and sizes [N, 6];
//                 LCM: guidance [N]
//   vae           latents, scaled as samplers see them              decoded images
//   vae_encoder   pixels in [−1, 1]                                 what the vae's encoder predicts
//   images        noise; --prompt, one for each image               images that the engine draws by
//                                                                   DDIM
//
// Kernels are chosen as by the server.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/backend/counting.h"
#include "engine/engine.h"
#include "engine/io/model_directory.h"
#include "engine/models/registry.h"
#include "tests/bench/draw_images.h"

namespace denoised {
namespace {

struct Options {
  BackendOptions backend = {.autotune = true};
  std::string model, inputs, outputs, part;
  std::vector<std::string> prompts;
  int steps = 20;
  double guidance = 7.5;
};

absl::Status ParseFlags(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const auto value = [&](std::string_view name) {
      return flag.starts_with(name) ? argv[i] + name.size() : nullptr;
    };
    if (const char* model = value("--model=")) {
      options->model = model;
    } else if (const char* inputs = value("--inputs=")) {
      options->inputs = inputs;
    } else if (const char* outputs = value("--outputs=")) {
      options->outputs = outputs;
    } else if (const char* device = value("--device=")) {
      options->backend.device = device;
    } else if (flag == "--fp32") {
      options->backend.fp32 = true;
    } else if (const char* prompt = value("--prompt=")) {
      options->prompts.emplace_back(prompt);
    } else if (const char* steps = value("--steps=")) {
      options->steps = std::atoi(steps);
    } else if (const char* guidance = value("--guidance=")) {
      options->guidance = std::atof(guidance);
    } else if (flag.starts_with("--") || !options->part.empty()) {
      return InvalidArgument("unexpected '{}'; see the head of tests/bench/model_outputs.cc", flag);
    } else {
      options->part = flag;
    }
  }
  if (options->model.empty() || options->inputs.empty() || options->outputs.empty() ||
      options->part.empty())
    return InvalidArgument("--model, --inputs, --outputs and a part are needed");
  return absl::OkStatus();
}

/// A part on a device, and the inputs from the file.
class Network {
 public:
  static absl::StatusOr<Tensor> Run(const Options& options, Safetensors inputs) {
    Network network(options, std::move(inputs));
    DENOISED_ASSIGN_OR_RETURN(network.backend_, OpenBackend(options.backend));
    DENOISED_ASSIGN_OR_RETURN(const Forward forward, network.Load());
    return network.Run(forward);
  }

 private:
  using Forward = std::function<Tensor(nn::Context&)>;

  Network(const Options& options, Safetensors inputs)
      : options_(options), inputs_(std::move(inputs)) {}

  absl::StatusOr<Forward> Load() {
    DENOISED_ASSIGN_OR_RETURN(const ModelDirectory directory, ModelDirectory::Read(options_.model));
    const bool encodes = options_.part == "vae_encoder";
    const auto part = directory.components.find(encodes ? "vae" : options_.part);
    if (part == directory.components.end())
      return NotFound("{} has no part '{}'", options_.model, options_.part);
    DENOISED_ASSIGN_OR_RETURN(const Weights weights, part->second.OpenWeights());
    if (part->first == "unet") return LoadDenoiser(directory, weights);
    if (part->first == "vae") return LoadCodec(directory, part->second, weights, encodes);
    return LoadTextEncoder(directory, part->second, weights);
  }

  absl::StatusOr<Forward> LoadTextEncoder(const ModelDirectory& directory,
                                          const ModelDirectory::Component& part,
                                          const Weights& weights) {
    DENOISED_ASSIGN_OR_RETURN(const auto* const known, FindTextEncoder(directory, options_.part));
    DENOISED_ASSIGN_OR_RETURN(std::shared_ptr<const TextEncoder> encoder,
                              known->load(*backend_, part, weights));
    DENOISED_ASSIGN_OR_RETURN(const Tensor ids, Upload("ids", DType::kI32));
    const int64_t rows = ids.dim(0), tokens = ids.dim(1);
    std::vector<int32_t> places, ends;  // nothing is pooled, so any end will do
    for (int64_t i = 0; i < rows * tokens; ++i) places.push_back(static_cast<int32_t>(i % tokens));
    for (int64_t row = 0; row < rows; ++row) ends.push_back(static_cast<int32_t>(row * tokens));
    TextInput input{.ids = ids.Reshape({rows * tokens})};
    DENOISED_ASSIGN_OR_RETURN(input.positions, Upload(places));
    DENOISED_ASSIGN_OR_RETURN(input.ends, Upload(ends));
    return [encoder, input](nn::Context& context) {
      return encoder->Forward(context, input, {}).states;
    };
  }

  absl::StatusOr<Forward> LoadDenoiser(const ModelDirectory& directory, const Weights& weights) {
    DENOISED_ASSIGN_OR_RETURN(const auto* const known, FindDenoiser(directory));
    DENOISED_ASSIGN_OR_RETURN(const Tensor states, UploadActivations("states"));
    Prompts prompts{.states = states};
    TextStates text{.features = static_cast<int>(states.dim(2))};
    if (inputs_.tensors().contains("pooled")) {
      DENOISED_ASSIGN_OR_RETURN(prompts.pooled, UploadActivations("pooled"));
      DENOISED_ASSIGN_OR_RETURN(const Tensor sizes, Upload("sizes", DType::kF32));
      prompts.sizes = sizes.Reshape({sizes.elements()});
      text.pooled_features = static_cast<int>(prompts.pooled.dim(1));
    }
    DENOISED_ASSIGN_OR_RETURN(std::shared_ptr<const Denoiser> model,
                              known->load(*backend_, directory.unet(), text, weights));
    if (model->traits().guidance_embedding) {
      DENOISED_ASSIGN_OR_RETURN(prompts.guidance, Upload("guidance", DType::kF32));
    }
    DenoiserInput input;
    DENOISED_ASSIGN_OR_RETURN(input.x, UploadActivations("sample"));
    DENOISED_ASSIGN_OR_RETURN(input.condition, Upload("timestep", DType::kF32));
    const int64_t rows = states.dim(0), tokens = states.dim(1);
    std::vector<int32_t> labels;
    for (int64_t row = 0; row < rows; ++row) labels.push_back(static_cast<int32_t>(row));
    DENOISED_ASSIGN_OR_RETURN(input.label, Upload(labels));
    const std::vector<int32_t> counts(rows, static_cast<int32_t>(tokens));
    DENOISED_ASSIGN_OR_RETURN(input.sets.key_counts, Upload(counts));
    return [model, prompts, input, rows, tokens](nn::Context& context) {
      const DenoiserTraits& traits = model->traits();
      DenoiserInput prompted = input;
      prompted.sets.keys_values = context.New({rows, tokens, traits.key_value_columns});
      if (traits.vector_features > 0)
        prompted.sets.vectors = context.New({rows, traits.vector_features});
      if (traits.time_features > 0) prompted.sets.times = context.New({rows, traits.time_features});
      model->Condition(context, prompts, prompted.sets);
      return model->Forward(context, prompted);
    };
  }

  absl::StatusOr<Forward> LoadCodec(const ModelDirectory& directory,
                                    const ModelDirectory::Component& part, const Weights& weights,
                                    bool encodes) {
    DENOISED_ASSIGN_OR_RETURN(const auto* const known, FindCodec(directory, "vae"));
    DENOISED_ASSIGN_OR_RETURN(std::shared_ptr<const Codec> codec,
                              known->load(*backend_, part, weights));
    if (encodes) {
      DENOISED_ASSIGN_OR_RETURN(const Tensor pixels, Upload("pixels", DType::kF32));
      return [codec, pixels](nn::Context& context) { return codec->Encode(context, pixels); };
    }
    DENOISED_ASSIGN_OR_RETURN(const Tensor latents, Upload("latents", DType::kF32));
    return [codec, latents](nn::Context& context) { return codec->Decode(context, latents); };
  }

  absl::StatusOr<Tensor> Input(const std::string& name, DType dtype) {
    const auto found = inputs_.tensors().find(name);
    if (found == inputs_.tensors().end())
      return NotFound("{}: no tensor '{}'", options_.inputs, name);
    if (found->second.dtype() != dtype)
      return InvalidArgument("{}: tensor '{}' is {}; expected {}", options_.inputs, name,
                             Name(found->second.dtype()), Name(dtype));
    return found->second;
  }
  absl::StatusOr<Tensor> Upload(const Tensor& host) {
    DENOISED_ASSIGN_OR_RETURN(Tensor tensor,
                              backend_->Allocate(host.shape(), host.dtype(), "an input"));
    backend_->Upload(host.data(), host.bytes(), tensor);
    return tensor;
  }
  absl::StatusOr<Tensor> Upload(const std::string& name, DType dtype) {
    DENOISED_ASSIGN_OR_RETURN(const Tensor host, Input(name, dtype));
    return Upload(host);
  }
  absl::StatusOr<Tensor> Upload(const std::vector<int32_t>& values) {
    const Tensor host = Tensor::Host({static_cast<int64_t>(values.size())}, DType::kI32);
    std::copy(values.begin(), values.end(), host.as<int32_t>());
    return Upload(host);
  }
  absl::StatusOr<Tensor> UploadActivations(const std::string& name) {
    DENOISED_ASSIGN_OR_RETURN(Tensor host, Input(name, DType::kF32));
    if (backend_->activation_dtype() == DType::kF32) return Upload(host);
    const Tensor halves = Tensor::Host(host.shape(), DType::kBF16);
    const std::span<const float> values = host.span<float>();
    std::transform(values.begin(), values.end(), halves.as<uint16_t>(), FloatToBFloat16);
    return Upload(halves);
  }

  /// F32 in host memory.
  absl::StatusOr<Tensor> Run(const Forward& forward) {
    CountingBackend counting(*backend_);
    Arena measuring = Arena::Measuring(backend_->device());
    nn::Context measured{counting, measuring};
    static_cast<void>(forward(measured));
    DENOISED_ASSIGN_OR_RETURN(
        Tensor block,
        backend_->Allocate({static_cast<int64_t>(measuring.peak())}, DType::kU8, "activations"));
    Arena arena(std::move(block));
    nn::Context context{*backend_, arena};
    Tensor out;
    DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<Graph> graph, backend_->Capture([&] {
      out = Tensor();  // its memory is free again where the body runs twice
      out = forward(context);
    }));
    backend_->Launch(*graph);
    DENOISED_ASSIGN_OR_RETURN(const Tensor host, backend_->BeginDownload(out)->Wait());
    return Tensor::HostF32(host.shape(), host.ToFloats());
  }

  const Options& options_;
  const Safetensors inputs_;
  std::unique_ptr<Backend> backend_;
};

/// What the engine draws from the noise, [N, H, W, C].
absl::StatusOr<Tensor> DrawnFromNoise(const Options& options, const Safetensors& inputs) {
  const auto noise = inputs.tensors().find("noise");
  if (noise == inputs.tensors().end()) return NotFound("{}: no tensor 'noise'", options.inputs);
  const auto count = static_cast<int>(noise->second.dim(0));
  DENOISED_ASSIGN_OR_RETURN(
      const std::unique_ptr<Engine> engine,
      Engine::Create(
          {.device = options.backend.device, .fp32 = options.backend.fp32, .max_rows = 2 * count}));
  DENOISED_RETURN_IF_ERROR(engine->Open("model", options.model));
  const auto model = engine->Find("model");
  JobSpec spec{.model = "model", .seed = 1, .count = count};
  for (const std::string& prompt : options.prompts) spec.prompts.push_back({.text = prompt});
  spec.guidance_scale = options.guidance;
  spec.sampler.sampler = Sampler::kDdim;
  spec.sampler.steps = options.steps;
  spec.height = static_cast<int>(noise->second.dim(1)) * model->latent_factor;
  spec.width = static_cast<int>(noise->second.dim(2)) * model->latent_factor;
  spec.initial_noise = noise->second;
  DENOISED_ASSIGN_OR_RETURN(const std::vector<float> pixels, DrawImages(*engine, spec));
  return Tensor::HostF32({count, spec.height, spec.width, model->channels}, pixels);
}

absl::Status Run(const Options& options) {
  DENOISED_ASSIGN_OR_RETURN(Safetensors inputs, Safetensors::Open(options.inputs));
  DENOISED_ASSIGN_OR_RETURN(const Tensor output, options.part == "images"
                                                     ? DrawnFromNoise(options, inputs)
                                                     : Network::Run(options, inputs));
  return WriteSafetensors(options.outputs, {{"output", output}}, {});
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) {
  denoised::Options options;
  absl::Status status = denoised::ParseFlags(argc, argv, &options);
  if (status.ok()) status = denoised::Run(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}
