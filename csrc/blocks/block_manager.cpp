// SPDX-License-Identifier: Apache-2.0
#include "blocks/block_manager.h"

#include <atomic>
#include <limits>
#include <string>

#include "core/error.h"

namespace twinpool {

namespace {

/// How far ahead of a walk along hashes the map's memory is asked for.
constexpr std::size_t prefetch_distance = 8;
constexpr std::int64_t block_tokens_limit = 1'048'576;

std::size_t checked_count(std::int64_t value, std::int64_t limit, const char* name) {
  require(value >= 1 && value <= limit, [&] {
    return std::string(name) + " must lie between 1 and " + std::to_string(limit) + ", not " + std::to_string(value);
  });
  return static_cast<std::size_t>(value);
}

}  // namespace

BlockManager::BlockManager(std::int64_t num_blocks, std::int64_t block_tokens, std::span<std::uint64_t> generations)
    : blocks_(checked_count(num_blocks, std::numeric_limits<BlockId>::max(), "num_blocks")),
      block_tokens_(checked_count(block_tokens, block_tokens_limit, "block_tokens")),
      generations_(generations),
      free_(blocks_),
      cached_(blocks_),
      published_(blocks_),
      events_(blocks_.size()) {
  require(generations.size() == blocks_.size(), "generations must have one entry a block");
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    free_.push_back(static_cast<BlockId>(i));
  }
}

std::size_t BlockManager::lookup(std::span<const Hash128> hashes) const {
  std::size_t found = 0;
  while (found < hashes.size()) {
    if (found + prefetch_distance < hashes.size()) {
      published_.prefetch(hashes[found + prefetch_distance]);
    }
    if (published_.find(hashes[found]) == no_block) {
      break;
    }
    ++found;
  }
  return found;
}

std::size_t BlockManager::acquire_prefix(std::span<const Hash128> hashes, std::vector<BlockId>& out) {
  return acquire(hashes, 0, 0, out).value_or(0);
}

bool BlockManager::allocate(std::size_t count, std::vector<BlockId>& out) {
  if (count > available_blocks()) {
    return false;
  }
  take_new(count, out);
  return true;
}

std::optional<std::size_t> BlockManager::acquire(std::span<const Hash128> hashes, std::size_t total, std::size_t spare,
                                                 std::vector<BlockId>& out) {
  const std::size_t start = out.size();
  std::size_t idle = 0;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    if (i + prefetch_distance < hashes.size()) {
      published_.prefetch(hashes[i + prefetch_distance]);
    }
    const BlockId id = published_.find(hashes[i]);
    if (id == no_block) {
      break;
    }
    idle += at(id).state == BlockState::cached ? 1 : 0;
    out.push_back(id);
  }
  const std::size_t prefix = out.size() - start;
  const std::size_t fresh = total > prefix ? total - prefix : 0;
  // The idle blocks of the prefix are available now but not once it is taken.
  if (fresh + spare > 0 && fresh + spare + idle > available_blocks()) {
    out.resize(start);
    return std::nullopt;
  }
  for (std::size_t i = start; i < start + prefix; ++i) {
    Block& block = at(out[i]);
    ++block.refs;
    if (block.idle()) {
      become_held(out[i]);
    }
  }
  // Only a chain that starts in the middle can have taken more: its ancestors are held now too.
  if (fresh + spare > available_blocks() && fresh + spare > 0) {
    release(std::span(out).subspan(start));
    out.resize(start);
    return std::nullopt;
  }
  take_new(fresh, out);
  return prefix;
}

void BlockManager::reference(std::span<const BlockId> ids) {
  for (const BlockId id : ids) {
    require(checked(id).state == BlockState::held || at(id).idle(),
            [&] { return "only a block with content can be referenced; block " + std::to_string(id) + " has none"; });
  }
  for (const BlockId id : ids) {
    ++at(id).refs;
    if (at(id).idle()) {
      become_held(id);
    }
  }
}

void BlockManager::release(std::span<const BlockId> ids) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const bool inside = ids[i] >= 0 && static_cast<std::size_t>(ids[i]) < blocks_.size();
    if (!inside || at(ids[i]).refs == 0) {
      for (std::size_t undo = 0; undo < i; ++undo) {
        ++at(ids[undo]).refs;
      }
      throw CoreError("block " + std::to_string(ids[i]) + " is released more often than it is referenced");
    }
    --at(ids[i]).refs;
  }
  // Last block first: children are let go before their parents and so are older in the LRU order.
  for (std::size_t i = ids.size(); i-- > 0;) {
    if (at(ids[i]).state == BlockState::held && !at(ids[i]).needed()) {
      become_idle(ids[i]);
    }
  }
}

