// SPDX-License-Identifier: Apache-2.0
#include "engine/io/weights.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "engine/core/status.h"

namespace denoised {

struct Weights::State {
  Safetensors tensors;
  std::string file;
  std::set<std::string> used;
  std::optional<uint64_t> synthetic_seed;
  std::map<std::string, Shape> synthetic;  // what was asked for
  bool drawn = true;                       // synthetic tensors have their numbers
  bool may_have_scales = false;
  std::optional<std::map<std::string, float>> scales;
  std::set<std::string> used_scales;
  LoadProgress progress;
};

namespace {

/// A synthetic tensor's numbers. From any number on, so that several threads may draw them.
class SyntheticNumbers {
 public:
  SyntheticNumbers(uint64_t seed, const std::string& name, const Shape& shape, int64_t first = 0) {
    const bool vector = shape.rank() < 2;
    const double fan_in = vector ? 1 : static_cast<double>(shape.elements() / shape[0]);
    spread_ = vector ? 0.5f : static_cast<float>(std::sqrt(3.0 / fan_in));
    center_ = vector && !name.ends_with("bias") ? 1.0f : 0.0f;
    state_ = seed;
    for (const char c : name) state_ = (state_ ^ static_cast<uint8_t>(c)) * 0x100000001b3u;  // FNV
    // `first` steps of the generator as one, by squaring.
    uint64_t factor = kFactor, summand = kSummand;
    for (auto steps = static_cast<uint64_t>(first); steps > 0; steps >>= 1) {
      if (steps & 1) state_ = state_ * factor + summand;
      summand += factor * summand;
      factor *= factor;
    }
  }
  float Next() {
    state_ = state_ * kFactor + kSummand;
    return center_ + spread_ * (static_cast<float>(state_ >> 40) * 0x1p-23f - 1.0f);
  }

 private:
  static constexpr uint64_t kFactor = 6364136223846793005u;  // Knuth's MMIX generator
  static constexpr uint64_t kSummand = 1442695040888963407u;
  uint64_t state_;
  float spread_, center_;
};

Tensor SyntheticTensor(uint64_t seed, const std::string& name, const Shape& shape) {
  Tensor tensor = Tensor::Host(shape, DType::kF32);
  SyntheticNumbers numbers(seed, name, shape);
  for (float& value : tensor.span<float>()) value = numbers.Next();
  return tensor;
}

Tensor Zeros(const Shape& shape) {
  void* const data = std::calloc(static_cast<size_t>(shape.elements()), sizeof(float));
  DENOISED_CHECK(data != nullptr, "no memory for {}", shape.ToString());
  return Tensor(data, shape, DType::kF32, Device::kCpu, std::shared_ptr<void>(data, std::free));
}

/// Characters that two names share at their beginnings and ends. The name in a checkpoint usually
/// differs from the expected one in one part in the middle, or in a number.
size_t SharedEnds(const std::string& a, const std::string& b) {
  const auto front = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  const auto back = std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend());
  return static_cast<size_t>((front.first - a.begin()) + (back.first - a.rbegin()));
}

std::string ClosestNames(const Safetensors& tensors, const std::string& wanted) {
  constexpr size_t kShown = 3;
  std::vector<std::pair<size_t, std::string>> ranked;
  for (const auto& [name, tensor] : tensors.tensors())
    ranked.emplace_back(SharedEnds(name, wanted), name);
  const size_t shown = std::min(kShown, ranked.size());
  std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(shown),
                    ranked.end(), [](const auto& a, const auto& b) {
                      return a.first != b.first ? a.first > b.first : a.second < b.second;
                    });
  std::string text;
  for (size_t i = 0; i < shown; ++i)
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", ranked[i].second);
  return text.empty() ? "none" : text;
}

