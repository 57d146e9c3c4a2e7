// SPDX-License-Identifier: Apache-2.0
#include "placement/placer.h"
#include "placement/placer_detail.h"

#include <algorithm>
#include <cmath>

namespace twinpool::placement {

const char* name_of(Obstacle obstacle) noexcept {
  switch (obstacle) {
  case Obstacle::none:
    return "none";
  case Obstacle::no_prefill_worker:
    return "no_prefill_worker";
  case Obstacle::no_decode_worker:
    return "no_decode_worker";
  case Obstacle::no_pair:
    return "no_pair";
  case Obstacle::prefill_window:
    return "prefill_window";
  case Obstacle::prefill_blocks:
    return "prefill_blocks";
  case Obstacle::decode_sequences:
    return "decode_sequences";
  case Obstacle::decode_blocks:
    return "decode_blocks";
  case Obstacle::transfer_window:
    return "transfer_window";
  case Obstacle::refused:
    return "refused";
  }
  return "";
}

void Placer::choose(const Query& query, Decision& decision) {
  decision.obstacle = Obstacle::none;
  decision.others_count = 0;
  decision.pairs = 0;
  decision.retry_at = 0.0;
  decision.best = Candidate{};
  const Obstacle decode = decode_sides(query, decision);
  if (decode != Obstacle::none) {
    decision.obstacle = decode;
    return;
  }
  const Obstacle prefill = prefill_sides(query, decision);
  const bool local =
      std::any_of(decode_.begin(), decode_.end(), [](const DecodeSide& d) { return d.local_compute >= 0; });
  if (prefill != Obstacle::none && !local) {
    decision.obstacle = prefill;
    return;
  }
  pairs(decision);
  if (decision.pairs == 0) {
    decision.obstacle = prefill != Obstacle::none ? prefill : Obstacle::no_pair;
  }
}

void Placer::chosen(const Candidate& candidate) {
  ++rotation_;
  if (Worker* worker = workers_.get(candidate.decode)) {
    ++worker->served;
  }
  if (candidate.local) {
    return;
  }
  if (Worker* worker = workers_.get(candidate.prefill)) {
    ++worker->served;
  }
}

Obstacle Placer::prefill_sides(const Query& query, Decision& decision) {
  prefill_.clear();
  Obstacle obstacle = Obstacle::no_prefill_worker;
  for (const std::uint32_t slot : workers_.of_pool(query.pool)) {
    const Worker& worker = workers_.at(slot);
    if (worker.spec.role != Role::prefill || worker.spec.state != WorkerState::ready) {
      continue;
    }
    if (!worker.usable(query.now)) {
      note_retry(decision, worker.quarantined_until);
      continue;
    }
    if (contains(query.avoid, slot, worker.epoch)) {
      obstacle = std::max(obstacle, Obstacle::refused);
      continue;
    }
    const auto cached = static_cast<std::int64_t>(query.cached_blocks[worker.index_slot]);
    const std::int64_t block_tokens = worker.spec.block_tokens;
    // The last prompt token is always computed: its logits give the first token.
    const std::int64_t uncached = query.prompt_tokens - std::min(cached * block_tokens, query.prompt_tokens - 1);
    const double queued = worker.queued_prefill_tokens();
    if (!query.any_load && queued > 0) {
      // An idle worker takes any prompt: one that is larger than the window must not wait for ever.
      if (limits_.prefill_window_tokens > 0 &&
          queued + static_cast<double>(uncached) > static_cast<double>(limits_.prefill_window_tokens)) {
        obstacle = std::max(obstacle, Obstacle::prefill_window);
        continue;
      }
      if (static_cast<double>(blocks_of(query.prompt_tokens, block_tokens) - cached) > worker.available_blocks()) {
        obstacle = std::max(obstacle, Obstacle::prefill_blocks);
        continue;
      }
    }
    add_prefill(query, worker, slot, cached);
  }
  if (prefill_.empty()) {
    return obstacle;
  }
  // A worker without a report is unknown, not idle: it is taken to be as busy as its peers are on average.
  double known_wait = 0.0;
  std::size_t known = 0;
  for (const PrefillSide& side : prefill_) {
    if (side.unknown) {
      continue;
    }
    known_wait += side.wait;
    ++known;
  }
  for (PrefillSide& side : prefill_) {
    if (side.unknown && known > 0) {
      side.wait = std::max(side.wait, known_wait / static_cast<double>(known));
    }
    side.done = side.wait + side.fetch + side.compute;
  }
  return Obstacle::none;
}

void Placer::add_prefill(const Query& query, const Worker& worker, std::uint32_t slot, std::int64_t cached) {
  PrefillSide side{};
  side.slot = slot;
  side.fingerprint = worker.fingerprint_id;
  side.cached = std::min(cached, (query.prompt_tokens - 1) / worker.spec.block_tokens);
  const std::int64_t cached_tokens = side.cached * worker.spec.block_tokens;
  side.uncached = query.prompt_tokens - cached_tokens;
  side.wait = worker.queued_prefill_tokens() * worker.prefill.coefficients()[1];
  side.compute = prefill_seconds(worker, side.uncached, cached_tokens);
  side.served = worker.served;
  side.turn = (slot + rotation_) % (workers_.slots() + 1);
  side.unknown = !worker.report;
  if (limits_.prefix_fetch) {
    fetch_option(query, worker, side);
  }
  prefill_.push_back(side);
}

// Pulling the missing part of the prefix from its best holder, where that beats computing it.
void Placer::fetch_option(const Query& query, const Worker& worker, PrefillSide& side) const {
  std::int64_t most = side.cached;
  std::uint32_t holder = 0;
  for (const std::uint32_t slot : workers_.of_pool(query.pool)) {
    const Worker& other = workers_.at(slot);
    const auto cached = static_cast<std::int64_t>(query.cached_blocks[other.index_slot]);
    if (other.fingerprint_id != worker.fingerprint_id || query.now < other.quarantined_until || cached <= most) {
      continue;
    }
    most = cached;
    holder = slot;
  }
  most = std::min(most, (query.prompt_tokens - 1) / worker.spec.block_tokens);
  if (most <= side.cached) {
    return;
  }
  const std::int64_t cached_tokens = most * worker.spec.block_tokens;
  const double fetch = worker.transfer.predict(static_cast<double>(most - side.cached), 0.0);
  const double compute = prefill_seconds(worker, query.prompt_tokens - cached_tokens, cached_tokens);
  if (fetch + compute >= side.compute) {
    return;
  }
  side.fetch = fetch;
  side.compute = compute;
  side.uncached = query.prompt_tokens - cached_tokens;
  side.fetch_from = workers_.ref(workers_.at(holder));
}

}  // namespace twinpool::placement
