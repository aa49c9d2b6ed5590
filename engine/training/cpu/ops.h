// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "engine/core/mutex.h"
#include "engine/training/backend.h"

/// The ops of training/backend.h on fp32 host memory. Each runs on the calling thread alone,
/// because the backend runs one pass on each core: activations then stay in the core's cache, and
/// threads synchronise once per step. May throw dnnl::error and std::bad_alloc.

namespace denoised::training::cpu {

/// A convolution's master weights and, for each size of its input so far, oneDNN's primitives and
/// the weights in their layouts. Thread-safe except for Pack().
class CpuConv2d final : public PackedConv2d {
 public:
  CpuConv2d(dnnl::engine engine, int in, int out, int kernel, bool upsample);

  /// Packs the master's values again for every plan; Prepare() packs them for new plans.
  void Pack(const float* weight, const float* bias);
  const float* bias() const { return bias_; }
  bool has_weight() const { return master_ != nullptr; }

  struct Size {
    int64_t rows = 0, height = 0, width = 0;  // of the input, already doubled when upsampling
    int stride = 1, pad_top = 0, pad_left = 0, pad_bottom = 0, pad_right = 0;
    auto operator<=>(const Size&) const = default;
  };
  struct Plan {
    dnnl::convolution_forward forward;
    dnnl::convolution_backward_data backward_data;
    dnnl::convolution_backward_weights backward_weights;
    dnnl::memory::desc source, bias, destination, forward_weight, data_weight, weight_gradient;
    dnnl::memory::desc scratch[3];
    dnnl::memory for_forward, for_data;  // packed weights
    dnnl::reorder unpack;                // weight_gradient → [out, in, k, k]
  };
  const Plan& Prepare(const Size& size);
  const dnnl::engine& engine() const { return engine_; }
  const dnnl::memory::desc& plain() const { return plain_; }

 private:
  Plan MakePlan(const Size& size) const;
  void Fill(Plan* plan) const;

  const dnnl::engine engine_;
  const dnnl::memory::desc plain_;  // [out, in, k, k]
  const float* master_ = nullptr;
  const float* bias_ = nullptr;
  Mutex mutex_;
  std::map<Size, Plan> plans_ ABSL_GUARDED_BY(mutex_);
};

struct CpuLinear final : public PackedLinear {
  std::vector<const float*> weights, biases;  // the masters themselves, by part
};

/// Scratch memory of the calling thread, valid until the same slot is requested again.
float* ThreadScratch(int slot, size_t count);

/// Calls chunk(first row, rows, to) for each chunk, where `to` has `count` elements, and adds the
/// results as a tree into `out`.
template <typename Body>
void SumChunks(int64_t rows, int64_t chunk_rows, size_t count, float* out, const Body& chunk) {
  if (chunk_rows == 0 || chunk_rows == rows) return chunk(0, rows, out);
  DENOISED_CHECK(rows % chunk_rows == 0, "{} rows in chunks of {}", rows, chunk_rows);
  const int64_t chunks = rows / chunk_rows;
  std::vector<std::vector<float>> sums(chunks);
  for (int64_t i = 0; i < chunks; ++i) {
    sums[i].resize(count);
    chunk(i * chunk_rows, chunk_rows, sums[i].data());
  }
  TreeSum(chunks, [&](int64_t a, int64_t b) {
    for (size_t i = 0; i < count; ++i) sums[a][i] += sums[b][i];
  });
  std::copy(sums[0].begin(), sums[0].end(), out);
}

void Conv2d(const Conv2dArgs& args, int64_t chunk_rows);
void Conv2dBackward(const Conv2dBackwardArgs& args, int64_t chunk_rows);
void Linear(const LinearArgs& args);
void LinearBackward(const LinearBackwardArgs& args, int64_t chunk_rows);
void GroupNorm(const GroupNormArgs& args);
void GroupNormBackward(const GroupNormBackwardArgs& args, int64_t chunk_rows);
void Attention(const AttentionArgs& args);
void AttentionBackward(const AttentionBackwardArgs& args);
void LayerNorm(const LayerNormArgs& args);
void LayerNormBackward(const LayerNormBackwardArgs& args, int64_t chunk_rows);
void Geglu(const Tensor& x, const Tensor& out);
void GegluBackward(const Tensor& x, const Tensor& dout, const Tensor& dx);
void Gaussian(const GaussianArgs& args);
void GaussianBackward(const GaussianBackwardArgs& args);
void ReconstructionLoss(const ReconstructionLossArgs& args);  // without the sum
void EmbeddingBackward(const Tensor& index, const Tensor& dout, const Tensor& dtable,
                       int64_t chunk_rows);

}  // namespace denoised::training::cpu
