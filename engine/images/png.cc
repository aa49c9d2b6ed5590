// SPDX-License-Identifier: Apache-2.0
#include "engine/images/png.h"

#include <isa-l/igzip_lib.h>
#include <lodepng.h>
#include <spng.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>

// lodepng writes files, because it lets ISA-L compress; spng has zlib alone for that. spng reads
// files: it is strict about damage and bounds what texts and profiles unpack to.

namespace denoised {
namespace {

using Context = std::unique_ptr<spng_ctx, void (*)(spng_ctx*)>;

/// lodepng's hook: a zlib stream, by ISA-L. docs/benchmarks.md compares it with zlib and
/// libdeflate.
unsigned Compress(unsigned char** out, size_t* out_size, const unsigned char* in, size_t in_size,
                  const LodePNGCompressSettings*) {
  // Enough for blocks that are stored, which is what ISA-L does with what it cannot shrink.
  constexpr size_t kStoredBlock = 65535, kBlockHeader = 5, kZlibHeaderAndChecksum = 6;
  const size_t room =
      in_size + kBlockHeader * (in_size / kStoredBlock + 1) + kZlibHeaderAndChecksum;
  if (room > std::numeric_limits<uint32_t>::max()) return 1;
  *out = static_cast<unsigned char*>(std::malloc(room));
  if (*out == nullptr) return 1;
  isal_zstream stream{};  // isal_deflate_stateless_init() leaves hist_bits, the window, as it was
  isal_deflate_stateless_init(&stream);
  const auto buffer = std::make_unique_for_overwrite<uint8_t[]>(ISAL_DEF_LVL1_DEFAULT);
  stream.level = 1;
  stream.level_buf = buffer.get();
  stream.level_buf_size = ISAL_DEF_LVL1_DEFAULT;
  stream.gzip_flag = IGZIP_ZLIB;
  stream.end_of_stream = 1;
  stream.next_in = const_cast<uint8_t*>(in);
  stream.avail_in = static_cast<uint32_t>(in_size);
  stream.next_out = *out;
  stream.avail_out = static_cast<uint32_t>(room);
  if (isal_deflate_stateless(&stream) != COMP_OK) return 1;
  *out_size = stream.total_out;
  return 0;
}

/// Sub or Up for each row, whichever leaves the smaller differences. lodepng's own choice, among
/// all five filters, takes longer than the compression.
std::vector<uint8_t> ChooseFilters(const Pixels& pixels) {
  constexpr uint8_t kSub = 1, kUp = 2;
  const auto row = static_cast<size_t>(pixels.width) * pixels.channels;
  const auto sum = [row](const uint8_t* a, const uint8_t* b, size_t begin) {
    unsigned total = 0;
    for (size_t i = begin; i < row; ++i) {
      const auto difference = static_cast<int8_t>(a[i] - b[i]);  // modulo 256, as filters have it
      total += static_cast<unsigned>(difference < 0 ? -difference : difference);
    }
    return total;
  };
  std::vector<uint8_t> filters(pixels.height, kSub);
  for (int y = 1; y < pixels.height; ++y) {
    const uint8_t* const here = pixels.samples.data() + y * row;
    if (sum(here, here - row, 0) < sum(here, here - pixels.channels, pixels.channels)) {
      filters[y] = kUp;
    }
  }
  return filters;
}

/// Adds a chunk before the picture, where programs find it that read no further; lodepng would
/// write its texts behind the picture. 0, or lodepng's error.
unsigned AddText(LodePNGInfo& info, const std::string& keyword, const std::string& text) {
  constexpr unsigned kKeywordLength = 89;  // lodepng's number of this error
  if (keyword.empty() || keyword.size() > 79) return kKeywordLength;
  // A plain text chunk is Latin-1 without control characters; other texts are written as UTF-8.
  const bool plain = std::all_of(text.begin(), text.end(),
                                 [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); });
  std::string data = keyword + '\0';
  // Not compressed, no language, no translated keyword.
  if (!plain) data += std::string(4, '\0');
  data += text;
  return lodepng_chunk_create(&info.unknown_chunks_data[1], &info.unknown_chunks_size[1],
                              static_cast<unsigned>(data.size()), plain ? "tEXt" : "iTXt",
                              reinterpret_cast<const unsigned char*>(data.data()));
}

Context NewContext() { return {spng_ctx_new(0), spng_ctx_free}; }

absl::Status Damaged(int error) {
  return InvalidArgument("the PNG cannot be read: {}; send an intact file", spng_strerror(error));
}

/// A file whose header was read and whose size was checked. `file` must outlive it.
struct Opened {
  Context context{nullptr, spng_ctx_free};
  spng_ihdr header{};
  bool transparent = false;  // it has an alpha channel or a tRNS chunk
};

absl::StatusOr<Opened> Open(std::string_view file, int64_t max_pixels,
                            const ReserveMemory& reserve) {
  if (file.substr(0, 8) != "\x89PNG\r\n\x1a\n") {
    return InvalidArgument("the image is no PNG; send a PNG file");
  }
  Opened png;
  png.context = NewContext();
  spng_ctx* const context = png.context.get();
  if (context == nullptr) return ResourceExhausted("no memory for a PNG decoder");
  // Profiles and texts, which are not used, may unpack to this much.
  constexpr size_t kMaxChunk = 8 << 20, kMaxChunks = 16 << 20;
  spng_set_chunk_limits(context, kMaxChunk, kMaxChunks);
  int error = spng_set_png_buffer(context, file.data(), file.size());
  if (error == 0) error = spng_get_ihdr(context, &png.header);
  if (error != 0) return Damaged(error);
  DENOISED_RETURN_IF_ERROR(CheckSize("PNG", png.header.width, png.header.height, max_pixels,
                                     kPngDecodingBytesPerPixel, reserve));
  spng_trns transparency{};
  error = spng_get_trns(context, &transparency);
  if (error != 0 && error != SPNG_ECHUNKAVAIL) return Damaged(error);
  png.transparent = error == 0 || png.header.color_type == SPNG_COLOR_TYPE_GRAYSCALE_ALPHA ||
                    png.header.color_type == SPNG_COLOR_TYPE_TRUECOLOR_ALPHA;
  return png;
}

/// The samples in one of spng's formats.
absl::StatusOr<std::vector<uint8_t>> Unpack(spng_ctx* context, int format) {
  size_t size = 0;
  int error = spng_decoded_image_size(context, format, &size);
  if (error != 0) return Damaged(error);
  std::vector<uint8_t> samples(size);
  error = spng_decode_image(context, samples.data(), size, format, SPNG_DECODE_TRNS);
  // To the end, or a checksum that is cut off would not be missed.
  if (error == 0) error = spng_decode_chunks(context);
  if (error != 0) return Damaged(error);
  return samples;
}

}  // namespace

