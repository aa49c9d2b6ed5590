// SPDX-License-Identifier: Apache-2.0
// The sampler on the device: begin a slot, gather slots into the rows of an evaluation, advance
// them. The formulas are those of step_plan.h; one kernel runs every sampler.
//
// Policy. A thread owns four neighbouring elements of an image, the four normals of one Philox
// block, so noise depends on (seed, evaluation, element) alone. Bound by memory: loads are vectors
// if images are multiples of them, and registers whose weights are zero are neither read nor
// written. The index of the evaluation advances when the last block of an image has read it; its
// upper bits count the blocks.

#include <algorithm>
#include <climits>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/core/philox.h"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kOwned = 4;         // elements a thread owns
constexpr int kMostBlocks = 256;  // per image; in a larger one, threads own several times four
constexpr int kIndexBits = 20;
constexpr int kMostEvaluations = 1 << kIndexBits;
static_assert(kMostBlocks <= INT_MAX >> kIndexBits);

unsigned Blocks(int64_t elements) {
  return static_cast<unsigned>((elements + kOwned * kThreads - 1) / (kOwned * kThreads));
}

/// sampler_ops.h's EvaluationRow.
struct Row {
  int32_t slot, label, unconditional_row, advances, imageless_row, no_extra;
};

/// The index of a slot's evaluation, without the bits that count blocks.
__device__ int IndexOf(const SlotsLaunch& slots, int slot) {
  const int index = __ldcg(&slots.evaluation[slot]) & (kMostEvaluations - 1);
  // A slot past its plan is a bug of the caller; do not read beyond the table.
  return min(index, slots.max_evaluations - 1);
}
__device__ const DeviceEvaluation* PlanAt(const SlotsLaunch& slots, int slot, int index) {
  const auto* plans = reinterpret_cast<const unsigned char*>(slots.plans);
  return reinterpret_cast<const DeviceEvaluation*>(plans + slot * slots.plan_bytes) + index;
}

/// A thread's elements of an image; `vector`: all four are there, at multiples of 16 bytes.
struct Owned {
  int64_t first = 0;
  int count = 0;
  bool vector = false;
};
__device__ Owned OwnedAt(int64_t block, const SlotsLaunch& slots) {
  const int64_t first = block * kOwned;
  return {first, static_cast<int>(min(int64_t{kOwned}, slots.elements - first)), slots.vector};
}
__device__ void Load(const float* image, const Owned& owned, float (&v)[kOwned]) {
  if (owned.vector) {
    const float4 four = *reinterpret_cast<const float4*>(image + owned.first);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    return;
  }
#pragma unroll
  for (int j = 0; j < kOwned; ++j) v[j] = j < owned.count ? image[owned.first + j] : 0.0f;
}
__device__ void Store(float* image, const Owned& owned, const float (&v)[kOwned]) {
  if (owned.vector) {
    *reinterpret_cast<float4*>(image + owned.first) = make_float4(v[0], v[1], v[2], v[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < kOwned; ++j) {
    if (j < owned.count) image[owned.first + j] = v[j];
  }
}

__global__ void __launch_bounds__(kThreads)
    BeginSlotKernel(const __grid_constant__ SlotsLaunch slots, int slot, const float* source,
                    const float* noise, float source_scale, float noise_scale, float churn_scale,
                    float shift, bool keeps_known) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (block == 0) slots.evaluation[slot] = slots.nonfinite[slot] = 0;
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
    x += shift;
    slots.x[base + i] = x;
    slots.x0[base + i] = 0;
    if (keeps_known) {
      slots.known[2 * base + i] = source[i];
      slots.known[2 * base + slots.elements + i] = drawn;
    }
    for (int r = 0; r < kRegisters; ++r) {
      slots.registers[(static_cast<int64_t>(slot) * kRegisters + r) * slots.elements + i] = 0;
    }
  }
}

