// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/status.h"

namespace denoised::trainer {

/// An array of numbers from a file.
struct Array {
  std::vector<int64_t> shape;
  size_t element = 1;  // bytes of one number
  bool is_signed = false, big_endian = false;
  bool is_float = false;  // of 4 or 8 bytes
  std::string data;       // in C order

  int64_t elements() const;
  int64_t At(int64_t index) const;  // of whole numbers
  double NumberAt(int64_t index) const;
};

/// An IDX file, as MNIST has them: a 4-byte magic number, extents, numbers, all big-endian.
/// Unpacked from gzip if need be. InvalidArgument names the file and what is wrong.
absl::StatusOr<Array> ParseIdx(std::string_view bytes, const std::string& name);

/// NumPy's .npy (format 1.0 to 3.0) of whole numbers or of f4 or f8, in C order.
absl::StatusOr<Array> ParseNpy(std::string_view bytes, const std::string& name);

}  // namespace denoised::trainer
