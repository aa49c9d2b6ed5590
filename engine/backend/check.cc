// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/check.h"

namespace denoised {
namespace {

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

void CheckTensor(const char* name, const Tensor& tensor, const Shape& shape, DType dtype,
                 const TensorRules& rules, bool columns_allowed = false) {
  DENOISED_CHECK(tensor.defined(), "{} is undefined", name);
  DENOISED_CHECK(tensor.shape() == shape, "{} is {}, must be {}", name, tensor.shape().ToString(),
                 shape.ToString());
  DENOISED_CHECK(tensor.dtype() == dtype, "{} is {}, must be {}", name, Name(tensor.dtype()),
                 Name(dtype));
  DENOISED_CHECK(tensor.device() == rules.device, "{} is on the wrong device", name);
  DENOISED_CHECK(columns_allowed || tensor.contiguous(), "{} is not contiguous", name);
}

/// Either the activation dtype or F32.
void CheckActivationOrF32(const char* name, const Tensor& tensor, const Shape& shape,
                          const TensorRules& rules) {
  CheckTensor(name, tensor, shape, tensor.dtype() == DType::kF32 ? DType::kF32 : rules.activation,
              rules);
}

void CheckRank(const char* name, const Tensor& tensor, int rank) {
  DENOISED_CHECK(tensor.shape().rank() == rank, "{} is {}, must have {} dimensions", name,
                 tensor.shape().ToString(), rank);
}

Shape WithLast(const Shape& shape, int64_t last) {
  int64_t dims[Shape::kMaxRank];
  for (int i = 0; i < shape.rank(); ++i) dims[i] = shape[i];
  dims[shape.rank() - 1] = last;
  return Shape(std::span<const int64_t>(dims, shape.rank()));
}

/// Of [rows, channels].
void CheckNorm(const Norm& norm, const Shape& size, const TensorRules& rules) {
  const int64_t channels = size[1];
  DENOISED_CHECK(norm.groups >= 1 && channels % norm.groups == 0, "{} channels in {} groups",
                 channels, norm.groups);
  CheckTensor("gamma", norm.gamma, {channels}, DType::kF32, rules);
  CheckTensor("beta", norm.beta, {channels}, DType::kF32, rules);
  if (norm.scale_shift) {
    CheckTensor("scale_shift", norm.scale_shift, {size[0], 2 * channels}, rules.activation, rules,
                true);
  }
}

/// Returns the channels of concat(x, x2).
int64_t CheckPrologue(const Tensor& x, const Prologue& prologue, const TensorRules& rules) {
  const Norm& norm = prologue.norm;
  if (IsToBeApplied(norm) && IsLayerNorm(norm)) {
    DENOISED_CHECK(!norm.scale_shift && norm.activation == Activation::kNone,
                   "a layer norm with a scale or an activation");
    Check(LayerNormArgs{.x = x,
                        .gamma = norm.gamma,
                        .beta = norm.beta,
                        .eps = norm.eps,
                        .out = prologue.normed},
          rules);
  } else if (IsToBeApplied(norm)) {
    Check(GroupNormArgs{.x = x, .x2 = prologue.x2, .norm = norm, .out = prologue.normed}, rules);
  }
  if (!prologue.x2) return x.dim(-1);
  CheckRank("x2", prologue.x2, x.shape().rank());
  const int64_t channels2 = prologue.x2.dim(-1);
  CheckTensor("x2", prologue.x2, WithLast(x.shape(), channels2), rules.activation, rules);
  return x.dim(-1) + channels2;
}

/// Memory for an input in e4m3, `bytes` for each pixel or token of x.
void CheckRounded(const char* name, const Tensor& rounded, const Tensor& x, int bytes,
                  const TensorRules& rules) {
  if (bytes > 0) CheckTensor(name, rounded, WithLast(x.shape(), bytes), DType::kU8, rules);
}

/// An input that an op before left in e4m3.
void CheckRoundedInput(const Tensor& x, const Prologue& prologue, int bytes,
                       const TensorRules& rules) {
  DENOISED_CHECK(bytes > 0 && !prologue.norm.gamma && !prologue.x2,
                 "an input in e4m3 before a norm, beside another, or of a layer that does not "
                 "multiply in it");
  CheckRounded("x", x, x, bytes, rules);
}

void CheckReader(const E4m3Reader& reader, const Tensor& out, const TensorRules& rules) {
  if (!reader.rounded) return;
  DENOISED_CHECK(rules.device != Device::kCpu, "a reader on the CPU, whose layers round inputs");
  CheckRounded("reader", reader.rounded, out, RoundedBytes(static_cast<int>(out.dim(-1))), rules);
  DENOISED_CHECK(reader.scale > 0, "a reader with the scale {}", reader.scale);
}

/// `out` itself, or in activation dtype.
void CheckResidual(const Tensor& residual, const Tensor& out, const TensorRules& rules) {
  if (!residual) return;
  CheckTensor("residual", residual, out.shape(),
              residual.data() == out.data() ? out.dtype() : rules.activation, rules);
}

void CheckSlots(const SlotState& state, const TensorRules& rules) {
  CheckRank("state.x", state.x, 4);
  const Shape& x = state.x.shape();
  CheckTensor("state.x", state.x, x, DType::kF32, rules);
  CheckTensor("state.registers", state.registers, {x[0], kRegisters, x[1], x[2], x[3]}, DType::kF32,
              rules);
  CheckTensor("state.x0", state.x0, x, DType::kF32, rules);
  CheckRank("state.plans", state.plans, 2);
  CheckTensor("state.plans", state.plans, {x[0], state.plans.dim(1)}, DType::kU8, rules);
  DENOISED_CHECK(state.plans.dim(1) % sizeof(DeviceEvaluation) == 0, "{} bytes a plan",
                 state.plans.dim(1));
  CheckTensor("state.evaluation", state.evaluation, {x[0]}, DType::kI32, rules);
  CheckTensor("state.nonfinite", state.nonfinite, {x[0]}, DType::kI32, rules);
  CheckTensor("state.seed", state.seed, {x[0]}, DType::kI64, rules);
  CheckTensor("state.guidance", state.guidance, {x[0], kGuidanceNumbers}, DType::kF32, rules);
  if (state.known) {
    CheckTensor("state.known", state.known, {x[0], 2, x[1], x[2], x[3]}, DType::kF32, rules);
    CheckTensor("state.mask", state.mask, {x[0], x[1], x[2]}, DType::kF32, rules);
  }
  if (state.extra) {
    CheckRank("state.extra", state.extra, 4);
    CheckTensor("state.extra", state.extra, {x[0], x[1], x[2], state.extra.dim(3)}, DType::kF32,
                rules);
  }
  if (state.embedding) {
    CheckRank("state.embedding", state.embedding, 2);
    CheckTensor("state.embedding", state.embedding, {x[0], state.embedding.dim(1)}, DType::kF32,
                rules);
  }
}

/// Returns the number of rows.
int64_t CheckEvaluationRows(const Tensor& rows, const TensorRules& rules) {
  CheckRank("rows", rows, 2);
  CheckTensor("rows", rows, {rows.dim(0), kRowNumbers}, DType::kI32, rules);
  return rows.dim(0);
}

/// Returns the number of rows.
int64_t CheckOutputs(const SlotState& state, const Tensor& rows, const Tensor& model_output,
                     const TensorRules& rules) {
  CheckSlots(state, rules);
  const int64_t count = CheckEvaluationRows(rows, rules);
  CheckRank("model_output", model_output, 4);
  const Shape& x = state.x.shape();
  const int64_t channels = model_output.dim(3);
  DENOISED_CHECK(channels == x[3] || channels == 2 * x[3], "model_output is {} for images {}",
                 model_output.shape().ToString(), x.ToString());
  CheckTensor("model_output", model_output, {count, x[1], x[2], channels}, DType::kF32, rules);
  return count;
}

}  // namespace

RowShape RowsOf(const Shape& shape) {
  DENOISED_CHECK(shape.rank() >= 2, "{} has no rows of features", shape.ToString());
  int64_t tokens = 1;
  for (int i = 1; i < shape.rank() - 1; ++i) tokens *= shape[i];
  return {shape[0], tokens, shape[-1]};
}

int64_t ConvolutionExtent(int64_t input, int pad_before, int pad_after, int kernel, int stride) {
  return (input + pad_before + pad_after - kernel) / stride + 1;
}

void Check(const Conv2dArgs& args, const TensorRules& rules) {
  CheckRank("x", args.x, 4);
  DENOISED_CHECK(args.weight != nullptr);
  const Shape& x = args.x.shape();
  const bool upsample2x = args.prologue.upsample2x;
  const Epilogue& epilogue = args.epilogue;
  const PackedConv2d& weight = *args.weight;
  if (IsRounded(args.x)) {
    CheckRoundedInput(args.x, args.prologue, weight.rounded_bytes, rules);
  } else {
    CheckTensor("x", args.x, x, rules.activation, rules);
    DENOISED_CHECK(!IsLayerNorm(args.prologue.norm), "a layer norm before a convolution");
    const int64_t channels = CheckPrologue(args.x, args.prologue, rules);
    DENOISED_CHECK(channels == weight.in_channels, "x has {} channels, the weight {}", channels,
                   weight.in_channels);
    CheckRounded("rounded", args.prologue.rounded, args.x, weight.rounded_bytes, rules);
  }
  DENOISED_CHECK(args.stride >= 1, "stride {}", args.stride);
  for (int pad : {args.pad_top, args.pad_left, args.pad_bottom, args.pad_right}) {
    DENOISED_CHECK(pad >= 0 && pad < weight.kernel, "padding {} for a kernel of {}", pad,
                   weight.kernel);
  }
  DENOISED_CHECK(upsample2x == weight.upsample2x, "upsample2x is {}, but was packed as {}",
                 upsample2x, weight.upsample2x);
  DENOISED_CHECK(!upsample2x || (weight.kernel == 3 && args.stride == 1 && args.pad_top == 1 &&
                                 args.pad_left == 1 && args.pad_bottom == 1 && args.pad_right == 1),
                 "upsample2x with a kernel of {} and stride {}", weight.kernel, args.stride);
  const int64_t up = upsample2x ? 2 : 1;
  DENOISED_CHECK(x[1] * up + args.pad_top + args.pad_bottom >= weight.kernel &&
                     x[2] * up + args.pad_left + args.pad_right >= weight.kernel,
                 "x is {}, smaller than the kernel of {}", x.ToString(), weight.kernel);
  const Shape out = {
      x[0], ConvolutionExtent(x[1] * up, args.pad_top, args.pad_bottom, weight.kernel, args.stride),
      ConvolutionExtent(x[2] * up, args.pad_left, args.pad_right, weight.kernel, args.stride),
      weight.out_channels};
  CheckActivationOrF32("out", args.out, out, rules);
  if (epilogue.add) {
    CheckTensor("add", epilogue.add, {x[0], weight.out_channels}, rules.activation, rules, true);
  }
  CheckResidual(epilogue.residual, args.out, rules);
  DENOISED_CHECK(!epilogue.ungated && !epilogue.reader.rounded,
                 "a convolution with a gate or a reader");
  if (epilogue.norm) CheckNorm(*epilogue.norm, {x[0], weight.out_channels}, rules);
  if (epilogue.shortcut.weight == nullptr) return;
  const Tensor &source = epilogue.shortcut.x, &source2 = epilogue.shortcut.x2;
  const PackedConv2d& shortcut = *epilogue.shortcut.weight;
  DENOISED_CHECK(!epilogue.residual, "both a residual and a shortcut");
  DENOISED_CHECK(!shortcut.has_bias, "a shortcut with a bias; add it to that of the convolution");
  DENOISED_CHECK(
      shortcut.kernel == 1 && !shortcut.upsample2x && shortcut.out_channels == weight.out_channels,
      "a shortcut with a kernel of {} and {} outputs, must be 1 and {}", shortcut.kernel,
      shortcut.out_channels, weight.out_channels);
  CheckRank("shortcut.x", source, 4);
  int64_t shortcut_channels = source.dim(3);
  CheckTensor("shortcut.x", source, WithLast(out, shortcut_channels), rules.activation, rules);
  if (source2) {
    CheckRank("shortcut.x2", source2, 4);
    CheckTensor("shortcut.x2", source2, WithLast(out, source2.dim(3)), rules.activation, rules);
    shortcut_channels += source2.dim(3);
  }
  DENOISED_CHECK(shortcut.rounded_bytes == 0, "a shortcut in e4m3");
  DENOISED_CHECK(
      args.out.data() != source.data() && (!source2 || args.out.data() != source2.data()),
      "out is an input of the shortcut");
  DENOISED_CHECK(shortcut_channels == shortcut.in_channels,
                 "the shortcut has {} channels, its weight {}", shortcut_channels,
                 shortcut.in_channels);
}

void Check(const LinearArgs& args, const TensorRules& rules) {
  DENOISED_CHECK(args.weight != nullptr);
  const PackedLinear& weight = *args.weight;
  const Epilogue& epilogue = args.epilogue;
  DENOISED_CHECK(args.x.shape().rank() >= (weight.e4m3.input_scale == 0 ? 2 : 3), "x is {}",
                 args.x.shape().ToString());
  DENOISED_CHECK(!args.prologue.x2 && !args.prologue.upsample2x, "the input of a convolution");
  if (IsRounded(args.x)) {
    CheckRoundedInput(args.x, args.prologue, weight.rounded_bytes, rules);
  } else {
    CheckActivationOrF32("x", args.x, WithLast(args.x.shape(), weight.in_features), rules);
    CheckPrologue(args.x, args.prologue, rules);
    CheckRounded("rounded", args.prologue.rounded, args.x, weight.rounded_bytes, rules);
  }
  DENOISED_CHECK(!epilogue.add && epilogue.shortcut.weight == nullptr, "a linear with a shortcut");
  const Shape product = WithLast(args.x.shape(), weight.out_features);
  if (!epilogue.ungated) {
    CheckActivationOrF32("out", args.out, product, rules);
    CheckResidual(epilogue.residual, args.out, rules);
    if (epilogue.norm) CheckNorm(*epilogue.norm, {product[0], weight.out_features}, rules);
    DENOISED_CHECK(!epilogue.reader.rounded, "a reader without a gate");
    return;
  }
  DENOISED_CHECK(weight.gated && !epilogue.residual && epilogue.scale == 1 &&
                     epilogue.activation == Activation::kNone && epilogue.norm == nullptr,
                 "a gate beside another epilogue, or of weights without one");
  CheckTensor("ungated", epilogue.ungated, product, rules.activation, rules);
  CheckGate(epilogue.ungated, args.out, rules);
  CheckReader(epilogue.reader, args.out, rules);
  const Tensor& input = IsRounded(args.x) ? args.x : args.prologue.rounded;
  DENOISED_CHECK(!epilogue.reader.rounded || epilogue.reader.rounded.data() != input.data(),
                 "the reader's memory is that of the layer's own input");
}

void Check(const GroupNormArgs& args, const TensorRules& rules) {
  const Shape& x = args.x.shape();
  DENOISED_CHECK(x.rank() == 3 || x.rank() == 4, "x is {}", x.ToString());
  CheckTensor("x", args.x, x, rules.activation, rules);
  int64_t channels = x[-1];
  if (args.x2) {
    CheckTensor("x2", args.x2, WithLast(x, args.x2.dim(-1)), rules.activation, rules);
    channels += args.x2.dim(-1);
  }
  CheckNorm(args.norm, {x[0], channels}, rules);
  CheckTensor("out", args.out, WithLast(x, channels), rules.activation, rules);
}

void Check(const LayerNormArgs& args, const TensorRules& rules) {
  const Shape& x = args.x.shape();
  DENOISED_CHECK(x.rank() >= 2, "x is {}", x.ToString());
  CheckTensor("x", args.x, x, rules.activation, rules);
  CheckTensor("gamma", args.gamma, {x[-1]}, DType::kF32, rules);
  CheckTensor("beta", args.beta, {x[-1]}, DType::kF32, rules);
  CheckTensor("out", args.out, x, rules.activation, rules);
}

void Check(const AttentionArgs& args, const TensorRules& rules) {
  CheckRank("q", args.q, 3);
  CheckRank("k", args.k, 3);
  const Shape& q = args.q.shape();
  DENOISED_CHECK(args.heads >= 1 && q[2] % args.heads == 0, "{} features in {} heads", q[2],
                 args.heads);
  const Shape k = {args.key_set ? args.k.dim(0) : q[0], args.k.dim(1), q[2]};
  DENOISED_CHECK(k[0] >= 1 && k[1] >= 1, "attention over no keys");
  if (args.key_set) CheckTensor("key_set", args.key_set, {q[0]}, DType::kI32, rules);
  if (args.key_counts) CheckTensor("key_counts", args.key_counts, {k[0]}, DType::kI32, rules);
  CheckTensor("q", args.q, q, rules.activation, rules, true);
  CheckTensor("k", args.k, k, rules.activation, rules, true);
  CheckTensor("v", args.v, k, rules.activation, rules, true);
  CheckTensor("out", args.out, q, rules.activation, rules);
  CheckReader(args.reader, args.out, rules);
}

void Check(const GaussianArgs& args, const TensorRules& rules) {
  const Shape& out = args.out.shape();
  CheckTensor("out", args.out, out, DType::kF32, rules);
  CheckTensor("moments", args.moments, WithLast(out, 2 * out[-1]), DType::kF32, rules);
  if (args.noise) CheckTensor("noise", args.noise, out, DType::kF32, rules);
  CheckTensor("scale", args.scale, {out[-1]}, DType::kF32, rules);
  CheckTensor("shift", args.shift, {out[-1]}, DType::kF32, rules);
}

void Check(const TimestepEmbeddingArgs& args, const TensorRules& rules) {
  CheckRank("out", args.out, 2);
  CheckTensor("t", args.t, {args.out.dim(0)}, DType::kF32, rules);
  CheckActivationOrF32("out", args.out, args.out.shape(), rules);
  const double half = static_cast<double>(args.out.dim(1) / 2);
  DENOISED_CHECK(args.out.dim(1) >= 2 && half != args.freq_shift, "{} features, freq_shift {}",
                 args.out.dim(1), args.freq_shift);
}

void Check(const FourierEmbeddingArgs& args, const TensorRules& rules) {
  CheckRank("out", args.out, 2);
  CheckRank("weight", args.weight, 1);
  CheckTensor("weight", args.weight, args.weight.shape(), DType::kF32, rules);
  CheckTensor("t", args.t, {args.out.dim(0)}, DType::kF32, rules);
  CheckActivationOrF32("out", args.out, {args.out.dim(0), 2 * args.weight.dim(0)}, rules);
}

void Check(const EmbeddingArgs& args, const TensorRules& rules) {
  CheckRank("table", args.table, 2);
  CheckRank("index", args.index, 1);
  CheckActivationOrF32("table", args.table, args.table.shape(), rules);
  CheckTensor("index", args.index, args.index.shape(),
              args.index.dtype() == DType::kF32 ? DType::kF32 : DType::kI32, rules);
  CheckActivationOrF32("out", args.out, {args.index.dim(0), args.table.dim(1)}, rules);
}

void Check(const BeginSlotArgs& args, const TensorRules& rules) {
  CheckSlots(args.state, rules);
  const Shape& x = args.state.x.shape();
  DENOISED_CHECK(args.slot >= 0 && args.slot < x[0], "slot {} of {}", args.slot, x[0]);
  const Shape image = {x[1], x[2], x[3]};
  if (args.source) CheckTensor("source", args.source, image, DType::kF32, rules);
  if (args.noise) CheckTensor("noise", args.noise, image, DType::kF32, rules);
  DENOISED_CHECK(!args.keeps_known || (args.source.defined() && args.state.known.defined()),
                 "no image, or no place for it");
}

void Check(const GatherArgs& args, const TensorRules& rules) {
  CheckSlots(args.state, rules);
  const int64_t rows = CheckEvaluationRows(args.rows, rules);
  const Shape& x = args.state.x.shape();
  const int64_t extra = args.state.extra ? args.state.extra.dim(3) : 0;
  CheckTensor("x", args.x, {rows, x[1], x[2], x[3] + extra}, rules.activation, rules);
  CheckTensor("condition", args.condition, {rows}, DType::kF32, rules);
  if (args.label) CheckTensor("label", args.label, {rows}, DType::kI32, rules);
  if (args.embedding) {
    DENOISED_CHECK(args.state.embedding.defined(),
                   "an embedding is asked for, the slots have none");
    CheckTensor("embedding", args.embedding, {rows, args.state.embedding.dim(1)}, DType::kF32,
                rules);
  }
}

void Check(const MeasureOutputsArgs& args, const TensorRules& rules) {
  const int64_t rows = CheckOutputs(args.state, args.rows, args.model_output, rules);
  CheckTensor("factors", args.factors, {rows, kOutputFactors}, DType::kF32, rules);
}

void Check(const AdvanceArgs& args, const TensorRules& rules) {
  const int64_t rows = CheckOutputs(args.state, args.rows, args.model_output, rules);
  if (args.factors)
    CheckTensor("factors", args.factors, {rows, kOutputFactors}, DType::kF32, rules);
}

void CheckResample2x(Resample kind, const Tensor& x, const Tensor& out, const TensorRules& rules) {
  CheckRank("x", x, 4);
  const Shape& from = x.shape();
  CheckTensor("x", x, from, rules.activation, rules);
  Shape to = Doubles(kind) ? Shape{from[0], 2 * from[1], 2 * from[2], from[3]}
                           : Shape{from[0], from[1] / 2, from[2] / 2, from[3]};
  if (kind == Resample::kNearestUp && out.shape().rank() == 4)
    to = {to[0], to[1] - out.dim(1) % 2, to[2] - out.dim(2) % 2, to[3]};
  CheckTensor("out", out, to, rules.activation, rules);
}

void CheckAdd(const Tensor& a, const Tensor& b, const Tensor& out, const TensorRules& rules) {
  CheckActivationOrF32("a", a, a.shape(), rules);
  if (b) CheckActivationOrF32("b", b, a.shape(), rules);
  CheckActivationOrF32("out", out, a.shape(), rules);
}

void CheckDivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out,
                     const TensorRules& rules) {
  CheckActivationOrF32("x", x, x.shape(), rules);
  CheckTensor("divisor", divisor, {x.dim(0)}, DType::kF32, rules);
  CheckActivationOrF32("out", out, x.shape(), rules);
}

