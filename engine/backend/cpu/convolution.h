#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "engine/backend/cpu/onednn.h"
#include "engine/backend/cpu/scratch.h"
#include "engine/core/tensor.h"

namespace denoised::cpu {

/// What a convolution's primitive depends on besides its weights. Never the number of rows.
struct ConvolutionGeometry {
  int64_t height = 0, width = 0;  // of the input, already doubled when upsampling
  int stride = 1;
  int pad_top = 0, pad_left = 0, pad_bottom = 0, pad_right = 0;
  auto operator<=>(const ConvolutionGeometry&) const = default;
};

/// The weights of one convolution and its oneDNN primitives, one for each geometry met lately, each
/// for a single row and a single thread. Prepare() and Trim() are for one thread at a time; Run()
/// may be called by many at once.
class Convolution {
 public:
  /// `weight_oihw` holds [out, in, kernel, kernel].
  Convolution(dnnl::engine engine, std::vector<float> weight_oihw, int out, int in, int kernel);

  /// A primitive, and the scratchpad it wants.
  struct Plan {
    dnnl::convolution_forward primitive;
    dnnl::memory::desc source, bias, destination, scratchpad;
    dnnl::memory weight;
  };
  /// Creates the primitive of a geometry when it is the first of its kind, and lays the weights out
  /// as it prefers. The reference stays valid until Trim().
  const Plan& Prepare(const ConvolutionGeometry& geometry);
  /// Lets go of the geometries that were longest unused, beyond `most` (≥ 1), and of layouts of the
  /// weights that are for them alone. What is prepared again computes the same bits.
  void Trim(size_t most);

  /// destination [Ho, Wo, out] = convolution of source [H, W, in], plus bias [out]. `scratchpad` is
  /// 64-byte aligned and of plan.scratchpad's size.
  void Run(const Plan& plan, const float* source, const float* bias, float* destination,
           void* scratchpad) const;

  /// The weights [out, in, kernel, kernel] again, whatever form they are kept in.
  std::vector<float> PlainWeight() const;

  int in() const { return in_; }
  int out() const { return out_; }
  int kernel() const { return kernel_; }
  size_t geometries() const { return plans_.size(); }
  size_t layouts() const { return layouts_.size(); }

 private:
  struct Kept {
    Plan plan;
    uint64_t used = 0;  // when it was last, by uses_
  };

  Plan MakePlan(ConvolutionGeometry geometry);
  dnnl::memory WeightAs(const dnnl::memory::desc& layout);

  dnnl::engine engine_;
  int out_, in_, kernel_;
  std::vector<float> plain_weight_;  // freed once a layout holds it
  std::vector<dnnl::memory> layouts_;
  std::map<ConvolutionGeometry, Kept> plans_;
  uint64_t uses_ = 0;
};

}  // namespace denoised::cpu
