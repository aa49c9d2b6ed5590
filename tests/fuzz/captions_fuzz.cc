// SPDX-License-Identifier: Apache-2.0
// What people write beside their pictures: whatever it is, it is refused with a message, or every
// picture that is read has what it says. The first byte chooses the reader.

#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "engine/images/formats.h"
#include "tests/io/temporary_directory.h"
#include "trainer/data/pictures.h"
#include "trainer/text_to_image.h"

using denoised::trainer::Captions;
using denoised::trainer::PictureOptions;
using denoised::trainer::Pictures;

namespace {

const std::string& Png() {
  static const std::string png = *denoised::EncodePng({2, 2, 1, {1, 2, 3, 4}}, {});
  return png;
}

std::string Little(uint64_t value, size_t bytes) {
  std::string text;
  for (size_t i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

/// A ZIP file of two pictures and dataset.json.
std::string Zip(const std::string& dataset) {
  std::string zip, directory;
  const std::pair<std::string, std::string> files[] = {
      {"a.png", Png()}, {"b/c.png", Png()}, {"dataset.json", dataset}};
  for (const auto& [name, text] : files) {
    const auto crc =
        crc32(0, reinterpret_cast<const Bytef*>(text.data()), static_cast<uInt>(text.size()));
    const std::string common = Little(0, 8) + Little(crc, 4) + Little(text.size(), 4) +
                               Little(text.size(), 4) + Little(name.size(), 2) + Little(0, 2);
    directory += "PK\x01\x02" + Little(20, 2) + Little(20, 2) + common + std::string(10, '\0') +
                 Little(zip.size(), 4) + name;
    zip += "PK\x03\x04" + Little(20, 2) + common + name + text;
  }
  const size_t at = zip.size();
  return zip + directory + "PK\x05\x06" + Little(0, 4) + Little(3, 2) + Little(3, 2) +
         Little(directory.size(), 4) + Little(at, 4) + Little(0, 2);
}

struct Folder : denoised::TemporaryDirectory {
  Folder() {
    std::filesystem::create_directories(*this / "pictures/b");
    Write("pictures/a.png", Png());
    Write("pictures/b/c.png", Png());
  }
};

void Check(const absl::StatusOr<Pictures>& pictures, const PictureOptions& options) {
  if (!pictures.ok()) {
    if (pictures.status().message().empty()) abort();
    return;
  }
  const auto count = static_cast<size_t>(pictures->dataset.images.dim(0));
  const std::vector<int32_t>& labels = pictures->dataset.labels;
  if (count == 0 || pictures->files.size() != count) abort();
  if (options.wants_labels && labels.size() != count) abort();
  for (const int32_t label : labels)
    if (label < 0) abort();
  if (options.wants_vectors && static_cast<size_t>(pictures->dataset.vectors.dim(0)) != count)
    abort();
  const std::vector<double>& weights = pictures->dataset.weights;
  if (!weights.empty() && weights.size() != count) abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  PictureOptions options;
  options.channels = 1;
  options.height = options.width = 2;
  options.wants_labels = data[0] & 4;
  options.wants_vectors = !options.wants_labels && (data[0] & 8) != 0;
  options.skip_bad = data[0] & 16;
  options.parallel_for = denoised::OneByOne;
  const std::vector<std::string> files = {"a.png", "b/c.png"};
  const std::string pictures = folder / "pictures";
  switch (data[0] % 4) {
    case 0:
      folder.Write("pictures/metadata.jsonl", text);
      Check(ReadPictures(pictures, "", options), options);
      break;
    case 1:
      folder.Write("data.zip", Zip(text));
      Check(ReadPictures(folder / "data.zip", "", options), options);
      return 0;
    case 2:
      folder.Write("pictures/metadata.jsonl", text);
      break;
    default:
      std::filesystem::remove(folder / "pictures/metadata.jsonl");
      folder.Write("pictures/a.txt", text);
  }
  const absl::StatusOr<Captions> captions = denoised::trainer::ReadCaptions(pictures, files);
  if (!captions.ok() && captions.status().message().empty()) abort();
  std::filesystem::remove(folder / "pictures/metadata.jsonl");
  return 0;
}
