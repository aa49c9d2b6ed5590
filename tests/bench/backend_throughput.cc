// Achieved TFLOP/s and GB/s of the backend's large ops, at shapes of the models that the project
// measures itself with. Usage: backend_throughput [device], as in BackendOptions; random data, one
// graph of kRepeats ops a sample, median of kSamples.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "engine/backend/backend.h"

namespace denoised {
namespace {

constexpr int kRepeats = 10, kSamples = 9;

class Bench {
 public:
  explicit Bench(Backend& backend) : backend_(backend) {}

  Tensor Random(const Shape& shape, double scale = 1) {
    const DType dtype = backend_.activation_dtype();
    std::vector<uint32_t> bits(shape.elements());
    std::normal_distribution<float> normal(0, static_cast<float>(scale));
    float block[4099];  // a prime, so that the pattern does not repeat along any row
    for (float& value : block) value = normal(random_);
    for (size_t i = 0; i < bits.size(); ++i) {
      const float value = block[i % 4099];
      if (dtype == DType::kF32) {
        std::memcpy(&bits[i], &value, 4);
      } else {
        reinterpret_cast<uint16_t*>(bits.data())[i] = FloatToBFloat16(value);
      }
    }
    const Tensor tensor = backend_.Allocate(shape, dtype, "a benchmark").value();
    backend_.Upload(bits.data(), tensor.bytes(), tensor);
    return tensor;
  }

  Tensor HostWeight(const Shape& shape, int64_t fan_in) {
    Tensor host = Tensor::Host(shape, DType::kF32);
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(fan_in)));
    for (float& value : host.span<float>()) value = normal(random_);
    return host;
  }

  /// Median seconds of one op.
  double Seconds(const std::function<void()>& op) {
    auto graph = backend_.Capture([&] {
      for (int i = 0; i < kRepeats; ++i) op();
    });
    if (!graph.ok()) {
      std::fprintf(stderr, "%s\n", graph.status().ToString().c_str());
      std::exit(1);
    }
    std::vector<double> seconds;
    for (int i = -2; i < kSamples; ++i) {
      const auto begin = backend_.Mark();
      backend_.Launch(**graph);
      const auto end = backend_.Mark();
      if (absl::Status status = end->Wait(); !status.ok()) {
        std::fprintf(stderr, "%s\n", status.ToString().c_str());
        std::exit(1);
      }
      if (i >= 0) seconds.push_back(end->SecondsSince(*begin) / kRepeats);
    }
    std::nth_element(seconds.begin(), seconds.begin() + kSamples / 2, seconds.end());
    return seconds[kSamples / 2];
  }

  void Conv(int64_t n, int64_t size, int64_t in, int64_t out) {
    const auto weight = backend_.PackConv2d(HostWeight({out, in, 3, 3}, 9 * in), {}, false).value();
    Conv2dArgs args{.x = Random({n, size, size, in}), .weight = weight.get()};
    args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = 1;
    args.residual = Random({n, size, size, out});
    args.out = Random({n, size, size, out});
    Report(fmt::format("conv 3x3 [{}, {}, {}, {}]", n, size, in, out),
           2.0 * 9 * static_cast<double>(n * size * size * in * out), 0,
           Seconds([&] { backend_.Conv2d(args); }));
  }

  void Linear(int64_t n, int64_t tokens, int64_t in, int64_t out) {
    const auto weight = backend_.PackLinear({HostWeight({out, in}, in)}, {}).value();
    LinearArgs args{.x = Random({n, tokens, in}), .weight = weight.get()};
    args.out = Random({n, tokens, out});
    Report(fmt::format("linear [{}, {}, {}, {}]", n, tokens, in, out),
           2.0 * static_cast<double>(n * tokens * in * out), 0,
           Seconds([&] { backend_.Linear(args); }));
  }

  void Attention(int64_t n, int heads, int64_t tokens, int64_t dim) {
    const Tensor qkv = Random({n, tokens, 3 * heads * dim});
    AttentionArgs args{.heads = heads, .scale = 1 / std::sqrt(static_cast<float>(dim))};
    args.q = qkv.Columns(0, heads * dim);
    args.k = qkv.Columns(heads * dim, heads * dim);
    args.v = qkv.Columns(2 * heads * dim, heads * dim);
    args.out = Random({n, tokens, heads * dim});
    Report(fmt::format("attention [{}, {}, {}, {}]", n, heads, tokens, dim),
           4.0 * static_cast<double>(n * heads * tokens * tokens * dim), 0,
           Seconds([&] { backend_.Attention(args); }));
  }

  void Norm(int64_t n, int64_t size, int64_t channels) {
    GroupNormArgs args{.x = Random({n, size, size, channels}),
                       .gamma = backend_.PackVector(HostWeight({channels}, 1)).value(),
                       .beta = backend_.PackVector(HostWeight({channels}, 1)).value(),
                       .activation = Activation::kSilu};
    args.out = Random(args.x.shape());
    Report(fmt::format("group norm [{}, {}, {}]", n, size, channels), 0,
           2.0 * static_cast<double>(args.x.bytes()), Seconds([&] { backend_.GroupNorm(args); }));
  }

 private:
  static void Report(const std::string& name, double flop, double bytes, double seconds) {
    std::printf("%-36s %9.1f us  %s\n", name.c_str(), seconds * 1e6,
                flop > 0 ? fmt::format("{:7.1f} TFLOP/s", flop / seconds * 1e-12).c_str()
                         : fmt::format("{:7.0f} GB/s", bytes / seconds * 1e-9).c_str());
    std::fflush(stdout);
  }

  Backend& backend_;
  std::mt19937 random_{7};
};

int Main(const std::string& device) {
  auto backend = OpenBackend({.device = device});
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    return 1;
  }
  std::printf("%s: %s\n", std::string((*backend)->name()).c_str(),
              (*backend)->description().c_str());
  Bench bench(**backend);
  bench.Conv(64, 32, 128, 128);
  bench.Conv(64, 16, 256, 256);
  bench.Conv(8, 32, 128, 128);
  bench.Conv(1, 32, 128, 128);
  bench.Conv(8, 256, 128, 128);
  bench.Conv(2, 64, 320, 320);
  bench.Conv(16, 32, 640, 640);
  bench.Conv(16, 16, 1280, 1280);
  bench.Conv(64, 8, 768, 768);
  bench.Conv(16, 32, 3, 128);
  bench.Conv(16, 32, 128, 3);
  bench.Linear(8, 1024, 1280, 1280);
  bench.Linear(4, 4096, 640, 5120);
  bench.Linear(16, 1, 512, 1024);
  bench.Linear(1, 1, 512, 5632);
  bench.Attention(2, 8, 4096, 40);
  bench.Attention(2, 10, 4096, 64);
  bench.Attention(16, 20, 1024, 64);
  bench.Attention(64, 1, 256, 256);
  bench.Attention(1, 1, 4096, 512);
  bench.Norm(64, 32, 128);
  bench.Norm(16, 64, 320);
  bench.Norm(64, 64, 192);
  bench.Norm(8, 256, 128);
  bench.Norm(1, 32, 128);
  bench.Norm(1, 16, 256);
  return 0;
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) { return denoised::Main(argc > 1 ? argv[1] : "auto"); }
