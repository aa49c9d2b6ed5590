// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>

#include "engine/core/status.h"
#include "engine/io/safetensors.h"

namespace denoised {
namespace {

constexpr int64_t kPieceElements = 1 << 20;  // made and written at a time

/// The length of the header and the header, which gives each tensor its place in the data.
std::string Header(const std::map<std::string, TensorType>& tensors,
                   const std::map<std::string, std::string>& metadata,
                   std::map<std::string, int64_t>* offsets) {
  // Gaps are forbidden, so the widest types go first: each then starts at a multiple of its size.
  using Named = std::pair<const std::string, TensorType>;
  std::vector<const Named*> order;
  order.reserve(tensors.size());
  for (const Named& named : tensors) order.push_back(&named);
  std::stable_sort(order.begin(), order.end(), [](const Named* a, const Named* b) {
    return SizeOf(a->second.dtype) > SizeOf(b->second.dtype);
  });

  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const auto* named : order) {
    const TensorType& tensor = named->second;
    std::vector<int64_t> shape(tensor.shape.rank());
    for (size_t i = 0; i < shape.size(); ++i) shape[i] = tensor.shape[static_cast<int>(i)];
    const int64_t bytes = tensor.shape.elements() * static_cast<int64_t>(SizeOf(tensor.dtype));
    header[named->first] = {{"dtype", Name(tensor.dtype)},
                            {"shape", shape},
                            {"data_offsets", {offset, offset + bytes}}};
    (*offsets)[named->first] = offset;
    offset += bytes;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + text;
}

bool WriteAt(int file, const char* from, size_t bytes, int64_t offset) {
  while (bytes > 0) {
    const ssize_t written = pwrite(file, from, bytes, offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    from += written;
    bytes -= static_cast<size_t>(written);
    offset += written;
  }
  return true;
}

}  // namespace

absl::Status WriteSafetensors(const std::string& path,
                              const std::map<std::string, TensorType>& tensors,
                              const std::map<std::string, std::string>& metadata,
                              const MakeElements& make, int threads) {
  if (tensors.contains("__metadata__"))
    return InvalidArgument("{}: a tensor cannot be called __metadata__; rename it", path);
  std::map<std::string, int64_t> offsets;
  const std::string header = Header(tensors, metadata, &offsets);
  struct Piece {
    const std::string* name;
    int64_t first, count;
    size_t element_bytes;
    int64_t offset;  // in the file
  };
  std::vector<Piece> pieces;
  for (const auto& [name, tensor] : tensors) {
    const int64_t elements = tensor.shape.elements();
    const size_t size = SizeOf(tensor.dtype);
    for (int64_t first = 0; first < elements; first += kPieceElements)
      pieces.push_back({&name, first, std::min(kPieceElements, elements - first), size,
                        static_cast<int64_t>(header.size()) + offsets[name] +
                            first * static_cast<int64_t>(size)});
  }

  const std::string partial = path + ".partial";
  const int file = open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  std::atomic<bool> failed = file < 0 || !WriteAt(file, header.data(), header.size(), 0);
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    std::vector<char> bytes;
    for (size_t i = next++; i < pieces.size() && !failed; i = next++) {
      const Piece& piece = pieces[i];
      bytes.resize(static_cast<size_t>(piece.count) * piece.element_bytes);
      make(*piece.name, piece.first, piece.count, bytes.data());
      if (!WriteAt(file, bytes.data(), bytes.size(), piece.offset)) failed = true;
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < std::min<int>(threads, static_cast<int>(pieces.size())); ++i)
    others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  // Synced first: after a power cut the name must not stand for a file without its data.
  if (!failed && fsync(file) != 0 && errno != EINVAL) failed = true;
  if (file >= 0 && close(file) != 0) failed = true;
  if (failed) {
    std::remove(partial.c_str());
    return Internal("{}: cannot be written; check the directory, its permissions and free space",
                    partial);
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) {
    const std::string error = std::generic_category().message(errno);
    std::remove(partial.c_str());
    return Internal("{}: cannot be renamed to {} ({})", partial, path, error);
  }
  return absl::OkStatus();
}

absl::Status WriteSafetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  std::map<std::string, TensorType> types;
  for (const auto& [name, tensor] : tensors) {
    DENOISED_CHECK(tensor.device() == Device::kCpu && tensor.contiguous(), "{}", name);
    types[name] = {tensor.shape(), tensor.dtype()};
  }
  const auto copy = [&](const std::string& name, int64_t first, int64_t count, void* to) {
    const Tensor& tensor = tensors.at(name);
    const size_t size = SizeOf(tensor.dtype());
    std::memcpy(to, static_cast<const char*>(tensor.data()) + static_cast<size_t>(first) * size,
                static_cast<size_t>(count) * size);
  };
  return WriteSafetensors(path, types, metadata, copy, /*threads=*/1);
}

}  // namespace denoised
