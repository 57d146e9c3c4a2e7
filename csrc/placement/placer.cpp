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
  const bool local = std::any_of(decode_.begin(), decode_.end(), [](const DecodeSide& d) { return d.local; });
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
    // The last prompt token is always computed: its logits give the first
    // token.
    const std::int64_t uncached = query.prompt_tokens - std::min(cached * block_tokens, query.prompt_tokens - 1);
    const double queued = worker.queued_prefill_tokens();
    bool full = false;
    if (!query.any_load && queued > 0) {
      // An idle worker takes any prompt: one that is larger than the window
      // must not wait for ever.
      if (limits_.prefill_window_tokens > 0 &&
          queued + static_cast<double>(uncached) > static_cast<double>(limits_.prefill_window_tokens)) {
        obstacle = std::max(obstacle, Obstacle::prefill_window);
        full = true;
      } else if (static_cast<double>(blocks_of(query.prompt_tokens, block_tokens) - cached) >
                 worker.available_blocks()) {
        obstacle = std::max(obstacle, Obstacle::prefill_blocks);
        full = true;
      }
    }
    // With local prefill a full worker is what a decode worker's own compute
    // has to beat.
    if (!full || limits_.local_prefill) {
      add_prefill(query, worker, slot, cached);
      prefill_.back().full = full;
    }
  }
  if (prefill_.empty()) {
    return obstacle;
  }
  // A worker without a report is unknown, not idle: it is taken to be as busy
  // as its peers are on average.
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
    side.done = side.wait + side.source.fetch + side.source.compute;
  }
  const bool room = std::any_of(prefill_.begin(), prefill_.end(), [](const PrefillSide& p) { return !p.full; });
  return room ? Obstacle::none : obstacle;
}

void Placer::add_prefill(const Query& query, const Worker& worker, std::uint32_t slot, std::int64_t cached) {
  PrefillSide side{};
  side.slot = slot;
  side.fingerprint = worker.fingerprint_id;
  side.source = source_of(query, worker, cached);
  side.wait = worker.queued_prefill_tokens() * worker.prefill.coefficients()[1];
  side.served = worker.served;
  side.turn = (slot + rotation_) % (workers_.slots() + 1);
  side.unknown = !worker.report;
  prefill_.push_back(side);
}

Placer::Source Placer::source_of(const Query& query, const Worker& worker, std::int64_t cached) const {
  Source source;
  // The last prompt token is always computed: its logits give the first token.
  source.cached = std::min(cached, (query.prompt_tokens - 1) / worker.spec.block_tokens);
  const std::int64_t cached_tokens = source.cached * worker.spec.block_tokens;
  source.uncached = query.prompt_tokens - cached_tokens;
  source.compute = prefill_seconds(worker, source.uncached, cached_tokens);
  if (limits_.prefix_fetch) {
    fetch_option(query, worker, source);
  }
  return source;
}

// Pulling the missing part of the prefix from its best holder, where that beats
// computing it.
void Placer::fetch_option(const Query& query, const Worker& worker, Source& source) const {
  const std::int64_t usable = (query.prompt_tokens - 1) / worker.spec.block_tokens;
  std::int64_t most = source.cached;
  std::uint64_t best_turn = 0;
  const Worker* holder = nullptr;
  for (const std::uint32_t slot : workers_.of_pool(query.pool)) {
    const Worker& other = workers_.at(slot);
    const auto held = std::min(static_cast<std::int64_t>(query.cached_blocks[other.index_slot]), usable);
    const std::uint64_t turn = (slot + rotation_) % (workers_.slots() + 1);
    // Holders of as much take turns: a prefix that all prompts share must not
    // make one worker serve it to all.
    const bool better = held > most || (holder != nullptr && held == most && turn < best_turn);
    if (&other == &worker || other.fingerprint_id != worker.fingerprint_id || query.now < other.quarantined_until ||
        !better) {
      continue;
    }
    most = held;
    best_turn = turn;
    holder = &other;
  }
  if (holder == nullptr) {
    return;
  }
  // A holder answers between two of its steps.
  const bool steps = holder->report && holder->report->running > 0;
  const double answer = steps ? holder->report->step_seconds / 2.0 : 0.0;
  const std::int64_t cached_tokens = most * worker.spec.block_tokens;
  const double fetch = worker.transfer.predict(static_cast<double>(most - source.cached), 0.0) + answer;
  const double compute = prefill_seconds(worker, query.prompt_tokens - cached_tokens, cached_tokens);
  if (fetch + compute >= source.compute) {
    return;
  }
  source.fetch = fetch;
  source.compute = compute;
  source.uncached = query.prompt_tokens - cached_tokens;
  source.fetch_from = workers_.ref(*holder);
  source.fetch_blocks = most;
}

}  // namespace twinpool::placement
