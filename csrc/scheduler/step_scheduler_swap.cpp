// SPDX-License-Identifier: Apache-2.0
// Preemption to host memory: the KV of whoever loses its blocks is copied out by the plan that takes them, and back by
// the first plan that runs it again. What does not fit into the host pool is recomputed.
#include "scheduler/step_scheduler.h"

namespace twinpool {

void StepScheduler::swap_out(StepPlan& plan, Sequence& sequence) {
  if (sequence.restorable > 0) {
    return;  // the step that was to bring its KV back has not run: the host still has it
  }
  const std::size_t count = blocks_for(sequence.computed);
  if (count == 0 || count > host_.free()) {
    return;
  }
  host_.take(count, sequence.host);
  sequence.restorable = sequence.computed;
  for (std::size_t i = 0; i < count; ++i) {
    const BlockId block = sequence.blocks[i];
    // A fork's own copy of the partial block may not have been made yet.
    plan.swap_out.push_back(block == sequence.copy_target ? sequence.copy_source : block);
    plan.swap_out.push_back(sequence.host[i]);
  }
  swapped_out_.push_back(sequence.id);
}

void StepScheduler::swap_in(StepPlan& plan, const Sequence& sequence) const {
  for (std::size_t i = sequence.committed; i < sequence.host.size(); ++i) {
    plan.swap_in.push_back(sequence.host[i]);
    plan.swap_in.push_back(sequence.blocks[i]);
  }
}

/// The step has brought its KV back.
void StepScheduler::restored(Sequence& sequence) {
  sequence.computed = sequence.restorable;
  forget_host(sequence);
}

void StepScheduler::forget_host(Sequence& sequence) {
  host_.give_back(sequence.host);
  sequence.restorable = 0;
}

/// Whether the copies of the plan were made is not known, so they don't count.
void StepScheduler::forget_swapped_out() {
  for (const SequenceId id : swapped_out_) {
    const auto at = sequences_.find(id);
    if (at != sequences_.end()) {
      waiting_tokens_ += at->second->restorable;
      forget_host(*at->second);
    }
  }
  swapped_out_.clear();
}

}  // namespace twinpool
