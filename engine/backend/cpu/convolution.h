// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine/backend/cpu/onednn.h"
#include "engine/backend/cpu/scratch.h"
#include "engine/core/mutex.h"
#include "engine/core/tensor.h"

namespace denoised::cpu {

/// What a convolution's primitive depends on besides its weights. Never the number of rows.
struct ConvolutionGeometry {
  int64_t height = 0, width = 0;  // of the input, already doubled when upsampling
  int stride = 1;
  int pad_top = 0, pad_left = 0, pad_bottom = 0, pad_right = 0;
  auto operator<=>(const ConvolutionGeometry&) const = default;
};

/// `weight` holds `outputs` parts of the same size, each of which gets a scale of its own. They
/// become what was rounded, times this scale and that of the input, both powers of two.
std::vector<float> RoundedToE4m3(std::vector<float> weight, int outputs, float input_scale);

/// A 3×3 convolution of a doubled image as a 3×3 convolution of the image itself, [4 · out, in, 3,
/// 3]: for each parity of the result's row and column, `out` outputs, whose weights are the sums of
/// the taps that read the same pixel. `weight_oihw` is [out, in, 3, 3]. Rounded to e4m3, with one
/// scale for all four weights of an output.
std::vector<float> PhasesInE4m3(const std::vector<float>& weight_oihw, int out, int in,
                                float input_scale);

/// The weights of one convolution and its oneDNN primitives, one for each geometry used lately,
/// each for a single row and a single thread. Thread-safe. Weights and source are of one dtype, F32
/// or BF16; sums, bias and destination are F32.
class Convolution {
 public:
  /// `weight_oihw` holds [out, in, kernel, kernel], which BF16 rounds. With an `input_scale`, it is
  /// one of network_ops.h's E4m3Layer: the source is to be RoundToE4m3(x / input_scale), and the
  /// weights are RoundedToE4m3(). Both are exact in BF16.
  Convolution(dnnl::engine engine, std::vector<float> weight_oihw, int out, int in, int kernel,
              DType dtype, float input_scale = 0);

  /// oneDNN's objects for the arguments of a primitive. Making them takes longer than setting their
  /// addresses anew for each run.
  struct Arguments {
    dnnl::stream stream;
    dnnl::memory source, bias, destination, scratchpad;
  };
  /// A primitive, and the scratchpad it needs.
  struct Plan {
    dnnl::convolution_forward primitive;
    dnnl::memory::desc source, bias, destination, scratchpad;
    dnnl::memory weight;
    mutable std::vector<std::optional<Arguments>> arguments;  // by Worker()
  };
  /// Creates the primitive of a geometry when there is none yet, and lays the weights out as it
  /// prefers.
  std::shared_ptr<const Plan> Prepare(const ConvolutionGeometry& geometry);
  /// Forgets the least recently used geometries beyond `most` (≥ 1), and the weight layouts that
  /// only they use. A geometry that is prepared again computes the same bits.
  void Trim(size_t most);

  /// destination [Ho, Wo, out] = convolution of source [H, W, in], plus bias [out]. `scratchpad` is
  /// 64-byte aligned and of plan.scratchpad's size.
  void Run(const Plan& plan, const void* source, const float* bias, float* destination,
           void* scratchpad) const;

  /// The weights as [out, in, kernel, kernel], whatever layout and dtype they are kept in.
  std::vector<float> PlainWeight() const;

  int in() const { return in_; }
  int out() const { return out_; }
  int kernel() const { return kernel_; }
  DType dtype() const { return dtype_; }
  float input_scale() const { return input_scale_; }
  size_t geometries() const;
  size_t layouts() const;

 private:
  struct Kept {
    std::shared_ptr<const Plan> plan;
    uint64_t used = 0;  // value of uses_ at its last use
  };

  Plan MakePlan(ConvolutionGeometry geometry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  dnnl::memory WeightAs(const dnnl::memory::desc& layout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  dnnl::engine engine_;
  const int out_, in_, kernel_;
  const DType dtype_;
  const float input_scale_;
  mutable Mutex mutex_;
  std::vector<float> plain_weight_ ABSL_GUARDED_BY(mutex_);  // freed once a layout holds it
  std::vector<dnnl::memory> layouts_ ABSL_GUARDED_BY(mutex_);
  std::map<ConvolutionGeometry, Kept> plans_ ABSL_GUARDED_BY(mutex_);
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace denoised::cpu
