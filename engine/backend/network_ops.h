// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/backend/activation.h"
#include "engine/backend/resample.h"
#include "engine/core/status.h"
#include "engine/core/tensor.h"

/// The ops of networks. nn/ is written once against them. Each backend decides what it fuses with a
/// product and what it runs as a separate op.
///
/// Activations are NHWC ([N, H, W, C], or [N, tokens, C]) in activation_dtype(). "Row" is one
/// sample of the batch: dimension 0. Every op computes each row with an order of operations that
/// depends on the row's shape alone, so a row has the same bits in any batch.
///
/// Ops only enqueue and return nothing. Shapes were validated when the model was loaded, so a wrong
/// one is a bug (CHECK). Errors of the device are kept (compute_device.h).

namespace denoised {

/// Limits that every backend supports; nn/ refuses larger models when they are loaded.
constexpr int kMaxHeadDim = 512;
constexpr int kMaxNormChannels = 6144;

/// A convolution or linear layer that may multiply in e4m3 (engine/core/e4m3.h). With an input
/// scale s, its input is RoundToE4m3(x / s). Its weights are rounded in the same way when they are
/// packed, with the E4m3Scale() of the largest weight of each output. Products are exact, sums F32.
/// So the result is that of the layer on rounded numbers. Bias, add, residual, scale and activation
/// are unchanged. With `upsample2x`, the weights are those of the four 2×2 convolutions that the
/// layer is of the image before it is doubled: sums of taps, rounded once, with one scale for each
/// output. Not for linears of one vector per row (rank 2).
struct E4m3Layer {
  std::string name;       // in the checkpoint, for InputRanges; empty: not observed
  float input_scale = 0;  // a power of two; 0: products are in the activation dtype
};
/// Bytes of a pixel or a token in Prologue::rounded: whole vectors of 16.
constexpr int RoundedBytes(int features) { return (features + 15) / 16 * 16; }

/// Weights in the layout of the backend's kernels, made once at load.
class PackedConv2d {
 public:
  virtual ~PackedConv2d() = default;
  int in_channels = 0, out_channels = 0, kernel = 0;
  bool upsample2x = false;
  bool has_bias = false;
  E4m3Layer e4m3;
  int rounded_bytes = 0;  // of a pixel in Prologue::rounded; 0: the backend needs none
};
class PackedLinear {
 public:
  virtual ~PackedLinear() = default;
  int in_features = 0, out_features = 0;
  bool gated = false;  // packed for Epilogue::ungated
  E4m3Layer e4m3;
  int rounded_bytes = 0;  // of a token, likewise
};

/// The one layer that reads an op's result, if it has rounded_bytes. The op leaves in `rounded`
/// what that layer would make of the result, bit for bit, and the result itself is undefined.
struct E4m3Reader {
  Tensor rounded;   // U8 [.., rounded_bytes], LinearArgs::x of the layer; undefined: no such layer
  float scale = 0;  // the layer's E4m3Layer::input_scale
};
/// Whether a layer's input is E4m3Reader::rounded.
inline bool IsRounded(const Tensor& x) { return x.dtype() == DType::kU8; }

/// A group norm and what follows it: act(norm(x)·(1 + scale) + shift). Or a layer norm, before a
/// linear, which nothing follows.
struct Norm {
  Tensor gamma, beta;  // F32 [C]; undefined: no norm
  int groups = 32;     // 0: a layer norm
  float eps = 1e-5f;
  Tensor scale_shift;  // optional [N, 2·C], may be a Columns() view: scales, then shifts
  Activation activation = Activation::kNone;
  bool applied = false;  // by the Epilogue of the op that wrote x
};
inline bool IsToBeApplied(const Norm& norm) { return norm.gamma.defined() && !norm.applied; }
inline bool IsLayerNorm(const Norm& norm) { return norm.groups == 0; }

/// A 1×1 convolution, stride 1, of concat(x, x2). Another convolution adds its result to its own.
/// It never multiplies in e4m3: rounding its input costs more than its few products save.
struct Conv2dShortcut {
  Tensor x;   // [N, Ho, Wo, C]: height and width of the other convolution's output
  Tensor x2;  // optional [N, Ho, Wo, C2]
  const PackedConv2d* weight = nullptr;  // [Cout, 1, 1, C + C2]; its bias is part of the other's
};

/// What is done to the input `x` of a convolution or a linear layer before the product. A backend
/// fuses what is supported and faster; it runs the rest as separate ops (decompose.h), with the
/// same bits. But a norm before a layer in e4m3 may be rounded to e4m3 alone, and not to the
/// activation dtype first; which of the two depends on the layer. Only convolutions have `x2` and
/// `upsample2x`.
struct Prologue {
  Tensor x2;                // optional [N, H, W, C2]: the input is concat(x, x2) along channels
  Norm norm;                // optional, of concat(x, x2)
  Tensor normed;            // with a norm: [.., C + C2] for its result; undefined afterwards
  Tensor rounded;           // for weights with rounded_bytes, unless x IsRounded(): U8
                            // [.., rounded_bytes] for the input in e4m3; undefined afterwards
  bool upsample2x = false;  // nearest-neighbour doubling then, as packed; the kernel is 3 × 3, the
                            // stride 1 and the padding 1 on all sides
};

/// What is done to the result of the product with weight and bias:
///   out = act((product + add + residual or shortcut) · scale), or its gate.
/// Fused like a Prologue. Only convolutions have `add` and `shortcut`. Only linears have a gate,
/// without anything else.
struct Epilogue {
  Tensor add;       // optional [N, Cout], rows may be a Columns() view: added to every pixel
  Tensor residual;  // optional, shape of out
  Conv2dShortcut shortcut;  // optional, in place of a residual; `out` must not overlap its inputs
  float scale = 1.0f;
  Activation activation = Activation::kNone;
  /// Optional, with weights that were packed for it: GEGLU (arXiv 2002.05202). [.., 2·C] for values
  /// and gates; its contents are undefined afterwards. out [.., C] is value · gelu(gate), both
  /// rounded to the activation dtype first.
  Tensor ungated;
  E4m3Reader reader;  // optional, of a gate's `out`; `rounded` may be in the memory of `ungated`
  /// Optional: the norm applied by every reader of `out`. The backend may apply it to `out` and set
  /// `applied`. Otherwise the Prologues of the readers apply it.
  Norm* norm = nullptr;
};

struct Conv2dArgs {
  Tensor x;                              // [N, H, W, C]; activation dtype, or IsRounded()
  const PackedConv2d* weight = nullptr;  // [Cout, k, k, C + C2] and optional bias
  int stride = 1;
  int pad_top = 0, pad_left = 0, pad_bottom = 0, pad_right = 0;
  Prologue prologue;
  Epilogue epilogue;
  Tensor out;  // [N, Ho, Wo, Cout]; activation dtype, or F32
};

struct LinearArgs {
  Tensor x;  // [M, K], or any rank: rows of K; activation dtype or F32; or IsRounded()
  const PackedLinear* weight = nullptr;  // [Nout, K] and optional bias
  Prologue prologue;
  Epilogue epilogue;
  Tensor out;  // rows of Nout; activation dtype or F32
};

struct GroupNormArgs {
  Tensor x;   // [N, H, W, C] or [N, tokens, C]
  Tensor x2;  // optional [N, H, W, C2]: normalises concat(x, x2)
  Norm norm;
  Tensor out;  // [.., C + C2]; must not overlap x, x2
};

struct LayerNormArgs {
  Tensor x;            // [.., C]
  Tensor gamma, beta;  // F32 [C]
  float eps = 1e-5f;
  Tensor out;  // [.., C]; may be x
};

struct AttentionArgs {
  Tensor q;     // [N, tokens, heads·dim], may be a Columns() view
  Tensor k, v;  // [S, key tokens, heads·dim], likewise; S is N unless there is a key_set
  /// Optional I32 [N]: row n attends to set key_set[n], in [0, S), of keys and values.
  Tensor key_set;
  /// Optional I32 [S]: the number of keys in each set, at least 1. Rows of k and v after them have
  /// no effect. With key_set or key_counts, a backend may read k, key_set and key_counts while the
  /// ops before still run: between an op that writes one of them and this one there must be a
  /// convolution or another attention.
  Tensor key_counts;
  bool causal = false;  // query i attends to keys 0 to i
  int heads = 1;
  float scale = 1.0f;  // softmax(q kᵀ · scale) v
  Tensor out;          // [N, tokens, heads·dim]
  E4m3Reader reader;   // optional, of `out`
};

struct GaussianArgs {
  Tensor moments;  // F32 [.., 2·C]: means, then logarithms of variances, clamped to [−30, 20]
  Tensor noise;    // optional F32 [.., C], standard normal; undefined: zeros
  Tensor scale, shift;  // F32 [C]
  Tensor out;           // F32 [.., C]: (mean + noise · √variance) · scale + shift
};

struct TimestepEmbeddingArgs {
  Tensor t;  // F32 [N]
  bool flip_sin_to_cos = true;
  double freq_shift = 0;
  double scale = 1;
  double max_period = 10000;
  Tensor out;  // [N, dim]; cos before sin when flipped; zero-padded when dim is odd
};

struct FourierEmbeddingArgs {
  Tensor t;         // F32 [N]
  Tensor weight;    // F32 [dim / 2]
  bool log = true;  // embed ln t
  bool flip_sin_to_cos = false;
  Tensor out;  // [N, dim]: sin, cos of 2π·weight·t
};

struct EmbeddingArgs {
  Tensor table;  // activation dtype or F32 [entries, dim]
  Tensor index;  // I32 [N], each in [0, entries); or F32, rounded to the nearest entry
  Tensor out;    // [N, dim]
};

class NetworkOps {
 public:
  virtual ~NetworkOps() = default;

