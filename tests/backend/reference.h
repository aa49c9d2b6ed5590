// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <vector>

#include "engine/backend/backend.h"

/// The ops of backend.h written down naively in double, from their definitions and apart from every
/// backend: what the op tests expect. NHWC, one loop for each index.

namespace denoised::reference {

struct Array {
  Shape shape;
  std::vector<double> values;

  Array() = default;
  explicit Array(const Shape& s) : shape(s), values(s.elements()) {}
  bool defined() const { return shape.rank() > 0; }
  double& at(int64_t i) { return values[i]; }
  double at(int64_t i) const { return values[i]; }
  /// Element of an [N, H, W, C] image.
  double at(int64_t n, int64_t h, int64_t w, int64_t c) const {
    return values[((n * shape[1] + h) * shape[2] + w) * shape[3] + c];
  }
};

inline double Activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kMish:
      return x * std::tanh(std::log1p(std::exp(x)));
    case Activation::kGelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kRelu:
      return x > 0 ? x : 0;
    case Activation::kQuickGelu:
      return x / (1 + std::exp(-1.702 * x));
    case Activation::kTanh:
      return std::tanh(x);
  }
  return NAN;
}

/// concat(x, x2) along the last dimension; x2 may be undefined.
inline Array Concat(const Array& x, const Array& x2) {
  if (!x2.defined()) return x;
  const int64_t c1 = x.shape[-1], c2 = x2.shape[-1], rows = x.shape.elements() / c1;
  int64_t dims[Shape::kMaxRank];
  for (int i = 0; i < x.shape.rank(); ++i) dims[i] = x.shape[i];
  dims[x.shape.rank() - 1] = c1 + c2;
  Array out(Shape(std::span<const int64_t>(dims, x.shape.rank())));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < c1 + c2; ++c) {
      out.at(r * (c1 + c2) + c) = c < c1 ? x.at(r * c1 + c) : x2.at(r * c2 + c - c1);
    }
  }
  return out;
}

/// Geometry, scale and activation are read from `args`; its tensors are not.
inline Array Conv2d(const Conv2dArgs& args, const Array& x, const Array& x2,
                    const Array& weight_oihw, const Array& bias, const Array& add,
                    const Array& residual) {
  const Array in = Concat(x, x2);
  const int64_t up = args.prologue.upsample2x ? 2 : 1, kernel = weight_oihw.shape[2];
  const int64_t height = in.shape[1] * up, width = in.shape[2] * up, channels = in.shape[3];
  const int64_t out_channels = weight_oihw.shape[0];
  const int64_t out_height = (height + args.pad_top + args.pad_bottom - kernel) / args.stride + 1;
  const int64_t out_width = (width + args.pad_left + args.pad_right - kernel) / args.stride + 1;
  Array out({in.shape[0], out_height, out_width, out_channels});
  int64_t at = 0;
  for (int64_t n = 0; n < in.shape[0]; ++n) {
    for (int64_t oh = 0; oh < out_height; ++oh) {
      for (int64_t ow = 0; ow < out_width; ++ow) {
        for (int64_t o = 0; o < out_channels; ++o, ++at) {
          double sum = bias.defined() ? bias.at(o) : 0;
          for (int64_t kh = 0; kh < kernel; ++kh) {
            for (int64_t kw = 0; kw < kernel; ++kw) {
              const int64_t h = oh * args.stride + kh - args.pad_top;
              const int64_t w = ow * args.stride + kw - args.pad_left;
              if (h < 0 || h >= height || w < 0 || w >= width) continue;
              for (int64_t c = 0; c < channels; ++c) {
                sum += in.at(n, h / up, w / up, c) *
                       weight_oihw.at(((o * channels + c) * kernel + kh) * kernel + kw);
              }
            }
          }
          if (add.defined()) sum += add.at(n * out_channels + o);
          if (residual.defined()) sum += residual.at(at);
          out.at(at) = Activate(args.epilogue.activation, sum * args.epilogue.scale);
        }
      }
    }
  }
  return out;
}

