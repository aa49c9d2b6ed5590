// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

/// Instructions of compute capability 9.0, one function each: TMA, mbarriers, wgmma, clusters and
/// distributed shared memory. See the PTX ISA, 9.7.

namespace denoised::cuda {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// True in one thread of the calling warp, always the same one. Use it directly as a condition. If
/// it is stored in a variable, the compiler no longer knows that a single thread runs, and loops
/// over all lanes.
__device__ inline bool ElectOne() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

/// The calling thread's warp. The shuffle tells the compiler that it is uniform: descriptors live
/// in uniform registers.
__device__ inline int UniformWarp() {
  return __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
}
/// `shared`, known to be uniform. Without the shuffle, the compiler would compute it again in every
/// step.
__device__ inline unsigned char* UniformShared(unsigned char* shared) {
  return static_cast<unsigned char*>(
      __cvta_shared_to_generic(__shfl_sync(~0u, SharedAddress(shared), 0)));
}

// mbarriers: a phase ends when `arrivals` threads and all expected bytes have arrived.

__device__ inline void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}
/// Makes initialised barriers visible to TMA and to the other CTAs of the cluster.
__device__ inline void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void ArriveExpectTx(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ inline void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
/// Arrives on the same barrier of another CTA of the cluster. Orders only this thread's completed
/// reads; a release at cluster scope would wait for all of its stores.
__device__ inline void ArriveAt(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(SharedAddress(barrier)),
      "r"(rank)
      : "memory");
}
/// Waits until the phase of this parity has ended.
__device__ inline void Wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// Clusters.

__device__ inline uint32_t ClusterRank() {
#if __CUDA_ARCH__ >= 900
  return __clusterRelativeBlockRank();
#else
  return 0;  // also compiled for other architectures, but never called there
#endif
}
/// All threads of the cluster arrive. After WaitForCluster() their earlier writes are visible. A
/// warp that arrived in two pieces, as after a part that one of its threads runs, would count
/// twice.
__device__ inline void ArriveAtCluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
/// The same without ordering writes other than FenceBarrierInit()'s.
__device__ inline void ArriveAtClusterRelaxed() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ inline void WaitForCluster() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
/// The address of the same variable in another CTA's shared memory (mapa).
__device__ inline uint32_t ClusterAddress(const void* mine, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(SharedAddress(mine)), "r"(rank));
  return remote;
}
/// st.async into another CTA's shared memory; that CTA's barrier counts the bytes.
__device__ inline void StoreAsync(uint32_t address, uint32_t barrier, float a, float b) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(address),
      "f"(a), "f"(b), "r"(barrier)
      : "memory");
}
__device__ inline void StoreAsync(uint32_t address, uint32_t barrier, const float4& v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
/// Wait() for stores of other CTAs.
__device__ inline void WaitForStores(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// TMA.

__device__ inline void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// A box of a tensor of rank 4, innermost coordinate first.
__device__ inline void TmaLoad(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1,
                               int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
/// The same, multicast to the same address in every CTA of the cluster whose bit is set in
/// `blocks`; each CTA's own barrier counts the bytes.
__device__ inline void TmaLoadMulticast(void* to, const CUtensorMap* map, uint64_t* barrier, int c0,
                                        int c1, int c2, int c3, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}
/// L2 cache hints, as createpolicy returns them for whole copies.
constexpr uint64_t kEvictFirst = 0x12f0000000000000, kEvictLast = 0x14f0000000000000;
/// TmaLoad() with such a hint.
template <uint64_t kPolicy>
__device__ inline void TmaLoadWithHint(void* to, const CUtensorMap* map, uint64_t* barrier, int c0,
                                       int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(kPolicy)
      : "memory");
}
/// TmaLoad() of weights, evict first: they are read once per evaluation.
__device__ inline void TmaLoadWeights(void* to, const CUtensorMap* map, uint64_t* barrier, int c0,
                                      int c1, int c2, int c3) {
  TmaLoadWithHint<kEvictFirst>(to, map, barrier, c0, c1, c2, c3);
}
/// im2col: one tap of a convolution for consecutive outputs. Loads channels, starting at `channel`,
/// of consecutive pixels of [images, height, width, channels], the first one at (image, y, x) plus
/// (offset_y, offset_x).
__device__ inline void TmaLoadIm2col(void* to, const CUtensorMap* map, uint64_t* barrier,
                                     int channel, int x, int y, int image, uint16_t offset_x,
                                     uint16_t offset_y) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(channel), "r"(x), "r"(y), "r"(image),
      "h"(offset_x), "h"(offset_y)
      : "memory");
}

