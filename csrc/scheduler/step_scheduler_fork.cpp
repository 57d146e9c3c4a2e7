// SPDX-License-Identifier: Apache-2.0
// More choices over one prompt: its full blocks are shared, its partial last one is copied.
#include "scheduler/step_scheduler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace twinpool {

std::optional<SequenceId> StepScheduler::fork(SequenceId id, std::int32_t first_token, std::int64_t max_new_tokens) {
  Sequence& parent = find(id);
  require(max_new_tokens >= 1 && max_new_tokens <= length_limit, "a fork must be allowed at least one new token");
  require(first_token >= 0, "a token is not negative");
  const bool arriving = parent.state == SequenceState::reserved;
  require(arriving || parent.outputs() > 0, [&] { return "the prompt of " + name_of(id) + " is not computed yet"; });
  require(!arriving || !parent.follower,
          [&] { return name_of(id) + " is a fork that has not started: fork the sequence that it starts with"; });
  auto child = make_fork(parent, static_cast<std::size_t>(max_new_tokens));
  child->first_token = first_token;
  if (blocks_at_end(*child) > blocks_.num_blocks()) {
    return std::nullopt;
  }
  if (!arriving && parent.computed < parent.prompt_tokens) {
    // The parent lost its blocks, so there is nothing to share: the fork is recomputed too, if it needs any more token.
    child->tokens.push_back(first_token);
    Sequence& kept = *child;
    const SequenceId child_id = keep(std::move(child));
    if (kept.max_new_tokens == 1) {
      kept.state = SequenceState::done;
    } else {
      enqueue(kept);
    }
    return child_id;
  }
  const bool kept_for_it = arriving && parent.spare_seats > 0;
  if ((!kept_for_it && !has_seats(1)) || !share_blocks(parent, *child)) {
    return std::nullopt;
  }
  child->state = SequenceState::reserved;
  if (kept_for_it) {
    --parent.spare_seats;
    child->seat_of = parent.id;
  } else {
    ++reserved_;
  }
  Sequence& kept = *child;
  const SequenceId child_id = keep(std::move(child));
  if (arriving) {
    note_generations(kept, parent.private_from);
    kept.follower = true;
    parent.forks.push_back(child_id);
  } else {
    begin_decode(kept, first_token);
  }
  return child_id;
}

std::unique_ptr<Sequence> StepScheduler::make_fork(const Sequence& parent, std::size_t max_new_tokens) const {
  auto child = std::make_unique<Sequence>();
  child->rank = parent.rank;
  child->arrival = parent.arrival;
  child->preemptible = parent.preemptible;
  child->prompt_tokens = parent.prompt_tokens;
  child->max_new_tokens = max_new_tokens;
  child->root = parent.root;
  const auto prompt = std::span(parent.tokens).first(parent.prompt_tokens);
  child->tokens.reserve(prompt.size() + std::min(max_new_tokens, output_room));
  child->tokens.assign(prompt.begin(), prompt.end());
  const std::size_t full = parent.prompt_tokens / block_tokens_;
  child->hashes.assign(parent.hashes.begin(), parent.hashes.begin() + static_cast<std::ptrdiff_t>(full));
  child->cached_tokens = parent.cached_tokens;
  child->knows_cached = true;
  return child;
}

/// Shares the prompt's full blocks; the partial one gets a private twin that the child's first plan fills by a copy.
bool StepScheduler::share_blocks(const Sequence& parent, Sequence& child) {
  const std::size_t full = parent.prompt_tokens / block_tokens_;
  const bool partial = parent.prompt_tokens % block_tokens_ != 0;
  child.blocks.assign(parent.blocks.begin(), parent.blocks.begin() + static_cast<std::ptrdiff_t>(full));
  if (!blocks_.allocate(blocks_at_start(child, full + (partial ? 2 : 1)) - full, child.blocks)) {
    child.blocks.clear();
    return false;
  }
  blocks_.reference(std::span(child.blocks).first(full));
  if (partial) {
    const BlockId source = parent.copy_source != no_block ? parent.copy_source : parent.blocks[full];
    blocks_.reference({&source, 1});
    child.copy_source = source;
    child.copy_target = child.blocks[full];
  }
  child.committed = std::min(parent.committed, full);
  child.computed = std::min(parent.computed, child.committed * block_tokens_);
  return true;
}

}  // namespace twinpool
