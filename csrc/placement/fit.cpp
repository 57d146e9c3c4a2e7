// SPDX-License-Identifier: Apache-2.0
#include "placement/fit.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace twinpool::placement {

namespace {

using Vector = std::array<double, 3>;
using Matrix = std::array<Vector, 3>;

// Solves for the unknowns in ``free`` with the others at 0. Positive definite by the prior's ridge.
Vector solve_subset(const Matrix& matrix, const Vector& target, const std::array<bool, 3>& free) {
  Matrix a = matrix;
  Vector b = target;
  for (std::size_t i = 0; i < 3; ++i) {
    if (free[i]) {
      continue;
    }
    for (std::size_t j = 0; j < 3; ++j) {
      a[i][j] = a[j][i] = 0.0;
    }
    a[i][i] = 1.0;
    b[i] = 0.0;
  }
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t row = i + 1; row < 3; ++row) {
      const double factor = a[row][i] / a[i][i];
      for (std::size_t column = i; column < 3; ++column) {
        a[row][column] -= factor * a[i][column];
      }
      b[row] -= factor * b[i];
    }
  }
  Vector x{};
  for (std::size_t i = 3; i-- > 0;) {
    double sum = b[i];
    for (std::size_t j = i + 1; j < 3; ++j) {
      sum -= a[i][j] * x[j];
    }
    x[i] = sum / a[i][i];
  }
  return x;
}

}  // namespace

Fit::Fit(const FitPrior& prior)
    : prior_(prior),
      coefficients_(prior.coefficients) {}

void Fit::seed(const std::array<double, 3>& coefficients) {
  for (const double coefficient : coefficients) {
    require(std::isfinite(coefficient) && coefficient >= 0, "coefficients of a cost model; allowed: 0 or more");
  }
  prior_.coefficients = coefficients;
  *this = Fit(prior_);
}

void Fit::add(double x1, double x2, double seconds) {
  if (!std::isfinite(x1) || !std::isfinite(x2) || !std::isfinite(seconds) || x1 < 0 || x2 < 0 || seconds <= 0) {
    return;
  }
  const double expected = predict(x1, x2);
  double residual = seconds - expected;
  // The first few samples have no scale yet and are all believed.
  if (samples_ >= k_measured_samples) {
    const double limit = k_outlier * std::max(residual_, 1e-6);
    residual = std::clamp(residual, -limit, limit);
  }
  const double believed = expected + residual;
  const double weight = samples_ < k_measured_samples ? 1.0 / static_cast<double>(samples_ + 1) : 1.0 - k_fade;
  residual_ += (std::abs(residual) - residual_) * std::max(weight, 0.05);
  ++samples_;

  for (double& moment : moments_) {
    moment *= k_fade;
  }
  for (double& target : targets_) {
    target *= k_fade;
  }
  const Vector x{1.0, x1 / prior_.scale1, x2 / prior_.scale2};
  std::size_t k = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = i; j < 3; ++j) {
      moments_[k++] += x[i] * x[j];
    }
    targets_[i] += x[i] * believed;
  }
  solve();
}

void Fit::solve() {
  const Vector scale{1.0, prior_.scale1, prior_.scale2};
  Matrix a{};
  Vector b = targets_;
  std::size_t k = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = i; j < 3; ++j) {
      a[i][j] = a[j][i] = moments_[k++];
    }
  }
  // The prior fades as samples come, down to what keeps the system regular.
  const double ridge = std::max(1e-6, k_prior_weight / (1.0 + static_cast<double>(samples_)));
  for (std::size_t i = 0; i < 3; ++i) {
    const double stiff = ridge * prior_.stiffness[i];
    a[i][i] += stiff;
    b[i] += stiff * prior_.coefficients[i] * scale[i];
  }
  // Durations only grow with work: a negative coefficient is dropped and the others are solved anew.
  std::array<bool, 3> free{true, true, true};
  Vector x{};
  for (int round = 0; round < 3; ++round) {
    x = solve_subset(a, b, free);
    bool clean = true;
    for (std::size_t i = 0; i < 3; ++i) {
      if (x[i] < 0) {
        free[i] = false;
        clean = false;
      }
    }
    if (clean) {
      break;
    }
  }
  for (std::size_t i = 0; i < 3; ++i) {
    coefficients_[i] = std::max(0.0, x[i]) / scale[i];
  }
}

}  // namespace twinpool::placement