absl::StatusOr<std::string> EncodePng(const Pixels& pixels, const TextEntries& texts) {
  lodepng::State state;
  state.info_raw.bitdepth = state.info_png.color.bitdepth = 8;
  state.info_raw.colortype = state.info_png.color.colortype =
      pixels.channels == 1 ? LCT_GREY : LCT_RGB;
  const std::vector<uint8_t> filters = ChooseFilters(pixels);
  state.encoder.auto_convert = 0;  // never to a palette
  state.encoder.filter_strategy = LFS_PREDEFINED;
  state.encoder.predefined_filters = filters.data();
  state.encoder.zlibsettings.custom_zlib = Compress;
  unsigned error = 0;
  for (const auto& [keyword, text] : texts) {
    // An empty text says nothing.
    if (error == 0 && !text.empty()) error = AddText(state.info_png, keyword, text);
  }
  unsigned char* data = nullptr;
  size_t size = 0;
  if (error == 0) {
    error = lodepng_encode(&data, &size, pixels.samples.data(), static_cast<unsigned>(pixels.width),
                           static_cast<unsigned>(pixels.height), &state);
  }
  const std::unique_ptr<unsigned char, void (*)(void*)> owned(data, std::free);
  if (error != 0) {
    return Internal("cannot encode {}×{} pixels as PNG: {}", pixels.width, pixels.height,
                    lodepng_error_text(error));
  }
  return std::string(reinterpret_cast<const char*>(data), size);
}

absl::StatusOr<Pixels> DecodePng(std::string_view file, int64_t max_pixels,
                                 const ReserveMemory& reserve) {
  DENOISED_ASSIGN_OR_RETURN(const Opened png, Open(file, max_pixels, reserve));
  const bool grey = png.header.color_type == SPNG_COLOR_TYPE_GRAYSCALE ||
                    png.header.color_type == SPNG_COLOR_TYPE_GRAYSCALE_ALPHA;
  // spng unpacks 16 bits of grey to RGB alone.
  const bool one = grey && !png.transparent && png.header.bit_depth <= 8;
  const int format = png.transparent ? SPNG_FMT_RGBA8 : one ? SPNG_FMT_G8 : SPNG_FMT_RGB8;
  DENOISED_ASSIGN_OR_RETURN(std::vector<uint8_t> samples, Unpack(png.context.get(), format));

  Pixels pixels{
      static_cast<int>(png.header.width), static_cast<int>(png.header.height), grey ? 1 : 3, {}};
  if (png.transparent) {
    pixels.samples = OverWhite(samples, pixels.channels);
  } else if (grey && !one) {
    pixels.samples.resize(samples.size() / 3);
    for (size_t i = 0; i < pixels.samples.size(); ++i) pixels.samples[i] = samples[3 * i];
  } else {
    pixels.samples = std::move(samples);
  }
  return pixels;
}

absl::StatusOr<Pixels> DecodePngTransparency(std::string_view file, int64_t max_pixels,
                                             const ReserveMemory& reserve) {
  DENOISED_ASSIGN_OR_RETURN(const Opened png, Open(file, max_pixels, reserve));
  if (!png.transparent) {
    return InvalidArgument("the PNG has no alpha channel; send one that is partly transparent");
  }
  DENOISED_ASSIGN_OR_RETURN(const std::vector<uint8_t> rgba,
                            Unpack(png.context.get(), SPNG_FMT_RGBA8));
  Pixels pixels{static_cast<int>(png.header.width), static_cast<int>(png.header.height), 1, {}};
  pixels.samples.resize(rgba.size() / 4);
  for (size_t i = 0; i < pixels.samples.size(); ++i) {
    pixels.samples[i] = static_cast<uint8_t>(255 - rgba[4 * i + 3]);
  }
  return pixels;
}

}  // namespace denoised
