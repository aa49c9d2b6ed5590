// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "engine/backend/backend.h"

/// The shapes, dtypes and devices that each op of backend.h accepts, checked in one place for every
/// backend. A violation is a bug of the caller: CHECK. Weights come from files, so errors in them
/// are a Status.

namespace denoised {

/// Activations must be on `device`, of dtype `activation`.
struct TensorRules {
  Device device;
  DType activation;
};

/// Rows, tokens and features of a linear's or a norm's operand: dimension 0, the product of those
/// between, and the last one.
struct RowShape {
  int64_t rows, tokens, features;
};
RowShape RowsOf(const Shape& shape);

/// Height or width of a convolution's output for an input (already doubled when upsampling).
int64_t ConvolutionExtent(int64_t input, int pad_before, int pad_after, int kernel, int stride);

void Check(const Conv2dArgs& args, const TensorRules& rules);
void Check(const LinearArgs& args, const TensorRules& rules);
void Check(const GroupNormArgs& args, const TensorRules& rules);
void Check(const LayerNormArgs& args, const TensorRules& rules);
void Check(const AttentionArgs& args, const TensorRules& rules);
void Check(const GaussianArgs& args, const TensorRules& rules);
void Check(const TimestepEmbeddingArgs& args, const TensorRules& rules);
void Check(const FourierEmbeddingArgs& args, const TensorRules& rules);
void Check(const EmbeddingArgs& args, const TensorRules& rules);
void Check(const BeginSlotArgs& args, const TensorRules& rules);
void Check(const GatherArgs& args, const TensorRules& rules);
void Check(const MeasureOutputsArgs& args, const TensorRules& rules);
void Check(const AdvanceArgs& args, const TensorRules& rules);
void CheckResample2x(Resample kind, const Tensor& x, const Tensor& out, const TensorRules& rules);
void CheckAdd(const Tensor& a, const Tensor& b, const Tensor& out, const TensorRules& rules);
void CheckDivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out,
                     const TensorRules& rules);
void CheckGate(const Tensor& values_and_gates, const Tensor& out, const TensorRules& rules);
void CheckNearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out,
                      const TensorRules& rules);
void CheckCopy(const Tensor& from, const Tensor& to, const TensorRules& rules);
void CheckUpload(size_t bytes, const Tensor& to, const TensorRules& rules);
void CheckDownload(const Tensor& from, const TensorRules& rules);

/// InvalidArgument unless the weight is [out, in, k, k] and the bias absent or [out], both float.
absl::Status CheckConv2dWeight(const Tensor& weight_oihw, const Tensor& bias);
/// InvalidArgument unless all weights are [out_i, in] with the same `in`, and the biases are none
/// or one [out_i] for each; an undefined bias counts as none. A gated layer has one weight.
absl::Status CheckLinearWeights(const std::vector<Tensor>& weights_oi,
                                const std::vector<Tensor>& biases, bool gated);
/// InvalidArgument unless it is a host tensor of a float dtype.
absl::Status CheckFloats(const Tensor& values);

}  // namespace denoised
