// SPDX-License-Identifier: Apache-2.0
// Longest prefix of all holders in one pass: gallop, then bisect all holders level by level.
//
// All probes of a level are prefetched before the first is looked at, so that their cache misses overlap. Every holder
// is in exactly one interval, so a level has no more of them than there are slots, and all fits on the stack.

#include <algorithm>
#include <array>
#include <utility>

#include "prefix/prefix_index.h"

namespace twinpool::prefix {

namespace {

constexpr std::uint32_t k_heat_hit = 3;
constexpr std::size_t k_gallop_probes = 34;  // positions below 2^32

template <std::size_t Words>
struct Slots {
  std::array<std::uint64_t, Words> bits;  // not set by default: levels are large

  [[nodiscard]] bool any() const noexcept {
    std::uint64_t all = 0;
    for (const std::uint64_t word : bits) {
      all |= word;
    }
    return all != 0;
  }
  friend Slots operator&(const Slots& a, const Slots& b) noexcept {
    Slots result{};
    for (std::size_t w = 0; w < Words; ++w) {
      result.bits[w] = a.bits[w] & b.bits[w];
    }
    return result;
  }
  [[nodiscard]] Slots without(const Slots& other) const noexcept {
    Slots result{};
    for (std::size_t w = 0; w < Words; ++w) {
      result.bits[w] = bits[w] & ~other.bits[w];
    }
    return result;
  }
  void assign(std::vector<std::uint32_t>& lengths, std::uint32_t length) const {
    for (std::size_t w = 0; w < Words; ++w) {
      for (std::uint64_t rest = bits[w]; rest != 0; rest &= rest - 1) {
        lengths[w * 64 + static_cast<std::size_t>(__builtin_ctzll(rest))] = length;
      }
    }
  }
};

}  // namespace

template <std::size_t Words>
class PrefixIndex::Search {
 public:
  Search(PrefixIndex& index, HashBytes hashes, std::vector<std::uint32_t>& lengths)
      : index_(index),
        hashes_(hashes),
        lengths_(lengths) {
    std::copy_n(index.sets_.live(), Words, live_.bits.begin());
  }

  void run() {
    gallop();
    while (next_count_ > 0) {
      std::swap(level_, next_);
      level_count_ = std::exchange(next_count_, 0);
      for (std::size_t i = 0; i < level_count_; ++i) {
        Interval& interval = level()[i];
        interval.middle = interval.low + (interval.high - interval.low) / 2;
        const Key key = prefetch(interval.middle);
        interval.high_word = key.high;
        interval.low_word = key.low;
      }
      for (std::size_t i = 0; i < level_count_; ++i) {
        const Interval& interval = level()[i];
        const Slots<Words> here = holders({interval.high_word, interval.low_word});
        add(interval.low, interval.middle, interval.pending.without(here));
        add(interval.middle, interval.high, interval.pending & here);
      }
    }
  }

 private:
  struct Interval {
    std::uint32_t low, high, middle;    // the pending slots hold block ``low`` and miss block ``high``
    std::uint64_t high_word, low_word;  // key of the middle
    Slots<Words> pending;
  };
  using Level = std::array<Interval, Words * 64>;

  Level& level() { return levels_[level_]; }

  [[nodiscard]] Key prefetch(std::uint32_t position) const {
    const Key key = Key::load(&hashes_[std::size_t{position} * k_hash_bytes]);
    index_.table_.shard(key).prefetch(key);
    return key;
  }

  Slots<Words> holders(const Key& key) {
    Slots<Words> result{};
    Entry* entry = index_.table_.shard(key).find(key);
    if (entry == nullptr) {
      return result;
    }
    if (entry->heat != k_heat_hit) {  // a write would make the line dirty for nothing
      entry->heat = k_heat_hit;
    }
    const std::uint64_t* bits = index_.sets_.bits(entry->set);
    for (std::size_t w = 0; w < Words; ++w) {
      result.bits[w] = (bits[w] | bits[Words + w]) & live_.bits[w];
    }
    return result;
  }

  void add(std::uint32_t low, std::uint32_t high, const Slots<Words>& pending) {
    if (!pending.any()) {
      return;
    }
    if (high - low == 1) {
      pending.assign(lengths_, low + 1);
      return;
    }
    levels_[next_][next_count_++] = Interval{low, high, 0, 0, 0, pending};
  }

  // Probes blocks 0, 1, 3, 7 ... and the last one. Who holds the last probe it was seen at and misses the next is
  // bisected between the two.
  void gallop() {
    const auto count = static_cast<std::uint32_t>(hashes_.size() / k_hash_bytes);
    std::array<std::uint32_t, k_gallop_probes> positions{};
    std::array<Key, k_gallop_probes> keys;
    std::array<Slots<Words>, k_gallop_probes> found{};
    std::size_t probes = 0;
    for (std::uint64_t at = 0; at + 1 < count; at = at * 2 + 1) {
      positions[probes++] = static_cast<std::uint32_t>(at);
    }
    positions[probes++] = count - 1;
    for (std::size_t i = 0; i < probes; ++i) {
      keys[i] = prefetch(positions[i]);
    }
    for (std::size_t i = 0; i < probes; ++i) {
      found[i] = holders(keys[i]);
    }
    if (index_.evicted_ > 0) {
      // The index itself has forgotten blocks: the deepest block found speaks for its ancestors.
      for (std::size_t i = probes - 1; i-- > 0;) {
        for (std::size_t w = 0; w < Words; ++w) {
          found[i].bits[w] |= found[i + 1].bits[w];
        }
      }
    }
    Slots<Words> alive = found[0];
    for (std::size_t i = 1; i < probes; ++i) {
      add(positions[i - 1], positions[i], alive.without(found[i]));
      alive = alive & found[i];
    }
    alive.assign(lengths_, count);
  }

  PrefixIndex& index_;
  HashBytes hashes_;
  std::vector<std::uint32_t>& lengths_;
  Slots<Words> live_{};
  std::array<Level, 2> levels_;
  std::size_t level_ = 0;
  std::size_t next_ = 1;
  std::size_t level_count_ = 0;
  std::size_t next_count_ = 0;
};

void PrefixIndex::longest_prefix(HashBytes hashes, PrefixLengths& out) {
  out.blocks.assign(sets_.words() * 64, 0);
  if (hashes.empty() || next_slot_ == 0) {
    return;
  }
  switch (sets_.words()) {
  case 1:
    return Search<1>(*this, hashes, out.blocks).run();
  case 2:
    return Search<2>(*this, hashes, out.blocks).run();
  case 4:
    return Search<4>(*this, hashes, out.blocks).run();
  case 8:
    return Search<8>(*this, hashes, out.blocks).run();
  default:
    return Search<k_max_holders / 64>(*this, hashes, out.blocks).run();
  }
}

}  // namespace twinpool::prefix
