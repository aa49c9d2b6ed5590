// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/pipeline_sm90.cuh"

/// The main loop of a consumer warpgroup, one for all convolutions on Hopper (CUTLASS: the
/// collective mainloop's mma). What differs are the operands, a loader's other end: where the
/// matrices of a step are in shared memory, and what they keep occupied. docs/kernels.md has a
/// picture of it, and says what a run of k is: a split in bf16; in e4m3 kE4m3Run steps, or a
/// shortcut.
///
/// Sums of splits that other CTAs of a cluster have are added in two other places:
/// Consumer::Exchange() in conv3x3_sm90.cu, Outputs::Sum() in conv_few_pixels_sm90.cu.

namespace denoised::cuda {

static_assert(kStep == 64);  // 128 bytes of bf16, the widest swizzle
constexpr int kStepBytes = kStep * 2;
/// In e4m3, the steps whose products tensor cores add before their sum is added in fp32. See
/// docs/kernels.md.
constexpr int kE4m3Run = 9;

/// Issues the products of the first kSlices · 32 bytes of a step. The descriptors of a subtile's
/// input and of the next subtile's differ by `next`. `adds`: to `sums`, which else are overwritten.
template <Element kElement, int kSlices, int kSubtiles, int kAccumulators>
__device__ inline void MultiplyStep(uint64_t input, int next, uint64_t weight, bool adds,
                                    float (&sums)[kSubtiles][kAccumulators]) {
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
#pragma unroll
    for (int i = 0; i < kSubtiles; ++i) {
      const uint64_t x = input + 2 * k + i * next, y = weight + 2 * k;
      if constexpr (kElement == Element::kE4m3x2) {
        WgmmaE4m3(sums[i], x, y, adds || k > 0);
      } else {
        Wgmma(sums[i], x, y, adds || k > 0);
      }
    }
  }
  WgmmaCommit();
}

/// A consumer's place in a ring of `stages` stages, and the descriptors of what lies there.
template <int kStages, int kStageBytes>
struct StageAt {
  Pipeline<kStages> pipeline;
  int stages;
  // Descriptors of stages differ in their lower words alone. `base`: of the first stage, `lower`:
  // of this one.
  uint32_t base, lower = base;
  int stage = 0;
  uint32_t parity = 0;

  __device__ StageAt(const Pipeline<kStages>& pipeline, int stages, const void* ring)
      : pipeline(pipeline),
        stages(stages),
        base(static_cast<uint32_t>(kMatrixDescriptor) | (SharedAddress(ring) & 0x3ffff) >> 4) {}
  /// To the stage of a step, which is counted over all of this CTA's.
  __device__ void Set(int step) {
    stage = step % stages, parity = step / stages & 1;
    lower = base + stage * (kStageBytes >> 4);
  }
  __device__ void Wait() const { pipeline.ConsumerWait(stage, parity); }
  /// The matrix `bytes` after the beginning of the stage.
  __device__ uint64_t Descriptor(int bytes) const {
    return kMatrixDescriptor >> 32 << 32 | lower + (bytes >> 4);
  }
  __device__ void Advance() {
    lower += kStageBytes >> 4;
    if (++stage == stages) stage = 0, parity ^= 1, lower -= stages * (kStageBytes >> 4);
  }
};

/// Multiplies a run of `steps` steps for kSubtiles times 64 pixels. `adds`: to `sums`; otherwise
/// the first MMA overwrites them. meanwhile(step) is called while a step is multiplied,
/// before_last_wait() when all are issued.
///
/// Operands have
///   Wait(): until the next step's matrices are in shared memory;
///   Input(), NextSubtile(), Weight(): their descriptors, as for MultiplyStep();
///   IsHalf(), in e4m3: whether the second half of the step is zero;
///   Advance(): goes to the next step and returns what this one used;
///   Release(Used): lets the producer overwrite it; nothing for Used().
template <Element kElement, typename Operands, int kSubtiles, int kAccumulators, typename Meanwhile,
          typename BeforeLastWait>
__device__ inline void Mainloop(Operands& operands, int steps, bool adds,
                                float (&sums)[kSubtiles][kAccumulators], const Meanwhile& meanwhile,
                                const BeforeLastWait& before_last_wait) {
  constexpr int kSlices = kStepBytes / 32;
  typename Operands::Used used;
#pragma unroll
  for (int i = 0; i < kSubtiles; ++i) PinAccumulators(sums[i]);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    operands.Wait();
    const uint64_t input = operands.Input(), weight = operands.Weight();
    const int next = operands.NextSubtile();
    const bool adds_now = adds || step > 0;
    if (kElement == Element::kE4m3x2 && operands.IsHalf()) {
      MultiplyStep<kElement, kSlices / 2>(input, next, weight, adds_now, sums);
    } else {
      MultiplyStep<kElement, kSlices>(input, next, weight, adds_now, sums);
    }
    meanwhile(step);
    const auto before = used;
    used = operands.Advance();
    WgmmaWait<1>();
    operands.Release(before);
  }
  before_last_wait();
  WgmmaWait<0>();
#pragma unroll
  for (int i = 0; i < kSubtiles; ++i) PinAccumulators(sums[i]);
  operands.Release(used);
}

/// Adds the sums of a run to the total of those before. is_first: there are none.
template <int kSubtiles, int kAccumulators>
__device__ inline void AddRun(const float (&sums)[kSubtiles][kAccumulators], bool is_first,
                              float (&total)[kSubtiles][kAccumulators]) {
#pragma unroll
  for (int i = 0; i < kSubtiles; ++i) {
#pragma unroll
    for (int j = 0; j < kAccumulators; ++j) {
      total[i][j] = is_first ? sums[i][j] : total[i][j] + sums[i][j];
    }
  }
}

/// Multiplies the `steps` steps of a shortcut of a layer in e4m3, which are its last, in bf16, and
/// adds them to the total.
template <typename Operands, int kSubtiles, int kAccumulators>
__device__ inline void AddShortcut(int steps, Operands& operands,
                                   float (&sums)[kSubtiles][kAccumulators],
                                   float (&total)[kSubtiles][kAccumulators]) {
  Mainloop<Element::kBf16>(
      operands, steps, /*adds=*/false, sums, [](int) {}, [] {});
  AddRun(sums, /*is_first=*/false, total);
}

}  // namespace denoised::cuda
