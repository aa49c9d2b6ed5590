// SPDX-License-Identifier: Apache-2.0
// Group norm with an activation, and its gradients, in one pass over memory, on Hopper.
//
// Policy. A cluster owns one image's strip of channels, which holds whole groups; each CTA owns a
// part of the pixels. TMA loads them to shared memory, in a few chunks. A thread owns eight
// channels of every few pixels, and sums the first chunks while the last ones arrive. The sums of a
// channel are added over the threads of a CTA, then over the CTAs, which exchange them through
// distributed shared memory, each in a fixed order. So all CTAs of a cluster compute the same
// statistics or coefficients. The results are computed from shared memory and stored. Formulas:
// group_norm.cu.
//
// Several CTAs share a multiprocessor. TMA serves them one after the other, so one CTA computes and
// stores while the next one's chunks arrive. cp.async would serve all at once, and all would then
// compute while memory idles.

#include <algorithm>
#include <numeric>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/tensor_map.h"
#include "engine/training/cuda/group_norm.cuh"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kVector = 8;  // channels in 16 bytes
constexpr int kQuad = 4;    // lanes of a warp that own the same channels
constexpr int kMaxThreads = 384;
constexpr int kMaxChunks = 4;
constexpr int kMaxBox = 256;  // channels and pixels of a chunk: TMA's limit
constexpr int kMaxCluster = 8;

/// How an image maps to CTAs and threads.
struct Plan {
  int strip = 0;    // channels of a cluster
  int cluster = 0;  // CTAs
  int part = 0;     // pixels of a CTA
  int lines = 0;    // a quad's threads are this number of pixels apart
  int box = 0;      // pixels of a chunk; a multiple of 8, so that chunks are aligned
  int chunks = 0;
  FastDivmod across;                             // vectors of a strip
  FastDivmod group_size;                         // channels
  double pixels_inverse = 0, count_inverse = 0;  // 1 / pixels, 1 / elements of a group
};
int Threads(const Plan& plan) { return kQuad * plan.across.value * plan.lines; }

/// The operands as [pixels of all rows, channels] in boxes of a chunk.
struct Maps {
  CUtensorMap x, dout;
};

/// Offsets in shared memory, in bytes.
struct Layout {
  int operand;   // bytes of an operand: [chunks · box][strip] in bf16
  int sums;      // [kinds][lines][strip]; later a Pair and three coefficients of each channel
  int received;  // [cluster][strip] of Message
  int affine;    // [3][strip]
  int barriers;  // of the chunks, then of `received`
  int bytes;
  __host__ __device__ Layout(const Plan& plan, int operands, int kinds)
      : operand(plan.chunks * plan.box * plan.strip * 2),
        sums(operands * operand),
        received(sums + plan.strip * (plan.lines * kinds > 7 ? plan.lines * kinds * 4 : 28)),
        affine(received + plan.cluster * plan.strip * (kinds == 2 ? 8 : 16)),
        barriers(affine + 3 * plan.strip * 4),
        bytes(barriers + (kMaxChunks + 1) * 8) {}
};

/// A thread's vectors of an operand in shared memory.
struct Vectors {
  unsigned char* const first;
  const int step;
  __device__ uint4& operator[](int i) const { return *reinterpret_cast<uint4*>(first + i * step); }
};

/// Adds a sum of eight channels over the threads of a quad, which then hold those of channels
/// 2 · quad and the next.
__device__ void SumQuad(int quad, float (&sums)[kVector]) {
  const bool high = (quad & 2) != 0, odd = (quad & 1) != 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sent = high ? sums[i] : sums[i + 4], kept = high ? sums[i + 4] : sums[i];
    sums[i] = kept + __shfl_xor_sync(~0u, sent, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sent = odd ? sums[i] : sums[i + 2], kept = odd ? sums[i + 2] : sums[i];
    sums[i] = kept + __shfl_xor_sync(~0u, sent, 8);
  }
}

