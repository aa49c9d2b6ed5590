// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "engine/backend/check.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/training/cpu/loops.h"
#include "engine/training/cpu/ops.h"

namespace denoised::training::cpu {
namespace {

using Desc = dnnl::memory::desc;
using Dims = dnnl::memory::dims;
using Tag = dnnl::memory::format_tag;
using denoised::cpu::OneThread;
constexpr auto kF32 = dnnl::memory::data_type::f32;
constexpr auto kTraining = dnnl::prop_kind::forward_training;
constexpr auto kDirect = dnnl::algorithm::convolution_direct;

dnnl::primitive_attr Attributes() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attributes.set_fpmath_mode(dnnl::fpmath_mode::strict);
  return attributes;
}

CpuConv2d::Size SizeOf(const Tensor& x, const PackedConv2d& weight, const Conv2dGeometry& g,
                       int64_t rows) {
  const int up = weight.upsample2x ? 2 : 1;
  return {.rows = rows,
          .height = x.dim(1) * up,
          .width = x.dim(2) * up,
          .stride = g.stride,
          .pad_top = g.pad_top,
          .pad_left = g.pad_left,
          .pad_bottom = g.pad_bottom,
          .pad_right = g.pad_right};
}

/// The arguments of a primitive. Their memory objects hold only an address and a layout.
class Arguments {
 public:
  explicit Arguments(const dnnl::engine& engine) : engine_(engine) {}
  Arguments& Add(int argument, const Desc& desc, const void* data) {
    list_.emplace(argument, dnnl::memory(desc, engine_, const_cast<void*>(data)));
    return *this;
  }
  Arguments& Add(int argument, const dnnl::memory& memory) {
    list_.emplace(argument, memory);
    return *this;
  }
  void Run(const dnnl::primitive& primitive) {
    const OneThread one_thread;
    dnnl::stream stream(engine_);
    primitive.execute(stream, list_);
    stream.wait();
  }

 private:
  const dnnl::engine& engine_;
  std::unordered_map<int, dnnl::memory> list_;
};

enum Slot { kScratchpad = 0, kDoubled = 1, kPackedGradient = 2 };

float* Scratchpad(const Desc& desc) {
  return ThreadScratch(kScratchpad, desc.get_size() / sizeof(float) + 1);
}

}  // namespace

CpuConv2d::CpuConv2d(dnnl::engine engine, int in, int out, int kernel_size, bool upsample)
    : engine_(std::move(engine)), plain_({out, in, kernel_size, kernel_size}, kF32, Tag::oihw) {
  in_channels = in;
  out_channels = out;
  kernel = kernel_size;
  upsample2x = upsample;
}

void CpuConv2d::Pack(const float* weight, const float* bias) {
  MutexLock lock(&mutex_);
  master_ = weight;
  bias_ = bias;
  for (auto& [size, plan] : plans_) Fill(&plan);
}

void CpuConv2d::Fill(Plan* plan) const {
  const OneThread one_thread;
  dnnl::stream stream(engine_);
  dnnl::memory from(plain_, engine_, const_cast<float*>(master_));
  for (dnnl::memory* to : {&plan->for_forward, &plan->for_data})
    dnnl::reorder(from, *to).execute(stream, from, *to);
  stream.wait();
}

const CpuConv2d::Plan& CpuConv2d::Prepare(const Size& size) {
  MutexLock lock(&mutex_);
  auto found = plans_.find(size);
  if (found == plans_.end()) {
    DENOISED_CHECK(has_weight(), "a convolution was used before PackConv2d()");
    found = plans_.emplace(size, MakePlan(size)).first;
    Fill(&found->second);
  }
  return found->second;
}

