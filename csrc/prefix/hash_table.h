// SPDX-License-Identifier: Apache-2.0
// The block table of the prefix index: 128-bit hash -> holder set, 24 bytes a slot.
//
// 256 shards by hash, each an ordered linear-probing array: entries lie in the order of their hash, so a miss
// stops at the first greater key, and growth by a quarter is one streaming copy. A shard that grows pauses its
// caller for its own size only. Load stays in 0.64 .. 0.8, which is 30 .. 38 bytes a block.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/error.h"

namespace twinpool::prefix {

__extension__ typedef unsigned __int128 Wide;

// Maps a hash to [0, capacity) so that greater hashes map to greater or equal places.
inline std::size_t scale(std::uint64_t hash, std::size_t capacity) noexcept {
  return static_cast<std::size_t>((static_cast<Wide>(hash) * capacity) >> 64U);
}

// A block hash, mixed so that its high bits depend on all of it. The mixing is a bijection.
struct Key {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  friend bool operator==(const Key&, const Key&) = default;
  template <typename A>
  void archive(A& a) {
    a(high, low);
  }
  friend bool operator<(const Key& a, const Key& b) { return a.high != b.high ? a.high < b.high : a.low < b.low; }

  // `bytes` points to the 16 bytes of a block hash.
  static Key load(const std::uint8_t* bytes) noexcept;
  void store(std::uint8_t* bytes) const noexcept;
};

struct Entry {
  Key key;
  std::uint32_t set = 0;   // holder set; 0: the slot is vacant
  std::uint32_t heat = 0;  // chances left before the eviction clock takes the entry
};
static_assert(sizeof(Entry) == 24);

class Shard {
 public:
  Entry* find(const Key& key) noexcept;
  void prefetch(const Key& key) const noexcept;

  // The entry of `key`, created with set 0 if absent; the caller must give it a set at once. Null if there is no room
  // for it: then `grow`, or erase others.
  Entry* find_or_insert(const Key& key) noexcept;
  void grow();
  void erase(Entry* entry) noexcept;

  [[nodiscard]] std::size_t bytes() const noexcept { return slots_ * sizeof(Entry); }
  [[nodiscard]] std::size_t bytes_after_growth() const noexcept { return (grown_capacity() + k_tail) * sizeof(Entry); }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t slots() const noexcept { return slots_; }
  Entry* at(std::size_t slot) noexcept { return entries_.get() + slot; }
  [[nodiscard]] const Entry* at(std::size_t slot) const noexcept { return entries_.get() + slot; }

  // Gives memory back when the load has fallen far below what growth would leave.
  void shrink_if_sparse();
  // To what its entries need, with some room.
  void shrink();

  template <typename A>
  void archive(A& a);
  void clear() noexcept;

 private:
  static constexpr std::size_t k_tail = 32;  // slots past the last home, so that a run never wraps
  struct Free {
    void operator()(Entry* entries) const noexcept;
  };

  [[nodiscard]] std::size_t home(const Key& key) const noexcept { return scale(key.high << 8U, capacity_); }
  [[nodiscard]] std::size_t grown_capacity() const noexcept { return capacity_ + capacity_ / 4 + 32; }
  [[nodiscard]] bool full() const noexcept { return (size_ + 1) * 5 > capacity_ * 4; }
  void rehash(std::size_t capacity);

  std::unique_ptr<Entry[], Free> entries_;
  std::size_t capacity_ = 0;  // homes
  std::size_t slots_ = 0;     // homes and tail
  std::size_t size_ = 0;
};

class HashTable {
 public:
  static constexpr std::size_t k_shards = 256;
  Shard& shard(const Key& key) noexcept { return shards_[key.high >> 56U]; }
  [[nodiscard]] const Shard& shard(const Key& key) const noexcept { return shards_[key.high >> 56U]; }
  Shard& at(std::size_t index) noexcept { return shards_[index]; }
  [[nodiscard]] const Shard& at(std::size_t index) const noexcept { return shards_[index]; }
  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] std::size_t bytes() const noexcept;
  template <typename A>
  void archive(A& a) {
    a(shards_);
  }

 private:
  std::array<Shard, k_shards> shards_;
};

template <typename A>
void Shard::archive(A& a) {
  std::uint64_t capacity = capacity_;
  std::uint64_t count = size_;
  a(capacity, count);
  if constexpr (A::reading) {
    require(capacity < (std::uint64_t{1} << 40U) && count <= capacity, "archive: shard");
    clear();
    if (capacity > 0) {
      rehash(capacity);
    }
  }
  std::size_t slot = 0;
  for (; count > 0; --count) {
    if constexpr (!A::reading) {
      while (entries_[slot].set == 0) {
        ++slot;
      }
    }
    std::uint64_t at = slot;
    // NOLINTNEXTLINE(misc-const-correctness): a Reader writes it
    Entry entry = A::reading ? Entry{} : entries_[slot];
    a(at, entry.key, entry.set, entry.heat);
    if constexpr (A::reading) {
      require(at >= slot && at + 1 < slots_ && entry.set != 0, "archive: shard entry");
      slot = at;
      entries_[slot] = entry;
      ++size_;
    }
    ++slot;
  }
}

}  // namespace twinpool::prefix