/// A CTA, and what a thread of it owns. kSums: sums of a channel that it needs.
template <int kOperands, int kSums>
struct Cta {
  /// Sums of a channel as the CTAs of a cluster send them.
  using Message = std::conditional_t<kSums == 2, float2, float4>;

  const NormLaunch& norm;
  const Plan& plan;
  unsigned char* const shared;
  Layout layout = Layout(plan, kOperands, kSums);
  Pair* terms = reinterpret_cast<Pair*>(shared + layout.sums);
  float* affine = reinterpret_cast<float*>(shared + layout.affine);
  int rank = blockIdx.x;
  int64_t row = gridDim.z - 1 - blockIdx.z;  // in reverse: the kernel before left the last in L2
  // Neighbouring lanes have neighbouring vectors, so that they use all banks of shared memory.
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, of_quad = warp * 8 + lane % 8;
  int line = of_quad / plan.across, vector = of_quad - line * plan.across.value, quad = lane / 8;
  // The strip's and the thread's first channel.
  int first = blockIdx.y * plan.strip, column = first + vector * kVector;
  // The CTA's pixels, in the row.
  int begin = rank * plan.part, count = min(plan.part, static_cast<int>(norm.pixels) - begin);
  int pixel = quad * plan.lines + line;  // the thread's first, in the CTA; the next ones are
                                         // kQuad · lines further

  /// The address of a thread's first vector, in channels from `from`.
  __device__ __nv_bfloat16* At(const Rows& rows, int from) const {
    return static_cast<__nv_bfloat16*>(rows.data) +
           (row * norm.pixels + begin + pixel) * rows.stride + from;
  }
  __device__ int64_t Step(const Rows& rows) const { return kQuad * plan.lines * rows.stride; }
  __device__ Vectors VectorsOf(int operand) const {
    return {shared + operand * layout.operand + (pixel * plan.strip + vector * kVector) * 2,
            kQuad * plan.lines * plan.strip * 2};
  }
  __device__ uint64_t* Barriers() const {
    return reinterpret_cast<uint64_t*>(shared + layout.barriers);
  }

  /// Prepares the barriers and starts the loads, in one thread. The others may wait for chunks
  /// after __syncthreads(), and the cluster's CTAs may send when all have called this.
  __device__ void StartLoads(const CUtensorMap* const (&maps)[kOperands]) const {
    auto* const barriers = Barriers();
    if (threadIdx.x == 0) {
      for (int i = 0; i <= kMaxChunks; ++i) InitBarrier(&barriers[i], 1);
      FenceBarrierInit();
      ArriveExpectTx(&barriers[kMaxChunks],
                     plan.cluster * plan.strip * static_cast<int>(sizeof(Message)));
    }
    if (plan.cluster > 1) ArriveAtClusterRelaxed();
    WaitForPredecessors();
    if (threadIdx.x != 0) return;
    const int bytes = plan.box * plan.strip * 2;
    const auto from = static_cast<int>(row * norm.pixels + begin);
    for (int chunk = 0; chunk < plan.chunks; ++chunk) {
      ArriveExpectTx(&barriers[chunk], kOperands * bytes);
#pragma unroll
      for (int o = 0; o < kOperands; ++o)
        TmaLoad(shared + o * layout.operand + chunk * bytes, maps[o], &barriers[chunk], first,
                from + chunk * plan.box);
    }
  }
  /// Calls use(i) for each of a thread's pixels as soon as its chunk has arrived.
  template <typename Use>
  __device__ void ForEachArriving(const Use& use) const {
    auto* const barriers = Barriers();
    const int step = kQuad * plan.lines;
    int p = pixel, i = 0;
    for (int chunk = 0; chunk < plan.chunks; ++chunk) {
      Wait(&barriers[chunk], 0);
#pragma unroll 1
      for (const int end = min(count, (chunk + 1) * plan.box); p < end; p += step) use(i++);
    }
  }

