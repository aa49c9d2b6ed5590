// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/weights.h"

#include <algorithm>

namespace denoised::cuda {

int64_t RoundUp(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

Tensor PackBias(const std::vector<Tensor>& biases) {
  int64_t outputs = 0;
  for (const Tensor& bias : biases) {
    if (bias) outputs += bias.dim(0);
  }
  if (outputs == 0) return Tensor();
  Tensor packed = Tensor::Host({outputs + kBiasPadding}, DType::kF32);
  std::fill_n(packed.as<float>(), packed.elements(), 0.0f);
  float* to = packed.as<float>();
  for (const Tensor& bias : biases) {
    const std::vector<float> values = bias.ToFloats();
    to = std::copy(values.begin(), values.end(), to);
  }
  return packed;
}

Tensor PackGatedBias(const Tensor& bias) {
  if (!bias) return Tensor();
  const Tensor packed = PackBias({bias});
  const std::vector<float> values = bias.ToFloats();
  const int features = static_cast<int>(values.size() / 2);
  for (size_t i = 0; i < values.size(); ++i)
    packed.as<float>()[GatedOutput(static_cast<int64_t>(i), features, GatedBlock(features))] =
        values[i];
  return packed;
}

}  // namespace denoised::cuda
