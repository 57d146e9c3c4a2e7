// SPDX-License-Identifier: Apache-2.0
#include "prefix/prefix_index.h"

#include <algorithm>
#include <stdexcept>

namespace twinpool::prefix {

namespace {
constexpr std::uint32_t k_heat_new = 1;
constexpr std::uint32_t k_heat_again = 2;
constexpr std::size_t k_ahead = 8;             // prefetch distance of a batch
constexpr std::size_t k_sweep_per_batch = 64;  // sets or slots a batch cleans at least
}  // namespace

// Within a batch most blocks go from the same set to the same set. Both are held, so that their numbers stay theirs.
class PrefixIndex::Step {
 public:
  Step(HolderSets& sets, Slot slot, Tier tier, bool adding)
      : sets_(sets),
        slot_(slot),
        tier_(tier),
        adding_(adding) {}
  ~Step() { forget(); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  HolderSets::Id apply(HolderSets::Id from) {
    if (!known_ || from != from_) {
      const HolderSets::Id to = adding_ ? sets_.with(from, slot_, tier_) : sets_.without(from, slot_, tier_);
      sets_.retain(to);
      sets_.retain(from);
      forget();
      known_ = true;
      from_ = from;
      to_ = to;
    }
    return to_;
  }

 private:
  void forget() {
    if (!known_) {
      return;
    }
    sets_.release(from_);
    sets_.release(to_);
    known_ = false;
  }

  HolderSets& sets_;
  Slot slot_;
  Tier tier_;
  bool adding_;
  bool known_ = false;
  HolderSets::Id from_ = 0;
  HolderSets::Id to_ = 0;
};

PrefixIndex::PrefixIndex(std::size_t max_bytes)
    : max_bytes_(max_bytes) {
  if (max_bytes != 0 && max_bytes < k_minimum_bytes) {
    throw std::invalid_argument("prefix index: max_bytes below 1 MiB");
  }
}

PrefixIndex::Slot PrefixIndex::add_holder() {
  // Wider sets cost every search; clean up first if that yields a slot.
  if (free_.empty() && next_slot_ % 64 == 0 && sweeping()) {
    finish_sweep();
  }
  if (free_.empty() && next_slot_ == k_max_holders) {
    throw std::length_error("prefix index: more than 1024 holders");
  }
  Slot slot = next_slot_;
  if (free_.empty()) {
    ++next_slot_;
    holders_.emplace_back();
    sets_.reserve_slots(next_slot_);
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  holders_[slot] = Holder{0, true};
  sets_.set_live(slot, true);
  return slot;
}

void PrefixIndex::drop_holder(Slot slot) {
  holders_[slot] = Holder{0, false};
  sets_.set_live(slot, false);
  dying_.push_back(slot);
}

void PrefixIndex::store(Slot slot, HashBytes hashes, Tier tier, bool counted) {
  const std::size_t count = hashes.size() / k_hash_bytes;
  Step step(sets_, slot, tier, true);
  std::size_t added = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (i + k_ahead < count) {
      const Key ahead = Key::load(&hashes[(i + k_ahead) * k_hash_bytes]);
      table_.shard(ahead).prefetch(ahead);
    }
    const Key key = Key::load(&hashes[i * k_hash_bytes]);
    Shard& shard = table_.shard(key);
    Entry* entry = shard.find_or_insert(key);
    while (entry == nullptr) {
      make_room(shard, key.high >> 56U);
      entry = shard.find_or_insert(key);
    }
    if (entry->set != HolderSets::k_empty && sets_.has(entry->set, slot, tier)) {
      entry->heat = std::max(entry->heat, k_heat_again);
      if (counted) {
        ++extra_copies_[CopyKey{key, slot, tier}];
      }
      continue;
    }
    const HolderSets::Id from = entry->set;
    const HolderSets::Id to = step.apply(from);
    entry->set = to;
    entry->heat = std::max(entry->heat, k_heat_new);
    sets_.retain(to);
    if (from != HolderSets::k_empty) {
      sets_.release(from);
    }
    ++added;
  }
  holders_[slot].blocks += added;
  if (sweeping()) {
    maintain(std::max(count, k_sweep_per_batch));
  }
  if (max_bytes_ != 0) {
    keep_cap();
  }
}

void PrefixIndex::remove(Slot slot, HashBytes hashes, Tier tier) {
  const std::size_t count = hashes.size() / k_hash_bytes;
  Step step(sets_, slot, tier, false);
  std::size_t removed = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (i + k_ahead < count) {
      const Key ahead = Key::load(&hashes[(i + k_ahead) * k_hash_bytes]);
      table_.shard(ahead).prefetch(ahead);
    }
    const Key key = Key::load(&hashes[i * k_hash_bytes]);
    Shard& shard = table_.shard(key);
    Entry* entry = shard.find(key);
    if (entry == nullptr || !sets_.has(entry->set, slot, tier)) {
      continue;
    }
    if (!extra_copies_.empty()) {
      const auto copies = extra_copies_.find(CopyKey{key, slot, tier});
      if (copies != extra_copies_.end()) {
        if (--copies->second == 0) {
          extra_copies_.erase(copies);
        }
        continue;
      }
    }
    const HolderSets::Id from = entry->set;
    const HolderSets::Id to = step.apply(from);
    if (to == HolderSets::k_empty) {
      shard.erase(entry);
    } else {
      entry->set = to;
      sets_.retain(to);
    }
    sets_.release(from);
    ++removed;
  }
  holders_[slot].blocks -= removed;
  if (removed != 0) {
    for (std::size_t i = 0; i < 4; ++i) {  // a few shards a batch: memory follows the content down
      Shard& shard = table_.at(shrink_cursor_++ % HashTable::k_shards);
      const std::size_t before = shard.bytes();
      shard.shrink_if_sparse();
      table_bytes_ = table_bytes_ + shard.bytes() - before;
    }
  }
  if (sweeping()) {
    maintain(std::max(count, k_sweep_per_batch));
  }
}

bool PrefixIndex::holds(Slot slot, const std::uint8_t* hash) const noexcept {
  const Key key = Key::load(hash);
  const Entry* entry = const_cast<Shard&>(table_.shard(key)).find(key);
  return entry != nullptr && holders_[slot].live &&
         (sets_.has(entry->set, slot, Tier::device) || sets_.has(entry->set, slot, Tier::host));
}

std::size_t PrefixIndex::blocks() const noexcept {
  std::size_t dead = 0;
  if (sweeping()) {
    for (HolderSets::Id set = 1; set < sets_.capacity(); ++set) {
      const std::uint64_t* bits = sets_.bits(set);
      bool live = false;
      for (std::size_t i = 0; i < sets_.words() * k_tiers; ++i) {
        live = live || (bits[i] & sets_.live()[i % sets_.words()]) != 0;
      }
      if (!live) {
        dead += sets_.references(set);
      }
    }
  }
  return table_.size() - dead;
}

std::size_t PrefixIndex::bytes() const noexcept {
  return table_bytes_ + sets_.bytes() + holders_.size() * sizeof(Holder) +
         extra_copies_.size() * (sizeof(CopyKey) + 32);
}

}  // namespace twinpool::prefix
