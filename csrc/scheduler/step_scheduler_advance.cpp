// SPDX-License-Identifier: Apache-2.0
// What a step that ran, or did not, means for its sequences.
#include <algorithm>
#include <string>

#include "core/error.h"
#include "hash/block_hash.h"
#include "scheduler/step_scheduler.h"

namespace twinpool {

void StepScheduler::advance(const StepPlan& plan, std::span<const std::int32_t> sampled) {
  if (plan.seq.empty()) {
    return;
  }
  require(plan.owner == this && plan.step == outstanding_, "only the outstanding plan can be advanced");
  // The plan's arrays are the caller's to scribble on; what counts is the scheduler's own record.
  require(sampled.size() == in_flight_.size(), [&] {
    return "advance needs " + std::to_string(in_flight_.size()) + " sampled tokens, not " +
           std::to_string(sampled.size());
  });
  for (std::size_t i = 0; i < sampled.size(); ++i) {
    require(!in_flight_[i]->samples() || sampled[i] >= 0, "a token is not negative");
  }
  outstanding_ = 0;
  swapped_out_.clear();
  for (std::size_t i = 0; i < sampled.size(); ++i) {
    Sequence& sequence = *in_flight_[i];
    sequence.planned = false;
    // One that was removed before the plan before this one was over has no token that this one could have computed.
    if (sequence.left() > 0) {
      step_done(sequence, sequence.samples() && !sequence.removed, sampled[i]);
    }
    if (sequence.removed && !sequence.ahead) {
      end(sequence);
    }
  }
  promote_ahead();
}

void StepScheduler::abort_plan(const StepPlan& plan) {
  if (plan.seq.empty()) {
    return;
  }
  require(plan.owner == this && plan.step == outstanding_, "only the outstanding plan can be aborted");
  outstanding_ = 0;
  forget_ahead();
  forget_swapped_out();
  for (Sequence* sequence : in_flight_) {
    sequence->planned = false;
    if (sequence->removed) {
      end(*sequence);
    }
  }
}

void StepScheduler::step_done(Sequence& sequence, bool sampled, std::int32_t token) {
  const bool prefilling = sequence.state == SequenceState::prefilling;
  if (prefilling) {
    waiting_tokens_ -= sequence.query;
  }
  if (sequence.copy_source != no_block) {
    finish_copy(sequence);
  }
  if (sequence.restorable > 0) {
    restored(sequence);
  }
  sequence.computed += sequence.query;
  if (sequence.computed - sequence.committed * block_tokens_ >= block_tokens_) {
    commit_full_blocks(sequence);
  }
  if (!sampled) {
    return;
  }
  if (sequence.outputs() + 1 >= sequence.max_new_tokens) {
    leave_table(sequence);
    sequence.state = SequenceState::done;
  } else if (prefilling) {
    table_.promote(sequence);
    sequence.state = SequenceState::decoding;
  }
  sequence.tokens.push_back(token);
}

void StepScheduler::commit_full_blocks(Sequence& sequence) {
  const std::size_t first = sequence.committed;
  const std::size_t full = sequence.computed / block_tokens_;
  auto& hashes = sequence.hashes;
  if (hashes.size() < full) {
    const Hash128 last = hashes.empty() ? sequence.root : hashes.back();
    const std::size_t known = hashes.size() * block_tokens_;
    hash_blocks(last, std::span(sequence.tokens).subspan(known, full * block_tokens_ - known), block_tokens_, hashes);
  }
  scratch_.clear();
  blocks_.commit(std::span(sequence.blocks).subspan(first, full - first),
                 std::span(hashes).subspan(first, full - first), first == 0 ? sequence.root : hashes[first - 1],
                 scratch_);
  const bool has_row = sequence.state == SequenceState::prefilling || sequence.state == SequenceState::decoding;
  for (std::size_t i = first; i < full; ++i) {
    const BlockId published = scratch_[i - first];
    const BlockId own = sequence.blocks[i];
    if (published == own) {
      continue;
    }
    // Somebody published the same content before: share that block and give this one back.
    blocks_.reference({&published, 1});
    blocks_.release({&own, 1});
    sequence.blocks[i] = published;
    if (has_row) {
      table_.replace(sequence, i);
    }
  }
  sequence.committed = full;
}

void StepScheduler::finish_copy(Sequence& sequence) {
  if (sequence.copy_source != no_block) {
    blocks_.release({&sequence.copy_source, 1});
    sequence.copy_source = no_block;
    sequence.copy_target = no_block;
  }
}

void StepScheduler::leave_table(Sequence& sequence) {
  if (sequence.state == SequenceState::prefilling) {
    waiting_tokens_ -= sequence.left();
  }
  table_.remove(sequence);
}

}  // namespace twinpool
