// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "hash/hash128.h"

namespace twinpool {

using BlockId = std::int32_t;
constexpr BlockId no_block = -1;

enum class BlockState : std::uint8_t {
  free,         ///< no content; in the free list
  held,         ///< somebody needs it: refs + pins + held_children > 0
  cached,       ///< published content that nobody needs now; in the LRU list
  pinned,       ///< the same, but kept from eviction by a prefix pin; in no list
  quarantined,  ///< a late transfer may still write into it
};

/// What is known of one physical block. 56 bytes, so that 8 of them fill 7 cache lines.
struct Block {
  Hash128 hash;                 ///< valid while published
  BlockId previous = no_block;  ///< links of the free list or the LRU list, whichever the state names
  BlockId next = no_block;
  BlockId parent = no_block;          ///< published block of the hash before; no_block at the root or for an orphan
  std::uint32_t refs = 0;             ///< references by sequences
  std::uint32_t pins = 0;             ///< references by transfers
  std::uint32_t held_children = 0;    ///< held blocks whose parent this is: a held block holds its ancestors
  std::uint32_t children = 0;         ///< published blocks whose parent this is
  std::uint32_t prefix_pins = 0;      ///< pins that keep it in the cache; they do not make it held
  std::uint32_t published_epoch = 0;  ///< the event log's epoch when it was published
  BlockState state = BlockState::free;
  bool published : 1 = false;  ///< the cache knows its hash
  bool ended : 1 = false;      ///< its content ended and it has not been given out since
  bool in_ended_list : 1 = false;
  bool marked : 1 = false;  ///< set only inside a call that looks for duplicates

  [[nodiscard]] bool needed() const noexcept { return (refs | pins | held_children) != 0; }
  /// Whether it has published content that nobody needs now.
  [[nodiscard]] bool idle() const noexcept { return state == BlockState::cached || state == BlockState::pinned; }
};

static_assert(sizeof(Block) == 56);

}  // namespace twinpool
