// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <memory>

#include "engine/backend/check.h"
#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/backend/cpu/vector_ops.h"

/// A row's output is cut into bands of whole lines, by its shape alone. A unit of work is one band
/// of one row: one thread computes it, and its input and output stay in that core's cache. So
/// several threads can work on one row, and the bits do not depend on how many there are.

namespace denoised::cpu {
namespace {

/// Enough to hide the cost of starting a primitive (a few µs against about 80).
constexpr int64_t kBandFlops = 8'000'000;
/// With fewer pixels, the time would go into reading the weights from memory.
constexpr int64_t kBandPixels = 32;

/// Geometries that a convolution keeps from call to call. An image size has up to four: the bands
/// at the top, in the middle and at the bottom, and a shorter last one. So eight sizes can
/// alternate without being prepared again, and memory does not grow with the number of sizes ever
/// used.
constexpr size_t kGeometries = 32;

/// Lines [begin, end) of the output, and the lines of the input that they read.
struct Band {
  int64_t begin = 0, end = 0;
  int64_t in_begin = 0, in_lines = 0;
  std::shared_ptr<const Convolution::Plan> plan;
};

int64_t BandLines(const Convolution& convolution, int64_t out_height, int64_t out_width) {
  const int64_t pixel_flops = int64_t{2} * convolution.out() * convolution.in() *
                              convolution.kernel() * convolution.kernel();
  const int64_t pixels = std::max(kBandPixels, kBandFlops / pixel_flops);
  const int64_t lines = std::clamp<int64_t>(pixels / out_width, 1, out_height);
  const int64_t bands = (out_height + lines - 1) / lines;
  return (out_height + bands - 1) / bands;
}

std::vector<Band> CutIntoBands(Convolution& convolution, const ConvolutionGeometry& whole,
                               int64_t out_height, int64_t out_width) {
  const int64_t lines = BandLines(convolution, out_height, out_width);
  std::vector<Band> bands;
  for (int64_t begin = 0; begin < out_height; begin += lines) {
    const int64_t end = std::min(begin + lines, out_height);
    // Lines of the input as if it went on beyond its edges; what lies outside is padding.
    const int64_t first = begin * whole.stride - whole.pad_top;
    const int64_t last = (end - 1) * whole.stride + convolution.kernel() - whole.pad_top;
    const int64_t in_begin = std::max<int64_t>(0, first), in_end = std::min(whole.height, last);
    ConvolutionGeometry geometry = whole;
    geometry.height = in_end - in_begin;
    geometry.pad_top = static_cast<int>(in_begin - first);
    geometry.pad_bottom = static_cast<int>(last - in_end);
    bands.push_back({begin, end, in_begin, geometry.height, convolution.Prepare(geometry)});
  }
  return bands;
}

void Store(const float* from, int64_t count, float e4m3_scale, float* to) {
  if (e4m3_scale != 0) return ScaleAndRoundToE4m3(from, 1 / e4m3_scale, to, count);
  std::memcpy(to, from, count * sizeof(float));
}
void Store(const float* from, int64_t count, float e4m3_scale, uint16_t* to) {
  if (e4m3_scale != 0) return ScaleAndRoundToE4m3(from, 1 / e4m3_scale, to, count);
  RoundToBf16(from, to, count);
}

/// Lines [begin, end) of a row's input as the convolution reads it: both sources side by side,
/// doubled if asked for, in its dtype, and rounded to e4m3 if it has a scale.
template <typename T>
void AssembleLines(const ConvolutionCall& call, int64_t row, int64_t begin, int64_t end, int64_t in,
                   float e4m3_scale, T* assembled) {
  const int64_t up = call.upsample2x ? 2 : 1, c1 = call.c1, c2 = in - c1;
  const int64_t width = call.geometry.width / up, height = call.geometry.height / up;
  const float* x = call.x + row * height * width * c1;
  const float* x2 = call.x2 != nullptr ? call.x2 + row * height * width * c2 : nullptr;
  T* to = assembled;
  if (x2 == nullptr && up == 1)
    return Store(x + begin * width * in, (end - begin) * width * in, e4m3_scale, to);
  for (int64_t h = begin; h < end; ++h) {
    for (int64_t w = 0; w < width * up; ++w, to += in) {
      const int64_t pixel = h / up * width + w / up;
      Store(x + pixel * c1, c1, e4m3_scale, to);
      if (x2 != nullptr) Store(x2 + pixel * c2, c2, e4m3_scale, to + c1);
    }
  }
}

}  // namespace

void RunConvolution(Convolution& convolution, const ConvolutionCall& call, Scratch& scratch) {
  const ConvolutionGeometry& whole = call.geometry;
  const int64_t in = convolution.in(), sums_out = convolution.out();
  const int64_t phases = call.in_phases ? 4 : 1, out = sums_out / phases;
  const int64_t out_height = ConvolutionExtent(whole.height, whole.pad_top, whole.pad_bottom,
                                               convolution.kernel(), whole.stride);
  const int64_t out_width = ConvolutionExtent(whole.width, whole.pad_left, whole.pad_right,
                                              convolution.kernel(), whole.stride);
  convolution.Trim(kGeometries);
  const std::vector<Band> bands = CutIntoBands(convolution, whole, out_height, out_width);
  const bool bf16 = convolution.dtype() == DType::kBF16;
  const float e4m3_scale = convolution.input_scale();
  const bool assemble = call.x2 != nullptr || call.upsample2x || bf16 || e4m3_scale != 0;

  // Whether the sums have a place of their own.
  const bool in_place = call.residual == call.out, apart = in_place || call.in_phases;

  // Each thread's part: the primitive's scratchpad, the bias of the row, the assembled lines, and
  // the sums if they are apart.
  constexpr size_t kAlignment = 64 / sizeof(float);
  const auto aligned = [](size_t floats) {
    return (floats + kAlignment - 1) / kAlignment * kAlignment;
  };
  size_t scratchpad = 0, lines = 0, result = 0;
  for (const Band& band : bands) {
    scratchpad = std::max(scratchpad, band.plan->scratchpad.get_size() / sizeof(float) + 1);
    if (assemble) lines = std::max(lines, band.plan->source.get_size() / sizeof(float) + 1);
    if (apart) result = std::max(result, band.plan->destination.get_size() / sizeof(float));
  }
  const size_t bias_at = aligned(scratchpad), lines_at = bias_at + aligned(sums_out);
  const size_t result_at = lines_at + aligned(lines), each = result_at + aligned(result);
  float* const working = scratch.Take<float>(each * Threads());

  const auto units = static_cast<int64_t>(bands.size());
  ParallelFor(call.rows * units, [&](int64_t unit, int thread) {
    const int64_t row = unit / units;
    const Band& band = bands[unit % units];
    float* const mine = working + each * thread;
    const void* source = call.x + (row * whole.height + band.in_begin) * whole.width * in;
    if (assemble) {
      float* const assembled = mine + lines_at;
      const int64_t in_end = band.in_begin + band.in_lines;
      if (bf16) {
        auto* const rounded = reinterpret_cast<uint16_t*>(assembled);
        AssembleLines(call, row, band.in_begin, in_end, in, e4m3_scale, rounded);
      } else {
        AssembleLines(call, row, band.in_begin, in_end, in, e4m3_scale, assembled);
      }
      source = assembled;
    }
    const float* bias = call.bias;
    if (call.add != nullptr || call.in_phases) {
      const float* const add = call.add != nullptr ? call.add + row * call.add_stride : nullptr;
      bias = mine + bias_at;
      for (int64_t phase = 0; phase < phases; ++phase)
        Axpb(call.bias, 1.0f, add, 0.0f, mine + bias_at + phase * out, out);
    }
    const int64_t at = (row * out_height + band.begin) * out_width * sums_out;
    float* const sums = apart ? mine + result_at : call.out + at;
    convolution.Run(*band.plan, source, bias, sums, mine);
    const auto finish = [&](const float* from, int64_t to, int64_t count) {
      float* const y = call.out + to;
      if (apart && !in_place) std::copy_n(from, count, y);
      const float* const residual = call.residual != nullptr ? call.residual + to : nullptr;
      AddScale(y, in_place ? from : residual, call.scale, count);
      Activate(call.activation, y, count);
    };
    if (!call.in_phases) return finish(sums, at, (band.end - band.begin) * out_width * out);
    const float* from = sums;
    for (int64_t h = band.begin; h < band.end; ++h) {
      for (int64_t w = 0; w < out_width; ++w) {
        for (int64_t phase = 0; phase < phases; ++phase, from += out) {
          const int64_t line = (row * out_height + h) * 2 + phase / 2;
          finish(from, (line * out_width * 2 + 2 * w + phase % 2) * out, out);
        }
      }
    }
  });
}

void Conv2d(const Conv2dArgs& args, Scratch& scratch) {
  const auto& weight = static_cast<const CpuConv2d&>(*args.weight);
  if (args.out.elements() == 0) return;
  const Prologue& prologue = args.prologue;
  const Epilogue& epilogue = args.epilogue;
  ConvolutionCall call;
  call.in_phases = prologue.upsample2x && weight.e4m3.input_scale != 0;
  call.upsample2x = prologue.upsample2x && !call.in_phases;
  const int64_t up = call.upsample2x ? 2 : 1;
  call.geometry = {args.x.dim(1) * up, args.x.dim(2) * up, args.stride,   args.pad_top,
                   args.pad_left,      args.pad_bottom,    args.pad_right};
  call.rows = args.x.dim(0);
  call.x = args.x.as<float>();
  if (prologue.x2) call.x2 = prologue.x2.as<float>();
  call.c1 = args.x.dim(3);
  call.bias = weight.bias.data();
  if (epilogue.add) {
    call.add = epilogue.add.as<float>();
    call.add_stride = epilogue.add.row_stride();
  }
  if (epilogue.residual) call.residual = epilogue.residual.as<float>();
  call.scale = epilogue.scale;
  call.activation = epilogue.activation;
  call.out = args.out.as<float>();
  RunConvolution(*weight.convolution, call, scratch);
}

}  // namespace denoised::cpu
