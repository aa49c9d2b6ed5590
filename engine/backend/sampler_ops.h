// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "engine/core/step_plan.h"
#include "engine/core/tensor.h"

/// The ops of samplers: from the slots of images in flight to the rows of an evaluation, and back.
/// Like the ops of networks (network_ops.h), they only enqueue, and a row's bits do not depend on
/// the batch.

namespace denoised {

/// The state of all images in flight: slot s is row s of each tensor.
struct SlotState {
  Tensor x;           // F32 [S, H, W, C]
  Tensor registers;   // F32 [S, kRegisters, H, W, C]
  Tensor x0;          // F32 [S, H, W, C], predicted by the latest evaluation; for previews
  Tensor plans;       // U8 [S, max evaluations · sizeof(DeviceEvaluation)]
  Tensor evaluation;  // I32 [S], index of the next evaluation in the slot's plan
  Tensor nonfinite;  // I32 [S], the first evaluation (1-based) whose predicted x0, before clipping,
                     // or next state has NaN or infinity; 0: none had
  Tensor seed;       // I64 [S], the bits of a uint64
  Tensor guidance;   // F32 [S, kGuidanceNumbers]: step_plan.h's Guidance
  Tensor embedding;  // optional F32 [S, D]: class vector ("identity") or class value ("timestep")
  // For images with a mask; read only if the slot's plan has one.
  Tensor known;  // optional F32 [S, 2, H, W, C]: the init image, and the initial noise
  Tensor mask;   // with `known`: F32 [S, H, W], 1 where the image is drawn anew
  /// Optional F32 [S, H, W, E]: channels that the model reads after those of the state.
  Tensor extra;
};
constexpr int kGuidanceNumbers = sizeof(Guidance) / sizeof(float);

/// One row of an evaluation. Uploaded as I32 [rows, kRowNumbers].
struct EvaluationRow {
  int32_t slot;   // −1: padding, computes zeros and affects no other row
  int32_t label;  // class index, when the model has a table of classes; the number of the condition
                  // set, when it reads text
  int32_t unconditional_row;   // guidance: the row with the unconditional output; −1 without
  int32_t advances;            // 1: this row advances its slot; 0: it is only an unconditional row
  int32_t imageless_row = -1;  // guidance by an image: the unconditional row with no_extra set
  int32_t no_extra = 0;        // 1: zeros in place of the slot's extra channels
};
constexpr int kRowNumbers = sizeof(EvaluationRow) / sizeof(int32_t);
// cuda/sampling.cu repeats the fields, and rows are compared as bytes.
static_assert(kRowNumbers == 6 && std::has_unique_object_representations_v<EvaluationRow>);

struct BeginSlotArgs {
  SlotState state;
  int slot = 0;
  Tensor source;  // optional F32 [H, W, C] (init image), device memory
  Tensor noise;   // optional F32 [H, W, C] instead of Philox draw kInitialDraw
  float source_scale = 0, noise_scale = 1, churn_scale = 0, shift = 0;
  bool keeps_known = false;  // source and the initial noise go into state.known
  // x = source_scale·source + noise_scale·noise + churn_scale·noise' + shift; registers and x0
  // zero, evaluation and nonfinite 0. state.seed must hold the slot's seed already.
};

struct GatherArgs {
  SlotState state;
  Tensor rows;       // I32 [R, kRowNumbers]: EvaluationRow
  Tensor x;          // activation dtype [R, H, W, C + E]: the plan's input, then state.extra
  Tensor condition;  // F32 [R]
  Tensor label;      // optional I32 [R]
  Tensor embedding;  // optional F32 [R, D]; zeros for rows that only serve as unconditional
};

struct MeasureOutputsArgs {
  SlotState state;
  Tensor rows;          // I32 [R, kRowNumbers]
  Tensor model_output;  // F32 [R, H, W, C] or [R, H, W, 2C]
  /// F32 [R, 2]: step_plan.h's OutputFactors.
  /// `guidance`, of a row that advances and is guided with rescale φ > 0: φ · std(F_c) / std(F) + 1
  /// − φ, where F is the guided output and std the standard deviation of a whole image, unbiased
  /// (arXiv 2305.08891). 1 for all others, and where std(F) is 0.
  /// `norm_ratio`, of a row that advances and whose evaluation has NoiseScale::kNormRatio: ‖noise‖
  /// / ‖F‖, where F has the factor above; infinite where F is 0. 1 for all others.
  Tensor factors;
};
constexpr int kOutputFactors = sizeof(OutputFactors) / sizeof(float);

struct AdvanceArgs {
  SlotState state;
  Tensor rows;          // I32 [R, kRowNumbers]
  Tensor model_output;  // F32 [R, H, W, C], or [R, H, W, 2C] with learned variance
  Tensor factors;       // F32 [R, 2] of MeasureOutputs(); without, all are 1
  // F is Guided() of the row's output and its unconditional rows'; a learned variance is the
  // conditional row's. Then step_plan.h's formulas; evaluation += 1.
};

class SamplerOps {
 public:
  virtual ~SamplerOps() = default;

  virtual void BeginSlot(const BeginSlotArgs& args) = 0;
  virtual void Gather(const GatherArgs& args) = 0;
  virtual void MeasureOutputs(const MeasureOutputsArgs& args) = 0;
  virtual void Advance(const AdvanceArgs& args) = 0;
};

}  // namespace denoised
