// SPDX-License-Identifier: Apache-2.0
#include "engine/nn/resnet.h"

namespace denoised::nn {
absl::StatusOr<ResnetBlock> ResnetBlock::Load(Backend& backend, const Weights& weights,
                                              const ResnetOptions& options,
                                              TimeProjections& projections) {
  ResnetBlock block;
  block.options_ = options;
  DENOISED_ASSIGN_OR_RETURN(
      block.time_column_,
      projections.Add(weights / "time_emb_proj", options.time_channels,
                      options.scale_shift ? 2 * options.out_channels : options.out_channels));
  DENOISED_RETURN_IF_ERROR(block.LoadLayers(backend, weights));
  return block;
}

absl::StatusOr<ResnetBlock> ResnetBlock::Load(Backend& backend, const Weights& weights,
                                              const ResnetOptions& options) {
  DENOISED_CHECK(options.time_channels == 0 && !options.scale_shift);
  ResnetBlock block;
  block.options_ = options;
  DENOISED_RETURN_IF_ERROR(block.LoadLayers(backend, weights));
  return block;
}

absl::Status ResnetBlock::LoadLayers(Backend& backend, const Weights& weights) {
  const int in = options_.in_channels, out = options_.out_channels;
  DENOISED_ASSIGN_OR_RETURN(
      norm1_, GroupNorm::Load(backend, weights / "norm1", in, options_.groups, options_.eps));
  DENOISED_ASSIGN_OR_RETURN(
      conv1_, Conv2d::Load(backend, weights / "conv1", in, out, 3,
                           options_.resample == ResnetOptions::Resample::kUp && !options_.fir,
                           Products::kOfModel));
  DENOISED_ASSIGN_OR_RETURN(
      norm2_,
      GroupNorm::Load(backend, weights / "norm2", out,
                      options_.groups_out ? options_.groups_out : options_.groups, options_.eps));
  if (!options_.has_shortcut()) {
    DENOISED_ASSIGN_OR_RETURN(conv2_, Conv2d::Load(backend, weights / "conv2", out, out, 3,
                                                   /*upsample2x=*/false, Products::kOfModel));
  } else {
    DENOISED_ASSIGN_OR_RETURN(conv2_, Conv2d::LoadWithShortcut(backend, weights / "conv2", out, out,
                                                               3, weights / "conv_shortcut", in));
  }
  return absl::OkStatus();
}

Tensor ResnetBlock::operator()(Context& context, const Tensor& x, const Tensor& skip,
                               const Tensor& time) const {
  const bool has_shortcut = options_.has_shortcut();
  DENOISED_CHECK(!skip || has_shortcut);
  const bool up = options_.resample == ResnetOptions::Resample::kUp;
  const bool down = options_.resample == ResnetOptions::Resample::kDown;
  DENOISED_CHECK(time.defined() == (options_.time_channels > 0));
  Tensor time_columns;
  if (time)
    time_columns =
        time.Columns(time_column_, options_.out_channels * (options_.scale_shift ? 2 : 1));
  const Tensor none;

  Tensor input = x;
  const GroupNormArgs first{.x = x, .x2 = skip, .activation = options_.activation};
  // The second norm is fused into the first convolution where that is supported and faster.
  const auto conv1_of = [&](const Tensor& normalised) {
    Conv2dArgs conv{.x = normalised, .add = options_.scale_shift ? none : time_columns};
    conv = conv1_.Complete(context, std::move(conv));
    if (options_.scale_shift || options_.activation != Activation::kSilu) return conv;
    conv.output_norm = norm2_.OfOutput();
    if (!context.backend.MakesOutputNorm(conv)) conv.output_norm = {};
    return conv;
  };
  Conv2dArgs conv1;
  if (down || (up && options_.fir)) {
    const Resample kind = !options_.fir ? Resample::kAveragePoolDown
                          : up          ? Resample::kFirUp
                                        : Resample::kFirDown;
    input = Resampled(context, kind, input);
    conv1 = conv1_of(Resampled(context, kind, norm1_(context, first)));
    context.backend.Conv2d(conv1);
  } else {
    if (up) input = Resampled(context, Resample::kNearestUp, input);
    const GroupNormArgs norm1 = norm1_.Complete(context, first);
    conv1 = conv1_of(norm1.out);
    context.backend.NormConv2d(norm1, conv1);
  }
  conv1.x = none;  // frees its memory
  Conv2dArgs conv2{.scale = static_cast<float>(1.0 / options_.output_scale_factor)};
  if (has_shortcut) {
    conv2.shortcut = {.x = input, .x2 = skip};
  } else {
    conv2.residual = input;
  }
  if (conv1.output_norm.gamma) {
    conv2.x = conv1.out;
    return conv2_(context, conv2);
  }
  return conv2_(context,
                norm2_.Complete(context, {.x = conv1.out,
                                          .scale_shift = options_.scale_shift ? time_columns : none,
                                          .activation = options_.activation}),
                conv2);
}

}  // namespace denoised::nn
