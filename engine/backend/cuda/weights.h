// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "engine/backend/cuda/launch.h"
#include "engine/backend/network_ops.h"

/// Weights in the layout of the kernels: [outputs, k] with k in the order (kh, kw, channel), rows
/// padded with zeros to kDepthPadding, in the dtype of the arithmetic; biases fp32. A 3×3 weight
/// after nearest-neighbour doubling is in four phases (implicit_gemm.cuh). A weight in e4m3 is U8,
/// and each of its taps is padded to RoundedBytes().

namespace denoised::cuda {

struct CudaConv2d final : PackedConv2d {
  Tensor weight;           // device [phases · outputs, padded k]
  Tensor bias;             // device F32, [outputs + kBiasPadding]; or undefined
  Tensor scales;           // in e4m3: device F32, ConvLayer::scales
  uint16_t zero_taps = 0;  // ConvLayer::zero_taps
};

struct CudaLinear final : PackedLinear {
  Tensor weight, bias, scales;  // as above
};

/// `count` up to a multiple of `multiple`.
int64_t RoundUp(int64_t count, int64_t multiple);

/// In host memory; undefined if there are no biases. The arguments are already checked.
Tensor PackBias(const std::vector<Tensor>& biases);
/// The same of a gated linear layer, as GatedOutput() has its outputs.
Tensor PackGatedBias(const Tensor& bias);

}  // namespace denoised::cuda