  /// Adds the threads' sums over the cluster. Thread c of each CTA gets those of channel c of the
  /// strip, and all threads of the CTA have then added theirs.
  __device__ void SumOverCluster(float (&sums)[kSums][kVector], double (&totals)[kSums]) const {
    auto* const by_line = reinterpret_cast<float*>(shared + layout.sums);
    auto* const received = reinterpret_cast<Message*>(shared + layout.received);
    auto* const barrier = Barriers() + kMaxChunks;
    const int kind = plan.lines * plan.strip;
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      SumQuad(quad, sums[s]);
      *reinterpret_cast<float2*>(by_line + s * kind + line * plan.strip + vector * kVector +
                                 2 * quad) = make_float2(sums[s][0], sums[s][1]);
    }
    __syncthreads();
    if (plan.cluster > 1) WaitForCluster();
    const int c = threadIdx.x;
    float of_block[kSums] = {};
#pragma unroll 4
    for (int l = 0; c < plan.strip && l < plan.lines; ++l) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) of_block[s] += by_line[s * kind + l * plan.strip + c];
    }
    if (plan.cluster == 1) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) totals[s] = of_block[s];
    } else if (c < plan.strip) {
#pragma unroll 4
      for (int to = 0; to < plan.cluster; ++to) {
        const uint32_t at = ClusterAddress(received + rank * plan.strip + c, to);
        if constexpr (kSums == 2) {
          StoreAsync(at, ClusterAddress(barrier, to), of_block[0], of_block[1]);
        } else {
          StoreAsync(at, ClusterAddress(barrier, to),
                     make_float4(of_block[0], of_block[1], of_block[2], 0));
        }
      }
      WaitForStores(barrier, 0);
#pragma unroll 4
      for (int from = 0; from < plan.cluster; ++from) {
        const Message& v = received[from * plan.strip + c];
        totals[0] += v.x, totals[1] += v.y;
        if constexpr (kSums == 3) totals[2] += v.z;
      }
    }
    __syncthreads();  // the caller overwrites the sums by line
  }

  /// The first channel, in the strip, of the group of channel c.
  __device__ int FirstOfGroup(int c) const { return c / plan.group_size * plan.group_size.value; }
  __device__ void StoreAffine(const Affine& of) const {
    affine[threadIdx.x] = of.mean;
    affine[plan.strip + threadIdx.x] = of.slope;
    affine[2 * plan.strip + threadIdx.x] = of.offset;
  }
  /// Three numbers of each of a thread's channels, from [3][strip].
  __device__ void LoadThree(const float* from, float (&a)[kVector], float (&b)[kVector],
                            float (&c)[kVector]) const {
    LoadEight(from + vector * kVector, a);
    LoadEight(from + plan.strip + vector * kVector, b);
    LoadEight(from + 2 * plan.strip + vector * kVector, c);
  }
};