void CheckGate(const Tensor& values_and_gates, const Tensor& out, const TensorRules& rules) {
  const Shape& shape = values_and_gates.shape();
  CheckTensor("values_and_gates", values_and_gates, shape, rules.activation, rules);
  DENOISED_CHECK(shape[-1] % 2 == 0, "{} values and gates", shape[-1]);
  CheckTensor("out", out, WithLast(shape, shape[-1] / 2), rules.activation, rules);
}

void CheckNearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out,
                      const TensorRules& rules) {
  CheckRank("codebook", codebook, 2);
  CheckTensor("codebook", codebook, codebook.shape(), DType::kF32, rules);
  CheckTensor("x", x, WithLast(x.shape(), codebook.dim(1)), DType::kF32, rules);
  CheckTensor("out", out, x.shape(), rules.activation, rules);
}

void CheckCopy(const Tensor& from, const Tensor& to, const TensorRules& rules) {
  CheckTensor("from", from, from.shape(), from.dtype(), rules);
  CheckTensor("to", to, to.shape(), from.dtype(), rules, to.dim(-1) == from.dim(-1));
  DENOISED_CHECK(from.elements() == to.elements(), "copies {} to {}", from.shape().ToString(),
                 to.shape().ToString());
}

void CheckUpload(size_t bytes, const Tensor& to, const TensorRules& rules) {
  CheckTensor("to", to, to.shape(), to.dtype(), rules);
  DENOISED_CHECK(bytes <= to.bytes(), "uploads {} bytes into {}", bytes, to.bytes());
}

