// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/status.h"
#include "engine/core/tensor.h"
#include "engine/io/weights.h"

namespace denoised::training {

/// The initial values of a parameter, as in PyTorch's modules.
struct Initial {
  enum class Kind { kUniform, kNormal, kConstant } kind = Kind::kConstant;
  double value = 0;  // half the width (1/√fan-in), the standard deviation, or the constant

  static Initial Uniform(int64_t fan_in);
  static Initial Normal(double deviation) { return {Kind::kNormal, deviation}; }
  static Initial Constant(double value) { return {Kind::kConstant, value}; }
};

struct Parameter {
  std::string name;  // in the checkpoint: "conv_in.weight"
  Shape shape;       // in the checkpoint
  Initial initial;
  bool trained = true;  // false: fixed from the start (Fourier frequencies)
  bool served = true;   // false: not part of the served network, nor of its files
  int64_t offset = 0;   // first element in the flat tensor of all trained, or all fixed, parameters
};

/// The parameters of a network in the order in which its modules declared them. Master weights,
/// gradient, moments and averages are one flat F32 tensor each; a parameter is a part of it, in the
/// checkpoint's own shape, that begins at a multiple of 64 bytes. The gaps between parts are 0 and
/// stay 0.
class Parameters {
 public:
  /// Returns its index.
  int Add(std::string name, const Shape& shape, Initial initial, bool trained = true,
          bool served = true);

  /// A module that cannot be built as the config asks says so here, and goes on.
  void Complain(std::string_view what);
  /// InvalidArgument with the first complaint, if there is one.
  const absl::Status& status() const { return status_; }

  const std::vector<Parameter>& all() const { return all_; }
  const Parameter& operator[](int index) const { return all_[index]; }
  /// Elements of the flat tensor of trained, or of fixed parameters.
  int64_t trained_elements() const { return trained_; }
  int64_t fixed_elements() const { return fixed_; }
  /// The first one that is not fixed.
  int first_trained() const;
  /// Elements without the gaps.
  int64_t count() const;

  /// The part of `flat` that is parameter `index`, in its shape.
  Tensor Part(const Tensor& flat, int index) const;

  /// Fills host tensors with initial values, which depend on (seed, name, element) alone, and with
  /// zeros between parameters.
  void Initialize(uint64_t seed, const Tensor& trained, const Tensor& fixed) const;
  /// Fills the served parameters from a checkpoint instead: those whose names begin with `prefix`.
  /// The checkpoint's names lack the prefix. NotFound or InvalidArgument as Weights::Get(); the
  /// latter also for numbers that are not finite.
  absl::Status Load(const Weights& weights, const Tensor& trained, const Tensor& fixed,
                    const std::string& prefix = "") const;
  /// The errors of Load() alone.
  absl::Status Check(const Weights& weights, const std::string& prefix) const;
  /// Views of the served parameters in host tensors, by checkpoint name.
  std::map<std::string, Tensor> Named(const Tensor& trained, const Tensor& fixed) const;

 private:
  absl::Status Read(
      const Weights& weights, const std::string& prefix,
      const std::function<void(size_t index, const std::vector<float>& values)>& take) const;

  std::vector<Parameter> all_;
  int64_t trained_ = 0, fixed_ = 0;
  absl::Status status_;
};

}  // namespace denoised::training
