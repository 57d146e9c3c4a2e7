// SPDX-License-Identifier: Apache-2.0
// Prefixes that stay in the cache for a while, and blocks that leave it first.
#include <cmath>
#include <string>
#include <unordered_map>

#include "blocks/block_manager.h"
#include "core/error.h"

namespace twinpool {

PrefixPinResult BlockManager::pin_prefix(const PrefixPinOwner& owner, std::span<const Hash128> hashes,
                                         const PrefixPinLimits& limits) {
  require(!std::isnan(owner.expires_at), "a pin must end at a number");
  require(!hashes.empty(), "a pin needs at least one full block");
  std::vector<BlockId> ids;
  for (const Hash128& hash : hashes) {
    const BlockId id = published_.find(hash);
    if (id == no_block) {
      return {.refusal = PrefixPinRefusal::missing, .blocks = ids.size(), .expires_at = 0};
    }
    // Or its parent could be evicted before it.
    const BlockId before = ids.empty() ? no_block : ids.back();
    require(at(id).parent == no_block || at(id).parent == before, "the hashes of a pin must be a chain from its root");
    ids.push_back(id);
  }
  mark_distinct(ids, "pin_prefix");

  const PrefixPins::Pin* known = prefix_pins_.find(owner.pin);
  require(known == nullptr || (known->owner.tenant == owner.tenant && known->blocks == ids),
          "a pin is known by another prefix or tenant");
  std::size_t blocks = prefix_pinned_;
  std::size_t tenant_blocks = prefix_pins_.tenant_blocks(owner.tenant);
  for (const BlockId id : ids) {
    blocks += at(id).prefix_pins == 0 ? 1 : 0;
    tenant_blocks += prefix_pins_.tenant_has(owner.tenant, id) ? 0 : 1;
  }
  const auto refuse = [](PrefixPinRefusal refusal) { return PrefixPinResult{refusal, 0, 0}; };
  if (tenant_blocks > limits.tenant_blocks) {
    return refuse(PrefixPinRefusal::tenant_blocks);
  }
  if (blocks > limits.blocks) {
    return refuse(PrefixPinRefusal::blocks);
  }
  if (known != nullptr) {
    return {.refusal = {}, .blocks = ids.size(), .expires_at = prefix_pins_.prolong(owner.pin, owner.expires_at)};
  }
  if (prefix_pins_.size() >= limits.pins) {
    return refuse(PrefixPinRefusal::pins);
  }
  for (const BlockId id : ids) {
    Block& block = at(id);
    prefix_pinned_ += block.prefix_pins++ == 0 ? 1 : 0;
    if (block.state == BlockState::cached) {
      cached_.remove(id);
      block.state = BlockState::pinned;
      ++idle_pinned_;
    }
  }
  const PrefixPinResult result{.refusal = {}, .blocks = ids.size(), .expires_at = owner.expires_at};
  prefix_pins_.add({.owner = owner, .blocks = std::move(ids), .last = hashes.back()});
  return result;
}

std::vector<PrefixPins::Pin> BlockManager::unpin_prefixes(const PrefixPinFilter& filter) {
  std::vector<PrefixPins::Pin> ended = prefix_pins_.take(filter);
  for (const PrefixPins::Pin& pin : ended) {
    drop_prefix_pin(pin.blocks);
  }
  return ended;
}

std::size_t BlockManager::expire_prefix_pins(double now) {
  const std::vector<PrefixPins::Pin> ended = prefix_pins_.expire(now);
  for (const PrefixPins::Pin& pin : ended) {
    drop_prefix_pin(pin.blocks);
  }
  return ended.size();
}

bool BlockManager::end_next_prefix_pin() {
  const auto ended = prefix_pins_.take_next();
  if (ended) {
    drop_prefix_pin(ended->blocks);
  }
  return ended.has_value();
}

/// Last block first, as in ``release``: the LRU order wants a child before its parent.
void BlockManager::drop_prefix_pin(std::span<const BlockId> ids) {
  for (std::size_t i = ids.size(); i-- > 0;) {
    Block& block = at(ids[i]);
    if (--block.prefix_pins > 0) {
      continue;
    }
    --prefix_pinned_;
    if (block.state == BlockState::pinned) {
      --idle_pinned_;
      block.state = BlockState::cached;
      cached_.push_back(ids[i]);
    }
  }
}

std::size_t BlockManager::demote(std::span<const BlockId> ids, std::span<const std::uint64_t> generations) {
  require(ids.size() == generations.size(), "demote needs one generation a block");
  for (const BlockId id : ids) {
    static_cast<void>(checked(id));
  }
  std::vector<BlockId> demoted;
  std::unordered_map<BlockId, std::uint32_t> children;  // of a block, how many of them are demoted here
  // Last block first: a block can go to the front only if all that was published behind it does.
  for (std::size_t i = ids.size(); i-- > 0;) {
    Block& block = at(ids[i]);
    const bool same = generation(ids[i]) == generations[i] && block.state == BlockState::cached;
    if (!same || block.marked || block.children != children[ids[i]]) {
      continue;
    }
    block.marked = true;
    cached_.remove(ids[i]);
    demoted.push_back(ids[i]);
    if (block.parent != no_block) {
      ++children[block.parent];
    }
  }
  for (std::size_t i = demoted.size(); i-- > 0;) {
    at(demoted[i]).marked = false;
    cached_.push_front(demoted[i]);
  }
  return demoted.size();
}

}  // namespace twinpool
