// SPDX-License-Identifier: Apache-2.0
// What admission keeps for one pool of workers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <tuple>

#include "admission/fair_queue.h"

namespace twinpool::admission {

inline constexpr double k_unknown_retry_seconds = 1.0;  // a retry hint where nothing was measured yet

/// How fast something happens, over about the last ten seconds.
class Rate {
 public:
  void add(double now, double amount) noexcept {
    decay(now);
    if (weight_ == 0.0) {
      since_ = now;
    }
    weight_ += amount;
  }
  /// Amount a second; 0 if nothing was counted.
  [[nodiscard]] double per_second(double now) noexcept {
    decay(now);
    if (weight_ == 0.0) {
      return 0.0;
    }
    // Young windows are shorter than the kernel; a second is the least to divide by.
    const double span = k_span * (1.0 - std::exp(-std::max(now - since_, 1.0) / k_span));
    return weight_ / span;
  }

  template <typename A>
  void archive(A& a) {
    a(weight_, at_, since_);
  }

 private:
  static constexpr double k_span = 10.0;
  void decay(double now) noexcept {
    if (now <= at_) {
      return;
    }
    weight_ *= std::exp(-(now - at_) / k_span);
    if (weight_ < 1e-9) {
      weight_ = 0.0;
    }
    at_ = now;
  }
  double weight_ = 0.0;
  double at_ = 0.0;
  double since_ = 0.0;
};

/// Share of max_new_tokens that answers really use: fading mean and spread.
class OutputRatio {
 public:
  explicit OutputRatio(double prior)
      : mean_(prior) {}
  void add(double ratio) noexcept {
    const double weight = samples_ < 50 ? 1.0 / static_cast<double>(samples_ + 2) : 0.02;
    const double off = ratio - mean_;
    mean_ += weight * off;
    spread_ += weight * (std::abs(off) - spread_);
    ++samples_;
  }
  /// Tokens to expect of an answer with that limit: what most answers stay below.
  [[nodiscard]] std::int64_t expect(std::int64_t max_new_tokens) const noexcept {
    const double ratio = std::clamp(mean_ + 2.0 * spread_, 0.0, 1.0);
    const auto tokens = static_cast<std::int64_t>(std::ceil(ratio * static_cast<double>(max_new_tokens)));
    return std::clamp<std::int64_t>(tokens, std::min<std::int64_t>(16, max_new_tokens), max_new_tokens);
  }

  /// Tokens that an answer with that limit has on average; 0 until that was seen often enough.
  [[nodiscard]] double usual(std::int64_t max_new_tokens) const noexcept {
    return samples_ < k_known_samples ? 0.0 : std::min(mean_, 1.0) * static_cast<double>(max_new_tokens);
  }

  template <typename A>
  void archive(A& a) {
    a(mean_, spread_, samples_);
  }

 private:
  static constexpr std::uint64_t k_known_samples = 8;
  double mean_;
  double spread_ = 0.0;
  std::uint64_t samples_ = 0;
};

/// How many times longer than predicted requests take from their placement on: a fading mean that returns to one while
/// none ends. A prediction knows what a worker has, and not what it will be given meanwhile.
class Slip {
 public:
  void add(double now, double taken, double predicted) noexcept {
    if (predicted > 0) {
      const double known = mean(now);
      mean_ = known + k_weight * (std::clamp(taken / predicted, 1.0 / k_most, k_most) - known);
      at_ = now;
    }
  }
  /// At least one: a prediction that was too careful does no harm.
  [[nodiscard]] double factor(double now) const noexcept { return std::max(1.0, mean(now)); }

  template <typename A>
  void archive(A& a) {
    a(mean_, at_);
  }

 private:
  static constexpr double k_weight = 0.1;
  static constexpr double k_most = 4.0;
  static constexpr double k_span = 10.0;  // seconds
  [[nodiscard]] double mean(double now) const noexcept {
    return 1.0 + (mean_ - 1.0) * std::exp(-std::max(0.0, now - at_) / k_span);
  }
  double mean_ = 1.0;
  double at_ = 0.0;
};

struct Pool {
  Pool(std::uint32_t pool_id, const AdmissionConfig& config)
      : id(pool_id),
        queue(config.ageing_seconds),
        output_ratio(config.expected_output_ratio) {}

  template <typename A>
  void archive(A& a) {
    a(queue, drained_tokens, ended_requests, output_ratio, slip, retry_at, victims);
  }

  std::uint32_t id;
  FairQueue queue;
  Rate drained_tokens;  // prompt tokens that left the queue for workers
  Rate ended_requests;
  OutputRatio output_ratio;
  Slip slip;
  double retry_at = k_never_retry;  // earliest end of a back-off that something waits for
  /// Requests in Prefilling that may be preempted, lowest priority first, then the one placed last (inverse times and
  /// ids): the order of victims.
  std::set<std::tuple<int, double, std::uint64_t>> victims;

  static constexpr double k_never_retry = 1e300;
};

}  // namespace twinpool::admission
