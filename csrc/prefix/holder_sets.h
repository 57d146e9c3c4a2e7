// SPDX-License-Identifier: Apache-2.0
// Interned sets of holders: which worker slots hold a block, and in which tier.
//
// Many blocks share few sets (a set a worker, a set a group that shares a prompt), so a block's entry names its set
// by number and the bits exist once. Dropping a worker then touches the sets, not the blocks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace twinpool::prefix {

enum class Tier : std::uint8_t { device = 0, host = 1 };
inline constexpr std::size_t k_tiers = 2;

class HolderSets {
 public:
  using Id = std::uint32_t;
  static constexpr Id k_empty = 0;

  HolderSets();

  // Words of 64 worker slots in each tier's bit set.
  [[nodiscard]] std::size_t words() const noexcept { return words_; }
  void reserve_slots(std::size_t slots);

  // A slot that is not live vanishes from every set made from now on; `clear_slots` takes it out of the older ones.
  void set_live(std::uint32_t slot, bool live) noexcept;
  [[nodiscard]] const std::uint64_t* live() const noexcept { return live_.data(); }

  // The set with or without one holder. The result carries no reference yet: `retain` it before the next change.
  Id with(Id set, std::uint32_t slot, Tier tier);
  Id without(Id set, std::uint32_t slot, Tier tier);
  [[nodiscard]] bool has(Id set, std::uint32_t slot, Tier tier) const noexcept;
  [[nodiscard]] bool empty(Id set) const noexcept;

  // Device bits, then host bits; `words()` each.
  [[nodiscard]] const std::uint64_t* bits(Id set) const noexcept { return &bits_[set * stride()]; }

  // One reference an entry. A set without references is freed.
  void retain(Id set, std::uint32_t count = 1) noexcept { references_[set] += count; }
  void release(Id set, std::uint32_t count = 1);
  [[nodiscard]] std::uint32_t references(Id set) const noexcept { return references_[set]; }

  // Clears the slots of `mask` (`words()` words) in set `set`. A set may become equal to another one by that; both live
  // on.
  void clear_slots(Id set, const std::uint64_t* mask);

  [[nodiscard]] std::size_t capacity() const noexcept { return references_.size(); }  // ids ever used, k_empty included
  [[nodiscard]] std::size_t bytes() const noexcept;
  template <typename A>
  void archive(A& a) {
    a(words_, live_, bits_, references_, free_, index_, indexed_);
  }

 private:
  [[nodiscard]] std::size_t stride() const noexcept { return words_ * k_tiers; }
  std::uint64_t hash(const std::uint64_t* bits) const noexcept;
  Id intern_scratch();
  void index_insert(Id set);
  void index_erase(Id set);
  void rebuild_index(std::size_t capacity);

  std::size_t words_ = 1;
  std::vector<std::uint64_t> live_;
  std::vector<std::uint64_t> bits_;
  std::vector<std::uint32_t> references_;
  std::vector<Id> free_;
  std::vector<Id> index_;  // open addressing by content; k_empty: vacant
  std::size_t indexed_ = 0;
  std::vector<std::uint64_t> scratch_;
};

}  // namespace twinpool::prefix
