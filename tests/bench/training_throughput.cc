// SPDX-License-Identifier: Apache-2.0
// Times backward ops of training, one by one, at any shape.
//
//   training-throughput [--device=cuda|cpu] NAME…
//   training-throughput [--device=cuda|cpu] --turns
//
// NAME is an op and its shape:
//   dgrad/rows:128/size:32/in:128/out:128/kernel:3/stride:1   the gradient of a convolution's input
//   wgrad/rows:128/size:32/in:128/out:128/kernel:3/stride:1   that of its weights
//   group_norm_silu_backward/rows:128/size:32/channels:128/groups:32
//   attention_backward/rows:32/heads:6/tokens:1024/dim:64
// train_ops.txt has those that measure.py compares with other libraries. --turns measures when its
// standard input says so (turns.h).
//
// Random data; rows are cut into 8 chunks, as denoise-train does by default. A convolution has
// padding 1 on all sides; one of kernel 1 is a linear layer, as in the trainer. A figure is the
// median over runs of a graph that holds an op many times. What an op reads and writes rotates
// through more memory than a chip's last cache holds; weights stay, as those of a layer do.
// peer_train_ops.py measures PyTorch and cuDNN in the same way.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "engine/training/backend.h"
#include "tests/bench/turns.h"

namespace denoised::training {
namespace {

constexpr int64_t kRotatedBytes = 256 << 20;
constexpr int64_t kMostCopies = 128, kLeastLaunches = 8;
constexpr int64_t kChunks = 8;
/// A sample ends when the host sees that the device is done. At this length that costs 0.1 %.
constexpr double kSampleSeconds = 0.03;
constexpr double kWarmUpSeconds = 0.1;  // a chip that idled clocks down
constexpr int kSamples = 9;

/// An op's operands, in place, and how it is enqueued.
struct Work {
  int64_t copies = 1;
  std::function<void(int64_t)> enqueue;  // on one of the copies
  Tensor master;                         // which packed weights are made from
  nlohmann::json counted;                // what one launch does: "flop" or "bytes"
};

/// Makes operands on the device, one of each for every copy.
class Operands {
 public:
  /// `bytes`: what one launch reads and writes.
  Operands(Backend& backend, int64_t bytes)
      : copies(std::clamp<int64_t>((kRotatedBytes + bytes - 1) / bytes, 1, kMostCopies)),
        backend_(backend) {}

  /// Activations, all copies alike: [copies, elements].
  absl::StatusOr<Tensor> Random(const Shape& shape) const {
    const DType dtype = backend_.activation_dtype();
    DENOISED_ASSIGN_OR_RETURN(const Tensor all, Empty(shape, dtype));
    const Tensor host = Normal(shape, dtype, 1);
    for (int64_t i = 0; i < copies; ++i)
      backend_.Upload(host.data(), host.bytes(), all.Slice(i, 1));
    return all;
  }
  absl::StatusOr<Tensor> Empty(const Shape& shape, DType dtype) const {
    return backend_.Allocate({copies, shape.elements()}, dtype, "an op's operands");
  }
  /// A master, of which there is one, scaled for `fan_in` inputs.
  absl::StatusOr<Tensor> Master(const Shape& shape, int64_t fan_in) const {
    DENOISED_ASSIGN_OR_RETURN(const Tensor master,
                              backend_.Allocate(shape, DType::kF32, "weights"));
    const Tensor host = Normal(shape, DType::kF32, 1 / std::sqrt(static_cast<float>(fan_in)));
    backend_.Upload(host.data(), host.bytes(), master);
    return master;
  }

  const int64_t copies;

 private:
  /// Values that repeat with a prime period, so that no two rows are alike.
  static Tensor Normal(const Shape& shape, DType dtype, float deviation) {
    constexpr int64_t kPeriod = 65521;
    std::mt19937 random{7};
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> values(kPeriod);
    for (float& value : values) value = normal(random);
    Tensor tensor = Tensor::Host(shape, dtype);
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      const float value = values[i % kPeriod];
      if (dtype == DType::kF32) {
        tensor.as<float>()[i] = value;
      } else {
        tensor.as<uint16_t>()[i] = FloatToBFloat16(value);
      }
    }
    return tensor;
  }

