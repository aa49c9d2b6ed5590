// SPDX-License-Identifier: Apache-2.0
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>

#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/backend/cpu/vector_ops.h"

/// Work is split into (row, head, block of queries); each block's scores stay in the cache between
/// the two products. oneDNN's sgemm is held to one thread, so a block's bits depend on its shape
/// alone.

namespace denoised::cpu {

void Attention(const AttentionArgs& args, Scratch& scratch) {
  constexpr int64_t kQueryBlock = 64;
  const int64_t rows = args.q.dim(0), queries = args.q.dim(1), most_keys = args.k.dim(1);
  const int64_t dim = args.q.dim(2) / args.heads;
  const int64_t blocks = (queries + kQueryBlock - 1) / kQueryBlock;
  if (args.out.elements() == 0) return;
  float* const scores = scratch.Take<float>(Threads() * kQueryBlock * most_keys);
  const int64_t q_stride = args.q.row_stride(), k_stride = args.k.row_stride(),
                v_stride = args.v.row_stride(), out_stride = args.out.row_stride();
  ParallelFor(rows * args.heads * blocks, [&](int64_t unit, int thread) {
    const int64_t begin = unit % blocks * kQueryBlock;
    const int64_t head = unit / blocks % args.heads, row = unit / blocks / args.heads;
    const int64_t block = std::min(kQueryBlock, queries - begin);
    const float* q = args.q.as<float>() + (row * queries + begin) * q_stride + head * dim;
    const int64_t set = args.key_set ? args.key_set.as<int32_t>()[row] : row;
    DENOISED_CHECK(set >= 0 && set < args.k.dim(0), "key set {} of {}", set, args.k.dim(0));
    const int64_t keys = args.key_counts ? args.key_counts.as<int32_t>()[set] : most_keys;
    DENOISED_CHECK(keys >= 1 && keys <= most_keys, "{} of {} keys", keys, most_keys);
    const float* k = args.k.as<float>() + set * most_keys * k_stride + head * dim;
    const float* v = args.v.as<float>() + set * most_keys * v_stride + head * dim;
    float* out = args.out.as<float>() + (row * queries + begin) * out_stride + head * dim;
    float* s = scores + thread * kQueryBlock * most_keys;
    const OneThread one_thread;
    dnnl_status_t status =
        dnnl_sgemm('N', 'T', block, keys, dim, args.scale, q, q_stride, k, k_stride, 0.0f, s, keys);
    float reciprocal_sum[kQueryBlock];
    for (int64_t i = 0; i < block; ++i) {
      const int64_t visible = args.causal ? std::min(begin + i + 1, keys) : keys;
      reciprocal_sum[i] = Exponentiate(s + i * keys, visible);
      std::fill(s + i * keys + visible, s + (i + 1) * keys, 0.0f);
    }
    if (status == dnnl_success) {
      status =
          dnnl_sgemm('N', 'N', block, dim, keys, 1.0f, s, keys, v, v_stride, 0.0f, out, out_stride);
    }
    for (int64_t i = 0; i < block; ++i) Scale(out + i * out_stride, reciprocal_sum[i], dim);
    if (status != dnnl_success) throw dnnl::error(status, "sgemm of attention failed");
  });
}

}  // namespace denoised::cpu