/// `weight_oi` and `bias` are the concatenation of what was packed.
inline Array Linear(const LinearArgs& args, const Array& x, const Array& weight_oi,
                    const Array& bias, const Array& residual) {
  const int64_t in = weight_oi.shape[1], out = weight_oi.shape[0], rows = x.shape.elements() / in;
  int64_t dims[Shape::kMaxRank];
  for (int i = 0; i < x.shape.rank(); ++i) dims[i] = x.shape[i];
  dims[x.shape.rank() - 1] = out;
  Array y(Shape(std::span<const int64_t>(dims, x.shape.rank())));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < out; ++o) {
      double sum = bias.defined() ? bias.at(o) : 0;
      for (int64_t i = 0; i < in; ++i) sum += x.at(r * in + i) * weight_oi.at(o * in + i);
      if (residual.defined()) sum += residual.at(r * out + o);
      y.at(r * out + o) = Activate(args.epilogue.activation, sum * args.epilogue.scale);
    }
  }
  return y;
}

inline Array GroupNorm(const GroupNormArgs& args, const Array& x, const Array& x2,
                       const Array& gamma, const Array& beta, const Array& scale_shift) {
  const Array in = Concat(x, x2);
  const int64_t rows = in.shape[0], channels = in.shape[-1];
  const int64_t pixels = in.shape.elements() / rows / channels, size = channels / args.norm.groups;
  Array out(in.shape);
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t g = 0; g < args.norm.groups; ++g) {
      const auto at = [&](int64_t p, int64_t c) {
        return (n * pixels + p) * channels + g * size + c;
      };
      double mean = 0, variance = 0;
      for (int64_t p = 0; p < pixels; ++p) {
        for (int64_t c = 0; c < size; ++c) mean += in.at(at(p, c)) / (pixels * size);
      }
      for (int64_t p = 0; p < pixels; ++p) {
        for (int64_t c = 0; c < size; ++c) {
          variance += std::pow(in.at(at(p, c)) - mean, 2) / (pixels * size);
        }
      }
      for (int64_t p = 0; p < pixels; ++p) {
        for (int64_t c = 0; c < size; ++c) {
          const int64_t channel = g * size + c;
          double y = (in.at(at(p, c)) - mean) / std::sqrt(variance + args.norm.eps);
          y = y * gamma.at(channel) + beta.at(channel);
          if (scale_shift.defined()) {
            const int64_t row = n * 2 * channels;
            y = y * (1 + scale_shift.at(row + channel)) + scale_shift.at(row + channels + channel);
          }
          out.at(at(p, c)) = Activate(args.norm.activation, y);
        }
      }
    }
  }
  return out;
}

inline Array LayerNorm(const LayerNormArgs& args, const Array& x, const Array& gamma,
                       const Array& beta) {
  const int64_t channels = x.shape[-1];
  Array out(x.shape);
  for (int64_t begin = 0; begin < x.shape.elements(); begin += channels) {
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < channels; ++c) mean += x.at(begin + c) / channels;
    for (int64_t c = 0; c < channels; ++c) {
      variance += std::pow(x.at(begin + c) - mean, 2) / channels;
    }
    for (int64_t c = 0; c < channels; ++c) {
      const double y = (x.at(begin + c) - mean) / std::sqrt(variance + args.eps);
      out.at(begin + c) = y * gamma.at(c) + beta.at(c);
    }
  }
  return out;
}

/// The integers of AttentionArgs' key_set and key_counts; empty: none.
struct KeySets {
  std::vector<int32_t> set, counts;
};

inline Array Attention(const AttentionArgs& args, const Array& q, const Array& k, const Array& v,
                       const KeySets& sets = {}) {
  const int64_t rows = q.shape[0], queries = q.shape[1], width = q.shape[2];
  const int64_t dim = width / args.heads;
  Array out(q.shape);
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t set = sets.set.empty() ? n : sets.set[n];
    const int64_t there_are = sets.counts.empty() ? k.shape[1] : sets.counts[set];
    for (int64_t head = 0; head < args.heads; ++head) {
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t query = (n * queries + i) * width + head * dim;
        const auto key = [&](int64_t j) { return (set * k.shape[1] + j) * width + head * dim; };
        const int64_t keys = args.causal ? std::min(i + 1, there_are) : there_are;
        std::vector<double> weight(keys);
        double max = -INFINITY, sum = 0;
        for (int64_t j = 0; j < keys; ++j) {
          double dot = 0;
          for (int64_t d = 0; d < dim; ++d) dot += q.at(query + d) * k.at(key(j) + d);
          weight[j] = dot * args.scale;
          max = std::max(max, weight[j]);
        }
        for (double& w : weight) sum += w = std::exp(w - max);
        for (int64_t d = 0; d < dim; ++d) {
          double value = 0;
          for (int64_t j = 0; j < keys; ++j) value += weight[j] / sum * v.at(key(j) + d);
          out.at(query + d) = value;
        }
      }
    }
  }
  return out;
}

