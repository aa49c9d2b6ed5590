// SPDX-License-Identifier: Apache-2.0
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <vector>

#include "engine/backend/cpu/parallel.h"
#include "engine/training/cpu/loops.h"
#include "engine/training/cpu/ops.h"

namespace denoised::training::cpu {
namespace {

void Check(dnnl_status_t status) {
  if (status != dnnl_success) throw dnnl::error(status, "a matrix product failed");
}

/// y[m, n] = x[m, k] · w + beta · y; w is [n, k] if `transposed`, else [k, n]. A row has the same
/// bits in any place and with any other rows. oneDNN's sgemm for AVX2 sums the rows after a
/// multiple of 12 in another order, so zeros follow the last rows; and all rows if rows and outputs
/// are many (about 1 / rows + 1 / outputs < 0.0038), so it is never given so many rows.
void MultiplyRows(bool transposed, int64_t m, int64_t n, int64_t k, const float* x,
                  int64_t x_stride, const float* w, float beta, float* y, int64_t y_stride) {
  constexpr int64_t kRows = 24, kMostRows = 10 * kRows;  // 24: a multiple of 12, and of AVX-512's 8
  const auto multiply = [&](int64_t rows, const float* from, int64_t from_stride, float* to,
                            int64_t to_stride) {
    Check(dnnl_sgemm('N', transposed ? 'T' : 'N', rows, n, k, 1.0f, from, from_stride, w,
                     transposed ? k : n, beta, to, to_stride));
  };
  const int64_t whole = m / kRows * kRows;
  for (int64_t row = 0; row < whole; row += kMostRows) {
    multiply(std::min(kMostRows, whole - row), x + row * x_stride, x_stride, y + row * y_stride,
             y_stride);
  }
  if (whole == m) return;
  std::vector<float> from(kRows * k), to(kRows * n);
  for (int64_t row = whole; row < m; ++row) {
    std::copy_n(x + row * x_stride, k, from.data() + (row - whole) * k);
    if (beta != 0) std::copy_n(y + row * y_stride, n, to.data() + (row - whole) * n);
  }
  multiply(kRows, from.data(), k, to.data(), n);
  for (int64_t row = whole; row < m; ++row) {
    std::copy_n(to.data() + (row - whole) * n, n, y + row * y_stride);
  }
}

}  // namespace

void Linear(const LinearArgs& args) {
  const denoised::cpu::OneThread one_thread;
  const auto& weight = static_cast<const CpuLinear&>(*args.weight);
  const int64_t in = weight.in_features, out = weight.out_features, m = args.x.elements() / in;
  float* y = args.out.as<float>();
  int64_t column = 0;
  for (size_t i = 0; i < weight.parts.size(); column += weight.parts[i++]) {
    const int64_t part = weight.parts[i];
    if (!weight.biases.empty())
      for (int64_t p = 0; p < m; ++p) std::copy_n(weight.biases[i], part, y + p * out + column);
    MultiplyRows(/*transposed=*/true, m, part, in, args.x.as<float>(), in, weight.weights[i],
                 weight.biases.empty() ? 0.0f : 1.0f, y + column, out);
  }
  Finish(y, nullptr, args.residual ? args.residual.as<float>() : nullptr, args.scale, m, out);
}

void LinearBackward(const LinearBackwardArgs& args, int64_t chunk_rows) {
  const denoised::cpu::OneThread one_thread;
  const auto& weight = static_cast<const CpuLinear&>(*args.weight);
  const int64_t in = weight.in_features, out = weight.out_features;
  const int64_t rows = args.dout.dim(0), m = args.dout.elements() / out, tokens = m / rows;
  const float* dy = args.dout.as<float>();
  int64_t column = 0;
  for (size_t i = 0; i < weight.parts.size(); column += weight.parts[i++]) {
    const int64_t part = weight.parts[i];
    if (!args.dweights.empty())
      SumChunks(rows, chunk_rows, part * in, args.dweights[i].as<float>(),
                [&](int64_t begin, int64_t count, float* to) {
                  Check(dnnl_sgemm('T', 'N', part, in, count * tokens, 1.0f,
                                   dy + begin * tokens * out + column, out,
                                   args.x.as<float>() + begin * tokens * in, in, 0.0f, to, in));
                });
    if (!args.dbiases.empty())
      SumChunks(rows, chunk_rows, part, args.dbiases[i].as<float>(),
                [&](int64_t begin, int64_t count, float* to) {
                  std::vector<double> sums(part);
                  SumColumns(dy + begin * tokens * out + column, count * tokens, part, out,
                             sums.data());
                  for (int64_t c = 0; c < part; ++c) to[c] = static_cast<float>(sums[c]);
                });
    if (!args.dx) continue;
    if (i == 0 && args.add && args.add.data() != args.dx.data())
      std::copy_n(args.add.as<float>(), m * in, args.dx.as<float>());
    MultiplyRows(/*transposed=*/false, m, in, part, dy + column, out, weight.weights[i],
                 i == 0 && !args.add ? 0.0f : 1.0f, args.dx.as<float>(), in);
  }
}

}  // namespace denoised::training::cpu