/// FNV-1a over words of eight bytes in place of bytes. Each step maps different hashes to different
/// ones, and different words too.
class Hash {
 public:
  void Add(const void* data, size_t bytes) {
    const auto* from = static_cast<const char*>(data);
    for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), from += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, from, sizeof(word));
      Add(word);
    }
    uint64_t rest = 0;
    std::memcpy(&rest, from, bytes);
    Add(rest);
  }
  void Add(uint64_t word) { value_ = (value_ ^ word) * 0x100000001b3u; }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

/// Reads a mapped tensor from its file, so that its pages are in memory.
void ReadPages(const Tensor& tensor) {
  constexpr size_t kPageBytes = 4096;
  const auto* const bytes = static_cast<const volatile char*>(tensor.data());
  for (size_t at = 0; at < tensor.bytes(); at += kPageBytes) (void)bytes[at];
  if (tensor.bytes() > 0) (void)bytes[tensor.bytes() - 1];
}

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

/// Layers of attention, and their names before diffusers 0.18.
constexpr std::pair<std::string_view, std::string_view> kOldNames[] = {
    {"to_q", "query"}, {"to_k", "key"}, {"to_v", "value"}, {"to_out.0", "proj_attn"}};

/// The name that a layer of attention had then; of other layers, its own.
std::string OldLayer(std::string layer) {
  for (const auto& [now, before] : kOldNames) {
    if (!layer.ends_with(now)) continue;
    const size_t begin = layer.size() - now.size();
    if (begin == 0 || layer[begin - 1] == '.') return layer.replace(begin, now.size(), before);
  }
  return layer;
}

/// The tensor of this name, or else of the old one.
auto Find(const Safetensors& file, const std::string& name) {
  const auto found = file.tensors().find(name);
  if (found != file.tensors().end()) return found;
  const size_t dot = std::min(name.rfind('.'), name.size());
  return file.tensors().find(OldLayer(name.substr(0, dot)) + name.substr(dot));
}

}  // namespace

Weights::Weights(Safetensors tensors, std::string file)
    : state_(std::make_shared<State>(State{std::move(tensors), std::move(file)})) {}

Weights Weights::Synthetic(uint64_t seed) {
  Weights weights(Safetensors(), "synthetic weights");
  weights.state_->synthetic_seed = seed;
  return weights;
}

Weights Weights::SyntheticToWrite(uint64_t seed) {
  Weights weights = Synthetic(seed);
  weights.state_->drawn = false;
  return weights;
}

Weights::Weights(std::shared_ptr<State> state, std::string prefix)
    : state_(std::move(state)), prefix_(std::move(prefix)) {}

std::string Weights::Full(std::string_view name) const {
  return prefix_.empty() ? std::string(name) : fmt::format("{}.{}", prefix_, name);
}

Weights Weights::operator/(std::string_view name) const { return Weights(state_, Full(name)); }
Weights Weights::operator/(int index) const { return *this / std::to_string(index); }

const std::string& Weights::file() const { return state_->file; }

bool Weights::Has(std::string_view name) const {
  return Find(state_->tensors, Full(name)) != state_->tensors.tensors().end();
}

void Weights::Ignore(std::string_view name) const { state_->used.insert(Full(name)); }

absl::StatusOr<Tensor> Weights::Get(std::string_view name, const Shape& shape) const {
  if (state_->synthetic_seed) {
    state_->synthetic.insert_or_assign(Full(name), shape);
    if (!state_->drawn) return Zeros(shape);
    return SyntheticTensor(*state_->synthetic_seed, Full(name), shape);
  }
  const auto found = Find(state_->tensors, Full(name));
  if (found == state_->tensors.tensors().end())
    return NotFound(
        "{}: no tensor '{}', which the config asks for with shape {}; the closest there are: {}",
        file(), Full(name), shape.ToString(), ClosestNames(state_->tensors, Full(name)));
  const Tensor& tensor = found->second;
  if (tensor.shape() != shape)
    return InvalidArgument(
        "{}: tensor '{}' has shape {}, but the config asks for {}; config and weights do not "
        "belong together",
        file(), found->first, tensor.shape().ToString(), shape.ToString());
  if (!IsFloat(tensor.dtype()))
    return InvalidArgument("{}: tensor '{}' is {}; expected F32, F16 or BF16", file(), found->first,
                           Name(tensor.dtype()));
  state_->used.insert(found->first);
  if (state_->progress) {
    state_->progress(LoadPart::kFiles);
    ReadPages(tensor);
    state_->progress(LoadPart::kDevice);
  }
  return tensor;
}

