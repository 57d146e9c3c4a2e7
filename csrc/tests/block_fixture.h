// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "blocks/block_manager.h"
#include "core/error.h"
#include "hash/block_hash.h"

namespace twinpool::test {

using Ids = std::vector<BlockId>;
using Hashes = std::vector<Hash128>;

constexpr std::size_t test_block_tokens = 4;

/// Hashes of a chain of ``count`` blocks whose tokens are all ``token``.
inline Hashes chain(std::int32_t token, std::size_t count, const Hash128& root = {}) {
  Hashes hashes;
  hash_blocks(root, std::vector<std::int32_t>(count * test_block_tokens, token), test_block_tokens, hashes);
  return hashes;
}

/// A pool whose invariants are checked when the test ends.
class BlockPool {
 public:
  explicit BlockPool(std::size_t blocks)
      : generations(blocks),
        manager(static_cast<std::int64_t>(blocks), test_block_tokens, generations) {}
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;
  ~BlockPool() { EXPECT_NO_THROW(manager.check()); }

  Ids allocate(std::size_t count) {
    Ids ids;
    EXPECT_TRUE(manager.allocate(count, ids));
    return ids;
  }
  Ids commit(const Ids& ids, const Hashes& hashes, const Hash128& parent = {}) {
    Ids published;
    manager.commit(ids, hashes, parent, published);
    return published;
  }
  /// Computes, publishes and lets go: the blocks of the chain are cached now.
  Ids cache(const Hashes& hashes) {
    Ids ids = allocate(hashes.size());
    commit(ids, hashes);
    manager.release(ids);
    return ids;
  }
  Ids acquire(const Hashes& hashes) {
    Ids ids;
    manager.acquire_prefix(hashes, ids);
    return ids;
  }
  /// free, cached, held, quarantined
  void expect_counts(std::size_t free, std::size_t cached, std::size_t held, std::size_t quarantined = 0) {
    EXPECT_EQ(manager.free_blocks(), free);
    EXPECT_EQ(manager.cached_blocks(), cached);
    EXPECT_EQ(manager.held_blocks(), held);
    EXPECT_EQ(manager.quarantined_blocks(), quarantined);
    manager.check();
  }

  std::vector<std::uint64_t> generations;
  BlockManager manager;
};

/// Runs ``call`` and expects a CoreError whose message holds ``words``.
template <typename Call>
void expect_error(const std::string& words, Call&& call) {
  try {
    call();
    ADD_FAILURE() << "no error, wanted: " << words;
  } catch (const CoreError& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

}  // namespace twinpool::test
