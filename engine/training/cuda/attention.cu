// SPDX-License-Identifier: Apache-2.0
// The softmax of attention and its gradient, between the products of gemm.cu. Scores are fp32 in
// memory, for a few images at a time, so that they stay in the L2 cache.
//
//   P = softmax(scale·QKᵀ)     Δ = Σ dO·O   dS = P ∘ (dO Vᵀ − Δ)·scale
//   dV = Pᵀ dO                 dQ = dS K    dK = dSᵀ Q
//
// Policy. A warp owns a line of scores.

#include "engine/backend/cuda/element.cuh"
#include "engine/training/cuda/launch.h"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kWarps = 8;

unsigned BlocksFor(int64_t warps) { return static_cast<unsigned>((warps + kWarps - 1) / kWarps); }

__device__ void StoreAt(void* data, Element element, int64_t i, float value) {
  if (element == Element::kBf16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
  } else {
    static_cast<float*>(data)[i] = value;
  }
}

__global__ void __launch_bounds__(32 * kWarps)
    SoftmaxKernel(const float* scores, int64_t lines, int tokens, void* p, Element element,
                  float* log_sum_exp) {
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (line >= lines) return;
  const float* from = scores + line * tokens;
  float largest = -INFINITY;
  for (int i = lane; i < tokens; i += 32) largest = fmaxf(largest, from[i]);
  largest = WarpMax(largest);
  float sum = 0;
  for (int i = lane; i < tokens; i += 32) sum += expf(from[i] - largest);
  sum = WarpSum(sum);
  for (int i = lane; i < tokens; i += 32)
    StoreAt(p, element, line * tokens + i, expf(from[i] - largest) / sum);
  if (lane == 0) log_sum_exp[line] = largest + logf(sum);
}

__global__ void __launch_bounds__(32 * kWarps)
    DeltaKernel(Rows dout, Rows out, int64_t lines, int tokens, int heads, int dim, float* delta) {
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (line >= lines) return;
  const int64_t head = line / tokens % heads;
  const int64_t row = line / tokens / heads * tokens + line % tokens;
  float sum = 0;
  for (int c = lane; c < dim; c += 32)
    sum = fmaf(Load(dout, row, head * dim + c), Load(out, row, head * dim + c), sum);
  sum = WarpSum(sum);
  if (lane == 0) delta[line] = sum;
}

__global__ void __launch_bounds__(32 * kWarps)
    SoftmaxBackwardKernel(const float* scores, const float* dp, const float* log_sum_exp,
                          const float* delta, float scale, int64_t lines, int tokens, void* p,
                          void* ds, Element element) {
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (line >= lines) return;
  const float log_sum = log_sum_exp[line], minus = delta[line];
  for (int i = threadIdx.x % 32; i < tokens; i += 32) {
    const int64_t at = line * tokens + i;
    const float value = expf(scores[at] - log_sum);
    StoreAt(p, element, at, value);
    StoreAt(ds, element, at, value * (dp[at] - minus) * scale);
  }
}

}  // namespace

cudaError_t LaunchSoftmax(const float* scores, int64_t lines, int tokens, void* p, Element element,
                          float* log_sum_exp, cudaStream_t stream) {
  SoftmaxKernel<<<BlocksFor(lines), 32 * kWarps, 0, stream>>>(scores, lines, tokens, p, element,
                                                              log_sum_exp);
  return cudaGetLastError();
}

cudaError_t LaunchDelta(const Rows& dout, const Rows& out, int images, int tokens, int heads,
                        int dim, float* delta, cudaStream_t stream) {
  const int64_t lines = static_cast<int64_t>(images) * heads * tokens;
  DeltaKernel<<<BlocksFor(lines), 32 * kWarps, 0, stream>>>(dout, out, lines, tokens, heads, dim,
                                                            delta);
  return cudaGetLastError();
}

cudaError_t LaunchSoftmaxBackward(const float* scores, const float* dp, const float* log_sum_exp,
                                  const float* delta, float scale, int64_t lines, int tokens,
                                  void* p, void* ds, Element element, cudaStream_t stream) {
  SoftmaxBackwardKernel<<<BlocksFor(lines), 32 * kWarps, 0, stream>>>(
      scores, dp, log_sum_exp, delta, scale, lines, tokens, p, ds, element);
  return cudaGetLastError();
}

}  // namespace denoised::training::cuda
