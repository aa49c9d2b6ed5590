// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/scratch.h"

#include <new>

namespace denoised::cpu {

void* Scratch::TakeBytes(size_t bytes) {
  constexpr std::align_val_t kAlignment{64};
  if (bytes > size_) {
    block_.reset();
    size_ = 0;
    block_ = std::shared_ptr<void>(::operator new(bytes, kAlignment),
                                   [](void* p) { ::operator delete(p, kAlignment); });
    size_ = bytes;
  }
  return block_.get();
}

}  // namespace denoised::cpu
