// SPDX-License-Identifier: Apache-2.0
#include "engine/core/arena.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace denoised {
namespace {
// A measuring arena starts at an address that is aligned, not null, and never mapped.
constexpr uintptr_t kNowhere = uintptr_t{1} << 46;
}  // namespace

struct Arena::State {
  std::byte* base = nullptr;
  size_t capacity = 0;
  Device device = Device::kCpu;
  std::shared_ptr<const void> storage;
  std::map<size_t, size_t> free;  // offset → length, neighbours merged
  size_t peak = 0;
  size_t in_use = 0;

  size_t Take(size_t bytes) {
    // The last gap counts as endless, so that the choice does not depend on the capacity: a block
    // sized by a measuring run must give the same addresses as that run.
    auto best = free.end();
    size_t best_length = 0;
    for (auto it = free.begin(); it != free.end(); ++it) {
      const bool last = it->first + it->second == capacity;
      const size_t length = last ? std::numeric_limits<size_t>::max() : it->second;
      if (it->second < bytes || (best != free.end() && length >= best_length)) continue;
      best = it;
      best_length = length;
    }
    DENOISED_CHECK(best != free.end(), "arena of {} bytes cannot give {}", capacity, bytes);
    const size_t offset = best->first, rest = best->second - bytes;
    free.erase(best);
    if (rest) free[offset + bytes] = rest;
    peak = std::max(peak, offset + bytes);
    in_use += bytes;
    return offset;
  }

  void Return(size_t offset, size_t bytes) {
    in_use -= bytes;
    auto [it, inserted] = free.emplace(offset, bytes);
    if (auto next = std::next(it); next != free.end() && offset + it->second == next->first) {
      it->second += next->second;
      free.erase(next);
    }
    if (it != free.begin()) {
      auto previous = std::prev(it);
      if (previous->first + previous->second == offset) {
        previous->second += it->second;
        free.erase(it);
      }
    }
  }
};

Arena::Arena(std::shared_ptr<State> state) : state_(std::move(state)) {}

Arena Arena::Measuring(Device device) {
  auto state = std::make_shared<State>();
  state->base = reinterpret_cast<std::byte*>(kNowhere);
  state->capacity = size_t{1} << 46;
  state->device = device;
  state->free[0] = state->capacity;
  return Arena(std::move(state));
}

Arena::Arena(Tensor block) : state_(std::make_shared<State>()) {
  state_->base = static_cast<std::byte*>(block.data());
  state_->capacity = block.bytes();
  state_->device = block.device();
  state_->storage = std::make_shared<Tensor>(std::move(block));
  if (state_->capacity) state_->free[0] = state_->capacity;
}

Arena::Arena(Arena&&) noexcept = default;
Arena& Arena::operator=(Arena&&) noexcept = default;
Arena::~Arena() = default;

Tensor Arena::New(const Shape& shape, DType dtype) {
  const size_t wanted = std::max<size_t>(1, shape.elements() * SizeOf(dtype));
  const size_t bytes = (wanted + kAlignment - 1) / kAlignment * kAlignment;
  const size_t offset = state_->Take(bytes);
  auto lease = std::shared_ptr<const void>(
      state_->base + offset,
      [state = state_, offset, bytes](const void*) { state->Return(offset, bytes); });
  return Tensor(state_->base + offset, shape, dtype, state_->device, std::move(lease));
}

size_t Arena::peak() const { return state_->peak; }
size_t Arena::in_use() const { return state_->in_use; }

}  // namespace denoised
