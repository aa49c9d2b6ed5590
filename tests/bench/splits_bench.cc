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

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "tests/bench/hopper_products.h"

namespace denoised::cuda {
namespace {

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
  DENOISED_ASSIGN_OR_RETURN(const HopperDevice device, HopperDevice::Open());
  const Queue& queue = device.queue;
  Operands operands;
  DENOISED_RETURN_IF_ERROR(operands.Allocate());

  Recorder recorder;
  DENOISED_RETURN_IF_ERROR(RecordProducts(file, &recorder));

  fmt::print("{} on {}\n", file, device.name);
  nlohmann::json figures = {{"device", device.name}, {"rows", nlohmann::json::array()}};
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
      DENOISED_ASSIGN_OR_RETURN(rows, ReadRows(flag, argv[i] + std::strlen("--rows=")));
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
