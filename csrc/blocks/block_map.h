// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "blocks/block.h"

namespace twinpool {

/// Hash -> published block: open addressing with linear probing and backward-shift deletion, so no tombstones and no
/// growth (at most one entry a block, at most half full). A slot is 8 bytes: block and 32 bits of the hash; the full
/// hash lies in the block.
class BlockMap {
 public:
  explicit BlockMap(const std::vector<Block>& blocks)
      : blocks_(&blocks),
        mask_(std::bit_ceil(2 * blocks.size() + 2) - 1),
        slots_(mask_ + 1) {}

  [[nodiscard]] BlockId find(const Hash128& hash) const noexcept {
    const std::uint32_t tag = tag_of(hash);
    for (std::size_t at = home(hash); slots_[at].block != no_block; at = (at + 1) & mask_) {
      if (slots_[at].tag == tag && at_block(at).hash == hash) {
        return slots_[at].block;
      }
    }
    return no_block;
  }

  /// Asks for the memory that ``find`` will read first.
  void prefetch(const Hash128& hash) const noexcept { __builtin_prefetch(&slots_[home(hash)]); }

  /// The block's hash must be set and not yet be in the map.
  void insert(BlockId id) noexcept {
    const Hash128& hash = (*blocks_)[static_cast<std::size_t>(id)].hash;
    std::size_t at = home(hash);
    while (slots_[at].block != no_block) {
      at = (at + 1) & mask_;
    }
    slots_[at] = {tag_of(hash), id};
  }

  /// The block must be in the map, under the hash that it still has.
  void erase(BlockId id) noexcept {
    std::size_t hole = home((*blocks_)[static_cast<std::size_t>(id)].hash);
    while (slots_[hole].block != id) {
      hole = (hole + 1) & mask_;
    }
    // Whatever follows in the run and may lie nearer to its home moves into the hole.
    for (std::size_t at = (hole + 1) & mask_; slots_[at].block != no_block; at = (at + 1) & mask_) {
      const std::size_t wanted = home(at_block(at).hash);
      if (((at - wanted) & mask_) >= ((at - hole) & mask_)) {
        slots_[hole] = slots_[at];
        hole = at;
      }
    }
    slots_[hole] = {};
  }

 private:
  struct Slot {
    std::uint32_t tag = 0;
    BlockId block = no_block;
  };

  [[nodiscard]] std::size_t home(const Hash128& hash) const noexcept { return hash.low() & mask_; }
  static std::uint32_t tag_of(const Hash128& hash) noexcept { return static_cast<std::uint32_t>(hash.high()); }
  [[nodiscard]] const Block& at_block(std::size_t slot) const noexcept {
    return (*blocks_)[static_cast<std::size_t>(slots_[slot].block)];
  }

  const std::vector<Block>* blocks_;
  std::size_t mask_;
  std::vector<Slot> slots_;
};

}  // namespace twinpool
