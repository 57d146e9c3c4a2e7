// SPDX-License-Identifier: Apache-2.0
// Longest prefix of all holders in one pass: gallop, then bisect all holders level by level.

#include <algorithm>

#include "prefix/prefix_index.h"

namespace twinpool::prefix {

namespace {
constexpr std::uint32_t k_heat_hit = 3;
}

// Looks up positions_[0 .. count) and writes the live holders of each to masks_. All addresses are prefetched first:
// the misses overlap.
void PrefixIndex::probe(HashBytes hashes, PrefixLengths& out, std::size_t count) {
  const std::size_t words = sets_.words();
  out.masks_.resize(count * words);
  for (std::size_t i = 0; i < count; ++i) {
    const Key key = Key::load(&hashes[std::size_t{out.positions_[i]} * k_hash_bytes]);
    table_.shard(key).prefetch(key);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const Key key = Key::load(&hashes[std::size_t{out.positions_[i]} * k_hash_bytes]);
    Entry* entry = table_.shard(key).find(key);
    if (entry != nullptr) {
      entry->heat = k_heat_hit;
    }
    const std::uint64_t* bits = sets_.bits(entry == nullptr ? HolderSets::k_empty : entry->set);
    for (std::size_t w = 0; w < words; ++w) {
      out.masks_[i * words + w] = (bits[w] | bits[words + w]) & sets_.live()[w];
    }
  }
}

void PrefixIndex::set_blocks(PrefixLengths& out, const std::uint64_t* slots, std::uint32_t length) const {
  for (std::size_t w = 0; w < sets_.words(); ++w) {
    for (std::uint64_t rest = slots[w]; rest != 0; rest &= rest - 1) {
      out.blocks[w * 64 + static_cast<std::size_t>(__builtin_ctzll(rest))] = length;
    }
  }
}

void PrefixIndex::longest_prefix(HashBytes hashes, PrefixLengths& out) {
  const std::size_t words = sets_.words();
  const auto count = static_cast<std::uint32_t>(hashes.size() / k_hash_bytes);
  out.blocks.assign(words * 64, 0);
  if (count == 0 || next_slot_ == 0) {
    return;
  }

  out.positions_.clear();
  for (std::uint32_t at = 0; at + 1 < count; at = at * 2 + 1) {
    out.positions_.push_back(at);
  }
  out.positions_.push_back(count - 1);
  const std::size_t probes = out.positions_.size();
  probe(hashes, out, probes);

  // Who still holds the last probe that it was seen at, and misses the next one, is bisected between the two.
  out.level_.clear();
  out.pending_.clear();
  const auto add = [&](std::uint32_t low, std::uint32_t high, const std::uint64_t* slots) {
    bool any = false;
    for (std::size_t w = 0; w < words; ++w) {
      any = any || slots[w] != 0;
    }
    if (!any) {
      return;
    }
    if (high - low == 1) {
      return set_blocks(out, slots, low + 1);
    }
    out.next_.push_back({low, high});
    out.next_pending_.insert(out.next_pending_.end(), slots, slots + words);
  };
  out.next_.clear();
  out.next_pending_.clear();
  std::vector<std::uint64_t>& alive = out.alive_;
  std::vector<std::uint64_t>& here = out.here_;
  here.resize(words);
  if (evicted_ == 0) {
    alive.assign(out.masks_.begin(), out.masks_.begin() + static_cast<std::ptrdiff_t>(words));
    for (std::size_t i = 1; i < probes; ++i) {
      const std::uint64_t* mask = &out.masks_[i * words];
      for (std::size_t w = 0; w < words; ++w) {
        here[w] = alive[w] & ~mask[w];
        alive[w] &= mask[w];
      }
      add(out.positions_[i - 1], out.positions_[i], here.data());
    }
    set_blocks(out, alive.data(), count);
  } else {
    // The index itself has forgotten blocks: the deepest block found speaks for its ancestors.
    alive.assign(words, 0);
    for (std::size_t i = probes; i-- > 0;) {
      const std::uint64_t* mask = &out.masks_[i * words];
      for (std::size_t w = 0; w < words; ++w) {
        here[w] = mask[w] & ~alive[w];
        alive[w] |= mask[w];
      }
      if (i + 1 == probes) {
        set_blocks(out, here.data(), count);
      } else {
        add(out.positions_[i], out.positions_[i + 1], here.data());
      }
    }
  }

  while (!out.next_.empty()) {
    std::swap(out.level_, out.next_);
    std::swap(out.pending_, out.next_pending_);
    out.next_.clear();
    out.next_pending_.clear();
    out.positions_.clear();
    for (const auto& interval : out.level_) {
      out.positions_.push_back(interval.low + (interval.high - interval.low) / 2);
    }
    probe(hashes, out, out.level_.size());
    for (std::size_t i = 0; i < out.level_.size(); ++i) {
      const std::uint32_t middle = out.positions_[i];
      const std::uint64_t* slots = &out.pending_[i * words];
      const std::uint64_t* mask = &out.masks_[i * words];
      for (std::size_t w = 0; w < words; ++w) {
        here[w] = slots[w] & ~mask[w];
        alive[w] = slots[w] & mask[w];
      }
      add(out.level_[i].low, middle, here.data());
      add(middle, out.level_[i].high, alive.data());
    }
  }
}

}  // namespace twinpool::prefix
