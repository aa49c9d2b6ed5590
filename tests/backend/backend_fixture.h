// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>

#include "engine/backend/backend.h"
#include "tests/backend/reference.h"
#include "tests/needs_gpu.h"

/// Runs a suite once for each backend and arithmetic: on the CPU, and on the first CUDA device in
/// bf16, with Hopper's kernels and with those for every chip, and in fp32. Without a GPU the latter
/// are skipped. A suite derives from OnBackend, uses TEST_P, and ends with
/// DENOISED_ON_EACH_BACKEND(Suite).

namespace denoised {

struct BackendUnderTest {
  std::string name;  // "Cpu", "CudaBf16", "CudaFp32"
  BackendOptions options;
};

inline void PrintTo(const BackendUnderTest& backend, std::ostream* out) { *out << backend.name; }

inline std::vector<BackendUnderTest> CudaBackends() {
  return {{"Bf16", {.device = "cuda"}},
          {"Bf16Generic", {.device = "cuda", .generic_kernels = true}},
          {"Fp32", {.device = "cuda", .fp32 = true}}};
}

inline std::string BackendName(const testing::TestParamInfo<BackendUnderTest>& info) {
  return info.param.name;
}

#define DENOISED_ON_EACH_BACKEND(Suite)                                                       \
  INSTANTIATE_TEST_SUITE_P(                                                                   \
      Cpu, Suite, testing::Values(BackendUnderTest{"Fp32", {.device = "cpu"}}), BackendName); \
  INSTANTIATE_TEST_SUITE_P(Cuda, Suite, testing::ValuesIn(CudaBackends()), BackendName)

class OnBackend : public testing::TestWithParam<BackendUnderTest> {
 protected:
  using Array = reference::Array;

  void SetUp() override {
    // Opening a CUDA device takes a while; the tests of one binary share it.
    static std::map<std::string, std::unique_ptr<Backend>> opened;
    const BackendOptions& options = GetParam().options;
    if (options.device == "cuda") DENOISED_NEEDS_GPU();
    std::unique_ptr<Backend>& backend = opened[options.device + Name(options.cpu_dtype) +
                                               (options.fp32              ? "/fp32"
                                                : options.generic_kernels ? "/generic"
                                                                          : "")];
    if (backend == nullptr) {
      auto result = OpenBackend(options);
      ASSERT_TRUE(result.ok()) << result.status();
      backend = std::move(result).value();
    }
    backend_ = backend.get();
  }

  void TearDown() override {
    if (backend_ != nullptr) {
      EXPECT_TRUE(backend_->Synchronize().ok()) << backend_->Synchronize();
      for (const Tensor& row : scratch_guards_) {
        const Tensor guard = Download(row);
        for (uint8_t byte : guard.span<uint8_t>())
          ASSERT_EQ(byte, kScratch) << "written beyond the end of a Scratch()";
      }
    }
  }

  Backend& backend() { return *backend_; }
  /// Of the test's own, or null when that is gone.
  void Use(Backend* backend) { backend_ = backend; }
  DType activation() const { return backend_->activation_dtype(); }
  bool fp32() const { return activation() == DType::kF32; }
  /// Whether Hopper's own kernels run.
  bool on_hopper() {
    const std::string description = backend().description();
    return !fp32() && !GetParam().options.generic_kernels &&
           (description.find("H100") != std::string::npos ||
            description.find("H200") != std::string::npos);
  }
  /// The op's tolerance in fp32, or 1e-2 in bf16: its rounding of operands and results alone is
  /// 2⁻⁹ each.
  double Tolerance(double in_fp32) const { return fp32() ? in_fp32 : 1e-2; }

