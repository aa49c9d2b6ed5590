// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <png.h>

#include "command/codec.h"
#include "command/codec_files.h"

namespace denoised::command {
namespace {

void Throw(png_structp png, png_const_charp message) {
  *static_cast<std::string*>(png_get_error_ptr(png)) = message;
  png_longjmp(png, 1);
}
void IgnoreWarning(png_structp, png_const_charp) {}
void Append(png_structp png, png_bytep data, size_t size) {
  static_cast<std::string*>(png_get_io_ptr(png))->append(reinterpret_cast<char*>(data), size);
}
void Flush(png_structp) {}

/// Everything between setjmp and longjmp: holds no object with a destructor.
bool Write(png_structp png, png_infop info, const Pixels& image, std::vector<png_text>& text,
           std::vector<png_bytep>& rows, std::string* file) {
  if (setjmp(png_jmpbuf(png))) return false;
  png_set_write_fn(png, file, Append, Flush);
  png_set_IHDR(png, info, image.width, image.height, 8,
               image.channels == 1 ? PNG_COLOR_TYPE_GRAY : PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  if (!text.empty()) png_set_text(png, info, text.data(), static_cast<int>(text.size()));
  png_write_info(png, info);
  png_write_image(png, rows.data());
  png_write_end(png, info);
  return true;
}

}  // namespace

absl::StatusOr<Pixels> DecodePng(const std::string& file) {
  png_image image = {};
  image.version = PNG_IMAGE_VERSION;
  if (!png_image_begin_read_from_memory(&image, file.data(), file.size())) {
    return absl::DataLossError(fmt::format("the PNG is damaged: {}", image.message));
  }
  const bool colour = (image.format & PNG_FORMAT_FLAG_COLOR) != 0;
  image.format = colour ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY;
  Pixels pixels = Blank(image.width, image.height, colour ? 3 : 1);
  const png_color black = {};
  if (!png_image_finish_read(&image, &black, pixels.data.data(), 0, nullptr)) {
    return absl::DataLossError(fmt::format("the PNG is damaged: {}", image.message));
  }
  return pixels;
}

absl::StatusOr<std::string> EncodePng(const Pixels& image, const PngText& text) {
  std::string error = "out of memory";
  std::vector<png_text> chunks;
  for (const auto& [key, value] : text) {
    png_text chunk = {};
    chunk.compression = PNG_TEXT_COMPRESSION_NONE;
    chunk.key = const_cast<char*>(key.c_str());
    chunk.text = const_cast<char*>(value.c_str());
    chunk.text_length = value.size();
    chunks.push_back(chunk);
  }
  std::vector<png_bytep> rows;
  for (int y = 0; y < image.height; ++y) rows.push_back(const_cast<png_bytep>(image.at(0, y)));
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, &error, Throw, IgnoreWarning);
  png_infop info = png == nullptr ? nullptr : png_create_info_struct(png);
  std::string file;
  const bool written = info != nullptr && Write(png, info, image, chunks, rows, &file);
  png_destroy_write_struct(&png, &info);
  if (!written) return absl::InternalError(fmt::format("no PNG could be made: {}", error));
  return file;
}

}  // namespace denoised::command