absl::Status Weights::WriteSynthetic(const std::string& path, DType dtype, int threads) const {
  DENOISED_CHECK(IsFloat(dtype), "{}", Name(dtype));
  std::map<std::string, TensorType> types;
  for (const auto& [name, shape] : state_->synthetic) types[name] = {shape, dtype};
  const auto draw = [&](const std::string& name, int64_t first, int64_t count, void* to) {
    SyntheticNumbers numbers(*state_->synthetic_seed, name, state_->synthetic.at(name), first);
    const auto fill = [&](auto* values, auto convert) {
      for (int64_t i = 0; i < count; ++i) values[i] = convert(numbers.Next());
    };
    if (dtype == DType::kF32) fill(static_cast<float*>(to), [](float value) { return value; });
    if (dtype == DType::kF16) fill(static_cast<uint16_t*>(to), FloatToHalf);
    if (dtype == DType::kBF16) fill(static_cast<uint16_t*>(to), FloatToBFloat16);
  };
  return WriteSafetensors(path, types, {}, draw, threads);
}

absl::Status Weights::CheckAllUsed() const {
  constexpr size_t kShown = 5;
  std::vector<std::string> unused;
  for (const auto& [name, tensor] : state_->tensors.tensors())
    if (!state_->used.count(name)) unused.push_back(name);
  if (state_->scales) {
    for (const auto& [layer, scale] : *state_->scales)
      if (!state_->used_scales.count(layer)) unused.push_back("the scale of " + layer);
  }
  if (unused.empty()) return absl::OkStatus();
  const size_t count = unused.size();
  if (count > kShown) {
    unused.resize(kShown);
    unused.emplace_back("...");
  }
  return InvalidArgument(
      "{}: {} tensors or scales have no place in the model that the config describes ({}); config "
      "and "
      "weights do not belong together",
      file(), count, fmt::join(unused, ", "));
}

void Weights::SetProgress(LoadProgress progress) const { state_->progress = std::move(progress); }

void Weights::SetInputScales(std::optional<std::map<std::string, float>> scales) const {
  state_->may_have_scales = true;
  state_->scales = std::move(scales);
}

bool Weights::MayHaveInputScales() const { return state_->may_have_scales; }

absl::StatusOr<float> Weights::InputScale() const {
  if (!state_->scales) return 0;
  auto found = state_->scales->find(prefix_);
  // Earlier versions calibrated layers under their names in the file.
  if (found == state_->scales->end()) found = state_->scales->find(OldLayer(prefix_));
  if (found == state_->scales->end())
    return NotFound("{}: the calibration has no scale for layer '{}'; calibrate the model again",
                    file(), prefix_);
  state_->used_scales.insert(found->first);
  return found->second;
}

std::string Weights::Fingerprint() const {
  if (state_->progress) state_->progress(LoadPart::kFiles);
  Hash hash;
  for (const auto& [name, tensor] : state_->tensors.tensors()) {
    hash.Add(name.data(), name.size());
    hash.Add(static_cast<uint64_t>(tensor.dtype()));
    for (int i = 0; i < tensor.shape().rank(); ++i) hash.Add(static_cast<uint64_t>(tensor.dim(i)));
    hash.Add(tensor.data(), tensor.bytes());
  }
  return fmt::format("{:016x}", hash.value());
}

int64_t Weights::parameters() const {
  int64_t count = 0;
  for (const auto& [name, shape] : state_->synthetic) count += shape.elements();
  for (const auto& [name, tensor] : state_->tensors.tensors())
    if (IsFloat(tensor.dtype())) count += tensor.elements();
  return count;
}

}  // namespace denoised
