// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>

#include "engine/io/safetensors.h"
#include "engine/nn/layers.h"
#include "engine/training/backend.h"
#include "tests/models/golden.h"
#include "tests/training/backends.h"
#include "tests/training/golden.h"

namespace denoised::training {

/// fp32 against float64 autograd.
inline constexpr double kTolerance = 1e-5;
/// Operands and results that are rounded to bf16, once each: a rounding is off by up to 2⁻⁹, by
/// half of that as a root mean square.
inline constexpr double kBf16Tolerance = 6e-3;
/// The goldens' operands are not rounded. What their rounding changes, a softmax or a derivative
/// makes larger; ReLU's most, since a few z change their sign. LargeOpTest is the sharper one.
inline constexpr double kBf16GoldenTolerance = 4e-2;

/// Cases of goldens/<file>.json, with their tensors in <file>.safetensors, on the backend that the
/// parameter names.
class OpFixture : public testing::TestWithParam<std::string> {
 protected:
  explicit OpFixture(std::string file) : file_(std::move(file)) {}
  void SetUp() override {
    if (GetParam() != "cpu") DENOISED_NEEDS_GPU();
    backend_ = OpenForTest(GetParam());
    auto file = Safetensors::Open(TrainingGoldens() / (file_ + ".safetensors"));
    ASSERT_TRUE(file.ok()) << file.status();
    tensors_ = file->tensors();
  }

  bool bf16() const { return backend_->activation_dtype() == DType::kBF16; }
  double tolerance() const {
    if (!bf16()) return kTolerance;
    // x has mean 20 and deviation 1, so rounding it moves it by 4 % of its deviation; dγ by 9 %.
    return case_ == "group_norm_7" ? 3 * kBf16GoldenTolerance : kBf16GoldenTolerance;
  }

  /// An input or a gradient of the golden, on the host; undefined when it has none.
  Tensor Golden(const std::string& name) const {
    const auto found = tensors_.find(case_ + "/" + name);
    return found == tensors_.end() ? Tensor() : found->second;
  }
  /// On the device: an activation; or an index, or a parameter, as it is.
  Tensor In(const std::string& name) {
    const Tensor golden = Golden(name);
    if (golden && golden.dtype() == DType::kI32) return OnDevice(*backend_, golden);
    return golden ? Activations(golden.shape(), golden.ToFloats()) : Tensor();
  }
  Tensor Parameter(const std::string& name) {
    const Tensor golden = Golden(name);
    return golden ? OnDevice(*backend_, golden) : Tensor();
  }
  Tensor Activations(const Shape& shape, const std::vector<float>& values) {
    return OnDevice(*backend_, shape, values, backend_->activation_dtype());
  }
  /// The values each one place earlier.
  Tensor Rotated(const Tensor& tensor) {
    auto host = backend_->Download(tensor);
    EXPECT_TRUE(host.ok()) << host.status();
    auto* const bytes = static_cast<uint8_t*>(host->data());
    std::rotate(bytes, bytes + host->bytes() / host->elements(), bytes + host->bytes());
    return OnDevice(*backend_, *host);
  }
  /// Plants an error in an op without options: its test then does something else.
  static void Plant(nlohmann::json& golden) { golden["planted"] = true; }
  /// Memory for what must become the golden's tensor of that name.
  Tensor Out(const std::string& name) { return outputs_[name] = New(Golden(name).shape()); }
  Tensor OutF32(const std::string& name) { return outputs_[name] = NewF32(Golden(name).shape()); }
  Tensor New(const Shape& shape, float value = std::nanf("")) {
    return Activations(shape, std::vector<float>(shape.elements(), value));
  }
  Tensor NewF32(const Shape& shape, float value = std::nanf("")) {
    return OnDevice(*backend_, shape, std::vector<float>(shape.elements(), value), DType::kF32);
  }
  /// Rows of the plan, as they lie in the uploaded tensor.
  Tensor Rows(const std::vector<SampleRow>& rows) {
    Tensor tensor = Tensor::Host({static_cast<int64_t>(rows.size()), kSampleNumbers}, DType::kI32);
    std::memcpy(tensor.data(), rows.data(), tensor.bytes());
    return OnDevice(*backend_, tensor);
  }
  Tensor Step(int32_t step) {
    Tensor tensor = Tensor::Host({1}, DType::kI32);
    tensor.as<int32_t>()[0] = step;
    return OnDevice(*backend_, tensor);
  }
  std::vector<float> Values(const Tensor& tensor) { return OnHost(*backend_, tensor); }
  Tensor Scaled(const Tensor& tensor, float scale) {
    Tensor out = New(tensor.shape());
    backend_->Add(tensor, scale, Tensor(), 0, 0, out);
    return out;
  }
  /// A copy of `count` columns of the last dimension.
  Tensor CopyOfColumns(const Tensor& tensor, int64_t first, int64_t count) {
    const int64_t columns = tensor.dim(-1), lines = tensor.elements() / columns;
    const std::vector<float> from = Values(tensor);
    std::vector<float> to;
    for (int64_t line = 0; line < lines; ++line) {
      const auto begin = from.begin() + line * columns + first;
      to.insert(to.end(), begin, begin + count);
    }
    return Activations({lines, count}, to);
  }
  double Worst() {
    double worst = 0;
    for (const auto& [name, tensor] : outputs_) {
      const double error = RelativeError(Values(tensor), Golden(name).ToFloats());
      worst = error <= worst ? worst : error;  // NaN stays
    }
    return worst;
  }

