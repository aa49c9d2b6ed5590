// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/core/philox.h"

/// The sampler's ops, as step_plan.h defines them.

namespace denoised::cpu {
namespace {

/// Elements handled at a time: every input of the plan stays in L1. A multiple of Philox's four.
constexpr int64_t kBlock = 256;

int64_t ImageElements(const SlotState& state) {
  return state.x.dim(1) * state.x.dim(2) * state.x.dim(3);
}

/// The evaluation that `slot` is at.
const DeviceEvaluation& EvaluationOf(const SlotState& state, int32_t slot) {
  DENOISED_CHECK(slot < state.x.dim(0), "slot {} of {}", slot, state.x.dim(0));
  const int64_t plan_bytes = state.plans.dim(1);
  const int32_t evaluation = state.evaluation.as<int32_t>()[slot];
  DENOISED_CHECK(
      evaluation >= 0 && evaluation < plan_bytes / static_cast<int64_t>(sizeof(DeviceEvaluation)),
      "slot {} is at evaluation {}, beyond its plan", slot, evaluation);
  return reinterpret_cast<const DeviceEvaluation*>(state.plans.as<uint8_t>() +
                                                   slot * plan_bytes)[evaluation];
}

/// Standard normals for elements [begin, begin + length) of an image; `begin` a multiple of four.
void Noise(uint64_t seed, uint32_t draw, int64_t begin, int64_t length, float* noise) {
  for (int64_t i = 0; i < length; i += 4) {
    const Normal4 normal = PhiloxNormal(seed, draw, (begin + i) / 4);
    std::copy_n(normal.v, std::min<int64_t>(4, length - i), noise + i);
  }
}

bool UsesNoise(const DeviceEvaluation& plan) {
  return std::any_of(std::begin(plan.weights), std::end(plan.weights),
                     [](const auto& output) { return output[kInputNoise] != 0; });
}

/// Advances one slot by row `r` of the model's output.
void AdvanceRow(const AdvanceArgs& args, const EvaluationRow& row, int64_t r) {
  const SlotState& state = args.state;
  const int64_t elements = ImageElements(state), channels = state.x.dim(3);
  const int64_t out_channels = args.model_output.dim(3);
  const int64_t out_elements = elements / channels * out_channels;
  const DeviceEvaluation& plan = EvaluationOf(state, row.slot);
  const bool learned = plan.noise_scale != NoiseScale::kFixed;
  DENOISED_CHECK(!learned || out_channels == 2 * channels,
                 "the plan wants a learned variance, the model has {} channels", out_channels);
  DENOISED_CHECK(row.unconditional_row < args.rows.dim(0), "unconditional row {} of {}",
                 row.unconditional_row, args.rows.dim(0));
  const bool uses_noise = UsesNoise(plan);
  const auto seed = static_cast<uint64_t>(state.seed.as<int64_t>()[row.slot]);
  int32_t& evaluation = state.evaluation.as<int32_t>()[row.slot];
  const float guidance = state.guidance.as<float>()[row.slot];
  const float* output = args.model_output.as<float>();
  const float* conditional = output + r * out_elements;
  const float* unconditional =
      row.unconditional_row >= 0 ? output + row.unconditional_row * out_elements : nullptr;
  float* x = state.x.as<float>() + row.slot * elements;
  float* x0 = state.x0.as<float>() + row.slot * elements;
  float* registers = state.registers.as<float>() + row.slot * kRegisters * elements;
  bool finite = true;

  for (int64_t begin = 0; begin < elements; begin += kBlock) {
    const int64_t length = std::min(kBlock, elements - begin);
    float in[kPlanInputs][kBlock];
    std::copy_n(x + begin, length, in[kInputX]);
    for (int k = 0; k < kRegisters; ++k) {
      std::copy_n(registers + k * elements + begin, length, in[kInputRegister + k]);
    }
    if (uses_noise) {
      Noise(seed, static_cast<uint32_t>(evaluation), begin, length, in[kInputNoise]);
    } else {
      std::fill_n(in[kInputNoise], length, 0.0f);
    }
    for (int64_t i = 0; i < length; ++i) {
      const int64_t element = begin + i;
      const int64_t at = element / channels * out_channels + element % channels;
      float f = conditional[at];
      if (unconditional != nullptr) f = unconditional[at] + guidance * (f - unconditional[at]);
      const float predicted = plan.x0_from_x * in[kInputX][i] + plan.x0_from_model * f;
      finite &= std::isfinite(predicted);
      in[kInputModel][i] = f;
      in[kInputX0][i] = x0[element] = ClippedX0(plan, predicted);
      if (learned) in[kInputNoise][i] *= NoiseFactor(plan, conditional[at + channels]);
    }
    for (int o = 0; o < kPlanOutputs; ++o) {
      float next[kBlock] = {};
      for (int k = 0; k < kPlanInputs; ++k) {
        const float weight = plan.weights[o][k];
        if (weight == 0) continue;
        for (int64_t i = 0; i < length; ++i) next[i] += weight * in[k][i];
      }
      if (o == kOutputX) {
        for (int64_t i = 0; i < length; ++i) finite &= std::isfinite(next[i]);
      }
      float* to = o == kOutputX ? x : registers + (o - kOutputRegister) * elements;
      std::copy_n(next, length, to + begin);
    }
  }
  ++evaluation;
  int32_t& nonfinite = state.nonfinite.as<int32_t>()[row.slot];
  if (!finite && nonfinite == 0) nonfinite = evaluation;
}

}  // namespace

void BeginSlot(const BeginSlotArgs& args) {
  const SlotState& state = args.state;
  const int64_t elements = ImageElements(state);
  const auto seed = static_cast<uint64_t>(state.seed.as<int64_t>()[args.slot]);
  float* x = state.x.as<float>() + args.slot * elements;
  for (int64_t begin = 0; begin < elements; begin += kBlock) {
    const int64_t length = std::min(kBlock, elements - begin);
    float noise[kBlock], churn[kBlock] = {};
    if (args.noise) {
      std::copy_n(args.noise.as<float>() + begin, length, noise);
    } else {
      Noise(seed, kInitialDraw, begin, length, noise);
    }
    if (args.churn_scale != 0) Noise(seed, kInitialChurnDraw, begin, length, churn);
    for (int64_t i = 0; i < length; ++i) {
      const float source = args.source ? args.source.as<float>()[begin + i] : 0.0f;
      x[begin + i] =
          args.source_scale * source + args.noise_scale * noise[i] + args.churn_scale * churn[i];
    }
  }
  std::fill_n(state.registers.as<float>() + args.slot * kRegisters * elements,
              kRegisters * elements, 0.0f);
  std::fill_n(state.x0.as<float>() + args.slot * elements, elements, 0.0f);
  state.evaluation.as<int32_t>()[args.slot] = 0;
  state.nonfinite.as<int32_t>()[args.slot] = 0;
}

void Gather(const GatherArgs& args) {
  const SlotState& state = args.state;
  const int64_t elements = ImageElements(state);
  const int64_t features = args.embedding ? args.embedding.dim(1) : 0;
  const auto* rows = reinterpret_cast<const EvaluationRow*>(args.rows.as<int32_t>());
  ParallelFor(args.rows.dim(0), [&](int64_t r, int) {
    const EvaluationRow& row = rows[r];
    const bool active = row.slot >= 0;
    const DeviceEvaluation* plan = active ? &EvaluationOf(state, row.slot) : nullptr;
    float* to = args.x.as<float>() + r * elements;
    if (active) {
      const float* x = state.x.as<float>() + row.slot * elements;
      for (int64_t i = 0; i < elements; ++i) to[i] = plan->input_scale * x[i];
    } else {
      std::fill_n(to, elements, 0.0f);
    }
    args.condition.as<float>()[r] = active ? plan->condition : 0.0f;
    if (args.label) args.label.as<int32_t>()[r] = active ? row.label : 0;
    if (!args.embedding) return;
    float* embedding = args.embedding.as<float>() + r * features;
    if (active && row.advances) {
      std::copy_n(state.embedding.as<float>() + row.slot * features, features, embedding);
    } else {
      std::fill_n(embedding, features, 0.0f);
    }
  });
}

void Advance(const AdvanceArgs& args) {
  const auto* rows = reinterpret_cast<const EvaluationRow*>(args.rows.as<int32_t>());
  ParallelFor(args.rows.dim(0), [&](int64_t r, int) {
    if (rows[r].slot >= 0 && rows[r].advances) AdvanceRow(args, rows[r], r);
  });
}

}  // namespace denoised::cpu
