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

CUresult EncodeHeads(CUtensorMap* map, const Rows& rows, int images, int tokens, int heads, int dim,
                     int box) {
  const auto of = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t dims[4] = {of(dim), of(heads), of(tokens), of(images)};
  const cuuint64_t strides[3] = {of(dim * int64_t{2}), of(rows.stride * 2),
                                 of(rows.stride * 2 * tokens)};
  const cuuint32_t boxes[4] = {64, 1, static_cast<cuuint32_t>(box), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  return GetTensorMapEncoders().tiled(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, rows.data, dims, strides, boxes, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace denoised::cuda