  Backend& backend_;
};

Tensor Copy(const Tensor& all, int64_t i, const Shape& shape) {
  return all.Slice(i, 1).Reshape(shape);
}

int64_t ActivationBytes(const Backend& backend, int64_t elements) {
  return elements * static_cast<int64_t>(SizeOf(backend.activation_dtype()));
}

using Arguments = std::vector<int64_t>;

/// rows, size, in, out, kernel, stride
absl::StatusOr<Work> ConvolutionGradient(Backend& backend, const Arguments& arguments,
                                         bool of_weights) {
  const int64_t rows = arguments[0], size = arguments[1], in = arguments[2], out = arguments[3],
                kernel = arguments[4], stride = arguments[5];
  const bool linear = kernel == 1 && stride == 1;
  if (!linear && (kernel != 3 || stride > 2 || size % stride != 0))
    return InvalidArgument(
        "kernel {}, stride {}: use 1 and 1, 3 and 1 or, of an even size, 3 and 2", kernel, stride);
  const Shape x{rows, size, size, in}, y{rows, size / stride, size / stride, out},
      weight{out, in, kernel, kernel};
  Operands operands(backend,
                    ActivationBytes(backend, x.elements() + y.elements()) +
                        (of_weights ? weight.elements() * static_cast<int64_t>(sizeof(float)) : 0));
  DENOISED_ASSIGN_OR_RETURN(const Tensor master, operands.Master(weight, in * kernel * kernel));
  DENOISED_ASSIGN_OR_RETURN(const Tensor douts, operands.Random(y));
  Tensor xs, dxs, dweights;
  if (of_weights) {
    DENOISED_ASSIGN_OR_RETURN(xs, operands.Random(x));
    DENOISED_ASSIGN_OR_RETURN(dweights, operands.Empty(weight, DType::kF32));
  } else {
    DENOISED_ASSIGN_OR_RETURN(dxs, operands.Empty(x, backend.activation_dtype()));
  }
  Work work{.copies = operands.copies, .master = master};
  work.counted["flop"] = 2.0 * static_cast<double>(y.elements() * in * kernel * kernel);
  if (linear) {
    const std::shared_ptr<PackedLinear> packed =
        backend.NewLinear(static_cast<int>(in), {static_cast<int>(out)});
    backend.PackLinear({master}, {}, packed.get());
    work.enqueue = [=, &backend](int64_t i) {
      LinearBackwardArgs args{.weight = packed.get(), .dout = Copy(douts, i, y)};
      if (of_weights) {
        args.x = Copy(xs, i, x);
        args.dweights = {Copy(dweights, i, {out, in})};
      } else {
        args.dx = Copy(dxs, i, x);
      }
      backend.LinearBackward(args);
    };
    return work;
  }
  const Conv2dGeometry geometry = {static_cast<int>(stride), 1, 1, 1, 1};
  const std::shared_ptr<PackedConv2d> packed =
      backend.NewConv2d(static_cast<int>(in), static_cast<int>(out), static_cast<int>(kernel),
                        /*upsample2x=*/false, geometry);
  backend.PackConv2d(master, Tensor(), packed.get());
  work.enqueue = [=, &backend](int64_t i) {
    Conv2dBackwardArgs args{
        .weight = packed.get(), .geometry = geometry, .dout = Copy(douts, i, y)};
    if (of_weights) {
      args.x = Copy(xs, i, x);
      args.dweight = Copy(dweights, i, weight);
    } else {
      args.dx = Copy(dxs, i, x);
    }
    backend.Conv2dBackward(args);
  };
  return work;
}

/// rows, size, channels, groups; SiLU. Bytes: x and dout read once, dx written once.
absl::StatusOr<Work> GroupNormGradient(Backend& backend, const Arguments& arguments) {
  const int64_t rows = arguments[0], size = arguments[1], channels = arguments[2],
                groups = arguments[3];
  if (channels % groups != 0)
    return InvalidArgument("{} channels are not divisible by {} groups", channels, groups);
  const Shape x{rows, size, size, channels};
  const int64_t bytes = ActivationBytes(backend, 3 * x.elements());
  Operands operands(backend, bytes);
  DENOISED_ASSIGN_OR_RETURN(const Tensor xs, operands.Random(x));
  DENOISED_ASSIGN_OR_RETURN(const Tensor douts, operands.Random(x));
  DENOISED_ASSIGN_OR_RETURN(const Tensor dxs, operands.Empty(x, backend.activation_dtype()));
  GroupNormArgs forward{.x = Copy(xs, 0, x),
                        .groups = static_cast<int>(groups),
                        .activation = Activation::kSilu,
                        .out = Copy(dxs, 0, x)};
  DENOISED_ASSIGN_OR_RETURN(forward.gamma, operands.Master({channels}, 1));
  DENOISED_ASSIGN_OR_RETURN(forward.beta, operands.Master({channels}, 1));
  DENOISED_ASSIGN_OR_RETURN(forward.statistics,
                            backend.Allocate({rows, groups, 2}, DType::kF32, "statistics"));
  backend.GroupNorm(forward);
  DENOISED_ASSIGN_OR_RETURN(const Tensor gradients,
                            backend.Allocate({2, channels}, DType::kF32, "gradients"));
  Work work{.copies = operands.copies};
  work.counted["bytes"] = bytes;
  work.enqueue = [=, &backend](int64_t i) {
    GroupNormBackwardArgs args{.forward = forward,
                               .dout = Copy(douts, i, x),
                               .dx = Copy(dxs, i, x),
                               .dgamma = gradients.Slice(0, 1).Reshape({channels}),
                               .dbeta = gradients.Slice(1, 1).Reshape({channels})};
    args.forward.x = Copy(xs, i, x);
    args.forward.out = Tensor();
    backend.GroupNormBackward(args);
  };
  return work;
}

/// rows, heads, tokens, dim; q, k and v lie side by side, as a fused projection leaves them, and so
/// do their gradients
absl::StatusOr<Work> AttentionGradient(Backend& backend, const Arguments& arguments) {
  const int64_t rows = arguments[0], heads = arguments[1], tokens = arguments[2],
                dim = arguments[3], width = heads * dim;
  const Shape qkv{rows, tokens, 3 * width}, y{rows, tokens, width}, sums{rows, heads, tokens};
  Operands operands(backend, ActivationBytes(backend, 2 * (qkv.elements() + y.elements())));
  const DType dtype = backend.activation_dtype();
  DENOISED_ASSIGN_OR_RETURN(const Tensor qkvs, operands.Random(qkv));
  DENOISED_ASSIGN_OR_RETURN(const Tensor douts, operands.Random(y));
  DENOISED_ASSIGN_OR_RETURN(const Tensor outs, operands.Empty(y, dtype));
  DENOISED_ASSIGN_OR_RETURN(const Tensor log_sum_exps, operands.Empty(sums, DType::kF32));
  DENOISED_ASSIGN_OR_RETURN(const Tensor dqkvs, operands.Empty(qkv, dtype));
  const auto forward = [=](int64_t i) {
    const Tensor one = Copy(qkvs, i, qkv);
    return AttentionArgs{.q = one.Columns(0, width),
                         .k = one.Columns(width, width),
                         .v = one.Columns(2 * width, width),
                         .heads = static_cast<int>(heads),
                         .scale = 1 / std::sqrt(static_cast<float>(dim)),
                         .log_sum_exp = Copy(log_sum_exps, i, sums),
                         .out = Copy(outs, i, y)};
  };
  for (int64_t i = 0; i < operands.copies; ++i) backend.Attention(forward(i));
  Work work{.copies = operands.copies};
  work.counted["flop"] = 5 * 2.0 * static_cast<double>(y.elements() * tokens);
  work.enqueue = [=, &backend](int64_t i) {
    const Tensor one = Copy(dqkvs, i, qkv);
    backend.AttentionBackward({.forward = forward(i),
                               .dout = Copy(douts, i, y),
                               .dq = one.Columns(0, width),
                               .dk = one.Columns(width, width),
                               .dv = one.Columns(2 * width, width)});
  };
  return work;
}

struct Kind {
  std::string_view name;
  std::vector<std::string_view> arguments;
  std::function<absl::StatusOr<Work>(Backend&, const Arguments&)> make;
};

const std::vector<Kind>& Kinds() {
  static const std::vector<std::string_view> convolution = {"rows", "size",   "in",
                                                            "out",  "kernel", "stride"};
  static const std::vector<Kind> kinds = {
      {"dgrad", convolution,
       [](Backend& backend, const Arguments& arguments) {
         return ConvolutionGradient(backend, arguments, /*of_weights=*/false);
       }},
      {"wgrad", convolution,
       [](Backend& backend, const Arguments& arguments) {
         return ConvolutionGradient(backend, arguments, /*of_weights=*/true);
       }},
      {"group_norm_silu_backward", {"rows", "size", "channels", "groups"}, GroupNormGradient},
      {"attention_backward", {"rows", "heads", "tokens", "dim"}, AttentionGradient}};
  return kinds;
}

/// "dgrad/rows:128/size:32/…" → the values, in the order of `kind`.
absl::StatusOr<Arguments> ArgumentsOf(const Kind& kind, std::string_view name) {
  Arguments arguments;
  std::string_view rest = name.substr(kind.name.size());
  for (const std::string_view key : kind.arguments) {
    const std::string prefix = fmt::format("/{}:", key);
    int64_t value = 0;
    const bool starts = rest.substr(0, prefix.size()) == prefix;
    if (starts) rest.remove_prefix(prefix.size());
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    if (!starts || error != std::errc() || value < 1)
      return InvalidArgument("'{}': after {} come {}, each with a number, as in /rows:128", name,
                             kind.name, fmt::join(kind.arguments, ", "));
    rest.remove_prefix(end - rest.data());
    arguments.push_back(value);
  }
  if (!rest.empty()) return InvalidArgument("'{}': '{}' is too much", name, rest);
  if (const int64_t rows = arguments[0]; (rows & (rows - 1)) != 0)
    return InvalidArgument("'{}': {} rows; use a power of two", name, rows);
  return arguments;
}

absl::StatusOr<std::unique_ptr<Backend>> OpenBackend(const std::string& device) {
  return device == "cuda" ? OpenCudaBackend({}) : OpenCpuBackend();
}

/// One op, ready to be measured.
class Bench {
 public:
  static absl::StatusOr<std::unique_ptr<Bench>> Open(const std::string& device,
                                                     const std::string& name) {
    for (const Kind& kind : Kinds()) {
      if (std::string_view(name).substr(0, name.find('/')) != kind.name) continue;
      DENOISED_ASSIGN_OR_RETURN(const Arguments arguments, ArgumentsOf(kind, name));
      std::unique_ptr<Bench> bench(new Bench);
      // A backend is told its chunks once, so each op has its own.
      DENOISED_ASSIGN_OR_RETURN(bench->backend_, OpenBackend(device));
      bench->backend_->SetChunkRows(std::max<int64_t>(arguments[0] / kChunks, 1));
      DENOISED_ASSIGN_OR_RETURN(bench->work_, kind.make(*bench->backend_, arguments));
      bench->recording_ = bench->backend_->NewRecording();
      for (int run = 0; run < 2; ++run)  // the second measures kernels and records
        DENOISED_RETURN_IF_ERROR(bench->Run(1).status());
      return bench;
    }
    return InvalidArgument("'{}' is no op; see the head of training_throughput.cc", name);
  }

