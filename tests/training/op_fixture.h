// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <set>

#include "engine/io/safetensors.h"
#include "engine/nn/layers.h"
#include "engine/training/backend.h"
#include "tests/models/golden.h"
#include "tests/training/backends.h"
#include "tests/training/golden.h"

namespace denoised::training {

/// fp32 against float64 autograd.
inline constexpr double kTolerance = 1e-5;
/// Operands and results that are rounded to bf16, once each: a rounding is off by up to 2⁻⁸, as a
/// root mean square by 1.6e-3.
inline constexpr double kBf16Tolerance = 6e-3;
/// The goldens' operands are not rounded. What their rounding changes, a softmax or a derivative
/// makes larger; ReLU's most, since a few z change their sign. LargeOpTest is the sharper one.
inline constexpr double kBf16GoldenTolerance = 4e-2;

/// How far a bf16 gradient may be from float64's, as a multiple of PyTorch's own bf16 error (the
/// goldens' "bf16").
inline constexpr double kPyTorchsBf16 = 1.5;

struct OpRunOptions {
  std::string first = "dout";  // a tensor with a row for each sample
  /// Whether the planted error cannot change this output: then it must not.
  std::function<bool(const nlohmann::json&, const std::string&)> blind = nullptr;
  std::set<std::string> left_out = {};  // gradients that another op computes
};

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

