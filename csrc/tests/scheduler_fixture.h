// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "scheduler/step_scheduler.h"
#include "tests/block_fixture.h"

namespace twinpool::test {

using Tokens = std::vector<std::int32_t>;

/// ``count`` tokens that start at ``first``.
inline Tokens prompt(std::size_t count, std::int32_t first = 100) {
  Tokens tokens(count);
  for (std::size_t i = 0; i < count; ++i) {
    tokens[i] = first + static_cast<std::int32_t>(i);
  }
  return tokens;
}

/// A scheduler with blocks of four tokens; both sets of invariants are checked after every call that goes through it.
class Bench {
 public:
  explicit Bench(std::size_t blocks, SchedulerConfig config = {})
      : pool(blocks),
        scheduler(pool.manager, config) {}
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() { check(); }

  SequenceId add(const Tokens& tokens, std::int64_t max_new_tokens, std::int64_t priority = 0, double arrival = 0,
                 bool use_cache = true) {
    const Hashes hashes = hashes_of(tokens);
    NewSequence wanted = request(tokens, hashes, max_new_tokens, priority, arrival);
    wanted.use_cache = use_cache;
    const SequenceId id = scheduler.add(wanted);
    check();
    return id;
  }
  std::optional<SequenceId> reserve(const Tokens& tokens, std::int64_t max_new_tokens, std::int64_t priority = 0,
                                    double arrival = 0, std::int64_t seats = 1) {
    const Hashes hashes = hashes_of(tokens);
    NewSequence wanted = request(tokens, hashes, max_new_tokens, priority, arrival);
    wanted.seats = seats;
    const auto id = scheduler.reserve(wanted);
    check();
    return id;
  }
  SequenceId must_reserve(const Tokens& tokens, std::int64_t max_new_tokens, std::int64_t priority = 0,
                          double arrival = 0, std::int64_t seats = 1) {
    const auto id = reserve(tokens, max_new_tokens, priority, arrival, seats);
    EXPECT_TRUE(id.has_value());
    return id.value_or(-1);
  }
  void start(SequenceId id, std::int32_t token) {
    scheduler.start(id, token);
    check();
  }
  void remove(SequenceId id) {
    scheduler.remove(id);
    check();
  }
  StepPlan plan() {
    StepPlan plan = scheduler.plan(0);
    check();
    return plan;
  }
  /// Plans a step and runs it; sequence ``id`` samples 1000 * id plus the length of its context.
  StepPlan step() {
    StepPlan plan = this->plan();
    advance(plan);
    return plan;
  }
  void advance(const StepPlan& plan) {
    Tokens sampled;
    for (std::size_t i = 0; i < plan.seq.size(); ++i) {
      sampled.push_back(static_cast<std::int32_t>(1000 * plan.seq[i]) + plan.context[i]);
    }
    scheduler.advance(plan, sampled);
    check();
  }
  void run_until_idle(int steps_max = 1000) {
    while (!step().seq.empty()) {
      ASSERT_GT(--steps_max, 0) << "never idle";
    }
  }
  [[nodiscard]] Tokens outputs(SequenceId id) const {
    const Sequence& sequence = scheduler.sequence(id);
    return {sequence.tokens.begin() + static_cast<std::ptrdiff_t>(sequence.prompt_tokens), sequence.tokens.end()};
  }
  [[nodiscard]] const Ids& blocks(SequenceId id) const { return scheduler.sequence(id).blocks; }
  [[nodiscard]] SequenceState state(SequenceId id) const { return scheduler.sequence(id).state; }
  void check() const {
    EXPECT_NO_THROW(pool.manager.check());
    EXPECT_NO_THROW(scheduler.check());
  }

  BlockPool pool;
  StepScheduler scheduler;

 private:
  static Hashes hashes_of(const Tokens& tokens) {
    Hashes hashes;
    hash_blocks({}, tokens, test_block_tokens, hashes);
    return hashes;
  }
  static NewSequence request(const Tokens& tokens, const Hashes& hashes, std::int64_t max_new_tokens,
                             std::int64_t priority, double arrival) {
    return {.tokens = tokens,
            .hashes = hashes,
            .root = {},
            .max_new_tokens = max_new_tokens,
            .priority = priority,
            .arrival = arrival};
  }
};

/// Row ``index`` of a plan's block table, without its padding.
inline Ids table_row(const StepPlan& plan, std::size_t index) {
  Ids row;
  for (std::size_t i = 0; i < plan.table_width; ++i) {
    const BlockId block = (*plan.table)[index * plan.table_stride + i];
    if (block != no_block) {
      row.push_back(block);
    }
  }
  return row;
}

}  // namespace twinpool::test
