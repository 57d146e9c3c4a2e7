// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "blocks/block.h"

namespace twinpool {

/// Which transfer holds which blocks, for how many readers and until when. Only the books: the block manager holds and
/// lets go of the blocks themselves.
class TransferPins {
 public:
  struct Ended {
    std::uint64_t transfer = 0;
    std::vector<BlockId> blocks;
  };

  [[nodiscard]] std::size_t size() const noexcept { return transfers_.size(); }

  /// Throws CoreError if ``readers`` is less than 1 or not what the first call said, or the lease is not a number.
  void check(std::uint64_t transfer, std::int64_t readers, double expires_at) const;
  /// Opens the transfer or adds to it; the lease never gets shorter.
  void add(std::uint64_t transfer, std::span<const BlockId> blocks, std::int64_t readers, double expires_at);
  bool renew(std::uint64_t transfer, double expires_at);

  struct Release {
    bool known = false;
    std::optional<Ended> ended;  ///< set when this was the last reader
  };
  Release finish(std::uint64_t transfer, std::int64_t reader);
  /// Ends the transfers whose lease is over (expires_at <= now), earliest first.
  std::vector<Ended> expire(double now);

  /// Calls visit(transfer id, blocks) for each.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (const auto& [id, transfer] : transfers_) {
      visit(id, transfer.blocks);
    }
  }
  /// True if the order of expiry and the table agree.
  [[nodiscard]] bool consistent() const;

 private:
  struct Transfer {
    std::vector<BlockId> blocks;
    std::vector<std::int64_t> finished;  ///< distinct readers; a handful
    std::int64_t readers = 0;
    double expires_at = 0;
  };
  using Table = std::unordered_map<std::uint64_t, Transfer>;

  void prolong(std::uint64_t id, Transfer& transfer, double expires_at);
  Ended take(Table::iterator at);

  Table transfers_;
  std::set<std::pair<double, std::uint64_t>> by_expiry_;
};

}  // namespace twinpool
