// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/counting.h"

#include "engine/backend/decompose.h"

namespace denoised {
namespace {

// As in Arena::Measuring(): aligned, not null, never mapped.
constexpr uintptr_t kNowhere = uintptr_t{1} << 46;

struct CountedGraph final : Graph {
  Work work;
};

struct NoDownload final : Download {
  absl::StatusOr<Tensor> Wait() override {
    return FailedPrecondition(
        "the counting backend computes nothing that could be downloaded; "
        "open a \"cpu\" or \"cuda\" device");
  }
};

/// What an op writes.
const Tensor& ResultOf(const Tensor& out, const E4m3Reader& reader) {
  return reader.rounded ? reader.rounded : out;
}

struct NoMarker final : Marker {
  bool reached() override { return true; }
  absl::Status Wait() override { return absl::OkStatus(); }
  double SecondsSince(const Marker&) override { return 0; }
};

}  // namespace

CountingBackend::CountingBackend(Device device, DType activation_dtype)
    : rules_{device, activation_dtype} {}

CountingBackend::CountingBackend(const Backend& real)
    : rules_{real.device(), real.activation_dtype()},
      capabilities_(real.capabilities()),
      multiplies_e4m3_(real.MultipliesE4m3()) {}

std::string CountingBackend::description() const {
  return fmt::format("counts the work of {} with {} activations",
                     rules_.device == Device::kCpu ? "a CPU" : "a CUDA device",
                     denoised::Name(rules_.activation));
}

Tensor CountingBackend::Nowhere(const Shape& shape, DType dtype) const {
  return Tensor(reinterpret_cast<void*>(kNowhere), shape, dtype, rules_.device, nullptr);
}

void CountingBackend::Count(double flops, double weight_bytes,
                            std::initializer_list<const Tensor*> operands) {
  work_.flops += flops;
  work_.bytes += weight_bytes;
  for (const Tensor* operand : operands) {
    if (*operand) work_.bytes += static_cast<double>(operand->bytes());
  }
  ++work_.ops;
}

absl::StatusOr<Tensor> CountingBackend::Allocate(const Shape& shape, DType dtype,
                                                 std::string_view) {
  allocated_bytes_ += shape.elements() * SizeOf(dtype);
  return Nowhere(shape, dtype);
}

void CountingBackend::Upload(const void*, size_t bytes, const Tensor& to) {
  CheckUpload(bytes, to, rules_);
  work_.bytes += static_cast<double>(bytes);
  ++work_.ops;
}

std::unique_ptr<Download> CountingBackend::BeginDownload(const Tensor& from) {
  CheckDownload(from, rules_);
  Count(0, 0, {&from});
  return std::make_unique<NoDownload>();
}

void CountingBackend::Copy(const Tensor& from, const Tensor& to) {
  CheckCopy(from, to, rules_);
  Count(0, 0, {&from, &to});
}

absl::StatusOr<std::unique_ptr<PackedConv2d>> CountingBackend::PackConv2d(const Tensor& weight_oihw,
                                                                          const Tensor& bias,
                                                                          bool upsample2x,
                                                                          const E4m3Layer& e4m3) {
  DENOISED_RETURN_IF_ERROR(CheckConv2dWeight(weight_oihw, bias));
  auto packed = std::make_unique<PackedConv2d>();
  packed->out_channels = static_cast<int>(weight_oihw.dim(0));
  packed->in_channels = static_cast<int>(weight_oihw.dim(1));
  packed->kernel = static_cast<int>(weight_oihw.dim(2));
  packed->upsample2x = upsample2x;
  packed->has_bias = bias.defined();
  packed->e4m3 = e4m3;
  if (RoundsIntoMemory(e4m3)) packed->rounded_bytes = RoundedBytes(packed->in_channels);
  // A 3×3 kernel over a doubled image has a kernel for each of four phases: on CUDA of 2×2 taps, on
  // the CPU, in e4m3 alone, of 3×3.
  int64_t elements = weight_oihw.elements();
  if (upsample2x && packed->kernel == 3) {
    if (rules_.device == Device::kCuda) {
      elements = elements / 9 * 16;
    } else if (e4m3.input_scale != 0) {
      elements *= 4;
    }
  }
  weight_bytes_ += WeightBytes(elements, packed->out_channels, e4m3);
  if (bias) weight_bytes_ += bias.elements() * sizeof(float);
  return packed;
}

absl::StatusOr<std::unique_ptr<PackedLinear>> CountingBackend::PackLinear(
    const std::vector<Tensor>& weights_oi, const std::vector<Tensor>& biases, const E4m3Layer& e4m3,
    bool gated) {
  DENOISED_RETURN_IF_ERROR(CheckLinearWeights(weights_oi, biases, gated));
  auto packed = std::make_unique<PackedLinear>();
  packed->e4m3 = e4m3;
  packed->gated = gated;
  packed->in_features = static_cast<int>(weights_oi[0].dim(1));
  if (RoundsIntoMemory(e4m3)) packed->rounded_bytes = RoundedBytes(packed->in_features);
  for (const Tensor& weight : weights_oi) {
    packed->out_features += static_cast<int>(weight.dim(0));
    weight_bytes_ += WeightBytes(weight.elements(), static_cast<int>(weight.dim(0)), e4m3);
  }
  for (const Tensor& bias : biases) {
    if (bias) weight_bytes_ += bias.elements() * sizeof(float);
  }
  return packed;
}

bool CountingBackend::RoundsIntoMemory(const E4m3Layer& e4m3) const {
  return e4m3.input_scale != 0 && rules_.device == Device::kCuda;
}

size_t CountingBackend::WeightBytes(int64_t elements, int outputs, const E4m3Layer& e4m3) const {
  // The CPU keeps the rounded numbers in its own dtype.
  return RoundsIntoMemory(e4m3) ? elements + outputs * sizeof(float)
                                : elements * SizeOf(rules_.activation);
}

absl::StatusOr<Tensor> CountingBackend::PackVector(const Tensor& values) {
  DENOISED_RETURN_IF_ERROR(CheckFloats(values));
  weight_bytes_ += values.elements() * sizeof(float);
  return Nowhere(values.shape(), DType::kF32);
}

void CountingBackend::Conv2d(const Conv2dArgs& asked) {
  Check(asked, rules_);
  const Conv2dArgs args = WithoutNorm(*this, asked);
  const Epilogue& epilogue = args.epilogue;
  const Conv2dShortcut& shortcut = epilogue.shortcut;
  const PackedConv2d& weight = *args.weight;
  double inputs = static_cast<double>(weight.kernel) * weight.kernel * weight.in_channels;
  if (shortcut.weight != nullptr) inputs += shortcut.weight->in_channels;
  Count(2.0 * args.out.elements() * inputs,
        inputs * weight.out_channels * SizeOf(rules_.activation),
        {&args.x, &args.prologue.x2, &epilogue.add, &epilogue.residual, &shortcut.x, &shortcut.x2,
         &args.out});
}

void CountingBackend::Linear(const LinearArgs& asked) {
  Check(asked, rules_);
  const LinearArgs args = WithoutNorm(*this, asked);
  const double weights = static_cast<double>(args.weight->in_features) * args.weight->out_features;
  const double rows = static_cast<double>(args.x.elements()) / args.x.dim(-1);
  Count(2.0 * rows * weights, weights * SizeOf(rules_.activation),
        {&args.x, &args.epilogue.residual, &ResultOf(args.out, args.epilogue.reader)});
}

void CountingBackend::Gate(const Tensor& values_and_gates, const Tensor& out) {
  CheckGate(values_and_gates, out, rules_);
  Count(0, 0, {&values_and_gates, &out});
}

void CountingBackend::GroupNorm(const GroupNormArgs& args) {
  Check(args, rules_);
  Count(0, 0,
        {&args.x, &args.x2, &args.norm.gamma, &args.norm.beta, &args.norm.scale_shift, &args.out});
}

void CountingBackend::LayerNorm(const LayerNormArgs& args) {
  Check(args, rules_);
  Count(0, 0, {&args.x, &args.gamma, &args.beta, &args.out});
}

void CountingBackend::NearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out) {
  CheckNearestCode(x, codebook, out, rules_);
  Count(3.0 * x.elements() * codebook.dim(0), 0, {&x, &codebook, &out});
}

