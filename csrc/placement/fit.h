// SPDX-License-Identifier: Apache-2.0
// Online, robust least squares of a duration over two features: seconds = a + b * x1 + c * x2, all >= 0.
#pragma once

#include <array>
#include <cstdint>

namespace twinpool::placement {

/// What is assumed before anything was measured, and how large typical features are: the prior weighs as much as
/// ``k_prior_weight`` samples at (scale1, scale2), times the stiffness of each coefficient. A stiff one moves only
/// where samples of different size demand it; where all samples look alike, the softest one takes the blame.
struct FitPrior {
  std::array<double, 3> coefficients{};
  double scale1 = 1.0;
  double scale2 = 1.0;
  std::array<double, 3> stiffness{1.0, 1.0, 1.0};
  template <typename A>
  void archive(A& a) {
    a(coefficients, scale1, scale2, stiffness);
  }
};

class Fit {
 public:
  explicit Fit(const FitPrior& prior);

  /// Starts anew from these coefficients, as a calibration or a like worker gave them. Throws CoreError if one is
  /// negative or not finite.
  void seed(const std::array<double, 3>& coefficients);

  /// One measurement. Older ones fade (half gone after some 35 newer ones); an outlier counts as a residual of four
  /// times the usual one, so that a single pause moves little while a lasting change is followed.
  void add(double x1, double x2, double seconds);

  [[nodiscard]] double predict(double x1, double x2) const noexcept {
    return coefficients_[0] + coefficients_[1] * x1 + coefficients_[2] * x2;
  }
  [[nodiscard]] const std::array<double, 3>& coefficients() const noexcept { return coefficients_; }
  [[nodiscard]] std::uint64_t samples() const noexcept { return samples_; }
  /// Fading mean of the absolute residual in seconds: how far off a prediction usually is.
  [[nodiscard]] double residual() const noexcept { return residual_; }
  template <typename A>
  void archive(A& a) {
    a(prior_, coefficients_, moments_, targets_, residual_, samples_);
  }
  /// True once predictions rest on measurements rather than on the prior.
  [[nodiscard]] bool measured() const noexcept { return samples_ >= k_measured_samples; }
  static constexpr std::uint64_t k_measured_samples = 8;

 private:
  static constexpr double k_prior_weight = 2.0;
  static constexpr double k_fade = 0.98;
  static constexpr double k_outlier = 4.0;

  void solve();

  FitPrior prior_;
  std::array<double, 3> coefficients_;
  std::array<double, 6> moments_{};  // upper triangle of sum w x x^T over (1, x1, x2)
  std::array<double, 3> targets_{};  // sum w x seconds
  double residual_ = 0.0;
  std::uint64_t samples_ = 0;
};

}  // namespace twinpool::placement
