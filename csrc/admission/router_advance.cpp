// SPDX-License-Identifier: Apache-2.0
// From what workers and clients do to the next state. Late and doubled messages end here.
#include <algorithm>
#include <charconv>

#include "admission/router_core.h"

namespace twinpool::admission {

namespace {

std::int64_t parse_count(std::string_view event, std::string_view detail) {
  if (detail.empty()) {
    return 1;
  }
  std::int64_t count = 0;
  const auto [end, error] = std::from_chars(detail.data(), detail.data() + detail.size(), count);
  require(error == std::errc() && end == detail.data() + detail.size() && count >= 0,
          [&] { return "event=" + std::string(event) + "; detail is not a count"; });
  return count;
}

enum class Leg : std::uint8_t { unknown, prefill, decode };

Leg parse_leg(std::string_view event, std::string_view text) {
  if (text.empty()) {
    return Leg::unknown;
  }
  if (text == "prefill") {
    return Leg::prefill;
  }
  if (text == "decode") {
    return Leg::decode;
  }
  throw CoreError("event=" + std::string(event) + "; leg=" + std::string(text) + "; allowed: prefill, decode");
}

}  // namespace

Transition RouterCore::advance(double now, std::uint64_t id, std::uint32_t attempt, std::string_view event,
                               std::string_view detail) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) {
    require(id != 0 && id < next_request_, [&] { return "request " + std::to_string(id) + " was never submitted"; });
    return {false, "Forgotten", true, Cause::none, attempt};  // a message later than the end
  }
  Request& request = found->second;
  const auto result = [&](bool applied) {
    return Transition{applied, name_of(request.state), terminal(request.state), cause_of(request.state),
                      request.attempt};
  };
  // These two are about the request, whatever its attempt.
  if (event == Cancel::name) {
    return result(transition(now, request, Cancel{}));
  }
  if (event == Deadline::name) {
    return result(transition(now, request, Deadline{}));
  }

  require(attempt <= request.attempt,
          [&] { return "attempt=" + std::to_string(attempt) + "; the newest is " + std::to_string(request.attempt); });
  static const std::vector<std::string_view> names = event_names();
  require(std::find(names.begin(), names.end(), event) != names.end(),
          [&] { return "unknown event " + std::string(event); });
  if (attempt < request.attempt) {
    return result(false);
  }

  if (event == Token::name) {
    return result(on_tokens(now, request, detail, false));
  }
  if (event == Delivered::name) {
    return result(on_tokens(now, request, detail, true));
  }
  if (event == DecodeReserved::name) {
    request.computing_since = std::max(request.computing_since, now);
    return result(transition(now, request, DecodeReserved{}));
  }
  if (event == DecodeRefused::name) {
    return result(on_decode_refused(now, request));
  }
  if (event == PrefillStarted::name) {
    request.computing_since = std::max(request.computing_since, now);
    return result(transition(now, request, PrefillStarted{}));
  }
  if (event == FirstToken::name) {
    return result(on_first_token(now, request));
  }
  if (event == HandoffDone::name) {
    return result(transition(now, request, HandoffDone{}));
  }
  if (event == Finish::name) {
    return result(transition(now, request, Finish{}));
  }
  if (event == WorkerLost::name) {
    return result(on_worker_lost(now, request, detail));
  }
  if (event == AttemptFailed::name) {
    return result(on_attempt_failed(now, request, detail));
  }
  return result(on_requeue(now, request));
}

bool RouterCore::on_decode_refused(double now, Request& request) {
  DecodeRefused event{};
  const auto* prefilling = std::get_if<Prefilling>(&request.state);
  if (prefilling == nullptr) {
    return transition(now, request, std::move(event));
  }
  if (prefilling->reserved) {
    illegal_event(DecodeRefused::name, "Prefilling after decode_reserved");
  }
  ++request.refusals;
  event.again = request.refusals <= config_.max_refusals;
  if (placement::Worker* worker = workers_.get(request.decision.best.decode)) {
    worker->refused_until = now + config_.refusal_backoff_seconds;
    worker->refused_blocks = request.decision.best.prompt_blocks;
    worker->refused_report = worker->changes;
  }
  if (event.again) {
    pool_of(request).queue.refund(request.priority, request.tenant, request.charged);
    event.place = enter_queue(now, request, true);
    ++request.attempt;
  }
  return transition(now, request, std::move(event));
}

bool RouterCore::on_first_token(double now, Request& request) {
  const bool computed = std::holds_alternative<Prefilling>(request.state);
  const placement::Candidate& best = request.decision.best;
  if (placement::Worker* worker = computed && request.clean_sample ? workers_.get(best.prefill) : nullptr) {
    const double tokens = static_cast<double>(best.uncached_tokens);
    const double cached = static_cast<double>(request.prompt_tokens - best.uncached_tokens);
    worker->prefill.add(tokens, tokens * (cached + tokens / 2.0), std::max(0.0, now - request.computing_since));
  }
  return transition(now, request, FirstToken{});
}

