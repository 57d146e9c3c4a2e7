// SPDX-License-Identifier: Apache-2.0
#include "tests/scheduler_fixture.h"

namespace twinpool::test {
namespace {

TEST(Decode, AReservedSequenceDecodesFromItsFirstToken) {
  Bench bench(8);
  const SequenceId id = bench.must_reserve(prompt(6), 4);
  EXPECT_EQ(bench.blocks(id).size(), 3U) << "two for the prompt and one of head-room";
  EXPECT_EQ(bench.scheduler.reserved(), 1U);
  EXPECT_TRUE(bench.plan().seq.empty()) << "its KV is not here yet";
  bench.start(id, 7);
  EXPECT_EQ(bench.scheduler.running(), 1U);
  const StepPlan plan = bench.plan();
  EXPECT_EQ(plan.decodes, 1U);
  EXPECT_EQ(plan.token_ids, Tokens{7});
  EXPECT_EQ(plan.positions, Tokens{6});
  EXPECT_EQ(plan.context, Tokens{7});
  EXPECT_EQ(plan.slots, std::vector<std::int64_t>{4 * bench.blocks(id)[1] + 2});
  bench.advance(plan);
  EXPECT_EQ(bench.outputs(id), (Tokens{7, 1007}));
}

TEST(Decode, StopsAtItsLimitAndKeepsItsBlocks) {
  Bench bench(8);
  const SequenceId id = bench.must_reserve(prompt(6), 3);
  bench.start(id, 7);
  bench.run_until_idle();
  EXPECT_EQ(bench.outputs(id).size(), 3U);
  EXPECT_EQ(bench.state(id), SequenceState::done);
  EXPECT_EQ(bench.scheduler.running(), 0U);
  bench.remove(id);
  EXPECT_EQ(bench.pool.manager.available_blocks(), 8U);
  EXPECT_EQ(bench.pool.manager.cached_blocks(), 2U) << "8 of 8 computed tokens are in full blocks";
}

TEST(Decode, OneNewTokenNeedsNoStep) {
  Bench bench(8);
  const SequenceId id = bench.must_reserve(prompt(6), 1);
  bench.start(id, 7);
  EXPECT_EQ(bench.state(id), SequenceState::done);
  EXPECT_TRUE(bench.plan().seq.empty());
}

TEST(Decode, AWhollyCachedPromptNeedsNoTransfer) {
  Bench bench(8);
  const SequenceId first = bench.must_reserve(prompt(8), 2);
  bench.start(first, 7);
  bench.remove(first);
  const SequenceId again = bench.must_reserve(prompt(8), 2);
  EXPECT_EQ(bench.scheduler.sequence(again).cached_tokens, 8U);
  EXPECT_EQ(bench.blocks(again).size(), 3U);
  bench.start(again, 9);
  EXPECT_EQ(bench.step().positions, Tokens{8});
}

TEST(Decode, OutputBlocksArePublishedUnderTheChainOfPromptAndOutput) {
  Bench bench(8);
  const SequenceId id = bench.must_reserve(prompt(4), 6);
  bench.start(id, 1);
  bench.run_until_idle();
  Tokens all = prompt(4);
  const Tokens outputs = bench.outputs(id);
  all.insert(all.end(), outputs.begin(), outputs.end());
  bench.remove(id);
  const SequenceId next = bench.add(all, 0);
  bench.step();
  EXPECT_EQ(bench.scheduler.sequence(next).cached_tokens, 8U) << "the next turn finds what was generated";
}

TEST(Decode, TheTableGrowsInPlace) {
  Bench bench(64);
  const SequenceId id = bench.must_reserve(prompt(4), 200);
  bench.start(id, 1);
  for (int i = 0; i < 150; ++i) {
    const StepPlan plan = bench.step();
    ASSERT_EQ(plan.seq, std::vector<SequenceId>{id});
    ASSERT_EQ(table_row(plan, 0), bench.blocks(id));
  }
}

TEST(Decode, APlanCanBeReadAfterTheTableGrew) {
  Bench bench(64);
  const SequenceId id = bench.must_reserve(prompt(60), 100);
  bench.start(id, 1);
  const StepPlan plan = bench.plan();
  const Ids before = table_row(plan, 0);
  bench.advance(plan);
  for (int i = 0; i < 20; ++i) {
    bench.step();
  }
  EXPECT_EQ(table_row(plan, 0), before) << "the wider table is another buffer";
}

TEST(Decode, ReservationsAreLimitedBySeatsAndBlocks) {
  Bench bench(8, {.max_num_seqs = 2});
  EXPECT_TRUE(bench.reserve(prompt(4), 2));
  EXPECT_FALSE(bench.reserve(prompt(24, 500), 2)) << "needs seven, six are left";
  EXPECT_TRUE(bench.reserve(prompt(20, 500), 2));
  EXPECT_FALSE(bench.reserve(prompt(1, 900), 2)) << "no seat";
  EXPECT_EQ(bench.scheduler.reserved(), 2U);
}

TEST(Decode, AnAbortedPlanCountsForNothing) {
  Bench bench(8);
  const SequenceId id = bench.must_reserve(prompt(4), 8);
  bench.start(id, 1);
  const StepPlan first = bench.plan();
  bench.scheduler.abort_plan(first);
  bench.check();
  const StepPlan second = bench.plan();
  EXPECT_EQ(first.token_ids, second.token_ids);
  EXPECT_EQ(first.slots, second.slots);
  bench.advance(second);
  EXPECT_EQ(bench.outputs(id).size(), 2U);
}

TEST(Decode, RemovalDuringAStepWaitsForItsEnd) {
  Bench bench(8);
  const SequenceId first = bench.must_reserve(prompt(4), 8);
  const SequenceId second = bench.must_reserve(prompt(4, 500), 8);
  bench.start(first, 1);
  bench.start(second, 2);
  const StepPlan plan = bench.plan();
  bench.remove(first);
  EXPECT_EQ(bench.pool.manager.held_blocks(), 4U) << "the step may still write";
  expect_error("there is no sequence 1", [&] { bench.scheduler.remove(first); });
  bench.advance(plan);
  EXPECT_EQ(bench.pool.manager.held_blocks(), 2U);
  EXPECT_EQ(bench.outputs(second).size(), 2U);
  const StepPlan next = bench.plan();
  EXPECT_EQ(next.seq, std::vector<SequenceId>{second});
  bench.remove(second);
  bench.scheduler.abort_plan(next);
  EXPECT_EQ(bench.pool.manager.held_blocks(), 0U);
}

TEST(Decode, StartingDuringAStepDoesNotTouchItsTable) {
  Bench bench(16);
  const SequenceId prefill = bench.add(prompt(8), 4);
  const StepPlan plan = bench.plan();
  const Ids row = table_row(plan, 0);
  const SequenceId remote = bench.must_reserve(prompt(4, 500), 4);
  bench.start(remote, 1);
  EXPECT_EQ(table_row(plan, 0), row);
  bench.advance(plan);
  const StepPlan next = bench.plan();
  EXPECT_EQ(std::set<SequenceId>(next.seq.begin(), next.seq.end()), (std::set<SequenceId>{prefill, remote}));
}

TEST(Decode, QuarantinedBlocksAreNotTheSequencesToGiveBack) {
  Bench bench(8);
  const SequenceId id = bench.must_reserve(prompt(8), 4);
  const Ids blocks = bench.blocks(id);
  const Ids writable(blocks.begin(), blocks.begin() + 2);
  bench.pool.manager.quarantine(writable);
  expect_error("went to quarantine", [&] { bench.scheduler.start(id, 1); });
  bench.remove(id);
  bench.pool.expect_counts(6, 0, 0, 2);
  bench.pool.manager.unquarantine(writable);
  bench.pool.expect_counts(8, 0, 0);
}

TEST(Decode, AQuarantineThatEndsBeforeRemoveIsNoticedToo) {
  Bench bench(4);
  const SequenceId id = bench.must_reserve(prompt(8), 4);
  const Ids blocks = bench.blocks(id);
  bench.pool.manager.quarantine(blocks);
  bench.pool.manager.unquarantine(blocks);
  const Ids others = bench.pool.allocate(4);
  bench.remove(id);
  bench.pool.expect_counts(0, 0, 4);
  bench.pool.manager.release(others);
}

TEST(Decode, RulesAreNamedAndABrokenOneChangesNothing) {
  Bench bench(8, {.max_num_seqs = 2});
  const SequenceId id = bench.must_reserve(prompt(4), 8);
  const Hashes hashes = chain(1, 1);
  const Tokens tokens = prompt(4);
  expect_error("not reserved", [&] {
    const SequenceId waiting = bench.add(prompt(4, 700), 1);
    bench.scheduler.start(waiting, 1);
  });
  bench.remove(2);
  expect_error("not negative", [&] { bench.scheduler.start(id, -1); });
  expect_error("no sequence 99", [&] { bench.scheduler.start(99, 1); });
  expect_error("can't be scheduled", [&] { bench.scheduler.add({}); });
  expect_error("1 full blocks, not 0", [&] { bench.scheduler.add({.tokens = tokens, .hashes = {}, .root = {}}); });
  expect_error("at least one new token",
               [&] { bench.scheduler.reserve({.tokens = tokens, .hashes = hashes, .root = {}, .max_new_tokens = 0}); });
  expect_error("max_new_tokens",
               [&] { bench.scheduler.add({.tokens = tokens, .hashes = hashes, .root = {}, .max_new_tokens = -1}); });
  expect_error("needs 9 blocks at its end; the pool has 8",
               [&] { bench.scheduler.add({.tokens = tokens, .hashes = hashes, .root = {}, .max_new_tokens = 30}); });
  bench.start(id, 1);
  const StepPlan plan = bench.plan();
  expect_error("must be advanced or aborted", [&] { bench.scheduler.plan(0); });
  expect_error("needs 1 sampled tokens, not 2", [&] { bench.scheduler.advance(plan, Tokens{1, 2}); });
  expect_error("not negative", [&] { bench.scheduler.advance(plan, Tokens{-1}); });
  bench.advance(plan);
  expect_error("only the outstanding plan", [&] { bench.scheduler.advance(plan, Tokens{1}); });
  expect_error("only the outstanding plan", [&] { bench.scheduler.abort_plan(plan); });
  EXPECT_EQ(bench.outputs(id).size(), 2U);
}

TEST(Decode, APlanBelongsToItsScheduler) {
  Bench one(8);
  Bench other(8);
  one.add(prompt(4), 4);
  other.add(prompt(4), 4);
  StepPlan plan = one.plan();
  const StepPlan foreign = other.plan();
  expect_error("only the outstanding plan", [&] { one.scheduler.advance(foreign, Tokens{1}); });
  expect_error("only the outstanding plan", [&] { one.scheduler.abort_plan(foreign); });
  plan.sample[0] = 0;
  one.advance(plan);
  EXPECT_EQ(one.outputs(1).size(), 1U) << "what a caller writes into a plan changes nothing";
  other.advance(foreign);
}

TEST(Decode, ConfigIsChecked) {
  BlockPool pool(4);
  const auto make = [&](const SchedulerConfig& config) { const StepScheduler scheduler(pool.manager, config); };
  expect_error("max_num_seqs is 0", [&] { make({.max_num_seqs = 0}); });
  expect_error("max_batched_tokens is 3", [&] { make({.max_num_seqs = 4, .max_batched_tokens = 3}); });
  expect_error("max_chunk_tokens is 0", [&] { make({.max_chunk_tokens = 0}); });
  expect_error("policy is \"random\"", [&] { make({.policy = "random"}); });
}

}  // namespace
}  // namespace twinpool::test