/// grid (plan.cluster, strips, rows)
template <int kActivation>
__global__ void __launch_bounds__(kMaxThreads, 2)
    NormKernel(const __grid_constant__ NormLaunch norm, const __grid_constant__ Plan plan,
               const __grid_constant__ Maps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  const Cta<1, 2> cta = {norm, plan, shared};
  Pair* const terms = cta.terms;
  const int c = threadIdx.x, channel = cta.first + c;
  const bool has_channel = c < plan.strip;
  ReleaseDependents();
  cta.StartLoads({&maps.x});
  const Vectors x = cta.VectorsOf(0);

  // Sums are of x minus the channel's first pixel, so a large mean costs no digits.
  const auto* const first_pixel =
      static_cast<const __nv_bfloat16*>(norm.x.data) + cta.row * norm.pixels * norm.x.stride;
  float pivots[kVector], sums[2][kVector] = {};
  UnpackBf16(*reinterpret_cast<const uint4*>(first_pixel + cta.column), pivots);
  Parameters parameters = {};
  float pivot = 0;
  if (has_channel) {
    parameters = ParametersOf(norm, cta.row, channel);
    pivot = __bfloat162float(first_pixel[channel]);
  }
  __syncthreads();
  cta.ForEachArriving([&](int i) {
    float values[kVector];
    UnpackBf16(x[i], values);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const float centered = values[v] - pivots[v];
      sums[0][v] += centered;
      sums[1][v] = fmaf(centered, centered, sums[1][v]);
    }
  });
  double totals[2] = {};
  cta.SumOverCluster(sums, totals);
  if (has_channel) {
    const double mean = totals[0] * plan.pixels_inverse;
    terms[c] = {pivot + mean, totals[1] - totals[0] * mean};
  }
  __syncthreads();
  if (has_channel) {
    const int first = cta.FirstOfGroup(c), end = first + plan.group_size.value;
    double sum = 0, squares = 0;
#pragma unroll 2
    for (int i = first; i < end; ++i) sum += terms[i].a;
    const double mean = sum / plan.group_size.value;
#pragma unroll 2
    for (int i = first; i < end; ++i) {  // of the distances from the group's mean
      const double distance = terms[i].a - mean;
      squares += terms[i].b + static_cast<double>(norm.pixels) * distance * distance;
    }
    const auto rstd =
        static_cast<float>(1.0 / sqrt(fmax(squares, 0.0) * plan.count_inverse + norm.eps));
    cta.StoreAffine(AffineOf(parameters, static_cast<float>(mean), rstd));
    if (cta.rank == 0 && c == first) {
      float* const statistics =
          norm.statistics + (cta.row * norm.groups + channel / plan.group_size) * 2;
      statistics[0] = static_cast<float>(mean);
      statistics[1] = rstd;
    }
  }
  __syncthreads();

  Line<kVector> line;
  cta.LoadThree(cta.affine, line.mean, line.slope, line.offset);
  __nv_bfloat16* to = cta.At(norm.out, cta.column);
  const int64_t step = cta.Step(norm.out);
  int i = 0;
  for (int pixel = cta.pixel; pixel < cta.count; pixel += kQuad * plan.lines, to += step) {
    float values[kVector];
    UnpackBf16(x[i++], values);
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      values[v] = Activate(ActivationOf<kActivation>(norm),
                           fmaf(values[v] - line.mean[v], line.slope[v], line.offset[v]));
    *reinterpret_cast<uint4*>(to) = PackBf16(values);
  }
#endif
}

enum class Extra { kNone, kAdds, kSumsPixels };

/// tanh(x) with a relative error of at most 2⁻¹¹, in one instruction.
__device__ inline float Tanh(float x) {
  float tanh;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(x));
  return tanh;
}

/// What the backward pass does with z. dz is kept in bf16 where dout was, as PyTorch keeps it
/// between its two kernels.
///
/// SiLU's z is halved: h = z / 2, t = tanh(h), σ(z) = (1 + t) / 2, and so
///   2 · SiLU′(z) = 2σ(1 + z(1 − σ)) = 1 + t + h(1 − t²)
/// which takes one special function and three multiply-adds, and dz is doubled.
template <int kActivation>
struct Gradient {
  static constexpr bool kIsSilu = kActivation == static_cast<int>(Activation::kSilu);
  static constexpr float kZ = kIsSilu ? 0.5f : 1.0f;   // the factor of z
  static constexpr float kDz = kIsSilu ? 2.0f : 1.0f;  // the factor of dz
  /// kDz · dz, from dout and kZ · z.
  static __device__ float Dz(const NormLaunch& norm, float d, float z) {
    if constexpr (kIsSilu) {
      const float t = Tanh(z);
      return fmaf(d, fmaf(z, fmaf(-t, t, 1.0f), t), d);
    } else {
      return d * Derivative(ActivationOf<kActivation>(norm), z);
    }
  }
};

