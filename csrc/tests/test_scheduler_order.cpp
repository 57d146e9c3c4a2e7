// SPDX-License-Identifier: Apache-2.0
// Who is served first, who gives way, and who keeps its KV in host memory.
#include "tests/scheduler_fixture.h"

namespace twinpool::test {
namespace {

SchedulerConfig one_seat(const char* policy, std::int64_t max_overtaken = 0) {
  return {.max_num_seqs = 1, .policy = policy, .max_overtaken = max_overtaken};
}

/// Runs one sequence after the other and returns the order in which they were served.
std::vector<SequenceId> order_of_service(Bench& bench, const std::vector<SequenceId>& sequences) {
  std::vector<SequenceId> order;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    StepPlan plan = bench.step();
    const SequenceId served = plan.seq.at(0);
    order.push_back(served);
    while (bench.state(served) != SequenceState::done) {
      bench.step();
    }
    bench.remove(served);
  }
  return order;
}

TEST(Order, ShortestUncachedFirstCountsWhatTheCacheHolds) {
  Bench bench(32, one_seat("shortest_uncached"));
  const SequenceId warm = bench.add(prompt(16), 1);
  bench.run_until_idle();
  bench.remove(warm);
  const SequenceId plain = bench.add(prompt(9, 500), 1, 9, 0);
  const SequenceId shorter = bench.add(prompt(7, 700), 1, 0, 1);
  const SequenceId cached = bench.add(prompt(18), 1, 0, 2);  // two tokens behind a cached prefix
  EXPECT_EQ(order_of_service(bench, {plain, shorter, cached}), (std::vector<SequenceId>{cached, shorter, plain}));
}

TEST(Order, WhoHasBegunIsNotOvertakenByAShorterOne) {
  Bench bench(32, {.max_num_seqs = 4, .max_batched_tokens = 4, .max_chunk_tokens = 4, .policy = "shortest_uncached"});
  const SequenceId longer = bench.add(prompt(16), 1);
  bench.step();
  const SequenceId shorter = bench.add(prompt(4, 500), 1);
  while (bench.state(longer) != SequenceState::done) {
    EXPECT_EQ(bench.step().seq, std::vector<SequenceId>{longer});
  }
  EXPECT_EQ(bench.step().seq, std::vector<SequenceId>{shorter});
}

TEST(Order, NobodyIsOvertakenMoreOftenThanTheBound) {
  for (const char* policy : {"shortest_uncached", "priority"}) {
    constexpr int bound = 5;
    Bench bench(32, one_seat(policy, bound));
    const SequenceId last = bench.add(prompt(20), 1, -1);
    int overtaken = 0;
    for (std::int32_t i = 1;; ++i) {
      // Always a newcomer that the policy prefers.
      const SequenceId favoured = bench.add(prompt(2, 100 * i), 1, 1, i);
      const std::vector<SequenceId> served = bench.step().seq;
      if (served == std::vector<SequenceId>{last}) {
        break;
      }
      ASSERT_EQ(served, std::vector<SequenceId>{favoured});
      bench.remove(favoured);
      ASSERT_LT(++overtaken, 50) << policy << " starves the last one";
    }
    EXPECT_EQ(overtaken, bound) << policy;
  }
}

TEST(Order, AStreamOfHighPrioritiesDoesNotStopWhoHasBegun) {
  constexpr int bound = 4;
  Bench bench(64, {.max_num_seqs = 4,
                   .max_batched_tokens = 4,
                   .max_chunk_tokens = 4,
                   .policy = "priority",
                   .max_overtaken = bound});
  const SequenceId low = bench.add(prompt(12), 1, -1);
  bench.step();
  std::vector<SequenceId> high;
  for (std::int32_t i = 1; bench.state(low) != SequenceState::done; ++i) {
    ASSERT_LT(i, 50) << "starved";
    high.push_back(bench.add(prompt(4, 100 * i), 1, 1, i));
    bench.step();
    std::erase_if(high, [&](SequenceId id) {
      const bool done = bench.state(id) == SequenceState::done;
      if (done) {
        bench.remove(id);
      }
      return done;
    });
  }
}

TEST(Order, WithoutABoundThePolicyIsStrict) {
  Bench bench(32, one_seat("priority", 0));
  const SequenceId low = bench.add(prompt(4), 1, -1);
  for (std::int32_t i = 1; i < 100; ++i) {
    const SequenceId high = bench.add(prompt(2, 100 * i), 1, 1, i);
    ASSERT_EQ(bench.step().seq, std::vector<SequenceId>{high});
    bench.remove(high);
  }
  EXPECT_EQ(bench.step().seq, std::vector<SequenceId>{low});
}

TEST(NotPreemptible, GetsAllItsBlocksAtOnceAndKeepsThem) {
  Bench bench(8);
  const Sequence* kept = nullptr;
  const Tokens tokens = prompt(6);
  Hashes hashes;
  hash_blocks({}, tokens, test_block_tokens, hashes);
  const auto id = bench.scheduler.reserve({.tokens = tokens,
                                           .hashes = hashes,
                                           .root = {},
                                           .max_new_tokens = 11,
                                           .priority = -5,
                                           .arrival = 9,
                                           .preemptible = false});
  ASSERT_TRUE(id);
  kept = &bench.scheduler.sequence(*id);
  EXPECT_EQ(kept->blocks.size(), 4U) << "the KV of 16 tokens: the last one's is never needed";
  bench.start(*id, 1);
  const SequenceId other = bench.must_reserve(prompt(9, 500), 9, 5, 0);
  bench.start(other, 2);
  bool preempted = false;
  while (bench.state(*id) != SequenceState::done) {
    const StepPlan plan = bench.step();
    for (const SequenceId loser : plan.preempted) {
      EXPECT_EQ(loser, other) << "although it has the higher priority and more work to lose";
      preempted = true;
    }
  }
  EXPECT_TRUE(preempted);
  EXPECT_EQ(kept->blocks.size(), 4U);
}

TEST(NotPreemptible, WithoutRoomForItsEndIsNotAdmitted) {
  Bench bench(6);
  const Ids held = bench.pool.allocate(3);
  const Tokens tokens = prompt(4);
  Hashes hashes;
  hash_blocks({}, tokens, test_block_tokens, hashes);
  NewSequence request{.tokens = tokens, .hashes = hashes, .root = {}, .max_new_tokens = 13};
  request.preemptible = false;
  EXPECT_FALSE(bench.scheduler.reserve(request)) << "four blocks are needed in the end, three are there";
  const SequenceId id = bench.scheduler.add(request);
  EXPECT_TRUE(bench.step().seq.empty());
  bench.pool.manager.release(held);
  EXPECT_EQ(bench.step().seq, std::vector<SequenceId>{id});
}

class Swap : public ::testing::Test {
 protected:
  /// Runs until somebody is preempted.
  StepPlan until_preemption() {
    for (int i = 0; i < 50; ++i) {
      StepPlan plan = bench.plan();
      if (!plan.preempted.empty()) {
        return plan;
      }
      bench.advance(plan);
    }
    ADD_FAILURE() << "nobody was preempted";
    return {};
  }
  void SetUp() override {
    longer = bench.must_reserve(prompt(6), 12);
    shorter = bench.must_reserve(prompt(3, 500), 8);
    bench.start(longer, 1);
    bench.start(shorter, 2);
  }
  Bench bench{5, {.host_blocks = 4}};
  SequenceId longer = 0;
  SequenceId shorter = 0;
};

TEST_F(Swap, ThePlanThatTakesTheBlocksCopiesThemOut) {
  StepPlan plan;
  Ids before;
  for (;;) {
    before = bench.blocks(shorter);
    plan = bench.plan();
    if (!plan.preempted.empty()) {
      break;
    }
    bench.advance(plan);
  }
  ASSERT_EQ(plan.preempted, std::vector<SequenceId>{shorter});
  const Sequence& swapped = bench.scheduler.sequence(shorter);
  ASSERT_EQ(plan.swap_out.size(), 2 * swapped.host.size());
  for (std::size_t i = 0; i < swapped.host.size(); ++i) {
    EXPECT_EQ(plan.swap_out[2 * i], before[i]);
    EXPECT_EQ(plan.swap_out[2 * i + 1], swapped.host[i]);
  }
  EXPECT_EQ(bench.scheduler.host_blocks_used(), swapped.host.size());
  EXPECT_EQ(bench.scheduler.waiting_tokens(), 1U) << "only its newest token is to be computed";
}

TEST_F(Swap, TheFirstPlanThatRunsItAgainCopiesThemBackAndTheHostBlocksAreFreeAfterIt) {
  bench.advance(until_preemption());
  bench.remove(longer);
  bench.pool.manager.reset_cache();
  const std::vector<HostBlock> host = bench.scheduler.sequence(shorter).host;
  const std::size_t computed = bench.scheduler.sequence(shorter).restorable;
  StepPlan plan = bench.plan();
  ASSERT_EQ(plan.seq, std::vector<SequenceId>{shorter});
  EXPECT_EQ(plan.token_ids.size(), 1U);
  EXPECT_EQ(plan.positions, Tokens{static_cast<std::int32_t>(computed)});
  ASSERT_EQ(plan.swap_in.size(), 2 * host.size());
  EXPECT_EQ(plan.swap_in[0], host[0]);
  EXPECT_EQ(plan.swap_in[1], bench.blocks(shorter)[0]);
  bench.scheduler.abort_plan(plan);
  bench.check();
  const StepPlan again = bench.plan();
  EXPECT_EQ(again.swap_in, plan.swap_in) << "the aborted step may not have copied";
  bench.advance(again);
  EXPECT_EQ(bench.scheduler.host_blocks_used(), 0U);
}

TEST_F(Swap, WhatTheCacheStillHoldsIsNotCopiedBack) {
  bench.advance(until_preemption());
  bench.remove(longer);  // and the cache keeps the full blocks of the shorter one
  const std::size_t cached = bench.pool.manager.lookup(bench.scheduler.sequence(shorter).hashes);
  const std::size_t host = bench.scheduler.sequence(shorter).host.size();
  ASSERT_GT(cached, 0U);
  EXPECT_EQ(bench.step().swap_in.size(), 2 * (host - cached));
  EXPECT_EQ(bench.scheduler.host_blocks_used(), 0U);
}

TEST_F(Swap, AnAbortedPlanHasSavedNothing) {
  const StepPlan plan = until_preemption();
  bench.scheduler.abort_plan(plan);
  bench.check();
  EXPECT_EQ(bench.scheduler.host_blocks_used(), 0U);
  EXPECT_EQ(bench.scheduler.sequence(shorter).restorable, 0U);
}

TEST_F(Swap, RemovalGivesTheHostBlocksBack) {
  bench.advance(until_preemption());
  EXPECT_GT(bench.scheduler.host_blocks_used(), 0U);
  bench.remove(shorter);
  EXPECT_EQ(bench.scheduler.host_blocks_used(), 0U);
}

TEST(SwapAlone, AnEmptyPlanSavesNothingSinceItNeedNotComeBack) {
  Bench bench(4, {.host_blocks = 4});
  const SequenceId id = bench.must_reserve(prompt(4), 8);
  const Ids others = bench.pool.allocate(2);
  bench.start(id, 1);
  StepPlan plan = bench.step();
  while (plan.preempted.empty()) {
    plan = bench.step();
  }
  EXPECT_TRUE(plan.seq.empty());
  EXPECT_TRUE(plan.swap_out.empty());
  EXPECT_EQ(bench.scheduler.host_blocks_used(), 0U);
  bench.pool.manager.release(others);
}

}  // namespace
}  // namespace twinpool::test
