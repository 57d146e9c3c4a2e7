// SPDX-License-Identifier: Apache-2.0
// The life of a sequence between plans: add, reserve, start, fork, remove.
#include "scheduler/step_scheduler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "core/error.h"

namespace twinpool {

namespace {

/// So that a priority can be negated.
constexpr std::int64_t priority_limit = std::numeric_limits<std::int32_t>::max();

/// The first thing that a scheduler reads of its config.
std::size_t validated_seats(const SchedulerConfig& config) {
  config.validate();
  return static_cast<std::size_t>(config.max_num_seqs);
}

}  // namespace

StepScheduler::StepScheduler(BlockManager& blocks, const SchedulerConfig& config)
    : blocks_(blocks),
      block_tokens_(blocks.block_tokens()),
      max_seqs_(validated_seats(config)),
      max_batched_tokens_(static_cast<std::size_t>(config.max_batched_tokens)),
      max_chunk_tokens_(static_cast<std::size_t>(config.max_chunk_tokens)),
      by_priority_(config.policy == "priority"),
      by_cost_(config.policy == "shortest_uncached"),
      waiting_(static_cast<std::uint64_t>(config.max_overtaken)),
      table_(max_seqs_),
      host_(static_cast<std::size_t>(config.host_blocks)) {}

SequenceId StepScheduler::add(const NewSequence& request) {
  auto sequence = make(request);
  require(blocks_at_end(*sequence) <= blocks_.num_blocks(), [&] {
    return "the sequence needs " + std::to_string(blocks_at_end(*sequence)) + " blocks at its end; the pool has " +
           std::to_string(blocks_.num_blocks());
  });
  Sequence& kept = *sequence;
  const SequenceId id = keep(std::move(sequence));
  enqueue(kept);
  return id;
}

std::optional<SequenceId> StepScheduler::reserve(const NewSequence& request) {
  require(request.max_new_tokens >= 1, "a reserved sequence must be allowed at least one new token");
  require(request.seats >= 1 && request.seats <= length_limit, "a reservation takes at least one seat");
  const auto seats = static_cast<std::size_t>(request.seats);
  auto sequence = make(request);
  const std::size_t prompt_blocks = blocks_for(sequence->prompt_tokens);
  // A preempted sequence gets its blocks back before a new one gets any, or reservations could starve it.
  if (!has_seats(seats) || waiting_preempted_ > 0 || blocks_at_end(*sequence) > blocks_.num_blocks()) {
    return std::nullopt;
  }
  const std::size_t wanted = blocks_at_start(*sequence, prompt_blocks + 1);
  const auto prefix = blocks_.acquire(sequence->hashes, wanted, 0, sequence->blocks);
  if (!prefix) {
    return std::nullopt;
  }
  sequence->state = SequenceState::reserved;
  sequence->committed = *prefix;
  sequence->computed = *prefix * block_tokens_;
  sequence->cached_tokens = sequence->computed;
  sequence->knows_cached = true;
  note_generations(*sequence, *prefix);
  sequence->spare_seats = seats - 1;
  reserved_ += seats;
  return keep(std::move(sequence));
}

void StepScheduler::start(SequenceId id, std::int32_t first_token) {
  Sequence& sequence = find(id);
  require(sequence.state == SequenceState::reserved,
          [&] { return name_of(id) + " is not reserved and can't be started"; });
  require(first_token >= 0, "a token is not negative");
  std::vector<Sequence*> forks;
  for (const SequenceId fork : sequence.forks) {
    const auto at = sequences_.find(fork);
    if (at != sequences_.end() && at->second->state == SequenceState::reserved) {
      forks.push_back(at->second.get());
    }
  }
  check_reserved_blocks(sequence);
  for (const Sequence* fork : forks) {
    check_reserved_blocks(*fork);
  }
  begin_decode(sequence, first_token);
  for (Sequence* fork : forks) {
    begin_decode(*fork, fork->first_token);
  }
}

void StepScheduler::begin_decode(Sequence& sequence, std::int32_t first_token) {
  reserved_ -= 1 + sequence.spare_seats;
  sequence.spare_seats = 0;
  sequence.generations = {};
  sequence.forks = {};
  sequence.computed = sequence.prompt_tokens;
  commit_full_blocks(sequence);
  sequence.tokens.push_back(first_token);
  if (sequence.outputs() >= sequence.max_new_tokens) {
    sequence.state = SequenceState::done;
  } else {
    sequence.state = SequenceState::ready;
    ready_.push_back(&sequence);
  }
}

void StepScheduler::remove(SequenceId id) {
  Sequence& sequence = find(id);
  if (sequence.planned) {
    // The step may be running on its blocks; they are given back when the plan comes back.
    sequence.removed = true;
    return;
  }
  end(sequence);
}

void StepScheduler::end(Sequence& sequence) {
  switch (sequence.state) {
  case SequenceState::waiting:
    dequeue(sequence);
    break;
  case SequenceState::reserved:
    return_seats(sequence);
    forget_lost_blocks(sequence);
    break;
  case SequenceState::ready:
    std::erase(ready_, &sequence);
    break;
  case SequenceState::prefilling:
  case SequenceState::decoding:
    leave_table(sequence);
    break;
  case SequenceState::done:
    break;
  }
  release_blocks(sequence);
  forget_host(sequence);
  sequences_.erase(sequence.id);
}

/// A fork that ends before its parent has started gives its seat back to it: another may be made.
void StepScheduler::return_seats(const Sequence& sequence) {
  reserved_ -= sequence.spare_seats;
  const auto parent = sequences_.find(sequence.seat_of);
  if (parent != sequences_.end() && parent->second->state == SequenceState::reserved) {
    ++parent->second->spare_seats;
  } else {
    --reserved_;
  }
}

void StepScheduler::release_blocks(Sequence& sequence) {
  finish_copy(sequence);
  blocks_.release(sequence.blocks);
  sequence.blocks.clear();
  sequence.computed = 0;
  sequence.committed = 0;
}

void StepScheduler::note_generations(Sequence& sequence, std::size_t from) const {
  sequence.private_from = from;
  sequence.generations.clear();
  for (const BlockId block : std::span(sequence.blocks).subspan(from)) {
    sequence.generations.push_back(blocks_.generation(block));
  }
}

bool StepScheduler::lost(const Sequence& sequence, std::size_t index) const {
  const BlockId block = sequence.blocks[index];
  return blocks_.state(block) != BlockState::held ||
         blocks_.generation(block) != sequence.generations[index - sequence.private_from];
}

void StepScheduler::check_reserved_blocks(const Sequence& sequence) const {
  for (std::size_t i = sequence.private_from; i < sequence.blocks.size(); ++i) {
    require(!lost(sequence, i), [&] {
      return name_of(sequence.id) + " can't be started: its block " + std::to_string(sequence.blocks[i]) +
             " went to quarantine";
    });
  }
}

/// Blocks that went to quarantine while they were reserved are not the sequence's to give back.
void StepScheduler::forget_lost_blocks(Sequence& sequence) const {
  std::size_t kept = sequence.private_from;
  for (std::size_t i = kept; i < sequence.blocks.size(); ++i) {
    if (!lost(sequence, i)) {
      sequence.blocks[kept++] = sequence.blocks[i];
    }
  }
  sequence.blocks.resize(kept);
}

std::unique_ptr<Sequence> StepScheduler::make(const NewSequence& request) const {
  const std::size_t count = request.tokens.size();
  require(count >= 1 && count <= static_cast<std::size_t>(length_limit),
          [&] { return "a prompt of " + std::to_string(count) + " tokens can't be scheduled"; });
  require(request.hashes.size() == count / block_tokens_, [&] {
    return "a prompt of " + std::to_string(count) + " tokens has " + std::to_string(count / block_tokens_) +
           " full blocks, not " + std::to_string(request.hashes.size()) + " hashes";
  });
  require(request.max_new_tokens >= 0 && request.max_new_tokens <= length_limit,
          [&] { return "max_new_tokens " + std::to_string(request.max_new_tokens) + " is out of range"; });
  require(request.priority >= -priority_limit && request.priority <= priority_limit,
          [&] { return "priority " + std::to_string(request.priority) + " is out of range"; });
  require(!std::isnan(request.arrival), "arrival must be a number");
  auto sequence = std::make_unique<Sequence>();
  sequence->rank = by_priority_ ? request.priority : 0;
  sequence->arrival = request.arrival;
  sequence->preemptible = request.preemptible;
  sequence->use_cache = request.use_cache;
  sequence->prompt_tokens = count;
  sequence->max_new_tokens = static_cast<std::size_t>(request.max_new_tokens);
  sequence->root = request.root;
  sequence->tokens.reserve(count + std::min(sequence->max_new_tokens, output_room) + 1);
  sequence->tokens.assign(request.tokens.begin(), request.tokens.end());
  sequence->hashes.assign(request.hashes.begin(), request.hashes.end());
  return sequence;
}

SequenceId StepScheduler::keep(std::unique_ptr<Sequence> sequence) {
  sequence->id = ++last_id_;
  sequences_.emplace(last_id_, std::move(sequence));
  return last_id_;
}

Sequence& StepScheduler::find(SequenceId id) const {
  const auto at = sequences_.find(id);
  require(at != sequences_.end() && !at->second->removed, [&] { return "there is no " + name_of(id); });
  return *at->second;
}

const Sequence& StepScheduler::sequence(SequenceId id) const {
  return find(id);
}

/// The KV of the very last token is never needed.
std::size_t StepScheduler::blocks_at_end(const Sequence& sequence) const noexcept {
  const std::size_t outputs = std::max<std::size_t>(sequence.max_new_tokens, 1);
  return blocks_for(sequence.prompt_tokens + outputs - 1);
}

/// What is not to be preempted must never ask for a block again.
std::size_t StepScheduler::blocks_at_start(const Sequence& sequence, std::size_t wanted) const noexcept {
  return sequence.preemptible ? wanted : std::max(wanted, blocks_at_end(sequence));
}

void StepScheduler::enqueue(Sequence& sequence) {
  sequence.state = SequenceState::waiting;
  if (by_cost_) {
    const auto cacheable = std::span(sequence.hashes).first(sequence.cacheable(block_tokens_));
    const std::size_t cached = blocks_.lookup(cacheable) * block_tokens_;
    sequence.cost = std::max<std::size_t>(sequence.tokens.size() - std::max(cached, sequence.known()), 1);
  }
  waiting_.insert(sequence);
  waiting_tokens_ += sequence.left();
  waiting_preempted_ += sequence.preempted ? 1 : 0;
}

void StepScheduler::dequeue(Sequence& sequence) {
  waiting_.erase(sequence);
  waiting_tokens_ -= sequence.left();
  waiting_preempted_ -= sequence.preempted ? 1 : 0;
  sequence.preempted = false;
}

}  // namespace twinpool
