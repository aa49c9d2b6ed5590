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

CUresult EncodeTiled(CUtensorMap* map, const TiledTensor& tensor, CUtensorMapSwizzle swizzle,
                     CUtensorMapL2promotion promotion) {
  constexpr int kMostDimensions = 5, kElementBytes = 2;
  cuuint64_t extents[kMostDimensions] = {}, strides[kMostDimensions] = {};
  cuuint32_t box[kMostDimensions] = {}, element_strides[kMostDimensions] = {};
  const auto rank = static_cast<cuuint32_t>(tensor.extents.size());
  if (rank > kMostDimensions || tensor.strides.size() + 1 != rank || tensor.box.size() != rank)
    return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    extents[i] = static_cast<cuuint64_t>(tensor.extents.begin()[i]);
    box[i] = static_cast<cuuint32_t>(tensor.box.begin()[i]);
    element_strides[i] = 1;
    if (i > 0) {
      strides[i - 1] = static_cast<cuuint64_t>(tensor.strides.begin()[i - 1]) * kElementBytes;
    }
  }
  return GetTensorMapEncoders().tiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank,
                                      const_cast<void*>(tensor.data), extents, strides, box,
                                      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                      promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

CUresult EncodeHeads(CUtensorMap* map, const Rows& rows, int images, int tokens, int heads, int dim,
                     int box) {
  return EncodeTiled(map,
                     {rows.data,
                      {dim, heads, tokens, images},
                      {dim, rows.stride, rows.stride * tokens},
                      {64, 1, box, 1}},
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace denoised::cuda
