// SPDX-License-Identifier: Apache-2.0
// Which worker holds which block of KV, as far as the router knows.
//
// A block hash names a whole prefix (it chains over its ancestors), so a match is anchored at position 0 by
// construction. Workers evict leaves before their ancestors; a worker that holds block k of a prompt therefore holds
// all before it, and the length of its prefix is found by galloping and bisecting: some ten probes a distinct depth,
// not one a block. Where a worker's set is not closed like that, the answer is a length L whose block L-1 it holds.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "prefix/hash_table.h"
#include "prefix/holder_sets.h"

namespace twinpool::prefix {

inline constexpr std::size_t k_hash_bytes = 16;
using HashBytes = std::span<const std::uint8_t>;  // n * 16 bytes

// Result of a search; reuse it to avoid allocation.
struct PrefixLengths {
  std::vector<std::uint32_t> blocks;  // by holder slot
};

class PrefixIndex {
 public:
  using Slot = std::uint32_t;
  static constexpr std::size_t k_max_holders = 1024;
  static constexpr std::size_t k_minimum_bytes = 1U << 20U;

  // `max_bytes` 0: no cap. Otherwise at least k_minimum_bytes, and bytes() is not above it after any call; at the cap
  // the coldest blocks make room.
  explicit PrefixIndex(std::size_t max_bytes = 0);

  // Throws std::length_error at k_max_holders.
  Slot add_holder();
  // All blocks of the holder vanish from every answer at once, in O(1); memory follows bit by bit.
  void drop_holder(Slot slot);

  // Idempotent, unless `counted`: then each call is one more copy, and as many removals take the holder out.
  void store(Slot slot, HashBytes hashes, Tier tier = Tier::device, bool counted = false);
  void remove(Slot slot, HashBytes hashes, Tier tier = Tier::device);

  bool holds(Slot slot, const std::uint8_t* hash) const noexcept;
  void longest_prefix(HashBytes hashes, PrefixLengths& out);

  std::size_t slots() const noexcept { return next_slot_; }
  std::size_t blocks() const noexcept;  // blocks with at least one live holder
  std::size_t blocks_of(Slot slot) const noexcept { return holders_[slot].blocks; }
  std::size_t bytes() const noexcept;
  std::uint64_t evicted() const noexcept { return evicted_; }
  bool sweeping() const noexcept { return sweeping_ || !dying_.empty(); }

  // Works off what dropped holders left behind, up to `budget` steps. Called by store and remove.
  void maintain(std::size_t budget);

  // Calls visit(slot, tier, hash bytes) for each live (block, holder, tier).
  template <typename Visit>
  void for_each(Visit&& visit) const;

  /// All of it, to the last detail that a decision depends on.
  template <typename A>
  void archive(A& a) {
    if constexpr (!A::reading) {
      finish_sweep();
    }
    a(table_, sets_, holders_, free_, dying_, extra_copies_, hands_, table_bytes_, evicted_, shrink_cursor_,
      next_slot_);
  }

 private:
  struct Holder {
    std::uint64_t blocks = 0;  // (block, tier) pairs
    bool live = false;
    template <typename A>
    void archive(A& a) {
      a(blocks, live);
    }
  };
  struct CopyKey {
    Key key;
    Slot slot;
    Tier tier;
    friend bool operator==(const CopyKey&, const CopyKey&) = default;
    template <typename A>
    void archive(A& a) {
      a(key, slot, tier);
    }
  };
  struct CopyHash {
    std::size_t operator()(const CopyKey& k) const noexcept {
      return k.key.high ^ (std::uint64_t{k.slot} * 2654435761U) ^ k.key.low;
    }
  };
  template <std::size_t Words>
  class Search;
  class Step;  // memo of a set transition within a batch

  void make_room(Shard& shard, std::size_t index);
  void keep_cap();
  void evict_some(Shard& shard, std::size_t index, std::size_t count);
  void evict(Shard& shard, Entry* entry);
  void forget_entry(const Entry& entry);
  void finish_sweep();

  HashTable table_;
  HolderSets sets_;
  std::vector<Holder> holders_;
  std::vector<Slot> free_;
  std::vector<Slot> dying_;
  std::unordered_map<CopyKey, std::uint32_t, CopyHash> extra_copies_;  // copies beyond the first
  std::array<std::uint32_t, HashTable::k_shards> hands_{};             // eviction clocks
  std::size_t max_bytes_;
  std::size_t table_bytes_ = 0;
  std::uint64_t evicted_ = 0;
  std::size_t shrink_cursor_ = 0;
  Slot next_slot_ = 0;

  bool sweeping_ = false;
  std::vector<Slot> swept_;
  std::vector<std::uint64_t> sweep_mask_;
  std::size_t sweep_set_ = 0;
  std::size_t sweep_set_end_ = 0;
  std::size_t sweep_shard_ = 0;
  bool sweep_table_ = false;
};

template <typename Visit>
void PrefixIndex::for_each(Visit&& visit) const {
  std::uint8_t hash[k_hash_bytes];
  for (std::size_t index = 0; index < HashTable::k_shards; ++index) {
    const Shard& shard = table_.at(index);
    for (std::size_t i = 0; i < shard.slots(); ++i) {
      const Entry& entry = *shard.at(i);
      if (entry.set == HolderSets::k_empty) {
        continue;
      }
      entry.key.store(hash);
      const std::uint64_t* bits = sets_.bits(entry.set);
      for (std::size_t word = 0; word < sets_.words() * k_tiers; ++word) {
        const std::size_t column = word % sets_.words();
        for (std::uint64_t rest = bits[word] & sets_.live()[column]; rest != 0; rest &= rest - 1) {
          visit(static_cast<Slot>(column * 64 + static_cast<std::size_t>(__builtin_ctzll(rest))),
                static_cast<Tier>(word / sets_.words()), static_cast<const std::uint8_t*>(hash));
        }
      }
    }
  }
}

}  // namespace twinpool::prefix
