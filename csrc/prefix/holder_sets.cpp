// SPDX-License-Identifier: Apache-2.0
#include "prefix/holder_sets.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace twinpool::prefix {

HolderSets::HolderSets()
    : live_(1, 0),
      bits_(k_tiers, 0),
      references_(1, 0),
      index_(64, k_empty) {}

void HolderSets::reserve_slots(std::size_t slots) {
  const std::size_t wanted = std::bit_ceil((slots + 63) / 64);  // as the search is compiled for
  if (wanted <= words_) {
    return;
  }
  const std::size_t old_words = words_;
  std::vector<std::uint64_t> wider(references_.size() * wanted * k_tiers, 0);
  for (std::size_t set = 0; set < references_.size(); ++set) {
    for (std::size_t tier = 0; tier < k_tiers; ++tier) {
      std::memcpy(&wider[(set * k_tiers + tier) * wanted], &bits_[(set * k_tiers + tier) * old_words],
                  old_words * sizeof(std::uint64_t));
    }
  }
  bits_ = std::move(wider);
  words_ = wanted;
  live_.resize(words_, 0);
  rebuild_index(index_.size());
}

void HolderSets::set_live(std::uint32_t slot, bool live) noexcept {
  const std::uint64_t bit = 1ULL << (slot % 64);
  live_[slot / 64] = live ? live_[slot / 64] | bit : live_[slot / 64] & ~bit;
}

HolderSets::Id HolderSets::with(Id set, std::uint32_t slot, Tier tier) {
  scratch_.assign(bits(set), bits(set) + stride());
  scratch_[static_cast<std::size_t>(tier) * words_ + slot / 64] |= 1ULL << (slot % 64);
  return intern_scratch();
}

HolderSets::Id HolderSets::without(Id set, std::uint32_t slot, Tier tier) {
  scratch_.assign(bits(set), bits(set) + stride());
  scratch_[static_cast<std::size_t>(tier) * words_ + slot / 64] &= ~(1ULL << (slot % 64));
  return intern_scratch();
}

bool HolderSets::has(Id set, std::uint32_t slot, Tier tier) const noexcept {
  return (bits(set)[static_cast<std::size_t>(tier) * words_ + slot / 64] >> (slot % 64)) & 1U;
}

bool HolderSets::empty(Id set) const noexcept {
  const std::uint64_t* words = bits(set);
  return std::all_of(words, words + stride(), [](std::uint64_t word) { return word == 0; });
}

void HolderSets::release(Id set, std::uint32_t count) {
  references_[set] -= count;
  if (references_[set] != 0 || set == k_empty) {
    return;
  }
  index_erase(set);
  std::fill_n(&bits_[set * stride()], stride(), 0);
  free_.push_back(set);
}

void HolderSets::clear_slots(Id set, const std::uint64_t* mask) {
  std::uint64_t* words = &bits_[set * stride()];
  bool hit = false;
  for (std::size_t i = 0; i < stride(); ++i) {
    hit = hit || (words[i] & mask[i % words_]) != 0;
  }
  if (!hit) {
    return;
  }
  index_erase(set);
  for (std::size_t i = 0; i < stride(); ++i) {
    words[i] &= ~mask[i % words_];
  }
  index_insert(set);
}

std::size_t HolderSets::bytes() const noexcept {
  return bits_.size() * 8 + (references_.size() + index_.size() + free_.size()) * 4;
}

std::uint64_t HolderSets::hash(const std::uint64_t* words) const noexcept {
  std::uint64_t h = 0;
  for (std::size_t i = 0; i < stride(); ++i) {
    h = (h ^ words[i]) * 0x9E3779B97F4A7C15ULL;
    h ^= h >> 29U;
  }
  return h;
}

HolderSets::Id HolderSets::intern_scratch() {
  std::vector<std::uint64_t>& words = scratch_;
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] &= live_[i % words_];
  }
  if (std::all_of(words.begin(), words.end(), [](std::uint64_t word) { return word == 0; })) {
    return k_empty;
  }
  const std::size_t mask = index_.size() - 1;
  for (std::size_t i = hash(words.data()) & mask; index_[i] != k_empty; i = (i + 1) & mask) {
    if (std::equal(words.begin(), words.end(), bits(index_[i]))) {
      return index_[i];
    }
  }
  Id set = 0;
  if (free_.empty()) {
    set = static_cast<Id>(references_.size());
    references_.push_back(0);
    bits_.resize(bits_.size() + stride());
  } else {
    set = free_.back();
    free_.pop_back();
  }
  std::copy(words.begin(), words.end(), &bits_[set * stride()]);
  index_insert(set);
  return set;
}

void HolderSets::index_insert(Id set) {
  if (empty(set)) {
    return;
  }
  if ((indexed_ + 1) * 2 > index_.size()) {
    rebuild_index(index_.size() * 2);
  }
  const std::size_t mask = index_.size() - 1;
  std::size_t i = hash(bits(set)) & mask;
  for (; index_[i] != k_empty; i = (i + 1) & mask) {
    if (index_[i] == set || std::equal(bits(set), bits(set) + stride(), bits(index_[i]))) {
      return;
    }
  }
  index_[i] = set;
  ++indexed_;
}

void HolderSets::index_erase(Id set) {
  const std::size_t mask = index_.size() - 1;
  std::size_t hole = hash(bits(set)) & mask;
  while (index_[hole] != k_empty && index_[hole] != set) {
    hole = (hole + 1) & mask;
  }
  if (index_[hole] == k_empty) {
    return;  // an equal set holds the place
  }
  index_[hole] = k_empty;
  --indexed_;
  for (std::size_t i = (hole + 1) & mask; index_[i] != k_empty; i = (i + 1) & mask) {
    const std::size_t wanted = hash(bits(index_[i])) & mask;
    if (((i - wanted) & mask) >= ((i - hole) & mask)) {
      index_[hole] = index_[i];
      index_[i] = k_empty;
      hole = i;
    }
  }
}

void HolderSets::rebuild_index(std::size_t capacity) {
  index_.assign(capacity, k_empty);
  indexed_ = 0;
  const std::size_t mask = capacity - 1;
  for (Id set = 1; set < references_.size(); ++set) {
    if (empty(set)) {
      continue;
    }
    std::size_t i = hash(bits(set)) & mask;
    while (index_[i] != k_empty && !std::equal(bits(set), bits(set) + stride(), bits(index_[i]))) {
      i = (i + 1) & mask;
    }
    if (index_[i] != k_empty) {
      continue;
    }
    index_[i] = set;
    ++indexed_;
  }
}

}  // namespace twinpool::prefix
