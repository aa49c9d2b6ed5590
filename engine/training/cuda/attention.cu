// SPDX-License-Identifier: Apache-2.0
// What attention needs beside the products of gemm.cu, which make P and dS where their sums are, so
// that scores are in memory as weights alone, for a few images at a time.
//
//   P = exp(scale·QKᵀ − log-sum-exp)    Δ = Σ dO·O   dS = P ∘ (dO Vᵀ − Δ)·scale
//   dV = Pᵀ dO                          dQ = dS K    dK = dSᵀ Q
//
// Policy. A warp owns a line.

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
    SoftmaxKernel(const __grid_constant__ SoftmaxLaunch softmax) {
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (line >= softmax.lines) return;
  const float* from = softmax.scores + line * softmax.stride;
  const int seen = softmax.causal ? static_cast<int>(line % softmax.tokens) + 1 : softmax.keys;
  float largest = -INFINITY;
  for (int i = lane; i < seen; i += 32) largest = fmaxf(largest, from[i]);
  largest = WarpMax(largest);
  float sum = 0;
  for (int i = lane; i < seen; i += 32) sum += expf(from[i] - largest);
  sum = WarpSum(sum);
  for (int i = lane; i < softmax.stride; i += 32)
    StoreAt(softmax.p, softmax.element, line * softmax.stride + i,
            i < seen ? expf(from[i] - largest) / sum : 0.0f);
  if (lane == 0) softmax.log_sum_exp[line] = largest + logf(sum);
}

__global__ void __launch_bounds__(32 * kWarps)
    DeltaKernel(Rows dout, Rows out, int64_t lines, int tokens, int heads, int dim, float scale,
                float* delta) {
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (line >= lines) return;
  const int64_t head = line / tokens % heads;
  const int64_t row = line / tokens / heads * tokens + line % tokens;
  float sum = 0;
  for (int c = lane; c < dim; c += 32)
    sum = fmaf(Load(dout, row, head * dim + c), Load(out, row, head * dim + c), sum);
  sum = WarpSum(sum);
  if (lane == 0) delta[line] = scale * sum;
}

/// pieces: {the greatest, Σ exp(score − it)} of each.
__global__ void __launch_bounds__(32 * kWarps)
    LogSumExpKernel(const float* pieces, int64_t lines, int64_t count, float* log_sum_exp) {
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (line >= lines) return;
  const float* from = pieces + line * count * 2;
  float largest = -INFINITY;
  for (int64_t i = lane; i < count; i += 32) largest = fmaxf(largest, from[2 * i]);
  largest = WarpMax(largest);
  float sum = 0;
  for (int64_t i = lane; i < count; i += 32)
    sum = fmaf(from[2 * i + 1], expf(from[2 * i] - largest), sum);
  sum = WarpSum(sum);
  if (lane == 0) log_sum_exp[line] = largest + logf(sum);
}

}  // namespace

cudaError_t LaunchSoftmax(const SoftmaxLaunch& softmax, cudaStream_t stream) {
  SoftmaxKernel<<<BlocksFor(softmax.lines), 32 * kWarps, 0, stream>>>(softmax);
  return cudaGetLastError();
}

cudaError_t LaunchLogSumExp(const float* pieces, int64_t lines, int64_t count, float* log_sum_exp,
                            cudaStream_t stream) {
  LogSumExpKernel<<<BlocksFor(lines), 32 * kWarps, 0, stream>>>(pieces, lines, count, log_sum_exp);
  return cudaGetLastError();
}

cudaError_t LaunchDelta(const Rows& dout, const Rows& out, int images, int tokens, int heads,
                        int dim, float scale, float* delta, cudaStream_t stream) {
  const int64_t lines = static_cast<int64_t>(images) * heads * tokens;
  DeltaKernel<<<BlocksFor(lines), 32 * kWarps, 0, stream>>>(dout, out, lines, tokens, heads, dim,
                                                            scale, delta);
  return cudaGetLastError();
}

}  // namespace denoised::training::cuda
