// SPDX-License-Identifier: Apache-2.0
// Achieved FLOP/s and bytes/s of the backend's large ops, at shapes of the models that the project
// measures itself with.
//
//   backend-throughput [--device=cpu|cuda] [--generic] [--precision=fp8]
//                      [--autotune=off|DIRECTORY]
//                      [--list | --turns [--warm-up=SECONDS]]
//                      [Google Benchmark's flags, e.g. --benchmark_filter=conv]
//
// --list prints the names of all ops. --turns measures when its standard input says so (turns.h);
// --warm-up is how long the device works before each measurement, 0.1 by default.
//
// --precision=fp8: convolutions, and linears over tokens, are in e4m3. So are their inputs, as the
// op before leaves them in a model, but for convolutions that down- or upsample: no norm comes
// before these, and a model rounds their inputs first, which is not in the figure.
//
// Random data; kernels are chosen as by the server; --autotune=DIRECTORY keeps which they are
// there, and takes what it finds there. A figure is the median over launches of a graph
// that holds an op many times. Its activations rotate through more memory than a chip's last cache
// holds; its weights stay, as those of a layer do. tests/bench/peer_ops.py measures PyTorch in
// the same way: it takes its shapes from the names below.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>

#include "engine/backend/backend.h"
#include "engine/core/e4m3.h"
#include "tests/bench/device_timing.h"
#include "tests/bench/turns.h"

namespace denoised {
namespace {

constexpr int64_t kRotatedBytes = 256 << 20;
constexpr int64_t kMostCopies = 128, kLeastLaunches = 8;

/// Where an op's shape comes from and where its figures go.
class Meter {
 public:
  virtual ~Meter() = default;
  virtual int64_t range(size_t i) const = 0;
  /// What one launch does, "FLOP/s" or "B/s" per second.
  virtual void Count(const char* per_second, double amount) = 0;
  /// Calls `seconds` as often as wanted; what it measures stays in place meanwhile.
  virtual absl::Status Run(
      const std::function<absl::StatusOr<double>(const Samples&)>& seconds) = 0;
};

class Op {
 public:
  explicit Op(Backend& backend) : backend_(backend) {}

  /// Called first: `bytes` is what one launch reads and writes of its activations.
  void RotateFor(int64_t bytes) {
    copies_ = std::clamp<int64_t>((kRotatedBytes + bytes - 1) / bytes, 1, kMostCopies);
  }

  /// One activation for every copy, all alike: [copies, shape].
  absl::StatusOr<Tensor> Activations(const Shape& shape) {
    return Filled(Random(shape, backend_.activation_dtype(), 1));
  }
  /// The same for a layer's input. In e4m3 if the layer multiplies in it; `x` then has its bytes.
  template <typename Packed>
  absl::StatusOr<Tensor> Inputs(const Packed& weight, Shape* x) {
    if (weight.rounded_bytes == 0) return Activations(*x);
    int64_t dims[Shape::kMaxRank];
    for (int i = 0; i < x->rank(); ++i) dims[i] = (*x)[i];
    dims[x->rank() - 1] = weight.rounded_bytes;
    *x = Shape(std::span<const int64_t>(dims, x->rank()));
    return Filled(Random(*x, DType::kU8, 1 / weight.e4m3.input_scale));
  }

  /// Parameters on the host, scaled for `fan_in` inputs.
  static Tensor Parameters(const Shape& shape, int64_t fan_in) {
    return Random(shape, DType::kF32, 1 / std::sqrt(static_cast<float>(fan_in)));
  }

  /// `enqueue(i)` enqueues the op on copy i.
  absl::Status Measure(Meter& meter, const std::function<void(int64_t)>& enqueue) {
    const int64_t launches = std::max(copies_, kLeastLaunches);
    DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<Graph> graph, backend_.Capture([&] {
      for (int64_t i = 0; i < launches; ++i) enqueue(i % copies_);
    }));
    const auto launch = [&] {
      backend_.Launch(*graph);
      return backend_.status();
    };
    DENOISED_RETURN_IF_ERROR(meter.Run([&](const Samples& samples) -> absl::StatusOr<double> {
      DENOISED_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                                MedianDeviceSeconds(backend_, {launch}, samples));
      return seconds[0] / static_cast<double>(launches);
    }));
    return backend_.Synchronize();
  }

