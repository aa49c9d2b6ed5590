// SPDX-License-Identifier: Apache-2.0
// Times every Hopper tile that may compute a product of the models, and tells what the cost model
// knows of it. fit_tile_costs.py makes the costs in hopper_tiles.h of it (docs/kernels.md).
//
//   tile-costs --config=DIR/config.json [--config=…] [--rows=1,2,4,16,64] [--precision=fp8]
//              [--seconds=80] --json=FILE
//
// A time is the best of graphs of launches, in alternation with the other tiles. Each launch has
// weights of its own, up to more than the L2 holds; its other operands are the same. Group norms
// are left out, also those that a convolution would do by itself. --precision=fp8 times the layers
// that may be in e4m3, in it, instead of all in bf16. Launches come in a random order, the same
// each time, until there are none left or the seconds are over.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>

#include "tests/bench/hopper_products.h"

namespace denoised::cuda {
namespace {

constexpr double kLongestMicroseconds = 1500;  // longer ones have nothing new to tell
constexpr double kGraphMicroseconds = 100;
constexpr int kRounds = 6, kFewRounds = 4;
constexpr size_t kColdBytes = size_t{96} << 20;  // more than an L2
constexpr int kFewOutputs = 320;

size_t WeightBytes(const Conv2dLaunch& launch) {
  return size_t{launch.upsample2x ? 4U : 1U} * launch.outputs * launch.weight_stride * 2;
}

/// Whether the operands of the product have room in memory.
bool Fits(const Product& product, int images) {
  const Conv2dLaunch& launch = product.launch;
  const int64_t pixels = int64_t{images} * launch.height * launch.width;
  const int64_t out_pixels = int64_t{images} * launch.out_height * launch.out_width;
  return Operands::Hold(pixels, launch.channels + launch.channels2 + kE4m3Vector) &&
         Operands::Hold(out_pixels, launch.outputs, product.fp32_out);
}

/// Fills the inputs and weights with numbers in e4m3.
absl::Status FillInE4m3(const Operands& operands, const Queue& queue) {
  constexpr int kColumns = 4096;
  constexpr int64_t kRows = Operands::kEach / (2 * kColumns);
  for (const Operands::Which which : {Operands::kX, Operands::kWeight}) {
    Rows rows = operands.rows(which, kRows, kColumns);
    rows.element = Element::kE4m3x2;
    DENOISED_RETURN_IF_ERROR(ToStatus(LaunchNoise(rows, kRows, kColumns, which, queue), "noise"));
  }
  return ToStatus(cudaStreamSynchronize(queue.stream), "noise");
}

/// The launch in e4m3, as the backend makes it of a layer whose input was rounded.
Conv2dLaunch InE4m3(Conv2dLaunch launch, const Operands& operands) {
  const int taps = launch.upsample2x ? 4 : launch.kernel * launch.kernel;
  const int bytes = RoundedBytes(launch.channels + launch.channels2);
  launch.channels = bytes / 2;
  launch.channels2 = 0;
  launch.x = {launch.x.data, launch.channels, Element::kE4m3x2, true, 1};
  launch.x2 = {};
  constexpr int kPadding = 2 * kDepthPadding;
  launch.weight_stride = (taps * bytes + kPadding - 1) / kPadding * kDepthPadding;
  launch.weight_element = Element::kE4m3x2;
  launch.scales = static_cast<const float*>(
      operands.rows(Operands::kBias, 1, launch.outputs + kBiasPadding).data);
  return launch;
}

Conv2dLaunch Gated(Conv2dLaunch launch, const Operands& operands) {
  launch.gated = true;
  const int features = launch.outputs / 2;
  const int64_t pixels = int64_t{launch.images} * launch.height * launch.width;
  launch.out = operands.rows(Operands::kOut, pixels, features);
  if (launch.x.element == Element::kE4m3x2 && features % kE4m3Vector == 0)
    launch.rounded_out = {launch.out.data, features / 2, Element::kE4m3x2, true, 1};
  return launch;
}

/// All launches, in a random order.
std::vector<Conv2dLaunch> LaunchesOf(const Recorder& recorder, const std::vector<int>& rows,
                                     bool fp8, const Operands& operands, const Queue& queue) {
  std::vector<Conv2dLaunch> launches;
  std::set<std::string> seen;
  const auto add = [&](const Conv2dLaunch& launch) {
    if (SuitsRowLinear(launch) || SuitsFewInputs(launch) || SuitsFewOutputs(launch) ||
        !SuitsHopper(launch) || (launch.gated && !SuitsGate(launch))) {
      return;
    }
    const std::vector<HopperCandidate> candidates = HopperCandidates(launch, queue);
    if (candidates.empty() || candidates[0].microseconds > kLongestMicroseconds) return;
    if (seen.insert(Describe(launch)).second) launches.push_back(launch);
  };
  for (const auto& [key, noted] : recorder.noted()) {
    const Product& product = noted.product;
    if (fp8 && !product.may_be_e4m3) continue;
    for (const int images : rows) {
      const auto launch_of = [&](const Product& each) {
        const Conv2dLaunch launch = LaunchOf(each, images, operands);
        return fp8 ? InE4m3(launch, operands) : launch;
      };
      if (!Fits(product, images)) continue;
      add(launch_of(product));
      if (product.may_gate) add(Gated(launch_of(product), operands));
      // Models have few layers for the tile that stores one by one.
      Product fp32 = product;
      fp32.fp32_out = true;
      if (!product.add && !product.residual && product.launch.outputs <= kFewOutputs &&
          Fits(fp32, images)) {
        add(launch_of(fp32));
      }
    }
  }
  std::shuffle(launches.begin(), launches.end(), std::mt19937{7});
  return launches;
}

/// Microseconds of a launch by each of the candidates.
absl::StatusOr<std::vector<double>> Time(const Conv2dLaunch& launch,
                                         const std::vector<HopperCandidate>& candidates,
                                         const Queue& queue) {
  struct Runner {
    GraphExec graph;
    Event begin, end;
  };
  const double expected = candidates[0].microseconds;
  const int launches = static_cast<int>(std::clamp(kGraphMicroseconds / expected, 2.0, 16.0));
  const int rounds = expected * launches > 2 * kGraphMicroseconds ? kFewRounds : kRounds;
  const size_t weight_bytes = (WeightBytes(launch) + 1023) / 1024 * 1024;
  const int weights = static_cast<int>(std::max<size_t>(kColdBytes / weight_bytes, 1));
  int place = 0;  // of the weights, which no two candidates begin with in turn
  std::vector<Runner> runners(candidates.size());
  for (size_t i = 0; i < runners.size(); ++i) {
    cudaError_t error = cudaSuccess;
    DENOISED_ASSIGN_OR_RETURN(const RecordedGraph recorded, RecordGraph(queue.stream, [&] {
                                for (int n = 0; n < launches && error == cudaSuccess; ++n) {
                                  Conv2dLaunch at = launch;
                                  at.weight = static_cast<const std::byte*>(launch.weight) +
                                              weight_bytes * place;
                                  place = (place + 1) % weights;
                                  error = LaunchConv2dHopper(at, candidates[i].plan, queue);
                                }
                              }));
    DENOISED_RETURN_IF_ERROR(
        ToStatus(error, fmt::format("{} by {}", Describe(launch), NameOf(candidates[i].plan))));
    DENOISED_ASSIGN_OR_RETURN(runners[i].graph, Instantiate(recorded.get()));
    DENOISED_ASSIGN_OR_RETURN(runners[i].begin, NewEvent(/*timing=*/true));
    DENOISED_ASSIGN_OR_RETURN(runners[i].end, NewEvent(/*timing=*/true));
  }
  std::vector<double> best(runners.size(), INFINITY);
  for (int round = 0; round < rounds; ++round) {
    for (const Runner& runner : runners) {
      DENOISED_RETURN_IF_ERROR(
          ToStatus(cudaEventRecord(runner.begin.get(), queue.stream), "event"));
      DENOISED_RETURN_IF_ERROR(
          ToStatus(cudaGraphLaunch(runner.graph.get(), queue.stream), "launch"));
      DENOISED_RETURN_IF_ERROR(ToStatus(cudaEventRecord(runner.end.get(), queue.stream), "event"));
    }
    DENOISED_RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(queue.stream), "launch"));
    for (size_t i = 0; i < runners.size(); ++i) {
      float milliseconds = 0;
      DENOISED_RETURN_IF_ERROR(ToStatus(
          cudaEventElapsedTime(&milliseconds, runners[i].begin.get(), runners[i].end.get()),
          "event"));
      best[i] = std::min(best[i], 1e3 * milliseconds / launches);
    }
  }
  return best;
}

