#pragma once

#include <map>
#include <vector>

#include "engine/backend/cpu/onednn.h"
#include "engine/core/tensor.h"

namespace denoised::cpu {

/// What a convolution's plan depends on besides its weights. Never the number of rows.
struct ConvolutionGeometry {
  int64_t height = 0, width = 0;  // of the input, already doubled when upsampling
  int stride = 1;
  int pad_top = 0, pad_left = 0, pad_bottom = 0, pad_right = 0;
  auto operator<=>(const ConvolutionGeometry&) const = default;
};

/// The weights of one convolution and its oneDNN primitives, one for each geometry met so far. Each
/// runs on a single row with all cores, so what neighbours a row has cannot change its bits. The
/// first run of a geometry creates the primitive and lays the weights out as it prefers.
class Convolution {
 public:
  /// `weight_oihw` holds [out, in, kernel, kernel]. `onednn` must outlive this.
  Convolution(OneDnn* onednn, std::vector<float> weight_oihw, int out, int in, int kernel);

  /// destination [Ho, Wo, out] = convolution of source [H, W, in], plus bias [out].
  void Run(const ConvolutionGeometry& geometry, const float* source, const float* bias,
           float* destination);

  /// The weights [out, in, kernel, kernel] again, whatever form they are kept in.
  std::vector<float> PlainWeight() const;

 private:
  struct Plan {
    dnnl::convolution_forward primitive;
    dnnl::memory source, weight, bias, destination, scratchpad;
    size_t scratchpad_bytes = 0;
  };
  Plan MakePlan(const ConvolutionGeometry& geometry);
  dnnl::memory WeightAs(const dnnl::memory::desc& layout);

  OneDnn* onednn_;
  int out_, in_, kernel_;
  std::vector<float> plain_weight_;  // freed once a layout holds it
  std::vector<dnnl::memory> layouts_;
  std::map<ConvolutionGeometry, Plan> plans_;
};

}  // namespace denoised::cpu
