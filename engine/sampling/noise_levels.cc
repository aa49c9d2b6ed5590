// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling/noise_levels.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>

namespace denoised {
namespace {

/// β_t = 1 − ᾱ(t+1)/ᾱ(t), capped: arXiv 2102.09672, section 3.2.
std::vector<double> BetasForAlphaBar(int count, const std::function<double(double)>& alpha_bar) {
  constexpr double kMaxBeta = 0.999;
  std::vector<double> betas(count);
  for (int i = 0; i < count; ++i) {
    const double now = static_cast<double>(i) / count, next = static_cast<double>(i + 1) / count;
    betas[i] = std::min(1 - alpha_bar(next) / alpha_bar(now), kMaxBeta);
  }
  return betas;
}

double CosineAlphaBar(double t) {
  const double c = std::cos((t + 0.008) / 1.008 * std::numbers::pi / 2);
  return c * c;
}

double LaplaceAlphaBar(double t) {
  const double lambda =
      -0.5 * std::copysign(1.0, 0.5 - t) * std::log(1 - 2 * std::abs(0.5 - t) + 1e-6);
  const double snr = std::exp(lambda);
  return std::sqrt(snr / (1 + snr));
}

}  // namespace

std::vector<double> Linspace(double first, double last, int count) {
  std::vector<double> values(count, first);
  // In NumPy's order of operations: .5 ties of the rounded values depend on it.
  for (int i = 1; i < count; ++i) values[i] = i * ((last - first) / (count - 1)) + first;
  if (count > 1) values.back() = last;
  return values;
}

std::vector<double> Betas(BetaSchedule schedule, double start, double end, int count) {
  std::vector<double> betas;
  switch (schedule) {
    case BetaSchedule::kLinear:
      return Linspace(start, end, count);
    case BetaSchedule::kScaledLinear:
      betas = Linspace(std::sqrt(start), std::sqrt(end), count);
      for (double& beta : betas) beta *= beta;
      return betas;
    case BetaSchedule::kSquaredCosCapV2:
      return BetasForAlphaBar(count, CosineAlphaBar);
    case BetaSchedule::kSigmoid:
      betas = Linspace(-6, 6, count);
      for (double& beta : betas) beta = (end - start) / (1 + std::exp(-beta)) + start;
      return betas;
    case BetaSchedule::kLaplace:
      return BetasForAlphaBar(count, LaplaceAlphaBar);
    case BetaSchedule::kExp:
      return BetasForAlphaBar(count, [](double t) { return std::exp(-12 * t); });
  }
  return betas;
}

std::vector<double> RescaleToZeroTerminalSnr(const std::vector<double>& betas) {
  std::vector<double> roots = AlphasCumprod(betas);
  for (double& root : roots) root = std::sqrt(root);
  const double first = roots.front(), last = roots.back();
  std::vector<double> rescaled(betas.size());
  double before = 1;
  for (size_t t = 0; t < betas.size(); ++t) {
    const double root = (roots[t] - last) * (first / (first - last));
    rescaled[t] = 1 - root * root / before;
    before = root * root;
  }
  return rescaled;
}

std::vector<double> AlphasCumprod(const std::vector<double>& betas) {
  std::vector<double> alphas(betas.size());
  double product = 1;
  for (size_t t = 0; t < betas.size(); ++t) alphas[t] = product *= 1 - betas[t];
  return alphas;
}

std::vector<double> SigmasFromAlphas(const std::vector<double>& alphas_cumprod) {
  std::vector<double> sigmas;
  sigmas.reserve(alphas_cumprod.size());
  for (const double alpha : alphas_cumprod) sigmas.push_back(std::sqrt((1 - alpha) / alpha));
  return sigmas;
}

std::vector<double> SpacedTimesteps(TimestepSpacing spacing, int train_timesteps, int count,
                                    int steps_offset) {
  std::vector<double> timesteps(count);
  switch (spacing) {
    case TimestepSpacing::kLinspace:
      timesteps = Linspace(0, train_timesteps - 1, count);
      std::reverse(timesteps.begin(), timesteps.end());
      break;
    case TimestepSpacing::kLeading:
      for (int i = 0; i < count; ++i)
        timesteps[i] = (count - 1 - i) * (train_timesteps / count) + steps_offset;
      break;
    case TimestepSpacing::kTrailing:
      return TrailingTimesteps(train_timesteps, static_cast<double>(train_timesteps) / count);
  }
  return timesteps;
}

std::vector<double> TrailingTimesteps(int first, double stride) {
  // numpy.arange steps by the difference of its first two values. Where that difference rounds up
  // it yields one value more, timestep −1, which no model knows: it is left out here.
  const double step = (first - stride) - first;
  std::vector<double> timesteps(static_cast<size_t>(std::ceil(first / stride - 1e-9)));
  for (size_t i = 0; i < timesteps.size(); ++i)
    timesteps[i] = std::nearbyint(first + static_cast<double>(i) * step) - 1;
  return timesteps;
}

std::vector<double> Rounded(std::vector<double> values) {
  for (double& value : values) value = std::nearbyint(value);
  return values;
}

double InterpolateAt(const std::vector<double>& values, double index) {
  const double last = static_cast<double>(values.size()) - 1;
  if (index <= 0) return values.front();
  if (index >= last) return values.back();
  const size_t low = static_cast<size_t>(index);
  return values[low] + (index - static_cast<double>(low)) * (values[low + 1] - values[low]);
}

double TimestepOfSigma(double sigma, const std::vector<double>& log_sigmas) {
  if (log_sigmas.size() < 2) return 0;
  const double log_sigma = std::log(std::max(sigma, 1e-10));
  const auto above = std::upper_bound(log_sigmas.begin(), log_sigmas.end(), log_sigma);
  const int low = std::clamp(static_cast<int>(above - log_sigmas.begin()) - 1, 0,
                             static_cast<int>(log_sigmas.size()) - 2);
  const double w = (log_sigma - log_sigmas[low]) / (log_sigmas[low + 1] - log_sigmas[low]);
  const double timestep = low + std::clamp(w, 0.0, 1.0);
  // Some samplers truncate what we return: rounding error must not turn timestep 999 into 998.
  const double whole = std::nearbyint(timestep);
  return std::abs(timestep - whole) < 1e-6 ? whole : timestep;
}

std::vector<double> ExponentialSigmas(double min, double max, int count) {
  std::vector<double> sigmas = Linspace(std::log(max), std::log(min), count);
  for (double& sigma : sigmas) sigma = std::exp(sigma);
  return sigmas;
}

std::vector<double> KarrasSigmas(double min, double max, double rho, int count) {
  std::vector<double> sigmas = Linspace(0, 1, count);
  const double min_root = std::pow(min, 1 / rho), max_root = std::pow(max, 1 / rho);
  for (double& sigma : sigmas) sigma = std::pow(max_root + sigma * (min_root - max_root), rho);
  return sigmas;
}

std::vector<double> BetaSigmas(double min, double max, int count) {
  constexpr double kShape = 0.6;
  std::vector<double> sigmas = Linspace(0, 1, count);
  for (double& sigma : sigmas) sigma = min + SymmetricBetaQuantile(1 - sigma, kShape) * (max - min);
  return sigmas;
}

double SymmetricBetaQuantile(double q, double shape) {
  if (q > 0.5) return 1 - SymmetricBetaQuantile(1 - q, shape);
  if (q <= 0) return 0;
  const double beta = std::tgamma(shape) * std::tgamma(shape) / std::tgamma(2 * shape);
  // I_x(a, b)·B(a, b) = x^a · Σ (1−b)_n/n! · x^n/(a+n) (DLMF 8.17.7); its first term inverts by
  // hand, and Newton's method corrects it.
  double x = std::pow(q * shape * beta, 1 / shape);
  for (int iteration = 0; iteration < 50; ++iteration) {
    double term = 1, sum = 0;
    for (int n = 0; n < 200 && term > 1e-18; ++n) {
      sum += term / (shape + n);
      term *= (1 - shape + n) / (n + 1) * x;
    }
    const double excess = std::pow(x, shape) * sum - q * beta;
    const double correction = excess / std::pow(x * (1 - x), shape - 1);
    x -= correction;
    if (std::abs(correction) < 1e-15 * x) break;
  }
  return x;
}

}  // namespace denoised
