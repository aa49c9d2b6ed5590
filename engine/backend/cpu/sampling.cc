// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
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

/// A row's output after guidance, element by element of the image.
class GuidedOutput {
 public:
  GuidedOutput(const SlotState& state, const Tensor& rows, const Tensor& model_output,
               const EvaluationRow& row, int64_t r)
      : channels_(state.x.dim(3)), out_channels_(model_output.dim(3)) {
    const int64_t elements = ImageElements(state) / channels_ * out_channels_;
    const auto of_row = [&](int64_t other) {
      DENOISED_CHECK(other < rows.dim(0), "unconditional row {} of {}", other, rows.dim(0));
      return other >= 0 ? model_output.as<float>() + other * elements : nullptr;
    };
    conditional_ = of_row(r);
    unconditional_ = of_row(row.unconditional_row);
    imageless_ = of_row(row.imageless_row);
    const float* numbers = state.guidance.as<float>() + row.slot * kGuidanceNumbers;
    guidance_ = {.scale = numbers[0], .image_scale = numbers[1], .rescale = numbers[2]};
  }

  const Guidance& guidance() const { return guidance_; }
  bool guided() const { return unconditional_ != nullptr; }
  float Conditional(int64_t element) const { return conditional_[At(element)]; }
  float Variance(int64_t element) const { return conditional_[At(element) + channels_]; }
  float operator()(int64_t element) const {
    const int64_t at = At(element);
    const float c = conditional_[at];
    if (unconditional_ == nullptr) return c;
    return imageless_ == nullptr ? Guided(guidance_, c, unconditional_[at])
                                 : Guided(guidance_, c, unconditional_[at], imageless_[at]);
  }

 private:
  int64_t At(int64_t element) const {
    return element / channels_ * out_channels_ + element % channels_;
  }

  int64_t channels_, out_channels_;
  const float *conditional_, *unconditional_, *imageless_;
  Guidance guidance_;
};

/// The unbiased standard deviation of `value` of each element.
template <typename Value>
double StandardDeviation(int64_t elements, Value value) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < elements; ++i) sum += value(i);
  const double mean = sum / static_cast<double>(elements);
  for (int64_t i = 0; i < elements; ++i) squares += (value(i) - mean) * (value(i) - mean);
  return std::sqrt(squares / static_cast<double>(elements - 1));
}

OutputFactors* FactorsOf(const Tensor& factors) {
  return reinterpret_cast<OutputFactors*>(factors.as<float>());
}

/// ‖noise‖ / ‖F‖ of an image's evaluation. F is `guided` times `factor`.
double NormRatio(const SlotState& state, int32_t slot, const GuidedOutput& guided, float factor) {
  const auto seed = static_cast<uint64_t>(state.seed.as<int64_t>()[slot]);
  const auto draw = static_cast<uint32_t>(state.evaluation.as<int32_t>()[slot]);
  const int64_t elements = ImageElements(state);
  double of_noise = 0, of_output = 0;
  for (int64_t begin = 0; begin < elements; begin += kBlock) {
    const int64_t length = std::min(kBlock, elements - begin);
    float noise[kBlock];
    Noise(seed, draw, begin, length, noise);
    for (int64_t i = 0; i < length; ++i) {
      const double output = factor * guided(begin + i);
      of_noise += double{noise[i]} * noise[i];
      of_output += output * output;
    }
  }
  return std::sqrt(of_noise / of_output);
}

