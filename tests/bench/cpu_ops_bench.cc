// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <algorithm>
#include <random>

#include "engine/backend/backend.h"

/// The CPU backend on the layers of a small pixel UNet (32×32 images, 64 to 128 channels), 16 rows.
/// tests/bench/cpu_ops_torch.py times PyTorch on the same layers.

namespace denoised {
namespace {

Backend& Cpu() {
  static const std::unique_ptr<Backend> backend = OpenBackend({.device = "cpu"}).value();
  return *backend;
}

Tensor Random(const Shape& shape) {
  static std::mt19937 random(1);
  std::normal_distribution<float> normal;
  Tensor tensor = Tensor::Host(shape, DType::kF32);
  for (float& value : tensor.span<float>()) value = normal(random);
  return tensor;
}

/// Other programs on the machine only ever add time: with --benchmark_repetitions this is the
/// figure.
double Least(const std::vector<double>& times) {
  return *std::min_element(times.begin(), times.end());
}

/// rows, height, in, out, kernel
void BM_Conv2d(benchmark::State& state) {
  const int64_t rows = state.range(0), height = state.range(1), in = state.range(2),
                out = state.range(3), kernel = state.range(4);
  const auto packed =
      Cpu().PackConv2d(Random({out, in, kernel, kernel}), Random({out}), false).value();
  const int pad = static_cast<int>(kernel / 2);
  Conv2dArgs args{.x = Random({rows, height, height, in}),
                  .weight = packed.get(),
                  .pad_top = pad,
                  .pad_left = pad,
                  .pad_bottom = pad,
                  .pad_right = pad};
  args.epilogue.add = Random({rows, out});
  args.epilogue.residual = Random({rows, height, height, out});
  args.out = Random({rows, height, height, out});
  Cpu().Conv2d(args);
  for (auto _ : state) Cpu().Conv2d(args);
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * static_cast<double>(args.out.elements() * in * kernel * kernel),
                         benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Conv2d)
    ->Args({16, 32, 1, 64, 3})
    ->Args({16, 32, 64, 1, 3})
    ->Args({16, 32, 64, 64, 3})
    ->Args({16, 32, 128, 64, 3})
    ->Args({16, 32, 128, 64, 1})
    ->Args({16, 16, 64, 128, 3})
    ->Args({16, 16, 128, 128, 3})
    ->Args({16, 16, 256, 128, 3})
    ->Args({16, 8, 128, 128, 3})
    ->Args({16, 8, 256, 128, 3})
    ->Args({1, 32, 64, 64, 3})
    ->Args({1, 8, 128, 128, 3})
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime()
    ->UseRealTime()
    ->ComputeStatistics("min", Least);

/// rows, height, channels
void BM_GroupNormSilu(benchmark::State& state) {
  const int64_t rows = state.range(0), height = state.range(1), channels = state.range(2);
  GroupNormArgs args{.x = Random({rows, height, height, channels}),
                     .norm = {.gamma = Random({channels}),
                              .beta = Random({channels}),
                              .groups = 32,
                              .activation = Activation::kSilu}};
  args.out = Random(args.x.shape());
  for (auto _ : state) Cpu().GroupNorm(args);
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * args.x.bytes() * 2));
}
BENCHMARK(BM_GroupNormSilu)
    ->Args({16, 32, 64})
    ->Args({16, 32, 128})
    ->Args({16, 16, 128})
    ->Args({16, 8, 256})
    ->Args({1, 32, 64})
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime()
    ->UseRealTime()
    ->ComputeStatistics("min", Least);

/// rows, tokens, width, heads
void BM_Attention(benchmark::State& state) {
  const int64_t rows = state.range(0), tokens = state.range(1), width = state.range(2);
  const Tensor qkv = Random({rows, tokens, 3 * width});
  AttentionArgs args{.q = qkv.Columns(0, width),
                     .k = qkv.Columns(width, width),
                     .v = qkv.Columns(2 * width, width),
                     .heads = static_cast<int>(state.range(3)),
                     .scale = 0.125f,
                     .out = Random({rows, tokens, width})};
  for (auto _ : state) Cpu().Attention(args);
  state.counters["GFLOP/s"] =
      benchmark::Counter(4e-9 * static_cast<double>(rows * tokens * tokens * width),
                         benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Attention)
    ->Args({16, 256, 128, 1})
    ->Args({16, 256, 128, 16})
    ->Args({16, 64, 128, 1})
    ->Args({16, 64, 128, 2})
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime()
    ->UseRealTime()
    ->ComputeStatistics("min", Least);

/// rows, tokens (0: one vector a row), in, out
void BM_Linear(benchmark::State& state) {
  const int64_t rows = state.range(0), tokens = state.range(1), in = state.range(2),
                out = state.range(3);
  const auto packed = Cpu().PackLinear({Random({out, in})}, {Random({out})}).value();
  LinearArgs args{.x = tokens ? Random({rows, tokens, in}) : Random({rows, in}),
                  .weight = packed.get(),
                  .out = tokens ? Random({rows, tokens, out}) : Random({rows, out})};
  Cpu().Linear(args);
  for (auto _ : state) Cpu().Linear(args);
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * static_cast<double>(rows * std::max<int64_t>(1, tokens) * in * out),
                         benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Linear)
    ->Args({16, 256, 128, 384})
    ->Args({16, 64, 128, 384})
    ->Args({16, 64, 128, 128})
    ->Args({16, 0, 256, 2048})
    ->Args({1, 0, 256, 2048})
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime()
    ->UseRealTime()
    ->ComputeStatistics("min", Least);

}  // namespace
}  // namespace denoised
