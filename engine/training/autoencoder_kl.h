// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/models/autoencoder_kl.h"
#include "engine/training/layers.h"

namespace denoised::training {

/// diffusers' Encoder or Decoder (models/autoencoders/vae.py): a convolution, levels, a middle
/// block (in a decoder before the levels), norm and convolution.
class VaeHalf {
 public:
  struct Kept;
  struct KeptDeleter {
    void operator()(Kept* kept) const;
  };
  using KeptPointer = std::unique_ptr<Kept, KeptDeleter>;

  VaeHalf() = default;
  VaeHalf(const Declare& declare, const VaeConfig& config, bool encoder, int in_channels,
          int out_channels);
  void Pack(const Masters& masters) const;
  /// F32.
  Tensor Forward(Pass& pass, const Tensor& x, KeptPointer* kept) const;
  /// Returns dx; undefined if not `wants_dx`.
  Tensor Backward(Pass& pass, KeptPointer kept, const Tensor& doutput, bool wants_dx) const;

 private:
  struct Level {
    std::vector<ResnetBlock> resnets;
    std::vector<SelfAttention> attentions;
    std::optional<Conv2d> resample;
  };
  struct KeptLevel;
  Conv2dGeometry Geometry(const Conv2d& resample) const;
  Tensor Middle(Pass& pass, Tensor x, Kept* kept) const;
  Tensor MiddleBackward(Pass& pass, Kept* kept, Tensor d) const;

  bool encoder_ = true;
  Conv2d conv_in_;
  std::vector<Level> levels_;
  std::vector<ResnetBlock> mid_resnets_;
  std::optional<SelfAttention> mid_attention_;
  OutputLayers output_;
};

/// diffusers' AutoencoderKL with its backward pass. Declares its parameters by their checkpoint
/// names. Immutable during passes.
class AutoencoderKL {
 public:
  /// InvalidArgument if norm_num_groups does not divide the channels of a block.
  static absl::StatusOr<std::unique_ptr<AutoencoderKL>> Make(const Declare& declare,
                                                             const AutoencoderKLConfig& config);
  void Pack(const Masters& masters) const;

  struct Kept {
    VaeHalf::KeptPointer half;
    Tensor projected;  // the input of the 1×1 convolution
  };
  /// x [N, H, W, C] in [−1, 1] → F32 moments [N, H / factor, W / factor, 2 · latent_channels]:
  /// mean, then the logarithm of the variance, not clamped.
  Tensor Encode(Pass& pass, const Tensor& x, Kept* kept) const;
  void EncodeBackward(Pass& pass, Kept kept, const Tensor& dmoments) const;
  /// z [N, h, w, latent_channels], not scaled → F32 [N, h · factor, w · factor, C].
  Tensor Decode(Pass& pass, const Tensor& z, Kept* kept) const;
  /// Returns dz.
  Tensor DecodeBackward(Pass& pass, Kept kept, const Tensor& doutput) const;

 private:
  AutoencoderKL() = default;
  VaeHalf encoder_, decoder_;
  std::optional<Linear> quant_conv_, post_quant_conv_;
};

}  // namespace denoised::training
