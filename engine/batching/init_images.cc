// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/init_images.h"

#include <algorithm>

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

std::vector<InitImages::Entry>::const_iterator InitImages::Find(const Picture& picture) const {
  return std::find_if(entries_.begin(), entries_.end(),
                      [&](const Entry& entry) { return entry.key == KeyOf(picture); });
}

bool InitImages::Keeps(const Picture& picture) const { return Find(picture) != entries_.end(); }

Tensor InitImages::Encoded(const Picture& picture) const {
  const auto found = Find(picture);
  DENOISED_CHECK(found != entries_.end(), "init image {} is not encoded", picture.id);
  return kept_.Slice(found - entries_.begin(), 1);
}

absl::StatusOr<int> InitImages::Encode(std::span<const Picture> pictures) {
  ++calls_;
  for (Entry& entry : entries_)
    for (const Picture& picture : pictures)
      if (entry.key == KeyOf(picture)) entry.used = calls_;
  std::vector<std::pair<const Picture*, int64_t>> encoded;  // with their places
  for (const Picture& picture : pictures) {
    if (Keeps(picture)) continue;
    const auto oldest =
        std::min_element(entries_.begin(), entries_.end(),
                         [](const Entry& a, const Entry& b) { return a.used < b.used; });
    DENOISED_CHECK(oldest->used < calls_, "{} pictures in one call", pictures.size());
    *oldest = {.key = KeyOf(picture), .used = calls_};
    encoded.emplace_back(&picture, oldest - entries_.begin());
  }
  for (size_t begin = 0; begin < encoded.size();) {
    const auto left = static_cast<int>(encoded.size() - begin);
    const int count = stage_.Runs(left, INFINITY).front();
    DENOISED_ASSIGN_OR_RETURN(const Tensor pixels, stage_.Input(count));
    for (int i = 0; i < count; ++i) Upload(*encoded[begin + i].first, pixels.Slice(i, 1));
    DENOISED_ASSIGN_OR_RETURN(const Tensor out, stage_.Run(count));
    for (int i = 0; i < count; ++i)
      backend_.Copy(out.Slice(i, 1), kept_.Slice(encoded[begin + i].second, 1));
    begin += count;
  }
  return static_cast<int>(encoded.size());
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
