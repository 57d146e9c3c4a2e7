// SPDX-License-Identifier: Apache-2.0
#include "tests/block_fixture.h"

namespace twinpool::test {
namespace {

TEST(Blocks, AllocateTakesEachBlockOnceAndRaisesItsGeneration) {
  BlockPool pool(4);
  const Ids ids = pool.allocate(4);
  EXPECT_EQ(Ids({0, 1, 2, 3}), ids);
  EXPECT_EQ(pool.generations, std::vector<std::uint64_t>(4, 1));
  Ids more;
  EXPECT_FALSE(pool.manager.allocate(1, more));
  EXPECT_TRUE(more.empty());
  pool.expect_counts(0, 0, 4);
}

TEST(Blocks, AnUncommittedBlockIsFreeAfterItsLastReference) {
  BlockPool pool(3);
  const Ids ids = pool.allocate(2);
  pool.manager.reference(ids);
  pool.manager.release(ids);
  pool.expect_counts(1, 0, 2);
  const auto before = pool.generations;
  pool.manager.release(ids);
  pool.expect_counts(3, 0, 0);
  EXPECT_GT(pool.generations[0], before[0]) << "a late reader must see that the content ended";
  EXPECT_EQ(pool.generations[2], before[2]);
}

TEST(Blocks, ACommittedBlockIsFoundAgainWithTheSameGeneration) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 3);
  const Ids ids = pool.cache(hashes);
  pool.expect_counts(1, 3, 0);
  const auto before = pool.generations;
  EXPECT_EQ(pool.manager.lookup(hashes), 3U);
  EXPECT_EQ(pool.acquire(hashes), ids);
  EXPECT_EQ(pool.generations, before);
  pool.expect_counts(1, 0, 3);
}

TEST(Blocks, APrefixEndsWhereTheChainsPart) {
  BlockPool pool(8);
  const Hashes first = chain(1, 2);
  Hashes second = first;
  const Hashes tail = chain(2, 2, first.back());
  second.insert(second.end(), tail.begin(), tail.end());
  pool.cache(first);
  EXPECT_EQ(pool.manager.lookup(second), 2U);
  EXPECT_EQ(pool.manager.lookup(tail), 0U) << "a match is anchored at the start";
  EXPECT_EQ(pool.acquire(second).size(), 2U);
}

TEST(Blocks, EvictionTakesTheOldestLeafAndNeverAnAncestorFirst) {
  BlockPool pool(6);
  const Hashes trunk = chain(1, 2);
  const Hashes left = chain(2, 1, trunk.back());
  const Hashes right = chain(3, 1, trunk.back());
  const auto branch = [&](const Hashes& leaf) {
    Hashes hashes = trunk;
    hashes.push_back(leaf[0]);
    Ids ids = pool.acquire(hashes);
    const std::size_t known = ids.size();
    const Ids fresh = pool.allocate(hashes.size() - known);
    ids.insert(ids.end(), fresh.begin(), fresh.end());
    pool.commit(ids, hashes);
    pool.manager.release(ids);
  };
  branch(left);
  branch(right);
  pool.expect_counts(2, 4, 0);
  pool.allocate(3);  // two free ones and the leaf that was let go first
  EXPECT_EQ(pool.manager.lookup(left), 0U);
  EXPECT_EQ(pool.manager.lookup(right), 1U);
  EXPECT_EQ(pool.manager.lookup(trunk), 2U);
  pool.allocate(1);
  EXPECT_EQ(pool.manager.lookup(right), 0U);
  EXPECT_EQ(pool.manager.lookup(trunk), 2U);
  pool.allocate(1);
  EXPECT_EQ(pool.manager.lookup(trunk), 1U);
}

TEST(Blocks, TheSecondCopyStaysPrivateAndDisappearsWithItsHolder) {
  BlockPool pool(6);
  const Hashes hashes = chain(1, 2);
  const Ids first = pool.allocate(2);
  EXPECT_EQ(pool.commit(first, hashes), first);
  const Ids second = pool.allocate(2);
  EXPECT_EQ(pool.commit(second, hashes), first);
  EXPECT_EQ(pool.commit(first, hashes), first) << "committing again changes nothing";
  pool.manager.release(second);
  pool.expect_counts(4, 0, 2);
  pool.manager.release(first);
  pool.expect_counts(4, 2, 0);
}

TEST(Blocks, AHeldBlockHoldsAncestorsThatItsHolderHasOnlyAsPrivateCopies) {
  BlockPool pool(5);
  const Hashes hashes = chain(1, 2);
  pool.cache({hashes[0]});
  const Ids own = pool.allocate(2);
  pool.commit({own[0]}, {hashes[0]});
  pool.commit({own[1]}, {hashes[1]}, hashes[0]);
  pool.expect_counts(2, 0, 3);
  EXPECT_EQ(pool.manager.lookup(hashes), 2U);
  const Ids all = pool.allocate(2);
  Ids none;
  EXPECT_FALSE(pool.manager.allocate(1, none)) << "the ancestor of a held block must not be evicted";
  pool.manager.release(own);
  pool.manager.release(all);
  pool.expect_counts(3, 2, 0);
}