/// Grid as above. kExtra: whether there is backward.add, or backward.dx_sums.
template <int kActivation, Extra kExtra>
__global__ void __launch_bounds__(kMaxThreads, 2)
    NormBackwardKernel(const __grid_constant__ NormBackwardLaunch backward,
                       const __grid_constant__ Plan plan, const __grid_constant__ Maps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  using G = Gradient<kActivation>;
  constexpr bool kAdds = kExtra == Extra::kAdds, kSumsPixels = kExtra == Extra::kSumsPixels;
  constexpr int kSums = kSumsPixels ? 3 : 2;
  const NormLaunch& norm = backward.forward;
  const Cta<2, kSums> cta = {norm, plan, shared};
  Pair* const terms = cta.terms;
  auto* const coefficients = reinterpret_cast<float*>(terms + plan.strip);
  const int c = threadIdx.x, channel = cta.first + c;
  const bool has_channel = c < plan.strip;
  ReleaseDependents();
  cta.StartLoads({&maps.x, &maps.dout});
  const Vectors x = cta.VectorsOf(0), dout = cta.VectorsOf(1);
  const float* const statistics =
      norm.statistics + (cta.row * norm.groups + channel / plan.group_size) * 2;
  Parameters parameters = {};
  float mean = 0, rstd = 0;
  if (has_channel) {
    parameters = ParametersOf(norm, cta.row, channel);
    mean = statistics[0], rstd = statistics[1];
    const Affine of = AffineOf(parameters, mean, rstd);
    cta.StoreAffine({of.mean, of.slope * G::kZ, of.offset * G::kZ});
  }
  __syncthreads();

  float sums[kSums][kVector] = {};
  {
    Line<kVector> line;
    cta.LoadThree(cta.affine, line.mean, line.slope, line.offset);
    cta.ForEachArriving([&](int i) {
      float centered[kVector], dz[kVector];
      UnpackBf16(x[i], centered);
      UnpackBf16(dout[i], dz);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        centered[v] -= line.mean[v];
        dz[v] = G::Dz(norm, dz[v], fmaf(centered[v], line.slope[v], line.offset[v]));
        sums[0][v] = fmaf(dz[v], centered[v], sums[0][v]);  // of dz before it is rounded
        sums[1][v] += dz[v];
        if constexpr (kSumsPixels) sums[2][v] += centered[v];
      }
      if constexpr (kActivation != static_cast<int>(Activation::kNone)) dout[i] = PackBf16(dz);
    });
  }
  double totals[kSums] = {};
  cta.SumOverCluster(sums, totals);
  const Pair of_channel = {totals[0] / G::kDz, totals[1] / G::kDz};
  if (has_channel) terms[c] = TermsOf(parameters, rstd, of_channel);
  __syncthreads();
  // dx = dz·slope + x·b + k
  if (has_channel) {
    const int first = cta.FirstOfGroup(c), end = first + plan.group_size.value;
    Pair sum = {};
#pragma unroll 2
    for (int i = first; i < end; ++i) sum.a += terms[i].a, sum.b += terms[i].b;
    const double r = rstd, b = -r * r * sum.a * plan.count_inverse;
    const double k = -r * sum.b * plan.count_inverse;  // with x − mean instead of x
    const double slope = r * parameters.gamma * parameters.gain / G::kDz;
    coefficients[c] = static_cast<float>(slope);
    coefficients[plan.strip + c] = static_cast<float>(b);
    coefficients[2 * plan.strip + c] = static_cast<float>(k - mean * b);
    if constexpr (kSumsPixels) {
      if (cta.rank == 0)
        Store(backward.dx_sums, cta.row, channel,
              static_cast<float>(slope * totals[1] + b * totals[2] +
                                 k * static_cast<double>(norm.pixels)));
    }
  }
  __syncthreads();
  if (has_channel && cta.rank == 0)
    StoreParameterGradients(backward, cta.row, channel, parameters, rstd, of_channel);

  float slope[kVector], b[kVector], k[kVector];
  cta.LoadThree(coefficients, slope, b, k);
  const __nv_bfloat16* add = kAdds ? cta.At(backward.add, cta.column) : nullptr;
  const bool is_rest = cta.column >= backward.dx_channels;
  const Rows& out = is_rest ? backward.dx_rest : backward.dx;
  __nv_bfloat16* to = cta.At(out, is_rest ? cta.column - backward.dx_channels : cta.column);
  const int64_t step = cta.Step(out), add_step = cta.Step(backward.add);
  constexpr int kAtOnce = kAdds ? 4 : 1;  // loads in flight
  const int pixel_step = kQuad * plan.lines;
  int i = 0;
