// SPDX-License-Identifier: Apache-2.0
// Preemption and forks.
#include "tests/scheduler_fixture.h"

namespace twinpool::test {
namespace {

StepPlan step_until_preemption(Bench& bench) {
  for (int steps = 0; steps < 50; ++steps) {
    StepPlan plan = bench.step();
    if (!plan.preempted.empty()) {
      return plan;
    }
  }
  ADD_FAILURE() << "nobody was preempted";
  return {};
}

TEST(Preemption, TheOneWithTheLeastWorkToLoseWaitsAgainAndLosesNoToken) {
  Bench bench(5);
  const SequenceId longer = bench.must_reserve(prompt(6), 12);
  const SequenceId shorter = bench.must_reserve(prompt(3, 500), 8);
  bench.start(longer, 1);
  bench.start(shorter, 2);
  StepPlan plan = step_until_preemption(bench);
  EXPECT_EQ(plan.preempted, std::vector<SequenceId>{shorter});
  EXPECT_EQ(plan.seq, std::vector<SequenceId>{longer});
  EXPECT_EQ(bench.state(shorter), SequenceState::waiting);
  const Tokens before = bench.outputs(shorter);
  EXPECT_FALSE(bench.reserve(prompt(1, 900), 2)) << "a new reservation must not starve it";
  bench.run_until_idle();
  EXPECT_EQ(bench.outputs(longer).size(), 12U);
  bench.remove(longer);
  bench.run_until_idle();
  const Tokens after = bench.outputs(shorter);
  EXPECT_EQ(after.size(), 8U);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), after.begin()));
}

TEST(Preemption, ARecomputeCoversPromptAndOutputAndSamplesTheNextToken) {
  Bench bench(6);
  const SequenceId first = bench.must_reserve(prompt(10), 11);
  bench.start(first, 1);
  const SequenceId second = bench.add(prompt(2, 500), 10);
  StepPlan plan = step_until_preemption(bench);
  ASSERT_EQ(plan.preempted, std::vector<SequenceId>{second});
  const std::size_t known = 2 + bench.outputs(second).size();
  while (bench.state(first) != SequenceState::done) {
    bench.step();
  }
  bench.remove(first);
  plan = bench.step();
  EXPECT_EQ(plan.seq, std::vector<SequenceId>{second});
  EXPECT_EQ(plan.context, Tokens{static_cast<std::int32_t>(known)});
  EXPECT_EQ(plan.sample, std::vector<std::uint8_t>{1});
}

TEST(Preemption, PriorityDecidesBeforeWork) {
  Bench bench(5, {.max_num_seqs = 8, .max_batched_tokens = 64, .max_chunk_tokens = 64, .policy = "priority"});
  const SequenceId low = bench.must_reserve(prompt(6), 12, -1);
  const SequenceId high = bench.must_reserve(prompt(3, 500), 8, 1);
  bench.start(low, 1);
  bench.start(high, 2);
  StepPlan plan = step_until_preemption(bench);
  EXPECT_EQ(plan.preempted, std::vector<SequenceId>{low});
  EXPECT_EQ(plan.seq, std::vector<SequenceId>{high});
}

TEST(Preemption, AloneAndWithoutBlocksItWaitsForThem) {
  Bench bench(4);
  const SequenceId id = bench.must_reserve(prompt(4), 8);
  const Ids others = bench.pool.allocate(2);
  bench.start(id, 1);
  StepPlan plan;
  for (int i = 0; i < 5; ++i) {
    plan = bench.step();
  }
  EXPECT_EQ(plan.preempted, std::vector<SequenceId>{id});
  EXPECT_TRUE(plan.seq.empty());
  EXPECT_TRUE(bench.step().seq.empty());
  bench.pool.manager.release(others);
  bench.run_until_idle();
  EXPECT_EQ(bench.outputs(id).size(), 8U);
}

TEST(Preemption, NobodyIsAdmittedInTheSamePlan) {
  Bench bench(5);
  const SequenceId first = bench.must_reserve(prompt(6), 12);
  const SequenceId second = bench.must_reserve(prompt(3, 500), 8);
  bench.start(first, 1);
  bench.start(second, 2);
  const SequenceId waiting = bench.add(prompt(1, 900), 1, 0, 99.0);
  StepPlan plan = step_until_preemption(bench);
  EXPECT_EQ(bench.state(waiting), SequenceState::waiting);
}

