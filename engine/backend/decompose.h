// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/backend.h"

/// The default decomposition of a Prologue and an Epilogue. A backend calls it for what its kernels
/// do not fuse: an op of its own for the part, and the arguments of what is left. Fused or not, the
/// bits are the same.

namespace denoised {

/// The norm of the input as an op of its own, and the layer that reads its result.
template <typename Args>
GroupNormArgs InputNormOf(const Args& args) {
  const Prologue& prologue = args.prologue;
  return {.x = args.x, .x2 = prologue.x2, .norm = prologue.norm, .out = prologue.normed};
}
template <typename Args>
Args OfNormedInput(Args args) {
  args.x = args.prologue.normed;
  args.prologue = {.upsample2x = args.prologue.upsample2x};
  return args;
}
/// Runs the norm of the input, if one is to be applied.
template <typename Args>
Args WithoutNorm(Backend& backend, const Args& args) {
  if (!IsToBeApplied(args.prologue.norm)) return args;
  backend.GroupNorm(InputNormOf(args));
  return OfNormedInput(args);
}

/// Runs the shortcut, if there is one: its result lies in `out` and becomes the residual.
inline Conv2dArgs WithoutShortcut(Backend& backend, Conv2dArgs args) {
  Conv2dShortcut& shortcut = args.epilogue.shortcut;
  if (shortcut.weight == nullptr) return args;
  backend.Conv2d({.x = shortcut.x,
                  .weight = shortcut.weight,
                  .prologue = {.x2 = shortcut.x2},
                  .out = args.out});
  shortcut = {};
  args.epilogue.residual = args.out;
  return args;
}

/// A gated layer's values and gates, of which Backend::Gate() makes its result.
inline LinearArgs WithoutGate(LinearArgs args) {
  args.out = args.epilogue.ungated;
  args.epilogue = {};
  return args;
}
inline void LinearThenGate(Backend& backend, const LinearArgs& args) {
  backend.Linear(WithoutGate(args));
  backend.Gate(args.epilogue.ungated, args.out);
}

}  // namespace denoised