/// TmaLoad() and TmaStore() for rank 2.
__device__ inline void TmaLoad(void* to, const CUtensorMap* map, uint64_t* barrier, int c0,
                               int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1)
      : "memory");
}
__device__ inline void TmaStore(const CUtensorMap* map, const void* from, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(SharedAddress(from)), "r"(c0), "r"(c1)
      : "memory");
}
/// The same for rank 4.
__device__ inline void TmaStore(const CUtensorMap* map, const void* from, int c0, int c1, int c2,
                                int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(SharedAddress(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
/// Rank 5.
__device__ inline void TmaLoad(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1,
                               int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ inline void TmaStore(const CUtensorMap* map, const void* from, int c0, int c1, int c2,
                                int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(SharedAddress(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ inline void TmaStoreCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until this thread's stores have read shared memory, so that it can be overwritten.
__device__ inline void TmaStoreWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Orders ordinary stores to shared memory before the async proxy (TMA, wgmma).
__device__ inline void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Four matrices of 8 × 8 bf16 to shared memory, as LoadMatrices() of mma.cuh loads them.
__device__ inline void StoreMatrices(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
/// The four warps of a warpgroup wait for each other.
__device__ inline void SyncWarpgroup(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// setmaxnreg: producers need few registers, consumers many.

template <int kRegisters>
__device__ inline void DecreaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void IncreaseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Matrix products of a warpgroup: [64, 16] × [N, 16]ᵀ added to [64, N] in registers. Thread t of
// the warpgroup holds two rows, row = 16·(t/32) + t%32/4 and row + 8, and two of every eight
// columns: d[4·j + 2·h + i] is row + 8·h, column 8·j + 2·(t%4) + i.

/// Descriptor of a matrix with rows of 128 bytes (64 elements of bf16) in TMA's 128-byte swizzle,
/// the first at a multiple of 1024 bytes. For each 32 bytes along k (16 elements of bf16), add 2.
constexpr uint64_t kMatrixDescriptor = uint64_t{1} << 62 |          // 128-byte swizzle
                                       uint64_t{1024 >> 4} << 32 |  // between groups of 8 rows
                                       uint64_t{1} << 16;           // unused
__device__ inline uint64_t MatrixDescriptor(const void* tile) {
  return kMatrixDescriptor | (SharedAddress(tile) & 0x3ffff) >> 4;
}
/// Call before the first product that reads registers or shared memory written by this thread.
__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Keeps the compiler from moving computations on accumulators across this point. It does not know
/// that a wgmma reads and writes them later than its place in the code.
template <int kCount>
__device__ inline void PinAccumulators(float (&accumulators)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}
/// Declares accumulators that the next wgmma overwrites, so they need no value.
template <int kCount>
__device__ inline void AnyAccumulators(float (&accumulators)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(accumulators[i]));
}
__device__ inline void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending groups are pending.
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define DENOISED_LIST_4 "%0,%1,%2,%3"
#define DENOISED_LIST_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define DENOISED_LIST_32 \
  DENOISED_LIST_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DENOISED_LIST_64                                             \
  DENOISED_LIST_32                                                   \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DENOISED_LIST_80 \
  DENOISED_LIST_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define DENOISED_LIST_96 \
  DENOISED_LIST_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define DENOISED_LIST_128                                                   \
  DENOISED_LIST_96                                                          \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110" \
  ",%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124"  \
  ",%125,%126,%127"
#define DENOISED_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DENOISED_SUMS_8(d, i)                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define DENOISED_SUMS_16(d, i) DENOISED_SUMS_8(d, i), DENOISED_SUMS_8(d, i + 8)
#define DENOISED_SUMS_32(d, i) DENOISED_SUMS_16(d, i), DENOISED_SUMS_16(d, i + 16)
#define DENOISED_SUMS_64(d, i) DENOISED_SUMS_32(d, i), DENOISED_SUMS_32(d, i + 32)
#define DENOISED_SUMS_80(d, i) DENOISED_SUMS_64(d, i), DENOISED_SUMS_16(d, i + 64)
#define DENOISED_SUMS_96(d, i) DENOISED_SUMS_64(d, i), DENOISED_SUMS_32(d, i + 64)
#define DENOISED_SUMS_128(d, i) DENOISED_SUMS_64(d, i), DENOISED_SUMS_64(d, i + 64)
#define DENOISED_LIST_20 DENOISED_LIST_16 ",%16,%17,%18,%19"
#define DENOISED_LIST_40 DENOISED_LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define DENOISED_LIST_48 DENOISED_LIST_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define DENOISED_SUMS_20(d, i) \
  DENOISED_SUMS_16(d, i), "+f"(d[i + 16]), "+f"(d[i + 17]), "+f"(d[i + 18]), "+f"(d[i + 19])
#define DENOISED_SUMS_40(d, i) DENOISED_SUMS_32(d, i), DENOISED_SUMS_8(d, i + 32)
#define DENOISED_SUMS_48(d, i) DENOISED_SUMS_32(d, i), DENOISED_SUMS_16(d, i + 32)
/// n outputs, r = n / 2 registers; a, b and p: the numbers of the asm operands after those. Without
/// `add` the product overwrites them, so that the first of a sum needs no zeros. y is [n, k].
/// `scales`: of the operands, and for bf16 that neither is transposed.
#define DENOISED_WGMMA(Name, types, scales, n, r, a, b, p)                           \
  __device__ inline void Name(float(&d)[r], uint64_t x, uint64_t y, bool add) {      \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #p                         \
                 ", 0;\n"                                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #n types " {" DENOISED_LIST_##r \
                 "}, %" #a ", %" #b ", add, " scales ";\n}"                          \
                 : DENOISED_SUMS_##r(d, 0)                                           \
                 : "l"(x), "l"(y), "r"(static_cast<int>(add)));                      \
  }
#define DENOISED_WGMMA_BF16(...) \
  DENOISED_WGMMA(Wgmma, "k16.f32.bf16.bf16", "1, 1, 0, 0", __VA_ARGS__)
DENOISED_WGMMA_BF16(32, 16, 16, 17, 18)
DENOISED_WGMMA_BF16(64, 32, 32, 33, 34)
DENOISED_WGMMA_BF16(80, 40, 40, 41, 42)
DENOISED_WGMMA_BF16(96, 48, 48, 49, 50)
DENOISED_WGMMA_BF16(128, 64, 64, 65, 66)
DENOISED_WGMMA_BF16(160, 80, 80, 81, 82)
DENOISED_WGMMA_BF16(192, 96, 96, 97, 98)
DENOISED_WGMMA_BF16(256, 128, 128, 129, 130)

/// The same of e4m3, [64, 32] × [n, 32]ᵀ. Rows in shared memory have 128 elements; for each 32
/// along k, add 2 to the descriptors. Sums keep about 14 bits of fraction.
#define DENOISED_WGMMA_E4M3(...) DENOISED_WGMMA(WgmmaE4m3, "k32.f32.e4m3.e4m3", "1, 1", __VA_ARGS__)
DENOISED_WGMMA_E4M3(32, 16, 16, 17, 18)
DENOISED_WGMMA_E4M3(128, 64, 64, 65, 66)
DENOISED_WGMMA_E4M3(160, 80, 80, 81, 82)
DENOISED_WGMMA_E4M3(192, 96, 96, 97, 98)

/// Both operands from shared memory with m and n innermost, by TransposedDescriptor().
#define DENOISED_WGMMA_TRANSPOSED(...) \
  DENOISED_WGMMA(WgmmaTransposed, "k16.f32.bf16.bf16", "1, 1, 1, 1", __VA_ARGS__)
DENOISED_WGMMA_TRANSPOSED(8, 4, 4, 5, 6)
DENOISED_WGMMA_TRANSPOSED(64, 32, 32, 33, 34)
DENOISED_WGMMA_TRANSPOSED(192, 96, 96, 97, 98)

/// x from registers, in the layout of accumulators, two per word.
#define DENOISED_WGMMA_REGISTERS_FROM_ZERO(n, r, x0, x1, x2, x3, b, p)                          \
  __device__ inline void Wgmma(float(&d)[r], const uint32_t* x, uint64_t y, bool add) {         \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #p                                    \
                 ", 0;\n"                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" DENOISED_LIST_##r \
                 "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, %" #b ", add, 1, 1, 0;\n}"       \
                 : DENOISED_SUMS_##r(d, 0)                                                      \
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y),                          \
                   "r"(static_cast<int>(add)));                                                 \
  }
DENOISED_WGMMA_REGISTERS_FROM_ZERO(64, 32, 32, 33, 34, 35, 36, 37)

/// The same; y is [16, n] with n innermost, by TransposedDescriptor().
#define DENOISED_WGMMA_REGISTERS(n, r, x0, x1, x2, x3, y0)                                      \
  __device__ inline void Wgmma(float(&d)[r], const uint32_t* x, uint64_t y) {                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" DENOISED_LIST_##r \
                 "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, %" #y0 ", 1, 1, 1, 1;"           \
                 : DENOISED_SUMS_##r(d, 0)                                                      \
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));                         \
  }
DENOISED_WGMMA_REGISTERS(40, 20, 20, 21, 22, 23, 24)
DENOISED_WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36)
DENOISED_WGMMA_REGISTERS(80, 40, 40, 41, 42, 43, 44)
DENOISED_WGMMA_REGISTERS(128, 64, 64, 65, 66, 67, 68)
DENOISED_WGMMA_REGISTERS(160, 80, 80, 81, 82, 83, 84)
DENOISED_WGMMA_REGISTERS(256, 128, 128, 129, 130, 131, 132)

/// Descriptor of bf16 [16, n] with n innermost: 64 columns are rows of 128 bytes in TMA's 128-byte
/// swizzle, and the next 64 columns are `next_columns` bytes further. For each 16 rows, add 128.
__device__ inline uint64_t TransposedDescriptor(const void* tile, uint32_t next_columns) {
  return MatrixDescriptor(tile) - (uint64_t{1} << 16) + (uint64_t{next_columns >> 4} << 16);
}

// Named barriers, by number; 0 is __syncthreads(). Whole warps arrive or wait.

__device__ inline void NamedBarrierSync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void NamedBarrierArrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace denoised::cuda
