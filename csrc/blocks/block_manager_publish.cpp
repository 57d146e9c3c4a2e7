// SPDX-License-Identifier: Apache-2.0
// Publishing, pins and quarantine: what makes a block more than a piece of a sequence.
#include <string>

#include "blocks/block_manager.h"
#include "core/error.h"

namespace twinpool {

void BlockManager::commit(std::span<const BlockId> ids, std::span<const Hash128> hashes, const Hash128& parent,
                          std::vector<BlockId>& published) {
  require(ids.size() == hashes.size(), "commit needs one hash a block");
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Block& block = checked(ids[i]);
    require(block.state == BlockState::held,
            [&] { return "only a held block can be committed; block " + std::to_string(ids[i]) + " is not held"; });
    require(!block.published || block.hash == hashes[i],
            [&] { return "block " + std::to_string(ids[i]) + " is already committed under another hash"; });
  }
  mark_distinct(ids, "commit");
  Hash128 before = parent;
  BlockId before_block = ids.empty() ? no_block : published_.find(parent);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    BlockId block = at(ids[i]).published ? ids[i] : published_.find(hashes[i]);
    if (block == no_block) {
      block = ids[i];
      publish(block, hashes[i], before, before_block);
    }
    published.push_back(block);
    before = hashes[i];
    before_block = block;
  }
  if (events_.crowded()) {
    compact_events();
  }
}

void BlockManager::publish(BlockId id, const Hash128& hash, const Hash128& parent_hash, BlockId parent) {
  Block& block = at(id);
  block.hash = hash;
  block.published = true;
  block.published_epoch = events_.epoch();
  block.parent = parent;
  published_.insert(id);
  events_.stored(hash, parent_hash);
  if (parent != no_block) {
    ++at(parent).children;
    ++at(parent).held_children;
    if (at(parent).idle()) {
      become_held(parent);
    }
  }
}

void BlockManager::pin(std::uint64_t transfer, std::span<const BlockId> ids, std::int64_t readers, double expires_at) {
  transfers_.check(transfer, readers, expires_at);
  for (const BlockId id : ids) {
    require(checked(id).state == BlockState::held || at(id).idle(),
            [&] { return "only a block with content can be pinned; block " + std::to_string(id) + " has none"; });
  }
  transfers_.add(transfer, ids, readers, expires_at);
  for (const BlockId id : ids) {
    Block& block = at(id);
    pinned_ += block.pins++ == 0 ? 1 : 0;
    if (block.idle()) {
      become_held(id);
    }
  }
}

bool BlockManager::unpin(std::uint64_t transfer, std::int64_t reader) {
  const auto release = transfers_.finish(transfer, reader);
  if (release.ended) {
    drop_pins(release.ended->blocks);
  }
  return release.known;
}

std::vector<std::uint64_t> BlockManager::expire(double now) {
  std::vector<std::uint64_t> ids;
  for (const auto& ended : transfers_.expire(now)) {
    ids.push_back(ended.transfer);
    drop_pins(ended.blocks);
  }
  return ids;
}

void BlockManager::drop_pins(std::span<const BlockId> ids) {
  for (std::size_t i = ids.size(); i-- > 0;) {
    Block& block = at(ids[i]);
    pinned_ -= --block.pins == 0 ? 1 : 0;
    if (!block.needed()) {
      become_idle(ids[i]);
    }
  }
}

void BlockManager::quarantine(std::span<const BlockId> ids) {
  for (const BlockId id : ids) {
    const Block& block = checked(id);
    require(block.state == BlockState::held && block.refs == 1 && block.pins == 0 && !block.published, [&] {
      return "only a held, unpinned, uncommitted block with one reference can go to quarantine; block " +
             std::to_string(id) + " is none";
    });
  }
  mark_distinct(ids, "quarantine");
  for (const BlockId id : ids) {
    at(id).refs = 0;
    at(id).state = BlockState::quarantined;
  }
  held_ -= ids.size();
  quarantined_ += ids.size();
}

void BlockManager::unquarantine(std::span<const BlockId> ids) {
  for (const BlockId id : ids) {
    require(checked(id).state == BlockState::quarantined,
            [&] { return "block " + std::to_string(id) + " is not in quarantine"; });
  }
  mark_distinct(ids, "unquarantine");
  for (const BlockId id : ids) {
    free_block(id);
  }
  quarantined_ -= ids.size();
}

/// Throws if a block occurs twice. The blocks must exist.
void BlockManager::mark_distinct(std::span<const BlockId> ids, const char* call) {
  std::size_t marked = 0;
  while (marked < ids.size() && !at(ids[marked]).marked) {
    at(ids[marked++]).marked = true;
  }
  for (std::size_t i = 0; i < marked; ++i) {
    at(ids[i]).marked = false;
  }
  require(marked == ids.size(),
          [&] { return "block " + std::to_string(ids[marked]) + " occurs twice in one " + std::string(call); });
}

void BlockManager::compact_events() {
  std::vector<BlockId> kept;
  events_.compact(
      [&](const Hash128& hash) {
        const BlockId id = published_.find(hash);
        if (id == no_block || at(id).published_epoch != events_.epoch() || at(id).marked) {
          return false;
        }
        at(id).marked = true;
        kept.push_back(id);
        return true;
      },
      [&](const Hash128& hash) {
        const BlockId id = published_.find(hash);
        if (id == no_block) {
          return true;
        }
        // Removed and stored again: the reader still believes that it is stored, and is right.
        at(id).published_epoch = events_.epoch() - 1;
        return false;
      });
  for (const BlockId id : kept) {
    at(id).marked = false;
  }
}

}  // namespace twinpool