CpuConv2d::Plan CpuConv2d::MakePlan(const Size& s) const {
  const OneThread one_thread;
  const Dims strides = {s.stride, s.stride}, before = {s.pad_top, s.pad_left},
             after = {s.pad_bottom, s.pad_right};
  const int64_t height = ConvolutionExtent(s.height, s.pad_top, s.pad_bottom, kernel, s.stride);
  const int64_t width = ConvolutionExtent(s.width, s.pad_left, s.pad_right, kernel, s.stride);
  Plan plan;
  plan.source = Desc({s.rows, in_channels, s.height, s.width}, kF32, Tag::nhwc);
  plan.bias = Desc({out_channels}, kF32, Tag::x);
  plan.destination = Desc({s.rows, out_channels, height, width}, kF32, Tag::nhwc);
  const Desc any({out_channels, in_channels, kernel, kernel}, kF32, Tag::any);
  const dnnl::primitive_attr attributes = Attributes();
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::convolution_forward::primitive_desc forward(engine_, kTraining, kDirect, plan.source,
                                                          any, plan.bias, plan.destination, strides,
                                                          before, after, attributes);
  const dnnl::convolution_backward_data::primitive_desc data(engine_, kDirect, plan.source, any,
                                                             plan.destination, strides, before,
                                                             after, forward, attributes);
  const dnnl::convolution_backward_weights::primitive_desc weights(
      engine_, kDirect, plan.source, any, plan.bias, plan.destination, strides, before, after,
      forward, attributes);
#else
  const dnnl::convolution_forward::primitive_desc forward(
      {kTraining, kDirect, plan.source, any, plan.bias, plan.destination, strides, before, after},
      attributes, engine_);
  const dnnl::convolution_backward_data::primitive_desc data(
      {kDirect, plan.source, any, plan.destination, strides, before, after}, attributes, engine_,
      forward);
  const dnnl::convolution_backward_weights::primitive_desc weights(
      {kDirect, plan.source, any, plan.bias, plan.destination, strides, before, after}, attributes,
      engine_, forward);
#endif
  plan.forward = dnnl::convolution_forward(forward);
  plan.backward_data = dnnl::convolution_backward_data(data);
  plan.backward_weights = dnnl::convolution_backward_weights(weights);
  plan.forward_weight = forward.weights_desc();
  plan.data_weight = data.weights_desc();
  plan.weight_gradient = weights.diff_weights_desc();
  plan.scratch[0] = forward.scratchpad_desc();
  plan.scratch[1] = data.scratchpad_desc();
  plan.scratch[2] = weights.scratchpad_desc();
  plan.for_forward = dnnl::memory(plan.forward_weight, engine_);
  plan.for_data = plan.data_weight == plan.forward_weight ? plan.for_forward
                                                          : dnnl::memory(plan.data_weight, engine_);
  plan.unpack =
      dnnl::reorder(dnnl::reorder::primitive_desc(engine_, plan.weight_gradient, engine_, plain_));
  return plan;
}

void Conv2d(const Conv2dArgs& args, int64_t chunk_rows) {
  auto& weight = static_cast<CpuConv2d&>(const_cast<PackedConv2d&>(*args.weight));
  const int64_t total = args.x.dim(0), rows = chunk_rows == 0 ? total : chunk_rows;
  const CpuConv2d::Plan& plan = weight.Prepare(SizeOf(args.x, weight, args.geometry, rows));
  const int64_t in = args.x.elements() / total, pixels = args.out.dim(1) * args.out.dim(2),
                channels = args.out.dim(3), out = pixels * channels;
  float* const scratchpad = Scratchpad(plan.scratch[0]);
  std::vector<float> none;
  const float* bias = weight.bias();
  if (bias == nullptr) {
    none.resize(channels);
    bias = none.data();
  }
  for (int64_t begin = 0; begin < total; begin += rows) {
    const float* x = args.x.as<float>() + begin * in;
    if (weight.upsample2x) {
      float* doubled = ThreadScratch(kDoubled, rows * in * 4);
      Double(x, 1, rows * args.x.dim(1), args.x.dim(2), args.x.dim(3), doubled);
      x = doubled;
    }
    float* to = args.out.as<float>() + begin * out;
    Arguments(weight.engine())
        .Add(DNNL_ARG_SRC, plan.source, x)
        .Add(DNNL_ARG_WEIGHTS, plan.for_forward)
        .Add(DNNL_ARG_BIAS, plan.bias, bias)
        .Add(DNNL_ARG_DST, plan.destination, to)
        .Add(DNNL_ARG_SCRATCHPAD, plan.scratch[0], scratchpad)
        .Run(plan.forward);
    for (int64_t n = 0; n < rows; ++n)
      Finish(to + n * out, args.add ? args.add.as<float>() + (begin + n) * channels : nullptr,
             args.residual ? args.residual.as<float>() + (begin + n) * out : nullptr, args.scale,
             pixels, channels);
  }
}

