// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <tuple>

#include "scheduler/sequence.h"

namespace twinpool {

/// True if ``a`` goes before ``b``: who is overdue, then higher rank, lower cost, earlier arrival, the older handle.
inline bool goes_before(const Sequence& a, const Sequence& b) noexcept {
  return std::tuple(!a.overdue, -a.rank, a.cost, a.arrival, a.id) <
         std::tuple(!b.overdue, -b.rank, b.cost, b.arrival, b.id);
}

/// Sequences without blocks, best first. All operations are O(log n) or better.
///
/// Nobody starves: once ``max_overtaken`` sequences have left for their blocks since one began to wait, it goes first;
/// of several such, by the order above. Until it has its blocks nobody else gets any.
class WaitingQueue {
 public:
  /// ``max_overtaken`` 0: no bound.
  explicit WaitingQueue(std::uint64_t max_overtaken)
      : max_overtaken_(max_overtaken) {}

  [[nodiscard]] bool empty() const noexcept { return queue_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return queue_.size(); }
  [[nodiscard]] Sequence& front() const noexcept { return **queue_.begin(); }
  void insert(Sequence& sequence);
  void erase(Sequence& sequence);
  /// As many have left for their blocks since the sequence began to wait as may.
  [[nodiscard]] bool due(const Sequence& sequence) const noexcept {
    return max_overtaken_ != 0 && admissions_ - sequence.waits_since >= max_overtaken_;
  }
  /// The sequence, which has been erased, got its blocks.
  void admitted(const Sequence& sequence);

 private:
  struct Before {
    bool operator()(const Sequence* a, const Sequence* b) const noexcept { return goes_before(*a, *b); }
  };
  std::uint64_t max_overtaken_;
  std::uint64_t admissions_ = 0;
  std::set<Sequence*, Before> queue_;
  Sequence* oldest_ = nullptr;
  Sequence* newest_ = nullptr;
  Sequence* not_overdue_ = nullptr;  ///< the oldest of those that are not overdue
};

}  // namespace twinpool