 private:
  absl::StatusOr<Tensor> Filled(const Tensor& host) {
    DENOISED_ASSIGN_OR_RETURN(const Tensor all,
                              backend_.Allocate({copies_, host.shape().elements()}, host.dtype(),
                                                "a benchmark's activations"));
    const Tensor first = all.Slice(0, 1);
    backend_.Upload(host.data(), host.bytes(), first);
    for (int64_t i = 1; i < copies_; ++i) backend_.Copy(first, all.Slice(i, 1));
    return all;
  }

  /// Normal values that repeat with a prime period, so that no two rows are alike.
  static Tensor Random(const Shape& shape, DType dtype, float deviation) {
    constexpr size_t kPeriod = 65521;
    std::mt19937 random{7};
    std::normal_distribution<float> normal(0, deviation);
    const size_t element = SizeOf(dtype);
    std::vector<std::byte> period(kPeriod * element);
    for (size_t i = 0; i < kPeriod; ++i) {
      const float value = normal(random);
      const uint16_t bf16 = FloatToBFloat16(value);
      const uint8_t e4m3 = FloatToE4m3(value);
      std::memcpy(&period[i * element],
                  dtype == DType::kF32  ? static_cast<const void*>(&value)
                  : dtype == DType::kU8 ? static_cast<const void*>(&e4m3)
                                        : &bf16,
                  element);
    }
    const Tensor tensor = Tensor::Host(shape, dtype);
    auto* to = static_cast<std::byte*>(tensor.data());
    for (size_t done = 0; done < tensor.bytes(); done += period.size()) {
      std::memcpy(to + done, period.data(), std::min(period.size(), tensor.bytes() - done));
    }
    return tensor;
  }

  Backend& backend_;
  int64_t copies_ = 1;
};

Tensor Copy(const Tensor& all, int64_t i, const Shape& shape) {
  return all.Slice(i, 1).Reshape(shape);
}

void CountFlop(Meter& meter, int64_t multiplications) {
  meter.Count("FLOP/s", 2.0 * static_cast<double>(multiplications));
}

enum class Resampling { kNone, kDown, kUp };

/// rows, size, in, out; `fused`: with bias, residual and SiLU.
absl::Status Conv(Backend& backend, const E4m3Layer& e4m3, Meter& meter, Resampling resampling,
                  bool fused) {
  const int64_t rows = meter.range(0), size = meter.range(1), in = meter.range(2),
                out = meter.range(3);
  const int64_t out_size = resampling == Resampling::kUp     ? size * 2
                           : resampling == Resampling::kDown ? size / 2
                                                             : size;
  Shape x{rows, size, size, in};
  const Shape y{rows, out_size, out_size, out};
  Op op(backend);
  const int64_t bytes_per_value = static_cast<int64_t>(SizeOf(backend.activation_dtype()));
  op.RotateFor((x.elements() + y.elements() * (fused ? 2 : 1)) * bytes_per_value);
  const Tensor bias = fused ? Op::Parameters({out}, 1) : Tensor();
  DENOISED_ASSIGN_OR_RETURN(const auto weight,
                            backend.PackConv2d(Op::Parameters({out, in, 3, 3}, 9 * in), bias,
                                               resampling == Resampling::kUp, e4m3));
  DENOISED_ASSIGN_OR_RETURN(const Tensor xs, op.Inputs(*weight, &x));
  DENOISED_ASSIGN_OR_RETURN(const Tensor ys, op.Activations(y));
  Tensor residuals;
  if (fused) {
    DENOISED_ASSIGN_OR_RETURN(residuals, op.Activations(y));
  }
  Conv2dArgs args{.weight = weight.get(),
                  .prologue = {.upsample2x = resampling == Resampling::kUp}};
  args.pad_bottom = args.pad_right = 1;
  if (resampling == Resampling::kDown) {  // diffusers' Downsample2D with padding 0
    args.stride = 2;
  } else {
    args.pad_top = args.pad_left = 1;
  }
  if (fused) args.epilogue.activation = Activation::kSilu;
  CountFlop(meter, y.elements() * in * 9);
  return op.Measure(meter, [&](int64_t i) {
    args.x = Copy(xs, i, x);
    args.out = Copy(ys, i, y);
    if (fused) args.epilogue.residual = Copy(residuals, i, y);
    backend.Conv2d(args);
  });
}

