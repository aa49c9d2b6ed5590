#include "engine/backend/cuda/weights.h"

#include <algorithm>

namespace denoised::cuda {
namespace {

int64_t Padded(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

/// Zeros: memory that is all zero bits is 0.0 in every float dtype.
Tensor Zeros(const Shape& shape, DType dtype) {
  Tensor zeros = Tensor::Host(shape, dtype);
  std::fill_n(static_cast<std::byte*>(zeros.data()), zeros.bytes(), std::byte{0});
  return zeros;
}

void Put(const Tensor& to, int64_t index, float value) {
  if (to.dtype() == DType::kBF16) {
    to.as<uint16_t>()[index] = FloatToBFloat16(value);
  } else {
    to.as<float>()[index] = value;
  }
}

}  // namespace

Tensor PackConv2dWeight(const Tensor& weight_oihw, DType dtype) {
  const int64_t outputs = weight_oihw.dim(0), channels = weight_oihw.dim(1);
  const int64_t taps = weight_oihw.dim(2) * weight_oihw.dim(3);
  const std::vector<float> values = weight_oihw.ToFloats();
  const Tensor packed = Zeros({outputs, Padded(taps * channels, kDepthPadding)}, dtype);
  for (int64_t o = 0; o < outputs; ++o) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      for (int64_t c = 0; c < channels; ++c) {
        Put(packed, o * packed.dim(1) + tap * channels + c,
            values[(o * channels + c) * taps + tap]);
      }
    }
  }
  return packed;
}

Tensor PackConv2dPhases(const Tensor& weight_oihw, DType dtype) {
  const int64_t outputs = weight_oihw.dim(0), channels = weight_oihw.dim(1);
  const std::vector<float> values = weight_oihw.ToFloats();
  const Tensor packed = Zeros({4 * outputs, Padded(4 * channels, kDepthPadding)}, dtype);
  // Of the three rows under the window, an even output row sees the first in one input row and the
  // other two in the next; an odd one the first two and then the last. Columns likewise.
  constexpr int kTapUnder[2][3] = {{0, 1, 1}, {0, 0, 1}};
  std::vector<float> sums(4 * channels);
  for (int phase = 0; phase < 4; ++phase) {
    for (int64_t o = 0; o < outputs; ++o) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int kh = 0; kh < 3; ++kh) {
        for (int kw = 0; kw < 3; ++kw) {
          const int tap = kTapUnder[phase / 2][kh] * 2 + kTapUnder[phase % 2][kw];
          for (int64_t c = 0; c < channels; ++c) {
            sums[tap * channels + c] += values[((o * channels + c) * 3 + kh) * 3 + kw];
          }
        }
      }
      for (int64_t k = 0; k < 4 * channels; ++k) {
        Put(packed, (phase * outputs + o) * packed.dim(1) + k, sums[k]);
      }
    }
  }
  return packed;
}

Tensor PackLinearWeight(const std::vector<Tensor>& weights_oi, DType dtype) {
  int64_t outputs = 0;
  for (const Tensor& weight : weights_oi) outputs += weight.dim(0);
  const int64_t inputs = weights_oi.front().dim(1);
  const Tensor packed = Zeros({outputs, Padded(inputs, kDepthPadding)}, dtype);
  int64_t row = 0;
  for (const Tensor& weight : weights_oi) {
    const std::vector<float> values = weight.ToFloats();
    for (int64_t o = 0; o < weight.dim(0); ++o, ++row) {
      for (int64_t i = 0; i < inputs; ++i) {
        Put(packed, row * packed.dim(1) + i, values[o * inputs + i]);
      }
    }
  }
  return packed;
}

Tensor PackBias(const std::vector<Tensor>& biases) {
  int64_t outputs = 0;
  for (const Tensor& bias : biases) {
    if (bias) outputs += bias.dim(0);
  }
  if (outputs == 0) return Tensor();
  const Tensor packed = Zeros({Padded(outputs, kBiasPadding)}, DType::kF32);
  float* to = packed.as<float>();
  for (const Tensor& bias : biases) {
    const std::vector<float> values = bias.ToFloats();
    to = std::copy(values.begin(), values.end(), to);
  }
  return packed;
}

}  // namespace denoised::cuda
