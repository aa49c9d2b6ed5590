// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/batching/codec_stage.h"
#include "engine/models/codec.h"

namespace denoised {

/// What the codec makes of init images, at one image size. Several are encoded side by side, and
/// the last few are kept: the images of one request share a picture, and an image that lost its
/// slot finds it again. Used by the thread that owns the device. Calls enqueue work and do not
/// wait.
class InitImages {
 public:
  /// Pictures that are kept, and the most in one call of Encode().
  static constexpr int kKept = 8;

  struct Picture {
    uint64_t id = 0;                // equal ids: equal pixels and equal masks
    const float* pixels = nullptr;  // [H, W, C] in host memory
    const float* mask = nullptr;    // optional [H, W]: pixels where it is at least ½ become zero
  };

  /// `height` and `width` of the latents. `backend` must outlive it.
  InitImages(Backend& backend, std::shared_ptr<const Codec> codec, int height, int width);

  /// The stage that encodes, to give it memory and warm it up.
  CodecStage& stage() { return stage_; }
  const CodecStage& stage() const { return stage_; }
  /// Takes memory for the pictures that are kept, and adds its bytes.
  absl::Status Allocate(size_t* bytes);

  bool Keeps(const Picture& picture) const;
  /// Encodes those pictures that are not kept. Returns how many.
  absl::StatusOr<int> Encode(std::span<const Picture> pictures);
  /// What the codec made of a picture that is kept: F32 [1, h, w, encoded_channels].
  Tensor Encoded(const Picture& picture) const;

 private:
  using Key = std::pair<uint64_t, bool>;  // id, masked
  struct Entry {
    std::optional<Key> key;
    uint64_t used = 0;  // the call of Encode() that had it last
  };
  static Key KeyOf(const Picture& picture) { return {picture.id, picture.mask != nullptr}; }
  std::vector<Entry>::const_iterator Find(const Picture& picture) const;
  void Upload(const Picture& picture, const Tensor& to) const;

  Backend& backend_;
  const std::shared_ptr<const Codec> codec_;
  const int height_, width_;
  CodecStage stage_;
  Tensor kept_;  // F32 [kKept, h, w, encoded_channels]
  std::vector<Entry> entries_{kKept};
  uint64_t calls_ = 0;
};

}  // namespace denoised
