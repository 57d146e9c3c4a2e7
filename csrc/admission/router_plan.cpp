// SPDX-License-Identifier: Apache-2.0
// Places what can be placed, ends what must end.
#include <algorithm>
#include <cstring>

#include "admission/router_core.h"

namespace twinpool::admission {

namespace {
constexpr int k_scan = 8;  // candidates looked at while the first does not fit
}

void RouterCore::plan(double now, std::vector<Action>& actions) {
  actions.clear();
  expire(now, actions);
  for (const auto& each : pools_) {
    if (each->queue.requests() > 0) {
      place_pool(now, *each, actions);
    }
  }
}

double RouterCore::next_wake(double now) const {
  double at = timers_.empty() ? k_never : timers_.begin()->first;
  for (const auto& each : pools_) {
    if (each->queue.requests() > 0 && each->retry_at < Pool::k_never_retry) {
      at = std::min(at, each->retry_at);
    }
  }
  return at == k_never ? k_never : std::max(at, now);
}

void RouterCore::expire(double now, std::vector<Action>& actions) {
  while (!timers_.empty() && timers_.begin()->first <= now) {
    Request& request = requests_.at(timers_.begin()->second);
    if (request.deadline <= now) {
      transition(now, request, Deadline{});
    } else {
      transition(now, request,
                 QueueTimeout{has_ready_pair(pool_of(request)) ? Cause::queue_timeout : Cause::no_workers});
    }
    end_action(request, actions, drain_seconds(now, pool_of(request), static_cast<double>(request.prompt_tokens)));
  }
}

void RouterCore::place_pool(double now, Pool& from, std::vector<Action>& actions) {
  from.queue.age(now);
  for (;;) {
    from.retry_at = Pool::k_never_retry;
    int scanned = 0;
    Request* hopeless = nullptr;
    double missing = 0.0;  // to its deadline
    std::vector<Request*> passed;
    const std::uint64_t taken = from.queue.next(now, [&](std::uint64_t id) {
      Request& request = requests_.at(id);
      if (scanned++ == k_scan) {
        return FairQueue::Verdict::stop;
      }
      if (try_place(now, from, request)) {
        const placement::Candidate& best = request.decision.best;
        const double needed = predicted_seconds(now, request, best);
        if (config_.early_rejection == 0 || !workers_.get(best.prefill)->prefill.measured() ||
            now + needed <= request.deadline) {
          return FairQueue::Verdict::take;
        }
        hopeless = &request;
        missing = now + needed - request.deadline;
        return FairQueue::Verdict::stop;
      }
      if (request.decision.obstacle == placement::Obstacle::refused && now < request.return_at) {
        return FairQueue::Verdict::skip;  // by itself, not for lack of room: nobody takes its place
      }
      passed.push_back(&request);
      // What was passed often enough holds the others back until it fits.
      return request.bypassed >= config_.max_bypass ? FairQueue::Verdict::stop : FairQueue::Verdict::skip;
    });
    if (hopeless != nullptr) {
      transition(now, *hopeless, Reject{Cause::deadline_unreachable});
      end_action(*hopeless, actions, missing);
      continue;
    }
    if (taken != 0) {
      for (Request* request : passed) {
        ++request->bypassed;
      }
      bypassed_ += passed.size();
      place(now, from, requests_.at(taken), actions);
      continue;
    }
    if (passed.empty() || config_.preemption == 0 || !preempt_for(now, from, *passed.front(), actions)) {
      return;
    }
  }
}

// True if there is a pair for it; the pair is in ``request.decision`` then.
bool RouterCore::try_place(double now, Pool& from, Request& request) {
  if (request.blocked_version != workers_.version() || now >= request.blocked_until) {
    decide(now, request, scratch_, false);
    const bool only_failed_ones =
        !request.avoid.empty() && scratch_.obstacle == placement::Obstacle::refused && !fits_another(now, request);
    if (only_failed_ones && now >= request.return_at) {
      // Better the worker that failed it before than none at all.
      request.avoid.clear();
      decide(now, request, scratch_, false);
    }
    request.decision = scratch_;
    if (scratch_.obstacle == placement::Obstacle::none) {
      return true;
    }
    request.blocked_version = workers_.version();
    request.blocked_until = scratch_.retry_at > 0 ? scratch_.retry_at : k_never;
    if (only_failed_ones && !request.avoid.empty()) {
      request.blocked_until = std::min(request.blocked_until, request.return_at);
    }
  }
  from.retry_at = std::min(from.retry_at, request.blocked_until);
  return false;
}

// Whether a worker that has not failed it would take it if it had nothing else to do: it is worth the wait, since who
// fails at once always looks idle.
bool RouterCore::fits_another(double now, const Request& request) {
  placement::Decision decision;
  decide(now, request, decision, true);
  return decision.obstacle != placement::Obstacle::refused;
}

void RouterCore::decide(double now, const Request& request, placement::Decision& decision, bool any_load) {
  // How long what a session's workers had is believed before their events say it: those take milliseconds, and
  // evictions that the index has heard of must not be unsaid for long.
  constexpr double k_believed_seconds = 2.0;
  index_.longest_prefix(request.hashes, lengths_);
  for (const placement::Preferred& preferred : request.prefer) {
    const placement::Worker* worker = workers_.get(preferred.worker);
    if (worker != nullptr && now < request.arrival + k_believed_seconds) {
      std::uint32_t& blocks = lengths_.blocks[worker->index_slot];
      blocks = std::max(blocks, static_cast<std::uint32_t>(preferred.blocks));
    }
  }
  placement::Query query;
  query.now = now;
  query.pool = request.pool;
  query.cached_blocks = lengths_.blocks;
  query.prompt_tokens = request.prompt_tokens;
  query.output_tokens = pools_[request.pool]->output_ratio.expect(request.max_new_tokens);
  query.choices = request.choices;
  query.arrivals = pools_[request.pool]->ended_requests.per_second(now);
  query.waiting = std::max(0.0, static_cast<double>(pools_[request.pool]->queue.requests()) - 1.0);
  // The last full block stands for all of the prompt.
  if (request.hashes.size() >= sizeof query.anchor) {
    std::memcpy(&query.anchor, request.hashes.data() + request.hashes.size() - sizeof query.anchor,
                sizeof query.anchor);
  }
  query.avoid = request.avoid;
  query.prefer = request.prefer;
  query.adapter = request.adapter;
  query.any_load = any_load;
  placer_.choose(query, decision);
}

void RouterCore::place(double now, Pool& from, Request& request, std::vector<Action>& actions) {
  const placement::Candidate& best = request.decision.best;
  const placement::Worker& prefill = *workers_.get(best.prefill);
  const placement::Worker& decode = *workers_.get(best.decode);
  const std::int64_t blocks = (request.prompt_tokens + prefill.spec.block_tokens - 1) / prefill.spec.block_tokens;
  request.placed = true;
  request.placed_at = request.computing_since = now;
  request.clean_sample = !best.local && prefill.queued_prefill_tokens() == 0 && !prefill.observed;
  request.output_tokens = 0;
  request.predicted_token = request.attempt == 1 ? token_seconds(request, best) : 0.0;
  request.predicted_first = request.predicted_token > 0 ? best.terms.first_token() + best.terms.transfer : 0.0;

  Place event;
  // The blocks of a prompt that the decode worker computes are those that it
  // reserves.
  event.work = placement::PrefillWork(workers_, best.prefill, best.uncached_tokens,
                                      best.local ? 0 : blocks - best.prefill_cached_blocks);
  if (!best.local) {
    event.transfer = placement::TransferSlot(workers_, best.decode, blocks - best.decode_cached_blocks);
  }
  event.blocks =
      placement::DecodeBlocks(workers_, best.decode, best.prompt_blocks, best.growth_blocks, request.choices);
  placer_.chosen(best);
  from.drained_tokens.add(now, static_cast<double>(request.prompt_tokens));
  transition(now, request, std::move(event));

  Action& action = actions.emplace_back();
  action.kind = Action::Kind::place;
  action.request = request.id;
  action.attempt = request.attempt;
  action.prefill = {prefill.spec.name, prefill.spec.incarnation};
  action.decode = {decode.spec.name, decode.spec.incarnation};
  if (const placement::Worker* holder = workers_.get(best.fetch_from)) {
    action.fetch_from = {holder->spec.name, holder->spec.incarnation};
    action.fetch_blocks = best.fetch_blocks;
  }
  action.local = best.local;
  action.prefill_cached_blocks = std::max(best.prefill_cached_blocks, action.fetch_blocks);
  action.decode_cached_blocks = best.decode_cached_blocks;
  action.ttft_seconds = best.terms.first_token();
  action.state = name_of(request.state);
}

// Makes room for a request of higher priority that has waited for the grace:
// the victim is of the lowest priority, and of those the one placed last, which
// has least to lose. Its client has no token yet, and it is next of its tenant again.
bool RouterCore::preempt_for(double now, Pool& from, const Request& request, std::vector<Action>& actions) {
  using placement::Obstacle;
  const Obstacle obstacle = request.decision.obstacle;
  const bool room = obstacle == Obstacle::prefill_window || obstacle == Obstacle::decode_sequences ||
                    obstacle == Obstacle::decode_blocks || obstacle == Obstacle::transfer_window;
  if (!room || from.victims.empty()) {
    return false;
  }
  const double since = request.queued_at + config_.preemption_grace_seconds;
  if (now < since) {
    from.retry_at = std::min(from.retry_at, since);
    return false;
  }
  const auto [priority, placed, inverse_id] = *from.victims.begin();
  if (priority >= request.priority) {
    return false;
  }
  Request& victim = requests_.at(~inverse_id);
  const placement::Candidate pair = victim.decision.best;
  transition(now, victim, Preempt{});
  ++preempted_;
  Action& action = actions.emplace_back();
  action.kind = Action::Kind::preempt;
  action.request = victim.id;
  action.attempt = victim.attempt;
  action.by = request.id;
  if (const placement::Worker* worker = workers_.get(pair.prefill)) {
    action.prefill = {worker->spec.name, worker->spec.incarnation};
  }
  if (const placement::Worker* worker = workers_.get(pair.decode)) {
    action.decode = {worker->spec.name, worker->spec.incarnation};
  }
  action.local = pair.local;
  action.state = name_of(victim.state);
  return true;
}

void RouterCore::end_action(const Request& request, std::vector<Action>& actions, double retry_after) {
  Action& action = actions.emplace_back();
  action.kind = Action::Kind::end;
  action.request = request.id;
  action.attempt = request.attempt;
  action.state = name_of(request.state);
  action.cause = cause_of(request.state);
  action.retry_after = clamp_retry(retry_after > 0 ? retry_after : k_unknown_retry_seconds);
}

bool RouterCore::has_ready_pair(const Pool& from) const {
  bool prefill = config_.local_prefill != 0;
  bool decode = false;
  for (const std::uint32_t slot : workers_.of_pool(from.id)) {
    const placement::WorkerSpec& spec = workers_.at(slot).spec;
    if (spec.state != placement::WorkerState::ready) {
      continue;
    }
    (spec.role == placement::Role::prefill ? prefill : decode) = true;
  }
  return prefill && decode;
}

}  // namespace twinpool::admission
