// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "blocks/block.h"
#include "blocks/block_list.h"
#include "blocks/block_map.h"
#include "blocks/cache_events.h"
#include "blocks/prefix_pins.h"
#include "blocks/transfer_pins.h"
#include "hash/hash128.h"

namespace twinpool {

/// Owns the physical blocks of one KV pool: free list, prefix cache, pins, quarantine. See BlockState for the states
/// and csrc/README.md for the invariants. Not thread-safe. Every method that throws CoreError has changed nothing.
class BlockManager {
 public:
  /// ``generations`` has one word a block, outlives the manager and may be read by other processes at any time.
  BlockManager(std::int64_t num_blocks, std::int64_t block_tokens, std::span<std::uint64_t> generations);
  BlockManager(const BlockManager&) = delete;
  BlockManager& operator=(const BlockManager&) = delete;
  ~BlockManager() = default;

  [[nodiscard]] std::size_t num_blocks() const noexcept { return blocks_.size(); }
  [[nodiscard]] std::size_t block_tokens() const noexcept { return block_tokens_; }
  [[nodiscard]] std::size_t free_blocks() const noexcept { return free_.size(); }
  /// Content that nobody needs now, what prefix pins keep of it included.
  [[nodiscard]] std::size_t cached_blocks() const noexcept { return cached_.size() + idle_pinned_; }
  [[nodiscard]] std::size_t held_blocks() const noexcept { return held_; }
  [[nodiscard]] std::size_t pinned_blocks() const noexcept { return pinned_; }
  [[nodiscard]] std::size_t quarantined_blocks() const noexcept { return quarantined_; }
  /// What can be given out: free ones, and cached ones that no prefix pin keeps.
  [[nodiscard]] std::size_t available_blocks() const noexcept { return free_.size() + cached_.size(); }
  [[nodiscard]] std::size_t pinned_transfers() const noexcept { return transfers_.size(); }
  /// Under a prefix pin, needed by somebody or not.
  [[nodiscard]] std::size_t prefix_pinned_blocks() const noexcept { return prefix_pinned_; }
  [[nodiscard]] std::size_t prefix_pins() const noexcept { return prefix_pins_.size(); }
  [[nodiscard]] bool has_prefix_pin(const std::string& pin) const { return prefix_pins_.find(pin) != nullptr; }
  [[nodiscard]] std::uint64_t generation(BlockId id) const { return generations_[static_cast<std::size_t>(id)]; }
  [[nodiscard]] BlockState state(BlockId id) const { return at(id).state; }

  [[nodiscard]] std::size_t lookup(std::span<const Hash128> hashes) const;
  /// Appends the blocks of the longest cached prefix to ``out``, one reference each; returns how many.
  std::size_t acquire_prefix(std::span<const Hash128> hashes, std::vector<BlockId>& out);
  /// Appends ``count`` new blocks to ``out``; false and no change if there are not so many. Neighbours in rising order
  /// where there are any, the one behind the last of ``out`` first: a transfer moves each run of them as one piece.
  bool allocate(std::size_t count, std::vector<BlockId>& out);
  /// The longest cached prefix of ``hashes`` and new blocks up to ``total`` in all, as long as ``spare`` blocks stay
  /// available after it; returns the length of the prefix, or nothing and no change.
  std::optional<std::size_t> acquire(std::span<const Hash128> hashes, std::size_t total, std::size_t spare,
                                     std::vector<BlockId>& out);
  void reference(std::span<const BlockId> ids);
  void release(std::span<const BlockId> ids);
  /// Appends the published block of each hash to ``published``.
  void commit(std::span<const BlockId> ids, std::span<const Hash128> hashes, const Hash128& parent,
              std::vector<BlockId>& published);

  void pin(std::uint64_t transfer, std::span<const BlockId> ids, std::int64_t readers, double expires_at);
  bool renew(std::uint64_t transfer, double expires_at) { return transfers_.renew(transfer, expires_at); }
  bool unpin(std::uint64_t transfer, std::int64_t reader);
  std::vector<std::uint64_t> expire(double now);

  /// Keeps the prefix with these hashes in the cache until the pin ends: all of it, or nothing and why. A pin that is
  /// there already is made longer.
  PrefixPinResult pin_prefix(const PrefixPinOwner& owner, std::span<const Hash128> hashes,
                             const PrefixPinLimits& limits);
  std::vector<PrefixPins::Pin> unpin_prefixes(const PrefixPinFilter& filter);
  std::size_t expire_prefix_pins(double now);
  /// Ends the pin that would end first; false if there is none.
  bool end_next_prefix_pin();
  [[nodiscard]] std::optional<double> next_prefix_expiry() const { return prefix_pins_.next_expiry(); }
  /// Makes these blocks the next ones to be evicted, where their content is still that of the generation, nobody needs
  /// or pins it and no other cached content is built on it. A sequence's blocks in its order; returns how many.
  std::size_t demote(std::span<const BlockId> ids, std::span<const std::uint64_t> generations);

  void quarantine(std::span<const BlockId> ids);
  void unquarantine(std::span<const BlockId> ids);

  std::vector<BlockId> drain_freed();
  std::vector<CacheEvent> drain_events() { return events_.drain(); }
  std::size_t reset_cache();
  void check() const;

 private:
  [[nodiscard]] Block& at(BlockId id) { return blocks_[static_cast<std::size_t>(id)]; }
  [[nodiscard]] const Block& at(BlockId id) const { return blocks_[static_cast<std::size_t>(id)]; }
  [[nodiscard]] const Block& checked(BlockId id) const;

  void take_new(std::size_t count, std::vector<BlockId>& out);
  [[nodiscard]] bool is_free(BlockId id) const noexcept;
  void become_held(BlockId id);
  void become_idle(BlockId id);
  void evict_oldest();
  void free_block(BlockId id);
  void raise_generation(BlockId id);
  void publish(BlockId id, const Hash128& hash, const Hash128& parent_hash, BlockId parent);
  void drop_pins(std::span<const BlockId> ids);
  void drop_prefix_pin(std::span<const BlockId> ids);
  void mark_distinct(std::span<const BlockId> ids, const char* call);
  void compact_events();

  void check_block(BlockId id) const;
  void check_lists() const;
  void check_prefix_pins() const;

  std::vector<Block> blocks_;
  std::size_t block_tokens_;
  std::span<std::uint64_t> generations_;
  BlockList free_;
  BlockList cached_;  ///< least recently let go first; a child always lies before its parent
  BlockMap published_;
  CacheEvents events_;
  TransferPins transfers_;
  PrefixPins prefix_pins_;
  std::vector<BlockId> ended_;
  std::size_t held_ = 0;
  std::size_t pinned_ = 0;
  std::size_t prefix_pinned_ = 0;
  std::size_t idle_pinned_ = 0;  ///< in state pinned
  std::size_t quarantined_ = 0;
};

}  // namespace twinpool
