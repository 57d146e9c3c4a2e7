// SPDX-License-Identifier: Apache-2.0
// New blocks are neighbours where free ones are, and nothing else depends on which ones are taken.
#include <numeric>
#include <random>

#include "tests/block_fixture.h"

namespace twinpool::test {
namespace {

/// ``count`` ids from ``first`` on.
Ids run(BlockId first, std::size_t count) {
  Ids ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

TEST(BlockRuns, AnEvictedChainIsGivenOutInRisingOrder) {
  BlockPool pool(16);
  EXPECT_EQ(pool.cache(chain(1, 16)), run(0, 16));
  EXPECT_EQ(pool.allocate(6), run(10, 6)) << "evicted from the end of the chain";
  EXPECT_EQ(pool.allocate(10), run(0, 10));
}

TEST(BlockRuns, ReleasedBlocksAreGivenOutInRisingOrder) {
  BlockPool pool(8);
  const Ids ids = pool.allocate(8);
  pool.manager.release(ids);
  EXPECT_EQ(pool.allocate(8), run(0, 8));
}

TEST(BlockRuns, ASequenceGrowsIntoItsNeighbour) {
  BlockPool pool(12);
  Ids first = pool.allocate(3);
  const Ids second = pool.allocate(3);
  pool.manager.release(second);
  EXPECT_TRUE(pool.manager.allocate(1, first));
  EXPECT_EQ(first, run(0, 4));
  EXPECT_TRUE(pool.manager.allocate(2, first));
  EXPECT_EQ(first, run(0, 6));
}

TEST(BlockRuns, FreshBlocksFollowTheCachedPrefix) {
  BlockPool pool(12);
  const Hashes hashes = chain(1, 3);
  EXPECT_EQ(pool.cache(hashes), run(0, 3));
  const Ids other = pool.allocate(9);
  pool.manager.release(Ids(other.begin() + 2, other.end()));
  pool.manager.release(Ids(other.begin(), other.begin() + 2));
  Ids ids;
  EXPECT_EQ(pool.manager.acquire(hashes, 7, 0, ids), 3U);
  EXPECT_EQ(ids, run(0, 7)) << "the free list begins at block 11";
}

TEST(BlockRuns, HeldBlocksPartThem) {
  BlockPool pool(7);
  const Ids ids = pool.allocate(7);
  pool.manager.release(Ids({0, 1, 2, 4, 5, 6}));
  EXPECT_EQ(pool.allocate(6), Ids({4, 5, 6, 0, 1, 2}));
}

/// Two managers get the same calls; one is asked for blocks one by one with nothing to go on, and so takes the front of
/// its free list each time. Their blocks differ and nothing else does.
class Twins {
 public:
  explicit Twins(std::size_t blocks)
      : runs_(blocks),
        single_(blocks) {}

  void begin(const Hashes& hashes, bool keep) {
    Ids ids;
    const auto prefix = runs_.manager.acquire(hashes, hashes.size(), 0, ids);
    Ids others;
    const std::size_t found = single_.manager.lookup(hashes);
    ASSERT_TRUE(prefix.has_value()) << "the caller asks for no more than there is";
    single_.manager.acquire_prefix(hashes, others);
    while (others.size() < hashes.size()) {
      others.push_back(single_.allocate(1).front());
    }
    ASSERT_EQ(*prefix, found);
    if (keep) {
      commit(runs_, ids, hashes);
      commit(single_, others, hashes);
    }
    held_.emplace_back(ids, others);
  }
  void end(std::size_t which) {
    std::swap(held_[which], held_.back());
    runs_.manager.release(held_.back().first);
    single_.manager.release(held_.back().second);
    held_.pop_back();
  }
  [[nodiscard]] std::size_t held() const { return held_.size(); }
  [[nodiscard]] std::size_t room() const { return runs_.manager.available_blocks(); }
  void expect_alike() {
    runs_.manager.check();
    single_.manager.check();
    EXPECT_EQ(runs_.manager.free_blocks(), single_.manager.free_blocks());
    EXPECT_EQ(runs_.manager.cached_blocks(), single_.manager.cached_blocks());
    EXPECT_EQ(total(runs_), total(single_)) << "each content began and ended once";
    const auto ours = runs_.manager.drain_events();
    const auto theirs = single_.manager.drain_events();
    ASSERT_EQ(ours.size(), theirs.size());
    for (std::size_t i = 0; i < ours.size(); ++i) {
      EXPECT_EQ(ours[i].stored, theirs[i].stored);
      EXPECT_EQ(ours[i].parent, theirs[i].parent);
      EXPECT_EQ(ours[i].hashes, theirs[i].hashes) << "another block was evicted, or in another order";
    }
  }
  /// Pieces that the blocks in hand consist of, one by one and in runs.
  [[nodiscard]] std::pair<std::size_t, std::size_t> pieces() const {
    std::pair<std::size_t, std::size_t> found;
    for (const auto& [ids, others] : held_) {
      found.first += pieces_of(others);
      found.second += pieces_of(ids);
    }
    return found;
  }

 private:
  static void commit(BlockPool& pool, const Ids& ids, const Hashes& hashes) { pool.commit(ids, hashes); }
  static std::uint64_t total(const BlockPool& pool) {
    return std::accumulate(pool.generations.begin(), pool.generations.end(), std::uint64_t{0});
  }
  static std::size_t pieces_of(const Ids& ids) {
    std::size_t pieces = ids.empty() ? 0 : 1;
    for (std::size_t i = 1; i < ids.size(); ++i) {
      pieces += ids[i] == ids[i - 1] + 1 ? 0 : 1;
    }
    return pieces;
  }

  BlockPool runs_;
  BlockPool single_;
  std::vector<std::pair<Ids, Ids>> held_;
};

TEST(BlockRuns, ChangeNothingElseUnderRandomUse) {
  std::size_t single = 0;
  std::size_t runs = 0;
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random()) % limit; };
    Twins twins(96);
    for (std::int32_t step = 0; step < 400; ++step) {
      const std::size_t length = 1 + below(16);
      // Some begin alike, so that prefixes are found; most are new, so that old ones are evicted.
      Hashes hashes = chain(below(3) == 0 ? 1 : 1000 + step, std::min<std::size_t>(length, 4));
      const Hashes tail = chain(10 + step, length - hashes.size(), hashes.back());
      hashes.insert(hashes.end(), tail.begin(), tail.end());
      if (twins.held() > 0 && (below(2) == 0 || twins.room() < 32)) {
        twins.end(below(twins.held()));
      } else {
        twins.begin(hashes, below(4) != 0);
      }
      if (HasFatalFailure()) {
        return;
      }
      twins.expect_alike();
      const auto pieces = twins.pieces();
      single += pieces.first;
      runs += pieces.second;
    }
  }
  EXPECT_LT(4 * runs, 3 * single) << "prompts consist of fewer pieces";
  RecordProperty("pieces_single", std::to_string(single));
  RecordProperty("pieces_runs", std::to_string(runs));
}

}  // namespace
}  // namespace twinpool::test
