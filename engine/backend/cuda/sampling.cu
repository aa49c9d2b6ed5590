// The sampler on the device: begin a slot, gather slots into the rows of an evaluation, move them
// on. The formulas are step_plan.h's; one kernel runs every sampler.
//
// Policy. A thread owns four neighbouring elements of an image, the four normals of one Philox
// block, so noise depends on (seed, evaluation, element) alone. The index of the evaluation moves
// on in a launch of its own, after every element has read it.

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/core/philox.h"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kOwned = 4;  // elements a thread owns

unsigned Blocks(int64_t elements) {
  return static_cast<unsigned>((elements + kOwned * kThreads - 1) / (kOwned * kThreads));
}

/// backend.h's EvaluationRow.
struct Row {
  int32_t slot, label, unconditional_row, advances;
};

__device__ int EvaluationOf(const SlotsLaunch& slots, int slot) {
  // A slot past its plan is the caller's bug; it must not read beyond the table.
  return max(0, min(slots.evaluation[slot], slots.max_evaluations - 1));
}
__device__ const DeviceEvaluation& PlanOf(const SlotsLaunch& slots, int slot, int evaluation) {
  const auto* plans = reinterpret_cast<const unsigned char*>(slots.plans);
  return reinterpret_cast<const DeviceEvaluation*>(plans + slot * slots.plan_bytes)[evaluation];
}

__global__ void __launch_bounds__(kThreads)
    BeginSlotKernel(const __grid_constant__ SlotsLaunch slots, int slot, const float* source,
                    const float* noise, float source_scale, float noise_scale, float churn_scale) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (block == 0) slots.evaluation[slot] = 0;
  const int64_t base = slot * slots.elements;
  const uint64_t seed = static_cast<uint64_t>(slots.seed[slot]);
  const Normal4 initial = PhiloxNormal(seed, kInitialDraw, block);
  const Normal4 churn = PhiloxNormal(seed, kInitialChurnDraw, block);
  for (int j = 0; j < kOwned; ++j) {
    const int64_t i = block * kOwned + j;
    if (i >= slots.elements) return;
    const float drawn = noise != nullptr ? noise[i] : initial.v[j];
    // A scale of zero means absent: it must not turn an infinity of the request's tensor into NaN.
    float x = noise_scale != 0 ? noise_scale * drawn : 0.0f;
    if (source != nullptr) x += source_scale * source[i];
    if (churn_scale != 0) x += churn_scale * churn.v[j];
    slots.x[base + i] = x;
    slots.x0[base + i] = 0;
    for (int r = 0; r < kRegisters; ++r) {
      slots.registers[(static_cast<int64_t>(slot) * kRegisters + r) * slots.elements + i] = 0;
    }
  }
}

/// grid (blocks over an image, rows).
__global__ void __launch_bounds__(kThreads)
    GatherKernel(const __grid_constant__ SlotsLaunch slots, const Row* rows, Rows x,
                 float* condition, int32_t* label, float* embedding) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int row = blockIdx.y;
  const Row what = rows[row];
  const bool padding = what.slot < 0;
  const DeviceEvaluation* plan =
      padding ? nullptr : &PlanOf(slots, what.slot, EvaluationOf(slots, what.slot));

  for (int j = 0; j < kOwned; ++j) {
    const int64_t i = thread * kOwned + j;
    if (i >= slots.elements) break;
    Store(x, row, i, padding ? 0.0f : plan->input_scale * slots.x[what.slot * slots.elements + i]);
  }
  if (thread == 0) {
    condition[row] = padding ? 0.0f : plan->condition;
    if (label != nullptr) label[row] = padding ? 0 : what.label;
  }
  if (embedding != nullptr) {
    const bool zero = padding || what.advances == 0;
    for (int64_t i = thread; i < slots.embedding_dim; i += threads) {
      embedding[static_cast<int64_t>(row) * slots.embedding_dim + i] =
          zero ? 0.0f : slots.embedding[static_cast<int64_t>(what.slot) * slots.embedding_dim + i];
    }
  }
}

/// The factor of the noise column: 1, or what the model learned (step_plan.h's NoiseScale).
__device__ float NoiseFactor(const DeviceEvaluation& plan, float learned) {
  switch (plan.noise_scale) {
    case NoiseScale::kFixed:
      return 1.0f;
    case NoiseScale::kLearned:
      return sqrtf(learned);
    case NoiseScale::kLearnedRange: {
      const float f = 0.5f * (learned + 1.0f);
      return expf(0.5f * (f * plan.log_variance_max + (1.0f - f) * plan.log_variance_min));
    }
  }
  return 1.0f;
}

