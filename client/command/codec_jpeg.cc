// SPDX-License-Identifier: Apache-2.0
#include <csetjmp>
#include <cstdio>

// clang-format off
#include <jpeglib.h>  // after cstdio, which it needs and does not include
// clang-format on

#include "command/codec_files.h"

namespace denoised::command {
namespace {

struct ErrorHandler {
  jpeg_error_mgr base;  // first, so that a pointer to it is a pointer to this
  std::jmp_buf escape;
  char message[JMSG_LENGTH_MAX];
};

void Throw(j_common_ptr jpeg) {
  auto* handler = reinterpret_cast<ErrorHandler*>(jpeg->err);
  jpeg->err->format_message(jpeg, handler->message);
  std::longjmp(handler->escape, 1);
}
void Silent(j_common_ptr) {}

/// Everything between setjmp and longjmp: holds no object with a destructor.
bool Read(jpeg_decompress_struct* jpeg, ErrorHandler* handler, const std::string& file,
          Pixels* pixels) {
  if (setjmp(handler->escape)) return false;
  jpeg_create_decompress(jpeg);
  jpeg_mem_src(jpeg, reinterpret_cast<const unsigned char*>(file.data()), file.size());
  jpeg_read_header(jpeg, TRUE);
  jpeg->out_color_space = jpeg->num_components == 1 ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_start_decompress(jpeg);
  *pixels = Blank(static_cast<int>(jpeg->output_width), static_cast<int>(jpeg->output_height),
                  jpeg->output_components);
  while (jpeg->output_scanline < jpeg->output_height) {
    JSAMPROW row = pixels->at(0, static_cast<int>(jpeg->output_scanline));
    jpeg_read_scanlines(jpeg, &row, 1);
  }
  return jpeg_finish_decompress(jpeg);
}

}  // namespace

absl::StatusOr<Pixels> DecodeJpeg(const std::string& file) {
  jpeg_decompress_struct jpeg = {};
  ErrorHandler handler = {};
  jpeg.err = jpeg_std_error(&handler.base);
  handler.base.error_exit = Throw;
  handler.base.output_message = Silent;
  Pixels pixels;
  const bool read = Read(&jpeg, &handler, file, &pixels);
  jpeg_destroy_decompress(&jpeg);
  if (!read) return absl::DataLossError(std::string("the JPEG is damaged: ") + handler.message);
  return pixels;
}

}  // namespace denoised::command