const Block& BlockManager::checked(BlockId id) const {
  require(id >= 0 && static_cast<std::size_t>(id) < blocks_.size(), [&] {
    return "block " + std::to_string(id) + " does not exist; there are " + std::to_string(blocks_.size());
  });
  return at(id);
}

bool BlockManager::is_free(BlockId id) const noexcept {
  return id >= 0 && static_cast<std::size_t>(id) < blocks_.size() && at(id).state == BlockState::free;
}

/// A chain is evicted from its end, so what is free next tends to be a run that ends at the front of the free list: the
/// walk goes back to where it begins. It makes no more steps than it then takes blocks.
void BlockManager::take_new(std::size_t count, std::vector<BlockId>& out) {
  while (free_.size() < count) {
    evict_oldest();
  }
  while (count > 0) {
    BlockId id = out.empty() ? no_block : out.back() + 1;
    if (!is_free(id)) {
      id = free_.front();
      for (std::size_t steps = 1; steps < count && is_free(id - 1); ++steps) {
        --id;
      }
    }
    for (; count > 0 && is_free(id); ++id, --count) {
      Block& block = at(id);
      free_.remove(id);
      block.refs = 1;
      block.state = BlockState::held;
      block.ended = false;
      ++held_;
      raise_generation(id);
      out.push_back(id);
    }
  }
}

void BlockManager::become_held(BlockId id) {
  // A held block holds its ancestors. In the common case the parent is already held and the walk ends at once.
  while (true) {
    Block& block = at(id);
    if (block.state == BlockState::pinned) {
      --idle_pinned_;
    } else {
      cached_.remove(id);
    }
    block.state = BlockState::held;
    ++held_;
    id = block.parent;
    if (id == no_block) {
      return;
    }
    ++at(id).held_children;
    if (at(id).state == BlockState::held) {
      return;
    }
  }
}

void BlockManager::become_idle(BlockId id) {
  while (true) {
    Block& block = at(id);
    --held_;
    if (!block.published) {
      free_block(id);
      return;
    }
    if (block.prefix_pins > 0) {
      block.state = BlockState::pinned;
      ++idle_pinned_;
    } else {
      block.state = BlockState::cached;
      cached_.push_back(id);
    }
    id = block.parent;
    if (id == no_block) {
      return;
    }
    --at(id).held_children;
    if (at(id).needed()) {
      return;
    }
  }
}

void BlockManager::evict_oldest() {
  const BlockId id = cached_.pop_front();
  Block& block = at(id);
  published_.erase(id);
  block.published = false;
  if (block.parent != no_block) {
    --at(block.parent).children;
  }
  block.parent = no_block;
  events_.removed(block.hash, block.published_epoch != events_.epoch());
  free_block(id);
  if (events_.crowded()) {
    compact_events();
  }
}

void BlockManager::free_block(BlockId id) {
  Block& block = at(id);
  block.state = BlockState::free;
  free_.push_back(id);
  // From here on the bytes are nobody's and may be overwritten, so a late reader must see that its ticket is stale.
  raise_generation(id);
  block.ended = true;
  if (!block.in_ended_list) {
    block.in_ended_list = true;
    ended_.push_back(id);
  }
}

void BlockManager::raise_generation(BlockId id) {
  // Other processes read this word over NIXL. Released before anything can be written into the block.
  const std::atomic_ref<std::uint64_t> word(generations_[static_cast<std::size_t>(id)]);
  word.store(word.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

std::vector<BlockId> BlockManager::drain_freed() {
  std::vector<BlockId> freed;
  for (const BlockId id : ended_) {
    Block& block = at(id);
    block.in_ended_list = false;
    // A block that was given out again belongs to its new holder and must not be touched.
    if (block.ended) {
      block.ended = false;
      freed.push_back(id);
    }
  }
  ended_.clear();
  return freed;
}

std::size_t BlockManager::reset_cache() {
  // Content that is not to be trusted must not outlive this by a pin.
  while (end_next_prefix_pin()) {}
  const std::size_t count = cached_.size();
  while (!cached_.empty()) {
    evict_oldest();
  }
  return count;
}

}  // namespace twinpool
