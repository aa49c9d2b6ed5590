// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "engine/backend/cpu/convolution.h"
#include "engine/backend/cpu/scratch.h"
#include "engine/backend/network_ops.h"
#include "engine/backend/sampler_ops.h"
#include "engine/core/mutex.h"

/// The ops of networks and samplers on fp32 host memory. Arguments were checked. An op has run when
/// it returns, on all threads, or on the calling thread alone inside ComputeDevice::ForEachPart().
/// It divides its work into units by the shape of a row alone, and a unit is the same sequence of
/// operations on whichever thread: bits depend neither on the batch nor on the row's place in it.
/// Several threads may call the same op with the same weights, each with its own Scratch. May throw
/// dnnl::error and std::bad_alloc.

namespace denoised::cpu {

struct CpuConv2d final : PackedConv2d {
  mutable std::optional<Convolution> convolution;  // upsample2x in e4m3: of PhasesInE4m3()
  std::vector<float> bias;                         // zeros when the layer has none
};

/// Rows of tokens are computed as a 1×1 convolution over an image of tokens × 1; a single vector
/// per row as dot products with the plain weights. A layer is kept in the form that its first use
/// needs, rarely in both. Thread-safe.
class CpuLinear final : public PackedLinear {
 public:
  CpuLinear(dnnl::engine engine, std::vector<float> weight_oi, std::vector<float> bias, int out,
            int in, DType dtype, const E4m3Layer& layer);

  const std::vector<float>& bias() const { return bias_; }
  const float* PlainWeight() const;
  Convolution& OverTokens() const;

 private:
  dnnl::engine engine_;
  const DType dtype_;        // of products over tokens; vectors are multiplied in F32
  std::vector<float> bias_;  // zeros when the layer has none
  mutable Mutex mutex_;
  mutable std::vector<float> plain_weight_ ABSL_GUARDED_BY(mutex_);
  mutable bool plain_in_use_ ABSL_GUARDED_BY(mutex_) = false;
  mutable std::optional<Convolution> over_tokens_ ABSL_GUARDED_BY(mutex_);
};

/// The arguments that Conv2d and Linear over tokens share.
struct ConvolutionCall {
  ConvolutionGeometry geometry;
  int64_t rows = 0;
  const float* x = nullptr;   // rows of [H, W, c1], half as high and wide when upsampling
  const float* x2 = nullptr;  // optional, rows of [H, W, in − c1]
  int64_t c1 = 0;
  bool upsample2x = false;
  bool in_phases = false;  // the convolution is of PhasesInE4m3(), and `geometry` of x itself
  const float* bias = nullptr;
  const float* add = nullptr;  // optional, rows of [out]
  int64_t add_stride = 0;
  const float* residual = nullptr;  // optional, as out; may be `out`
  float scale = 1;
  Activation activation = Activation::kNone;
  float* out = nullptr;  // rows of [Ho, Wo, out]; in phases [2 · Ho, 2 · Wo, out / 4]
};

void RunConvolution(Convolution& convolution, const ConvolutionCall& call, Scratch& scratch);

/// Without norms, shortcuts and gates: decompose.h.
void Conv2d(const Conv2dArgs& args, Scratch& scratch);
void Linear(const LinearArgs& args, Scratch& scratch);
void GroupNorm(const GroupNormArgs& args, Scratch& scratch);
void LayerNorm(const LayerNormArgs& args);
void Attention(const AttentionArgs& args, Scratch& scratch);
/// out[.., c] = x[.., c] · gelu(x[.., C + c]); x has 2·C features.
void GegluGate(const Tensor& x, const Tensor& out, Scratch& scratch);
void NearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out);
void Gaussian(const GaussianArgs& args);
void Copy(const Tensor& from, const Tensor& to);
void TimestepEmbedding(const TimestepEmbeddingArgs& args);
void FourierEmbedding(const FourierEmbeddingArgs& args);
void Embedding(const EmbeddingArgs& args);
void Resample2x(Resample kind, const Tensor& x, const Tensor& out);
void Add(const Tensor& a, float scale, const Tensor& b, float shift, Activation activation,
         const Tensor& out);
void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out);
void BeginSlot(const BeginSlotArgs& args);
void Gather(const GatherArgs& args);
void MeasureOutputs(const MeasureOutputsArgs& args);
void Advance(const AdvanceArgs& args);

}  // namespace denoised::cpu