/// rows, size, in, out, shortcut: the end of a resnet, whose shortcut has so many channels
absl::Status ConvShortcut(Backend& backend, const E4m3Layer& e4m3, Meter& meter) {
  const int64_t rows = meter.range(0), size = meter.range(1), in = meter.range(2),
                out = meter.range(3), shortcut = meter.range(4);
  Shape x{rows, size, size, in};
  const Shape skip{rows, size, size, shortcut}, y{rows, size, size, out};
  Op op(backend);
  op.RotateFor((x.elements() + skip.elements() + y.elements()) *
               static_cast<int64_t>(SizeOf(backend.activation_dtype())));
  const Tensor bias = Op::Parameters({out}, 1);
  DENOISED_ASSIGN_OR_RETURN(const auto weight,
                            backend.PackConv2d(Op::Parameters({out, in, 3, 3}, 9 * in), bias,
                                               /*upsample2x=*/false, e4m3));
  DENOISED_ASSIGN_OR_RETURN(const auto shortcut_weight,
                            backend.PackConv2d(Op::Parameters({out, shortcut, 1, 1}, shortcut),
                                               Tensor(), /*upsample2x=*/false));
  DENOISED_ASSIGN_OR_RETURN(const Tensor xs, op.Inputs(*weight, &x));
  DENOISED_ASSIGN_OR_RETURN(const Tensor skips, op.Activations(skip));
  DENOISED_ASSIGN_OR_RETURN(const Tensor ys, op.Activations(y));
  Conv2dArgs args{.weight = weight.get()};
  args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = 1;
  args.epilogue.shortcut.weight = shortcut_weight.get();
  CountFlop(meter, y.elements() * (in * 9 + shortcut));
  return op.Measure(meter, [&](int64_t i) {
    args.x = Copy(xs, i, x);
    args.epilogue.shortcut.x = Copy(skips, i, skip);
    args.out = Copy(ys, i, y);
    backend.Conv2d(args);
  });
}

/// rows, tokens, in, out; with a bias
absl::Status Linear(Backend& backend, const E4m3Layer& e4m3, Meter& meter, bool with_residual) {
  const int64_t in = meter.range(2), out = meter.range(3);
  Shape x{meter.range(0), meter.range(1), in};
  const Shape y{meter.range(0), meter.range(1), out};
  Op op(backend);
  op.RotateFor((x.elements() + y.elements() * (with_residual ? 2 : 1)) *
               static_cast<int64_t>(SizeOf(backend.activation_dtype())));
  DENOISED_ASSIGN_OR_RETURN(
      const auto weight,
      backend.PackLinear({Op::Parameters({out, in}, in)}, {Op::Parameters({out}, 1)}, e4m3));
  DENOISED_ASSIGN_OR_RETURN(const Tensor xs, op.Inputs(*weight, &x));
  DENOISED_ASSIGN_OR_RETURN(const Tensor ys, op.Activations(y));
  Tensor residuals;
  if (with_residual) {
    DENOISED_ASSIGN_OR_RETURN(residuals, op.Activations(y));
  }
  LinearArgs args{.weight = weight.get()};
  CountFlop(meter, y.elements() * in);
  return op.Measure(meter, [&](int64_t i) {
    args.x = Copy(xs, i, x);
    args.out = Copy(ys, i, y);
    if (with_residual) args.epilogue.residual = Copy(residuals, i, y);
    backend.Linear(args);
  });
}

