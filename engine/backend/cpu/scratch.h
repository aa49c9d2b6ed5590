// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>

namespace denoised::cpu {

/// Working memory of one thread, reused from op to op. It grows to the largest request. An op may
/// use it until it returns. Throws std::bad_alloc.
class Scratch {
 public:
  /// At least `count` elements, 64-byte aligned, uninitialised; invalidates what was taken before.
  template <typename T>
  T* Take(size_t count) {
    return static_cast<T*>(TakeBytes(count * sizeof(T)));
  }

 private:
  void* TakeBytes(size_t bytes);

  std::shared_ptr<void> block_;
  size_t size_ = 0;
};

}  // namespace denoised::cpu
