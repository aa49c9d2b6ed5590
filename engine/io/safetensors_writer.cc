// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "engine/core/status.h"
#include "engine/io/safetensors.h"

namespace denoised {

absl::Status WriteSafetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  if (tensors.count("__metadata__"))
    return InvalidArgument("{}: a tensor cannot be called __metadata__; rename it", path);

  // Gaps are forbidden, so the widest types go first: each then starts at a multiple of its size.
  using Named = std::pair<const std::string, Tensor>;
  std::vector<const Named*> order;
  for (const Named& named : tensors) {
    DENOISED_CHECK(named.second.device() == Device::kCpu && named.second.contiguous(), "{}",
                   named.first);
    order.push_back(&named);
  }
  std::stable_sort(order.begin(), order.end(), [](const Named* a, const Named* b) {
    return SizeOf(a->second.dtype()) > SizeOf(b->second.dtype());
  });

  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const Named* named : order) {
    const Tensor& tensor = named->second;
    std::vector<int64_t> shape(tensor.shape().rank());
    for (size_t i = 0; i < shape.size(); ++i) shape[i] = tensor.dim(static_cast<int>(i));
    header[named->first] = {{"dtype", Name(tensor.dtype())},
                            {"shape", shape},
                            {"data_offsets", {offset, offset + tensor.bytes()}}};
    offset += tensor.bytes();
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();

  const std::string partial = path + ".partial";
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const Named* named : order)
    file.write(static_cast<const char*>(named->second.data()),
               static_cast<std::streamsize>(named->second.bytes()));
  file.close();
  if (!file) {
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

}  // namespace denoised
