#include <algorithm>
#include <cstring>

#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/vector_ops.h"

namespace denoised::cpu {
namespace {

/// One row of the input as the convolution reads it: both sources side by side, doubled if asked
/// for.
void AssembleRow(const Conv2dArgs& args, int64_t row, float* assembled) {
  const int64_t height = args.x.dim(1), width = args.x.dim(2);
  const int64_t c1 = args.x.dim(3), c2 = args.x2 ? args.x2.dim(3) : 0;
  const int64_t up = args.upsample2x ? 2 : 1;
  const float* x = args.x.as<float>() + row * height * width * c1;
  const float* x2 = args.x2 ? args.x2.as<float>() + row * height * width * c2 : nullptr;
#pragma omp parallel for schedule(static)
  for (int64_t h = 0; h < height * up; ++h) {
    float* to = assembled + h * width * up * (c1 + c2);
    for (int64_t w = 0; w < width * up; ++w, to += c1 + c2) {
      const int64_t pixel = h / up * width + w / up;
      std::memcpy(to, x + pixel * c1, c1 * sizeof(float));
      if (x2 != nullptr) std::memcpy(to + c1, x2 + pixel * c2, c2 * sizeof(float));
    }
  }
}

}  // namespace

void Finish(float* y, const float* residual, float scale, Activation activation, int64_t count) {
  if (residual == nullptr && scale == 1.0f && activation == Activation::kNone) return;
  constexpr int64_t kChunk = 4096;  // 16 KB: stays in L1 between the two loops
#pragma omp parallel for schedule(static) if (count > 4 * kChunk)
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t length = std::min(kChunk, count - begin);
    AddScale(y + begin, residual != nullptr ? residual + begin : nullptr, scale, length);
    Activate(activation, y + begin, length);
  }
}

void Conv2d(const Conv2dArgs& args, Workspace& workspace) {
  const auto& weight = static_cast<const CpuConv2d&>(*args.weight);
  const int64_t up = args.upsample2x ? 2 : 1;
  const ConvolutionGeometry geometry = {args.x.dim(1) * up, args.x.dim(2) * up, args.stride,
                                        args.pad_top,       args.pad_left,      args.pad_bottom,
                                        args.pad_right};
  const int64_t rows = args.x.dim(0);
  if (args.out.elements() == 0) return;
  const int64_t in_row = geometry.height * geometry.width * weight.in_channels;
  const int64_t out_row = args.out.elements() / rows;
  const bool assemble = args.x2 || args.upsample2x;
  float* const row_bias = workspace.scratch.Take<float>(weight.out_channels + 64 + in_row);
  float* const assembled = row_bias + (weight.out_channels + 63) / 64 * 64;
  for (int64_t n = 0; n < rows; ++n) {
    const float* source = args.x.as<float>() + n * in_row;
    if (assemble) {
      AssembleRow(args, n, assembled);
      source = assembled;
    }
    const float* bias = weight.bias.data();
    if (args.add) {
      const float* add = args.add.as<float>() + n * args.add.row_stride();
      for (int c = 0; c < weight.out_channels; ++c) row_bias[c] = bias[c] + add[c];
      bias = row_bias;
    }
    float* out = args.out.as<float>() + n * out_row;
    weight.convolution->Run(geometry, source, bias, out);
    Finish(out, args.residual ? args.residual.as<float>() + n * out_row : nullptr, args.scale,
           args.activation, out_row);
  }
}

}  // namespace denoised::cpu
