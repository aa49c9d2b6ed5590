// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <spng.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "command/codec.h"
#include "command/codec_files.h"

namespace denoised::command {
namespace {

using Context = std::unique_ptr<spng_ctx, void (*)(spng_ctx*)>;

Context NewContext(int flags) { return {spng_ctx_new(flags), spng_ctx_free}; }

absl::Status Damaged(int error) {
  return absl::DataLossError(fmt::format("the PNG is damaged: {}", spng_strerror(error)));
}

/// Writes the file into the context's own buffer. 0, or spng's error.
int Write(spng_ctx* context, const Pixels& image, const PngText& text) {
  spng_ihdr header{};
  header.width = static_cast<uint32_t>(image.width);
  header.height = static_cast<uint32_t>(image.height);
  header.bit_depth = 8;
  header.color_type = image.channels == 1 ? SPNG_COLOR_TYPE_GRAYSCALE : SPNG_COLOR_TYPE_TRUECOLOR;
  std::vector<spng_text> chunks(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const auto& [keyword, value] = text[i];
    if (keyword.size() >= sizeof(chunks[i].keyword)) return SPNG_ETEXT_KEYWORD;
    std::copy(keyword.begin(), keyword.end(), chunks[i].keyword);
    chunks[i].type = SPNG_TEXT;
    chunks[i].length = value.size();
    chunks[i].text = const_cast<char*>(value.data());
  }
  int error = spng_set_option(context, SPNG_ENCODE_TO_BUFFER, 1);
  if (error == 0) error = spng_set_ihdr(context, &header);
  if (error == 0 && !chunks.empty()) {
    error = spng_set_text(context, chunks.data(), static_cast<uint32_t>(chunks.size()));
  }
  if (error == 0) {
    error = spng_encode_image(context, image.data.data(), image.data.size(), SPNG_FMT_PNG,
                              SPNG_ENCODE_FINALIZE);
  }
  return error;
}

}  // namespace

absl::StatusOr<Pixels> DecodePng(const std::string& file) {
  const Context context = NewContext(0);
  if (context == nullptr) return absl::ResourceExhaustedError("no memory for a PNG decoder");
  spng_ihdr header{};
  int error = spng_set_png_buffer(context.get(), file.data(), file.size());
  if (error == 0) error = spng_get_ihdr(context.get(), &header);
  std::vector<uint8_t> rgba;
  size_t size = 0;
  if (error == 0) error = spng_decoded_image_size(context.get(), SPNG_FMT_RGBA8, &size);
  if (error == 0) {
    rgba.resize(size);
    error = spng_decode_image(context.get(), rgba.data(), size, SPNG_FMT_RGBA8, SPNG_DECODE_TRNS);
  }
  // To the end, or a checksum that is cut off would not be missed.
  if (error == 0) error = spng_decode_chunks(context.get());
  if (error != 0) return Damaged(error);

  const bool grey = header.color_type == SPNG_COLOR_TYPE_GRAYSCALE ||
                    header.color_type == SPNG_COLOR_TYPE_GRAYSCALE_ALPHA;
  Pixels pixels =
      Blank(static_cast<int>(header.width), static_cast<int>(header.height), grey ? 1 : 3);
  for (size_t i = 0; i < size / 4; ++i) {
    const int alpha = rgba[4 * i + 3];
    for (int c = 0; c < pixels.channels; ++c) {
      pixels.data[pixels.channels * i + c] =
          static_cast<uint8_t>((rgba[4 * i + c] * alpha + 127) / 255);
    }
  }
  return pixels;
}

absl::StatusOr<std::string> EncodePng(const Pixels& image, const PngText& text) {
  const Context context = NewContext(SPNG_CTX_ENCODER);
  if (context == nullptr) return absl::ResourceExhaustedError("no memory for a PNG encoder");
  int error = Write(context.get(), image, text);
  size_t size = 0;
  const std::unique_ptr<void, void (*)(void*)> data(
      error == 0 ? spng_get_png_buffer(context.get(), &size, &error) : nullptr, std::free);
  if (data == nullptr) {
    return absl::InternalError(fmt::format("no PNG could be made: {}", spng_strerror(error)));
  }
  return std::string(static_cast<const char*>(data.get()), size);
}

}  // namespace denoised::command
