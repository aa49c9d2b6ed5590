// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/row_parts.h"

#include <algorithm>

namespace denoised::cpu {
namespace {

/// A part reads each weight once for all its rows: with 4 rows the sixteen digits of
/// models/mnist-32 are 4 % faster than with one. More would no longer stay in the core's cache.
constexpr int kMostRows = 4;

int DivideUp(int a, int b) { return (a + b - 1) / b; }

/// The parts that a thread takes of its `rows` rows: at least two where there are two rows, so that
/// other threads can take over from one that other programs slow down.
int Rounds(int rows) { return std::max(std::min(rows, 2), DivideUp(rows, kMostRows)); }

}  // namespace

RowSplit SplitRows(int rows, int workers) {
  // All threads get as many rows. Of the rest, few rows are computed together, each split over
  // several threads. Many are not: the barriers after each op then cost more time than the threads
  // that would have no row.
  const int rest = rows % workers;
  const int apart = 4 * rest > 3 * workers ? rows : rows - rest;
  if (apart == 0) return {};
  const int each = DivideUp(apart, workers);
  return {.apart = apart, .part = DivideUp(each, Rounds(each)), .workers = workers};
}

std::vector<RowPart> PartsOf(const RowSplit& split) {
  std::vector<RowPart> parts;
  int begin = 0, each = DivideUp(split.apart, split.workers);
  for (int round = Rounds(each); round > 0; --round) {
    const int size = DivideUp(each, round);
    each -= size;
    for (int worker = 0; worker < split.workers && begin < split.apart; ++worker) {
      const int count = std::min(size, split.apart - begin);
      parts.push_back({begin, count});
      begin += count;
    }
  }
  return parts;
}

}  // namespace denoised::cpu
