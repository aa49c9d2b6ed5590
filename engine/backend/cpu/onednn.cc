#include "engine/backend/cpu/onednn.h"

#include <fmt/format.h>

namespace denoised::cpu {

std::string DescribeOneDnn() {
  const dnnl_version_t* version = dnnl_version();
  // The ISAs are bit sets that grow from one generation to the next.
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto has = [isa](dnnl::cpu_isa wanted) {
    return (isa & static_cast<unsigned>(wanted)) == static_cast<unsigned>(wanted);
  };
  const char* name = has(dnnl::cpu_isa::avx512_core) ? "AVX-512"
                     : has(dnnl::cpu_isa::avx2)      ? "AVX2"
                     : has(dnnl::cpu_isa::sse41)     ? "SSE4.1"
                                                     : "baseline ISA";
  return fmt::format("oneDNN {}.{}.{}, {}", version->major, version->minor, version->patch, name);
}

}  // namespace denoised::cpu