void Conv2dBackward(const Conv2dBackwardArgs& args, int64_t chunk_rows) {
  auto& weight = static_cast<CpuConv2d&>(const_cast<PackedConv2d&>(*args.weight));
  const Tensor& x = args.dx ? args.dx : args.x;  // for its shape
  const int64_t total = args.dout.dim(0), rows = chunk_rows == 0 ? total : chunk_rows;
  const CpuConv2d::Plan& plan = weight.Prepare(SizeOf(x, weight, args.geometry, rows));
  const int64_t in = x.elements() / total, out = args.dout.elements() / total;
  DENOISED_CHECK(args.dweight || !args.dbias, "a bias's gradient comes with the weights'");
  if (args.dweight) {
    const auto count = static_cast<size_t>(args.dweight.elements());
    const auto biases = static_cast<size_t>(weight.out_channels);
    // The bias's gradient is summed with the weights': [weights, biases] for each chunk.
    std::vector<float> both(count + biases);
    SumChunks(total, rows, count + biases, both.data(), [&](int64_t begin, int64_t, float* to) {
      const float* from = args.x.as<float>() + begin * in;
      if (weight.upsample2x) {
        float* doubled = ThreadScratch(kDoubled, rows * in * 4);
        Double(from, 1, rows * x.dim(1), x.dim(2), x.dim(3), doubled);
        from = doubled;
      }
      float* packed = ThreadScratch(kPackedGradient, plan.weight_gradient.get_size() / 4 + 1);
      Arguments(weight.engine())
          .Add(DNNL_ARG_SRC, plan.source, from)
          .Add(DNNL_ARG_DIFF_DST, plan.destination, args.dout.as<float>() + begin * out)
          .Add(DNNL_ARG_DIFF_WEIGHTS, plan.weight_gradient, packed)
          .Add(DNNL_ARG_DIFF_BIAS, plan.bias, to + count)
          .Add(DNNL_ARG_SCRATCHPAD, plan.scratch[2], Scratchpad(plan.scratch[2]))
          .Run(plan.backward_weights);
      Arguments(weight.engine())
          .Add(DNNL_ARG_FROM, plan.weight_gradient, packed)
          .Add(DNNL_ARG_TO, weight.plain(), to)
          .Run(plan.unpack);
    });
    std::memcpy(args.dweight.data(), both.data(), count * sizeof(float));
    if (args.dbias) std::memcpy(args.dbias.data(), both.data() + count, biases * sizeof(float));
  }
  if (!args.dx) return;
  for (int64_t begin = 0; begin < total; begin += rows) {
    float* const to = args.dx.as<float>() + begin * in;
    float* const at = weight.upsample2x ? ThreadScratch(kDoubled, rows * in * 4) : to;
    Arguments(weight.engine())
        .Add(DNNL_ARG_DIFF_DST, plan.destination, args.dout.as<float>() + begin * out)
        .Add(DNNL_ARG_WEIGHTS, plan.for_data)
        .Add(DNNL_ARG_DIFF_SRC, plan.source, at)
        .Add(DNNL_ARG_SCRATCHPAD, plan.scratch[1], Scratchpad(plan.scratch[1]))
        .Run(plan.backward_data);
    if (weight.upsample2x) SumFours(at, 1, rows * x.dim(1), x.dim(2), x.dim(3), to);
  }
}

}  // namespace denoised::training::cpu
