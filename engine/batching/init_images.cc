// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/init_images.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace denoised {

InitImages::InitImages(Backend& backend, std::shared_ptr<const Codec> codec, int height, int width)
    : backend_(backend),
      codec_(std::move(codec)),
      height_(height),
      width_(width),
      stage_(backend,
             [codec = codec_.get()](nn::Context& context, const Tensor& pixels) {
               return codec->Encode(context, pixels);
             },
             {int64_t{height} * codec_->traits().factor, int64_t{width} * codec_->traits().factor,
              codec_->traits().image_channels}) {}

absl::Status InitImages::Allocate(size_t* bytes) {
  DENOISED_ASSIGN_OR_RETURN(
      kept_, backend_.Allocate({kKept, height_, width_, codec_->traits().encoded_channels},
                               DType::kF32, "encoded init images"));
  *bytes += kept_.bytes();
  return absl::OkStatus();
}

const InitImages::Entry* InitImages::Find(const Picture& picture) const {
  for (const Entry& entry : entries_)
    if (entry.key == picture.key()) return &entry;
  return nullptr;
}

bool InitImages::Keeps(const Picture& picture) const { return Find(picture) != nullptr; }

Tensor InitImages::Encoded(const Picture& picture) const {
  const Entry* const found = Find(picture);
  DENOISED_CHECK(found != nullptr, "init image {} is not encoded", picture.id);
  return kept_.Slice(found - entries_.data(), 1);
}

absl::StatusOr<int> InitImages::EncodeNext(std::span<const Picture> pictures,
                                           CapturedRun::Ran* ran) {
  ++calls_;
  std::vector<const Picture*> missing;
  for (const Picture& picture : pictures) {
    const auto is_it = [&](const auto& other) { return other.key == picture.key(); };
    const auto entry = std::find_if(entries_.begin(), entries_.end(), is_it);
    if (entry != entries_.end()) {
      entry->used = calls_;
    } else if (std::none_of(missing.begin(), missing.end(),
                            [&](auto* other) { return other->key() == picture.key(); })) {
      missing.push_back(&picture);
    }
  }
  if (missing.empty()) return 0;
  const int count = stage_.NextRuns(static_cast<int>(missing.size()), INFINITY).front();
  DENOISED_ASSIGN_OR_RETURN(const Tensor pixels, stage_.Input(count));
  for (int i = 0; i < count; ++i) Upload(*missing[i], pixels.Slice(i, 1));
  DENOISED_ASSIGN_OR_RETURN(*ran, stage_.Run(count));
  for (int i = 0; i < count; ++i) {
    const auto oldest =
        std::min_element(entries_.begin(), entries_.end(),
                         [](const Entry& a, const Entry& b) { return a.used < b.used; });
    DENOISED_CHECK(oldest->used < calls_, "{} pictures in one call", pictures.size());
    *oldest = {.key = missing[i]->key(), .used = calls_};
    backend_.Copy(stage_.output(count).Slice(i, 1), kept_.Slice(oldest - entries_.begin(), 1));
  }
  return count;
}

void InitImages::Upload(const Picture& picture, const Tensor& to) const {
  if (!picture.mask) return backend_.Upload(picture.pixels, to.bytes(), to);
  const Tensor pixels = Tensor::Host(to.shape(), DType::kF32);
  const int64_t channels = pixels.dim(-1);
  for (int64_t i = 0; i < pixels.elements(); ++i)
    pixels.as<float>()[i] = picture.mask[i / channels] < 0.5f ? picture.pixels[i] : 0.0f;
  backend_.Upload(pixels.data(), to.bytes(), to);
}

}  // namespace denoised