void CountingBackend::Gaussian(const GaussianArgs& args) {
  Check(args, rules_);
  Count(0, 0, {&args.moments, &args.noise, &args.scale, &args.shift, &args.out});
}

void CountingBackend::Attention(const AttentionArgs& args) {
  Check(args, rules_);
  // q·kᵀ and the product with v: each a multiply-add for every query, key and feature.
  Count(4.0 * args.q.elements() * args.k.dim(1), 0,
        {&args.q, &args.k, &args.v, &ResultOf(args.out, args.reader)});
}

void CountingBackend::TimestepEmbedding(const TimestepEmbeddingArgs& args) {
  Check(args, rules_);
  Count(0, 0, {&args.t, &args.out});
}

void CountingBackend::FourierEmbedding(const FourierEmbeddingArgs& args) {
  Check(args, rules_);
  Count(0, 0, {&args.t, &args.weight, &args.out});
}

void CountingBackend::Embedding(const EmbeddingArgs& args) {
  Check(args, rules_);
  Count(0, 0,
        {&args.index, &args.out, &args.out});  // reads as many bytes of the table as it writes
}

void CountingBackend::Resample2x(Resample kind, const Tensor& x, const Tensor& out) {
  CheckResample2x(kind, x, out, rules_);
  Count(0, 0, {&x, &out});
}