  /// An input or a gradient of the golden, on the host; undefined when it has none. What a case
  /// must reach.
  Tensor Golden(const std::string& name) const {
    const auto found = tensors_.find(case_ + "/" + name);
    return found == tensors_.end() ? Tensor() : found->second;
  }
  /// What a case is given of the golden, on the host: the same, unless Run() plants a larger
  /// cotangent or rounds what `is_rounded` in bf16.
  Tensor Given(const std::string& name, bool is_rounded = false) const {
    static const std::set<std::string> kCotangents = {"dout", "dlatents", "dkl", "dloss"};
    const Tensor golden = Golden(name);
    if (!golden || golden.dtype() == DType::kI32) return golden;
    std::vector<float> values = golden.ToFloats();
    for (float& value : values) {
      if (kCotangents.contains(name)) value *= gain_;
      if (rounds_ && is_rounded) value = BFloat16ToFloat(FloatToBFloat16(value));
    }
    return Tensor::HostF32(golden.shape(), values);
  }
  /// On the device: an activation; or an index, or a parameter, as it is.
  Tensor In(const std::string& name) {
    const Tensor given = Given(name, /*is_rounded=*/true);
    if (given && given.dtype() == DType::kI32) return OnDevice(*backend_, given);
    return given ? Activations(given.shape(), given.ToFloats()) : Tensor();
  }
  Tensor Parameter(const std::string& name) {
    const Tensor given = Given(name, /*is_rounded=*/name.starts_with("weight"));
    return given ? OnDevice(*backend_, given) : Tensor();
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
  /// Of an error that is planted in the backward op: all but gradients are blind to it.
  static bool OnlyForward(const nlohmann::json&, const std::string& name) {
    return !name.starts_with("d");
  }
  /// Memory for what must become the golden's tensor of that name.
  Tensor Out(const std::string& name) { return outputs_[name] = New(Golden(name).shape()); }
  Tensor OutF32(const std::string& name) {
    f32_outputs_.insert(name);
    return outputs_[name] = NewF32(Golden(name).shape());
  }
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
  double ErrorOf(const std::string& name) {
    std::vector<float> values = Values(outputs_[name]);
    if (rounds_ && !f32_outputs_.contains(name))
      for (float& value : values) value = BFloat16ToFloat(FloatToBFloat16(value));
    return RelativeError(values, Golden(name).ToFloats());
  }
  /// Errors of outputs and gradients by name, which differ between calls of one case.
  std::map<std::string, double> ErrorsOf(const std::function<void(const nlohmann::json&)>& run,
                                         const nlohmann::json& golden) {
    outputs_.clear();
    run(golden);
    std::map<std::string, double> errors;
    for (const auto& [name, tensor] : outputs_) errors[name] = ErrorOf(name);
    return errors;
  }

  /// Runs each case, which must agree, and again with errors, each of which must be seen:
  ///  - `plant`, in all outputs and gradients, except those that are `blind` to it. In fp32 alone:
  ///    they are below bf16's tolerance, which the next is not.
  ///  - a larger cotangent, in every gradient.
  void Run(const std::string& op, const std::function<void(const nlohmann::json&)>& run,
           const std::function<void(nlohmann::json&)>& plant, int expected,
           const OpRunOptions& options = {}) {
    int cases = 0;
    for (const nlohmann::json& golden : ReadGolden(file_ + ".json")) {
      if (golden["op"] != op) continue;
      ++cases;
      case_ = golden["name"];
      const int64_t rows = Golden(options.first).dim(0);
      for (const int64_t chunk : {int64_t{0}, rows % 2 == 0 ? rows / 2 : rows, int64_t{1}}) {
        if (chunk == 1 && (rows & (rows - 1)) != 0) continue;
        SCOPED_TRACE(testing::Message() << case_ << ", chunks of " << chunk);
        backend_->SetChunkRows(chunk);
        const auto errors = ErrorsOf(run, golden);
        EXPECT_TRUE(backend_->status().ok()) << backend_->status();
        for (const auto& [name, error] : errors) EXPECT_LE(error, tolerance()) << name;
      }
      SCOPED_TRACE(case_);
      gain_ = static_cast<float>(1 + 10 * tolerance());
      for (const auto& [name, error] : ErrorsOf(run, golden)) {
        if (!name.starts_with("d")) continue;
        EXPECT_FALSE(error <= tolerance()) << name << ": a larger cotangent was not seen";
      }
      gain_ = 1;
      // On the CPU fp32 with what a kernel in bf16 cannot avoid: operands and results that are
      // rounded once. So the bound is one that can be kept to, in every gradient; 1.17 times
      // PyTorch's was measured at most. Truncation instead of rounding goes beyond it.
      rounds_ = GetParam() == "cpu";
      if (rounds_ || bf16()) CheckBf16(golden, run, options);
      rounds_ = false;
      if (bf16()) continue;
      nlohmann::json planted = golden;
      plant(planted);
      ASSERT_NE(planted, golden);
      for (const auto& [name, error] : ErrorsOf(run, planted)) {
        const bool blind = options.blind && options.blind(golden, name);
        EXPECT_EQ(error <= kTolerance, blind)
            << name << (blind ? ": can see the planted error" : ": the planted error was not seen");
      }
    }
    EXPECT_EQ(cases, expected);
  }

  /// 1.5 times PyTorch's is not exceeded on an H200 either. Of gradients that are off by three
  /// times PyTorch's error, each is seen.
  void CheckBf16(const nlohmann::json& golden,
                 const std::function<void(const nlohmann::json&)>& run,
                 const OpRunOptions& options) {
    if (!golden.contains("bf16")) return;  // the op has F32 alone
    const auto errors = ErrorsOf(run, golden);
    double most = 0;
    for (const auto& [name, error] : golden["bf16"].items()) {
      if (options.left_out.contains(name)) continue;
      ASSERT_TRUE(errors.contains(name)) << name;
      EXPECT_LE(errors.at(name), kPyTorchsBf16 * error.get<double>()) << name;
      most = std::max(most, error.get<double>());
    }
    gain_ = static_cast<float>(1 + 3 * most);
    for (const auto& [name, error] : ErrorsOf(run, golden)) {
      if (!name.starts_with("d") || !golden["bf16"].contains(name)) continue;
      EXPECT_FALSE(error <= kPyTorchsBf16 * golden["bf16"][name].get<double>())
          << name << ": an error of three times PyTorch's was not seen";
    }
    gain_ = 1;
  }

  const std::string file_;
  std::unique_ptr<Backend> backend_;
  std::map<std::string, Tensor> tensors_, outputs_;
  std::set<std::string> f32_outputs_;  // not in the activations' type
  std::string case_;
  float gain_ = 1;       // of the cotangents
  bool rounds_ = false;  // to bf16, in fp32
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
