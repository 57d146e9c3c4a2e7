// SPDX-License-Identifier: Apache-2.0
// What the prefix index does about memory: eviction at the byte cap, and clean-up after dropped holders.

#include <algorithm>

#include "prefix/prefix_index.h"

namespace twinpool::prefix {

// The shard has no room for one more. It grows, unless that breaks the cap: then a sixteenth of it is evicted.
void PrefixIndex::make_room(Shard& shard, std::size_t index) {
  const std::size_t grown = bytes() - shard.bytes() + shard.bytes_after_growth();
  if (max_bytes_ == 0 || grown <= max_bytes_ || shard.size() < 16) {
    table_bytes_ -= shard.bytes();
    shard.grow();
    table_bytes_ += shard.bytes();
    return;
  }
  evict_some(shard, index, shard.size() / 16);
}

// Sets of holders and counts of copies grow in a table that has its size already: then the table gets smaller.
void PrefixIndex::keep_cap() {
  for (std::size_t shards = 0; bytes() > max_bytes_ && shards < HashTable::k_shards; ++shards) {
    const std::size_t index = shrink_cursor_++ % HashTable::k_shards;
    Shard& shard = table_.at(index);
    table_bytes_ -= shard.bytes();
    evict_some(shard, index, shard.size() / 4);
    shard.shrink();
    table_bytes_ += shard.bytes();
  }
}

void PrefixIndex::evict_some(Shard& shard, std::size_t index, std::size_t count) {
  if (shard.size() == 0) {
    return;
  }
  const std::size_t wanted = shard.size() - std::max<std::size_t>(1, count);
  std::uint32_t& hand = hands_[index];
  while (shard.size() > wanted) {
    if (hand >= shard.slots()) {
      hand = 0;
    }
    Entry* entry = shard.at(hand);
    if (entry->set == HolderSets::k_empty) {
      ++hand;
    } else if (entry->heat > 0) {
      --entry->heat;
      ++hand;
    } else {
      evict(shard, entry);  // its place may hold the next entry now: the hand stays
    }
  }
}

void PrefixIndex::evict(Shard& shard, Entry* entry) {
  forget_entry(*entry);
  const HolderSets::Id set = entry->set;
  shard.erase(entry);
  sets_.release(set);
  ++evicted_;
}

// Takes an entry out of the counts of its live holders.
void PrefixIndex::forget_entry(const Entry& entry) {
  const std::uint64_t* bits = sets_.bits(entry.set);
  for (std::size_t word = 0; word < sets_.words() * k_tiers; ++word) {
    const std::size_t column = word % sets_.words();
    for (std::uint64_t rest = bits[word] & sets_.live()[column]; rest != 0; rest &= rest - 1) {
      const auto slot = static_cast<Slot>(column * 64 + static_cast<std::size_t>(__builtin_ctzll(rest)));
      --holders_[slot].blocks;
      if (!extra_copies_.empty()) {
        extra_copies_.erase(CopyKey{entry.key, slot, static_cast<Tier>(word / sets_.words())});
      }
    }
  }
}

// One sweep serves all holders that were dropped before it began: their bits leave every set, then the entries whose
// set became empty leave the table, then their slots are free.
void PrefixIndex::maintain(std::size_t budget) {
  while (budget > 0 && sweeping()) {
    if (!sweeping_) {
      sweeping_ = true;
      swept_.swap(dying_);
      dying_.clear();
      sweep_mask_.assign(sets_.words(), 0);
      for (const Slot slot : swept_) {
        sweep_mask_[slot / 64] |= 1ULL << (slot % 64);
      }
      sweep_set_ = 1;
      sweep_set_end_ = sets_.capacity();
      sweep_shard_ = 0;
      sweep_table_ = false;
      std::erase_if(extra_copies_, [&](const auto& copy) {
        return (sweep_mask_[copy.first.slot / 64] >> (copy.first.slot % 64)) & 1U;
      });
    }
    if (sweep_set_ < sweep_set_end_) {
      const auto set = static_cast<HolderSets::Id>(sweep_set_++);
      sweep_mask_.resize(sets_.words(), 0);
      if (sets_.references(set) != 0) {
        sets_.clear_slots(set, sweep_mask_.data());
        sweep_table_ = sweep_table_ || sets_.empty(set);
      }
      --budget;
      continue;
    }
    if (sweep_table_ && sweep_shard_ < HashTable::k_shards) {
      Shard& shard = table_.at(sweep_shard_++);
      const std::size_t before = shard.bytes();
      for (std::size_t i = shard.slots(); i-- > 0;) {  // from the end: an erase moves only what was seen already
        Entry* entry = shard.at(i);
        if (entry->set == HolderSets::k_empty || !sets_.empty(entry->set)) {
          continue;
        }
        const HolderSets::Id set = entry->set;
        shard.erase(entry);
        sets_.release(set);
      }
      budget -= std::min(budget, shard.slots() / 8 + 1);
      shard.shrink_if_sparse();
      table_bytes_ = table_bytes_ + shard.bytes() - before;
      continue;
    }
    free_.insert(free_.end(), swept_.begin(), swept_.end());
    swept_.clear();
    sweeping_ = false;
  }
}

void PrefixIndex::finish_sweep() {
  while (sweeping()) {
    maintain(1U << 20U);
  }
}

}  // namespace twinpool::prefix
