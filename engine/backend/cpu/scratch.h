#pragma once

#include <cstddef>
#include <memory>

namespace denoised::cpu {

/// Working memory that grows to the largest request and is then reused: an op takes it, and is done
/// with it on return. Throws std::bad_alloc.
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
