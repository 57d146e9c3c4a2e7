// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <set>
#include <tuple>

#include "scheduler/sequence.h"

namespace twinpool {

/// True if ``a`` goes before ``b``: higher rank, then earlier arrival, then the older handle.
inline bool goes_before(const Sequence& a, const Sequence& b) noexcept {
  return std::tuple(-a.rank, a.arrival, a.id) < std::tuple(-b.rank, b.arrival, b.id);
}

/// Sequences without blocks, best first. All operations are O(log n) or better.
class WaitingQueue {
 public:
  [[nodiscard]] bool empty() const noexcept { return queue_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return queue_.size(); }
  [[nodiscard]] Sequence& front() const noexcept { return **queue_.begin(); }
  void insert(Sequence& sequence) { queue_.insert(&sequence); }
  void erase(Sequence& sequence) { queue_.erase(&sequence); }

 private:
  struct Before {
    bool operator()(const Sequence* a, const Sequence* b) const noexcept { return goes_before(*a, *b); }
  };
  std::set<Sequence*, Before> queue_;
};

}  // namespace twinpool
