// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/element.cuh"

namespace denoised::training::cuda {

/// act′(z) for the activations that training supports: any but kTanh.
__device__ inline float Derivative(Activation activation, float z) {
  using denoised::cuda::Sigmoid;
  switch (activation) {
    case Activation::kNone:
      return 1.0f;
    case Activation::kSilu: {
      const float s = Sigmoid(z);
      return s * (1.0f + z * (1.0f - s));
    }
    case Activation::kRelu:
      return z > 0.0f ? 1.0f : 0.0f;
    case Activation::kMish: {
      const float softplus = z > 20.0f ? z : log1pf(expf(z)), t = tanhf(softplus);
      return t + z * (1.0f - t * t) * Sigmoid(z);
    }
    case Activation::kGelu:
      return 0.5f * (1.0f + erff(z * 0.7071067811865476f)) +
             z * expf(-0.5f * z * z) * 0.3989422804014327f;
    case Activation::kQuickGelu: {
      const float s = Sigmoid(1.702f * z);
      return s * (1.0f + 1.702f * z * (1.0f - s));
    }
    case Activation::kTanh:
      break;
  }
  return 0.0f;
}

}  // namespace denoised::training::cuda
