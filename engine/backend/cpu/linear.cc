#include <cstring>

#include "engine/backend/check.h"
#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/vector_ops.h"

namespace denoised::cpu {

CpuLinear::CpuLinear(OneDnn* onednn, std::vector<float> weight_oi, std::vector<float> bias, int out,
                     int in)
    : onednn_(onednn), bias_(std::move(bias)), plain_weight_(std::move(weight_oi)) {
  out_features = out;
  in_features = in;
}

const float* CpuLinear::PlainWeight() const {
  if (!plain_in_use_ && over_tokens_) plain_weight_ = over_tokens_->PlainWeight();
  plain_in_use_ = true;
  return plain_weight_.data();
}

Convolution& CpuLinear::OverTokens() const {
  if (!over_tokens_) {
    over_tokens_.emplace(onednn_, plain_in_use_ ? plain_weight_ : std::move(plain_weight_),
                         out_features, in_features, 1);
  }
  return *over_tokens_;
}

void Linear(const LinearArgs& args, Workspace& workspace) {
  const auto& weight = static_cast<const CpuLinear&>(*args.weight);
  // No structured binding: clang does not capture those into OpenMP regions.
  const RowShape shape = RowsOf(args.x.shape());
  const int64_t rows = shape.rows, tokens = shape.tokens, in = shape.features;
  const int64_t out = weight.out_features;
  if (args.out.elements() == 0) return;
  const float* x = args.x.as<float>();
  if (args.input_activation != Activation::kNone) {
    float* activated = workspace.scratch.Take<float>(args.x.elements());
    std::memcpy(activated, x, args.x.bytes());
    Finish(activated, nullptr, 1.0f, args.input_activation, args.x.elements());
    x = activated;
  }
  float* y = args.out.as<float>();
  const float* bias = weight.bias().data();
  if (args.x.shape().rank() == 2) {
    // Few rows against a large matrix: each of its rows is read once and used for all.
    const float* w = weight.PlainWeight();
#pragma omp parallel for schedule(static)
    for (int64_t o = 0; o < out; ++o) {
      for (int64_t n = 0; n < rows; ++n) y[n * out + o] = Dot(x + n * in, w + o * in, in) + bias[o];
    }
  } else {
    Convolution& convolution = weight.OverTokens();
    for (int64_t n = 0; n < rows; ++n) {
      convolution.Run({.height = 1, .width = tokens}, x + n * tokens * in, bias,
                      y + n * tokens * out);
    }
  }
  Finish(y, args.residual ? args.residual.as<float>() : nullptr, args.scale, args.activation,
         args.out.elements());
}

}  // namespace denoised::cpu