  const nlohmann::json& counted() const { return work_.counted; }

  /// Median seconds of one launch of the op.
  absl::StatusOr<double> Measure() {
    DENOISED_ASSIGN_OR_RETURN(const double once, Run(1));
    const auto runs_for = [&](double seconds) {
      return static_cast<int64_t>(std::ceil(seconds / std::max(once, 1e-6)));
    };
    DENOISED_RETURN_IF_ERROR(Run(runs_for(kWarmUpSeconds)).status());
    const int64_t runs = runs_for(kSampleSeconds);
    std::vector<double> seconds;
    for (int i = 0; i < kSamples; ++i) {
      DENOISED_ASSIGN_OR_RETURN(const double sample, Run(runs));
      seconds.push_back(sample / static_cast<double>(runs * launches()));
    }
    std::nth_element(seconds.begin(), seconds.begin() + kSamples / 2, seconds.end());
    return seconds[kSamples / 2];
  }

 private:
  int64_t launches() const { return std::max(work_.copies, kLeastLaunches); }

  /// The host's seconds for so many runs, until the device is done. They are queued back to back.
  absl::StatusOr<double> Run(int64_t runs) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point begin = Clock::now();
    for (int64_t run = 0; run < runs; ++run) {
      backend_->Run(recording_.get(), [&] {
        for (int64_t i = 0; i < launches(); ++i) work_.enqueue(i % work_.copies);
      });
    }
    DENOISED_RETURN_IF_ERROR(backend_->status());
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  std::unique_ptr<Backend> backend_;  // outlives the others
  Work work_;
  std::unique_ptr<Recording> recording_;
};

/// Answers requests with the op that was prepared last in place.
absl::Status TakeTurns(const std::string& device) {
  {
    DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, OpenBackend(device));
    Answer(nlohmann::json{{"ready", {{"device", backend->description()}}}});
  }
  std::unique_ptr<Bench> bench;
  std::string prepared;
  for (Request request; ReadRequest(&request);) {
    if (request.verb == "prepare") {
      bench.reset();  // its memory first
      absl::StatusOr<std::unique_ptr<Bench>> next = Bench::Open(device, request.name);
      if (next.ok()) {
        bench = *std::move(next);
        prepared = request.name;
        Answer(bench->counted());
      } else {
        Answer(next.status());
      }
    } else if (request.verb == "measure" && bench != nullptr && request.name == prepared) {
      const absl::StatusOr<double> seconds = bench->Measure();
      if (seconds.ok()) {
        Answer(nlohmann::json{{"us", 1e6 * *seconds}});
      } else {
        Answer(seconds.status());
      }
    } else {
      Answer(InvalidArgument("'{} {}': prepare it first", request.verb, request.name));
    }
  }
  return absl::OkStatus();
}

