// SPDX-License-Identifier: Apache-2.0
#include "engine/training/parameters.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

#include "engine/core/available_cores.h"
#include "engine/training/random.h"

namespace denoised::training {
namespace {

constexpr int64_t kAlignment = 16;  // elements

/// FNV-1a. Selects the random numbers of a parameter by its name.
uint64_t HashOf(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

int64_t Aligned(int64_t elements) { return (elements + kAlignment - 1) / kAlignment * kAlignment; }

/// Elements [begin, end) of a parameter; `begin` is a multiple of the four that one call draws.
void Fill(const Initial& initial, uint64_t seed, uint64_t hash, int64_t begin, int64_t end,
          float* to) {
  const auto value = static_cast<float>(initial.value);
  if (initial.kind == Initial::Kind::kConstant) return std::fill(to + begin, to + end, value);
  for (int64_t i = begin; i < end; i += 4) {
    const Philox4 bits = Draw(seed, Purpose::kInitial, static_cast<uint32_t>(hash),
                              static_cast<uint32_t>(hash >> 32), static_cast<uint32_t>(i / 4));
    Normal4 drawn;
    if (initial.kind == Initial::Kind::kNormal) {
      drawn = NormalOfBits(bits);
    } else {
      for (int j = 0; j < 4; ++j) drawn.v[j] = 2 * UniformOf(bits.v[j]) - 1;
    }
    for (int64_t j = i; j < std::min(i + 4, end); ++j) to[j] = value * drawn.v[j - i];
  }
}

}  // namespace

Initial Initial::Uniform(int64_t fan_in) {
  return {Kind::kUniform, 1 / std::sqrt(static_cast<double>(fan_in))};
}

int Parameters::Add(std::string name, const Shape& shape, Initial initial, bool trained,
                    bool served) {
  int64_t& end = trained ? trained_ : fixed_;
  all_.push_back({std::move(name), shape, initial, trained, served, end});
  end += Aligned(shape.elements());
  return static_cast<int>(all_.size()) - 1;
}

void Parameters::Complain(std::string_view what) {
  if (status_.ok()) status_ = InvalidArgument("{}", what);
}

int Parameters::first_trained() const {
  int index = 0;
  while (!all_[index].trained) ++index;
  return index;
}

int64_t Parameters::count() const {
  int64_t count = 0;
  for (const Parameter& parameter : all_) count += parameter.shape.elements();
  return count;
}

Tensor Parameters::Part(const Tensor& flat, int index) const {
  const Parameter& parameter = all_[index];
  DENOISED_CHECK(parameter.offset + parameter.shape.elements() <= flat.elements());
  return Tensor(flat.as<float>() + parameter.offset, parameter.shape, DType::kF32, flat.device(),
                nullptr);
}

void Parameters::Initialize(uint64_t seed, const Tensor& trained, const Tensor& fixed) const {
  constexpr int64_t kBlock = 1 << 16;
  struct Block {
    size_t parameter;
    int64_t begin;
  };
  std::vector<Block> blocks;
  for (size_t index = 0; index < all_.size(); ++index) {
    for (int64_t begin = 0; begin < all_[index].shape.elements(); begin += kBlock)
      blocks.push_back({index, begin});
  }
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i; (i = next++) < blocks.size();) {
      const auto [index, begin] = blocks[i];
      const Parameter& parameter = all_[index];
      float* const to =
          Part(parameter.trained ? trained : fixed, static_cast<int>(index)).as<float>();
      const int64_t elements = parameter.shape.elements(), end = std::min(begin + kBlock, elements);
      Fill(parameter.initial, seed, HashOf(parameter.name), begin, end, to);
      if (end == elements) std::fill(to + elements, to + Aligned(elements), 0.0f);
    }
  };
  std::vector<std::jthread> threads;  // joined also if one of them cannot be started
  const auto workers = std::min<size_t>(AvailableCores(), blocks.size());
  for (size_t i = 1; i < workers; ++i) threads.emplace_back(work);
  work();
}

absl::Status Parameters::Read(
    const Weights& weights, const std::string& prefix,
    const std::function<void(size_t index, const std::vector<float>& values)>& take) const {
  for (size_t index = 0; index < all_.size(); ++index) {
    const Parameter& parameter = all_[index];
    if (!parameter.served || parameter.name.compare(0, prefix.size(), prefix) != 0) continue;
    const auto from = weights.Get(parameter.name.substr(prefix.size()), parameter.shape);
    if (absl::IsNotFound(from.status()))
      return NotFound("{}; take weights and config from one model",
                      std::string(from.status().message()));
    DENOISED_RETURN_IF_ERROR(from.status());
    const std::vector<float> values = from->ToFloats();
    if (!std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }))
      return InvalidArgument(
          "{}: tensor '{}' has numbers that are not finite, with which no step could be made; use "
          "other weights",
          weights.file(), parameter.name.substr(prefix.size()));
    take(index, values);
  }
  return weights.CheckAllUsed();
}

absl::Status Parameters::Check(const Weights& weights, const std::string& prefix) const {
  return Read(weights, prefix, [](size_t, const std::vector<float>&) {});
}

absl::Status Parameters::Load(const Weights& weights, const Tensor& trained, const Tensor& fixed,
                              const std::string& prefix) const {
  return Read(weights, prefix, [&](size_t index, const std::vector<float>& values) {
    std::copy(values.begin(), values.end(),
              Part(all_[index].trained ? trained : fixed, static_cast<int>(index)).as<float>());
  });
}

std::map<std::string, Tensor> Parameters::Named(const Tensor& trained, const Tensor& fixed) const {
  std::map<std::string, Tensor> named;
  for (size_t index = 0; index < all_.size(); ++index) {
    if (!all_[index].served) continue;
    named[all_[index].name] = Part(all_[index].trained ? trained : fixed, static_cast<int>(index));
  }
  return named;
}

}  // namespace denoised::training