/// grid (blocks over an image, rows).
__global__ void __launch_bounds__(kThreads)
    GatherKernel(const __grid_constant__ SlotsLaunch slots, const Row* rows, Rows x,
                 float* condition, int32_t* label, float* embedding) {
  const int row = blockIdx.y;
  const Row what = rows[row];
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const bool padding = what.slot < 0;
  const DeviceEvaluation* plan =
      padding ? nullptr : PlanAt(slots, what.slot, IndexOf(slots, what.slot));

  if (slots.extra_channels > 0) {
    const int channels = slots.channels + slots.extra_channels;
    const int64_t pixels = slots.elements / slots.channels;
    for (int64_t i = thread; i < pixels * channels; i += threads) {
      const int64_t pixel = i / channels;
      const int channel = static_cast<int>(i % channels);
      float value = 0;
      if (!padding && channel < slots.channels) {
        value = fmaf(plan->input_scale,
                     slots.x[what.slot * slots.elements + pixel * slots.channels + channel],
                     plan->input_shift);
      } else if (!padding && what.no_extra == 0) {
        value = slots.extra[(what.slot * pixels + pixel) * slots.extra_channels + channel -
                            slots.channels];
      }
      Store(x, 0, row * pixels * channels + i, value);
    }
  } else if (const Owned owned = OwnedAt(thread, slots); owned.count > 0) {
    float v[kOwned] = {};
    if (!padding) {
      Load(slots.x + what.slot * slots.elements, owned, v);
      for (float& value : v) value = fmaf(plan->input_scale, value, plan->input_shift);
    }
    const int64_t to = row * slots.elements + owned.first;
    if (x.element == Element::kF32) {
      Store(static_cast<float*>(x.data) + row * slots.elements, owned, v);
    } else if (owned.vector) {
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(x.data) + to) =
          make_uint2(PackBf16(v[0], v[1]), PackBf16(v[2], v[3]));
    } else {
      for (int j = 0; j < owned.count; ++j) Store(x, 0, to + j, v[j]);
    }
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

/// Which weights of an evaluation are not zero: bit o · kPlanInputs + k. A weight of zero means
/// that the input is absent, even if it is not finite.
using Present = uint64_t;
constexpr int kWeights = kPlanOutputs * kPlanInputs;
static_assert(kWeights > 32 && kWeights <= 64);
__device__ constexpr Present WeightBit(int o, int k) { return Present{1} << (o * kPlanInputs + k); }
__device__ constexpr Present OutputBits(int o) {
  return ((Present{1} << kPlanInputs) - 1) << (o * kPlanInputs);
}
__device__ constexpr Present InputBits(int k) {
  Present bits = 0;
  for (int o = 0; o < kPlanOutputs; ++o) bits |= WeightBit(o, k);
  return bits;
}
/// Called by a whole warp.
__device__ Present PresentIn(const DeviceEvaluation& plan) {
  const float* weights = &plan.weights[0][0];
  const int lane = threadIdx.x % 32;
  const Present low = __ballot_sync(~0u, weights[lane] != 0);
  const Present high = __ballot_sync(~0u, lane + 32 < kWeights && weights[lane + 32] != 0);
  return high << 32 | low;
}

/// The model's outputs for an image: of its own row, and of the rows that guide it.
struct Outputs {
  const float* conditional = nullptr;
  const float* unconditional = nullptr;  // or null
  const float* imageless = nullptr;      // or null
};
__device__ Outputs OutputsOf(const Row& what, const float* model_output, int64_t elements) {
  const auto of_row = [&](int64_t row) {
    return row < 0 ? nullptr : model_output + row * elements;
  };
  return {of_row(blockIdx.y), of_row(what.unconditional_row), of_row(what.imageless_row)};
}
__device__ float GuidedAt(const Outputs& outputs, const Guidance& guidance, int64_t at) {
  const float c = outputs.conditional[at];
  if (outputs.unconditional == nullptr) return c;
  const float u = outputs.unconditional[at];
  return outputs.imageless == nullptr ? Guided(guidance, c, u)
                                      : Guided(guidance, c, u, outputs.imageless[at]);
}

/// Threads of a block that measures a row. One block per row, so that the order of sums depends on
/// the image's size alone.
constexpr int kMeasureThreads = 512;

/// The sums of two numbers over all threads of a block, returned to each thread. `shared`: two
/// numbers per warp.
__device__ float2 SumOfBlock(float2 v, float2* shared) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v.x += __shfl_xor_sync(~0u, v.x, offset);
    v.y += __shfl_xor_sync(~0u, v.y, offset);
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  float2 sum = {};
  for (int warp = 0; warp < kMeasureThreads / 32; ++warp) {
    sum.x += shared[warp].x;
    sum.y += shared[warp].y;
  }
  __syncthreads();
  return sum;
}

