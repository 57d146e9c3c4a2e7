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

  template <typename A>
  void archive(A& a) {
    a(mean_, spread_, samples_);
  }

 private:
  double mean_;
  double spread_ = 0.0;
  std::uint64_t samples_ = 0;
};

struct Pool {
  Pool(std::uint32_t pool_id, const AdmissionConfig& config)
      : id(pool_id),
        queue(config.ageing_seconds),
        output_ratio(config.expected_output_ratio) {}

  template <typename A>
  void archive(A& a) {
    a(queue, drained_tokens, ended_requests, output_ratio, retry_at, victims);
  }

  std::uint32_t id;
  FairQueue queue;
  Rate drained_tokens;  // prompt tokens that left the queue for workers
  Rate ended_requests;
  OutputRatio output_ratio;
  double retry_at = k_never_retry;  // earliest end of a back-off that something waits for
  /// Requests in Prefilling that may be preempted, lowest priority first, then the one placed last (inverse times and
  /// ids): the order of victims.
  std::set<std::tuple<int, double, std::uint64_t>> victims;

  static constexpr double k_never_retry = 1e300;
};

}  // namespace twinpool::admission