/// Advances one slot by row `r` of the model's output.
void AdvanceRow(const AdvanceArgs& args, const EvaluationRow& row, int64_t r) {
  const SlotState& state = args.state;
  const int64_t elements = ImageElements(state), channels = state.x.dim(3);
  const int64_t out_channels = args.model_output.dim(3);
  const DeviceEvaluation& plan = EvaluationOf(state, row.slot);
  const bool learned =
      plan.noise_scale == NoiseScale::kLearned || plan.noise_scale == NoiseScale::kLearnedRange;
  DENOISED_CHECK(!learned || out_channels == 2 * channels,
                 "the plan wants a learned variance, the model has {} channels", out_channels);
  const bool uses_noise = UsesNoise(plan);
  const auto seed = static_cast<uint64_t>(state.seed.as<int64_t>()[row.slot]);
  int32_t& evaluation = state.evaluation.as<int32_t>()[row.slot];
  const GuidedOutput output(state, args.rows, args.model_output, row, r);
  const OutputFactors factors = args.factors ? FactorsOf(args.factors)[r] : OutputFactors{};
  const float model_factor = ModelFactor(plan, factors.norm_ratio);
  float* x = state.x.as<float>() + row.slot * elements;
  float* x0 = state.x0.as<float>() + row.slot * elements;
  float* registers = state.registers.as<float>() + row.slot * kRegisters * elements;
  const bool masked = HasMask(plan);
  DENOISED_CHECK(!masked || state.known.defined(), "slot {} has no place for a mask", row.slot);
  const float* image = masked ? state.known.as<float>() + row.slot * 2 * elements : nullptr;
  const float* mask = masked ? state.mask.as<float>() + row.slot * (elements / channels) : nullptr;
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
      const float f = factors.guidance * output(element);
      const float predicted = plan.x0_from_x * in[kInputX][i] + plan.x0_from_model * f;
      finite &= std::isfinite(predicted);
      in[kInputModel][i] = model_factor * f;
      in[kInputX0][i] = x0[element] = ClippedX0(plan, predicted);
      if (plan.noise_scale == NoiseScale::kFixed) continue;
      in[kInputNoise][i] *=
          NoiseFactor(plan, learned ? output.Variance(element) : 0.0f, factors.norm_ratio);
    }
    for (int o = 0; o < kPlanOutputs; ++o) {
      float next[kBlock] = {};
      for (int k = 0; k < kPlanInputs; ++k) {
        const float weight = plan.weights[o][k];
        if (weight == 0) continue;
        for (int64_t i = 0; i < length; ++i) next[i] += weight * in[k][i];
      }
      if (o == kOutputX) {
        for (int64_t i = 0; i < length && masked; ++i) {
          const int64_t element = begin + i;
          next[i] = Masked(plan, mask[element / channels], next[i], image[element],
                           image[elements + element]);
        }
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
      x[begin + i] = args.source_scale * source + args.noise_scale * noise[i] +
                     args.churn_scale * churn[i] + args.shift;
      if (!args.keeps_known) continue;
      float* known = state.known.as<float>() + args.slot * 2 * elements + begin + i;
      known[0] = source;
      known[elements] = noise[i];
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
  const int64_t channels = state.x.dim(3), extra = state.extra ? state.extra.dim(3) : 0;
  const int64_t row_elements = elements / channels * (channels + extra);
  const auto* rows = reinterpret_cast<const EvaluationRow*>(args.rows.as<int32_t>());
  ParallelFor(args.rows.dim(0), [&](int64_t r, int) {
    const EvaluationRow& row = rows[r];
    const bool active = row.slot >= 0;
    const DeviceEvaluation* plan = active ? &EvaluationOf(state, row.slot) : nullptr;
    float* to = args.x.as<float>() + r * row_elements;
    if (!active) {
      std::fill_n(to, row_elements, 0.0f);
    } else if (extra == 0) {
      const float* x = state.x.as<float>() + row.slot * elements;
      for (int64_t i = 0; i < elements; ++i) to[i] = plan->input_scale * x[i] + plan->input_shift;
    } else {
      const int64_t pixels = elements / channels;
      const float* x = state.x.as<float>() + row.slot * elements;
      const float* beside = state.extra.as<float>() + row.slot * pixels * extra;
      for (int64_t p = 0; p < pixels; ++p) {
        for (int64_t c = 0; c < channels; ++c) *to++ = plan->input_scale * *x++ + plan->input_shift;
        for (int64_t e = 0; e < extra; ++e, ++beside) *to++ = row.no_extra ? 0.0f : *beside;
      }
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

void MeasureOutputs(const MeasureOutputsArgs& args) {
  const auto* rows = reinterpret_cast<const EvaluationRow*>(args.rows.as<int32_t>());
  ParallelFor(args.rows.dim(0), [&](int64_t r, int) {
    OutputFactors& factors = FactorsOf(args.factors)[r];
    factors = {};
    if (rows[r].slot < 0 || !rows[r].advances) return;
    const GuidedOutput output(args.state, args.rows, args.model_output, rows[r], r);
    if (const float rescale = output.guidance().rescale; output.guided() && rescale != 0) {
      const int64_t elements = ImageElements(args.state);
      const double guided = StandardDeviation(elements, output);
      const double conditional =
          StandardDeviation(elements, [&](int64_t i) { return output.Conditional(i); });
      if (guided != 0)
        factors.guidance = static_cast<float>(rescale * conditional / guided + (1.0 - rescale));
    }
    if (EvaluationOf(args.state, rows[r].slot).noise_scale == NoiseScale::kNormRatio)
      factors.norm_ratio =
          static_cast<float>(NormRatio(args.state, rows[r].slot, output, factors.guidance));
  });
}

void Advance(const AdvanceArgs& args) {
  const auto* rows = reinterpret_cast<const EvaluationRow*>(args.rows.as<int32_t>());
  ParallelFor(args.rows.dim(0), [&](int64_t r, int) {
    if (rows[r].slot >= 0 && rows[r].advances) AdvanceRow(args, rows[r], r);
  });
}

}  // namespace denoised::cpu
