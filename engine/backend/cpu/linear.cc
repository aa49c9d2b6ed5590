// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "engine/backend/check.h"
#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/backend/cpu/vector_ops.h"

namespace denoised::cpu {

CpuLinear::CpuLinear(dnnl::engine engine, std::vector<float> weight_oi, std::vector<float> bias,
                     int out, int in, DType dtype, const E4m3Layer& layer)
    : engine_(std::move(engine)),
      dtype_(dtype),
      bias_(std::move(bias)),
      plain_weight_(std::move(weight_oi)) {
  out_features = out;
  in_features = in;
  e4m3 = layer;
}

const float* CpuLinear::PlainWeight() const {
  MutexLock lock(&mutex_);
  if (!plain_in_use_ && over_tokens_) plain_weight_ = over_tokens_->PlainWeight();
  plain_in_use_ = true;
  return plain_weight_.data();
}

Convolution& CpuLinear::OverTokens() const {
  MutexLock lock(&mutex_);
  if (!over_tokens_) {
    plain_in_use_ |= dtype_ != DType::kF32;  // PlainWeight() must not return rounded ones
    std::vector<float> weight = plain_in_use_ ? plain_weight_ : std::move(plain_weight_);
    if (e4m3.input_scale != 0)
      weight = RoundedToE4m3(std::move(weight), out_features, e4m3.input_scale);
    over_tokens_.emplace(engine_, std::move(weight), out_features, in_features, 1, dtype_,
                         e4m3.input_scale);
  }
  return *over_tokens_;
}

namespace {

/// One vector per row. Each row of the matrix is read once for all vectors.
void OverVectors(const LinearArgs& args, const CpuLinear& weight) {
  constexpr int64_t kOutputs = 32;  // a unit; enough to outweigh handing it out
  const int64_t rows = args.x.dim(0), in = weight.in_features, out = weight.out_features;
  const float* x = args.x.as<float>();
  const float* w = weight.PlainWeight();
  const float* residual = args.epilogue.residual ? args.epilogue.residual.as<float>() : nullptr;
  float* y = args.out.as<float>();
  ParallelFor((out + kOutputs - 1) / kOutputs, [&](int64_t unit, int) {
    const int64_t begin = unit * kOutputs, end = std::min(out, begin + kOutputs);
    for (int64_t o = begin; o < end; ++o) {
      for (int64_t n = 0; n < rows; ++n) {
        y[n * out + o] = Dot(x + n * in, w + o * in, in) + weight.bias()[o];
      }
    }
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t at = n * out + begin;
      AddScale(y + at, residual != nullptr ? residual + at : nullptr, args.epilogue.scale,
               end - begin);
      Activate(args.epilogue.activation, y + at, end - begin);
    }
  });
}

}  // namespace

void Linear(const LinearArgs& args, Scratch& scratch) {
  const auto& weight = static_cast<const CpuLinear&>(*args.weight);
  if (args.out.elements() == 0) return;
  if (args.x.shape().rank() == 2) return OverVectors(args, weight);
  const RowShape shape = RowsOf(args.x.shape());
  ConvolutionCall call;
  call.geometry = {.height = shape.tokens, .width = 1};
  call.rows = shape.rows;
  call.x = args.x.as<float>();
  call.c1 = shape.features;
  call.bias = weight.bias().data();
  if (args.epilogue.residual) call.residual = args.epilogue.residual.as<float>();
  call.scale = args.epilogue.scale;
  call.activation = args.epilogue.activation;
  call.out = args.out.as<float>();
  RunConvolution(weight.OverTokens(), call, scratch);
}

}  // namespace denoised::cpu
