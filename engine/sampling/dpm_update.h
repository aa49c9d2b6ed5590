// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/sampling/sigma_path.h"

/// The exponential integrators that multistep and singlestep DPM-Solver share.

namespace denoised {

/// The weights of one update: x ← x_weight·x + d0·D0 + d1·D1 + d2·D2 + noise·n, where D0, D1, D2
/// are the model's prediction and its first two derivatives in λ.
struct DpmUpdate {
  double x, d0, d1, d2, noise;
};

/// The update of `order` 1 to 3 over the step from `from` to `to`. `data_prediction`: DPM-Solver++,
/// else DPM-Solver. `heun`: solver_type "heun", else "midpoint".
DpmUpdate DpmUpdateOf(const NoiseLevel& from, const NoiseLevel& to, int order, bool data_prediction,
                      bool stochastic, bool heun);

}  // namespace denoised