absl::Status Main(int argc, char** argv) {
  std::string device = "cuda";
  std::vector<std::string> names;
  bool turns = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--device=cuda" || argument == "--device=cpu") {
      device = argument.substr(argument.find('=') + 1);
    } else if (argument == "--turns") {
      turns = true;
    } else if (argument.starts_with("-")) {
      return InvalidArgument("unknown flag '{}'; see the head of training_throughput.cc", argument);
    } else {
      names.push_back(argument);
    }
  }
  if (turns) return TakeTurns(device);
  for (const std::string& name : names) {
    DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<Bench> bench, Bench::Open(device, name));
    DENOISED_ASSIGN_OR_RETURN(const double seconds, bench->Measure());
    const nlohmann::json& counted = bench->counted();
    const bool flop = counted.contains("flop");
    fmt::print("{}: {:.2f} µs, {:.3g} {}\n", name, 1e6 * seconds,
               1e-12 * counted.at(flop ? "flop" : "bytes").get<double>() / seconds,
               flop ? "TFLOP/s" : "TB/s");
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace denoised::training

int main(int argc, char** argv) {
  const absl::Status status = denoised::training::Main(argc, argv);
  if (status.ok()) return 0;
  fmt::print(stderr, "{}\n", std::string(status.message()));
  return 1;
}
