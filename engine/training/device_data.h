// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// Plain data that the host uploads and ops read; kernels, too, so this is C++17.

namespace denoised::training {

/// The numbers of one sample of a pass that the host plans, in double, before rounding. Every
/// objective is linear in the image y and the noise ε ~ N(0, 1):
///
///   x = signal·y + noise·ε + shift        target = target_signal·y + target_noise·ε
///   loss = weight · mean((output − target)²)
///
/// Uploaded as an I32 tensor [rows, kSampleNumbers]: plain data.
struct SampleRow {
  int64_t image = 0;    // index into SamplesArgs::images
  uint32_t sample = 0;  // the sample's number in the global batch, for Philox
  int32_t label = 0;    // after class dropout; −1 without labels
  int32_t flip = 0;     // 1: mirrored, left to right
  int32_t top = 0;      // of the crop, pixels
  int32_t left = 0;     //
  float signal = 1;     //
  float noise = 0;      //
  float target_signal = 0;
  float target_noise = 1;
  float condition = 0;  // what the network reads as its timestep
  float weight = 1;
  // Of a learned variance, see VarianceLossArgs.
  float mean_factor = 0;
  float log_variance_min = 0;
  float log_variance_max = 0;
  float shift = 0;
  float reserved = 0;
};
constexpr int kSampleNumbers = sizeof(SampleRow) / sizeof(int32_t);
static_assert(sizeof(SampleRow) == 72);

/// Uploaded as F32; what changes from step to step lives on the device, so that a step can be one
/// captured graph.
struct UpdateScalars {
  float rate = 0;               // learning rate of this step
  float correction1 = 1;        // 1 − β₁ᵗ
  float correction2 = 1;        // 1 − β₂ᵗ
  float average_share[8] = {};  // 1 − decay of this step, by average
  float reserved[5] = {};
};
static_assert(sizeof(UpdateScalars) == 64);

}  // namespace denoised::training
