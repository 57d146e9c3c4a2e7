// SPDX-License-Identifier: Apache-2.0
#include "tests/scheduler_fixture.h"

namespace twinpool::test {
namespace {

TEST(Prefill, OneChunkSamplesTheFirstToken) {
  Bench bench(8);
  const SequenceId id = bench.add(prompt(6), 4);
  EXPECT_EQ(bench.scheduler.waiting_tokens(), 6U);
  const StepPlan plan = bench.plan();
  EXPECT_EQ(plan.seq, std::vector<SequenceId>{id});
  EXPECT_EQ(plan.decodes, 0U);
  EXPECT_EQ(plan.token_ids, prompt(6));
  EXPECT_EQ(plan.positions, prompt(6, 0));
  EXPECT_EQ(plan.slots, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(plan.q_start, (Tokens{0, 6}));
  EXPECT_EQ(plan.context, Tokens{6});
  EXPECT_EQ(plan.sample, std::vector<std::uint8_t>{1});
  EXPECT_EQ(table_row(plan, 0), (Ids{0, 1}));
  bench.advance(plan);
  EXPECT_EQ(bench.outputs(id), Tokens{1006});
  EXPECT_EQ(bench.scheduler.sequence(id).computed, 6U);
  EXPECT_EQ(bench.scheduler.waiting_tokens(), 0U);
}

TEST(Prefill, EdgeLengthsOfABlock) {
  for (const std::size_t length : {1U, 3U, 4U, 5U, 8U, 12U}) {
    Bench bench(16);
    const SequenceId first = bench.add(prompt(length), 2);
    bench.run_until_idle();
    EXPECT_EQ(bench.scheduler.sequence(first).computed, length + 1);
    bench.remove(first);
    // Again: all full blocks are cached, but the last token is always computed.
    const SequenceId again = bench.add(prompt(length), 2);
    const StepPlan plan = bench.step();
    EXPECT_EQ(bench.scheduler.sequence(again).cached_tokens, (length - 1) / 4 * 4) << length;
    EXPECT_EQ(plan.token_ids.size(), length - (length - 1) / 4 * 4) << length;
    EXPECT_EQ(plan.sample, std::vector<std::uint8_t>{1});
  }
}

TEST(Prefill, ChunksEndAtBlocksAndFitTheBudget) {
  Bench bench(16, {.max_num_seqs = 4, .max_batched_tokens = 9, .max_chunk_tokens = 7});
  const SequenceId first = bench.add(prompt(9), 1);
  const SequenceId second = bench.add(prompt(9, 500), 1);
  StepPlan plan = bench.step();
  // 7 allowed, 4 taken to end at a block; the next gets what is left of the budget, rounded the same way.
  EXPECT_EQ(plan.seq, (std::vector<SequenceId>{first, second}));
  EXPECT_EQ(plan.q_start, (Tokens{0, 4, 8}));
  EXPECT_EQ(plan.sample, (std::vector<std::uint8_t>{0, 0}));
  plan = bench.step();
  EXPECT_EQ(plan.q_start, (Tokens{0, 5, 9}));
  EXPECT_EQ(plan.sample, (std::vector<std::uint8_t>{1, 0}));
  EXPECT_EQ(bench.state(first), SequenceState::done);
  plan = bench.step();
  EXPECT_EQ(plan.seq, std::vector<SequenceId>{second});
  EXPECT_EQ(plan.sample, std::vector<std::uint8_t>{1});
}

TEST(Prefill, ASmallBudgetStillMakesProgress) {
  Bench bench(8, {.max_num_seqs = 1, .max_batched_tokens = 1, .max_chunk_tokens = 1});
  const SequenceId id = bench.add(prompt(6), 1);
  bench.run_until_idle();
  EXPECT_EQ(bench.outputs(id).size(), 1U);
}

TEST(Prefill, PrefillOnlySequencesKeepTheirBlocksUntilRemove) {
  Bench bench(8);
  const SequenceId id = bench.add(prompt(6), 0);
  bench.step();
  EXPECT_EQ(bench.state(id), SequenceState::done);
  EXPECT_EQ(bench.outputs(id), Tokens{1006});
  EXPECT_EQ(bench.blocks(id).size(), 2U);
  EXPECT_EQ(bench.scheduler.running(), 0U);
  EXPECT_TRUE(bench.plan().seq.empty());
  bench.remove(id);
  EXPECT_EQ(bench.pool.manager.cached_blocks(), 1U);
  EXPECT_EQ(bench.pool.manager.free_blocks(), 7U);
}

TEST(Prefill, DecodesGoFirstAndPrefillFillsTheRest) {
  Bench bench(32, {.max_num_seqs = 4, .max_batched_tokens = 9, .max_chunk_tokens = 8});
  const SequenceId first = bench.add(prompt(4), 10);
  bench.step();
  const SequenceId second = bench.add(prompt(12, 500), 10);
  const StepPlan plan = bench.step();
  EXPECT_EQ(plan.seq, (std::vector<SequenceId>{first, second}));
  EXPECT_EQ(plan.decodes, 1U);
  EXPECT_EQ(plan.q_start, (Tokens{0, 1, 9}));
  EXPECT_EQ(plan.sample, (std::vector<std::uint8_t>{1, 0}));
  EXPECT_EQ(bench.outputs(first).size(), 2U);
}

TEST(Prefill, IdenticalPromptsAtOnceShareOneCopyAfterTheStep) {
  Bench bench(16);
  const SequenceId first = bench.add(prompt(8), 0);
  const SequenceId second = bench.add(prompt(8), 0);
  const StepPlan plan = bench.step();
  EXPECT_EQ(plan.seq.size(), 2U);
  EXPECT_EQ(bench.blocks(first), bench.blocks(second));
  EXPECT_EQ(bench.pool.manager.held_blocks(), 2U);
}

TEST(Prefill, WithoutTheCacheEveryPositionIsComputedAndPublished) {
  Bench bench(16, {.max_num_seqs = 4, .max_batched_tokens = 16, .max_chunk_tokens = 16, .policy = "shortest_uncached"});
  bench.remove(bench.add(prompt(9), 0));
  const SequenceId warm = bench.add(prompt(9), 0);
  bench.step();
  bench.remove(warm);
  // Two more blocks than the cache has.
  const SequenceId id = bench.add(prompt(14), 0, 0, 0, false);
  const StepPlan plan = bench.step();
  EXPECT_EQ(plan.positions, prompt(14, 0));
  EXPECT_EQ(bench.scheduler.sequence(id).cached_tokens, 0U);
  bench.remove(id);
  const SequenceId again = bench.add(prompt(14), 0);
  bench.step();
  EXPECT_EQ(bench.scheduler.sequence(again).cached_tokens, 12U);
}

TEST(Prefill, WhatWaitsForNoCacheIsNotTakenForShort) {
  Bench bench(16, {.max_num_seqs = 1, .max_batched_tokens = 16, .max_chunk_tokens = 16, .policy = "shortest_uncached"});
  const SequenceId first = bench.add(prompt(13), 0);
  bench.step();
  bench.remove(first);
  const SequenceId all = bench.add(prompt(13), 0, 0, 1.0, false);
  const SequenceId half = bench.add(prompt(6, 300), 0, 0, 2.0);
  EXPECT_EQ(bench.step().seq.front(), half);
  EXPECT_EQ(bench.step().seq.front(), all);
}

TEST(Prefill, AfterItsFirstTokenItTakesItsOwnBlocksFromTheCache) {
  // The other one needs a block, and this one has less to lose.
  Bench bench(7, {.max_num_seqs = 4, .max_batched_tokens = 32, .max_chunk_tokens = 32});
  const SequenceId other = bench.add(prompt(12, 300), 12);
  bench.step();
  const SequenceId id = bench.add(prompt(8), 8, 0, 1.0, false);
  StepPlan plan = bench.step();
  while (plan.preempted.empty()) {
    ASSERT_FALSE(plan.seq.empty());
    plan = bench.step();
  }
  ASSERT_EQ(plan.preempted, std::vector<SequenceId>{id});
  ASSERT_GE(bench.outputs(id).size(), 1U);
  bench.remove(other);
  plan = bench.step();
  ASSERT_EQ(plan.seq, std::vector<SequenceId>{id});
  EXPECT_EQ(plan.positions.front(), 8);
}

TEST(Prefill, WaitsWithoutBlocksAndIsServedInOrder) {
  Bench bench(4);
  const SequenceId first = bench.add(prompt(12), 0, 0, 1.0);
  const SequenceId large = bench.add(prompt(9, 300), 0, 0, 2.0);
  const SequenceId small = bench.add(prompt(3, 600), 0, 0, 3.0);
  bench.step();
  EXPECT_EQ(bench.state(first), SequenceState::done);
  EXPECT_EQ(bench.state(large), SequenceState::waiting);
  EXPECT_EQ(bench.state(small), SequenceState::waiting) << "nobody overtakes";
  EXPECT_TRUE(bench.step().seq.empty());
  bench.remove(first);
  bench.step();
  EXPECT_EQ(bench.state(large), SequenceState::done);
  EXPECT_EQ(bench.state(small), SequenceState::done);
}

TEST(Prefill, PriorityOrdersWaitingAndRunningPrefills) {
  Bench bench(32, {.max_num_seqs = 8, .max_batched_tokens = 8, .max_chunk_tokens = 8, .policy = "priority"});
  const SequenceId low = bench.add(prompt(16), 0, -1, 1.0);
  bench.step();
  const SequenceId high = bench.add(prompt(8, 300), 0, 5, 2.0);
  const SequenceId normal = bench.add(prompt(4, 600), 0, 0, 0.0);
  EXPECT_EQ(bench.step().seq, std::vector<SequenceId>{high});
  EXPECT_EQ(bench.step().seq, (std::vector<SequenceId>{normal, low}));
  EXPECT_EQ(bench.state(low), SequenceState::prefilling);
}

TEST(Prefill, FcfsIgnoresPriority) {
  Bench bench(32, {.max_num_seqs = 8, .max_batched_tokens = 8, .max_chunk_tokens = 8});
  const SequenceId late = bench.add(prompt(4), 0, 9, 2.0);
  const SequenceId early = bench.add(prompt(4, 300), 0, 0, 1.0);
  EXPECT_EQ(bench.step().seq, (std::vector<SequenceId>{early, late}));
}

TEST(Prefill, SeatsLimitWhatRuns) {
  Bench bench(32, {.max_num_seqs = 2, .max_batched_tokens = 64, .max_chunk_tokens = 64});
  for (std::int32_t i = 0; i < 4; ++i) {
    bench.add(prompt(4, 100 * i), 8);
  }
  EXPECT_EQ(bench.step().seq.size(), 2U);
  EXPECT_EQ(bench.scheduler.running(), 2U);
  EXPECT_EQ(bench.scheduler.waiting(), 2U);
  bench.remove(1);
  EXPECT_EQ(bench.step().seq, (std::vector<SequenceId>{2, 3}));
}

}  // namespace
}  // namespace twinpool::test
