// SPDX-License-Identifier: Apache-2.0
#include "trainer/data/arrays.h"

#include <cstdlib>
#include <cstring>

#include "trainer/data/archive.h"

namespace denoised::trainer {
namespace {

/// The bytes that an array of this shape takes, or −1 beyond what is taken.
int64_t BytesOf(const std::vector<int64_t>& shape, size_t element) {
  uint64_t bytes = element;
  for (const int64_t extent : shape) {
    if (extent < 0 || (extent > 0 && bytes > kMaxUnpacked / static_cast<uint64_t>(extent)))
      return -1;
    bytes *= static_cast<uint64_t>(extent);
  }
  return static_cast<int64_t>(bytes);
}

absl::Status CheckSize(const Array& array, size_t have, const std::string& name) {
  const int64_t bytes = BytesOf(array.shape, array.element);
  if (bytes < 0) return InvalidArgument("{}: its header names a size beyond all bounds", name);
  if (static_cast<uint64_t>(bytes) != have)
    return InvalidArgument("{}: its header promises {} bytes of data, but there are {}", name,
                           bytes, have);
  return absl::OkStatus();
}

}  // namespace

int64_t Array::elements() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

double Array::NumberAt(int64_t index) const {
  if (!is_float) return static_cast<double>(At(index));
  char bytes[8];
  for (size_t i = 0; i < element; ++i)
    bytes[i] = data[static_cast<size_t>(index) * element + (big_endian ? element - 1 - i : i)];
  float single = 0;
  double whole = 0;
  std::memcpy(element == 4 ? static_cast<void*>(&single) : &whole, bytes, element);
  return element == 4 ? single : whole;
}

int64_t Array::At(int64_t index) const {
  DENOISED_CHECK(!is_float && element > 0);
  const char* at = data.data() + static_cast<size_t>(index) * element;
  uint64_t value = 0;
  for (size_t i = 0; i < element; ++i)
    value |= uint64_t{static_cast<unsigned char>(at[big_endian ? element - 1 - i : i])} << (8 * i);
  if (is_signed && element < 8 && (value >> (8 * element - 1)) != 0)
    value |= ~uint64_t{0} << (8 * element);
  return static_cast<int64_t>(value);
}

absl::StatusOr<Array> ParseIdx(std::string_view packed, const std::string& name) {
  DENOISED_ASSIGN_OR_RETURN(const std::string bytes, Gunzip(packed, name));
  const auto byte = [&](size_t at) { return static_cast<unsigned char>(bytes[at]); };
  if (bytes.size() < 4 || byte(0) != 0 || byte(1) != 0)
    return InvalidArgument("{}: neither a folder, .zip, .npz, .npy nor IDX file", name);
  Array array;
  array.big_endian = true;
  switch (byte(2)) {
    case 0x08:
      break;
    case 0x09:
      array.is_signed = true;
      break;
    case 0x0b:
      array.element = 2, array.is_signed = true;
      break;
    case 0x0c:
      array.element = 4, array.is_signed = true;
      break;
    default:
      return InvalidArgument("{}: IDX type {:#x} is not supported; use whole numbers", name,
                             byte(2));
  }
  const size_t rank = byte(3), header = 4 + 4 * rank;
  if (rank == 0 || rank > 4 || bytes.size() < header)
    return InvalidArgument("{}: an IDX file of {} dimensions, or cut off; 1 to 4 can be read", name,
                           rank);
  for (size_t i = 0; i < rank; ++i) {
    uint32_t extent = 0;
    for (size_t j = 0; j < 4; ++j) extent = extent << 8 | byte(4 + 4 * i + j);
    array.shape.push_back(extent);
  }
  DENOISED_RETURN_IF_ERROR(CheckSize(array, bytes.size() - header, name));
  array.data = bytes.substr(header);
  return array;
}

absl::StatusOr<Array> ParseNpy(std::string_view bytes, const std::string& name) {
  const auto bad = [&](std::string_view what) {
    return InvalidArgument("{}: not a .npy file that can be read: {}", name, what);
  };
  if (bytes.size() < 12 || bytes.substr(0, 6) != std::string_view("\x93NUMPY", 6))
    return bad("it does not begin with \\x93NUMPY");
  const int major = static_cast<unsigned char>(bytes[6]);
  if (major < 1 || major > 3) return bad("its version is unknown");
  const size_t length_bytes = major == 1 ? 2 : 4;
  size_t length = 0;
  for (size_t i = 0; i < length_bytes; ++i)
    length |= size_t{static_cast<unsigned char>(bytes[8 + i])} << (8 * i);
  const size_t begin = 8 + length_bytes;
  if (length > bytes.size() - begin) return bad("its header is cut off");
  const std::string header(bytes.substr(begin, length));
  // A Python dictionary that numpy itself writes: no need for more than to find the three keys.
  const auto after = [&](std::string_view key) -> size_t {
    const size_t at = header.find(key);
    if (at == std::string::npos) return at;
    return header.find_first_not_of(' ', at + key.size());
  };
  const size_t descr = after("'descr':"), order = after("'fortran_order':"),
               shape = after("'shape':");
  if (descr == std::string::npos || order == std::string::npos || shape == std::string::npos)
    return bad("its header lacks descr, fortran_order or shape");
  if (header.compare(order, 5, "False") != 0)
    return bad("it is in Fortran order; save numpy.ascontiguousarray(x)");
  Array array;
  const size_t quote = header.find('\'', descr + 1);
  const std::string type = header[descr] == '\'' && quote != std::string::npos
                               ? header.substr(descr + 1, quote - descr - 1)
                               : "";
  if (type.size() != 3 || std::string("|<>").find(type[0]) == std::string::npos ||
      std::string("uif").find(type[1]) == std::string::npos ||
      std::string(type[1] == 'f' ? "48" : "1248").find(type[2]) == std::string::npos)
    return InvalidArgument(
        "{}: its type is \"{}\"; save pictures as x.astype('uint8'), with numbers from 0 to 255, "
        "and labels as y.astype('int64')",
        name, type);
  array.big_endian = type[0] == '>';
  array.is_signed = type[1] == 'i';
  array.is_float = type[1] == 'f';
  array.element = static_cast<size_t>(type[2] - '0');
  if (header[shape] != '(') return bad("its shape is damaged");
  for (size_t at = shape + 1; at < header.size() && header[at] != ')';) {
    if (header[at] == ' ' || header[at] == ',') {
      ++at;
      continue;
    }
    char* end = nullptr;
    const long long extent = std::strtoll(header.c_str() + at, &end, 10);
    if (end == header.c_str() + at || extent < 0 || array.shape.size() == 5)
      return bad("its shape is damaged");
    array.shape.push_back(extent);
    at = static_cast<size_t>(end - header.c_str());
  }
  DENOISED_RETURN_IF_ERROR(CheckSize(array, bytes.size() - begin - length, name));
  array.data = bytes.substr(begin + length);
  return array;
}

}  // namespace denoised::trainer
