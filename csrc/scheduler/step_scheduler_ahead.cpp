// SPDX-License-Identifier: Apache-2.0
// One step further than the outstanding plan: what a device can begin with before the host has seen the tokens.
// Sequences that turn out to have ended meanwhile keep their blocks until the step that was begun with them is over.
#include <algorithm>

#include "core/error.h"
#include "scheduler/step_scheduler.h"

namespace twinpool {

StepPlan StepScheduler::plan_ahead(const StepPlan& plan) {
  require(outstanding_ != 0 && plan.owner == this && plan.step == outstanding_,
          "only the outstanding plan can be followed");
  require(next_ == 0, "the outstanding plan is followed already");
  StepPlan ahead;
  ahead.owner = this;
  ahead.table = table_.storage();
  if (!can_follow()) {
    return ahead;
  }
  for (Sequence* sequence : in_flight_) {
    if (has_more(*sequence) && sequence->computed + 1 >= sequence->blocks.size() * block_tokens_ && !grow(*sequence)) {
      return ahead;
    }
  }
  for (std::size_t row = 0; row < in_flight_.size(); ++row) {
    if (has_more(*in_flight_[row])) {
      emit_ahead(ahead, *in_flight_[row], row);
    }
  }
  if (ahead.seq.empty()) {
    return ahead;
  }
  for (const std::int32_t row : ahead.follows) {
    Sequence* sequence = in_flight_[static_cast<std::size_t>(row)];
    sequence->ahead = true;
    ahead_.push_back(sequence);
    ahead.table_width = std::max(ahead.table_width, sequence->blocks.size());
  }
  // Rows of its own: the scheduler's move when a sequence ends.
  RowTable::Storage rows(ahead.seq.size() * ahead.table_width, no_block);
  for (std::size_t row = 0; row < ahead_.size(); ++row) {
    std::ranges::copy(ahead_[row]->blocks, rows.begin() + static_cast<std::ptrdiff_t>(row * ahead.table_width));
  }
  ahead.table = std::make_shared<const RowTable::Storage>(std::move(rows));
  ahead.table_stride = ahead.table_width;
  ahead.decodes = ahead.seq.size();
  ahead.step = next_ = ++steps_;
  return ahead;
}

/// Whether the outstanding plan does nothing but decode, and so would the next one.
bool StepScheduler::can_follow() const noexcept {
  return waiting_.empty() && ready_.empty() && table_.rows() == table_.decodes() &&
         std::ranges::all_of(in_flight_, [](const Sequence* sequence) {
           return sequence->state != SequenceState::prefilling && sequence->query == 1 &&
                  sequence->copy_source == no_block && sequence->restorable == 0;
         });
}

/// Of one that is planned: whether a token comes after the one that its plan draws, as far as is known.
bool StepScheduler::has_more(const Sequence& sequence) noexcept {
  return sequence.state == SequenceState::decoding && !sequence.removed &&
         sequence.outputs() + 1 < sequence.max_new_tokens;
}

void StepScheduler::emit_ahead(StepPlan& plan, Sequence& sequence, std::size_t row) const {
  const std::size_t position = sequence.computed + 1;
  const auto block = static_cast<std::int64_t>(sequence.blocks[position / block_tokens_]);
  plan.seq.push_back(sequence.id);
  plan.follows.push_back(static_cast<std::int32_t>(row));
  plan.context.push_back(static_cast<std::int32_t>(position + 1));
  plan.sample.push_back(1);
  plan.q_start.push_back(plan.q_start.back() + 1);
  plan.token_ids.push_back(0);  // drawn by the plan before
  plan.positions.push_back(static_cast<std::int32_t>(position));
  plan.slots.push_back(block * static_cast<std::int64_t>(block_tokens_) +
                       static_cast<std::int64_t>(position % block_tokens_));
}

/// The outstanding plan is over: the one that follows it is the outstanding one now.
void StepScheduler::promote_ahead() {
  in_flight_.clear();
  outstanding_ = next_;
  next_ = 0;
  in_flight_.swap(ahead_);
  for (Sequence* sequence : in_flight_) {
    sequence->ahead = false;
    sequence->planned = true;
    sequence->query = 1;
  }
}

void StepScheduler::forget_ahead() {
  for (Sequence* sequence : ahead_) {
    sequence->ahead = false;
  }
  ahead_.clear();
  next_ = 0;
}

}  // namespace twinpool
