// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/hopper.cuh"

/// The ring of stages between a producer, which loads them by TMA, and consumers, which multiply
/// them. The names are CUTLASS's (PipelineTmaAsync).

namespace denoised::cuda {

/// A position in a ring of kStages stages in shared memory, each with a barrier `full`, whose phase
/// ends when it is loaded, and `empty`, whose phase ends when it is released.
template <int kStages>
struct PipelineState {
  int stage = 0, round = 0;

  /// The parity for which a consumer waits at full[stage].
  __device__ uint32_t FullParity() const { return round & 1; }
  /// The parity for which the producer waits at empty[stage]: in the first round all are empty.
  __device__ uint32_t EmptyParity() const { return (round & 1) ^ 1; }
  /// The state after this many stages from the beginning.
  __device__ static PipelineState After(int stages) { return {stages % kStages, stages / kStages}; }
  __device__ void Advance() {
    if (++stage == kStages) stage = 0, ++round;
  }
  __device__ void Advance(int stages) {
    round += (stage + stages) / kStages;
    stage = (stage + stages) % kStages;
  }
};

/// The barriers of a ring of at most kStages stages.
template <int kStages>
struct Pipeline {
  uint64_t *full, *empty;  // [kStages]

  __device__ explicit Pipeline(uint64_t* barriers) : full(barriers), empty(barriers + kStages) {}
  __device__ uint64_t* End() const { return empty + kStages; }
  /// Called by one thread. `consumers`: how many release a stage.
  __device__ void InitStage(int stage, int consumers) const {
    InitBarrier(&full[stage], 1);
    InitBarrier(&empty[stage], consumers);
  }
  __device__ void Init(int consumers) const {
    for (int stage = 0; stage < kStages; ++stage) InitStage(stage, consumers);
  }

  __device__ void ProducerAcquire(const PipelineState<kStages>& at) const {
    Wait(&empty[at.stage], at.EmptyParity());
  }
  __device__ void ConsumerWait(int stage, uint32_t parity) const { Wait(&full[stage], parity); }
  __device__ void ConsumerWait(const PipelineState<kStages>& at) const {
    ConsumerWait(at.stage, at.FullParity());
  }
  __device__ void ConsumerRelease(int stage) const { Arrive(&empty[stage]); }
  /// Releases the stage in CTA `rank` of the cluster.
  __device__ void ConsumerRelease(int stage, int rank) const { ArriveAt(&empty[stage], rank); }
};

}  // namespace denoised::cuda
