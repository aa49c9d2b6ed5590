// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/backend/compute_device.h"
#include "engine/backend/input_ranges.h"
#include "engine/backend/network_ops.h"
#include "engine/backend/sampler_ops.h"
#include "engine/core/notify.h"

namespace denoised {

/// A device and its ops. Code that needs only one of the three interfaces takes that one. cpu/
/// implements them plainly in fp32 and is the reference for tests; cuda/ fuses.
class Backend : public ComputeDevice, public NetworkOps, public SamplerOps {};

struct BackendOptions {
  std::string device = "auto";  // "auto" (CUDA if there is one), "cpu", "cuda"
  int number = 0;               // CUDA's device number; on the CPU only a part of the name
  /// CPU: the dtype in which convolutions and linears over tokens multiply, F32 or BF16; sums and
  /// activations are F32. BF16 needs AVX512-BF16 or AMX.
  DType cpu_dtype = DType::kF32;
  bool fp32 = false;  // CUDA: activations and arithmetic in fp32, for debugging
  /// CUDA: only the kernels for any GPU from compute capability 8.0 on, even if others are faster.
  bool generic_kernels = false;
  /// CUDA: for shapes that were not measured before, Capture() first measures which of the kernels
  /// that give the same bits is the fastest.
  bool autotune = false;
  std::string autotune_cache;  // directory for measured results; empty: they are not kept
  Notify notify;               // called on the thread that uses the backend; may be empty
  /// Null, or learns the ranges of layers' inputs. A GPU then fuses no norm into these layers, and
  /// tells the ranges when it is closed.
  std::shared_ptr<InputRanges> input_ranges;
};

/// InvalidArgument for an unknown name; FailedPrecondition, with the remedy, if the device does not
/// exist or this build has no CUDA.
absl::StatusOr<std::unique_ptr<Backend>> OpenBackend(const BackendOptions& options);

}  // namespace denoised
