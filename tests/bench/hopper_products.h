// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "engine/backend/counting.h"
#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/device.h"
#include "engine/backend/decompose.h"
#include "engine/core/config_reader.h"
#include "engine/models/registry.h"

/// The convolutions and linears of models as launches of Hopper's kernels, to time them one by one.

namespace denoised::cuda {

/// What of a product's launch bears on its speed, without its operands.
struct Product {
  Conv2dLaunch launch;  // of one image
  bool add = false, residual = false, x2 = false, fp32_out = false;
  bool may_gate = false, may_be_e4m3 = false;  // the model allows it in some layer

  std::string name() const {
    return fmt::format("{0}×{0} [{1}, {2}, {3}{4}] → [{5}, {6}, {7}]{8}", launch.kernel,
                       launch.height, launch.width, launch.channels,
                       x2 ? fmt::format(" + {}", launch.channels2) : "", launch.out_height,
                       launch.out_width, launch.outputs, residual ? ", residual" : "");
  }
  auto key() const {
    return std::tuple(launch.kernel, launch.stride, launch.pad_top, launch.upsample2x,
                      launch.height, launch.width, launch.channels, launch.channels2,
                      launch.outputs, launch.activation, add, residual, fp32_out);
  }
};

/// Notes the products of a forward of one row, and how often each comes.
class Recorder : public CountingBackend {
 public:
  Recorder() : CountingBackend(Device::kCuda, DType::kBF16) {}

  void Conv2d(const Conv2dArgs& asked) override {
    CountingBackend::Conv2d(asked);
    const Conv2dArgs args = IsToBeApplied(asked.prologue.norm) ? OfNormedInput(asked) : asked;
    Product product{.add = static_cast<bool>(args.epilogue.add),
                    .residual = static_cast<bool>(args.epilogue.residual),
                    .x2 = static_cast<bool>(args.prologue.x2),
                    .fp32_out = args.out.dtype() == DType::kF32,
                    .may_be_e4m3 = !args.weight->e4m3.name.empty()};
    Conv2dLaunch& launch = product.launch;
    const auto extent = [](const Tensor& tensor, int i) { return static_cast<int>(tensor.dim(i)); };
    launch.channels = extent(args.x, 3);
    launch.channels2 = args.prologue.x2 ? extent(args.prologue.x2, 3) : 0;
    launch.height = extent(args.x, 1), launch.width = extent(args.x, 2);
    launch.out_height = extent(args.out, 1), launch.out_width = extent(args.out, 2);
    launch.kernel = args.weight->kernel;
    launch.stride = args.stride;
    launch.pad_top = args.pad_top, launch.pad_left = args.pad_left;
    launch.upsample2x = args.prologue.upsample2x;
    launch.outputs = args.weight->out_channels;
    launch.activation = args.epilogue.activation;
    Note(product);
  }
  void Linear(const LinearArgs& args) override {
    CountingBackend::Linear(args);
    Product product{.residual = static_cast<bool>(args.epilogue.residual),
                    .fp32_out = args.out.dtype() == DType::kF32,
                    .may_gate = static_cast<bool>(args.epilogue.ungated),
                    .may_be_e4m3 = !args.weight->e4m3.name.empty()};
    Conv2dLaunch& launch = product.launch;
    launch.channels = args.weight->in_features;
    launch.height = launch.out_height = 1;
    launch.width = launch.out_width = static_cast<int>(RowsOf(args.x.shape()).tokens);
    launch.outputs = args.weight->out_features;
    launch.activation = args.epilogue.activation;
    if (launch.width > 1) Note(product);  // embeddings have a kernel of their own
  }

  struct Noted {
    Product product;
    int times = 0;
  };
  const auto& noted() const { return noted_; }

 private:
  void Note(const Product& product) {
    Noted& noted = noted_.try_emplace(product.key(), Noted{product}).first->second;
    noted.product.may_gate |= product.may_gate;
    noted.product.may_be_e4m3 |= product.may_be_e4m3;
    ++noted.times;
  }
  std::map<decltype(std::declval<Product>().key()), Noted> noted_;
};

/// Device memory for the largest operands there are, normal values all over.
class Operands {
 public:
  static constexpr size_t kEach = size_t{2} << 30;
  enum Which { kX, kX2, kWeight, kBias, kAdd, kResidual, kOut, kCount };

  absl::Status Allocate() {
    DENOISED_ASSIGN_OR_RETURN(memory_, AllocateDevice(kEach * kCount, "operands"));
    std::vector<uint16_t> values(size_t{8} << 20);
    std::mt19937 random{7};
    std::normal_distribution<float> normal(0, 0.05f);
    for (uint16_t& value : values) value = FloatToBFloat16(normal(random));
    const size_t bytes = values.size() * sizeof(uint16_t);
    DENOISED_RETURN_IF_ERROR(ToStatus(
        cudaMemcpy(memory_.get(), values.data(), bytes, cudaMemcpyHostToDevice), "operands"));
    for (size_t done = bytes; done < kEach * kCount; done += bytes)
      DENOISED_RETURN_IF_ERROR(ToStatus(
          cudaMemcpy(at(done), memory_.get(), bytes, cudaMemcpyDeviceToDevice), "operands"));
    return absl::OkStatus();
  }
  static bool Hold(int64_t rows, int channels, bool fp32 = false) {
    return static_cast<size_t>(rows) * channels * (fp32 ? 4 : 2) <= kEach;
  }
  Rows rows(Which which, int64_t rows, int channels, bool fp32 = false) const {
    DENOISED_CHECK(Hold(rows, channels, fp32));
    return {at(which * kEach), channels, fp32 ? Element::kF32 : Element::kBf16, channels % 8 == 0};
  }

