// SPDX-License-Identifier: Apache-2.0
// The invariants of the step scheduler, each with the sentence that says how it was broken.
#include <algorithm>
#include <string>

#include "core/error.h"
#include "scheduler/step_scheduler.h"

namespace twinpool {

void StepScheduler::check() const {
  std::size_t waiting = 0;
  std::size_t preempted = 0;
  std::size_t reserved = 0;
  std::size_t rows = 0;
  std::size_t tokens = 0;
  std::size_t host = 0;
  for (const auto& [id, held] : sequences_) {
    const Sequence& sequence = *held;
    check_sequence(sequence);
    const bool waits = sequence.state == SequenceState::waiting;
    const bool prefills = sequence.state == SequenceState::prefilling;
    waiting += waits ? 1 : 0;
    preempted += sequence.preempted ? 1 : 0;
    reserved += sequence.state == SequenceState::reserved ? 1 + sequence.spare_seats : 0;
    rows += prefills || sequence.state == SequenceState::decoding ? 1 : 0;
    tokens += waits || prefills ? sequence.left() : 0;
    host += sequence.host.size();
  }
  require(waiting == waiting_.size(), "the waiting queue and the sequences differ");
  require(preempted == waiting_preempted_, "the preempted sequences are miscounted");
  require(reserved == reserved_, "the reserved seats are miscounted");
  require(rows == table_.rows(), "the table's rows and the running sequences differ");
  require(tokens == waiting_tokens_, "the waiting tokens are miscounted");
  require(host + host_.free() == host_.count(), "a block of the host pool is lost or taken twice");
  require(running() + reserved_ <= max_seqs_, "more sequences have a seat than there are");
  for (std::size_t row = 0; row < table_.rows(); ++row) {
    const SequenceState wanted = row < table_.decodes() ? SequenceState::decoding : SequenceState::prefilling;
    require(table_.at(row).state == wanted && table_.at(row).row == row, "a row of the table names the wrong sequence");
    const auto blocks = std::span(*table_.storage()).subspan(row * table_.stride(), table_.stride());
    const auto& own = table_.at(row).blocks;
    require(std::ranges::equal(blocks.first(own.size()), own), "a row of the table lists the wrong blocks");
    require(std::ranges::count(blocks.subspan(own.size()), no_block) ==
                static_cast<std::ptrdiff_t>(blocks.size() - own.size()),
            "a row of the table is not padded");
  }
  const auto planned = std::ranges::count_if(sequences_, [](const auto& entry) { return entry.second->planned; });
  require(outstanding_ != 0 || planned == 0, "a sequence is planned without a plan");
  const auto ahead = std::ranges::count_if(sequences_, [](const auto& entry) { return entry.second->ahead; });
  require(ahead == std::ssize(ahead_) && (next_ != 0 || ahead == 0), "the sequences of the plan ahead are miscounted");
  require(outstanding_ != 0 || next_ == 0, "a plan follows none");
}

void StepScheduler::check_sequence(const Sequence& sequence) const {
  const auto fail = [&](const char* what) { return name_of(sequence.id) + " " + what; };
  const std::size_t covered = sequence.blocks.size() * block_tokens_;
  const std::size_t tokens = sequence.tokens.size();
  require(sequence.computed <= covered, [&] { return fail("has computed more than its blocks hold"); });
  require(sequence.computed <= tokens, [&] { return fail("has computed more than its tokens"); });
  require(sequence.committed == sequence.computed / block_tokens_,
          [&] { return fail("has full blocks that are not committed"); });
  require(sequence.committed <= sequence.hashes.size(), [&] { return fail("has committed blocks without a hash"); });
  require(sequence.outputs() <= std::max<std::size_t>(sequence.max_new_tokens, 1),
          [&] { return fail("ran past its limit"); });
  require(sequence.host.size() == blocks_for(sequence.restorable), [&] { return fail("has the wrong host blocks"); });
  require(sequence.restorable == 0 || sequence.restorable > sequence.computed,
          [&] { return fail("keeps in host memory what it has"); });
  require(!sequence.removed || sequence.planned, [&] { return fail("was removed and is still here"); });
  for (const BlockId block : sequence.blocks) {
    const BlockState state = blocks_.state(block);
    const bool allowed = state == BlockState::held || sequence.state == SequenceState::reserved;
    require(allowed, [&] { return fail("lists a block that is not held"); });
  }
  switch (sequence.state) {
  case SequenceState::waiting:
    require(sequence.blocks.empty() && sequence.computed == 0, [&] { return fail("waits with blocks"); });
    break;
  case SequenceState::reserved:
    require(covered > sequence.prompt_tokens, [&] { return fail("is reserved without head-room"); });
    break;
  case SequenceState::prefilling:
    require(covered >= tokens && sequence.left() >= 1, [&] { return fail("prefills without blocks or work"); });
    break;
  case SequenceState::ready:
  case SequenceState::decoding:
    require((sequence.left() == 1 || sequence.removed) && sequence.outputs() >= 1,
            [&] { return fail("decodes with a backlog"); });
    break;
  case SequenceState::done:
    require(sequence.outputs() >= 1, [&] { return fail("is done without a token"); });
    break;
  }
}

}  // namespace twinpool