bool RouterCore::on_tokens(double now, Request& request, std::string_view detail, bool delivered) {
  if (delivered) {
    parse_count(Delivered::name, detail);
    const bool applied = transition(now, request, Delivered{});
    request.delivered = request.delivered || applied;
    return applied;
  }
  const std::int64_t tokens = parse_count(Token::name, detail);
  Token event{};
  event.grown_blocks = 0;
  if (const placement::Worker* worker = workers_.get(request.decision.best.decode)) {
    const std::int64_t size = worker->spec.block_tokens;
    event.grown_blocks = (request.output_tokens + tokens) / size - request.output_tokens / size;
  }
  const bool applied = transition(now, request, event);
  if (applied) {
    request.output_tokens += tokens;
  }
  return applied;
}

bool RouterCore::on_worker_lost(double now, Request& request, std::string_view detail) {
  const Leg leg = parse_leg(WorkerLost::name, detail);
  WorkerLost event{};
  event.prefill_side = leg == Leg::prefill;
  event.again = attempts_left(request);
  const placement::Candidate pair = request.decision.best;
  const bool applied = transition(now, request, event);
  if (!applied || std::holds_alternative<Decoding>(request.state)) {
    return applied;
  }
  count_failure(now, request);
  request.avoid.push_back(leg == Leg::prefill ? pair.prefill : pair.decode);
  return true;
}

bool RouterCore::on_attempt_failed(double now, Request& request, std::string_view detail) {
  const std::size_t colon = detail.find(':');
  const Failure failure = parse_failure(detail.substr(0, colon));
  const Leg leg =
      colon == std::string_view::npos ? Leg::unknown : parse_leg(AttemptFailed::name, detail.substr(colon + 1));
  const placement::Candidate pair = request.decision.best;
  const placement::WorkerRef at = leg == Leg::prefill ? pair.prefill : pair.decode;
  AttemptFailed event{};
  event.cause = failure.cause;
  const bool left = failure.counted ? attempts_left(request) : request.refusals < config_.max_refusals;
  event.again = failure.retryable && left && (failure.same_worker || has_other_worker(at));
  const bool applied = transition(now, request, event);
  if (!applied) {
    return false;
  }
  if (failure.counted) {
    count_failure(now, request);
  } else {
    ++request.refusals;
    request.return_at = now + config_.refusal_backoff_seconds;
  }
  if (leg != Leg::decode) {
    request.avoid.push_back(pair.prefill);
  }
  if (leg != Leg::prefill) {
    request.avoid.push_back(pair.decode);
  }
  return true;
}

bool RouterCore::has_other_worker(placement::WorkerRef ref) const noexcept {
  const placement::Worker* worker = workers_.get(ref);
  if (worker == nullptr) {
    return true;
  }
  for (const std::uint32_t slot : workers_.of_pool(worker->pool_id)) {
    const placement::Worker& other = workers_.at(slot);
    if (&other != worker && other.spec.role == worker->spec.role && other.spec.state == placement::WorkerState::ready) {
      return true;
    }
  }
  return false;
}

bool RouterCore::on_requeue(double now, Request& request) {
  Requeue event{};
  if (!std::holds_alternative<Retrying>(request.state)) {
    return transition(now, request, std::move(event));
  }
  pool_of(request).queue.refund(request.priority, request.tenant, request.charged);
  request.queue_until = now + config_.queue_ttl_seconds;
  event.place = enter_queue(now, request, true);
  ++request.attempt;
  return transition(now, request, std::move(event));
}

void RouterCore::changed(double now, Request& request, std::size_t before) {
  --in_state_[before];
  ++in_state_[request.state.index()];
  Pool& of = pool_of(request);
  const std::tuple<int, double, std::uint64_t> entry{request.priority, -request.placed_at, ~request.id};
  if (std::holds_alternative<Prefilling>(request.state) && request.preemptible && !request.delivered) {
    of.victims.insert(entry);
  } else {
    of.victims.erase(entry);
  }
  set_timer(request);
  if (!terminal(request.state)) {
    return;
  }
  of.ended_requests.add(now, 1.0);
  const std::int64_t asked = request.max_new_tokens * request.choices;
  if (std::holds_alternative<Finished>(request.state) && request.output_tokens > 0) {
    of.output_ratio.add(static_cast<double>(request.output_tokens) / static_cast<double>(asked));
  }
  note_slip(now, request);
  // What was paid for and not used goes back to the tenant's bucket.
  if (!request.placed) {
    tenants_.give_back(request.tenant, request.bucket_tokens);
  } else if (request.output_tokens > 0) {
    tenants_.give_back(request.tenant, static_cast<double>(std::max<std::int64_t>(0, asked - request.output_tokens)));
  }
  request.hashes = {};
}

void RouterCore::set_timer(Request& request) {
  double at = terminal(request.state) ? k_never : request.deadline;
  if (std::holds_alternative<Queued>(request.state)) {
    at = std::min(at, request.queue_until);
  }
  if (at == request.timer_at) {
    return;
  }
  if (request.timer_at != k_never) {
    timers_.erase({request.timer_at, request.id});
  }
  if (at != k_never) {
    timers_.emplace(at, request.id);
  }
  request.timer_at = at;
}

void RouterCore::forget(std::uint64_t id) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) {
    require(id != 0 && id < next_request_, [&] { return "request " + std::to_string(id) + " was never submitted"; });
    return;
  }
  require(terminal(found->second.state),
          [&] { return "forget; state=" + std::string(name_of(found->second.state)) + "; allowed: a terminal one"; });
  --in_state_[found->second.state.index()];
  by_request_id_.erase(found->second.request_id);
  requests_.erase(found);
}

}  // namespace twinpool::admission
