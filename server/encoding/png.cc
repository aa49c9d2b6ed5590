#include "server/encoding/png.h"

#include <png.h>

#include <csetjmp>
#include <cstring>

namespace denoised {
namespace {

void Append(png_structp png, png_bytep data, png_size_t size) {
  static_cast<std::string*>(png_get_io_ptr(png))->append(reinterpret_cast<char*>(data), size);
}

void Flush(png_structp) {}

void KeepMessage(png_structp png, png_const_charp message) {
  *static_cast<std::string*>(png_get_error_ptr(png)) = message;
  png_longjmp(png, 1);
}

void IgnoreWarning(png_structp, png_const_charp) {}

/// libpng reports errors by longjmp, which must cross no object with a destructor: so everything
/// lives in the caller and this function holds pointers only. False when libpng gave up.
bool Write(png_structp png, png_infop info, const Pixels& pixels, png_textp texts, int text_count,
           std::string* file) {
  if (setjmp(png_jmpbuf(png))) return false;
  png_set_write_fn(png, file, Append, Flush);
  png_set_IHDR(png, info, pixels.width, pixels.height, 8,
               pixels.channels == 1 ? PNG_COLOR_TYPE_GRAY : PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  if (text_count > 0) png_set_text(png, info, texts, text_count);
  png_write_info(png, info);
  const size_t stride = static_cast<size_t>(pixels.width) * pixels.channels;
  for (int y = 0; y < pixels.height; ++y) {
    png_write_row(png, pixels.samples.data() + y * stride);
  }
  png_write_end(png, info);
  return true;
}

}  // namespace

absl::StatusOr<std::string> EncodePng(const Pixels& pixels, const TextEntries& texts) {
  std::string file, message;
  png_structp png =
      png_create_write_struct(PNG_LIBPNG_VER_STRING, &message, KeepMessage, IgnoreWarning);
  if (png == nullptr) return ResourceExhausted("no memory for a PNG encoder");
  png_infop info = png_create_info_struct(png);
  std::vector<png_text> chunks(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    chunks[i].compression = PNG_TEXT_COMPRESSION_NONE;
    chunks[i].key = const_cast<char*>(texts[i].first.c_str());
    chunks[i].text = const_cast<char*>(texts[i].second.c_str());
    chunks[i].text_length = texts[i].second.size();
  }
  const bool written = info != nullptr && Write(png, info, pixels, chunks.data(),
                                                static_cast<int>(chunks.size()), &file);
  png_destroy_write_struct(&png, &info);
  if (!written) {
    return Internal("cannot encode {}×{} pixels as PNG: {}", pixels.width, pixels.height, message);
  }
  return file;
}

absl::StatusOr<Pixels> DecodePng(std::string_view file, int64_t max_pixels,
                                 const ReserveMemory& reserve) {
  png_image image;
  std::memset(&image, 0, sizeof(image));
  image.version = PNG_IMAGE_VERSION;
  if (!png_image_begin_read_from_memory(&image, file.data(), file.size())) {
    return InvalidArgument("the PNG cannot be read: {}; send an intact file", image.message);
  }
  const absl::Status status =
      CheckSize("PNG", image.width, image.height, max_pixels, 3 + 4, reserve);
  if (!status.ok()) {
    png_image_free(&image);
    return status;
  }
  image.format = image.format & PNG_FORMAT_FLAG_COLOR ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY;
  Pixels pixels{static_cast<int>(image.width),
                static_cast<int>(image.height),
                static_cast<int>(PNG_IMAGE_SAMPLE_CHANNELS(image.format)),
                {}};
  pixels.samples.resize(PNG_IMAGE_SIZE(image));
  const png_color white{255, 255, 255};
  // libpng's simplified API treats a damaged or short file as an error, not as a warning.
  if (!png_image_finish_read(&image, &white, pixels.samples.data(), 0, nullptr)) {
    return InvalidArgument("the PNG is damaged: {}; send an intact file", image.message);
  }
  return pixels;
}

}  // namespace denoised