void CheckDownload(const Tensor& from, const TensorRules& rules) {
  CheckTensor("from", from, from.shape(), from.dtype(), rules);
}

absl::Status CheckFloats(const Tensor& values) {
  if (!values.defined() || values.device() != Device::kCpu || !values.contiguous() ||
      !IsFloat(values.dtype())) {
    return InvalidArgument(
        "tensor is {}{}; weights must be contiguous F32, F16 or BF16 in host memory",
        values.defined() ? Name(values.dtype()) : "undefined",
        values.defined() ? " " + values.shape().ToString() : "");
  }
  return absl::OkStatus();
}

absl::Status CheckConv2dWeight(const Tensor& weight_oihw, const Tensor& bias) {
  DENOISED_RETURN_IF_ERROR(Annotate(CheckFloats(weight_oihw), "convolution weight"));
  const Shape& shape = weight_oihw.shape();
  if (shape.rank() != 4 || shape[2] != shape[3] || shape.elements() == 0) {
    return InvalidArgument("convolution weight is {}; it must be [out, in, k, k]",
                           shape.ToString());
  }
  if (!bias) return absl::OkStatus();
  DENOISED_RETURN_IF_ERROR(Annotate(CheckFloats(bias), "convolution bias"));
  if (!(bias.shape() == Shape{shape[0]})) {
    return InvalidArgument("convolution bias is {}; it must be [{}], one for each output channel",
                           bias.shape().ToString(), shape[0]);
  }
  return absl::OkStatus();
}

