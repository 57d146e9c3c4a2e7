// SPDX-License-Identifier: Apache-2.0
#include "placement/placer.h"
#include "placement/placer_detail.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace twinpool::placement {

namespace {

// Rendezvous hashing: a well mixed number of the content and the name (FNV-1a, splitmix64).
std::uint64_t rank(std::uint64_t anchor, const std::string& name) noexcept {
  std::uint64_t mixed = 0xcbf29ce484222325U;
  for (const char c : name) {
    mixed = (mixed ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  }
  mixed ^= anchor;
  mixed = (mixed ^ (mixed >> 30U)) * 0xbf58476d1ce4e5b9U;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94d049bb133111ebU;
  return mixed ^ (mixed >> 31U);
}

}  // namespace

const char* name_of(Obstacle obstacle) noexcept {
  switch (obstacle) {
  case Obstacle::none:
    return "none";
  case Obstacle::no_prefill_worker:
    return "no_prefill_worker";
  case Obstacle::no_decode_worker:
    return "no_decode_worker";
  case Obstacle::no_adapter:
    return "no_adapter";
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
  pressure_ = prefill_pressure(query);
  Obstacle obstacle = Obstacle::no_prefill_worker;
  for (const std::uint32_t slot : workers_.of_pool(query.pool)) {
    const Worker& worker = workers_.at(slot);
    if (worker.spec.role != Role::prefill || worker.spec.state != WorkerState::ready) {
      continue;
    }
    if (!worker.spec.has_adapter(query.adapter)) {
      obstacle = std::max(obstacle, Obstacle::no_adapter);
      continue;
    }
    if (!worker.usable(query.now)) {
      note_retry(decision, query.now, worker.quarantined_until);
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
    side.cost = side.done + side.harm;
  }
  settle_alike(query);
  const bool room = std::any_of(prefill_.begin(), prefill_.end(), [](const PrefillSide& p) { return !p.full; });
  return room ? Obstacle::none : obstacle;
}

// Costs rest on fitted models, so those that differ by a little less than the
// models do are the same. Of these the one that has to pull least is taken, then
// one that the prompt's content picks: two routers that know the same choose the
// same, whatever each has placed before.
void Placer::settle_alike(const Query& query) {
  constexpr std::int64_t k_shares = 8;  // less than an eighth of a prompt is no reason: all may begin alike
  if (query.anchor == 0) {
    return;
  }
  double least = std::numeric_limits<double>::infinity();
  for (const PrefillSide& side : prefill_) {
    least = side.full ? least : std::min(least, side.cost);
  }
  for (PrefillSide& side : prefill_) {
    const Worker& worker = workers_.at(side.slot);
    side.pull = static_cast<std::uint64_t>(k_shares * side.source.fetch_blocks /
                                           blocks_of(query.prompt_tokens, worker.spec.block_tokens));
    side.served = rank(query.anchor, worker.spec.name);
    side.turn = 0;
    if (side.cost <= least * (1.0 + k_alike)) {
      side.cost = least;
    }
  }
}

void Placer::add_prefill(const Query& query, const Worker& worker, std::uint32_t slot, std::int64_t cached) {
  PrefillSide side{};
  side.slot = slot;
  side.fingerprint = worker.fingerprint_id;
  side.wait = worker.queued_prefill_tokens() * worker.prefill.coefficients()[1];
  side.source = source_of(query, worker, cached, side.wait, pressure_);
  side.harm = pressure_ * side.source.compute;
  side.served = worker.served;
  side.turn = (slot + rotation_) % (workers_.slots() + 1);
  side.preferred = contains(query.prefer, slot, worker.epoch);
  side.unknown = !worker.report;
  prefill_.push_back(side);
}

// How many others a prompt's compute delays on average: its share of those that
// wait in the router, and those that come before the backlog of its worker has
// drained. Without it a busy pool would compute again what a little patience
// could have pulled.
double Placer::prefill_pressure(const Query& query) const {
  constexpr double k_most = 8.0;
  double workers = 0.0;
  double backlog = 0.0;
  for (const std::uint32_t slot : workers_.of_pool(query.pool)) {
    const Worker& worker = workers_.at(slot);
    if (worker.spec.role == Role::prefill && worker.usable(query.now)) {
      workers += 1.0;
      backlog += worker.queued_prefill_tokens() * worker.prefill.coefficients()[1];
    }
  }
  if (workers == 0.0) {
    return 0.0;
  }
  return std::min(k_most, (query.waiting + query.arrivals * backlog / workers) / workers);
}

Placer::Source Placer::source_of(const Query& query, const Worker& worker, std::int64_t cached, double wait,
                                 double pressure) const {
  Source source;
  // The last prompt token is always computed: its logits give the first token.
  source.cached = std::min(cached, (query.prompt_tokens - 1) / worker.spec.block_tokens);
  const std::int64_t cached_tokens = source.cached * worker.spec.block_tokens;
  source.uncached = query.prompt_tokens - cached_tokens;
  source.compute = prefill_seconds(worker, source.uncached, cached_tokens);
  if (limits_.prefix_fetch) {
    fetch_option(query, worker, wait, pressure, source);
  }
  return source;
}

// Pulling the missing part of the prefix from the holder from which the first
// token comes soonest, where that beats computing it. A prompt is pulled for
// while it waits for those before it: only what sticks out of the wait delays it.
void Placer::fetch_option(const Query& query, const Worker& worker, double wait, double pressure,
                          Source& source) const {
  // Holders that cost about the same take turns: a prefix that all prompts share
  // must not make one worker serve it to all.
  const std::int64_t usable = (query.prompt_tokens - 1) / worker.spec.block_tokens;
  const std::int64_t own = source.cached;
  const double own_cost = source.compute * (1.0 + pressure);
  double best = own_cost;
  std::uint64_t best_turn = 0;
  for (const std::uint32_t slot : workers_.of_pool(query.pool)) {
    const Worker& other = workers_.at(slot);
    const auto held = std::min(static_cast<std::int64_t>(query.cached_blocks[other.index_slot]), usable);
    if (held <= own || &other == &worker || other.fingerprint_id != worker.fingerprint_id ||
        query.now < other.quarantined_until) {
      continue;
    }
    // A holder answers between two of its steps.
    const bool steps = other.report && other.report->running > 0;
    const double answer = steps ? other.report->step_seconds / 2.0 : 0.0;
    const double pull = worker.transfer.predict(static_cast<double>(held - own), 0.0) + answer;
    const double fetch = std::max(0.0, pull - wait);
    const std::int64_t cached_tokens = held * worker.spec.block_tokens;
    const std::int64_t uncached = query.prompt_tokens - cached_tokens;
    const double compute = prefill_seconds(worker, uncached, cached_tokens);
    const double cost = fetch + compute * (1.0 + pressure);
    const std::uint64_t turn = (slot + rotation_) % (workers_.slots() + 1);
    const bool alike = source.fetch_blocks > 0 && std::abs(cost - best) <= k_alike * best;
    if (cost >= own_cost || (alike ? turn >= best_turn : cost >= best)) {
      continue;
    }
    best = std::min(best, cost);
    best_turn = turn;
    source.fetch = fetch;
    source.compute = compute;
    source.uncached = uncached;
    source.fetch_from = workers_.ref(other);
    source.fetch_blocks = held;
  }
}

}  // namespace twinpool::placement
