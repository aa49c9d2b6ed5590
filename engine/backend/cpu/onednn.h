// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <oneapi/dnnl/dnnl.hpp>
#include <string>

/// The little of oneDNN that the CPU backend uses, and where 2.x (Debian 12) and 3.x (Ubuntu 24.04)
/// differ. oneDNN's C++ calls throw dnnl::error; CpuBackend catches it.

namespace denoised::cpu {

/// A forward convolution with sums in fp32 whose caller provides the scratchpad.
inline dnnl::convolution_forward::primitive_desc DescribeConvolution(
    const dnnl::engine& engine, const dnnl::memory::desc& source, const dnnl::memory::desc& weight,
    const dnnl::memory::desc& bias, const dnnl::memory::desc& destination,
    const dnnl::memory::dims& strides, const dnnl::memory::dims& pad_before,
    const dnnl::memory::dims& pad_after) {
  constexpr auto kInference = dnnl::prop_kind::forward_inference;
  constexpr auto kDirect = dnnl::algorithm::convolution_direct;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attributes.set_fpmath_mode(dnnl::fpmath_mode::strict);
#if DNNL_VERSION_MAJOR >= 3
  return {engine,      kInference, kDirect,    source,    weight,    bias,
          destination, strides,    pad_before, pad_after, attributes};
#else
  const dnnl::convolution_forward::desc convolution(kInference, kDirect, source, weight, bias,
                                                    destination, strides, pad_before, pad_after);
  return {convolution, attributes, engine};
#endif
}

/// "oneDNN 2.6.3, AVX-512"
std::string DescribeOneDnn();

/// Whether this CPU multiplies bf16 numbers (AVX512-BF16 or AMX).
bool MultipliesBf16();

}  // namespace denoised::cpu
