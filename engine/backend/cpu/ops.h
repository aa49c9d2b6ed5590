#pragma once

#include <optional>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/backend/cpu/convolution.h"

/// The ops of backend.h on fp32 host memory, run at once with all cores. Arguments were checked.
/// Each divides its work by the shape of a row alone, and each element is computed by the same
/// sequence of operations whichever thread takes it: bits depend neither on the batch nor on which
/// row of it this is. May throw dnnl::error and std::bad_alloc.

namespace denoised::cpu {

/// Memory that ops share, one after the other.
struct Workspace {
  OneDnn onednn;
  Scratch scratch;
};

struct CpuConv2d final : PackedConv2d {
  mutable std::optional<Convolution> convolution;
  std::vector<float> bias;  // zeros when the layer has none
};

/// Rows of tokens are a 1×1 convolution over an image of 1 × tokens; a single vector per row is
/// read against the plain weights. A layer is kept in the form its first use asks for, rarely in
/// both.
class CpuLinear final : public PackedLinear {
 public:
  CpuLinear(OneDnn* onednn, std::vector<float> weight_oi, std::vector<float> bias, int out, int in);

  const std::vector<float>& bias() const { return bias_; }
  const float* PlainWeight() const;
  Convolution& OverTokens() const;

 private:
  OneDnn* onednn_;
  std::vector<float> bias_;  // zeros when the layer has none
  mutable std::vector<float> plain_weight_;
  mutable bool plain_in_use_ = false;
  mutable std::optional<Convolution> over_tokens_;
};

void Conv2d(const Conv2dArgs& args, Workspace& workspace);
void Linear(const LinearArgs& args, Workspace& workspace);
void GroupNorm(const GroupNormArgs& args, Workspace& workspace);
void Attention(const AttentionArgs& args, Workspace& workspace);
void TimestepEmbedding(const TimestepEmbeddingArgs& args);
void FourierEmbedding(const FourierEmbeddingArgs& args);
void Embedding(const EmbeddingArgs& args);
void Resample2x(Resample kind, const Tensor& x, const Tensor& out);
void Add(const Tensor& a, float scale, const Tensor& b, float shift, Activation activation,
         const Tensor& out);
void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out);
void BeginSlot(const BeginSlotArgs& args);
void Gather(const GatherArgs& args);
void Advance(const AdvanceArgs& args);

/// y = act((y + residual) · scale) over `count` elements with all cores; `residual` may be null.
void Finish(float* y, const float* residual, float scale, Activation activation, int64_t count);

}  // namespace denoised::cpu