inline Array GegluGate(const Array& x, const Shape& shape) {
  Array out(shape);
  const int64_t features = shape[-1];
  for (int64_t i = 0; i < shape.elements(); ++i) {
    const int64_t value = i / features * 2 * features + i % features;
    out.at(i) = x.at(value) * Activate(Activation::kGelu, x.at(value + features));
  }
  return out;
}

inline Array NearestCode(const Array& x, const Array& codebook) {
  const int64_t codes = codebook.shape[0], channels = codebook.shape[1];
  Array out(x.shape);
  for (int64_t begin = 0; begin < x.shape.elements(); begin += channels) {
    int64_t nearest = 0;
    double least = INFINITY;
    for (int64_t code = 0; code < codes; ++code) {
      double distance = 0;
      for (int64_t c = 0; c < channels; ++c) {
        distance += std::pow(x.at(begin + c) - codebook.at(code * channels + c), 2);
      }
      if (distance < least) least = distance, nearest = code;
    }
    for (int64_t c = 0; c < channels; ++c) {
      out.at(begin + c) = codebook.at(nearest * channels + c);
    }
  }
  return out;
}

/// `noise` may be undefined.
inline Array Gaussian(const Array& moments, const Array& noise, const Array& scale,
                      const Array& shift, const Shape& shape) {
  Array out(shape);
  const int64_t channels = shape[-1];
  for (int64_t i = 0; i < shape.elements(); ++i) {
    const int64_t c = i % channels, mean = i / channels * 2 * channels + c;
    double value = moments.at(mean);
    if (noise.defined()) {
      const double log_variance = std::min(std::max(moments.at(mean + channels), -30.0), 20.0);
      value += noise.at(i) * std::sqrt(std::exp(log_variance));
    }
    out.at(i) = value * scale.at(c) + shift.at(c);
  }
  return out;
}

/// diffusers 0.40, models/embeddings.py: get_timestep_embedding.
inline Array TimestepEmbedding(const TimestepEmbeddingArgs& args, const Array& t, int64_t dim) {
  const int64_t half = dim / 2;
  Array out({t.shape[0], dim});
  for (int64_t n = 0; n < t.shape[0]; ++n) {
    for (int64_t i = 0; i < half; ++i) {
      const double frequency =
          std::exp(-std::log(args.max_period) * i / (static_cast<double>(half) - args.freq_shift));
      const double angle = args.scale * t.at(n) * frequency;
      out.at(n * dim + i) = args.flip_sin_to_cos ? std::cos(angle) : std::sin(angle);
      out.at(n * dim + half + i) = args.flip_sin_to_cos ? std::sin(angle) : std::cos(angle);
    }
  }
  return out;
}

/// diffusers 0.40, models/embeddings.py: GaussianFourierProjection.
inline Array FourierEmbedding(const FourierEmbeddingArgs& args, const Array& t,
                              const Array& weight) {
  const int64_t half = weight.shape[0];
  Array out({t.shape[0], 2 * half});
  for (int64_t n = 0; n < t.shape[0]; ++n) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = 2 * M_PI * weight.at(i) * (args.log ? std::log(t.at(n)) : t.at(n));
      out.at(n * 2 * half + i) = args.flip_sin_to_cos ? std::cos(angle) : std::sin(angle);
      out.at(n * 2 * half + half + i) = args.flip_sin_to_cos ? std::sin(angle) : std::cos(angle);
    }
  }
  return out;
}

/// Upsample, pad, filter, downsample along dimension `axis`, as StyleGAN's upfirdn2d.
inline Array UpFirDown(const Array& x, int axis, int up, int down, int pad_before, int pad_after,
                       double gain) {
  constexpr double kFilter[] = {1, 3, 3, 1};
  const int64_t length = x.shape[axis], padded = length * up + pad_before + pad_after;
  Shape shape = {x.shape[0], x.shape[1], x.shape[2], x.shape[3]};
  const int64_t result = (padded - 4) / down + 1;
  shape = axis == 1 ? Shape{shape[0], result, shape[2], shape[3]}
                    : Shape{shape[0], shape[1], result, shape[3]};
  Array out(shape);
  int64_t to = 0;
  for (int64_t n = 0; n < shape[0]; ++n)
    for (int64_t h = 0; h < shape[1]; ++h)
      for (int64_t w = 0; w < shape[2]; ++w)
        for (int64_t c = 0; c < shape[3]; ++c, ++to)
          for (int k = 0; k < 4; ++k) {
            const int64_t stuffed = (axis == 1 ? h : w) * down + k - pad_before;
            if (stuffed < 0 || stuffed % up != 0 || stuffed / up >= length) continue;
            const int64_t at = stuffed / up;
            out.at(to) +=
                kFilter[k] / 8 * gain * x.at(n, axis == 1 ? at : h, axis == 2 ? at : w, c);
          }
  return out;
}

