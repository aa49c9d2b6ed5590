// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "engine/io/safetensors.h"

/// Any bytes are refused with a message, or every byte of every tensor can be read
/// (AddressSanitizer watches) and together they are the data of the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto parsed = denoised::Safetensors::Parse(data, size, "fuzz.safetensors", nullptr);
  if (!parsed.ok()) {
    if (parsed.status().message().empty()) std::abort();
    return 0;
  }
  volatile uint8_t sink = 0;
  size_t tensor_bytes = 0;
  for (const auto& [name, tensor] : parsed->tensors()) {
    tensor_bytes += tensor.bytes();
    const auto* bytes = static_cast<const uint8_t*>(tensor.data());
    for (size_t i = 0; i < tensor.bytes(); ++i) sink = sink ^ bytes[i];
  }
  if (tensor_bytes > size) std::abort();
  return 0;
}
