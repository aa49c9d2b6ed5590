// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "engine/backend/compute_device.h"

namespace denoised::cpu {

/// Rows [begin, begin + count).
struct RowPart {
  int begin = 0, count = 0;
  bool operator==(const RowPart&) const = default;
};

/// How an evaluation of `rows` rows is divided over `workers` threads: see Backend::SplitRows().
RowSplit SplitRows(int rows, int workers);

/// The parts of rows [0, split.apart), in the order in which threads take them: as many rows for
/// each thread, the larger parts first.
std::vector<RowPart> PartsOf(const RowSplit& split);

}  // namespace denoised::cpu