/// rows, tokens, in, features: GEGLU with a bias, so twice as many outputs as features
absl::Status GatedLinear(Backend& backend, const E4m3Layer& e4m3, Meter& meter) {
  const int64_t in = meter.range(2), features = meter.range(3);
  Shape x{meter.range(0), meter.range(1), in};
  const Shape y{meter.range(0), meter.range(1), features},
      both{meter.range(0), meter.range(1), 2 * features};
  Op op(backend);
  op.RotateFor((x.elements() + y.elements()) *
               static_cast<int64_t>(SizeOf(backend.activation_dtype())));
  DENOISED_ASSIGN_OR_RETURN(const auto weight,
                            backend.PackLinear({Op::Parameters({2 * features, in}, in)},
                                               {Op::Parameters({2 * features}, 1)}, e4m3,
                                               /*gated=*/true));
  DENOISED_ASSIGN_OR_RETURN(const Tensor xs, op.Inputs(*weight, &x));
  DENOISED_ASSIGN_OR_RETURN(const Tensor ys, op.Activations(y));
  LinearArgs args{.weight = weight.get()};
  DENOISED_ASSIGN_OR_RETURN(
      args.epilogue.ungated,
      backend.Allocate(both, backend.activation_dtype(), "a benchmark's values and gates"));
  CountFlop(meter, both.elements() * in);
  return op.Measure(meter, [&](int64_t i) {
    args.x = Copy(xs, i, x);
    args.out = Copy(ys, i, y);
    backend.Linear(args);
  });
}

/// rows, heads, tokens, dim; q, k and v lie side by side, as a fused projection leaves them
absl::Status Attention(Backend& backend, Meter& meter) {
  const int64_t rows = meter.range(0), heads = meter.range(1), tokens = meter.range(2),
                dim = meter.range(3), width = heads * dim;
  const Shape qkv{rows, tokens, 3 * width}, y{rows, tokens, width};
  Op op(backend);
  op.RotateFor((qkv.elements() + y.elements()) *
               static_cast<int64_t>(SizeOf(backend.activation_dtype())));
  DENOISED_ASSIGN_OR_RETURN(const Tensor qkvs, op.Activations(qkv));
  DENOISED_ASSIGN_OR_RETURN(const Tensor ys, op.Activations(y));
  AttentionArgs args{.heads = static_cast<int>(heads),
                     .scale = 1 / std::sqrt(static_cast<float>(dim))};
  CountFlop(meter, 2 * y.elements() * tokens);
  return op.Measure(meter, [&](int64_t i) {
    const Tensor one = Copy(qkvs, i, qkv);
    args.q = one.Columns(0, width);
    args.k = one.Columns(width, width);
    args.v = one.Columns(2 * width, width);
    args.out = Copy(ys, i, y);
    backend.Attention(args);
  });
}

/// rows, heads, tokens, dim, keys; a set of keys and values for each row, as prompts are
absl::Status CrossAttention(Backend& backend, Meter& meter) {
  const int64_t rows = meter.range(0), heads = meter.range(1), tokens = meter.range(2),
                dim = meter.range(3), keys = meter.range(4), width = heads * dim;
  const Shape q{rows, tokens, width}, kv{rows, keys, 2 * width};
  Op op(backend);
  op.RotateFor(2 * q.elements() * static_cast<int64_t>(SizeOf(backend.activation_dtype())));
  DENOISED_ASSIGN_OR_RETURN(const Tensor qs, op.Activations(q));
  DENOISED_ASSIGN_OR_RETURN(const Tensor kvs, op.Activations(kv));
  DENOISED_ASSIGN_OR_RETURN(const Tensor ys, op.Activations(q));
  AttentionArgs args{.heads = static_cast<int>(heads),
                     .scale = 1 / std::sqrt(static_cast<float>(dim))};
  std::vector<int32_t> sets(static_cast<size_t>(rows));
  std::iota(sets.begin(), sets.end(), 0);
  DENOISED_ASSIGN_OR_RETURN(args.key_set,
                            backend.Allocate({rows}, DType::kI32, "a benchmark's sets of keys"));
  backend.Upload(sets.data(), args.key_set.bytes(), args.key_set);
  CountFlop(meter, 2 * q.elements() * keys);
  return op.Measure(meter, [&](int64_t i) {
    const Tensor one = Copy(kvs, i, kv);
    args.q = Copy(qs, i, q);
    args.k = one.Columns(0, width);
    args.v = one.Columns(width, width);
    args.out = Copy(ys, i, q);
    backend.Attention(args);
  });
}

