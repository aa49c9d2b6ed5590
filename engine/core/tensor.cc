// SPDX-License-Identifier: Apache-2.0
#include "engine/core/tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <new>

namespace denoised {

size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kF16:
      return 2;
    case DType::kBF16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kI32:
      return 4;
    case DType::kU8:
      return 1;
  }
  return 0;
}

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBF16:
      return "BF16";
    case DType::kI64:
      return "I64";
    case DType::kI32:
      return "I32";
    case DType::kU8:
      return "U8";
  }
  return "?";
}

Shape::Shape(std::initializer_list<int64_t> dims)
    : Shape(std::span<const int64_t>(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const int64_t> dims) : rank_(static_cast<int>(dims.size())) {
  DENOISED_CHECK(dims.size() <= kMaxRank, "rank {}", dims.size());
  for (int i = 0; i < rank_; ++i) dims_[i] = dims[i];
}

int64_t Shape::elements() const {
  int64_t count = 1;
  for (int i = 0; i < rank_; ++i) count *= dims_[i];
  return count;
}

bool Shape::operator==(const Shape& other) const {
  if (rank_ != other.rank_) return false;
  for (int i = 0; i < rank_; ++i)
    if (dims_[i] != other.dims_[i]) return false;
  return true;
}

std::string Shape::ToString() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) text += fmt::format("{}{}", i ? ", " : "", dims_[i]);
  return text + "]";
}

Tensor::Tensor(void* data, const Shape& shape, DType dtype, Device device,
               std::shared_ptr<const void> storage)
    : data_(data),
      shape_(shape),
      dtype_(dtype),
      device_(device),
      row_stride_(shape.rank() ? shape[-1] : 1),
      storage_(std::move(storage)) {}

Tensor Tensor::Host(const Shape& shape, DType dtype) {
  constexpr std::align_val_t kAlignment{64};
  const size_t bytes = std::max<size_t>(1, shape.elements() * SizeOf(dtype));
  void* data = ::operator new(bytes, kAlignment);
  return Tensor(data, shape, dtype, Device::kCpu,
                std::shared_ptr<const void>(data, [](const void* p) {
                  ::operator delete(const_cast<void*>(p), kAlignment);
                }));
}

Tensor Tensor::HostF32(const Shape& shape, std::span<const float> values) {
  Tensor tensor = Host(shape, DType::kF32);
  DENOISED_CHECK(values.size() == static_cast<size_t>(shape.elements()));
  std::copy(values.begin(), values.end(), tensor.as<float>());
  return tensor;
}

Tensor Tensor::Reshape(const Shape& shape) const {
  DENOISED_CHECK(contiguous() && shape.elements() == elements(), "{} as {}", shape_.ToString(),
                 shape.ToString());
  return Tensor(data_, shape, dtype_, device_, storage_);
}

Tensor Tensor::Slice(int64_t begin, int64_t count) const {
  DENOISED_CHECK(contiguous() && begin >= 0 && count >= 0 && begin + count <= shape_[0]);
  int64_t dims[Shape::kMaxRank];
  for (int i = 0; i < shape_.rank(); ++i) dims[i] = i == 0 ? count : shape_[i];
  const size_t row_bytes = shape_[0] ? bytes() / shape_[0] : 0;
  return Tensor(static_cast<std::byte*>(data_) + begin * row_bytes,
                Shape(std::span<const int64_t>(dims, shape_.rank())), dtype_, device_, storage_);
}

Tensor Tensor::Columns(int64_t begin, int64_t count) const {
  DENOISED_CHECK(begin >= 0 && count >= 0 && begin + count <= shape_[-1]);
  int64_t dims[Shape::kMaxRank];
  for (int i = 0; i < shape_.rank(); ++i) dims[i] = shape_[i];
  dims[shape_.rank() - 1] = count;
  Tensor view(static_cast<std::byte*>(data_) + begin * SizeOf(dtype_),
              Shape(std::span<const int64_t>(dims, shape_.rank())), dtype_, device_, storage_);
  view.row_stride_ = row_stride_;
  return view;
}

std::vector<float> Tensor::ToFloats() const {
  DENOISED_CHECK(device_ == Device::kCpu && contiguous());
  std::vector<float> values(elements());
  switch (dtype_) {
    case DType::kF32:
      std::copy_n(as<float>(), elements(), values.begin());
      break;
    case DType::kF16:
      for (size_t i = 0; i < values.size(); ++i) values[i] = HalfToFloat(as<uint16_t>()[i]);
      break;
    case DType::kBF16:
      for (size_t i = 0; i < values.size(); ++i) values[i] = BFloat16ToFloat(as<uint16_t>()[i]);
      break;
    default:
      DENOISED_CHECK(false, "{} is no float dtype", Name(dtype_));
  }
  return values;
}

float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

float BFloat16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00u;
  if (magnitude >= 65520.0f) return sign | 0x7c00u;
  if (magnitude < 0x1p-14f) {
    return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  }
  const uint32_t rounded = (bits & 0x7fffffffu) + 0xfffu + (bits >> 13 & 1u);
  return sign | static_cast<uint16_t>((rounded >> 13) - (112u << 10));
}

uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace denoised
