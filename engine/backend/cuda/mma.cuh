// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

/// The PTX instructions of the tensor-core path, for sm_80 and later. PTX ISA 9.0, "Matrix
/// instructions" and "Asynchronous copy".

namespace denoised::cuda {

/// 16 bytes from global to shared memory; zeros if `valid` is false (`from` is not read then).
__device__ inline void CopyAsync16(void* to, const void* from, bool valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
/// The same if `wanted`, else nothing. Without a branch, because the compiler does not interleave
/// instructions across one.
__device__ inline void CopyAsync16If(bool wanted, void* to, const void* from, bool valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, %2;\n}\n" ::"r"(address),
      "l"(from), "r"(valid ? 16 : 0), "r"(static_cast<int>(wanted))
      : "memory");
}
/// The same for 4 bytes.
__device__ inline void CopyAsync4(void* to, const void* from, bool valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(address), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
/// Waits until at most `kPending` of this thread's latest groups are pending.
template <int kPending>
__device__ inline void WaitCopies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// Four 8×8 matrices of bf16; lane 8i + j passes the address of row j of matrix i. Lane l receives
/// elements 2(l mod 4) and 2(l mod 4) + 1 of row l / 4 of each matrix.
__device__ inline void LoadMatrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ inline void LoadMatrices(uint32_t (&r)[4], const __nv_bfloat16* row) {
  LoadMatrices(r, static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}
/// The same; each matrix is transposed.
__device__ inline void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ inline void LoadMatricesTransposed(uint32_t (&r)[4], const __nv_bfloat16* row) {
  LoadMatricesTransposed(r, static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}

/// c += a · b on 16×8×16: a bf16 row-major, b bf16 column-major (two registers), c fp32. Lane l
/// holds of c row l / 4 (c[0], c[1]) and l / 4 + 8 (c[2], c[3]), columns 2(l mod 4) and the next.
__device__ inline void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// The same on 16×8×32 in e4m3, four numbers where bf16 has two. From sm_89 on. There, sums keep
/// about 14 bits of fraction.
__device__ inline void MultiplyE4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
#if __CUDA_ARCH__ >= 890
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/// Transposes in a quad of lanes. Lane i holds part i of each of four vectors, v[j · kPart …] of
/// vector j, as accumulators do; afterwards it holds vector i.
template <typename T, int kCount>
__device__ inline void ExchangeInQuad(T (&v)[kCount]) {
  constexpr int kPart = kCount / 4;
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool high = (lane & bit) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((j & bit) != 0) continue;
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        T &low_vector = v[kPart * j + i], &high_vector = v[kPart * (j + bit) + i];
        const T low = low_vector, of_high = high_vector;
        const T received = __shfl_xor_sync(~0u, high ? low : of_high, bit);
        low_vector = high ? received : low;
        high_vector = high ? of_high : received;
      }
    }
  }
}

}  // namespace denoised::cuda
