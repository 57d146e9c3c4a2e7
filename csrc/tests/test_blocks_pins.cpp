// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "tests/block_fixture.h"

namespace twinpool::test {
namespace {

TEST(Pins, HoldAfterTheSequenceIsGone) {
  BlockPool pool(4);
  const Ids ids = pool.allocate(2);
  pool.manager.pin(7, ids, 1, 10.0);
  pool.manager.release(ids);
  pool.expect_counts(2, 0, 2);
  EXPECT_EQ(pool.manager.pinned_blocks(), 2U);
  expect_error("released more often", [&] { pool.manager.release(ids); });
  EXPECT_TRUE(pool.manager.unpin(7, 0));
  pool.expect_counts(4, 0, 0);
  EXPECT_EQ(pool.manager.pinned_blocks(), 0U);
  EXPECT_FALSE(pool.manager.unpin(7, 0)) << "unknown now";
}

TEST(Pins, WaitForEveryReaderAndCountADuplicateOnce) {
  BlockPool pool(4);
  const Ids ids = pool.allocate(1);
  pool.manager.pin(7, ids, 2, 10.0);
  pool.manager.release(ids);
  EXPECT_TRUE(pool.manager.unpin(7, 1));
  EXPECT_TRUE(pool.manager.unpin(7, 1));
  EXPECT_TRUE(pool.manager.unpin(7, 1));
  pool.expect_counts(3, 0, 1);
  EXPECT_TRUE(pool.manager.unpin(7, 0));
  pool.expect_counts(4, 0, 0);
}

TEST(Pins, ASecondCallAddsBlocksAndNeverShortensTheLease) {
  BlockPool pool(4);
  const Ids ids = pool.allocate(3);
  pool.manager.pin(7, Ids{ids[0]}, 1, 10.0);
  pool.manager.pin(7, Ids{ids[1], ids[2]}, 1, 5.0);
  EXPECT_EQ(pool.manager.pinned_transfers(), 1U);
  EXPECT_EQ(pool.manager.pinned_blocks(), 3U);
  EXPECT_TRUE(pool.manager.expire(9.0).empty());
  EXPECT_EQ(pool.manager.expire(10.0), std::vector<std::uint64_t>{7});
  EXPECT_EQ(pool.manager.pinned_blocks(), 0U);
  pool.manager.release(ids);
}

TEST(Pins, LeasesEndInTheirOrderUnlessRenewed) {
  BlockPool pool(4);
  const Ids ids = pool.allocate(3);
  pool.manager.pin(1, Ids{ids[0]}, 1, 3.0);
  pool.manager.pin(2, Ids{ids[1]}, 1, 2.0);
  pool.manager.pin(3, Ids{ids[2]}, 1, 1.0);
  pool.manager.release(ids);
  EXPECT_TRUE(pool.manager.renew(3, 9.0));
  EXPECT_FALSE(pool.manager.renew(4, 9.0));
  EXPECT_EQ(pool.manager.expire(5.0), (std::vector<std::uint64_t>{2, 1}));
  EXPECT_FALSE(pool.manager.renew(1, 9.0)) << "an ended lease can't be renewed";
  pool.expect_counts(3, 0, 1);
  EXPECT_EQ(pool.manager.expire(9.0), std::vector<std::uint64_t>{3});
}

TEST(Pins, TwoTransfersOfOneBlockAreIndependent) {
  BlockPool pool(2);
  const Ids ids = pool.allocate(1);
  pool.manager.pin(1, ids, 1, 1.0);
  pool.manager.pin(2, ids, 1, 1.0);
  EXPECT_EQ(pool.manager.pinned_blocks(), 1U);
  pool.manager.release(ids);
  pool.manager.unpin(1, 0);
  pool.expect_counts(1, 0, 1);
  pool.manager.unpin(2, 0);
  pool.expect_counts(2, 0, 0);
}

TEST(Pins, ATransferOfNoBlocksIsLegal) {
  BlockPool pool(1);
  pool.manager.pin(1, {}, 1, 1.0);
  EXPECT_EQ(pool.manager.pinned_transfers(), 1U);
  EXPECT_TRUE(pool.manager.unpin(1, 0));
  EXPECT_EQ(pool.manager.pinned_transfers(), 0U);
}

TEST(Pins, CachedBlocksCanBePinnedAndKeepTheirAncestors) {
  BlockPool pool(3);
  const Hashes hashes = chain(1, 3);
  const Ids ids = pool.cache(hashes);
  pool.manager.pin(1, Ids{ids[1]}, 1, 1.0);
  pool.expect_counts(0, 1, 2);  // the pinned one and its parent; the leaf behind it can go
  EXPECT_EQ(pool.allocate(1), Ids{ids[2]});
  Ids none;
  EXPECT_FALSE(pool.manager.allocate(1, none));
  EXPECT_TRUE(pool.manager.unpin(1, 0));
  EXPECT_EQ(pool.manager.lookup(hashes), 2U);
  pool.expect_counts(0, 2, 1);
}

TEST(Pins, ASuffixThatOutlivesItsSequenceIsOlderThanItsAncestors) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 4);
  const Ids ids = pool.allocate(4);
  pool.commit(ids, hashes);
  pool.manager.pin(1, Ids{ids[2], ids[3]}, 1, 1.0);
  pool.manager.release(ids);
  pool.expect_counts(0, 0, 4);
  pool.manager.expire(1.0);
  pool.expect_counts(0, 4, 0);  // checks the LRU order as well
  EXPECT_EQ(pool.allocate(1), Ids{ids[3]});
}

TEST(Pins, RulesAreNamedAndABrokenOneChangesNothing) {
  BlockPool pool(3);
  const Ids ids = pool.allocate(1);
  expect_error("at least one reader", [&] { pool.manager.pin(1, ids, 0, 1.0); });
  expect_error("a number", [&] { pool.manager.pin(1, ids, 1, std::numeric_limits<double>::quiet_NaN()); });
  expect_error("only a block with content", [&] { pool.manager.pin(1, Ids{ids[0], 2}, 1, 1.0); });
  EXPECT_EQ(pool.manager.pinned_transfers(), 0U);
  pool.manager.pin(1, ids, 2, 1.0);
  expect_error("expects 2 readers", [&] { pool.manager.pin(1, ids, 1, 1.0); });
  expect_error("a number", [&] { pool.manager.renew(1, std::numeric_limits<double>::quiet_NaN()); });
  expect_error("can go to quarantine", [&] { pool.manager.quarantine(ids); });
  EXPECT_EQ(pool.manager.pinned_blocks(), 1U);
}

}  // namespace
}  // namespace twinpool::test
