// SPDX-License-Identifier: Apache-2.0
// What it costs that k is split by the shape of a layer alone, so that bits do not depend on the
// batch (docs/kernels.md): the products of a model on Hopper with the fastest tile for their
// splits, beside the fastest of all tiles and splits.
//
//   splits-bench --config=DIR/config.json [--rows=1,16,64,256] [--layers] [--json=FILE]
//
// A time is the best of graphs of launches with bias and what else the layer fuses, its operands in
// L2 where they fit; group norms are left out, also those that a convolution would do by itself.
// --layers tells the microseconds of each in 1, 2, 4 and 8 runs of k; * is what its shape asks for.

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <tuple>

#include "engine/backend/counting.h"
#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/device.h"
#include "engine/backend/decompose.h"
#include "engine/core/config_reader.h"
#include "engine/models/unet2d.h"

namespace denoised::cuda {
namespace {

/// What of a product's launch bears on its speed, without its operands.
struct Product {
  Conv2dLaunch launch;  // of one image
  bool add = false, residual = false, x2 = false, fp32_out = false;

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
                    .fp32_out = args.out.dtype() == DType::kF32};
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
                    .fp32_out = args.out.dtype() == DType::kF32};
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
    Noted& noted = noted_[product.key()];
    noted.product = product;
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
  Rows rows(Which which, int64_t rows, int channels, bool fp32 = false) const {
    DENOISED_CHECK(static_cast<size_t>(rows) * channels * (fp32 ? 4 : 2) <= kEach);
    return {at(which * kEach), channels, fp32 ? Element::kF32 : Element::kBf16, channels % 8 == 0};
  }

 private:
  void* at(size_t offset) const { return static_cast<std::byte*>(memory_.get()) + offset; }
  DeviceMemory memory_;
};

Conv2dLaunch LaunchOf(const Product& product, int images, const Operands& operands) {
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

/// Microseconds of a launch; none when the plan cannot do it or takes far longer than `best`.
absl::StatusOr<std::optional<double>> Time(const Conv2dLaunch& launch, const HopperPlan& plan,
                                           const Queue& queue, std::optional<double> best) {
  constexpr int kSamples = 6;
  constexpr double kHopeless = 1.3;
  const int launches = launch.images < 16 ? 16 : 4;
  cudaError_t refused = cudaSuccess;
  DENOISED_ASSIGN_OR_RETURN(const RecordedGraph recorded, RecordGraph(queue.stream, [&] {
                              for (int i = 0; i < launches && refused == cudaSuccess; ++i)
                                refused = LaunchConv2dHopper(launch, plan, queue);
                            }));
  if (refused == cudaErrorInvalidValue) return std::nullopt;
  DENOISED_RETURN_IF_ERROR(ToStatus(refused, "launch"));
  DENOISED_ASSIGN_OR_RETURN(const GraphExec graph, Instantiate(recorded.get()));
  DENOISED_ASSIGN_OR_RETURN(const Event begin, NewEvent(/*timing=*/true));
  DENOISED_ASSIGN_OR_RETURN(const Event end, NewEvent(/*timing=*/true));
  double least = 0;
  for (int i = 0; i <= kSamples; ++i) {  // the first is a warm-up
    DENOISED_RETURN_IF_ERROR(ToStatus(cudaEventRecord(begin.get(), queue.stream), "event"));
    DENOISED_RETURN_IF_ERROR(ToStatus(cudaGraphLaunch(graph.get(), queue.stream), "launch"));
    DENOISED_RETURN_IF_ERROR(ToStatus(cudaEventRecord(end.get(), queue.stream), "event"));
    DENOISED_RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(end.get()), "launch"));
    float milliseconds = 0;
    DENOISED_RETURN_IF_ERROR(
        ToStatus(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "event"));
    const double microseconds = 1e3 * milliseconds / launches;
    if (i > 0 && (least == 0 || microseconds < least)) least = microseconds;
    if (i == 1 && best && least > kHopeless * *best) break;
  }
  return least;
}

constexpr std::array kSplits = {1, 2, 4, 8};

/// Microseconds of the fastest tile for each of kSplits; none where k has too few steps for them.
using BySplits = std::array<std::optional<double>, kSplits.size()>;

absl::StatusOr<BySplits> FastestTiles(const Conv2dLaunch& launch, const Queue& queue) {
  constexpr int kMinSplitSteps = 4;
  const int steps = StepsOf(launch);
  BySplits fastest;
  for (size_t i = 0; i < kSplits.size(); ++i) {
    const int splits = kSplits[i];
    if (splits > 1 && steps < splits * kMinSplitSteps) continue;
    for (int index = 0; index < kHopperTiles; ++index) {
      const auto tile = static_cast<HopperTile>(index);
      const HopperTileSpec& spec = SpecOf(tile);
      const int most = !spec.IsPersistent()                                         ? splits
                       : spec.cost.Multicasts() || spec.split_k == SplitK::kCluster ? 2
                                                                                    : 1;
      for (int cluster = 1; cluster <= most; cluster *= 2) {
        const HopperPlan plan{tile, splits, cluster};
        DENOISED_ASSIGN_OR_RETURN(const auto microseconds, Time(launch, plan, queue, fastest[i]));
        if (microseconds && (!fastest[i] || *microseconds < *fastest[i])) fastest[i] = microseconds;
      }
    }
  }
  return fastest;
}

