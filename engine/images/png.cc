// SPDX-License-Identifier: Apache-2.0
#include "engine/images/png.h"

#include <isa-l/crc.h>
#include <isa-l/igzip_lib.h>
#include <spng.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>

#include "engine/core/each_isa.h"
#include "engine/images/exif.h"

// Files are read by spng, which is strict about damage and bounds what texts and profiles unpack
// to. They are written by hand, compressed and summed by ISA-L. No library for PNG does so: spng
// and libpng compress with zlib alone, and lodepng's checksum of noise takes twice as long as
// ISA-L's compression.

namespace denoised {
namespace {

using Context = std::unique_ptr<spng_ctx, void (*)(spng_ctx*)>;

constexpr std::string_view kSignature = "\x89PNG\r\n\x1a\n";

/// Bytes that are not cleared first.
struct Buffer {
  explicit Buffer(size_t room) : bytes(std::make_unique_for_overwrite<uint8_t[]>(room)) {}

  std::unique_ptr<uint8_t[]> bytes;
  size_t size = 0;
};

/// a − b, modulo 256, and the sum of its amounts.
DENOISED_EACH_ISA
unsigned Subtract(const uint8_t* a, const uint8_t* b, size_t count, uint8_t* out) {
  unsigned total = 0;
  for (size_t i = 0; i < count; ++i) {
    out[i] = static_cast<uint8_t>(a[i] - b[i]);
    const auto difference = static_cast<int8_t>(out[i]);
    total += static_cast<unsigned>(difference < 0 ? -difference : difference);
  }
  return total;
}

/// Rows `begin` to `end` as PNG filters them: Sub or Up for each, whichever leaves the smaller
/// differences. To choose among all five filters takes longer than the compression.
Buffer FilterRows(const Pixels& pixels, int begin, int end) {
  constexpr uint8_t kSub = 1, kUp = 2;
  const auto row = static_cast<size_t>(pixels.width) * pixels.channels;
  Buffer filtered((row + 1) * (end - begin));
  std::vector<uint8_t> up(row);
  for (int y = begin; y < end; ++y) {
    const uint8_t* const here = pixels.samples.data() + y * row;
    uint8_t* const out = filtered.bytes.get() + filtered.size;
    filtered.size += row + 1;
    out[0] = kSub;
    uint8_t* const rest = std::copy_n(here, pixels.channels, out + 1);
    const unsigned sub = Subtract(here + pixels.channels, here, row - pixels.channels, rest);
    if (y > 0 && Subtract(here, here - row, row, up.data()) < sub) {
      out[0] = kUp;
      std::copy(up.begin(), up.end(), out + 1);
    }
  }
  return filtered;
}

/// Blocks of deflate that end at a byte, so that others can follow. docs/benchmarks.md compares
/// ISA-L with zlib and libdeflate.
///
/// ISA-L begins without a history by hashing a part of the stream's own address
/// (`.write_first_byte` in igzip_icf_body_h1_gr_bt.asm, 2.30 to 2.32): the matches that it finds
/// then depend on the thread. So the first byte is a stored block (RFC 1951, section 3.2.4), which
/// is the history that ISA-L begins with.
absl::StatusOr<Buffer> Compress(const Buffer& in, bool is_last) {
  const uint8_t first[] = {0x00, 0x01, 0x00, 0xfe, 0xff, in.bytes[0]};
  // Enough for blocks that are stored, which is what ISA-L does with what it cannot shrink, for the
  // one at which the next band begins, and for the byte that it leaves unless it has no room.
  constexpr size_t kStoredBlock = 65535, kBlockHeader = 5;
  const size_t room = std::size(first) + in.size + kBlockHeader * (in.size / kStoredBlock + 3) + 1;
  if (room > std::numeric_limits<uint32_t>::max()) return Internal("too many for ISA-L");
  Buffer out(room);
  isal_zstream stream{};  // isal_deflate_init() leaves hist_bits, the window, as it was
  isal_deflate_init(&stream);
  const Buffer tables(ISAL_DEF_LVL1_DEFAULT);
  stream.level = 1;
  stream.level_buf = tables.bytes.get();
  stream.level_buf_size = ISAL_DEF_LVL1_DEFAULT;
  stream.gzip_flag = IGZIP_DEFLATE;
  stream.flush = FULL_FLUSH;
  stream.end_of_stream = is_last ? 1 : 0;
  if (const int error = isal_deflate_set_dict(&stream, in.bytes.get(), 1); error != COMP_OK) {
    return Internal("ISA-L's error {}", error);
  }
  stream.next_in = in.bytes.get() + 1;
  stream.avail_in = static_cast<uint32_t>(in.size - 1);
  stream.next_out = std::copy(std::begin(first), std::end(first), out.bytes.get());
  stream.avail_out = static_cast<uint32_t>(room - std::size(first));
  const int error = isal_deflate(&stream);
  if (error != COMP_OK || stream.avail_in > 0 || stream.avail_out == 0) {
    return Internal("ISA-L's error {}, with {} bytes to read and {} to write", error,
                    stream.avail_in, stream.avail_out);
  }
  out.size = std::size(first) + stream.total_out;
  return out;
}

constexpr uint32_t kAdlerOfNothing = 1;

/// Rows that are compressed by themselves.
struct Band {
  Buffer blocks{0};
  size_t filtered_bytes = 0;
  uint32_t adler = kAdlerOfNothing;  // of the filtered bytes
};

absl::StatusOr<std::vector<Band>> CompressInBands(const Pixels& pixels,
                                                  const ParallelFor& parallel_for) {
  // Matches end where a band begins: noise and photographs grow by 0.1 %, flat pictures by 5 %.
  const size_t row = static_cast<size_t>(pixels.width) * pixels.channels + 1;
  const int rows = static_cast<int>(std::clamp<size_t>(kTaskBytes / row, 1, pixels.height));
  const int count = (pixels.height + rows - 1) / rows;
  std::vector<Band> bands(count);
  std::vector<absl::Status> done(count);
  parallel_for(count, [&](int i) {
    const Buffer filtered = FilterRows(pixels, i * rows, std::min((i + 1) * rows, pixels.height));
    absl::StatusOr<Buffer> blocks = Compress(filtered, /*is_last=*/i == count - 1);
    done[i] = blocks.status();
    if (!blocks.ok()) return;
    bands[i] = {*std::move(blocks), filtered.size,
                isal_adler32(kAdlerOfNothing, filtered.bytes.get(), filtered.size)};
  });
  for (const absl::Status& status : done) {
    if (!status.ok()) {
      return Internal("cannot encode {}×{} pixels as PNG: {}", pixels.width, pixels.height,
                      std::string(status.message()));
    }
  }
  return bands;
}

std::string BigEndian(uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
  return bytes;
}

/// `pieces` are the chunk's data, one after the other.
void AppendChunk(std::string_view type, const std::vector<std::string_view>& pieces,
                 std::string* file) {
  size_t size = 0;
  for (const std::string_view piece : pieces) size += piece.size();
  *file += BigEndian(static_cast<uint32_t>(size));
  const size_t begin = file->size();
  file->append(type);
  for (const std::string_view piece : pieces) file->append(piece);
  *file += BigEndian(crc32_gzip_refl(0, reinterpret_cast<const uint8_t*>(file->data()) + begin,
                                     file->size() - begin));
}

void AppendText(const std::string& keyword, const std::string& text, std::string* file) {
  DENOISED_CHECK(!keyword.empty() && keyword.size() <= 79, "PNG keyword \"{}\"", keyword);
  // A plain text chunk is Latin-1 without control characters; other texts are written as UTF-8.
  const bool plain = std::all_of(text.begin(), text.end(),
                                 [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); });
  std::string data = keyword + '\0';
  // Not compressed, no language, no translated keyword.
  if (!plain) data += std::string(4, '\0');
  data += text;
  AppendChunk(plain ? "tEXt" : "iTXt", {data}, file);
}

Context NewContext() { return {spng_ctx_new(0), spng_ctx_free}; }

absl::Status Damaged(int error) {
  return InvalidArgument("the PNG cannot be read: {}; use an intact file", spng_strerror(error));
}

/// A file whose header was read and whose size was checked. `file` must outlive it.
struct Opened {
  Context context{nullptr, spng_ctx_free};
  spng_ihdr header{};
  bool transparent = false;  // it has an alpha channel or a tRNS chunk
};

absl::StatusOr<Opened> Open(std::string_view file, int64_t max_pixels,
                            const ReserveMemory& reserve) {
  if (!file.starts_with(kSignature)) {
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

/// The orientation of a file that Unpack has verified. EXIF may precede or follow the picture. By
/// hand: spng drops EXIF that begins with JPEG's prefix, as some programs write it.
int OrientationOf(std::string_view file) {
  constexpr size_t kChunkHeader = 8, kChecksum = 4;
  for (size_t at = kSignature.size(); at + kChunkHeader <= file.size();) {
    size_t size = 0;
    for (size_t i = 0; i < 4; ++i) size = size << 8 | static_cast<unsigned char>(file[at + i]);
    const std::string_view type = file.substr(at + 4, 4);
    if (type == "IEND") break;
    if (type == "eXIf") return ReadOrientation(file.substr(at + kChunkHeader, size));
    at += kChunkHeader + size + kChecksum;
  }
  return 1;
}

}  // namespace

absl::StatusOr<std::string> EncodePng(const Pixels& pixels, const TextEntries& texts,
                                      const ParallelFor& parallel_for) {
  DENOISED_CHECK(pixels.width > 0 && pixels.height > 0, "{}×{} pixels", pixels.width,
                 pixels.height);
  DENOISED_ASSIGN_OR_RETURN(const std::vector<Band> bands, CompressInBands(pixels, parallel_for));
  std::string file(kSignature);
  std::string header = BigEndian(pixels.width) + BigEndian(pixels.height);
  header += '\x8';  // bits
  header += static_cast<char>(pixels.channels == 1 ? SPNG_COLOR_TYPE_GRAYSCALE
                                                   : SPNG_COLOR_TYPE_TRUECOLOR);
  header += std::string(3, '\0');  // deflate, filters for each row, not interlaced
  AppendChunk("IHDR", {header}, &file);
  // Before the picture, where programs find them that read no further.
  for (const auto& [keyword, text] : texts) {
    // An empty text says nothing.
    if (!text.empty()) AppendText(keyword, text, &file);
  }
  // A zlib stream (RFC 1950): a header for a window of 32 KiB, the blocks, their checksum.
  std::vector<std::string_view> stream = {"\x78\x01"};
  uLong sum = kAdlerOfNothing;
  size_t size = 0;
  for (const Band& band : bands) {
    stream.emplace_back(reinterpret_cast<const char*>(band.blocks.bytes.get()), band.blocks.size);
    sum = adler32_combine(sum, band.adler, static_cast<z_off_t>(band.filtered_bytes));
    size += band.blocks.size;
  }
  const std::string checksum = BigEndian(static_cast<uint32_t>(sum));
  stream.push_back(checksum);
  if (size > std::numeric_limits<int32_t>::max() - size_t{6}) {
    return Internal("cannot encode {}×{} pixels as PNG: too many for one chunk", pixels.width,
                    pixels.height);
  }
  constexpr size_t kChunk = 12;  // around its data
  file.reserve(file.size() + kChunk + size + 6 + kChunk);
  AppendChunk("IDAT", stream, &file);
  AppendChunk("IEND", {}, &file);
  return file;
}

absl::StatusOr<Pixels> DecodePng(std::string_view file, int64_t max_pixels,
                                 const ReserveMemory& reserve, Alpha alpha) {
  DENOISED_ASSIGN_OR_RETURN(const Opened png, Open(file, max_pixels, reserve));
  const bool grey = png.header.color_type == SPNG_COLOR_TYPE_GRAYSCALE ||
                    png.header.color_type == SPNG_COLOR_TYPE_GRAYSCALE_ALPHA;
  const bool blend = png.transparent && alpha == Alpha::kOverWhite;
  // spng unpacks other grey, of 16 bits or with an alpha channel, to RGB alone.
  const bool one =
      png.header.color_type == SPNG_COLOR_TYPE_GRAYSCALE && !blend && png.header.bit_depth <= 8;
  const int format = blend ? SPNG_FMT_RGBA8 : one ? SPNG_FMT_G8 : SPNG_FMT_RGB8;
  DENOISED_ASSIGN_OR_RETURN(std::vector<uint8_t> samples, Unpack(png.context.get(), format));

  Pixels pixels{
      static_cast<int>(png.header.width), static_cast<int>(png.header.height), grey ? 1 : 3, {}};
  if (blend) {
    pixels.samples = OverWhite(samples, pixels.channels);
    samples = std::vector<uint8_t>();  // before Upright takes as much again
  } else if (grey && !one) {
    pixels.samples.resize(samples.size() / 3);
    for (size_t i = 0; i < pixels.samples.size(); ++i) pixels.samples[i] = samples[3 * i];
  } else {
    pixels.samples = std::move(samples);
  }
  return Upright(std::move(pixels), OrientationOf(file));
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
  return Upright(std::move(pixels), OrientationOf(file));
}

}  // namespace denoised
