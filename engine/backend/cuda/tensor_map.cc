// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/tensor_map.h"

#include <type_traits>

namespace denoised::cuda {

const TensorMapEncoders& GetTensorMapEncoders() {
  static const TensorMapEncoders encoders = [] {
    TensorMapEncoders found;
    const auto find = [&](const char* name, auto*& function) {
      void* pointer = nullptr;
      cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
      if (found.error == cudaSuccess) {
        found.error =
            cudaGetDriverEntryPointByVersion(name, &pointer, 12000, cudaEnableDefault, &result);
      }
      if (found.error == cudaSuccess && result != cudaDriverEntryPointSuccess) {
        found.error = cudaErrorSymbolNotFound;
      }
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(pointer);
    };
    find("cuTensorMapEncodeTiled", found.tiled);
    find("cuTensorMapEncodeIm2col", found.im2col);
    return found;
  }();
  return encoders;
}

}  // namespace denoised::cuda
