// SPDX-License-Identifier: Apache-2.0
#include <random>

#include "tests/scheduler_fixture.h"

namespace twinpool::test {
namespace {

SequenceId decoding(Bench& bench, std::size_t prompt_tokens, std::int64_t max_new_tokens, std::int32_t first = 100) {
  const SequenceId id = bench.must_reserve(prompt(prompt_tokens, first), max_new_tokens);
  bench.start(id, 7);
  return id;
}

StepPlan follow(Bench& bench, const StepPlan& plan) {
  StepPlan ahead = bench.scheduler.plan_ahead(plan);
  bench.check();
  return ahead;
}

TEST(Ahead, IsTheNextTokenOfEachSequence) {
  Bench bench(16);
  const SequenceId one = decoding(bench, 5, 4);
  const SequenceId two = decoding(bench, 9, 4, 500);
  const StepPlan plan = bench.plan();
  const StepPlan ahead = follow(bench, plan);
  EXPECT_EQ(ahead.seq, (std::vector<SequenceId>{one, two}));
  EXPECT_EQ(ahead.follows, (Tokens{0, 1}));
  EXPECT_EQ(ahead.positions, (Tokens{6, 10}));
  EXPECT_EQ(ahead.context, (Tokens{7, 11}));
  EXPECT_EQ(ahead.slots, (std::vector<std::int64_t>{4 * bench.blocks(one)[1] + 2, 4 * bench.blocks(two)[2] + 2}));
  EXPECT_EQ(table_row(ahead, 0), bench.blocks(one));
  EXPECT_EQ(table_row(ahead, 1), bench.blocks(two));
  EXPECT_EQ(ahead.decodes, 2U);
  bench.advance(plan);
  EXPECT_THROW(bench.scheduler.plan(0), CoreError) << "what follows is the outstanding plan now";
  bench.advance(ahead);
  EXPECT_EQ(bench.outputs(one), (Tokens{7, 1006, 1007}));
  const StepPlan last = bench.plan();
  EXPECT_EQ(last.positions, (Tokens{7, 11}));
  EXPECT_TRUE(follow(bench, last).seq.empty()) << "the last tokens come with it";
  bench.advance(last);
}

TEST(Ahead, TakesABlockThatTheNextTokenNeeds) {
  Bench bench(8);
  const SequenceId id = decoding(bench, 6, 8);
  bench.step();
  const StepPlan plan = bench.plan();  // position 7, the last of the second block
  const StepPlan ahead = follow(bench, plan);
  ASSERT_EQ(bench.blocks(id).size(), 3U);
  EXPECT_EQ(ahead.slots.at(0), 4 * bench.blocks(id)[2]);
  bench.advance(plan);
  const StepPlan third = follow(bench, ahead);
  EXPECT_EQ(third.slots.at(0), 4 * bench.blocks(id)[2] + 1);
  bench.advance(ahead);
  bench.advance(third);
  EXPECT_EQ(bench.scheduler.sequence(id).committed, 2U);
}

TEST(Ahead, IsEmptyWithoutABlock) {
  Bench bench(5);
  const SequenceId one = decoding(bench, 6, 12);
  for (int i = 0; i < 5; ++i) {
    bench.step();
  }
  const SequenceId other = bench.must_reserve(prompt(2, 900), 2);
  const StepPlan plan = bench.plan();  // position 11 of three blocks; the others are taken
  EXPECT_EQ(plan.positions, Tokens{11});
  EXPECT_TRUE(follow(bench, plan).seq.empty());
  bench.remove(other);
  EXPECT_EQ(follow(bench, plan).positions, Tokens{12}) << "asking again is allowed where nothing was given";
  bench.scheduler.abort_plan(plan);
  bench.check();
  EXPECT_EQ(bench.blocks(one).size(), 4U);
}

TEST(Ahead, LeavesOutWhoEndsByLength) {
  Bench bench(16);
  const SequenceId one = decoding(bench, 5, 2);
  const SequenceId two = decoding(bench, 5, 6, 500);
  const StepPlan plan = bench.plan();
  const StepPlan ahead = follow(bench, plan);
  EXPECT_EQ(ahead.seq, std::vector<SequenceId>{two});
  EXPECT_EQ(ahead.follows, Tokens{1});
  EXPECT_EQ(table_row(ahead, 0), bench.blocks(two));
  bench.advance(plan);
  EXPECT_EQ(bench.state(one), SequenceState::done);
  bench.remove(one);
  EXPECT_EQ(table_row(ahead, 0), bench.blocks(two)) << "rows have moved, those of the plan have not";
  bench.advance(ahead);
  EXPECT_EQ(bench.outputs(two).size(), 3U);
}

TEST(Ahead, WhoEndsMeanwhileKeepsItsBlocksUntilItIsOver) {
  Bench bench(16);
  const SequenceId one = decoding(bench, 5, 9);
  const SequenceId two = decoding(bench, 5, 9, 500);
  const StepPlan plan = bench.plan();
  const StepPlan ahead = follow(bench, plan);
  const std::size_t held = bench.pool.manager.held_blocks();
  bench.advance(plan);
  bench.remove(one);
  EXPECT_THROW(bench.outputs(one), CoreError);
  EXPECT_EQ(bench.pool.manager.held_blocks(), held);
  EXPECT_EQ(follow(bench, ahead).seq, std::vector<SequenceId>{two});
  bench.advance(ahead);
  EXPECT_LT(bench.pool.manager.held_blocks(), held);
  EXPECT_EQ(bench.outputs(two).size(), 3U);
}

TEST(Ahead, WhoEndsBeforeBothIsGoneAfterBoth) {
  Bench bench(16);
  const SequenceId one = decoding(bench, 6, 9);
  const StepPlan plan = bench.plan();
  const StepPlan ahead = follow(bench, plan);
  bench.remove(one);
  bench.advance(plan);
  EXPECT_EQ(bench.scheduler.running(), 1U);
  bench.advance(ahead);
  EXPECT_EQ(bench.scheduler.running(), 0U);
  EXPECT_EQ(bench.pool.manager.available_blocks(), 16U);
}

TEST(Ahead, NothingFollowsWhereSomebodyElseIsToBeServed) {
  Bench bench(32);
  decoding(bench, 5, 9);
  StepPlan plan = bench.plan();
  const SequenceId waiting = bench.add(prompt(6, 900), 3);
  EXPECT_TRUE(follow(bench, plan).seq.empty()) << "one waits";
  bench.advance(plan);
  plan = bench.plan();
  EXPECT_EQ(plan.seq.size(), 2U);
  EXPECT_TRUE(follow(bench, plan).seq.empty()) << "a prompt is computed";
  bench.advance(plan);
  bench.remove(waiting);
  plan = bench.plan();
  decoding(bench, 5, 9, 700);
  EXPECT_TRUE(follow(bench, plan).seq.empty()) << "one has just started";
  bench.advance(plan);
  plan = bench.plan();
  EXPECT_EQ(follow(bench, plan).seq.size(), 2U);
  bench.advance(plan);
}

TEST(Ahead, IsAbortedWithThePlanThatItFollows) {
  Bench bench(16);
  const SequenceId one = decoding(bench, 5, 9);
  const SequenceId two = decoding(bench, 5, 9, 500);
  const StepPlan plan = bench.plan();
  const StepPlan ahead = follow(bench, plan);
  EXPECT_THROW(bench.scheduler.plan_ahead(plan), CoreError);
  EXPECT_THROW(bench.scheduler.plan_ahead(ahead), CoreError);
  bench.remove(two);
  bench.scheduler.abort_plan(plan);
  bench.check();
  EXPECT_THROW(bench.scheduler.advance(ahead, Tokens{1, 2}), CoreError);
  EXPECT_EQ(bench.outputs(one), Tokens{7});
  EXPECT_EQ(bench.step().seq, std::vector<SequenceId>{one});
}

TEST(Ahead, AnAbortedOneIsPlannedAgain) {
  Bench bench(16);
  const SequenceId one = decoding(bench, 5, 9);
  const StepPlan plan = bench.plan();
  const StepPlan ahead = follow(bench, plan);
  bench.advance(plan);
  bench.scheduler.abort_plan(ahead);
  bench.check();
  EXPECT_EQ(bench.step().positions, ahead.positions);
  EXPECT_EQ(bench.outputs(one).size(), 3U);
}

/// Sequences come and end at random, and some plans are followed: each one's tokens follow each other, and nothing is
/// lost.
TEST(Ahead, NoTokenIsSkippedOrDrawnTwice) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    Bench bench(24);
    std::map<SequenceId, std::int32_t> live;
    std::optional<StepPlan> next;
    int followed = 0;
    for (int turn = 0; turn < 120; ++turn) {
      if (!next && live.size() < 4 && turn < 80) {
        const std::int32_t count = 1 + turn % 9;
        if (const auto id = bench.reserve(prompt(static_cast<std::size_t>(count), 100 * turn), 2 + turn % 7)) {
          bench.start(*id, 7);
          live.emplace(*id, count);
        }
      }
      const StepPlan plan = next ? std::move(*next) : bench.plan();
      next.reset();
      if (plan.seq.empty()) {
        continue;
      }
      if (random() % 4 != 0) {
        if (StepPlan found = follow(bench, plan); !found.seq.empty()) {
          next = std::move(found);
          ++followed;
        }
      }
      bench.advance(plan);
      std::erase_if(live, [&](const auto& entry) {
        const auto [id, count] = entry;
        const Tokens outputs = bench.outputs(id);
        for (std::size_t i = 1; i < outputs.size(); ++i) {
          EXPECT_EQ(outputs[i], 1000 * id + count + static_cast<std::int32_t>(i));
        }
        if (bench.state(id) != SequenceState::done && random() % 5 != 0) {
          return false;
        }
        bench.remove(id);
        return true;
      });
    }
    ASSERT_FALSE(next) << "a plan that follows is left";
    ASSERT_TRUE(live.empty());
    EXPECT_GT(followed, 10);
    EXPECT_EQ(bench.pool.manager.available_blocks(), 24U);
  }
}

}  // namespace
}  // namespace twinpool::test