 private:
  void* at(size_t offset) const { return static_cast<std::byte*>(memory_.get()) + offset; }
  DeviceMemory memory_;
};

/// In bf16, ungated.
inline Conv2dLaunch LaunchOf(const Product& product, int images, const Operands& operands) {
  Conv2dLaunch launch = product.launch;
  launch.images = images;
  const int64_t pixels = int64_t{images} * launch.height * launch.width;
  const int64_t out_pixels = int64_t{images} * launch.out_height * launch.out_width;
  launch.x = operands.rows(Operands::kX, pixels, launch.channels);
  if (product.x2) launch.x2 = operands.rows(Operands::kX2, pixels, launch.channels2);
  const int taps = launch.upsample2x ? 4 : launch.kernel * launch.kernel;
  const int depth = taps * (launch.channels + launch.channels2);
  launch.weight_stride = (depth + kDepthPadding - 1) / kDepthPadding * kDepthPadding;
  launch.weight = operands
                      .rows(Operands::kWeight, (launch.upsample2x ? 4 : 1) * launch.outputs,
                            launch.weight_stride)
                      .data;
  launch.weight_element = Element::kBf16;
  launch.bias = static_cast<const float*>(operands.rows(Operands::kBias, 1, launch.outputs).data);
  if (product.add) launch.add = operands.rows(Operands::kAdd, images, launch.outputs);
  if (product.residual)
    launch.residual = operands.rows(Operands::kResidual, out_pixels, launch.outputs);
  launch.out = operands.rows(Operands::kOut, out_pixels, launch.outputs, product.fp32_out);
  return launch;
}

/// Notes the products of a denoiser by its config, whose class the registry knows.
inline absl::Status RecordProducts(const std::string& file, Recorder* recorder) {
  DENOISED_ASSIGN_OR_RETURN(const auto json, ReadJsonFile(file));
  const ModelDirectory::Component part = {
      .class_name = json.value("_class_name", "UNet2DModel"), .config_file = file, .config = json};
  ModelDirectory directory;
  directory.components = {{"unet", part}};
  const auto number = [&](const char* field) {  // absent or null where there is none
    return json.contains(field) && json[field].is_number() ? json[field].get<int>() : 0;
  };
  const TextStates text = {.features = number("cross_attention_dim"),
                           .pooled_features = number("projection_class_embeddings_input_dim") -
                                              6 * number("addition_time_embed_dim")};
  const Weights weights = Weights::SyntheticToWrite(1);
  weights.SetInputScales(std::nullopt);  // names the layers that may be in e4m3
  DENOISED_ASSIGN_OR_RETURN(const DenoiserClass* const denoiser, FindDenoiser(directory));
  DENOISED_ASSIGN_OR_RETURN(const std::shared_ptr<const Denoiser> model,
                            denoiser->load(*recorder, part, text, weights));
  constexpr int kPromptTokens = 77;
  Arena arena = Arena::Measuring(Device::kCuda);
  nn::Context forward{*recorder, arena};
  const DenoiserTraits& traits = model->traits();
  DenoiserInput input{
      .x = forward.New({1, traits.height, traits.width, traits.channels + traits.extra_channels}),
      .condition = forward.NewF32({1})};
  if (traits.condition == ClassCondition::kLabel || traits.text_features > 0)
    input.label = arena.New({1}, DType::kI32);
  if (traits.class_vector_size > 0) input.embedding = forward.NewF32({1, traits.class_vector_size});
  if (traits.text_features > 0) {
    input.sets.keys_values = forward.New({1, kPromptTokens, traits.key_value_columns});
    input.sets.key_counts = arena.New({1}, DType::kI32);
    if (traits.vector_features > 0) input.sets.vectors = forward.New({1, traits.vector_features});
    if (traits.time_features > 0) input.sets.times = forward.New({1, traits.time_features});
  }
  model->Forward(forward, input);
  return absl::OkStatus();
}

/// "1,16,64"
inline absl::StatusOr<std::vector<int>> ReadRows(const std::string& flag, const char* at) {
  std::vector<int> rows;
  while (*at != '\0') {
    char* end = nullptr;
    rows.push_back(static_cast<int>(std::strtol(at, &end, 10)));
    if (rows.back() < 1) return InvalidArgument("{}: rows are numbers ≥ 1", flag);
    at = *end == ',' ? end + 1 : end;
  }
  return rows;
}

/// The device, which must be Hopper, with its kernels loaded.
struct HopperDevice {
  std::shared_ptr<Context> context;
  std::string name;
  Queue queue;

  static absl::StatusOr<HopperDevice> Open() {
    HopperDevice device;
    DENOISED_ASSIGN_OR_RETURN(device.context, Context::Open(0));
    cudaDeviceProp properties;
    DENOISED_RETURN_IF_ERROR(
        ToStatus(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties"));
    device.name = properties.name;
    if (properties.major != 9 || properties.minor != 0)
      return FailedPrecondition("device 0 is a {}; Hopper's tiles run on Hopper alone",
                                device.name);
    device.queue = {device.context->compute(), properties.multiProcessorCount, true, true};
    DENOISED_RETURN_IF_ERROR(ToStatus(LoadConv2dHopperKernels(), "loading kernels"));
    return device;
  }
};

}  // namespace denoised::cuda