/// An image's outputs of the model, as the sums over them see them.
struct Measured {
  const SlotsLaunch& slots;
  Outputs outputs;
  Guidance guidance;
  int model_channels;

  __device__ int64_t At(int64_t element) const {
    return element / slots.channels * model_channels + element % slots.channels;
  }
};

/// φ · std(conditional) / std(guided) + 1 − φ. Called by a whole block.
__device__ float GuidanceFactor(const Measured& image, float2* shared) {
  const auto sum = [&](auto&& of) {  // of the conditional and of the guided output
    float2 total = {};
    for (int64_t i = threadIdx.x; i < image.slots.elements; i += kMeasureThreads) {
      const int64_t at = image.At(i);
      const float2 v = of(
          make_float2(image.outputs.conditional[at], GuidedAt(image.outputs, image.guidance, at)));
      total.x += v.x;
      total.y += v.y;
    }
    return SumOfBlock(total, shared);
  };
  const float count = static_cast<float>(image.slots.elements);
  const float2 sums = sum([](float2 v) { return v; });
  const float2 mean = make_float2(sums.x / count, sums.y / count);
  const float2 squares = sum([&](float2 v) {
    const float2 d = make_float2(v.x - mean.x, v.y - mean.y);
    return make_float2(d.x * d.x, d.y * d.y);
  });
  const float rescale = image.guidance.rescale;
  return squares.y == 0 ? 1.0f : rescale * sqrtf(squares.x / squares.y) + (1.0f - rescale);
}

/// ‖noise‖ / ‖F‖, with F = factor · guided. Called by a whole block.
__device__ float NormRatio(const Measured& image, float factor, uint64_t seed, int evaluation,
                           float2* shared) {
  float2 squares = {};  // of the noise, and of F
  const int64_t blocks = (image.slots.elements + kOwned - 1) / kOwned;
  for (int64_t block = threadIdx.x; block < blocks; block += kMeasureThreads) {
    const Normal4 noise = PhiloxNormal(seed, evaluation, block);
    for (int j = 0; j < kOwned && block * kOwned + j < image.slots.elements; ++j) {
      const float f =
          factor * GuidedAt(image.outputs, image.guidance, image.At(block * kOwned + j));
      squares.x += noise.v[j] * noise.v[j];
      squares.y += f * f;
    }
  }
  squares = SumOfBlock(squares, shared);
  return sqrtf(squares.x / squares.y);
}

/// grid (1, rows).
__global__ void __launch_bounds__(kMeasureThreads)
    MeasureOutputsKernel(const __grid_constant__ SlotsLaunch slots, const Row* rows,
                         const float* model_output, int model_channels, OutputFactors* factors) {
  __shared__ float2 shared[kMeasureThreads / 32];
  const Row what = rows[blockIdx.y];
  WaitForPredecessors();
  ReleaseDependents();
  OutputFactors measured;
  if (what.slot >= 0 && what.advances != 0) {
    const int index = IndexOf(slots, what.slot);
    const Measured image{
        slots, OutputsOf(what, model_output, slots.elements / slots.channels * model_channels),
        slots.guidance[what.slot], model_channels};
    if (what.unconditional_row >= 0 && image.guidance.rescale != 0) {
      measured.guidance = GuidanceFactor(image, shared);
    }
    if (PlanAt(slots, what.slot, index)->noise_scale == NoiseScale::kNormRatio) {
      measured.norm_ratio = NormRatio(image, measured.guidance,
                                      static_cast<uint64_t>(slots.seed[what.slot]), index, shared);
    }
  }
  if (threadIdx.x == 0) factors[blockIdx.y] = measured;
}

/// Inputs of an evaluation, at a thread's elements.
struct Inputs {
  float x[kOwned], model[kOwned], variance[kOwned];
};