TEST(Fork, AfterStartSharesFullBlocksAndCopiesThePartialOne) {
  Bench bench(16);
  const SequenceId parent = bench.must_reserve(prompt(6), 8);
  bench.start(parent, 1);
  const auto child = bench.scheduler.fork(parent, 2, 8);
  ASSERT_TRUE(child);
  bench.check();
  EXPECT_EQ(bench.blocks(*child)[0], bench.blocks(parent)[0]);
  EXPECT_NE(bench.blocks(*child)[1], bench.blocks(parent)[1]);
  const StepPlan plan = bench.step();
  EXPECT_EQ(plan.seq, (std::vector<SequenceId>{parent, *child}));
  EXPECT_EQ(plan.token_ids, (Tokens{1, 2}));
  EXPECT_EQ(plan.copies, (Ids{bench.blocks(parent)[1], bench.blocks(*child)[1]}));
  EXPECT_TRUE(bench.step().copies.empty());
  bench.run_until_idle();
  bench.remove(parent);
  bench.remove(*child);
  EXPECT_EQ(bench.pool.manager.held_blocks(), 0U);
}

TEST(Fork, AtABlockBorderNothingIsCopied) {
  Bench bench(16);
  const SequenceId parent = bench.must_reserve(prompt(8), 8);
  bench.start(parent, 1);
  const auto child = bench.scheduler.fork(parent, 2, 8);
  ASSERT_TRUE(child);
  EXPECT_EQ(bench.blocks(*child).size(), 3U);
  EXPECT_TRUE(bench.step().copies.empty());
}

TEST(Fork, SeatsOfAllChoicesAreTakenWithTheReservation) {
  Bench bench(16, {.max_num_seqs = 4});
  const SequenceId parent = bench.must_reserve(prompt(6), 8, 0, 0, 3);
  EXPECT_EQ(bench.scheduler.reserved(), 3U);
  EXPECT_FALSE(bench.reserve(prompt(4, 500), 2, 0, 0, 2)) << "one seat is left";
  const SequenceId other = bench.must_reserve(prompt(4, 500), 2);
  const auto first = bench.scheduler.fork(parent, 2, 8);
  ASSERT_TRUE(first && bench.scheduler.fork(parent, 3, 8)) << "theirs";
  EXPECT_FALSE(bench.scheduler.fork(parent, 4, 8)) << "nobody's";
  EXPECT_EQ(bench.scheduler.reserved(), 4U);
  bench.remove(*first);
  EXPECT_EQ(bench.scheduler.reserved(), 4U) << "the seat is its parent's again";
  EXPECT_FALSE(bench.scheduler.fork(other, 4, 8));
  ASSERT_TRUE(bench.scheduler.fork(parent, 5, 8));
  bench.remove(other);
  bench.start(parent, 1);
  EXPECT_EQ(bench.scheduler.reserved(), 0U);
  EXPECT_EQ(bench.step().seq.size(), 3U);
}

TEST(Fork, SeatsThatAreNotUsedAreFreeWithTheStartOrTheEnd) {
  Bench bench(16, {.max_num_seqs = 3});
  bench.start(bench.must_reserve(prompt(6), 8, 0, 0, 3), 1);
  EXPECT_EQ(bench.scheduler.reserved(), 0U);
  const SequenceId second = bench.must_reserve(prompt(4, 500), 2, 0, 0, 2);
  const auto fork = bench.scheduler.fork(second, 2, 8);
  ASSERT_TRUE(fork);
  bench.remove(second);
  EXPECT_EQ(bench.scheduler.reserved(), 1U) << "the fork sits on";
  bench.remove(*fork);
  EXPECT_EQ(bench.scheduler.reserved(), 0U);
}

TEST(Fork, BeforeStartBeginsWithItsParent) {
  Bench bench(16);
  const SequenceId parent = bench.must_reserve(prompt(6), 8);
  const auto first = bench.scheduler.fork(parent, 2, 8);
  const auto second = bench.scheduler.fork(parent, 3, 1);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(bench.scheduler.reserved(), 3U);
  expect_error("fork the sequence that it starts with", [&] { bench.scheduler.fork(*first, 4, 8); });
  EXPECT_TRUE(bench.plan().seq.empty());
  bench.start(parent, 1);
  EXPECT_EQ(bench.state(*second), SequenceState::done) << "one token and it has it";
  const StepPlan plan = bench.step();
  EXPECT_EQ(plan.seq, (std::vector<SequenceId>{parent, *first}));
  EXPECT_EQ(plan.copies.size(), 2U);
}