/// kTiles as this program was built with it.
nlohmann::json TilesAsJson() {
  nlohmann::json tiles = nlohmann::json::array();
  for (int row = 0; row < kHopperTiles; ++row) {
    const HopperTileCost& cost = kTiles[row].cost;
    const auto costs = [](const HopperTileCost::Launch& of) {
      return nlohmann::json{
          {"launch", of.launch}, {"step", of.step}, {"finish", of.finish}, {"busy", of.busy}};
    };
    tiles.push_back({{"name", NameOf({.tile = HopperTile(row)})},
                     {"single", costs(cost.single)},
                     {"multicast", cost.Multicasts() ? costs(cost.multicast) : nullptr},
                     {"fold", cost.fold},
                     {"alone", cost.alone}});
  }
  return tiles;
}

struct Options {
  std::vector<std::string> configs;
  std::vector<int> rows = {1, 2, 4, 16, 64};
  bool fp8 = false;
  double seconds = 80;
  std::string json;
};

absl::Status Run(const Options& options) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  DENOISED_ASSIGN_OR_RETURN(const HopperDevice device, HopperDevice::Open());
  const Queue& queue = device.queue;
  Operands operands;
  DENOISED_RETURN_IF_ERROR(operands.Allocate());
  if (options.fp8) DENOISED_RETURN_IF_ERROR(FillInE4m3(operands, queue));
  Recorder recorder;
  for (const std::string& config : options.configs)
    DENOISED_RETURN_IF_ERROR(RecordProducts(config, &recorder));

  const std::vector<Conv2dLaunch> launches =
      LaunchesOf(recorder, options.rows, options.fp8, operands, queue);
  fmt::print("{}: {} launches of {} products; {:.1f} s\n", device.name, launches.size(),
             recorder.noted().size(), seconds());
  std::fflush(stdout);
  nlohmann::json measured = nlohmann::json::array();
  for (const Conv2dLaunch& launch : launches) {
    if (seconds() > options.seconds) break;
    const std::vector<HopperCandidate> candidates = HopperCandidates(launch, queue);
    DENOISED_ASSIGN_OR_RETURN(const std::vector<double> times, Time(launch, candidates, queue));
    nlohmann::json list = nlohmann::json::array();
    for (size_t i = 0; i < candidates.size(); ++i) {
      const HopperPlan& plan = candidates[i].plan;
      const HopperWork work = WorkOf(plan, launch, queue);
      list.push_back({{"tile", static_cast<int>(plan.tile)},
                      {"name", NameOf(plan)},
                      {"multicasts", work.multicasts},
                      {"busy", work.busy},
                      {"steps", work.steps},
                      {"finishes", work.finishes},
                      {"folds", work.folds},
                      {"expected", candidates[i].microseconds},
                      {"measured", times[i]}});
    }
    measured.push_back({{"launch", Describe(launch)}, {"candidates", std::move(list)}});
  }
  fmt::print("{} of {} launches measured; {:.1f} s\n", measured.size(), launches.size(), seconds());
  std::ofstream out(options.json);
  out << nlohmann::json{{"device", device.name},
                        {"tiles", TilesAsJson()},
                        {"launches", std::move(measured)}}
             .dump()
      << '\n';
  if (!out.flush()) return Unavailable("{} cannot be written", options.json);
  return absl::OkStatus();
}

absl::Status Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&](const char* name) -> const char* {
      return flag.rfind(name, 0) == 0 ? argv[i] + std::strlen(name) : nullptr;
    };
    if (const char* config = value("--config=")) {
      options.configs.push_back(config);
    } else if (const char* rows = value("--rows=")) {
      DENOISED_ASSIGN_OR_RETURN(options.rows, ReadRows(flag, rows));
    } else if (flag == "--precision=fp8") {
      options.fp8 = true;
    } else if (const char* seconds = value("--seconds=")) {
      options.seconds = std::strtod(seconds, nullptr);
      if (!(options.seconds > 0)) return InvalidArgument("{}: expected seconds above 0", flag);
    } else if (const char* json = value("--json=")) {
      options.json = json;
    } else {
      return InvalidArgument("unknown flag '{}'; see the head of tests/bench/tile_costs.cc", flag);
    }
  }
  if (options.configs.empty()) return InvalidArgument("--config=FILE is missing");
  if (options.json.empty()) return InvalidArgument("--json=FILE is missing");
  return Run(options);
}

}  // namespace
}  // namespace denoised::cuda

int main(int argc, char** argv) {
  const absl::Status status = denoised::cuda::Main(argc, argv);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}
