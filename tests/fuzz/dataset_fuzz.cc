// SPDX-License-Identifier: Apache-2.0
// The readers of data sets: whatever bytes they get, they return an error or arrays of the size
// that they promise. The first byte chooses the reader.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "trainer/data/archive.h"
#include "trainer/data/arrays.h"

using denoised::trainer::Array;
using denoised::trainer::ZipArchive;

namespace {

void Check(const absl::StatusOr<Array>& array) {
  if (!array.ok()) return;
  const int64_t elements = array->elements();
  if (elements < 0 || static_cast<size_t>(elements) * array->element != array->data.size()) abort();
  if (elements > 0) array->NumberAt(elements - 1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  constexpr uint64_t kLimit = 1 << 20;
  switch (data[0] % 4) {
    case 0: {
      const auto archive = ZipArchive::Parse(bytes, "fuzz.zip");
      if (!archive.ok()) return 0;
      for (const ZipArchive::Entry& entry : archive->entries()) {
        const auto file = archive->Read(entry, kLimit);
        if (file.ok() && file->size() > kLimit) abort();
      }
      return 0;
    }
    case 1: {
      const auto unpacked = denoised::trainer::Gunzip(bytes, "fuzz.gz", kLimit);
      if (unpacked.ok() && unpacked->size() > kLimit + size) abort();
      return 0;
    }
    case 2:
      Check(denoised::trainer::ParseIdx(bytes, "fuzz-idx"));
      return 0;
    default:
      Check(denoised::trainer::ParseNpy(bytes, "fuzz.npy"));
      return 0;
  }
}
