// SPDX-License-Identifier: Apache-2.0
#include "prefix/hash_table.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace twinpool::prefix {

namespace {

constexpr std::uint64_t k_multiplier = 0x9E3779B97F4A7C15ULL;

// Newton's iteration doubles the correct bits of the inverse modulo 2^64; an odd number is its own inverse modulo 8.
constexpr std::uint64_t inverse(std::uint64_t odd) {
  std::uint64_t x = odd;
  for (int i = 0; i < 5; ++i) {
    x *= 2 - odd * x;
  }
  return x;
}
constexpr std::uint64_t k_inverse = inverse(k_multiplier);
static_assert(k_multiplier * k_inverse == 1);

constexpr std::uint64_t rotate(std::uint64_t x) {
  return std::rotl(x, 29);
}

}  // namespace

Key Key::load(const std::uint8_t* bytes) noexcept {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  std::memcpy(&first, bytes, 8);
  std::memcpy(&second, bytes + 8, 8);
  return {(first ^ rotate(second)) * k_multiplier, second};
}

void Key::store(std::uint8_t* bytes) const noexcept {
  const std::uint64_t first = (high * k_inverse) ^ rotate(low);
  std::memcpy(bytes, &first, 8);
  std::memcpy(bytes + 8, &low, 8);
}

void Shard::Free::operator()(Entry* entries) const noexcept {
  std::free(entries);
}

Entry* Shard::find(const Key& key) noexcept {
  if (capacity_ == 0) {
    return nullptr;
  }
  Entry* entry = at(home(key));
  while (entry->set != 0 && entry->key < key) {
    ++entry;
  }
  return entry->set != 0 && entry->key == key ? entry : nullptr;
}

void Shard::prefetch(const Key& key) const noexcept {
  if (capacity_ != 0) {
    const Entry* first = at(home(key));
    __builtin_prefetch(first);
    __builtin_prefetch(first + 3);  // a probe sees some three entries
  }
}

Entry* Shard::find_or_insert(const Key& key) noexcept {
  if (capacity_ == 0) {
    return nullptr;
  }
  std::size_t slot = home(key);
  while (at(slot)->set != 0 && at(slot)->key < key) {
    ++slot;
  }
  if (at(slot)->set != 0 && at(slot)->key == key) {
    return at(slot);
  }
  std::size_t vacant = slot;
  while (at(vacant)->set != 0) {
    ++vacant;
  }
  // The last slot stays vacant: it ends every probe without a bounds check.
  if (full() || vacant + 1 >= slots_) {
    return nullptr;
  }
  std::memmove(static_cast<void*>(at(slot + 1)), at(slot), (vacant - slot) * sizeof(Entry));
  *at(slot) = Entry{key, 0, 0};
  ++size_;
  return at(slot);
}

void Shard::grow() {
  rehash(grown_capacity());
}

void Shard::erase(Entry* entry) noexcept {
  const std::size_t slot = static_cast<std::size_t>(entry - entries_.get());
  std::size_t end = slot + 1;
  while (at(end)->set != 0 && home(at(end)->key) < end) {
    ++end;
  }
  std::memmove(static_cast<void*>(at(slot)), at(slot + 1), (end - slot - 1) * sizeof(Entry));
  *at(end - 1) = Entry{};
  --size_;
}

void Shard::rehash(std::size_t capacity) {
  // A run that does not fit the tail asks for more homes; keys are spread, so one more try is rare.
  for (;; capacity += capacity / 4 + 32) {
    const std::size_t slots = capacity + k_tail;
    std::unique_ptr<Entry[], Free> fresh(static_cast<Entry*>(std::calloc(slots, sizeof(Entry))));
    if (!fresh) {
      throw std::bad_alloc();
    }
    std::size_t next = 0;
    bool fits = true;
    for (std::size_t i = 0; i < slots_ && fits; ++i) {
      const Entry& entry = entries_[i];
      if (entry.set == 0) {
        continue;
      }
      const std::size_t slot = std::max(scale(entry.key.high << 8U, capacity), next);
      fits = slot + 1 < slots;
      if (fits) {
        fresh[slot] = entry;
      }
      next = slot + 1;
    }
    if (!fits) {
      continue;
    }
    entries_ = std::move(fresh);
    capacity_ = capacity;
    slots_ = slots;
    return;
  }
}

void Shard::shrink_if_sparse() {
  if (size_ == 0) {
    clear();
  } else if (capacity_ > 256 && size_ * 3 < capacity_) {
    rehash(size_ + size_ / 2 + 32);
  }
}

void Shard::shrink() {
  const std::size_t capacity = size_ + size_ / 3 + 32;
  if (size_ == 0) {
    clear();
  } else if (capacity < capacity_) {
    rehash(capacity);
  }
}

void Shard::clear() noexcept {
  entries_.reset();
  capacity_ = slots_ = size_ = 0;
}

std::size_t HashTable::size() const noexcept {
  std::size_t total = 0;
  for (const Shard& shard : shards_) {
    total += shard.size();
  }
  return total;
}

std::size_t HashTable::bytes() const noexcept {
  std::size_t total = 0;
  for (const Shard& shard : shards_) {
    total += shard.bytes();
  }
  return total;
}

}  // namespace twinpool::prefix