absl::Status Run(const std::string& file, const std::vector<int>& rows, bool layers,
                 const std::string& json_file) {
  DENOISED_ASSIGN_OR_RETURN(const auto context, Context::Open(0));
  cudaDeviceProp properties;
  DENOISED_RETURN_IF_ERROR(
      ToStatus(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties"));
  if (properties.major != 9 || properties.minor != 0)
    return FailedPrecondition("device 0 is a {}; splits are Hopper's alone", properties.name);
  const Queue queue{context->compute(), properties.multiProcessorCount, true, true};
  DENOISED_RETURN_IF_ERROR(ToStatus(LoadConv2dHopperKernels(), "loading kernels"));
  Operands operands;
  DENOISED_RETURN_IF_ERROR(operands.Allocate());

  DENOISED_ASSIGN_OR_RETURN(const auto json, ReadJsonFile(file));
  DENOISED_ASSIGN_OR_RETURN(const UNet2DConfig config, UNet2DConfig::Parse(json, file));
  Recorder recorder;
  DENOISED_ASSIGN_OR_RETURN(const std::shared_ptr<const Denoiser> model,
                            LoadUNet2D(recorder, config, Weights::Synthetic(1)));
  Arena arena = Arena::Measuring(Device::kCuda);
  nn::Context forward{recorder, arena};
  const DenoiserTraits& traits = model->traits();
  DenoiserInput input{.x = forward.New({1, traits.height, traits.width, traits.channels}),
                      .condition = forward.NewF32({1})};
  if (traits.condition == ClassCondition::kLabel) input.label = arena.New({1}, DType::kI32);
  if (traits.class_vector_size > 0) input.embedding = forward.NewF32({1, traits.class_vector_size});
  model->Forward(forward, input);

  fmt::print("{} on {}\n", file, properties.name);
  nlohmann::json figures = {{"device", properties.name}, {"rows", nlohmann::json::array()}};
  for (const int images : rows) {
    std::array<double, 2> sums = {};
    for (const auto& [key, noted] : recorder.noted()) {
      const Conv2dLaunch launch = LaunchOf(noted.product, images, operands);
      if (SuitsFewInputs(launch) || SuitsFewOutputs(launch) || !SuitsHopper(launch)) continue;
      const int fixed = HopperCandidates(launch, queue).front().plan.splits;
      DENOISED_ASSIGN_OR_RETURN(const BySplits fastest, FastestTiles(launch, queue));
      double by_shape = 0, any = 0;
      std::string all;
      for (size_t i = 0; i < kSplits.size(); ++i) {
        if (!fastest[i]) continue;
        if (kSplits[i] == fixed) by_shape = *fastest[i];
        any = any == 0 ? *fastest[i] : std::min(any, *fastest[i]);
        all += fmt::format(" {:.1f}{}", *fastest[i], kSplits[i] == fixed ? "*" : "");
      }
      sums[0] += noted.times * by_shape;
      sums[1] += noted.times * any;
      if (layers) fmt::print("  {} times {}:{}\n", noted.times, noted.product.name(), all);
    }
    fmt::print("{} rows: {:.3f} ms with splits by shape, {:.3f} ms with any: {:.3f}\n", images,
               1e-3 * sums[0], 1e-3 * sums[1], sums[0] / sums[1]);
    std::fflush(stdout);
    figures["rows"].push_back({{"config", file},
                               {"rows", images},
                               {"ms_by_shape", 1e-3 * sums[0]},
                               {"ms_any", 1e-3 * sums[1]}});
    if (json_file.empty()) continue;
    std::ofstream out(json_file);
    out << figures.dump(1) << '\n';
    if (!out.flush()) return Unavailable("{} cannot be written", json_file);
  }
  return absl::OkStatus();
}

absl::Status Main(int argc, char** argv) {
  std::string config, json_file;
  std::vector<int> rows = {1, 16, 64, 256};
  bool layers = false;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag.rfind("--config=", 0) == 0) {
      config = flag.substr(std::strlen("--config="));
    } else if (flag.rfind("--rows=", 0) == 0) {
      rows.clear();
      for (const char* at = flag.c_str() + std::strlen("--rows="); *at != '\0';) {
        char* end = nullptr;
        rows.push_back(static_cast<int>(std::strtol(at, &end, 10)));
        if (rows.back() < 1) return InvalidArgument("{}: rows are numbers ≥ 1", flag);
        at = *end == ',' ? end + 1 : end;
      }
    } else if (flag.rfind("--json=", 0) == 0) {
      json_file = flag.substr(std::strlen("--json="));
    } else if (flag == "--layers") {
      layers = true;
    } else {
      return InvalidArgument("unknown flag '{}'; see the head of tests/bench/splits_bench.cc",
                             flag);
    }
  }
  if (config.empty()) return InvalidArgument("--config=FILE is missing");
  return Run(config, rows, layers, json_file);
}

}  // namespace
}  // namespace denoised::cuda

int main(int argc, char** argv) {
  const absl::Status status = denoised::cuda::Main(argc, argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}