#pragma unroll 1
  for (int pixel = cta.pixel; pixel < cta.count; pixel += kAtOnce * pixel_step) {
    uint4 addends[kAtOnce];
    if constexpr (kAdds) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u, add += add_step)
        if (pixel + u * pixel_step < cta.count) addends[u] = *reinterpret_cast<const uint4*>(add);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u, to += step, ++i) {
      if (pixel + u * pixel_step >= cta.count) break;
      float values[kVector], dx[kVector];
      UnpackBf16(x[i], values);
      UnpackBf16(dout[i], dx);  // dz
#pragma unroll
      for (int v = 0; v < kVector; ++v) dx[v] = fmaf(dx[v], slope[v], fmaf(values[v], b[v], k[v]));
      if constexpr (kAdds) {
        float adds[kVector];
        UnpackBf16(addends[u], adds);
#pragma unroll
        for (int v = 0; v < kVector; ++v) dx[v] += adds[v];
      }
      *reinterpret_cast<uint4*>(to) = PackBf16(dx);
    }
  }
#endif
}

/// What decides the plan of a layer, forward or backward. The number of rows does not.
struct Layer {
  int pixels, channels, groups;
  bool backward;
};
Layer LayerOf(const NormLaunch& norm, bool backward) {
  return {static_cast<int>(norm.pixels), norm.channels, norm.groups, backward};
}

/// Operands in shared memory: x, or x and dout.
int OperandsOf(const Layer& layer) { return layer.backward ? 2 : 1; }
int BytesOf(const Layer& layer, const Plan& plan) {
  return Layout(plan, OperandsOf(layer), layer.backward ? 3 : 2).bytes;
}

/// Shared memory of a CTA: at most, so that two share a multiprocessor, and preferably.
constexpr int kMostBytes = 113 << 10, kGoodBytes = 56 << 10;
constexpr int kLeastStrip = 32, kGoodStrip = 64;  // channels: lines of 64 and 128 bytes

/// A multiprocessor has 768 threads, in as many CTAs as fit.
int ThreadsFor(int bytes) { return bytes <= 37 << 10 ? 128 : bytes <= 75 << 10 ? 256 : 384; }

Plan MakePlan(const Layer& layer, int strip, int cluster) {
  Plan plan;
  const int across = strip / kVector;
  plan.strip = strip;
  plan.cluster = cluster;
  plan.part = (layer.pixels + cluster - 1) / cluster;
  plan.box = ((plan.part + kMaxChunks - 1) / kMaxChunks + 7) / 8 * 8;
  plan.chunks = (plan.part + plan.box - 1) / plan.box;
  const int threads = ThreadsFor(plan.part * strip * 2 * OperandsOf(layer));
  const int unit = 8 / std::gcd(across, 8);  // whole warps
  plan.lines = std::max(threads / (kQuad * across) / unit * unit, unit);
  plan.lines = std::max(plan.lines, 2);  // a thread for each channel
  plan.across = FastDivmod(across);
  plan.group_size = FastDivmod(layer.channels / layer.groups);
  plan.pixels_inverse = 1.0 / static_cast<double>(layer.pixels);
  plan.count_inverse = plan.pixels_inverse / plan.group_size.value;
  return plan;
}

