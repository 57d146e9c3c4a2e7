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
  if (plan.seq.empty()) {
    // Such a plan need not come back, and so nobody would say whether its copies were made.
    plan.swap_out.clear();
    forget_swapped_out();
  } else {
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
    preempt(plan, loser);
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

/// Lowest priority; among equals the one with the least work to lose; then the latest. There is at least one that can
/// be preempted: the one that needs a block.
Sequence& StepScheduler::victim() const {
  const auto keep = [](const Sequence& sequence) {
    return std::tuple(!sequence.preemptible, sequence.rank, sequence.known(), -sequence.arrival, -sequence.id);
  };
  std::size_t loser = 0;
  for (std::size_t row = 1; row < table_.rows(); ++row) {
    if (keep(table_.at(row)) < keep(table_.at(loser))) {
      loser = row;
    }
  }
  return table_.at(loser);
}

void StepScheduler::preempt(StepPlan& plan, Sequence& sequence) {
  swap_out(plan, sequence);
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

/// Whoever prefills is passed by higher priorities, but not for ever.
bool StepScheduler::overtakes(const Sequence& waiting, const Sequence& row) const noexcept {
  return goes_before(waiting, row) && (waiting.overdue || !waiting_.due(row));
}

void StepScheduler::plan_prefills(StepPlan& plan) {
  std::size_t budget = max_batched_tokens_ - plan.decodes;
  // Whoever just lost its blocks would only be the next to take them from somebody.
  bool admitting = plan.preempted.empty();
  for (std::size_t row = plan.decodes; budget > 0;) {
    const bool has_row = row < table_.rows();
    if (admitting && !waiting_.empty() && has_seats(1) && (!has_row || overtakes(waiting_.front(), table_.at(row)))) {
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
  const std::size_t usable = sequence.cacheable(block_tokens_);
  // Each decode that runs may want a block soon; without that much left, admission would end in preemption.
  const std::size_t spare = table_.decodes();
  const auto prefix = blocks_.acquire(std::span(sequence.hashes).first(usable),
                                      blocks_at_start(sequence, blocks_for(tokens)), spare, sequence.blocks);
  if (!prefix) {
    return false;
  }
  dequeue(sequence);
  waiting_.admitted(sequence);
  sequence.cost = 0;  // who has begun is not overtaken by what would be done sooner
  sequence.committed = *prefix;
  sequence.computed = *prefix * block_tokens_;
  if (sequence.computed >= sequence.restorable) {
    forget_host(sequence);  // the cache still has all of it
  }
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
  const std::size_t end = sequence.known() + query;
  const std::size_t aligned = end - end % block_tokens_;
  return aligned > sequence.known() ? aligned - sequence.known() : query;
}

void StepScheduler::emit(StepPlan& plan, Sequence& sequence, std::size_t query) {
  sequence.planned = true;
  sequence.query = query;
  in_flight_.push_back(&sequence);
  const std::size_t end = sequence.known() + query;
  plan.seq.push_back(sequence.id);
  plan.context.push_back(static_cast<std::int32_t>(end));
  plan.sample.push_back(sequence.samples() ? 1 : 0);
  plan.q_start.push_back(plan.q_start.back() + static_cast<std::int32_t>(query));
  plan.table_width = std::max(plan.table_width, sequence.blocks.size());
  if (sequence.copy_source != no_block) {
    plan.copies.push_back(sequence.copy_source);
    plan.copies.push_back(sequence.copy_target);
  }
  if (sequence.restorable > 0) {
    swap_in(plan, sequence);
  }
  append_tokens(plan, sequence, query);
}

/// The query tokens with their positions and slots: a block at a time, so that the inner loops are plain runs.
void StepScheduler::append_tokens(StepPlan& plan, const Sequence& sequence, std::size_t query) const {
  std::size_t position = sequence.known();
  const auto from = sequence.tokens.begin() + static_cast<std::ptrdiff_t>(position);
  plan.token_ids.insert(plan.token_ids.end(), from, from + static_cast<std::ptrdiff_t>(query));
  std::size_t at = plan.positions.size();
  plan.positions.resize(at + query);
  plan.slots.resize(at + query);
  const std::size_t end = position + query;
  // No division for the usual case: all but restored sequences have committed what is before.
  std::size_t index = sequence.restorable > 0 ? position / block_tokens_ : sequence.committed;
  for (; position < end; ++index) {
    const std::size_t first = index * block_tokens_;
    const std::int64_t slot =
        static_cast<std::int64_t>(sequence.blocks[index]) * static_cast<std::int64_t>(block_tokens_);
    for (const std::size_t stop = std::min(end, first + block_tokens_); position < stop; ++position, ++at) {
      plan.positions[at] = static_cast<std::int32_t>(position);
      plan.slots[at] = slot + static_cast<std::int64_t>(position - first);
    }
  }
}

}  // namespace twinpool
