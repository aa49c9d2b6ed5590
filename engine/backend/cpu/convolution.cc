#include "engine/backend/cpu/convolution.h"

#include "engine/backend/check.h"

namespace denoised::cpu {

using Desc = dnnl::memory::desc;
using Tag = dnnl::memory::format_tag;
constexpr auto kF32 = dnnl::memory::data_type::f32;

Convolution::Convolution(OneDnn* onednn, std::vector<float> weight_oihw, int out, int in,
                         int kernel)
    : onednn_(onednn), out_(out), in_(in), kernel_(kernel), plain_weight_(std::move(weight_oihw)) {}

dnnl::memory Convolution::WeightAs(const Desc& layout) {
  for (const dnnl::memory& memory : layouts_) {
    if (memory.get_desc() == layout) return memory;
  }
  dnnl::memory from = layouts_.empty()
                          ? dnnl::memory({{out_, in_, kernel_, kernel_}, kF32, Tag::oihw},
                                         onednn_->engine, plain_weight_.data())
                          : layouts_.front();
  dnnl::memory to(layout, onednn_->engine);
  dnnl::reorder(from, to).execute(onednn_->stream, from, to);
  onednn_->stream.wait();
  layouts_.push_back(to);
  std::vector<float>().swap(plain_weight_);
  return to;
}

std::vector<float> Convolution::PlainWeight() const {
  if (layouts_.empty()) return plain_weight_;
  std::vector<float> plain(static_cast<size_t>(out_) * in_ * kernel_ * kernel_);
  dnnl::memory from = layouts_.front();
  dnnl::memory to({{out_, in_, kernel_, kernel_}, kF32, Tag::oihw}, onednn_->engine, plain.data());
  dnnl::reorder(from, to).execute(onednn_->stream, from, to);
  onednn_->stream.wait();
  return plain;
}

Convolution::Plan Convolution::MakePlan(const ConvolutionGeometry& g) {
  const int64_t out_height =
      ConvolutionExtent(g.height, g.pad_top, g.pad_bottom, kernel_, g.stride);
  const int64_t out_width = ConvolutionExtent(g.width, g.pad_left, g.pad_right, kernel_, g.stride);
  const Desc source({1, in_, g.height, g.width}, kF32, Tag::nhwc);
  const Desc any_weight({out_, in_, kernel_, kernel_}, kF32, Tag::any);
  const Desc bias({out_}, kF32, Tag::x);
  const Desc destination({1, out_, out_height, out_width}, kF32, Tag::nhwc);
  const auto described = DescribeConvolution(onednn_->engine, source, any_weight, bias, destination,
                                             {g.stride, g.stride}, {g.pad_top, g.pad_left},
                                             {g.pad_bottom, g.pad_right});
  Plan plan;
  plan.primitive = dnnl::convolution_forward(described);
  plan.weight = WeightAs(described.weights_desc());
  plan.source = dnnl::memory(source, onednn_->engine, nullptr);
  plan.bias = dnnl::memory(bias, onednn_->engine, nullptr);
  plan.destination = dnnl::memory(destination, onednn_->engine, nullptr);
  plan.scratchpad = dnnl::memory(described.scratchpad_desc(), onednn_->engine, nullptr);
  plan.scratchpad_bytes = described.scratchpad_desc().get_size();
  return plan;
}

void Convolution::Run(const ConvolutionGeometry& geometry, const float* source, const float* bias,
                      float* destination) {
  auto found = plans_.find(geometry);
  if (found == plans_.end()) found = plans_.emplace(geometry, MakePlan(geometry)).first;
  Plan& plan = found->second;
  plan.source.set_data_handle(const_cast<float*>(source));
  plan.bias.set_data_handle(const_cast<float*>(bias));
  plan.destination.set_data_handle(destination);
  plan.scratchpad.set_data_handle(onednn_->scratchpad.Take<std::byte>(plan.scratchpad_bytes));
  plan.primitive.execute(onednn_->stream, {{DNNL_ARG_SRC, plan.source},
                                           {DNNL_ARG_WEIGHTS, plan.weight},
                                           {DNNL_ARG_BIAS, plan.bias},
                                           {DNNL_ARG_DST, plan.destination},
                                           {DNNL_ARG_SCRATCHPAD, plan.scratchpad}});
  onednn_->stream.wait();
}

}  // namespace denoised::cpu
