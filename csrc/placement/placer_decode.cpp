// SPDX-License-Identifier: Apache-2.0
// The decode side of placement, and the loop over all pairs.
#include <algorithm>
#include <cmath>
#include <limits>

#include "placement/placer.h"
#include "placement/placer_detail.h"

namespace twinpool::placement {

namespace {
constexpr double k_nothing_blocked = std::numeric_limits<double>::infinity();

// What a session's workers are let off: half of what costs may differ by and still be alike, for each of the two. So
// they win among those alike, and lose to any that is clearly better.
double preference(double total, bool prefill, bool decode) {
  return total * (1.0 - k_alike * ((prefill ? 0.5 : 0.0) + (decode ? 0.5 : 0.0)));
}
}  // namespace

Obstacle Placer::decode_sides(const Query& query, Decision& decision) {
  decode_.clear();
  decode_workers_ = 0;
  Obstacle obstacle = Obstacle::no_decode_worker;
  for (const std::uint32_t slot : workers_.of_pool(query.pool)) {
    const Worker& worker = workers_.at(slot);
    if (worker.spec.role != Role::decode || worker.spec.state != WorkerState::ready) {
      continue;
    }
    ++decode_workers_;
    if (!worker.spec.has_adapter(query.adapter)) {
      obstacle = std::max(obstacle, Obstacle::no_adapter);
      continue;
    }
    if (!worker.usable(query.now)) {
      note_retry(decision, query.now, worker.quarantined_until);
      continue;
    }
    const auto cached = static_cast<std::int64_t>(query.cached_blocks[worker.index_slot]);
    const std::int64_t block_tokens = worker.spec.block_tokens;
    // Full blocks are shared by the choices, the partial last one is copied for
    // each.
    const std::int64_t prompt_blocks =
        std::max<std::int64_t>(1, blocks_of(query.prompt_tokens, block_tokens) - cached) + query.choices - 1;
    if (worker.refuses(query.now, prompt_blocks) || contains(query.avoid, slot, worker.epoch)) {
      obstacle = std::max(obstacle, Obstacle::refused);
      if (worker.refused_until > query.now) {
        note_retry(decision, query.now, worker.refused_until);
      }
      continue;
    }
    if (!query.any_load) {
      if (limits_.transfer_window_requests > 0 && worker.transfers >= limits_.transfer_window_requests) {
        obstacle = std::max(obstacle, Obstacle::transfer_window);
        continue;
      }
      const double busy = worker.busy_sequences();
      if (busy + static_cast<double>(query.choices) > static_cast<double>(worker.spec.max_num_seqs)) {
        obstacle = std::max(obstacle, Obstacle::decode_sequences);
        continue;
      }
      // The expected output is a wish where nothing runs: an idle worker takes
      // what its prompt fits in.
      const std::int64_t growth = query.choices * blocks_of(query.output_tokens, block_tokens);
      const double wanted = static_cast<double>(prompt_blocks + (busy > 0 ? growth : query.choices));
      if (wanted > worker.available_blocks()) {
        obstacle = std::max(obstacle, Obstacle::decode_blocks);
        continue;
      }
    }
    add_decode(query, worker, slot, cached);
    decode_.back().prompt_blocks = prompt_blocks;
  }
  if (decode_.empty()) {
    return obstacle;
  }
  double known_cost = 0.0;
  std::size_t known = 0;
  for (const DecodeSide& side : decode_) {
    if (side.unknown) {
      continue;
    }
    known_cost += side.wait + side.harm;
    ++known;
  }
  for (DecodeSide& side : decode_) {
    if (!side.unknown || known == 0) {
      continue;
    }
    side.wait = std::max(side.wait, known_cost / static_cast<double>(known) - side.harm);
  }
  return Obstacle::none;
}

void Placer::add_decode(const Query& query, const Worker& worker, std::uint32_t slot, std::int64_t cached) {
  constexpr double k_last_chunk_blocks = 8.0;  // pulled after the compute has ended, whatever was hidden before
  DecodeSide side{};
  side.slot = slot;
  side.fingerprint = worker.fingerprint_id;
  const std::int64_t block_tokens = worker.spec.block_tokens;
  const std::int64_t all_blocks = blocks_of(query.prompt_tokens, block_tokens);
  side.cached = std::min(cached, all_blocks);
  side.growth_blocks = query.choices * blocks_of(query.output_tokens, block_tokens);
  const double missing = static_cast<double>(all_blocks - side.cached);
  if (missing > 0) {
    const double ahead = static_cast<double>(worker.transfer_blocks) * worker.transfer.coefficients()[1];
    side.transfer = worker.transfer.predict(missing, 0.0) + ahead;
    side.last_chunk = worker.transfer.predict(std::min(missing, k_last_chunk_blocks), 0.0);
  }

  const double busy = worker.busy_sequences();
  const double context = worker.context_tokens();
  const double choices = static_cast<double>(query.choices);
  const double added = static_cast<double>(query.prompt_tokens) + static_cast<double>(query.output_tokens) / 2.0;
  const double now_step = worker.step.predict(busy, context);
  const double then_step = worker.step.predict(busy + choices, context + choices * added);
  const double horizon = std::min(static_cast<double>(query.output_tokens), limits_.harm_horizon_tokens);
  const double slowed = busy * (then_step - now_step) + choices * then_step;
  side.harm = limits_.harm_weight * horizon * slowed;
  side.wait = worker.report ? static_cast<double>(worker.report->waiting) * now_step : 0.0;

  if (limits_.local_prefill) {
    add_local(query, worker, cached, busy, side);
  }
  side.served = worker.served;
  side.turn = (slot + rotation_) % (workers_.slots() + 1);
  side.preferred = contains(query.prefer, slot, worker.epoch);
  side.unknown = !worker.report;
  decode_.push_back(side);
}

// A decode worker that computes a prompt slows its streams: those that it has,
// for all of that time, and those that come meanwhile, for what is left of it.
// So a short suffix is cheap and a long prompt is dear even where nothing runs.
void Placer::add_local(const Query& query, const Worker& worker, std::int64_t cached, double busy,
                       DecodeSide& side) const {
  const double queued = worker.queued_prefill_tokens();
  side.local_wait = queued * worker.prefill.coefficients()[1];
  side.local_source = source_of(query, worker, cached, side.local_wait, limits_.harm_weight * busy);
  const double compute = side.local_source.compute;
  const double arrivals =
      std::max(query.arrivals / static_cast<double>(std::max<std::size_t>(decode_workers_, 1)), limits_.quiet_arrivals);
  side.local_harm = limits_.harm_weight * compute * (busy + arrivals * compute / 2.0);
  const double window = queued + static_cast<double>(side.local_source.uncached);
  side.local = query.any_load || queued <= 0 || limits_.prefill_window_tokens <= 0 ||
               window <= static_cast<double>(limits_.prefill_window_tokens);
}

void Placer::pairs(Decision& decision) {
  blocked_total_ = k_nothing_blocked;
  bool handed_off = false;
  for (const DecodeSide& decode : decode_) {
    for (const PrefillSide& prefill : prefill_) {
      if (prefill.fingerprint == decode.fingerprint) {
        offer(decision, &prefill, decode);
        handed_off = handed_off || !prefill.full;
      }
    }
    if (decode.local) {
      offer(decision, nullptr, decode);
    }
  }
  if (!handed_off && blocked_total_ < best_total_) {
    decision.pairs = 0;  // better to wait for a prefill worker
  }
}

void Placer::offer(Decision& decision, const PrefillSide* prefill, const DecodeSide& decode) {
  // Chunks are pulled while the next ones are computed: what counts is what
  // sticks out at the end.
  const double transfer =
      prefill == nullptr || decode.transfer <= 0
          ? 0.0
          : std::max(decode.transfer - prefill->source.fetch - prefill->source.compute, decode.last_chunk);
  const double side = prefill == nullptr ? decode.local_wait + decode.local_source.fetch + decode.local_source.compute +
                                               decode.local_harm
                                         : prefill->cost;
  const double cost = side + transfer + decode.wait + decode.harm;
  const double total = preference(cost, prefill == nullptr ? decode.preferred : prefill->preferred, decode.preferred);
  if (prefill != nullptr && prefill->full) {
    blocked_total_ = std::min(blocked_total_, total);
    return;
  }
  ++decision.pairs;
  const std::array<std::uint64_t, 4> tie{prefill == nullptr ? 0 : prefill->pull,
                                         prefill == nullptr ? 0 : prefill->served, decode.served,
                                         decode.turn + (prefill == nullptr ? 0 : prefill->turn)};
  if (decision.pairs > 1) {
    const bool equal = std::abs(total - best_total_) <= k_tie * best_total_;
    if (equal ? tie >= best_tie_ : total > best_total_) {
      keep_other(decision, prefill, decode, transfer, cost);
      return;
    }
    if (decision.others_count < Decision::k_others) {
      ++decision.others_count;
    }
    std::move_backward(decision.others.begin(),
                       decision.others.begin() + static_cast<std::ptrdiff_t>(decision.others_count) - 1,
                       decision.others.begin() + static_cast<std::ptrdiff_t>(decision.others_count));
    decision.others[0] = decision.best;
  }
  best_total_ = total;
  best_tie_ = tie;
  decision.best = candidate(prefill, decode, transfer);
}

void Placer::keep_other(Decision& decision, const PrefillSide* prefill, const DecodeSide& decode, double transfer,
                        double total) {
  std::size_t at = decision.others_count;
  while (at > 0 && total < decision.others[at - 1].terms.total()) {
    --at;
  }
  if (at >= Decision::k_others) {
    return;
  }
  if (decision.others_count < Decision::k_others) {
    ++decision.others_count;
  }
  for (std::size_t i = decision.others_count - 1; i > at; --i) {
    decision.others[i] = decision.others[i - 1];
  }
  decision.others[at] = candidate(prefill, decode, transfer);
}

Candidate Placer::candidate(const PrefillSide* prefill, const DecodeSide& decode, double transfer) const {
  Candidate made;
  made.decode = workers_.ref(workers_.at(decode.slot));
  made.decode_cached_blocks = decode.cached;
  made.prompt_blocks = decode.prompt_blocks;
  made.growth_blocks = decode.growth_blocks;
  made.terms.transfer = transfer;
  made.terms.decode_wait = decode.wait;
  made.terms.harm = decode.harm;
  if (prefill == nullptr) {
    made.local = true;
    made.prefill = made.decode;
    made.terms.prefill_wait = decode.local_wait;
    made.terms.harm += decode.local_harm;
  } else {
    made.prefill = workers_.ref(workers_.at(prefill->slot));
    made.terms.prefill_wait = prefill->wait;
    made.terms.harm += prefill->harm;
  }
  const Source& source = prefill == nullptr ? decode.local_source : prefill->source;
  made.fetch_from = source.fetch_from;
  made.fetch_blocks = source.fetch_blocks;
  made.prefill_cached_blocks = source.cached;
  made.uncached_tokens = source.uncached;
  made.terms.fetch = source.fetch;
  made.terms.compute = source.compute;
  return made;
}

}  // namespace twinpool::placement