absl::Status CheckLinearWeights(const std::vector<Tensor>& weights_oi,
                                const std::vector<Tensor>& biases, bool gated) {
  DENOISED_CHECK(!gated || weights_oi.size() == 1, "values and gates of several weights");
  if (weights_oi.empty()) return InvalidArgument("a linear layer has no weight; give at least one");
  size_t with_bias = 0;
  for (const Tensor& bias : biases) with_bias += bias.defined();
  if (with_bias != 0 && (with_bias != biases.size() || biases.size() != weights_oi.size())) {
    return InvalidArgument("{} linear weights have {} biases; all have one or none",
                           weights_oi.size(), with_bias);
  }
  for (size_t i = 0; i < weights_oi.size(); ++i) {
    DENOISED_RETURN_IF_ERROR(Annotate(CheckFloats(weights_oi[i]), "linear weight"));
    const Shape& shape = weights_oi[i].shape();
    if (shape.rank() != 2 || shape.elements() == 0 || shape[1] != weights_oi[0].dim(1)) {
      return InvalidArgument(
          "linear weight is {}; it must be [out, in], with the same `in` as the "
          "others beside it",
          shape.ToString());
    }
    if (with_bias == 0) continue;
    DENOISED_RETURN_IF_ERROR(Annotate(CheckFloats(biases[i]), "linear bias"));
    if (!(biases[i].shape() == Shape{shape[0]})) {
      return InvalidArgument("linear bias is {}; it must be [{}], one for each output",
                             biases[i].shape().ToString(), shape[0]);
    }
  }
  return absl::OkStatus();
}

}  // namespace denoised
