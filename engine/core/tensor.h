// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/core/status.h"

namespace denoised {

enum class DType : uint8_t { kF32, kF16, kBF16, kI64, kI32, kU8 };

/// Bytes of one element.
size_t SizeOf(DType dtype);
/// safetensors' name: "F32", "F16", "BF16", "I64", "I32", "U8".
const char* Name(DType dtype);

enum class Device : uint8_t { kCpu, kCuda };

/// Extents of up to five dimensions, outermost first. Images are NHWC.
class Shape {
 public:
  static constexpr int kMaxRank = 5;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  explicit Shape(std::span<const int64_t> dims);

  int rank() const { return rank_; }
  /// Negative indices count from the end, as in NumPy.
  int64_t operator[](int i) const { return dims_[i < 0 ? i + rank_ : i]; }
  /// Product of all extents; 1 for rank 0.
  int64_t elements() const;
  bool operator==(const Shape& other) const;
  /// "[2, 32, 32, 3]"
  std::string ToString() const;

 private:
  int rank_ = 0;
  int64_t dims_[kMaxRank] = {};
};

/// A block of device or host memory seen as an array: shared storage, shape, dtype, device.
/// Row-major. Contiguous, but for the views made by Columns(), whose rows lie row_stride() elements
/// apart. Copying a Tensor copies the view, not the data. Not synchronised: one thread per device
/// owns all inference state.
class Tensor {
 public:
  Tensor() = default;
  /// `storage` keeps `data` alive; it may be null when something else does.
  Tensor(void* data, const Shape& shape, DType dtype, Device device,
         std::shared_ptr<const void> storage);

  /// Host memory, 64-byte aligned, uninitialised.
  static Tensor Host(const Shape& shape, DType dtype);
  /// A copy of `values` in host memory.
  static Tensor HostF32(const Shape& shape, std::span<const float> values);

  bool defined() const { return data_ != nullptr; }
  explicit operator bool() const { return defined(); }
  const Shape& shape() const { return shape_; }
  int64_t dim(int i) const { return shape_[i]; }
  int64_t elements() const { return shape_.elements(); }
  size_t bytes() const { return static_cast<size_t>(elements()) * SizeOf(dtype_); }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  /// Elements from one row of the last dimension to the next.
  int64_t row_stride() const { return row_stride_; }
  bool contiguous() const { return row_stride_ == (shape_.rank() ? shape_[-1] : 1); }

  void* data() const { return data_; }
  /// T must be of the dtype's size.
  template <typename T>
  T* as() const {
    DENOISED_CHECK(sizeof(T) == SizeOf(dtype_), "dtype {}", Name(dtype_));
    return static_cast<T*>(data_);
  }
  template <typename T>
  std::span<T> span() const {
    return {as<T>(), static_cast<size_t>(elements())};
  }

  /// The same elements under another shape. CHECKs that the counts match and that it is contiguous.
  Tensor Reshape(const Shape& shape) const;
  /// Rows [begin, begin + count) of the first dimension.
  Tensor Slice(int64_t begin, int64_t count) const;
  /// Elements [begin, begin + count) of the last dimension of every row; shares the storage.
  Tensor Columns(int64_t begin, int64_t count) const;

  /// Host tensors of any float dtype as fp32 values. CHECKs device and dtype.
  std::vector<float> ToFloats() const;

 private:
  void* data_ = nullptr;
  Shape shape_;
  DType dtype_ = DType::kF32;
  Device device_ = Device::kCpu;
  int64_t row_stride_ = 1;
  std::shared_ptr<const void> storage_;
};

/// IEEE 754 half and bfloat16 to float and back, round to nearest even.
float HalfToFloat(uint16_t half);
float BFloat16ToFloat(uint16_t bits);
uint16_t FloatToHalf(float value);
uint16_t FloatToBFloat16(float value);

}  // namespace denoised
