#include "server/encoding/jpeg.h"

// jpeglib.h needs size_t and FILE before it.
#include <jpeglib.h>

#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace denoised {
namespace {

/// A progressive file may hold any number of scans over all pixels; honest encoders write about
/// ten.
constexpr int kMaxScans = 100;

/// libjpeg's error manager with a way back and the message. libjpeg reports errors by longjmp,
/// which must cross no object with a destructor: so the functions that set the jump hold pointers
/// only.
struct ErrorTrap {
  jpeg_error_mgr base;
  std::jmp_buf back;
  char message[JMSG_LENGTH_MAX] = "";
};

void JumpBack(j_common_ptr codec) {
  auto* trap = reinterpret_cast<ErrorTrap*>(codec->err);
  codec->err->format_message(codec, trap->message);
  std::longjmp(trap->back, 1);
}

/// Keeps the first warning; libjpeg would print it.
void KeepWarning(j_common_ptr codec, int level) {
  if (level >= 0) return;
  auto* trap = reinterpret_cast<ErrorTrap*>(codec->err);
  if (codec->err->num_warnings++ == 0) codec->err->format_message(codec, trap->message);
}

void LimitScans(j_common_ptr codec) {
  auto* trap = reinterpret_cast<ErrorTrap*>(codec->err);
  if (reinterpret_cast<j_decompress_ptr>(codec)->input_scan_number <= kMaxScans) return;
  std::snprintf(trap->message, sizeof(trap->message), "more than %d scans", kMaxScans);
  std::longjmp(trap->back, 1);
}

void Set(ErrorTrap* trap, jpeg_error_mgr** error) {
  *error = jpeg_std_error(&trap->base);
  trap->base.error_exit = JumpBack;
  trap->base.emit_message = KeepWarning;
}

struct MemoryFile {
  unsigned char* data = nullptr;
  unsigned long size = 0;
};

bool Compress(jpeg_compress_struct* codec, ErrorTrap* trap, const Pixels& pixels, int quality,
              MemoryFile* file) {
  if (setjmp(trap->back)) return false;
  jpeg_create_compress(codec);
  jpeg_mem_dest(codec, &file->data, &file->size);
  codec->image_width = pixels.width;
  codec->image_height = pixels.height;
  codec->input_components = pixels.channels;
  codec->in_color_space = pixels.channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_set_defaults(codec);
  jpeg_set_quality(codec, quality, TRUE);
  jpeg_start_compress(codec, TRUE);
  const size_t stride = static_cast<size_t>(pixels.width) * pixels.channels;
  while (codec->next_scanline < codec->image_height) {
    JSAMPROW row = const_cast<JSAMPROW>(pixels.samples.data() + codec->next_scanline * stride);
    jpeg_write_scanlines(codec, &row, 1);
  }
  jpeg_finish_compress(codec);
  return true;
}

bool ReadHeader(jpeg_decompress_struct* codec, ErrorTrap* trap, std::string_view file) {
  if (setjmp(trap->back)) return false;
  jpeg_create_decompress(codec);
  jpeg_mem_src(codec, reinterpret_cast<const unsigned char*>(file.data()), file.size());
  jpeg_read_header(codec, TRUE);
  codec->out_color_space = codec->jpeg_color_space == JCS_GRAYSCALE ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_calc_output_dimensions(codec);
  return true;
}

bool ReadRows(jpeg_decompress_struct* codec, ErrorTrap* trap, jpeg_progress_mgr* progress,
              uint8_t* samples) {
  if (setjmp(trap->back)) return false;
  progress->progress_monitor = LimitScans;
  codec->progress = progress;
  jpeg_start_decompress(codec);
  const size_t stride = static_cast<size_t>(codec->output_width) * codec->output_components;
  while (codec->output_scanline < codec->output_height) {
    JSAMPROW row = samples + codec->output_scanline * stride;
    jpeg_read_scanlines(codec, &row, 1);
  }
  jpeg_finish_decompress(codec);
  // A truncated file is only a warning to libjpeg, which fills the rest with grey.
  return trap->base.num_warnings == 0;
}

}  // namespace

absl::StatusOr<std::string> EncodeJpeg(const Pixels& pixels, int quality) {
  jpeg_compress_struct codec{};
  ErrorTrap trap;
  Set(&trap, &codec.err);
  MemoryFile memory;
  const bool written = Compress(&codec, &trap, pixels, quality, &memory);
  std::string file;
  if (written) file.assign(reinterpret_cast<char*>(memory.data), memory.size);
  jpeg_destroy_compress(&codec);
  std::free(memory.data);
  if (!written) {
    return Internal("cannot encode {}×{} pixels as JPEG: {}", pixels.width, pixels.height,
                    trap.message);
  }
  return file;
}

absl::StatusOr<Pixels> DecodeJpeg(std::string_view file, int64_t max_pixels,
                                  const ReserveMemory& reserve) {
  jpeg_decompress_struct codec{};
  ErrorTrap trap;
  Set(&trap, &codec.err);
  jpeg_progress_mgr progress{};
  Pixels pixels;
  absl::Status status;
  if (!ReadHeader(&codec, &trap, file)) {
    status = InvalidArgument("the JPEG cannot be read: {}; send an intact RGB or grey file",
                             trap.message);
  } else {
    // Samples, and of a progressive file all coefficients.
    status = CheckSize("JPEG", codec.output_width, codec.output_height, max_pixels, 3 + 6, reserve);
  }
  if (status.ok()) {
    pixels = {static_cast<int>(codec.output_width),
              static_cast<int>(codec.output_height),
              codec.out_color_space == JCS_GRAYSCALE ? 1 : 3,
              {}};
    pixels.samples.resize(size_t{codec.output_width} * codec.output_height * pixels.channels);
    if (!ReadRows(&codec, &trap, &progress, pixels.samples.data())) {
      status =
          InvalidArgument("the JPEG is damaged: {}; send an intact RGB or grey file", trap.message);
    }
  }
  jpeg_destroy_decompress(&codec);
  if (!status.ok()) return status;
  return pixels;
}

}  // namespace denoised
