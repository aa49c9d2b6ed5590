// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/convolution.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "engine/backend/check.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/core/e4m3.h"

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

std::vector<float> RoundedToE4m3(std::vector<float> weight, int outputs, float input_scale) {
  const auto each = static_cast<int64_t>(weight.size()) / outputs;
  for (int o = 0; o < outputs; ++o) {
    float* const part = weight.data() + o * each;
    float largest = 0;
    for (int64_t i = 0; i < each; ++i) largest = std::max(largest, std::fabs(part[i]));
    const float scale = E4m3Scale(largest);
    for (int64_t i = 0; i < each; ++i)
      part[i] = RoundToE4m3(part[i] / scale) * (scale * input_scale);
  }
  return weight;
}

std::vector<float> PhasesInE4m3(const std::vector<float>& weight_oihw, int out, int in,
                                float input_scale) {
  constexpr int kTaps = 9;
  // The row of the window over the image, for an even and an odd row of the doubled image.
  constexpr int kRowOf[2][3] = {{0, 1, 1}, {1, 1, 2}};
  const int64_t each = int64_t{in} * kTaps;
  std::vector<float> sums(4 * weight_oihw.size());  // [out, phases, in, 3, 3]
  for (int64_t o = 0; o < out; ++o) {
    for (int phase = 0; phase < 4; ++phase) {
      for (int64_t i = 0; i < each; ++i) {
        const auto tap = static_cast<int>(i % kTaps);
        const int at = kRowOf[phase / 2][tap / 3] * 3 + kRowOf[phase % 2][tap % 3];
        sums[(o * 4 + phase) * each + i - tap + at] += weight_oihw[o * each + i];
      }
    }
  }
  const std::vector<float> rounded = RoundedToE4m3(std::move(sums), out, input_scale);
  std::vector<float> by_phase(rounded.size());
  for (int64_t o = 0; o < out; ++o) {
    for (int64_t phase = 0; phase < 4; ++phase) {
      std::copy_n(rounded.begin() + (o * 4 + phase) * each, each,
                  by_phase.begin() + (phase * out + o) * each);
    }
  }
  return by_phase;
}

Convolution::Convolution(dnnl::engine engine, std::vector<float> weight_oihw, int out, int in,
                         int kernel, DType dtype, float input_scale)
    : engine_(std::move(engine)),
      out_(out),
      in_(in),
      kernel_(kernel),
      dtype_(dtype),
      input_scale_(input_scale),
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
  MutexLock lock(&mutex_);
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
  const auto type = dtype_ == DType::kBF16 ? dnnl::memory::data_type::bf16 : kF32;
  Plan plan;
  plan.source = Desc(source, type, Tag::nhwc);
  plan.bias = Desc({out_}, kF32, Tag::x);
  plan.destination = Desc(destination, kF32, Tag::nhwc);
  const auto described = DescribeConvolution(
      engine_, plan.source, Desc({out_, in_, kernel_, kernel_}, type, Tag::any), plan.bias,
      plan.destination, {g.stride, g.stride}, {g.pad_top, g.pad_left}, {g.pad_bottom, g.pad_right});
  plan.primitive = dnnl::convolution_forward(described);
  plan.weight = WeightAs(described.weights_desc());
  plan.scratchpad = described.scratchpad_desc();
  plan.arguments.resize(Workers());
  return plan;
}

std::shared_ptr<const Convolution::Plan> Convolution::Prepare(const ConvolutionGeometry& geometry) {
  MutexLock lock(&mutex_);
  auto found = plans_.find(geometry);
  if (found == plans_.end()) {
    found = plans_.emplace(geometry, Kept{std::make_shared<const Plan>(MakePlan(geometry))}).first;
  }
  found->second.used = ++uses_;
  return found->second.plan;
}

void Convolution::Trim(size_t most) {
  MutexLock lock(&mutex_);
  if (plans_.size() <= most) return;
  while (plans_.size() > most)
    plans_.erase(std::min_element(plans_.begin(), plans_.end(), [](const auto& a, const auto& b) {
      return a.second.used < b.second.used;
    }));
  // At least one layout is left, since a plan is left; new layouts are made from it.
  for (auto layout = layouts_.begin(); layout != layouts_.end();) {
    const bool used = std::any_of(plans_.begin(), plans_.end(), [&](const auto& each) {
      return each.second.plan->weight == *layout;
    });
    layout = used ? layout + 1 : layouts_.erase(layout);
  }
}

size_t Convolution::geometries() const {
  MutexLock lock(&mutex_);
  return plans_.size();
}

size_t Convolution::layouts() const {
  MutexLock lock(&mutex_);
  return layouts_.size();
}

void Convolution::Run(const Plan& plan, const void* source, const float* bias, float* destination,
                      void* scratchpad) const {
  std::optional<Arguments>& arguments = plan.arguments.at(Worker());
  if (!arguments) {
    const auto empty = [this](const dnnl::memory::desc& desc) {
      return dnnl::memory(desc, engine_, DNNL_MEMORY_NONE);
    };
    arguments = Arguments{.stream = dnnl::stream(engine_),
                          .source = empty(plan.source),
                          .bias = empty(plan.bias),
                          .destination = empty(plan.destination),
                          .scratchpad = empty(plan.scratchpad)};
  }
  arguments->source.set_data_handle(const_cast<void*>(source));
  arguments->bias.set_data_handle(const_cast<float*>(bias));
  arguments->destination.set_data_handle(destination);
  arguments->scratchpad.set_data_handle(scratchpad);
  const dnnl_exec_arg_t list[] = {{DNNL_ARG_SRC, arguments->source.get()},
                                  {DNNL_ARG_WEIGHTS, plan.weight.get()},
                                  {DNNL_ARG_BIAS, arguments->bias.get()},
                                  {DNNL_ARG_DST, arguments->destination.get()},
                                  {DNNL_ARG_SCRATCHPAD, arguments->scratchpad.get()}};
  const OneThread
      one_thread;  // as planned; a unit that is alone runs outside ParallelFor's threads
  // The C function: the one of C++ copies the list into a map.
  dnnl::error::wrap_c_api(dnnl_primitive_execute(plan.primitive.get(), arguments->stream.get(),
                                                 static_cast<int>(std::size(list)), list),
                          "a convolution failed");
  arguments->stream.wait();
}

}  // namespace denoised::cpu