TEST(Blocks, AcquireTakesPrefixAndNewBlocksTogetherOrNothing) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 3);
  pool.cache(hashes);
  Ids ids;
  EXPECT_EQ(pool.manager.acquire(hashes, 5, 0, ids), std::nullopt);
  EXPECT_TRUE(ids.empty());
  pool.expect_counts(1, 3, 0);
  EXPECT_EQ(pool.manager.acquire(hashes, 4, 1, ids), std::nullopt) << "one must stay available";
  EXPECT_EQ(pool.manager.acquire(hashes, 4, 0, ids), 3U);
  EXPECT_EQ(ids.size(), 4U);
  pool.expect_counts(0, 0, 4);
}

TEST(Blocks, AcquireFromTheMiddleCountsTheAncestorsThatItHolds) {
  BlockPool pool(3);
  const Hashes hashes = chain(1, 3);
  pool.cache(hashes);
  Ids ids;
  // The last block holds its two ancestors, so no block is left for a new one.
  EXPECT_EQ(pool.manager.acquire(std::span(hashes).subspan(2), 2, 0, ids), std::nullopt);
  EXPECT_TRUE(ids.empty());
  pool.expect_counts(0, 3, 0);
}

TEST(Blocks, DrainFreedNamesOnlyBlocksThatNobodyHasNow) {
  BlockPool pool(4);
  const Ids ids = pool.allocate(4);
  pool.manager.release(ids);
  const Ids again = pool.allocate(1);
  Ids freed = pool.manager.drain_freed();
  EXPECT_EQ(freed.size(), 3U);
  EXPECT_EQ(std::ranges::count(freed, again[0]), 0);
  EXPECT_TRUE(pool.manager.drain_freed().empty());
  pool.manager.release(again);
  EXPECT_EQ(pool.manager.drain_freed(), again);
}

TEST(Blocks, EvictedContentIsDrainedToo) {
  BlockPool pool(2);
  const Ids ids = pool.cache(chain(1, 2));
  EXPECT_TRUE(pool.manager.drain_freed().empty());
  EXPECT_EQ(pool.manager.reset_cache(), 2U);
  EXPECT_EQ(pool.manager.drain_freed().size(), 2U);
  pool.expect_counts(2, 0, 0);
}

TEST(Blocks, ResetLeavesWhatIsHeld) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 3);
  pool.cache(hashes);
  const Ids held = pool.acquire({hashes[0]});
  EXPECT_EQ(pool.manager.reset_cache(), 2U);
  EXPECT_EQ(pool.manager.lookup(hashes), 1U);
  pool.expect_counts(3, 0, 1);
}

TEST(Blocks, QuarantineKeepsBlocksOutOfReach) {
  BlockPool pool(3);
  const Ids ids = pool.allocate(2);
  pool.manager.quarantine(ids);
  pool.expect_counts(1, 0, 0, 2);
  Ids more;
  EXPECT_FALSE(pool.manager.allocate(2, more));
  EXPECT_TRUE(pool.manager.drain_freed().empty()) << "a late write may still come";
  pool.manager.unquarantine(ids);
  pool.expect_counts(3, 0, 0);
  EXPECT_EQ(pool.manager.drain_freed(), ids);
}

TEST(Blocks, RulesAreNamedAndABrokenOneChangesNothing) {
  BlockPool pool(6);
  const Hashes hashes = chain(1, 2);
  const Ids ids = pool.allocate(2);
  const Ids shared = pool.allocate(1);
  pool.manager.reference(shared);
  expect_error("released more often", [&] { pool.manager.release(Ids{ids[0], ids[1], ids[0]}); });
  expect_error("released more often", [&] { pool.manager.release(Ids{ids[0], 5}); });
  expect_error("released more often", [&] { pool.manager.release(Ids{-1}); });
  expect_error("does not exist", [&] { pool.manager.reference(Ids{6}); });
  expect_error("only a block with content", [&] { pool.manager.reference(Ids{ids[0], 5}); });
  expect_error("one hash a block", [&] { pool.commit(ids, {hashes[0]}); });
  expect_error("only a held block can be committed", [&] { pool.commit({ids[0], 5}, hashes); });
  expect_error("occurs twice", [&] { pool.commit({ids[0], ids[0]}, hashes); });
  expect_error("occurs twice", [&] { pool.manager.quarantine(Ids{ids[0], ids[0]}); });
  expect_error("can go to quarantine", [&] { pool.manager.quarantine(Ids{ids[0], shared[0]}); });
  expect_error("not in quarantine", [&] { pool.manager.unquarantine(ids); });
  pool.expect_counts(3, 0, 3);
  pool.commit(ids, hashes);
  expect_error("under another hash", [&] { pool.commit({ids[0]}, {hashes[1]}); });
  expect_error("can go to quarantine", [&] { pool.manager.quarantine(ids); });
  EXPECT_EQ(pool.manager.lookup(hashes), 2U);
}

TEST(Blocks, BadSizesAreRefused) {
  std::vector<std::uint64_t> generations(4);
  expect_error("num_blocks", [&] { const BlockManager manager(0, 16, generations); });
  expect_error("block_tokens", [&] { const BlockManager manager(4, 0, generations); });
  expect_error("one entry a block", [&] { const BlockManager manager(5, 16, generations); });
}

}  // namespace
}  // namespace twinpool::test
