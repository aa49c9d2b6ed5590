// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "engine/engine.h"

namespace denoised {

/// Checks a request against a model and fills in every default. Pure: the same spec gives the same
/// result, but for a seed that is unset. On return exactly one of the two holds: `violations` is
/// empty and `job` is set, or it is not.
void ResolveJob(const ModelInfo& model, const JobSpec& spec, EffectiveJob* job,
                std::vector<FieldViolation>* violations);

}  // namespace denoised