/// The smallest strip of at least `least` channels and the smallest cluster with which a CTA needs
/// at most `bytes`, or none (strip == 0).
Plan Fit(const Layer& layer, int least, int bytes) {
  const int unit = std::lcm(layer.channels / layer.groups, kVector);
  for (int strip = unit; strip <= std::min(layer.channels, kMaxBox); strip += unit) {
    if (layer.channels % strip != 0 || strip < std::min(least, layer.channels)) continue;
    for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
      const Plan plan = MakePlan(layer, strip, cluster);
      if (plan.box <= kMaxBox && Threads(plan) <= kMaxThreads && BytesOf(layer, plan) <= bytes) {
        return plan;
      }
    }
  }
  return {};
}
/// None if the layer is too large. Backwards, long lines and large parts are the fastest.
Plan PlanOf(const Layer& layer) {
  Plan plan =
      layer.backward ? Fit(layer, kGoodStrip, kMostBytes) : Fit(layer, kLeastStrip, kGoodBytes);
  if (plan.strip == 0) plan = Fit(layer, kLeastStrip, kMostBytes);
  return plan;
}

CUresult Encode(CUtensorMap* map, const NormLaunch& norm, const Rows& rows, const Plan& plan) {
  return EncodeTiled(
      map,
      {rows.data, {norm.channels, norm.rows * norm.pixels}, {rows.stride}, {plan.strip, plan.box}},
      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

/// `norm`: of the forward pass. `dout`: of the backward pass.
template <typename Argument>
cudaError_t Start(void (*kernel)(Argument, Plan, Maps), const NormLaunch& norm, const Rows& dout,
                  const Queue& queue, const Argument& argument) {
  const Layer layer = LayerOf(norm, dout.data != nullptr);
  const Plan plan = PlanOf(layer);
  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  if (cudaError_t error = LoadKernel(kernel, kMostBytes); error != cudaSuccess) return error;
  Maps maps = {};
  if (Encode(&maps.x, norm, norm.x, plan) != CUDA_SUCCESS ||
      (dout.data != nullptr && Encode(&maps.dout, norm, dout, plan) != CUDA_SUCCESS))
    return cudaErrorInvalidValue;
  return LaunchDependent(kernel,
                         {.grid = dim3(plan.cluster, norm.channels / plan.strip, norm.rows),
                          .block = dim3(Threads(plan)),
                          .shared_bytes = static_cast<size_t>(BytesOf(layer, plan)),
                          .cluster = static_cast<unsigned>(plan.cluster)},
                         queue, argument, plan, maps);
}

bool Suits(const NormLaunch& norm, bool backward, const Queue& queue) {
  return queue.hopper && norm.channels % kVector == 0 && InVectors(norm.x) &&
         norm.rows * norm.pixels <= INT32_MAX && PlanOf(LayerOf(norm, backward)).strip > 0;
}

}  // namespace

bool SuitsNormHopper(const NormLaunch& norm, const Queue& queue) {
  return Suits(norm, /*backward=*/false, queue) && InVectors(norm.out);
}
cudaError_t LaunchNormHopper(const NormLaunch& norm, const Queue& queue) {
  return WithActivation(norm.activation, [&](auto activation) {
    return Start(NormKernel<activation>, norm, Rows{}, queue, norm);
  });
}

bool SuitsNormBackwardHopper(const NormBackwardLaunch& norm, const Queue& queue) {
  return Suits(norm.forward, /*backward=*/true, queue) && InVectors(norm.dout) &&
         InVectors(norm.add) && InVectors(norm.dx) && InVectors(norm.dx_rest) &&
         norm.dx_channels % kVector == 0;
}
cudaError_t LaunchNormBackwardHopper(const NormBackwardLaunch& norm, const Queue& queue) {
  return WithActivation(norm.forward.activation, [&](auto activation) {
    const auto kernel = norm.add.data != nullptr ? NormBackwardKernel<activation, Extra::kAdds>
                        : norm.dx_sums.data != nullptr
                            ? NormBackwardKernel<activation, Extra::kSumsPixels>
                            : NormBackwardKernel<activation, Extra::kNone>;
    return Start(kernel, norm.forward, norm.dout, queue, norm);
  });
}

}  // namespace denoised::training::cuda