  /// Values as they will be on the device, so that uploading them rounds nothing.
  Array Rounded(Array array, DType dtype) const {
    for (double& value : array.values) value = Round(value, dtype);
    return array;
  }
  /// Normal values.
  Array Random(const Shape& shape, DType dtype, double scale = 1, double mean = 0) {
    std::normal_distribution<double> normal(mean, scale);
    Array array(shape);
    for (double& value : array.values) value = Round(normal(random_), dtype);
    return array;
  }
  Array Random(const Shape& shape) { return Random(shape, activation()); }
  int64_t RandomInt(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool Coin() { return RandomInt(0, 1) == 1; }

  static Tensor ToHost(const Array& array, DType dtype) {
    Tensor host = Tensor::Host(array.shape, dtype);
    for (int64_t i = 0; i < array.shape.elements(); ++i) Store(host, i, array.at(i));
    return host;
  }
  Tensor Allocate(const Shape& shape, DType dtype) {
    auto tensor = backend_->Allocate(shape, dtype, "a test");
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    return std::move(tensor).value();
  }
  Tensor Upload(const Tensor& host) {
    Tensor tensor = Allocate(host.shape(), host.dtype());
    backend_->Upload(host.data(), host.bytes(), tensor);
    return tensor;
  }
  Tensor Upload(const Array& array, DType dtype) { return Upload(ToHost(array, dtype)); }
  Tensor Upload(const Array& array) { return Upload(array, activation()); }
  /// An undefined tensor for an undefined array.
  Tensor UploadOptional(const Array& array) { return array.defined() ? Upload(array) : Tensor(); }
  Tensor UploadInts(const std::vector<int32_t>& values, const Shape& shape) {
    Tensor tensor = Allocate(shape, DType::kI32);
    backend_->Upload(values.data(), values.size() * sizeof(int32_t), tensor);
    return tensor;
  }
  /// `array` as the middle columns of a wider tensor whose other columns are NaN.
  Tensor UploadAsColumns(const Array& array, int64_t before, int64_t after) {
    const int64_t columns = array.shape[-1], rows = array.shape.elements() / columns;
    int64_t dims[Shape::kMaxRank];
    for (int i = 0; i < array.shape.rank(); ++i) dims[i] = array.shape[i];
    dims[array.shape.rank() - 1] = before + columns + after;
    Array wide(Shape(std::span<const int64_t>(dims, array.shape.rank())));
    std::fill(wide.values.begin(), wide.values.end(), NAN);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        wide.at(r * (before + columns + after) + before + c) = array.at(r * columns + c);
      }
    }
    return Upload(wide).Columns(before, columns);
  }
  /// A result to be: NaN, with one more row of NaN behind it that Read() finds untouched.
  Tensor Output(const Shape& shape, DType dtype) {
    int64_t dims[Shape::kMaxRank];
    for (int i = 0; i < shape.rank(); ++i) dims[i] = shape[i];
    ++dims[0];
    Array poison(Shape(std::span<const int64_t>(dims, shape.rank())));
    std::fill(poison.values.begin(), poison.values.end(), NAN);
    const Tensor whole = Upload(poison, dtype);
    guarded_[whole.data()] = whole;
    return whole.Slice(0, shape[0]);
  }
  Tensor Output(const Shape& shape) { return Output(shape, activation()); }

  Tensor Download(const Tensor& tensor) {
    auto host = backend_->BeginDownload(tensor)->Wait();
    EXPECT_TRUE(host.ok()) << host.status();
    return host.ok() ? std::move(host).value() : Tensor::Host(tensor.shape(), tensor.dtype());
  }
  Array Read(const Tensor& tensor) {
    const auto guarded = guarded_.find(tensor.data());
    if (guarded != guarded_.end()) {
      const int64_t rows = guarded->second.dim(0);
      for (float value : Download(guarded->second.Slice(rows - 1, 1)).ToFloats()) {
        EXPECT_TRUE(std::isnan(value)) << "written beyond the end";
      }
    }
    Array array(tensor.shape());
    const std::vector<float> values = Download(tensor).ToFloats();
    std::copy(values.begin(), values.end(), array.values.begin());
    return array;
  }

