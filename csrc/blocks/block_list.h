// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "blocks/block.h"

namespace twinpool {

/// A doubly linked list threaded through the blocks. A block is in at most one list at a time; its state says which.
class BlockList {
 public:
  explicit BlockList(std::vector<Block>& blocks)
      : blocks_(&blocks) {}

  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] BlockId front() const noexcept { return front_; }

  void push_back(BlockId id) noexcept {
    Block& block = (*blocks_)[static_cast<std::size_t>(id)];
    block.previous = back_;
    block.next = no_block;
    next_of(back_) = id;
    back_ = id;
    ++size_;
  }

  void push_front(BlockId id) noexcept {
    Block& block = (*blocks_)[static_cast<std::size_t>(id)];
    block.previous = no_block;
    block.next = front_;
    (front_ == no_block ? back_ : (*blocks_)[static_cast<std::size_t>(front_)].previous) = id;
    front_ = id;
    ++size_;
  }

  void remove(BlockId id) noexcept {
    const Block& block = (*blocks_)[static_cast<std::size_t>(id)];
    next_of(block.previous) = block.next;
    (block.next == no_block ? back_ : (*blocks_)[static_cast<std::size_t>(block.next)].previous) = block.previous;
    --size_;
  }

  BlockId pop_front() noexcept {
    const BlockId id = front_;
    remove(id);
    return id;
  }

 private:
  BlockId& next_of(BlockId id) noexcept {
    return id == no_block ? front_ : (*blocks_)[static_cast<std::size_t>(id)].next;
  }

  std::vector<Block>* blocks_;
  BlockId front_ = no_block;
  BlockId back_ = no_block;
  std::size_t size_ = 0;
};

}  // namespace twinpool
