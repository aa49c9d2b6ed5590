// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "engine/core/host_device.h"

/// Division in kernels by a number that the host knows. GPUs have no integer division instruction,
/// and the compiler's code for `/` is slow for a thread that is alone in its warp.

namespace denoised::cuda {

/// From 1 to 2³¹ − 1. n / d is n · m >> (31 + l) with l = ⌈log₂ d⌉ and m = ⌈2^(31 + l) / d⌉, exact
/// for all n from 0 to 2³¹ − 1 (Granlund and Montgomery, Division by Invariant Integers using
/// Multiplication, PLDI 1994, theorem 4.2).
struct FastDivmod {
  int value = 1;
  uint32_t multiplier = uint32_t{1} << 31;
  int shift = 0;  // l

  FastDivmod() = default;
  explicit FastDivmod(int value) : value(value) {
    if (value < 1) return;  // 0: nothing may be divided by it
    while ((int64_t{1} << shift) < value) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + value - 1) / value);
  }
};
DENOISED_HOST_DEVICE inline int operator/(int number, const FastDivmod& by) {
  const uint32_t twice = 2 * static_cast<uint32_t>(number);  // the upper word of the product is it
  return static_cast<int>(static_cast<uint32_t>(uint64_t{twice} * by.multiplier >> 32) >> by.shift);
}
DENOISED_HOST_DEVICE inline int operator%(int number, const FastDivmod& by) {
  return number - number / by * by.value;
}

}  // namespace denoised::cuda