TEST(Fork, TheSourceStaysUntilItIsCopied) {
  Bench bench(16);
  const SequenceId parent = bench.must_reserve(prompt(6), 8);
  bench.start(parent, 1);
  const Ids blocks = bench.blocks(parent);
  const auto child = bench.scheduler.fork(parent, 2, 8);
  ASSERT_TRUE(child);
  bench.remove(parent);
  EXPECT_EQ(bench.pool.manager.state(blocks[1]), BlockState::held);
  const StepPlan plan = bench.plan();
  EXPECT_EQ(plan.copies[0], blocks[1]);
  bench.scheduler.abort_plan(plan);
  EXPECT_EQ(bench.pool.manager.state(blocks[1]), BlockState::held) << "not copied yet";
  bench.step();
  EXPECT_EQ(bench.pool.manager.state(blocks[1]), BlockState::free);
}

TEST(Fork, OfAForkCopiesFromWhereTheContentIs) {
  Bench bench(16);
  const SequenceId parent = bench.must_reserve(prompt(6), 8);
  bench.start(parent, 1);
  const BlockId source = bench.blocks(parent)[1];
  const auto child = bench.scheduler.fork(parent, 2, 8);
  const auto grandchild = bench.scheduler.fork(*child, 3, 8);
  ASSERT_TRUE(grandchild);
  const StepPlan plan = bench.step();
  EXPECT_EQ(plan.copies, (Ids{source, bench.blocks(*child)[1], source, bench.blocks(*grandchild)[1]}));
}

TEST(Fork, OfAPreemptedSequenceIsRecomputed) {
  Bench bench(5);
  const SequenceId longer = bench.must_reserve(prompt(6), 12);
  const SequenceId shorter = bench.must_reserve(prompt(3, 500), 8);
  bench.start(longer, 1);
  bench.start(shorter, 2);
  while (bench.state(shorter) != SequenceState::waiting) {
    bench.step();
  }
  const auto child = bench.scheduler.fork(shorter, 9, 3);
  ASSERT_TRUE(child);
  EXPECT_EQ(bench.state(*child), SequenceState::waiting);
  const auto ended = bench.scheduler.fork(shorter, 9, 1);
  ASSERT_TRUE(ended);
  EXPECT_EQ(bench.state(*ended), SequenceState::done) << "it has its only token";
  bench.run_until_idle();
  bench.remove(longer);
  bench.run_until_idle();
  bench.remove(shorter);
  bench.run_until_idle();
  EXPECT_EQ(bench.outputs(*child).size(), 3U);
  EXPECT_EQ(bench.outputs(*child)[0], 9);
}

TEST(Fork, WithoutRoomIsRefusedAndChangesNothing) {
  Bench bench(4, {.max_num_seqs = 2});
  const SequenceId parent = bench.must_reserve(prompt(6), 4);
  EXPECT_FALSE(bench.scheduler.fork(parent, 2, 4)) << "one block is left, two are needed";
  bench.check();
  EXPECT_EQ(bench.pool.manager.free_blocks(), 1U);
  const SequenceId waiting = bench.add(prompt(4, 500), 1);
  expect_error("not computed yet", [&] { bench.scheduler.fork(waiting, 2, 4); });
  expect_error("at least one new token", [&] { bench.scheduler.fork(parent, 2, 0); });
}

TEST(Pressure, EverySequenceEndsWithAllItsTokensWhateverThePoolSize) {
  for (const std::size_t blocks : {6U, 7U, 9U, 12U, 20U}) {
    for (const char* policy : {"fcfs", "priority"}) {
      Bench bench(blocks, {.max_num_seqs = 4, .max_batched_tokens = 6, .max_chunk_tokens = 5, .policy = policy});
      std::map<SequenceId, std::size_t> wanted;
      for (std::int32_t i = 0; i < 12; ++i) {
        const auto length = static_cast<std::size_t>(1 + i % 7);
        const auto limit = static_cast<std::size_t>(1 + (i * 5) % 13);
        wanted[bench.add(prompt(length, 10 * (i % 3)), static_cast<std::int64_t>(limit), i % 3, i)] = limit;
      }
      int steps = 0;
      while (!wanted.empty()) {
        ASSERT_LT(++steps, 3000) << "stuck with " << blocks << " blocks under " << policy;
        bench.step();
        for (auto at = wanted.begin(); at != wanted.end();) {
          if (bench.state(at->first) == SequenceState::done) {
            EXPECT_EQ(bench.outputs(at->first).size(), at->second);
            bench.remove(at->first);
            at = wanted.erase(at);
          } else {
            ++at;
          }
        }
      }
      EXPECT_EQ(bench.pool.manager.held_blocks(), 0U);
    }
  }
}

}  // namespace
}  // namespace twinpool::test
