// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

/// Noise schedules as numbers: the betas a model was trained with, which of its timesteps are
/// visited, and how σ is spaced between two ends. All of it follows diffusers' schedulers, whose
/// arrays run with the timestep (σ ascending); what is visited runs from noise to image.

namespace denoised {

enum class BetaSchedule { kLinear, kScaledLinear, kSquaredCosCapV2, kSigmoid, kLaplace, kExp };
enum class TimestepSpacing { kLinspace, kLeading, kTrailing };

/// `count` ≥ 1 values from `first` to `last`; only `first` when count is 1, as numpy.linspace.
std::vector<double> Linspace(double first, double last, int count);

std::vector<double> Betas(BetaSchedule schedule, double start, double end, int count);
/// Rescaled so that the last timestep is pure noise: arXiv 2305.08891, algorithm 1.
std::vector<double> RescaleToZeroTerminalSnr(const std::vector<double>& betas);
/// ᾱ_t = Π (1 − β).
std::vector<double> AlphasCumprod(const std::vector<double>& betas);
/// σ_t = √((1 − ᾱ_t)/ᾱ_t), ascending.
std::vector<double> SigmasFromAlphas(const std::vector<double>& alphas_cumprod);

/// `count` timesteps of [0, train_timesteps), descending (arXiv 2305.08891, table 2). Linspace is
/// fractional; the others are whole.
std::vector<double> SpacedTimesteps(TimestepSpacing spacing, int train_timesteps, int count,
                                    int steps_offset);
/// first − 1, first − 1 − stride, … down to 0, rounded.
std::vector<double> TrailingTimesteps(int first, double stride);
/// Rounds halves to even, as NumPy does.
std::vector<double> Rounded(std::vector<double> values);

/// `values` as a function of its index, linear between, constant beyond both ends.
double InterpolateAt(const std::vector<double>& values, double index);
/// The fractional timestep whose log σ is that of `sigma`; `log_sigmas` ascends. Whole within 1e-6.
double TimestepOfSigma(double sigma, const std::vector<double>& log_sigmas);

/// `count` values of σ from `max` down to `min`; only `max` when count is 1.
std::vector<double> ExponentialSigmas(double min, double max, int count);
/// arXiv 2206.00364, equation 5.
std::vector<double> KarrasSigmas(double min, double max, double rho, int count);
/// Quantiles of Beta(0.6, 0.6): arXiv 2407.12173.
std::vector<double> BetaSigmas(double min, double max, int count);

/// The x at which the regularised incomplete beta function I_x(shape, shape) is q ∈ [0, 1].
double SymmetricBetaQuantile(double q, double shape);

}  // namespace denoised