/// grid (blocks over an image, rows).
__global__ void __launch_bounds__(kThreads, 3)
    AdvanceKernel(const __grid_constant__ SlotsLaunch slots, const Row* rows,
                  const float* model_output, int model_channels, const OutputFactors* factors) {
  constexpr int kWords = sizeof(DeviceEvaluation) / sizeof(uint32_t);
  __shared__ uint32_t words[2 * kWords];  // of the previous evaluation and of this one
  const Row what = rows[blockIdx.y];      // uploaded, like all of a slot but its index and images
  if (what.slot < 0 || what.advances == 0) {
    WaitForPredecessors();
    return;
  }
  const Guidance guidance = slots.guidance[what.slot];
  const uint64_t seed = static_cast<uint64_t>(slots.seed[what.slot]);
  const int64_t output_elements = slots.elements / slots.channels * model_channels;
  const Outputs outputs = OutputsOf(what, model_output, output_elements);
  float* images = slots.x + what.slot * slots.elements;
  float* registers = slots.registers + what.slot * kRegisters * slots.elements;
  float* predicted = slots.x0 + what.slot * slots.elements;
  WaitForPredecessors();
  ReleaseDependents();
  const OutputFactors measured = factors == nullptr ? OutputFactors{} : factors[blockIdx.y];

  const auto load = [&](const Owned& owned) {
    Inputs in = {};
    float unguided[kOwned] = {}, imageless[kOwned] = {};
    Load(images, owned, in.x);
    if (model_channels == slots.channels) {
      Load(outputs.conditional, owned, in.model);
      if (outputs.unconditional != nullptr) Load(outputs.unconditional, owned, unguided);
      if (outputs.imageless != nullptr) Load(outputs.imageless, owned, imageless);
    } else {  // each pixel's outputs are followed by its variances
      int channel = static_cast<int>(owned.first % slots.channels);
      int64_t at = owned.first / slots.channels * model_channels + channel;
#pragma unroll
      for (int j = 0; j < kOwned; ++j) {
        if (j >= owned.count) break;
        in.model[j] = outputs.conditional[at];
        // That of the conditional row: guidance extrapolates the mean alone.
        in.variance[j] = outputs.conditional[at + slots.channels];
        if (outputs.unconditional != nullptr) unguided[j] = outputs.unconditional[at];
        if (outputs.imageless != nullptr) imageless[j] = outputs.imageless[at];
        const bool next_pixel = ++channel == slots.channels;
        at += next_pixel ? model_channels - slots.channels + 1 : 1;
        if (next_pixel) channel = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < kOwned && outputs.unconditional != nullptr; ++j) {
      in.model[j] =
          measured.guidance * (outputs.imageless == nullptr
                                   ? Guided(guidance, in.model[j], unguided[j])
                                   : Guided(guidance, in.model[j], unguided[j], imageless[j]));
    }
    return in;
  };
  int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  Owned owned = OwnedAt(block, slots);
  Inputs in = {};
  if (owned.count > 0) in = load(owned);  // in flight while the plan is loaded

  const int index = IndexOf(slots, what.slot);
  const auto* now = reinterpret_cast<const uint32_t*>(PlanAt(slots, what.slot, index));
  for (int i = threadIdx.x; i < 2 * kWords; i += kThreads) {
    words[i] = i < kWords && index == 0 ? 0 : now[i - kWords];
  }
  __syncthreads();  // all threads have read the index
  if (threadIdx.x == 0) {
    const int arrived = atomicAdd(&slots.evaluation[what.slot], kMostEvaluations) >> kIndexBits;
    if (arrived == static_cast<int>(gridDim.x) - 1) slots.evaluation[what.slot] = index + 1;
  }
  const auto& before = reinterpret_cast<const DeviceEvaluation&>(words[0]);
  const auto& plan = reinterpret_cast<const DeviceEvaluation&>(words[kWords]);
  const Present present = PresentIn(plan);
  const bool masked = HasMask(plan), by_norms = plan.noise_scale == NoiseScale::kNormRatio;
  // The other registers hold zeros already, from BeginSlot() or an earlier evaluation.
  const Present written = present | PresentIn(before);

  bool finite = true;
  while (owned.count > 0) {
    float sums[kPlanOutputs][kOwned] = {};
    const auto add = [&](int k, const float(&input)[kOwned]) {
#pragma unroll
      for (int o = 0; o < kPlanOutputs; ++o) {
        if ((present & WeightBit(o, k)) == 0) continue;
#pragma unroll
        for (int j = 0; j < kOwned; ++j) {
          sums[o][j] = fmaf(plan.weights[o][k], input[j], sums[o][j]);
        }
      }
    };
    float x0[kOwned];
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      const float unclipped = plan.x0_from_x * in.x[j] + plan.x0_from_model * in.model[j];
      finite = finite && isfinite(unclipped);
      x0[j] = ClippedX0(plan, unclipped);
    }
    if (by_norms) {
      for (float& f : in.model) f *= ModelFactor(plan, measured.norm_ratio);
    }
    add(kInputX, in.x);
    add(kInputModel, in.model);
    add(kInputX0, x0);
    if (present & InputBits(kInputNoise)) {
      Normal4 noise = PhiloxNormal(seed, index, block);
      if (model_channels > slots.channels || by_norms) {
#pragma unroll
        for (int j = 0; j < kOwned; ++j) {
          noise.v[j] *= NoiseFactor(plan, in.variance[j], measured.norm_ratio);
        }
      }
      add(kInputNoise, noise.v);
    }
#pragma unroll
    for (int r = 0; r < kRegisters; ++r) {
      if ((present & InputBits(kInputRegister + r)) == 0) continue;
      float held[kOwned];
      Load(registers + r * slots.elements, owned, held);
      add(kInputRegister + r, held);
    }

    if (masked) {
      const float* known = slots.known + 2 * what.slot * slots.elements;
      const float* mask = slots.mask + what.slot * (slots.elements / slots.channels);
      float image[kOwned], noise[kOwned];
      Load(known, owned, image);
      Load(known + slots.elements, owned, noise);
      for (int j = 0; j < kOwned && j < owned.count; ++j) {
        const float drawn = mask[(owned.first + j) / slots.channels];
        sums[kOutputX][j] = Masked(plan, drawn, sums[kOutputX][j], image[j], noise[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      finite = finite && (j >= owned.count || isfinite(sums[kOutputX][j]));
    }
    Store(predicted, owned, x0);
    Store(images, owned, sums[kOutputX]);
#pragma unroll
    for (int r = 0; r < kRegisters; ++r) {
      if ((written & OutputBits(kOutputRegister + r)) == 0) continue;
      Store(registers + r * slots.elements, owned, sums[kOutputRegister + r]);
    }
    block += int64_t{gridDim.x} * kThreads;
    owned = OwnedAt(block, slots);
    if (owned.count > 0) in = load(owned);
  }
  // Several threads may store the same number: that of this evaluation, if it is the first.
  if (!finite && __ldcg(&slots.nonfinite[what.slot]) == 0) slots.nonfinite[what.slot] = index + 1;
}

}  // namespace

cudaError_t LaunchBeginSlot(const SlotsLaunch& slots, int slot, const float* source,
                            const float* noise, float source_scale, float noise_scale,
                            float churn_scale, float shift, bool keeps_known, const Queue& queue) {
  return LaunchDependent(BeginSlotKernel, {Blocks(slots.elements), kThreads}, queue, slots, slot,
                         source, noise, source_scale, noise_scale, churn_scale, shift, keeps_known);
}

cudaError_t LaunchGather(const SlotsLaunch& slots, const int32_t* rows, int count, const Rows& x,
                         float* condition, int32_t* label, float* embedding, const Queue& queue) {
  return LaunchDependent(GatherKernel, {dim3(Blocks(slots.elements), count), kThreads}, queue,
                         slots, reinterpret_cast<const Row*>(rows), x, condition, label, embedding);
}

cudaError_t LaunchMeasureOutputs(const SlotsLaunch& slots, const int32_t* rows, int count,
                                 const float* model_output, int model_channels,
                                 OutputFactors* factors, const Queue& queue) {
  return LaunchDependent(MeasureOutputsKernel, {dim3(1, count), kMeasureThreads}, queue, slots,
                         reinterpret_cast<const Row*>(rows), model_output, model_channels, factors);
}

cudaError_t LaunchAdvance(const SlotsLaunch& slots, const int32_t* rows, int count,
                          const float* model_output, int model_channels,
                          const OutputFactors* factors, const Queue& queue) {
  if (slots.max_evaluations > kMostEvaluations) return cudaErrorInvalidValue;
  const unsigned blocks = std::min<unsigned>(Blocks(slots.elements), kMostBlocks);
  return LaunchDependent(AdvanceKernel, {dim3(blocks, count), kThreads}, queue, slots,
                         reinterpret_cast<const Row*>(rows), model_output, model_channels, factors);
}

cudaError_t LoadSamplingKernels() {
  return LoadKernels(0, BeginSlotKernel, GatherKernel, MeasureOutputsKernel, AdvanceKernel);
}

}  // namespace denoised::cuda
