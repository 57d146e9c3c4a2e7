// SPDX-License-Identifier: Apache-2.0
// The invariants of the block manager, each with the sentence that says how it was broken.
#include <string>
#include <unordered_map>

#include "blocks/block_manager.h"
#include "core/error.h"

namespace twinpool {

void BlockManager::check() const {
  std::size_t held = 0;
  std::size_t pinned = 0;
  std::size_t quarantined = 0;
  std::size_t idle_pinned = 0;
  std::vector<std::uint32_t> held_children(blocks_.size());
  std::vector<std::uint32_t> children(blocks_.size());
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto id = static_cast<BlockId>(i);
    check_block(id);
    const Block& block = blocks_[i];
    held += block.state == BlockState::held ? 1 : 0;
    pinned += block.pins > 0 ? 1 : 0;
    quarantined += block.state == BlockState::quarantined ? 1 : 0;
    idle_pinned += block.state == BlockState::pinned ? 1 : 0;
    if (block.parent != no_block) {
      ++children[static_cast<std::size_t>(block.parent)];
      held_children[static_cast<std::size_t>(block.parent)] += block.state == BlockState::held ? 1 : 0;
    }
  }
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    require(held_children[i] == blocks_[i].held_children,
            [&] { return "block " + std::to_string(i) + " miscounts its held children"; });
    require(children[i] == blocks_[i].children,
            [&] { return "block " + std::to_string(i) + " miscounts its children"; });
  }
  require(held == held_ && pinned == pinned_ && quarantined == quarantined_ && idle_pinned == idle_pinned_,
          "a counter of blocks is wrong");
  require(held + quarantined + idle_pinned + available_blocks() == blocks_.size(), "a block is in no state or in two");
  check_lists();
  check_prefix_pins();

  std::unordered_map<BlockId, std::uint32_t> pins;
  transfers_.for_each([&](std::uint64_t, const std::vector<BlockId>& ids) {
    for (const BlockId id : ids) {
      ++pins[id];
    }
  });
  require(pins.size() == pinned_, "a pinned block belongs to no transfer");
  for (const auto& [id, count] : pins) {
    // Not every compiler lets a lambda take a structured binding.
    require(at(id).pins == count, [block = id] { return "block " + std::to_string(block) + " miscounts its pins"; });
  }
  require(transfers_.consistent(), "the order of leases and the table of transfers differ");
}

void BlockManager::check_prefix_pins() const {
  std::unordered_map<BlockId, std::uint32_t> pins;
  prefix_pins_.for_each([&](const PrefixPins::Pin& pin) {
    for (const BlockId id : pin.blocks) {
      ++pins[id];
    }
  });
  require(pins.size() == prefix_pinned_, "a block under a prefix pin belongs to no pin");
  for (const auto& [id, count] : pins) {
    require(at(id).prefix_pins == count,
            [block = id] { return "block " + std::to_string(block) + " miscounts its prefix pins"; });
    require(at(id).parent == no_block || at(at(id).parent).prefix_pins > 0,
            [block = id] { return "block " + std::to_string(block) + " is pinned in the cache without its parent"; });
  }
  require(prefix_pins_.consistent(), "the order, the tenants and the table of prefix pins differ");
}

void BlockManager::check_block(BlockId id) const {
  const Block& block = at(id);
  const auto fail = [&](const char* what) { return "block " + std::to_string(id) + " " + what; };
  require(block.needed() == (block.state == BlockState::held),
          [&] { return fail("is needed but not held, or held for nothing"); });
  require(!block.marked, [&] { return fail("kept a mark of an earlier call"); });
  require(!block.ended || (block.state == BlockState::free && block.in_ended_list),
          [&] { return fail("has content but counts as ended"); });
  const bool may_publish = block.state == BlockState::held || block.idle();
  require(!block.published || may_publish, [&] { return fail("is published without content"); });
  require(block.published || !block.idle(), [&] { return fail("is cached but not published"); });
  require(!block.idle() || (block.prefix_pins > 0) == (block.state == BlockState::pinned),
          [&] { return fail("is in the LRU list under a prefix pin, or out of it without one"); });
  require(block.published || block.prefix_pins == 0, [&] { return fail("has a prefix pin but is not published"); });
  require(block.published || block.parent == no_block, [&] { return fail("has a parent but is not published"); });
  require(!block.published || published_.find(block.hash) == id, [&] { return fail("is not found under its hash"); });
  if (block.parent != no_block) {
    const Block& parent = at(block.parent);
    require(parent.published, [&] { return fail("outlives its parent"); });
    require(block.state != BlockState::held || parent.state == BlockState::held,
            [&] { return fail("is held while its parent is not"); });
  }
}

void BlockManager::check_lists() const {
  std::size_t walked = 0;
  for (BlockId id = free_.front(); id != no_block; id = at(id).next, ++walked) {
    require(at(id).state == BlockState::free && walked < free_.size(), "the free list holds a block that is not free");
  }
  require(walked == free_.size(), "the free list is broken");
  std::vector<bool> passed(blocks_.size());
  walked = 0;
  for (BlockId id = cached_.front(); id != no_block; id = at(id).next, ++walked) {
    require(at(id).state == BlockState::cached && walked < cached_.size(),
            "the LRU list holds a block that is not cached");
    const BlockId parent = at(id).parent;
    require(parent == no_block || !passed[static_cast<std::size_t>(parent)], [&] {
      return "block " + std::to_string(parent) + " would be evicted before its child " + std::to_string(id);
    });
    passed[static_cast<std::size_t>(id)] = true;
  }
  require(walked == cached_.size(), "the LRU list is broken");
}

}  // namespace twinpool