  std::unique_ptr<PackedConv2d> PackConv2d(const Array& weight, const Array& bias,
                                           bool upsample2x = false) {
    auto packed = backend_->PackConv2d(ToHost(weight, DType::kF32), HostOptional(bias), upsample2x);
    EXPECT_TRUE(packed.ok()) << packed.status();
    return std::move(packed).value();
  }
  std::unique_ptr<PackedLinear> PackLinear(const Array& weight, const Array& bias) {
    auto packed = backend_->PackLinear({ToHost(weight, DType::kF32)}, {HostOptional(bias)});
    EXPECT_TRUE(packed.ok()) << packed.status();
    return std::move(packed).value();
  }
  std::unique_ptr<PackedLinear> PackGatedLinear(const Array& weight, const Array& bias) {
    auto packed = backend_->PackLinear({ToHost(weight, DType::kF32)}, {HostOptional(bias)}, {},
                                       /*gated=*/true);
    EXPECT_TRUE(packed.ok()) << packed.status();
    return std::move(packed).value();
  }
  /// Prologue::rounded for x, or E4m3Reader::rounded for a result x; undefined if the weight needs
  /// none. It holds NaN, and so does a row behind it, which TearDown() finds untouched.
  template <typename Packed>
  Tensor Scratch(const Tensor& x, const Packed& weight) {
    if (weight.rounded_bytes == 0) return Tensor();
    const int64_t rows = x.dim(0);
    int64_t dims[Shape::kMaxRank];
    for (int i = 0; i < x.shape().rank(); ++i) dims[i] = x.dim(i);
    ++dims[0];
    const Shape whole(std::span<const int64_t>(dims, x.shape().rank()));
    const Tensor host = Tensor::Host(WithLast(whole, weight.rounded_bytes), DType::kU8);
    std::memset(host.data(), kScratch, host.bytes());
    const Tensor scratch = Upload(host);
    scratch_guards_.push_back(scratch.Slice(rows, 1));
    return scratch.Slice(0, rows);
  }
  static Shape WithLast(const Shape& shape, int64_t last) {
    int64_t dims[Shape::kMaxRank];
    for (int i = 0; i < shape.rank(); ++i) dims[i] = shape[i];
    dims[shape.rank() - 1] = last;
    return Shape(std::span<const int64_t>(dims, shape.rank()));
  }
  static Tensor HostOptional(const Array& array) {
    return array.defined() ? ToHost(array, DType::kF32) : Tensor();
  }

  /// How far `actual` is from `expected`: the larger of ‖difference‖ / ‖expected‖ and a tenth of
  /// the worst element's difference in units of the expected root mean square, so that one wrong
  /// pixel among many shows. Infinite when anything is not finite.
  static double Error(const Array& actual, const Array& expected) {
    EXPECT_EQ(actual.shape.ToString(), expected.shape.ToString());
    double difference = 0, norm = 0, worst = 0;
    for (size_t i = 0; i < expected.values.size(); ++i) {
      const double d = std::fabs(actual.values[i] - expected.values[i]);
      if (!std::isfinite(d)) return INFINITY;
      difference += d * d;
      norm += expected.values[i] * expected.values[i];
      worst = std::max(worst, d);
    }
    if (difference == 0) return 0;
    const double rms = std::sqrt(norm / static_cast<double>(expected.values.size()));
    return std::max(std::sqrt(difference / norm), worst / (10 * rms));
  }

  std::mt19937_64 random_{20220613};

 private:
  static double Round(double value, DType dtype) {
    const float single = static_cast<float>(value);
    if (dtype == DType::kBF16) return BFloat16ToFloat(FloatToBFloat16(single));
    if (dtype == DType::kF16) return HalfToFloat(FloatToHalf(single));
    return single;
  }
  static void Store(const Tensor& host, int64_t i, double value) {
    const float single = static_cast<float>(value);
    if (host.dtype() == DType::kBF16) {
      host.as<uint16_t>()[i] = FloatToBFloat16(single);
    } else if (host.dtype() == DType::kF16) {
      host.as<uint16_t>()[i] = FloatToHalf(single);
    } else {
      host.as<float>()[i] = single;
    }
  }

  static constexpr uint8_t kScratch = 0x7f;  // NaN in e4m3
  Backend* backend_ = nullptr;
  std::map<const void*, Tensor> guarded_;
  std::vector<Tensor> scratch_guards_;
};

}  // namespace denoised
