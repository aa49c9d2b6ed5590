// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/onednn.h"

#include <fmt/format.h>

namespace denoised::cpu {

namespace {

/// The ISAs are bit sets that grow from one generation to the next.
bool Has(dnnl::cpu_isa wanted) {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  return (isa & static_cast<unsigned>(wanted)) == static_cast<unsigned>(wanted);
}

}  // namespace

bool MultipliesBf16() { return Has(dnnl::cpu_isa::avx512_core_bf16); }

std::string DescribeOneDnn() {
  const dnnl_version_t* version = dnnl_version();
  const char* name = Has(dnnl::cpu_isa::avx512_core) ? "AVX-512"
                     : Has(dnnl::cpu_isa::avx2)      ? "AVX2"
                     : Has(dnnl::cpu_isa::sse41)     ? "SSE4.1"
                                                     : "baseline ISA";
  return fmt::format("oneDNN {}.{}.{}, {}", version->major, version->minor, version->patch, name);
}

}  // namespace denoised::cpu
