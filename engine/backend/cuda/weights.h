#pragma once

#include <vector>

#include "engine/backend/backend.h"
#include "engine/backend/cuda/launch.h"

/// Weights as the kernels read them: [outputs, k] with k in the order (kh, kw, channel), rows
/// padded with zeros to kDepthPadding, in the dtype of the arithmetic; biases fp32. A 3×3 weight
/// after nearest-neighbour doubling may come in four phases (conv2d_sm90.cu).

namespace denoised::cuda {

struct CudaConv2d final : PackedConv2d {
  Tensor weight;  // device [phases · outputs, padded k]
  bool in_phases = false;
  Tensor bias;  // device F32, padded to kBiasPadding; or undefined
};

struct CudaLinear final : PackedLinear {
  Tensor weight, bias;  // as above
};

/// The packed forms in host memory, to be uploaded as they are. Arguments were checked.
Tensor PackConv2dWeight(const Tensor& weight_oihw, DType dtype);
/// Four 2×2 weights, for outputs at (even, even), (even, odd), (odd, even) and (odd, odd) places.
Tensor PackConv2dPhases(const Tensor& weight_oihw, DType dtype);
Tensor PackLinearWeight(const std::vector<Tensor>& weights_oi, DType dtype);
/// Undefined when the biases are none.
Tensor PackBias(const std::vector<Tensor>& biases);

}  // namespace denoised::cuda
