// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace twinpool {

using HostBlock = std::int32_t;

/// Which blocks of the host pool are taken. The last one given back is the next one given out: its memory is warm.
class HostBlocks {
 public:
  explicit HostBlocks(std::size_t count)
      : count_(count),
        free_(count) {
    std::iota(free_.rbegin(), free_.rend(), 0);
  }
  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  [[nodiscard]] std::size_t free() const noexcept { return free_.size(); }
  /// ``count`` is at most free().
  void take(std::size_t count, std::vector<HostBlock>& out) {
    out.insert(out.end(), free_.rbegin(), free_.rbegin() + static_cast<std::ptrdiff_t>(count));
    free_.resize(free_.size() - count);
  }
  void give_back(std::vector<HostBlock>& blocks) {
    free_.insert(free_.end(), blocks.begin(), blocks.end());
    blocks.clear();
  }

 private:
  std::size_t count_;
  std::vector<HostBlock> free_;
};

}  // namespace twinpool