  virtual DType activation_dtype() const = 0;
  /// The lowest precision to which layers outside e4m3 round their operands.
  virtual DType product_dtype() const { return activation_dtype(); }
  /// Whether layers may have an E4m3Layer::input_scale.
  virtual bool MultipliesE4m3() const { return false; }

  // Weights: host tensors as in the file, of any float dtype. Several linears become one with their
  // outputs side by side (fused QKV); either all have a bias or none has.
  /// `upsample2x` must be that of every Prologue. `gated`: one weight of values, then gates.
  virtual absl::StatusOr<std::unique_ptr<PackedConv2d>> PackConv2d(const Tensor& weight_oihw,
                                                                   const Tensor& bias,
                                                                   bool upsample2x,
                                                                   const E4m3Layer& e4m3 = {}) = 0;
  virtual absl::StatusOr<std::unique_ptr<PackedLinear>> PackLinear(
      const std::vector<Tensor>& weights_oi, const std::vector<Tensor>& biases,
      const E4m3Layer& e4m3 = {}, bool gated = false) = 0;
  /// A parameter of any other kind, on the device in fp32.
  virtual absl::StatusOr<Tensor> PackVector(const Tensor& values) = 0;

  // Ops.
  /// `to` has as many elements of the same dtype; it may be a Columns() view as wide as `from`.
  virtual void Copy(const Tensor& from, const Tensor& to) = 0;
  virtual void Conv2d(const Conv2dArgs& args) = 0;
  virtual void Linear(const LinearArgs& args) = 0;
  /// out = value · gelu(gate), from the result of a Linear() whose weights are packed for a gate.
  virtual void Gate(const Tensor& values_and_gates, const Tensor& out) = 0;
  virtual void GroupNorm(const GroupNormArgs& args) = 0;
  virtual void LayerNorm(const LayerNormArgs& args) = 0;
  virtual void Attention(const AttentionArgs& args) = 0;
  /// out[p] = the row of `codebook` F32 [K, C] that is closest to x[p], the first of equals. x is
  /// F32 [.., C], out [.., C]. Distances are sums of squared differences in F32.
  virtual void NearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out) = 0;
  virtual void Gaussian(const GaussianArgs& args) = 0;
  virtual void TimestepEmbedding(const TimestepEmbeddingArgs& args) = 0;
  virtual void FourierEmbedding(const FourierEmbeddingArgs& args) = 0;
  virtual void Embedding(const EmbeddingArgs& args) = 0;
  virtual void Resample2x(Resample kind, const Tensor& x, const Tensor& out) = 0;
  /// out = act(a·scale + b + shift); b may be undefined; a and b may differ in dtype from out.
  virtual void Add(const Tensor& a, float scale, const Tensor& b, float shift,
                   Activation activation, const Tensor& out) = 0;
  /// out[n] = x[n] / divisor[n]; divisor F32 [N].
  virtual void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) = 0;
};

}  // namespace denoised