void CountingBackend::Add(const Tensor& a, float, const Tensor& b, float, Activation,
                          const Tensor& out) {
  CheckAdd(a, b, out, rules_);
  Count(0, 0, {&a, &b, &out});
}

void CountingBackend::DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) {
  CheckDivideRows(x, divisor, out, rules_);
  Count(0, 0, {&x, &divisor, &out});
}

void CountingBackend::BeginSlot(const BeginSlotArgs& args) {
  Check(args, rules_);
  const Tensor x = args.state.x.Slice(args.slot, 1), x0 = args.state.x0.Slice(args.slot, 1),
               registers = args.state.registers.Slice(args.slot, 1);
  Count(0, 0, {&args.source, &args.noise, &x, &x0, &registers});
}

void CountingBackend::Gather(const GatherArgs& args) {
  Check(args, rules_);
  Count(0, 0, {&args.rows, &args.x, &args.x, &args.condition, &args.label, &args.embedding});
}

void CountingBackend::MeasureOutputs(const MeasureOutputsArgs& args) {
  Check(args, rules_);
  Count(0, 0, {&args.rows, &args.factors});  // most rows are not measured
}

void CountingBackend::Advance(const AdvanceArgs& args) {
  Check(args, rules_);
  const Shape& x = args.state.x.shape();
  const double image = static_cast<double>(x[1]) * x[2] * x[3];
  const double elements = static_cast<double>(args.rows.dim(0)) * image;
  Count(2.0 * elements * kPlanInputs * kPlanOutputs, 0, {&args.rows, &args.model_output});
  // Each row reads and writes its slot's x and registers, and writes x0.
  work_.bytes += elements * sizeof(float) * (2 * (1 + kRegisters) + 1);
}

absl::StatusOr<std::unique_ptr<Graph>> CountingBackend::Capture(const std::function<void()>& body) {
  const Work before = std::exchange(work_, {});
  body();
  auto graph = std::make_unique<CountedGraph>();
  graph->work = std::exchange(work_, before);
  return graph;
}

void CountingBackend::Launch(Graph& graph) {
  const Work& work = static_cast<CountedGraph&>(graph).work;
  work_.flops += work.flops;
  work_.bytes += work.bytes;
  work_.ops += work.ops;
}

std::unique_ptr<Marker> CountingBackend::Mark() { return std::make_unique<NoMarker>(); }

}  // namespace denoised
