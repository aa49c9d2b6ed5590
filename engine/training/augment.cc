// SPDX-License-Identifier: Apache-2.0
#include "engine/training/augment.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numbers>

#include "engine/training/random.h"

namespace denoised::training {
namespace {

// Table 6. At one standard deviation: scales as factors, the translation as a share of the picture.
const double kScaleStd = std::exp2(0.2), kAnisotropyStd = std::exp2(0.2);
constexpr double kTranslationStd = 1.0 / 8;

/// An affine map of the plane.
struct Map {
  double m[2][3] = {{1, 0, 0}, {0, 1, 0}};
  /// The map that applies `first`, then this one.
  Map operator*(const Map& first) const {
    Map out;
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 3; ++j)
        out.m[i][j] = m[i][0] * first.m[0][j] + m[i][1] * first.m[1][j] + (j == 2 ? m[i][2] : 0);
    return out;
  }
};
Map Scaling(double x, double y) { return {{{x, 0, 0}, {0, y, 0}}}; }
Map Rotation(double angle) {
  const double c = std::cos(angle), s = std::sin(angle);
  return {{{c, -s, 0}, {s, c, 0}}};
}
Map Translation(double x, double y) { return {{{1, 0, x}, {0, 1, y}}}; }

/// The index of pixel `at` in a line that is reflected at its ends, without repeating them.
int64_t Reflected(int64_t at, int64_t extent) {
  if (extent == 1) return 0;
  const int64_t period = 2 * (extent - 1);
  at = std::abs(at) % period;
  return at < extent ? at : period - at;
}

/// Catmull-Rom's weights of the pixels −1, 0, 1 and 2 at `t` in [0, 1).
void CubicWeights(double t, double* weights) {
  const double t2 = t * t, t3 = t2 * t;
  weights[0] = 0.5 * (-t3 + 2 * t2 - t);
  weights[1] = 0.5 * (3 * t3 - 5 * t2 + 2);
  weights[2] = 0.5 * (-3 * t3 + 4 * t2 + t);
  weights[3] = 0.5 * (t3 - t2);
}

}  // namespace

Augmentation PlanAugmentation(uint64_t seed, uint32_t step, uint32_t sample, double probability,
                              int64_t height, int64_t width) {
  // Block 0 is the flip and the crop of every sample.
  Philox4 chance[2], bits[3];
  for (uint32_t i = 0; i < 2; ++i) chance[i] = Draw(seed, Purpose::kAugment, step, sample, 1 + i);
  for (uint32_t i = 0; i < 3; ++i) bits[i] = Draw(seed, Purpose::kAugment, step, sample, 3 + i);
  const auto happens = [&](int index) {
    return UniformOf(chance[index / 4].v[index % 4]) < probability;
  };
  const auto angle = [](uint32_t word) { return (2.0 * UniformOf(word) - 1.0) * std::numbers::pi; };
  const Normal4 normal = NormalOfBits(bits[0]), shift = NormalOfBits(bits[1]);

  Augmentation plan;
  Map inverse;  // the first transformation's inverse is the last to be applied
  if (bits[2].v[0] >> 31) {
    plan.labels[0] = 1;
    inverse = inverse * Scaling(-1, 1);
  }
  if (happens(0) && bits[2].v[1] >> 31) {
    plan.labels[1] = 1;
    inverse = inverse * Scaling(1, -1);
  }
  if (happens(1)) {
    plan.labels[2] = normal.v[0];
    const double scale = std::pow(kScaleStd, -normal.v[0]);
    inverse = inverse * Scaling(scale, scale);
  }
  if (happens(2)) {
    const double a = angle(bits[2].v[2]);
    plan.labels[3] = static_cast<float>(std::cos(a) - 1);
    plan.labels[4] = static_cast<float>(std::sin(a));
    inverse = inverse * Rotation(a);
  }
  if (happens(3)) {
    const double a = angle(bits[2].v[3]), stretch = std::pow(kAnisotropyStd, normal.v[1]);
    plan.labels[5] = static_cast<float>(normal.v[1] * std::cos(a));
    plan.labels[6] = static_cast<float>(normal.v[1] * std::sin(a));
    inverse = inverse * Rotation(a) * Scaling(1 / stretch, stretch) * Rotation(-a);
  }
  if (happens(4)) {
    plan.labels[7] = shift.v[0];
    plan.labels[8] = shift.v[1];
    inverse = inverse * Translation(-kTranslationStd * static_cast<double>(width) * shift.v[0],
                                    -kTranslationStd * static_cast<double>(height) * shift.v[1]);
  }
  std::copy(&inverse.m[0][0], &inverse.m[0][0] + 6, &plan.inverse[0][0]);
  return plan;
}

void Augment(const Augmentation& augmentation, const uint8_t* from, int64_t height, int64_t width,
             int64_t channels, uint8_t* to) {
  const double(&m)[2][3] = augmentation.inverse;
  if (std::all_of(augmentation.labels + 2, augmentation.labels + kAugmentLabels,
                  [](float label) { return label == 0; })) {
    for (int64_t y = 0; y < height; ++y) {
      for (int64_t x = 0; x < width; ++x) {
        const int64_t source_y = m[1][1] < 0 ? height - 1 - y : y;
        const int64_t source_x = m[0][0] < 0 ? width - 1 - x : x;
        std::copy_n(from + (source_y * width + source_x) * channels, channels,
                    to + (y * width + x) * channels);
      }
    }
    return;
  }
  const double middle_x = static_cast<double>(width - 1) / 2,
               middle_y = static_cast<double>(height - 1) / 2;
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      int64_t columns[4][4], lines[4][4];
      double across[4][4], down[4][4];
      for (int part = 0; part < 4; ++part) {
        const double px = static_cast<double>(x) - middle_x + (part % 2 == 0 ? -0.25 : 0.25);
        const double py = static_cast<double>(y) - middle_y + (part / 2 == 0 ? -0.25 : 0.25);
        const double source_x = m[0][0] * px + m[0][1] * py + m[0][2] + middle_x;
        const double source_y = m[1][0] * px + m[1][1] * py + m[1][2] + middle_y;
        const double floor_x = std::floor(source_x), floor_y = std::floor(source_y);
        CubicWeights(source_x - floor_x, across[part]);
        CubicWeights(source_y - floor_y, down[part]);
        for (int i = 0; i < 4; ++i) {
          columns[part][i] = Reflected(static_cast<int64_t>(floor_x) + i - 1, width);
          lines[part][i] = Reflected(static_cast<int64_t>(floor_y) + i - 1, height);
        }
      }
      for (int64_t c = 0; c < channels; ++c) {
        double sum = 0;
        for (int part = 0; part < 4; ++part) {
          for (int i = 0; i < 4; ++i) {
            double line = 0;
            for (int j = 0; j < 4; ++j)
              line += across[part][j] *
                      from[(lines[part][i] * width + columns[part][j]) * channels + c];
            sum += down[part][i] * line;
          }
        }
        to[(y * width + x) * channels + c] =
            static_cast<uint8_t>(std::clamp(std::lround(sum / 4), 0L, 255L));
      }
    }
  }
}

}  // namespace denoised::training
