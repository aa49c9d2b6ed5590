// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/network_ops.h"

/// The default decomposition of a Prologue and an Epilogue. A backend calls it for parts that its
/// kernels do not fuse: each function runs one part as a separate op and returns the arguments of
/// the rest. Fused or not, the bits are the same, but for a norm before a layer in e4m3
/// (network_ops.h).

namespace denoised {

/// The norm of the input as a separate op, and the layer that reads its result.
template <typename Args>
GroupNormArgs InputNormOf(const Args& args) {
  const Prologue& prologue = args.prologue;
  return {.x = args.x, .x2 = prologue.x2, .norm = prologue.norm, .out = prologue.normed};
}
template <typename Args>
LayerNormArgs InputLayerNormOf(const Args& args) {
  const Norm& norm = args.prologue.norm;
  return {.x = args.x,
          .gamma = norm.gamma,
          .beta = norm.beta,
          .eps = norm.eps,
          .out = args.prologue.normed};
}
template <typename Args>
Args OfNormedInput(Args args) {
  args.x = args.prologue.normed;
  args.prologue = {.rounded = args.prologue.rounded, .upsample2x = args.prologue.upsample2x};
  return args;
}
/// Runs the norm of the input, if one is to be applied.
template <typename Args>
Args WithoutNorm(NetworkOps& ops, const Args& args) {
  if (!IsToBeApplied(args.prologue.norm)) return args;
  if (IsLayerNorm(args.prologue.norm)) {
    ops.LayerNorm(InputLayerNormOf(args));
  } else {
    ops.GroupNorm(InputNormOf(args));
  }
  return OfNormedInput(args);
}

/// Runs the shortcut, if there is one: its result lies in `out` and becomes the residual.
inline Conv2dArgs WithoutShortcut(NetworkOps& ops, Conv2dArgs args) {
  Conv2dShortcut& shortcut = args.epilogue.shortcut;
  if (shortcut.weight == nullptr) return args;
  ops.Conv2d({.x = shortcut.x,
              .weight = shortcut.weight,
              .prologue = {.x2 = shortcut.x2},
              .out = args.out});
  shortcut = {};
  args.epilogue.residual = args.out;
  return args;
}

/// Computes a gated layer's values and gates; NetworkOps::Gate() then computes its result.
inline LinearArgs WithoutGate(LinearArgs args) {
  args.out = args.epilogue.ungated;
  args.epilogue = {};
  return args;
}
/// Without Epilogue::reader, whose input the backend then makes of args.out.
inline void LinearThenGate(NetworkOps& ops, const LinearArgs& args) {
  ops.Linear(WithoutGate(args));
  ops.Gate(args.epilogue.ungated, args.out);
}

}  // namespace denoised
