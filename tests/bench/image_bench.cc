// SPDX-License-Identifier: Apache-2.0
// What a picture costs a worker thread of the server: from the engine's floats to a file.
//
//   image-bench [--benchmark_…] [FILE…]
//
// Draws noise (what random weights draw), smooth waves under a little noise (about a photograph),
// and waves over a flat half; or takes the pictures in files. The size of a file is the counter
// `bytes`.

#include <benchmark/benchmark.h>
#include <malloc.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <random>

#include "engine/images/formats.h"

namespace denoised {
namespace {

Tensor Draw(int edge, const std::function<float(int y, int x, int channel)>& sample) {
  Tensor image = Tensor::Host({edge, edge, 3}, DType::kF32);
  float* out = image.span<float>().data();
  for (int y = 0; y < edge; ++y) {
    for (int x = 0; x < edge; ++x) {
      for (int c = 0; c < 3; ++c) *out++ = sample(y, x, c);
    }
  }
  return image;
}

void Encode(benchmark::State& state, const Tensor& image, FileFormat format) {
  size_t bytes = 0;
  for (auto _ : state) bytes = EncodeFile(image, format, 90, {})->size();
  state.counters["bytes"] = static_cast<double>(bytes);
}

void Register(const std::string& name, const Tensor& image) {
  for (const auto& [format, label] : {std::pair(FileFormat::kPng, "png"),
                                      {FileFormat::kJpeg, "jpeg"},
                                      {FileFormat::kWebp, "webp"}}) {
    benchmark::RegisterBenchmark(
        (std::string(label) + "/" + name).c_str(),
        [image, format = format](benchmark::State& state) { Encode(state, image, format); })
        ->Unit(benchmark::kMillisecond);
  }
}

void RegisterDrawn() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto wave = [&](int y, int x, int c) {
    const auto v = static_cast<float>(y), u = static_cast<float>(x), phase = static_cast<float>(c);
    return 0.5f * std::sin(0.02f * u + phase) + 0.4f * std::cos(0.013f * v - phase) +
           0.03f * normal(random);
  };
  for (const int edge : {64, 512, 1024}) {
    const std::string size = "/" + std::to_string(edge);
    Register("noise" + size, Draw(edge, [&](int, int, int) { return 0.5f * normal(random); }));
    Register("waves" + size, Draw(edge, wave));
    Register("half" + size,
             Draw(edge, [&](int y, int x, int c) { return y < edge / 2 ? wave(y, x, c) : 0.5f; }));
  }
}

int Main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  // In a server malloc keeps the blocks of a picture for the next one, since it has seen blocks as
  // large as the engine's floats freed. Here they stay, and half of the time would be new pages.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  for (int i = 1; i < argc; ++i) {
    std::ifstream stream(argv[i], std::ios::binary);
    const std::string file(std::istreambuf_iterator<char>(stream), {});
    const auto pixels = DecodeFile(file, 1 << 28);
    if (!pixels.ok()) {
      std::fprintf(stderr, "%s: %s\n", argv[i], std::string(pixels.status().message()).c_str());
      return 1;
    }
    Register(argv[i], FromPixels(*pixels, pixels->channels));
  }
  if (argc == 1) RegisterDrawn();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) { return denoised::Main(argc, argv); }
