// SPDX-License-Identifier: Apache-2.0
#pragma once

// GCC compiles such a function once for each level of x86-64 and lets the loader choose. The
// sanitizers' runtimes are not up yet when the loader asks. A source with floats needs
// -ffp-contract=off, or levels with FMA give other bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(DENOISED_SANITIZED)
#define DENOISED_EACH_ISA \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DENOISED_EACH_ISA
#endif
