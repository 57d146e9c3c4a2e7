// SPDX-License-Identifier: Apache-2.0
#include <random>
#include <set>
#include <string>

#include "tests/block_fixture.h"

namespace twinpool::test {
namespace {

/// What a reader of the events believes to be stored. Fails on an event that contradicts its belief.
class Reader {
 public:
  void read(BlockManager& manager) {
    for (const CacheEvent& event : manager.drain_events()) {
      Hash128 parent = event.parent;
      for (const Hash128& hash : event.hashes) {
        if (event.stored) {
          EXPECT_TRUE(parent == Hash128{} || stored.contains(parent.hex())) << "parents come first";
          EXPECT_TRUE(stored.insert(hash.hex()).second) << "stored twice";
          parent = hash;
        } else {
          EXPECT_EQ(stored.erase(hash.hex()), 1U) << "removed without a store";
        }
      }
    }
  }
  std::set<std::string> stored;
};

TEST(CacheEvents, AChainIsOneEventWithItsParent) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 4);
  const Ids ids = pool.allocate(4);
  pool.commit({ids[0], ids[1]}, {hashes[0], hashes[1]});
  pool.commit({ids[2], ids[3]}, {hashes[2], hashes[3]}, hashes[1]);
  const auto events = pool.manager.drain_events();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_TRUE(events[0].stored);
  EXPECT_EQ(events[0].parent, Hash128{});
  EXPECT_EQ(events[0].hashes, hashes);
  EXPECT_TRUE(pool.manager.drain_events().empty());
}

TEST(CacheEvents, NothingIsToldOfASecondCopy) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 2);
  pool.cache(hashes);
  pool.manager.drain_events();
  pool.cache(hashes);
  EXPECT_TRUE(pool.manager.drain_events().empty());
}

TEST(CacheEvents, RemovalsNameLeavesFirst) {
  BlockPool pool(2);
  const Hashes hashes = chain(1, 2);
  pool.cache(hashes);
  pool.manager.reset_cache();
  const auto events = pool.manager.drain_events();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_FALSE(events[1].stored);
  EXPECT_EQ(events[1].hashes, (Hashes{hashes[1], hashes[0]}));
}

TEST(CacheEvents, AReaderThatSeldomReadsCostsBoundedMemoryAndMissesNothing) {
  BlockPool pool(16);
  Reader reader;
  std::mt19937 draw(5);
  for (int round = 0; round < 6000; ++round) {
    const auto token = static_cast<std::int32_t>(draw() % 12);
    const Hashes hashes = chain(token, 1 + draw() % 4);
    Ids ids = pool.acquire(hashes);
    Ids fresh = pool.allocate(hashes.size() - ids.size());
    ids.insert(ids.end(), fresh.begin(), fresh.end());
    pool.commit(ids, hashes);
    pool.manager.release(ids);
    if (draw() % 1500 == 0) {
      reader.read(pool.manager);
    }
  }
  std::size_t told = 0;
  for (const CacheEvent& event : pool.manager.drain_events()) {
    told += event.hashes.size();
  }
  EXPECT_LE(told, 4U * 16U + 1024U);
}

TEST(CacheEvents, AReaderKnowsExactlyWhatIsCached) {
  BlockPool pool(16);
  Reader reader;
  std::mt19937 draw(6);
  for (int round = 0; round < 30000; ++round) {
    const auto token = static_cast<std::int32_t>(draw() % 12);
    const Hashes hashes = chain(token, 1 + draw() % 4);
    Ids ids = pool.acquire(hashes);
    Ids fresh = pool.allocate(hashes.size() - ids.size());
    ids.insert(ids.end(), fresh.begin(), fresh.end());
    pool.commit(ids, hashes);
    pool.manager.release(ids);
    if (draw() % 2500 == 0) {
      reader.read(pool.manager);
      ASSERT_EQ(reader.stored.size(), pool.manager.cached_blocks());
      for (std::int32_t each = 0; each < 12; ++each) {
        const Hashes all = chain(each, 4);
        const std::size_t found = pool.manager.lookup(all);
        for (std::size_t i = 0; i < all.size(); ++i) {
          ASSERT_EQ(reader.stored.contains(all[i].hex()), i < found);
        }
      }
    }
  }
}

}  // namespace
}  // namespace twinpool::test