/// rows, tokens, channels. Bytes: each value read once and written once.
absl::Status LayerNorm(Backend& backend, Meter& meter) {
  const int64_t channels = meter.range(2);
  const Shape x{meter.range(0), meter.range(1), channels};
  const int64_t bytes = 2 * x.elements() * static_cast<int64_t>(SizeOf(backend.activation_dtype()));
  Op op(backend);
  op.RotateFor(bytes);
  DENOISED_ASSIGN_OR_RETURN(const Tensor xs, op.Activations(x));
  DENOISED_ASSIGN_OR_RETURN(const Tensor ys, op.Activations(x));
  LayerNormArgs args;
  DENOISED_ASSIGN_OR_RETURN(args.gamma, backend.PackVector(Op::Parameters({channels}, 1)));
  DENOISED_ASSIGN_OR_RETURN(args.beta, backend.PackVector(Op::Parameters({channels}, 1)));
  meter.Count("B/s", static_cast<double>(bytes));
  return op.Measure(meter, [&](int64_t i) {
    args.x = Copy(xs, i, x);
    args.out = Copy(ys, i, x);
    backend.LayerNorm(args);
  });
}

/// rows, size, channels; 32 groups, SiLU. Bytes: each value read once and written once.
absl::Status GroupNorm(Backend& backend, Meter& meter) {
  const int64_t channels = meter.range(2);
  const Shape x{meter.range(0), meter.range(1), meter.range(1), channels};
  const int64_t bytes = 2 * x.elements() * static_cast<int64_t>(SizeOf(backend.activation_dtype()));
  Op op(backend);
  op.RotateFor(bytes);
  DENOISED_ASSIGN_OR_RETURN(const Tensor xs, op.Activations(x));
  DENOISED_ASSIGN_OR_RETURN(const Tensor ys, op.Activations(x));
  GroupNormArgs args{.norm = {.activation = Activation::kSilu}};
  DENOISED_ASSIGN_OR_RETURN(args.norm.gamma, backend.PackVector(Op::Parameters({channels}, 1)));
  DENOISED_ASSIGN_OR_RETURN(args.norm.beta, backend.PackVector(Op::Parameters({channels}, 1)));
  meter.Count("B/s", static_cast<double>(bytes));
  return op.Measure(meter, [&](int64_t i) {
    args.x = Copy(xs, i, x);
    args.out = Copy(ys, i, x);
    backend.GroupNorm(args);
  });
}

using Shapes = std::vector<std::vector<int64_t>>;

using Measure = std::function<absl::Status(Meter&)>;

/// An op at a shape.
struct Entry {
  std::string name;  // e.g. "linear/rows:1/tokens:256/in:256/out:768"
  std::vector<int64_t> shape;
  Measure measure;
};

class GoogleMeter : public Meter {
 public:
  GoogleMeter(const Entry& entry, benchmark::State& state) : entry_(entry), state_(state) {}
  int64_t range(size_t i) const override { return entry_.shape[i]; }
  void Count(const char* per_second, double amount) override {
    state_.counters[per_second] =
        benchmark::Counter(amount, benchmark::Counter::kIsIterationInvariantRate);
  }
  absl::Status Run(const std::function<absl::StatusOr<double>(const Samples&)>& seconds) override {
    for (auto _ : state_) {
      DENOISED_ASSIGN_OR_RETURN(const double median, seconds(Samples()));
      state_.SetIterationTime(median);
    }
    return absl::OkStatus();
  }

 private:
  const Entry& entry_;
  benchmark::State& state_;
};

/// Answers "measure" as long as it is asked for the op that is in place, and leaves the first
/// request that is another in `request`.
class TurnsMeter : public Meter {
 public:
  TurnsMeter(const Entry& entry, const Samples& samples, std::optional<Request>* request)
      : entry_(entry), samples_(samples), request_(*request) {}
  int64_t range(size_t i) const override { return entry_.shape[i]; }
  void Count(const char* per_second, double amount) override {
    counted_[std::strcmp(per_second, "B/s") == 0 ? "bytes" : "flop"] = amount;
  }
  absl::Status Run(const std::function<absl::StatusOr<double>(const Samples&)>& seconds) override {
    Answer(counted_);
    for (Request next; ReadRequest(&next);) {
      if (next.verb != "measure" || next.name != entry_.name) {
        request_ = next;
        return absl::OkStatus();
      }
      DENOISED_ASSIGN_OR_RETURN(const double median, seconds(samples_));
      Answer(nlohmann::json{{"us", 1e6 * median}});
    }
    request_.reset();
    return absl::OkStatus();
  }