/// grid (blocks over an image, rows).
__global__ void __launch_bounds__(kThreads)
    AdvanceKernel(const __grid_constant__ SlotsLaunch slots, const Row* rows,
                  const float* model_output, int model_channels) {
  WaitForPredecessors();
  ReleaseDependents();
  const Row what = rows[blockIdx.y];
  if (what.slot < 0 || what.advances == 0) return;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (block * kOwned >= slots.elements) return;

  const int evaluation = EvaluationOf(slots, what.slot);
  const DeviceEvaluation& plan = PlanOf(slots, what.slot, evaluation);
  const int64_t base = static_cast<int64_t>(what.slot) * slots.elements;
  const int64_t output_elements = slots.elements / slots.channels * model_channels;
  const float* conditional = model_output + blockIdx.y * output_elements;
  const float* unconditional = what.unconditional_row < 0
                                   ? nullptr
                                   : model_output + what.unconditional_row * output_elements;
  const float guidance = slots.guidance[what.slot];

  bool noisy = false;
  for (int o = 0; o < kPlanOutputs; ++o) noisy |= plan.weights[o][kInputNoise] != 0;
  Normal4 noise = {};
  if (noisy) noise = PhiloxNormal(static_cast<uint64_t>(slots.seed[what.slot]), evaluation, block);

  for (int j = 0; j < kOwned; ++j) {
    const int64_t i = block * kOwned + j;
    if (i >= slots.elements) return;
    const int64_t at = i / slots.channels * model_channels + i % slots.channels;
    float model = conditional[at];
    if (unconditional != nullptr) {
      model = unconditional[at] + guidance * (model - unconditional[at]);
    }
    const float x = slots.x[base + i];
    float x0 = plan.x0_from_x * x + plan.x0_from_model * model;
    if (plan.clip > 0) x0 = fminf(fmaxf(x0, -plan.clip), plan.clip);

    float in[kPlanInputs];
    in[kInputX] = x;
    in[kInputModel] = model;
    in[kInputX0] = x0;
    // A learned variance is the conditional row's own: guidance extrapolates the mean alone.
    const bool learns = model_channels > slots.channels;
    in[kInputNoise] =
        noisy ? noise.v[j] * NoiseFactor(plan, learns ? conditional[at + slots.channels] : 1.0f)
              : 0.0f;
    float* registers = slots.registers + base * kRegisters + i;
    for (int r = 0; r < kRegisters; ++r) in[kInputRegister + r] = registers[r * slots.elements];

    for (int o = 0; o < kPlanOutputs; ++o) {
      float sum = 0;
      for (int k = 0; k < kPlanInputs; ++k) {
        // A weight of zero means absent, whatever the other side holds.
        if (plan.weights[o][k] != 0) sum = fmaf(plan.weights[o][k], in[k], sum);
      }
      float* to =
          o == kOutputX ? slots.x + base + i : registers + (o - kOutputRegister) * slots.elements;
      *to = sum;
    }
    slots.x0[base + i] = x0;
  }
}

__global__ void CountEvaluationKernel(int32_t* evaluation, const Row* rows, int count) {
  WaitForPredecessors();
  ReleaseDependents();
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row < count && rows[row].slot >= 0 && rows[row].advances != 0) ++evaluation[rows[row].slot];
}

}  // namespace

cudaError_t LaunchBeginSlot(const SlotsLaunch& slots, int slot, const float* source,
                            const float* noise, float source_scale, float noise_scale,
                            float churn_scale, const Queue& queue) {
  return LaunchDependent(BeginSlotKernel, {Blocks(slots.elements), kThreads}, queue, slots, slot,
                         source, noise, source_scale, noise_scale, churn_scale);
}

cudaError_t LaunchGather(const SlotsLaunch& slots, const int32_t* rows, int count, const Rows& x,
                         float* condition, int32_t* label, float* embedding, const Queue& queue) {
  return LaunchDependent(GatherKernel, {dim3(Blocks(slots.elements), count), kThreads}, queue,
                         slots, reinterpret_cast<const Row*>(rows), x, condition, label, embedding);
}

cudaError_t LaunchAdvance(const SlotsLaunch& slots, const int32_t* rows, int count,
                          const float* model_output, int model_channels, const Queue& queue) {
  const Row* of_rows = reinterpret_cast<const Row*>(rows);
  if (cudaError_t error =
          LaunchDependent(AdvanceKernel, {dim3(Blocks(slots.elements), count), kThreads}, queue,
                          slots, of_rows, model_output, model_channels);
      error != cudaSuccess) {
    return error;
  }
  return LaunchDependent(CountEvaluationKernel, {dim3((count + kThreads - 1) / kThreads), kThreads},
                         queue, slots.evaluation, of_rows, count);
}

cudaError_t LoadSamplingKernels() {
  for (cudaError_t error : {LoadKernel(BeginSlotKernel), LoadKernel(GatherKernel),
                            LoadKernel(AdvanceKernel), LoadKernel(CountEvaluationKernel)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace denoised::cuda
