// SPDX-License-Identifier: Apache-2.0
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <cmath>

#include "engine/backend/cpu/parallel.h"
#include "engine/backend/cpu/vector_ops.h"
#include "engine/training/cpu/ops.h"

/// Computed in blocks of queries, so that scores stay in the cache. The backward pass adds to dK
/// and dV block by block, in order:
///
///   P = softmax(scale·QKᵀ)     Δ = Σ dO·O   dS = P ∘ (dO Vᵀ − Δ)·scale
///   dV = Pᵀ dO                 dQ = dS K    dK = dSᵀ Q

namespace denoised::training::cpu {
namespace {

constexpr int64_t kQueryBlock = 64;

void Check(dnnl_status_t status) {
  if (status != dnnl_success) throw dnnl::error(status, "a matrix product of attention failed");
}

/// The first element of head `head` of row `row` in a tensor [N, tokens, heads · dim].
struct View {
  float* data;
  int64_t stride;
};
View Head(const Tensor& tensor, int64_t row, int64_t head, int64_t dim) {
  return {tensor.as<float>() + row * tensor.dim(1) * tensor.row_stride() + head * dim,
          tensor.row_stride()};
}

/// The softmax of the first `seen` scores of `count`, 0 for the others. Returns ln Σ exp.
float Softmax(float* line, int64_t seen, int64_t count) {
  const float largest = *std::max_element(line, line + seen);
  const float reciprocal = denoised::cpu::Exponentiate(line, seen);
  denoised::cpu::Scale(line, reciprocal, seen);
  std::fill(line + seen, line + count, 0.0f);
  return largest - std::log(reciprocal);
}

}  // namespace

void Attention(const AttentionArgs& args) {
  const denoised::cpu::OneThread one_thread;
  const int64_t tokens = args.q.dim(1), keys = args.k.dim(1), dim = args.q.dim(2) / args.heads;
  float* const s = ThreadScratch(0, kQueryBlock * keys);
  for (int64_t row = 0; row < args.q.dim(0); ++row) {
    for (int64_t head = 0; head < args.heads; ++head) {
      const View q = Head(args.q, row, head, dim), k = Head(args.k, row, head, dim),
                 v = Head(args.v, row, head, dim), out = Head(args.out, row, head, dim);
      float* lse = args.log_sum_exp.as<float>() + (row * args.heads + head) * tokens;
      for (int64_t begin = 0; begin < tokens; begin += kQueryBlock) {
        const int64_t block = std::min(kQueryBlock, tokens - begin);
        Check(dnnl_sgemm('N', 'T', block, keys, dim, args.scale, q.data + begin * q.stride,
                         q.stride, k.data, k.stride, 0.0f, s, keys));
        for (int64_t i = 0; i < block; ++i) {
          float* line = s + i * keys;
          lse[begin + i] = Softmax(line, args.causal ? begin + i + 1 : keys, keys);
        }
        Check(dnnl_sgemm('N', 'N', block, dim, keys, 1.0f, s, keys, v.data, v.stride, 0.0f,
                         out.data + begin * out.stride, out.stride));
      }
    }
  }
}

void AttentionBackward(const AttentionBackwardArgs& args) {
  const denoised::cpu::OneThread one_thread;
  const AttentionArgs& forward = args.forward;
  const int64_t tokens = forward.q.dim(1), keys = forward.k.dim(1),
                dim = forward.q.dim(2) / forward.heads;
  float* const p = ThreadScratch(0, 2 * kQueryBlock * keys);
  float* const dp = p + kQueryBlock * keys;
  for (int64_t row = 0; row < forward.q.dim(0); ++row) {
    for (int64_t head = 0; head < forward.heads; ++head) {
      const auto view = [&](const Tensor& tensor) { return Head(tensor, row, head, dim); };
      const View q = view(forward.q), k = view(forward.k), v = view(forward.v),
                 out = view(forward.out), dout = view(args.dout), dq = view(args.dq),
                 dk = view(args.dk), dv = view(args.dv);
      for (int64_t begin = 0; begin < tokens; begin += kQueryBlock) {
        const int64_t block = std::min(kQueryBlock, tokens - begin);
        const float add = begin == 0 ? 0.0f : 1.0f;
        const float* qb = q.data + begin * q.stride;
        const float* db = dout.data + begin * dout.stride;
        Check(dnnl_sgemm('N', 'T', block, keys, dim, forward.scale, qb, q.stride, k.data, k.stride,
                         0.0f, p, keys));
        Check(dnnl_sgemm('N', 'T', block, keys, dim, 1.0f, db, dout.stride, v.data, v.stride, 0.0f,
                         dp, keys));
        for (int64_t i = 0; i < block; ++i) {
          float* line = p + i * keys;
          // Recomputes the softmax, more accurately than from lse. If p is 0, so is dS.
          Softmax(line, forward.causal ? begin + i + 1 : keys, keys);
          double delta = 0;
          const float* o = out.data + (begin + i) * out.stride;
          for (int64_t c = 0; c < dim; ++c)
            delta += static_cast<double>(db[i * dout.stride + c]) * o[c];
          const auto minus = static_cast<float>(delta);
          float* d = dp + i * keys;
#pragma omp simd
          for (int64_t j = 0; j < keys; ++j) d[j] = line[j] * (d[j] - minus) * forward.scale;
        }
        Check(dnnl_sgemm('T', 'N', keys, dim, block, 1.0f, p, keys, db, dout.stride, add, dv.data,
                         dv.stride));
        Check(dnnl_sgemm('N', 'N', block, dim, keys, 1.0f, dp, keys, k.data, k.stride, 0.0f,
                         dq.data + begin * dq.stride, dq.stride));
        Check(dnnl_sgemm('T', 'N', keys, dim, block, 1.0f, dp, keys, qb, q.stride, add, dk.data,
                         dk.stride));
      }
    }
  }
}

}  // namespace denoised::training::cpu
