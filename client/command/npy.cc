// SPDX-License-Identifier: Apache-2.0
#include "command/npy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <regex>

namespace denoised::command {
namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr size_t kMagicSize = 6;

absl::Status Malformed(const std::string& what) {
  return absl::InvalidArgumentError(
      fmt::format("{}; save it with numpy.save(file, array.astype(numpy.float32))", what));
}

}  // namespace

absl::StatusOr<client::Tensor> ReadNpy(const std::string& file) {
  // Magic, version (2 bytes), header length (2 bytes in version 1, 4 later), header, data.
  if (file.size() < 12 || file.compare(0, kMagicSize, kMagic) != 0) {
    return Malformed("it is not a .npy file");
  }
  const auto byte = [&file](size_t i) { return static_cast<uint8_t>(file[i]); };
  const bool version_1 = byte(6) == 1;
  const size_t begin = version_1 ? 10 : 12;
  size_t length = byte(8) | byte(9) << 8;
  if (!version_1) length |= size_t{byte(10)} << 16 | size_t{byte(11)} << 24;
  if (length > file.size() - begin || length > 10'000) return Malformed("its header is cut off");
  const std::string header = file.substr(begin, length);

  client::Tensor tensor;
  if (header.find("'<f4'") != std::string::npos) {
    tensor.type = client::Tensor::Type::kFloat32;
  } else if (header.find("'|u1'") != std::string::npos) {
    tensor.type = client::Tensor::Type::kUint8;
  } else {
    return Malformed("its elements are neither float32 nor uint8");
  }
  if (!std::regex_search(header, std::regex("'fortran_order'\\s*:\\s*False"))) {
    return Malformed("it is not in C order");
  }
  std::smatch shape;
  if (!std::regex_search(header, shape, std::regex("'shape'\\s*:\\s*\\(([0-9, ]*)\\)"))) {
    return Malformed("its header has no shape");
  }
  const std::string extents = shape[1];
  const std::regex number("[0-9]{1,9}");
  uint64_t bytes = tensor.type == client::Tensor::Type::kFloat32 ? sizeof(float) : 1;
  const uint64_t available = file.size() - begin - length;
  for (auto i = std::sregex_iterator(extents.begin(), extents.end(), number);
       i != std::sregex_iterator(); ++i) {
    tensor.shape.push_back(std::stoll(i->str()));
    bytes *= static_cast<uint64_t>(tensor.shape.back());
    if (bytes > available) break;  // before a further extent could overflow it
  }
  if (bytes != available) {
    return Malformed(
        fmt::format("its shape ({}) does not fit its {} bytes of data", extents, available));
  }
  tensor.data = file.substr(begin + length);
  return tensor;
}

std::string WriteNpy(const client::Tensor& tensor) {
  std::string header =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}",
                  tensor.type == client::Tensor::Type::kFloat32 ? "<f4" : "|u1",
                  fmt::join(tensor.shape, ", "), tensor.shape.size() == 1 ? "," : "");
  // The data starts at a multiple of 64 bytes, after a line feed.
  while ((kMagicSize + 4 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  std::string file(kMagic, kMagicSize);
  file += '\x01';
  file += '\x00';
  file += static_cast<char>(header.size() & 0xff);
  file += static_cast<char>(header.size() >> 8);
  return file + header + tensor.data;
}

}  // namespace denoised::command