  /// Runs each case, which must agree, and each again with `plant`, which must not. `first`: a
  /// tensor with a row for each sample.
  void Run(const std::string& op, const std::function<void(const nlohmann::json&)>& run,
           const std::function<void(nlohmann::json&)>& plant, int expected,
           const std::string& first = "dout") {
    int cases = 0;
    for (const nlohmann::json& golden : ReadGolden(file_ + ".json")) {
      if (golden["op"] != op) continue;
      ++cases;
      case_ = golden["name"];
      const int64_t rows = Golden(first).dim(0);
      for (const int64_t chunk : {int64_t{0}, rows % 2 == 0 ? rows / 2 : rows, int64_t{1}}) {
        if (chunk == 1 && (rows & (rows - 1)) != 0) continue;
        SCOPED_TRACE(testing::Message() << case_ << ", chunks of " << chunk);
        backend_->SetChunkRows(chunk);
        outputs_.clear();
        run(golden);
        EXPECT_TRUE(backend_->status().ok()) << backend_->status();
        for (const auto& [name, tensor] : outputs_)
          EXPECT_LE(RelativeError(Values(tensor), Golden(name).ToFloats()), tolerance()) << name;
      }
      if (bf16()) continue;  // the errors planted are below bf16's
      nlohmann::json planted = golden;
      plant(planted);
      if (planted == golden) continue;
      outputs_.clear();
      run(planted);
      EXPECT_FALSE(Worst() <= kTolerance) << case_ << ": the planted error was not seen";
    }
    EXPECT_EQ(cases, expected);
  }

  const std::string file_;
  std::unique_ptr<Backend> backend_;
  std::map<std::string, Tensor> tensors_, outputs_;
  std::string case_;
};

/// Shapes that fill vectors and tiles, which the goldens' odd ones do not, against the CPU.
class LargeOpFixture : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    DENOISED_NEEDS_GPU();
    cpu_ = OpenForTest("cpu");
    cuda_ = OpenForTest(GetParam());
    for (Backend* backend : {cpu_.get(), cuda_.get()}) backend->SetChunkRows(kChunk);
  }
  /// Normal numbers, rounded to the activations' type in any case.
  std::vector<float> Normal(const Shape& shape) {
    std::vector<float> values(shape.elements());
    const bool bf16 = cuda_->activation_dtype() == DType::kBF16;
    for (size_t i = 0; i < values.size(); ++i) {
      const float value = PhiloxNormal(seed_, 0, i / 4).v[i % 4];
      values[i] = bf16 ? BFloat16ToFloat(FloatToBFloat16(value)) : value;
    }
    ++seed_;
    return values;
  }
  /// Runs `op` on both backends; what it returns must agree.
  void Compare(const std::function<std::vector<Tensor>(Backend&)>& op) {
    const std::vector<Tensor> expected = op(*cpu_), out = op(*cuda_);
    EXPECT_TRUE(cuda_->status().ok()) << cuda_->status();
    const bool bf16 = cuda_->activation_dtype() == DType::kBF16;
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_LE(RelativeError(OnHost(*cuda_, out[i]), OnHost(*cpu_, expected[i])),
                bf16 ? kBf16Tolerance : kTolerance)
          << "result " << i;
  }
  static Tensor Activations(Backend& backend, const Shape& shape,
                            const std::vector<float>& values = {}) {
    return OnDevice(backend, shape,
                    values.empty() ? std::vector<float>(shape.elements(), NAN) : values,
                    backend.activation_dtype());
  }
  static Tensor Floats(Backend& backend, const Shape& shape,
                       const std::vector<float>& values = {}) {
    return OnDevice(backend, shape,
                    values.empty() ? std::vector<float>(shape.elements(), NAN) : values,
                    DType::kF32);
  }

  static constexpr int64_t kRows = 4, kChunk = 2;
  std::unique_ptr<Backend> cpu_, cuda_;
  uint64_t seed_ = 1;
};
/// The case's "activation".
inline Activation ActivationOf(const nlohmann::json& golden) {
  const std::string name = golden["activation"];
  if (name == "quick_gelu") return Activation::kQuickGelu;  // transformers' alone
  return name == "none" ? Activation::kNone : *nn::ActivationFromName(name);
}

}  // namespace denoised::training
