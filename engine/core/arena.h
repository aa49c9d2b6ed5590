// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "engine/core/tensor.h"

namespace denoised {

/// Allocates activations inside one block that was itself allocated at load. A tensor's memory
/// returns to the arena with its last copy; since one stream executes in order, the next op may
/// reuse it at once. The same sequence of calls gets the same addresses, so a captured graph
/// stays valid, and a dry run with a Measuring() arena computes how large the block must be.
///
/// Best fit, first on ties. Not thread-safe: belongs to the thread that owns the device.
class Arena {
 public:
  static constexpr size_t kAlignment = 256;

  /// An arena without memory: its tensors have addresses that must not be touched.
  static Arena Measuring(Device device);
  /// Carves `block` (u8, at least peak() of the measuring run).
  explicit Arena(Tensor block);
  Arena(Arena&&) noexcept;
  Arena& operator=(Arena&&) noexcept;
  ~Arena();

  /// CHECKs that the block suffices: it was measured with the same calls.
  Tensor New(const Shape& shape, DType dtype);

  /// Most bytes in use at one time since construction, gaps included.
  size_t peak() const;
  /// Bytes in use now.
  size_t in_use() const;

 private:
  struct State;
  explicit Arena(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace denoised