 private:
  const Entry& entry_;
  const Samples samples_;
  std::optional<Request>& request_;
  nlohmann::json counted_;
};

class Registry {
 public:
  void Register(const char* op, const std::vector<std::string>& arguments, const Shapes& shapes,
                const Measure& measure) {
    for (const std::vector<int64_t>& shape : shapes) {
      std::string name = op;
      for (size_t i = 0; i < shape.size(); ++i)
        name += fmt::format("/{}:{}", arguments[i], shape[i]);
      entries_.push_back({name, shape, measure});
    }
  }
  const std::vector<Entry>& entries() const { return entries_; }

  void RunWithGoogleBenchmark() const {
    for (const Entry& entry : entries_) {
      benchmark::RegisterBenchmark(entry.name.c_str(),
                                   [&entry](benchmark::State& state) {
                                     GoogleMeter meter(entry, state);
                                     const absl::Status status = entry.measure(meter);
                                     if (!status.ok())
                                       state.SkipWithError(std::string(status.message()).c_str());
                                   })
          ->Iterations(1)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
    benchmark::RunSpecifiedBenchmarks();
  }

  void TakeTurns(const std::string& device, const Samples& samples) const {
    Answer(nlohmann::json{{"ready", {{"device", device}}}});
    std::optional<Request> request = Request();
    if (!ReadRequest(&*request)) return;
    while (request) {
      const Request current = *request;
      const Entry* entry = Find(current.name);
      if (current.verb == "prepare" && entry != nullptr) {
        TurnsMeter meter(*entry, samples, &request);
        const absl::Status status = entry->measure(meter);
        if (status.ok()) continue;
        Answer(status);
      } else {
        Answer(InvalidArgument("'{} {}': prepare one of --list first", current.verb, current.name));
      }
      if (!ReadRequest(&*request)) return;
    }
  }

 private:
  const Entry* Find(const std::string& name) const {
    const auto found = std::find_if(entries_.begin(), entries_.end(),
                                    [&](const Entry& entry) { return entry.name == name; });
    return found == entries_.end() ? nullptr : &*found;
  }

  std::vector<Entry> entries_;
};

void RegisterAll(Backend& backend, const E4m3Layer& e4m3, Registry* registry) {
  const Shapes convolutions = {// cifar10-32
                               {64, 32, 128, 128},
                               {64, 16, 256, 256},
                               {64, 8, 256, 256},
                               {64, 4, 256, 256},
                               {256, 32, 128, 128},
                               {16, 8, 256, 256},
                               {8, 32, 128, 128},
                               {1, 32, 128, 128},
                               {1, 16, 256, 256},
                               {1, 8, 256, 256},
                               {1, 4, 256, 256},
                               // adm-64
                               {64, 64, 192, 192},
                               {64, 32, 384, 384},
                               {64, 16, 576, 576},
                               {64, 8, 768, 768},
                               {1, 64, 192, 192},
                               {1, 8, 768, 768},
                               // celebahq-256
                               {8, 256, 128, 128},
                               // Stable Diffusion 1.5 and XL
                               {2, 64, 320, 320},
                               {2, 32, 640, 640},
                               {2, 16, 1280, 1280},
                               {2, 8, 1280, 1280},
                               {16, 64, 320, 320},
                               {16, 32, 640, 640},
                               {16, 16, 1280, 1280},
                               {2, 128, 320, 320},
                               {8, 64, 640, 640},
                               {8, 32, 1280, 1280},
                               // its autoencoder
                               {4, 512, 256, 256}};
  Shapes bare = convolutions;  // and a first and a last layer, which have no residual
  bare.insert(bare.end(), {{64, 32, 3, 128}, {64, 32, 128, 3}});
  const auto conv = [&backend, &e4m3](Resampling resampling, bool fused) {
    return [&backend, &e4m3, resampling, fused](Meter& meter) {
      return Conv(backend, e4m3, meter, resampling, fused);
    };
  };
  const std::vector<std::string> image = {"rows", "size", "in", "out"};
  registry->Register("conv", image, bare, conv(Resampling::kNone, false));
  registry->Register("conv_bias_residual_silu", image, convolutions, conv(Resampling::kNone, true));
  registry->Register("conv_shortcut", {"rows", "size", "in", "out", "shortcut"},
                     {{64, 32, 128, 128, 256},
                      {256, 32, 128, 128, 384},
                      {64, 16, 256, 256, 512},
                      {64, 64, 192, 192, 384},
                      {64, 32, 384, 384, 768},
                      {16, 256, 128, 128, 256},
                      {1, 32, 128, 128, 256},
                      {1, 16, 256, 256, 512},
                      {1, 4, 256, 256, 512},
                      {1, 64, 192, 192, 384}},
                     [&](Meter& meter) { return ConvShortcut(backend, e4m3, meter); });
  registry->Register("conv_down", image,
                     {{64, 32, 128, 128}, {16, 64, 320, 320}, {1, 32, 128, 128}},
                     conv(Resampling::kDown, false));
  registry->Register("conv_up", image, {{64, 16, 256, 256}, {16, 32, 640, 640}, {1, 16, 256, 256}},
                     conv(Resampling::kUp, false));
  registry->Register("linear", {"rows", "tokens", "in", "out"},
                     {// cifar10-32, adm-64
                      {64, 256, 256, 768},
                      {1, 256, 256, 768},
                      {1, 256, 256, 256},
                      {256, 256, 256, 768},
                      {256, 256, 256, 256},
                      {4, 1024, 384, 1152},
                      {64, 1024, 384, 1152},
                      {64, 1024, 384, 384},
                      {64, 256, 576, 1728},
                      {64, 64, 768, 2304},
                      // embeddings
                      {16, 1, 512, 1024},
                      {1, 1, 512, 5632},
                      // Stable Diffusion 1.5, two rows
                      {2, 4096, 320, 320},
                      {2, 4096, 320, 2560},
                      {2, 4096, 1280, 320},
                      {2, 1024, 640, 5120},
                      {2, 256, 1280, 10240},
                      // XL, two rows and sixteen
                      {2, 4096, 640, 640},
                      {2, 4096, 640, 5120},
                      {2, 4096, 2560, 640},
                      {2, 1024, 1280, 1280},
                      {2, 1024, 1280, 10240},
                      {2, 1024, 5120, 1280},
                      {16, 1024, 1280, 1280},
                      {16, 1024, 1280, 10240},
                      // the ceiling's
                      {8, 1024, 8192, 8192}},
                     [&](Meter& meter) { return Linear(backend, e4m3, meter, false); });
  registry->Register("attention", {"rows", "heads", "tokens", "dim"},
                     {{64, 1, 256, 256},
                      {1, 1, 256, 256},
                      {64, 6, 1024, 64},
                      {64, 9, 256, 64},
                      {64, 12, 64, 64},
                      {1, 6, 1024, 64},
                      {16, 1, 256, 512},
                      {2, 8, 4096, 40},
                      {16, 8, 4096, 40},
                      {2, 8, 1024, 80},
                      {16, 8, 1024, 80},
                      {16, 8, 256, 160},
                      {2, 10, 4096, 64},
                      {16, 10, 4096, 64},
                      {16, 20, 1024, 64},
                      {1, 1, 4096, 512}},
                     [&backend](Meter& meter) { return Attention(backend, meter); });
  // What a transformer block of Stable Diffusion 1.5 or XL also has; no peer measures these.
  registry->Register("linear_residual", {"rows", "tokens", "in", "out"},
                     {{2, 4096, 320, 320},
                      {2, 4096, 1280, 320},
                      {2, 1024, 640, 640},
                      {2, 1024, 2560, 640},
                      {2, 1024, 1280, 1280},
                      {2, 1024, 5120, 1280}},
                     [&](Meter& meter) { return Linear(backend, e4m3, meter, true); });
  registry->Register("gated_linear", {"rows", "tokens", "in", "features"},
                     {{2, 4096, 320, 1280},
                      {16, 4096, 320, 1280},
                      {2, 1024, 640, 2560},
                      {16, 1024, 640, 2560},
                      {2, 256, 1280, 5120},
                      {16, 256, 1280, 5120},
                      {2, 4096, 640, 2560},
                      {2, 1024, 1280, 5120},
                      {16, 1024, 1280, 5120}},
                     [&](Meter& meter) { return GatedLinear(backend, e4m3, meter); });
  registry->Register("cross_attention", {"rows", "heads", "tokens", "dim", "keys"},
                     {{2, 8, 4096, 40, 77},
                      {16, 8, 4096, 40, 77},
                      {2, 8, 1024, 80, 77},
                      {2, 8, 256, 160, 77},
                      {2, 10, 4096, 64, 77},
                      {2, 20, 1024, 64, 77},
                      {16, 20, 1024, 64, 77}},
                     [&backend](Meter& meter) { return CrossAttention(backend, meter); });
  registry->Register("layer_norm", {"rows", "tokens", "channels"},
                     {{2, 4096, 320},
                      {16, 4096, 320},
                      {2, 1024, 640},
                      {2, 256, 1280},
                      {2, 4096, 640},
                      {2, 1024, 1280}},
                     [&backend](Meter& meter) { return LayerNorm(backend, meter); });
  registry->Register("group_norm_silu", {"rows", "size", "channels"},
                     {{64, 32, 128},
                      {64, 16, 256},
                      {1, 32, 128},
                      {1, 16, 256},
                      {256, 32, 128},
                      {256, 32, 256},
                      {256, 32, 384},
                      {64, 64, 192},
                      {64, 64, 384},
                      {64, 64, 512},
                      {64, 64, 576},
                      {64, 32, 384},
                      {64, 32, 576},
                      {64, 32, 960},
                      {16, 128, 128},
                      {16, 64, 320},
                      {2, 128, 320},
                      {8, 256, 128},
                      {16, 256, 128}},
                     [&backend](Meter& meter) { return GroupNorm(backend, meter); });
}

int Main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  BackendOptions options = {.autotune = true};
  bool list = false, turns = false;
  E4m3Layer e4m3;
  Samples samples;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&](const char* name) -> const char* {
      const size_t length = std::strlen(name);
      return flag.compare(0, length, name) == 0 ? argv[i] + length : nullptr;
    };
    if (const char* device = value("--device=")) {
      options.device = device;
    } else if (flag == "--autotune=off") {
      options.autotune = false;
    } else if (const char* directory = value("--autotune=")) {
      options.autotune_cache = directory;
    } else if (flag == "--precision=fp8") {
      e4m3.input_scale = 0x1p-6F;  // for inputs of unit size
    } else if (flag == "--generic") {
      options.generic_kernels = true;
    } else if (flag == "--list") {
      list = true;
      options.device = "cpu";
    } else if (flag == "--turns") {
      turns = true;
    } else if (const char* warm_up = value("--warm-up=")) {
      samples.warm_up_seconds = std::atof(warm_up);
    } else {
      std::fprintf(stderr, "unknown flag '%s'; see the head of tests/bench/backend_throughput.cc\n",
                   argv[i]);
      return 1;
    }
  }
  const auto backend = OpenBackend(options);
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", std::string(backend.status().message()).c_str());
    return 1;
  }
  Registry registry;
  if (e4m3.input_scale != 0 && !(*backend)->MultipliesE4m3()) {
    std::fprintf(stderr, "%s does not multiply in fp8\n", (*backend)->description().c_str());
    return 1;
  }
  RegisterAll(**backend, e4m3, &registry);
  if (list) {
    for (const Entry& entry : registry.entries()) std::puts(entry.name.c_str());
  } else if (turns) {
    registry.TakeTurns((*backend)->description(), samples);
  } else {
    benchmark::AddCustomContext("device", (*backend)->description());
    registry.RunWithGoogleBenchmark();
  }
  return 0;
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) { return denoised::Main(argc, argv); }
