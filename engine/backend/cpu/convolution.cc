#include "engine/backend/cpu/convolution.h"

#include <algorithm>

#include "engine/backend/check.h"
#include "engine/backend/cpu/parallel.h"

namespace denoised::cpu {
namespace {

using Desc = dnnl::memory::desc;
using Tag = dnnl::memory::format_tag;
constexpr auto kF32 = dnnl::memory::data_type::f32;

void Reorder(dnnl::memory& from, dnnl::memory& to, const dnnl::engine& engine) {
  dnnl::stream stream(engine);
  dnnl::reorder(from, to).execute(stream, from, to);
  stream.wait();
}

}  // namespace

Convolution::Convolution(dnnl::engine engine, std::vector<float> weight_oihw, int out, int in,
                         int kernel)
    : engine_(std::move(engine)),
      out_(out),
      in_(in),
      kernel_(kernel),
      plain_weight_(std::move(weight_oihw)) {}

dnnl::memory Convolution::WeightAs(const Desc& layout) {
  for (const dnnl::memory& memory : layouts_) {
    if (memory.get_desc() == layout) return memory;
  }
  dnnl::memory from = layouts_.empty()
                          ? dnnl::memory({{out_, in_, kernel_, kernel_}, kF32, Tag::oihw}, engine_,
                                         plain_weight_.data())
                          : layouts_.front();
  dnnl::memory to(layout, engine_);
  Reorder(from, to, engine_);
  layouts_.push_back(to);
  std::vector<float>().swap(plain_weight_);
  return to;
}

std::vector<float> Convolution::PlainWeight() const {
  if (layouts_.empty()) return plain_weight_;
  std::vector<float> plain(static_cast<size_t>(out_) * in_ * kernel_ * kernel_);
  dnnl::memory from = layouts_.front();
  dnnl::memory to({{out_, in_, kernel_, kernel_}, kF32, Tag::oihw}, engine_, plain.data());
  Reorder(from, to, engine_);
  return plain;
}

Convolution::Plan Convolution::MakePlan(ConvolutionGeometry g) {
  const OneThread one_thread;
  const int64_t out_height =
      ConvolutionExtent(g.height, g.pad_top, g.pad_bottom, kernel_, g.stride);
  const int64_t out_width = ConvolutionExtent(g.width, g.pad_left, g.pad_right, kernel_, g.stride);
  dnnl::memory::dims source = {1, in_, g.height, g.width};
  dnnl::memory::dims destination = {1, out_, out_height, out_width};
  if (kernel_ == 1 && source[2] == out_height && source[3] == out_width) {
    // Without neighbours an image is a list of pixels; in one line it blocks best.
    source = {1, in_, 1, g.height * g.width};
    destination = {1, out_, 1, g.height * g.width};
  }
  Plan plan;
  plan.source = Desc(source, kF32, Tag::nhwc);
  plan.bias = Desc({out_}, kF32, Tag::x);
  plan.destination = Desc(destination, kF32, Tag::nhwc);
  const auto described = DescribeConvolution(
      engine_, plan.source, Desc({out_, in_, kernel_, kernel_}, kF32, Tag::any), plan.bias,
      plan.destination, {g.stride, g.stride}, {g.pad_top, g.pad_left}, {g.pad_bottom, g.pad_right});
  plan.primitive = dnnl::convolution_forward(described);
  plan.weight = WeightAs(described.weights_desc());
  plan.scratchpad = described.scratchpad_desc();
  return plan;
}

const Convolution::Plan& Convolution::Prepare(const ConvolutionGeometry& geometry) {
  auto found = plans_.find(geometry);
  if (found == plans_.end()) found = plans_.emplace(geometry, Kept{MakePlan(geometry)}).first;
  found->second.used = ++uses_;
  return found->second.plan;
}

void Convolution::Trim(size_t most) {
  if (plans_.size() <= most) return;
  while (plans_.size() > most)
    plans_.erase(std::min_element(plans_.begin(), plans_.end(), [](const auto& a, const auto& b) {
      return a.second.used < b.second.used;
    }));
  // One is left, since a plan is, and others are made of it.
  std::erase_if(layouts_, [&](const dnnl::memory& layout) {
    return std::none_of(plans_.begin(), plans_.end(),
                        [&](const auto& each) { return each.second.plan.weight == layout; });
  });
}

void Convolution::Run(const Plan& plan, const float* source, const float* bias, float* destination,
                      void* scratchpad) const {
  dnnl::stream stream(engine_);
  plan.primitive.execute(stream,
                         {{DNNL_ARG_SRC, {plan.source, engine_, const_cast<float*>(source)}},
                          {DNNL_ARG_WEIGHTS, plan.weight},
                          {DNNL_ARG_BIAS, {plan.bias, engine_, const_cast<float*>(bias)}},
                          {DNNL_ARG_DST, {plan.destination, engine_, destination}},
                          {DNNL_ARG_SCRATCHPAD, {plan.scratchpad, engine_, scratchpad}}});
  stream.wait();
}

}  // namespace denoised::cpu
