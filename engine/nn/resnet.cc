// SPDX-License-Identifier: Apache-2.0
#include "engine/nn/resnet.h"

namespace denoised::nn {
absl::StatusOr<ResnetBlock> ResnetBlock::Load(NetworkOps& ops, const Weights& weights,
                                              const ResnetOptions& options,
                                              LinearColumns& time_projections) {
  ResnetBlock block;
  block.options_ = options;
  block.time_column_ =
      time_projections.Add(weights / "time_emb_proj", options.time_channels,
                           options.scale_shift ? 2 * options.out_channels : options.out_channels);
  DENOISED_RETURN_IF_ERROR(block.LoadLayers(ops, weights));
  return block;
}

absl::StatusOr<ResnetBlock> ResnetBlock::Load(NetworkOps& ops, const Weights& weights,
                                              const ResnetOptions& options) {
  DENOISED_CHECK(options.time_channels == 0 && !options.scale_shift);
  ResnetBlock block;
  block.options_ = options;
  DENOISED_RETURN_IF_ERROR(block.LoadLayers(ops, weights));
  return block;
}

absl::Status ResnetBlock::LoadLayers(NetworkOps& ops, const Weights& weights) {
  const int in = options_.in_channels, out = options_.out_channels;
  DENOISED_ASSIGN_OR_RETURN(
      norm1_, GroupNorm::Load(ops, weights / "norm1", in, options_.groups, options_.eps));
  DENOISED_ASSIGN_OR_RETURN(
      conv1_, Conv2d::Load(ops, weights / "conv1", in, out, 3,
                           options_.resample == Resample::kNearestUp, Products::kOfModel));
  DENOISED_ASSIGN_OR_RETURN(
      norm2_,
      GroupNorm::Load(ops, weights / "norm2", out,
                      options_.groups_out ? options_.groups_out : options_.groups, options_.eps));
  if (!options_.has_shortcut()) {
    DENOISED_ASSIGN_OR_RETURN(conv2_, Conv2d::Load(ops, weights / "conv2", out, out, 3,
                                                   /*upsample2x=*/false, Products::kOfModel));
  } else {
    DENOISED_ASSIGN_OR_RETURN(conv2_, Conv2d::LoadWithShortcut(ops, weights / "conv2", out, out, 3,
                                                               weights / "conv_shortcut", in));
  }
  return absl::OkStatus();
}

Tensor ResnetBlock::operator()(Context& context, const Tensor& x, const Tensor& skip,
                               const Tensor& time) const {
  const bool has_shortcut = options_.has_shortcut();
  DENOISED_CHECK(!skip || has_shortcut);
  DENOISED_CHECK(time.defined() == (options_.time_channels > 0));
  Tensor time_columns;
  if (time)
    time_columns =
        time.Columns(time_column_, options_.out_channels * (options_.scale_shift ? 2 : 1));
  Tensor input = x;
  if (options_.resample) input = Resampled(context, *options_.resample, x);
  Conv2dArgs first{.x = x};
  if (options_.resample && *options_.resample != Resample::kNearestUp) {
    first.x = Resampled(context, *options_.resample, norm1_(context, x, skip, options_.activation));
  } else {  // conv1 doubles
    first.prologue = {.x2 = skip, .norm = norm1_.Then(options_.activation)};
  }
  Norm norm2;
  if (options_.scale_shift) {
    norm2 = norm2_.Then(options_.activation, time_columns);
  } else {
    norm2 = norm2_.Then(options_.activation);
    first.epilogue.add = time_columns;
  }
  // A norm before a layer in e4m3 is rounded once. Whether this convolution could apply it, and
  // round it to bf16, depends on the batch.
  if (!conv2_.MultipliesE4m3()) first.epilogue.norm = &norm2;
  const Tensor hidden = conv1_(context, std::move(first));
  Conv2dArgs second{.x = hidden, .prologue = {.norm = norm2}};
  if (has_shortcut) {
    second.epilogue.shortcut = {.x = input, .x2 = skip};
  } else {
    second.epilogue.residual = input;
  }
  second.epilogue.scale = static_cast<float>(1.0 / options_.output_scale_factor);
  return conv2_(context, std::move(second));
}

}  // namespace denoised::nn
