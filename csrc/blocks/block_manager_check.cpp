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
  std::vector<std::uint32_t> held_children(blocks_.size());
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const auto id = static_cast<BlockId>(i);
    check_block(id);
    const Block& block = blocks_[i];
    held += block.state == BlockState::held ? 1 : 0;
    pinned += block.pins > 0 ? 1 : 0;
    quarantined += block.state == BlockState::quarantined ? 1 : 0;
    if (block.state == BlockState::held && block.parent != no_block) {
      ++held_children[static_cast<std::size_t>(block.parent)];
    }
  }
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    require(held_children[i] == blocks_[i].held_children,
            [&] { return "block " + std::to_string(i) + " miscounts its held children"; });
  }
  require(held == held_ && pinned == pinned_ && quarantined == quarantined_, "a counter of blocks is wrong");
  require(held + quarantined + available_blocks() == blocks_.size(), "a block is in no state or in two");
  check_lists();

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

void BlockManager::check_block(BlockId id) const {
  const Block& block = at(id);
  const auto fail = [&](const char* what) { return "block " + std::to_string(id) + " " + what; };
  require(block.needed() == (block.state == BlockState::held),
          [&] { return fail("is needed but not held, or held for nothing"); });
  require(!block.marked, [&] { return fail("kept a mark of an earlier call"); });
  require(!block.ended || (block.state == BlockState::free && block.in_ended_list),
          [&] { return fail("has content but counts as ended"); });
  const bool may_publish = block.state == BlockState::held || block.state == BlockState::cached;
  require(!block.published || may_publish, [&] { return fail("is published without content"); });
  require(block.published || block.state != BlockState::cached, [&] { return fail("is cached but not published"); });
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
