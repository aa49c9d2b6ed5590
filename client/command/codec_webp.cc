// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <webp/decode.h>
#include <webp/encode.h>
#include <webp/mux.h>

#include <memory>

#include "command/codec.h"
#include "command/codec_files.h"

namespace denoised::command {
namespace {

/// A frame as libwebp takes it, freed with this.
class Picture {
 public:
  explicit Picture(const Pixels& pixels) {
    valid_ = WebPPictureInit(&picture_) != 0;
    if (!valid_) return;
    picture_.width = pixels.width;
    picture_.height = pixels.height;
    picture_.use_argb = 1;
    const Pixels* rgb = &pixels;
    Pixels converted;
    if (pixels.channels == 1) {
      converted = Blank(pixels.width, pixels.height, 3);
      for (size_t i = 0; i < converted.data.size(); ++i) converted.data[i] = pixels.data[i / 3];
      rgb = &converted;
    }
    valid_ = WebPPictureImportRGB(&picture_, rgb->data.data(), 3 * rgb->width) != 0;
  }
  ~Picture() { WebPPictureFree(&picture_); }
  Picture(const Picture&) = delete;
  Picture& operator=(const Picture&) = delete;

  WebPPicture* get() { return valid_ ? &picture_ : nullptr; }

 private:
  WebPPicture picture_ = {};
  bool valid_ = false;
};

}  // namespace

absl::StatusOr<Pixels> DecodeWebp(const std::string& file) {
  int width = 0, height = 0;
  const std::unique_ptr<uint8_t, decltype(&WebPFree)> rgb(
      WebPDecodeRGB(reinterpret_cast<const uint8_t*>(file.data()), file.size(), &width, &height),
      WebPFree);
  if (rgb == nullptr) return absl::DataLossError("the WebP is damaged");
  Pixels pixels = Blank(width, height, 3);
  pixels.data.assign(rgb.get(), rgb.get() + pixels.data.size());
  return pixels;
}

absl::StatusOr<std::string> EncodeAnimation(const std::vector<Pixels>& frames, int frame_ms,
                                            int last_frame_ms) {
  const auto failed = [](const char* reason) {
    return absl::InternalError(fmt::format("no animation could be made: {}", reason));
  };
  WebPAnimEncoderOptions options;
  WebPConfig config;
  if (!WebPAnimEncoderOptionsInit(&options) || !WebPConfigInit(&config)) {
    return failed("libwebp is of another version than its headers");
  }
  config.lossless = 1;
  config.quality = 50;  // effort, when lossless
  const std::unique_ptr<WebPAnimEncoder, decltype(&WebPAnimEncoderDelete)> encoder(
      WebPAnimEncoderNew(frames.front().width, frames.front().height, &options),
      WebPAnimEncoderDelete);
  if (encoder == nullptr) return failed("the frames are too large");
  int time_ms = 0;
  for (size_t i = 0; i < frames.size(); ++i) {
    Picture picture(frames[i]);
    if (picture.get() == nullptr) return failed("out of memory");
    if (!WebPAnimEncoderAdd(encoder.get(), picture.get(), time_ms, &config)) {
      return failed(WebPAnimEncoderGetError(encoder.get()));
    }
    time_ms += i + 1 < frames.size() ? frame_ms : last_frame_ms;
  }
  WebPData data;
  WebPDataInit(&data);
  if (!WebPAnimEncoderAdd(encoder.get(), nullptr, time_ms, nullptr) ||
      !WebPAnimEncoderAssemble(encoder.get(), &data)) {
    return failed(WebPAnimEncoderGetError(encoder.get()));
  }
  std::string file(reinterpret_cast<const char*>(data.bytes), data.size);
  WebPDataClear(&data);
  return file;
}

}  // namespace denoised::command
