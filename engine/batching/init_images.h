// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "engine/batching/codec_stage.h"
#include "engine/models/codec.h"

namespace denoised {

/// What the codec makes of init images, at one image size. Several are encoded side by side, and
/// the last few are kept: the images of one request share a picture, and an image that lost its
/// slot finds it again. Used by the thread that owns the device. Calls enqueue work and do not
/// wait.
class InitImages {
 public:
  static constexpr int kKept = 8;  // pictures

  struct Picture {
    uint64_t id = 0;                // equal ids: equal pixels and equal masks
    const float* pixels = nullptr;  // [H, W, C] in host memory
    const float* mask = nullptr;    // optional [H, W]: pixels where it is at least ½ become zero
    std::pair<uint64_t, bool> key() const { return {id, mask != nullptr}; }
  };

  /// `height` and `width` of the latents. `backend` must outlive it.
  InitImages(Backend& backend, std::shared_ptr<const Codec> codec, int height, int width);

  /// The stage that encodes, to give it memory and warm it up.
  CodecStage& stage() { return stage_; }
  /// Takes memory for the pictures that are kept, and adds its bytes.
  absl::Status Allocate(size_t* bytes);

  bool Keeps(const Picture& picture) const;
  /// Encodes the first of these pictures that are not kept, as many side by side as is fastest, and
  /// drops none of them: pass at most kKept different ones. Returns how many it encoded; 0: all are
  /// kept. `ran`: when it ran.
  absl::StatusOr<int> EncodeNext(std::span<const Picture> pictures, CapturedRun::Ran* ran);
  /// What the codec made of a picture that is kept: F32 [1, h, w, encoded_channels].
  Tensor Encoded(const Picture& picture) const;

 private:
  struct Entry {
    std::optional<std::pair<uint64_t, bool>> key;
    uint64_t used = 0;  // the call of EncodeNext() that had it last
  };
  const Entry* Find(const Picture& picture) const;
  void Upload(const Picture& picture, const Tensor& to) const;

  Backend& backend_;
  const std::shared_ptr<const Codec> codec_;
  const int height_, width_;
  CodecStage stage_;
  Tensor kept_;  // F32 [kKept, h, w, encoded_channels]
  std::array<Entry, kKept> entries_;
  uint64_t calls_ = 0;
};

}  // namespace denoised
