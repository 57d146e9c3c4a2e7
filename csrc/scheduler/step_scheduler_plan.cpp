// SPDX-License-Identifier: Apache-2.0
// One step's plan: decodes first, each with the block that its token needs; what is left of the budget goes to
// prefill chunks, best first, of those that run already and of those that still wait.
#include <algorithm>
#include <tuple>

#include "core/error.h"
#include "scheduler/step_scheduler.h"

namespace twinpool {

StepPlan StepScheduler::plan(double /*now*/) {
  require(outstanding_ == 0, "the last plan must be advanced or aborted before the next one");
  StepPlan plan;
  plan.owner = this;
  seat_ready();
  grow_decodes(plan);
  plan_decodes(plan);
  plan_prefills(plan);
  plan.table = table_.storage();
  plan.table_stride = table_.stride();
  if (!plan.seq.empty()) {
    plan.step = outstanding_ = ++steps_;
  }
  return plan;
}

void StepScheduler::seat_ready() {
  for (Sequence* sequence : ready_) {
    sequence->state = SequenceState::decoding;
    table_.add_decode(*sequence);
  }
  ready_.clear();
}

void StepScheduler::grow_decodes(StepPlan& plan) {
  for (std::size_t row = 0; row < table_.decodes();) {
    Sequence& sequence = table_.at(row);
    if (sequence.computed < sequence.blocks.size() * block_tokens_ || grow(sequence)) {
      ++row;
      continue;
    }
    Sequence& loser = victim();
    plan.preempted.push_back(loser.id);
    preempt(loser);
    // Rows have moved; those that were looked at already pass at once.
    row = 0;
  }
}

bool StepScheduler::grow(Sequence& sequence) {
  if (!blocks_.allocate(1, sequence.blocks)) {
    return false;
  }
  table_.append(sequence);
  return true;
}

/// Lowest priority; among equals the one with the least work to lose; then the latest. There is at least one row.
Sequence& StepScheduler::victim() const {
  const auto keep = [](const Sequence& sequence) {
    return std::tuple(sequence.rank, sequence.computed, -sequence.arrival, -sequence.id);
  };
  std::size_t loser = 0;
  for (std::size_t row = 1; row < table_.rows(); ++row) {
    if (keep(table_.at(row)) < keep(table_.at(loser))) {
      loser = row;
    }
  }
  return table_.at(loser);
}

void StepScheduler::preempt(Sequence& sequence) {
  leave_table(sequence);
  release_blocks(sequence);
  sequence.preempted = true;
  enqueue(sequence);
}

void StepScheduler::plan_decodes(StepPlan& plan) {
  const std::size_t decodes = table_.decodes();
  plan.decodes = decodes;
  const std::size_t rows = table_.rows();
  plan.seq.reserve(rows);
  plan.context.reserve(rows);
  plan.sample.reserve(rows);
  plan.q_start.reserve(rows + 1);
  plan.token_ids.reserve(decodes);
  plan.positions.reserve(decodes);
  plan.slots.reserve(decodes);
  in_flight_.clear();
  for (std::size_t row = 0; row < decodes; ++row) {
    emit(plan, table_.at(row), 1);
  }
}

void StepScheduler::plan_prefills(StepPlan& plan) {
  std::size_t budget = max_batched_tokens_ - plan.decodes;
  // Whoever just lost its blocks would only be the next to take them from somebody.
  bool admitting = plan.preempted.empty();
  for (std::size_t row = plan.decodes; budget > 0;) {
    const bool has_row = row < table_.rows();
    if (admitting && !waiting_.empty() && has_seat() && (!has_row || goes_before(waiting_.front(), table_.at(row)))) {
      admitting = admit(row);
      if (!admitting) {
        continue;
      }
    } else if (!has_row) {
      break;
    }
    Sequence& sequence = table_.at(row++);
    const std::size_t query = chunk_of(sequence, budget);
    emit(plan, sequence, query);
    budget -= query;
  }
}

/// Gives the first waiting sequence its blocks, for all its tokens, and the row. False if the pool has no room for it.
bool StepScheduler::admit(std::size_t row) {
  Sequence& sequence = waiting_.front();
  const std::size_t tokens = sequence.tokens.size();
  // At least the last token is computed: its result is the next token.
  const std::size_t usable = std::min(sequence.hashes.size(), (tokens - 1) / block_tokens_);
  // Each decode that runs may want a block soon; without that much left, admission would end in preemption.
  const std::size_t spare = table_.decodes();
  const auto prefix =
      blocks_.acquire(std::span(sequence.hashes).first(usable), blocks_for(tokens), spare, sequence.blocks);
  if (!prefix) {
    return false;
  }
  dequeue(sequence);
  sequence.committed = *prefix;
  sequence.computed = *prefix * block_tokens_;
  if (!sequence.knows_cached) {
    sequence.cached_tokens = sequence.computed;
    sequence.knows_cached = true;
  }
  sequence.state = SequenceState::prefilling;
  waiting_tokens_ += sequence.left();
  table_.add_prefill(sequence, row);
  return true;
}

std::size_t StepScheduler::chunk_of(const Sequence& sequence, std::size_t budget) const noexcept {
  const std::size_t query = std::min({sequence.left(), max_chunk_tokens_, budget});
  if (query == sequence.left()) {
    return query;
  }
  // A chunk that ends with a full block can be offered to a reader whole.
  const std::size_t end = sequence.computed + query;
  const std::size_t aligned = end - end % block_tokens_;
  return aligned > sequence.computed ? aligned - sequence.computed : query;
}

void StepScheduler::emit(StepPlan& plan, Sequence& sequence, std::size_t query) {
  sequence.planned = true;
  sequence.query = query;
  in_flight_.push_back(&sequence);
  const std::size_t end = sequence.computed + query;
  plan.seq.push_back(sequence.id);
  plan.context.push_back(static_cast<std::int32_t>(end));
  plan.sample.push_back(sequence.samples() ? 1 : 0);
  plan.q_start.push_back(plan.q_start.back() + static_cast<std::int32_t>(query));
  plan.table_width = std::max(plan.table_width, sequence.blocks.size());
  if (sequence.copy_source != no_block) {
    plan.copies.push_back(sequence.copy_source);
    plan.copies.push_back(sequence.copy_target);
  }
  std::size_t index = sequence.committed;
  std::size_t offset = sequence.computed - index * block_tokens_;
  for (std::size_t position = sequence.computed; position < end; ++position) {
    plan.token_ids.push_back(sequence.tokens[position]);
    plan.positions.push_back(static_cast<std::int32_t>(position));
    plan.slots.push_back(static_cast<std::int64_t>(sequence.blocks[index]) * static_cast<std::int64_t>(block_tokens_) +
                         static_cast<std::int64_t>(offset));
    if (++offset == block_tokens_) {
      offset = 0;
      ++index;
    }
  }
}

}  // namespace twinpool