inline Array Resample2x(Resample kind, const Array& x) {
  if (kind == Resample::kFirUp) return UpFirDown(UpFirDown(x, 1, 2, 1, 2, 1, 2), 2, 2, 1, 2, 1, 2);
  if (kind == Resample::kFirDown)
    return UpFirDown(UpFirDown(x, 1, 1, 2, 1, 1, 1), 2, 1, 2, 1, 1, 1);
  const bool up = kind == Resample::kNearestUp;
  const int64_t height = up ? x.shape[1] * 2 : x.shape[1] / 2;
  const int64_t width = up ? x.shape[2] * 2 : x.shape[2] / 2, channels = x.shape[3];
  Array out({x.shape[0], height, width, channels});
  int64_t at = 0;
  for (int64_t n = 0; n < x.shape[0]; ++n) {
    for (int64_t h = 0; h < height; ++h) {
      for (int64_t w = 0; w < width; ++w) {
        for (int64_t c = 0; c < channels; ++c, ++at) {
          out.at(at) = up ? x.at(n, h / 2, w / 2, c)
                          : (x.at(n, 2 * h, 2 * w, c) + x.at(n, 2 * h, 2 * w + 1, c) +
                             x.at(n, 2 * h + 1, 2 * w, c) + x.at(n, 2 * h + 1, 2 * w + 1, c)) /
                                4;
        }
      }
    }
  }
  return out;
}

/// What one evaluation leaves of one slot. Images are [H, W, C].
struct SlotImages {
  Array x, x0;
  std::vector<Array> registers;
};

/// step_plan.h for one slot. `conditional` and `unconditional` (or undefined) are [H, W, C] or,
/// with a learned variance, [H, W, 2C]; the variance is the conditional row's. `noise` is standard
/// normal.
inline SlotImages Advance(const SlotImages& before, const Evaluation<double>& plan,
                          const Array& conditional, const Array& unconditional, double guidance,
                          const Array& noise) {
  SlotImages after = before;
  const int64_t channels = before.x.shape[2], out_channels = conditional.shape[2];
  const auto at_of = [&](int64_t i) { return i / channels * out_channels + i % channels; };
  const auto guided = [&](int64_t at) {
    const double f = conditional.at(at);
    return unconditional.defined() ? unconditional.at(at) + guidance * (f - unconditional.at(at))
                                   : f;
  };
  double ratio = 1;
  if (plan.noise_scale == NoiseScale::kNormRatio) {
    double of_noise = 0, of_output = 0;
    for (int64_t i = 0; i < before.x.shape.elements(); ++i) {
      of_noise += noise.at(i) * noise.at(i);
      of_output += guided(at_of(i)) * guided(at_of(i));
    }
    ratio = std::sqrt(of_noise / of_output);
  }
  for (int64_t i = 0; i < before.x.shape.elements(); ++i) {
    const int64_t at = at_of(i);
    const double f = guided(at);
    double x0 = plan.x0_from_x * before.x.at(i) + plan.x0_from_model * f;
    if (plan.clip > 0) x0 = std::min(std::max(x0, -plan.clip), plan.clip);
    double scale = ratio;
    if (plan.noise_scale == NoiseScale::kLearned) {
      scale = std::sqrt(std::max(conditional.at(at + channels), 0.0));
    } else if (plan.noise_scale == NoiseScale::kLearnedRange) {
      const double fraction = (conditional.at(at + channels) + 1) / 2;
      scale = std::exp(0.5 *
                       (fraction * plan.log_variance_max + (1 - fraction) * plan.log_variance_min));
    }
    std::vector<double> in = {before.x.at(i), ratio * ratio * f, x0, scale * noise.at(i)};
    for (const Array& r : before.registers) in.push_back(r.at(i));
    after.x0.at(i) = x0;
    for (int o = 0; o < kPlanOutputs; ++o) {
      double sum = 0;
      for (int k = 0; k < kPlanInputs; ++k) sum += plan.weights[o][k] * in[k];
      (o == kOutputX ? after.x : after.registers[o - kOutputRegister]).at(i) = sum;
    }
  }
  return after;
}

}  // namespace denoised::reference
