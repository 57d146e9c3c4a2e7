// SPDX-License-Identifier: Apache-2.0
#include "scheduler/waiting_queue.h"

namespace twinpool {

void WaitingQueue::insert(Sequence& sequence) {
  sequence.waits_since = admissions_;
  sequence.overdue = false;
  sequence.older = newest_;
  sequence.newer = nullptr;
  (newest_ == nullptr ? oldest_ : newest_->newer) = &sequence;
  newest_ = &sequence;
  if (not_overdue_ == nullptr) {
    not_overdue_ = &sequence;
  }
  queue_.insert(&sequence);
}

void WaitingQueue::erase(Sequence& sequence) {
  queue_.erase(&sequence);
  if (not_overdue_ == &sequence) {
    not_overdue_ = sequence.newer;
  }
  (sequence.older == nullptr ? oldest_ : sequence.older->newer) = sequence.newer;
  (sequence.newer == nullptr ? newest_ : sequence.newer->older) = sequence.older;
  sequence.older = sequence.newer = nullptr;
}

void WaitingQueue::admitted(const Sequence& sequence) {
  // Those that are overdue go first anyway, so they overtake nobody who is not.
  if (sequence.overdue || max_overtaken_ == 0) {
    return;
  }
  ++admissions_;
  while (not_overdue_ != nullptr && due(*not_overdue_)) {
    Sequence& first = *not_overdue_;
    queue_.erase(&first);
    first.overdue = true;
    queue_.insert(&first);
    not_overdue_ = first.newer;
  }
}

}  // namespace twinpool
