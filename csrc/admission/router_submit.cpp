// SPDX-License-Identifier: Apache-2.0
// From the client's request to a place in the queue, or a reasoned refusal.
#include <algorithm>
#include <cmath>

#include "admission/router_core.h"
#include "placement/placer_detail.h"

namespace twinpool::admission {

namespace {

std::string limit_text(const char* name, double value) {
  std::string number = std::to_string(value);
  number.erase(number.find_last_not_of('0') + 1);
  if (number.back() == '.') {
    number.pop_back();
  }
  return std::string(name) + "=" + number;
}

}  // namespace

Submission RouterCore::submit(double now, const SubmitArguments& arguments) {
  check_arguments(now, arguments);
  const auto refuse = [this](const Refusal& refusal) {
    State state = Received{};
    apply(state, Reject{refusal.cause});
    ++refused_[refusal.cause];
    return Submission{false, 0, cause_of(state), refusal.limit, refusal.retry_after};
  };
  if (by_request_id_.contains(arguments.request_id)) {
    return refuse({Cause::duplicate_request, "", 0.0});
  }
  const TenantId tenant = tenants_.id(now, arguments.tenant);
  Pool& to = pool(arguments.pool);

  Refusal refusal = check_tenant(now, arguments, tenant);
  if (refusal.cause == Cause::none) {
    refusal = check_capacity(arguments, to);
  }
  if (refusal.cause != Cause::none) {
    return refuse(refusal);
  }

  Request request;
  request.request_id = arguments.request_id;
  request.adapter = arguments.adapter;
  request.pool = to.id;
  request.tenant = tenant;
  request.prompt_tokens = arguments.prompt_tokens;
  request.max_new_tokens = arguments.max_new_tokens;
  request.choices = arguments.choices;
  request.bytes = arguments.bytes;
  request.preemptible = arguments.preemptible;
  request.priority = static_cast<int>(std::min<std::int64_t>(arguments.priority, tenants_.limits(tenant).max_priority));
  request.arrival = now;
  if (arguments.deadline > 0) {
    request.deadline = arguments.deadline;
  }
  request.hashes.assign(arguments.hashes.begin(), arguments.hashes.end());
  for (const auto& [name, incarnation, blocks] : arguments.prefer) {
    if (const placement::Worker* worker = workers_.find(name, incarnation)) {
      request.prefer.push_back({workers_.ref(*worker), blocks});
    }
  }

  refusal = check_deadline(now, request, to);
  if (refusal.cause == Cause::none) {
    refusal = check_queue(now, request, to);
  }
  if (refusal.cause != Cause::none) {
    return refuse(refusal);
  }

  // Nothing refuses from here on.
  request.id = next_request_++;
  request.bucket_tokens =
      static_cast<double>(request.prompt_tokens) + static_cast<double>(request.max_new_tokens * request.choices);
  tenants_.take(now, tenant, request.bucket_tokens);
  request.queue_until = now + config_.queue_ttl_seconds;
  const std::uint64_t id = request.id;
  by_request_id_.emplace(request.request_id, id);
  Request& stored = requests_.emplace(id, std::move(request)).first->second;
  ++in_state_[stored.state.index()];
  TenantSlot slot = tenants_.enter(tenant);
  QueuePlace place = enter_queue(now, stored, false);
  transition(now, stored, Enqueue{std::move(slot), std::move(place)});
  return Submission{true, id, Cause::none, "", 0.0};
}

void RouterCore::check_arguments(double now, const SubmitArguments& arguments) const {
  require(std::isfinite(now), "now is not finite");
  require(!arguments.request_id.empty(), "request_id is empty");
  require(arguments.prompt_tokens >= 1, "prompt_tokens; allowed: at least 1");
  require(arguments.max_new_tokens >= 1, "max_new_tokens; allowed: at least 1");
  require(arguments.choices >= 1 && arguments.choices <= 1024, "n; allowed: 1 to 1024");
  require(arguments.bytes >= 0, "bytes; allowed: 0 or more");
  require(arguments.priority >= -100 && arguments.priority <= 100, "priority; allowed: -100 to 100");
  require(std::isfinite(arguments.deadline) && arguments.deadline >= 0, "deadline; allowed: 0 (none) or a time");
  require(arguments.hashes.size() % prefix::k_hash_bytes == 0, "hashes; allowed: 16 bytes each");
  require(static_cast<std::int64_t>(arguments.hashes.size() / prefix::k_hash_bytes) <= arguments.prompt_tokens,
          "hashes; allowed: at most one a prompt token");
  require(arguments.prefer.size() <= k_prefer_max, "prefer; allowed: at most 8 workers");
  const auto blocks = static_cast<std::int64_t>(arguments.hashes.size() / prefix::k_hash_bytes);
  require(std::ranges::all_of(arguments.prefer,
                              [&](const SessionWorker& w) { return std::get<2>(w) >= 0 && std::get<2>(w) <= blocks; }),
          "blocks of prefer; allowed: 0 to the blocks of the prompt");
}

RouterCore::Refusal RouterCore::check_tenant(double now, const SubmitArguments& arguments, TenantId tenant) {
  const TenantLimits& limits = tenants_.limits(tenant);
  if (limits.max_requests > 0 && tenants_.in_flight(tenant) >= limits.max_requests) {
    // One of them has to end: what the pool ends a second, shared by all in flight.
    Pool& from = pool(arguments.pool);
    const double rate = from.ended_requests.per_second(now);
    const double wait = rate > 0 ? 1.0 / rate : k_unknown_retry_seconds;
    return {Cause::tenant_concurrency, limit_text("max_tenant_requests", static_cast<double>(limits.max_requests)),
            clamp_retry(wait)};
  }
  const double tokens =
      static_cast<double>(arguments.prompt_tokens) + static_cast<double>(arguments.max_new_tokens * arguments.choices);
  const double wait = tenants_.wait_for(now, tenant, tokens);
  if (wait > 0) {
    return {Cause::tenant_rate, limit_text("tenant_tokens_per_second", limits.tokens_per_second), clamp_retry(wait)};
  }
  return {};
}

RouterCore::Refusal RouterCore::check_capacity(const SubmitArguments& arguments, Pool& to) const {
  bool prefill = config_.local_prefill != 0;
  bool decode = false;
  bool prefill_fits = prefill;
  bool decode_fits = false;
  for (const std::uint32_t slot : workers_.of_pool(to.id)) {
    const placement::WorkerSpec& spec = workers_.at(slot).spec;
    const std::int64_t blocks = (arguments.prompt_tokens + spec.block_tokens - 1) / spec.block_tokens;
    if (spec.role == placement::Role::prefill) {
      prefill = true;
      prefill_fits = prefill_fits || blocks <= spec.num_blocks;
    } else {
      decode = true;
      decode_fits =
          decode_fits || (blocks + arguments.choices <= spec.num_blocks && arguments.choices <= spec.max_num_seqs);
    }
  }
  if (!prefill || !decode) {
    if (config_.refuse_without_workers == 0) {
      return {};
    }
    return {Cause::no_workers, prefill ? "decode workers=0" : "prefill workers=0",
            clamp_retry(k_unknown_retry_seconds)};
  }
  if (!prefill_fits || !decode_fits) {
    return {Cause::exceeds_capacity, prefill_fits ? "decode worker blocks" : "prefill worker blocks", 0.0};
  }
  return {};
}

RouterCore::Refusal RouterCore::check_deadline(double now, const Request& request, Pool& to) {
  if (request.deadline <= now) {
    return {Cause::deadline_exceeded, "deadline", 0.0};
  }
  if (request.deadline == k_never || config_.early_rejection == 0) {
    return {};
  }
  decide(now, request, scratch_, true);
  if (scratch_.obstacle != placement::Obstacle::none) {
    return {};
  }
  const placement::Worker* worker = workers_.get(scratch_.best.prefill);
  if (worker == nullptr || !worker->prefill.measured()) {
    return {};  // a guess is no reason to refuse
  }
  const double queued = static_cast<double>(to.queue.tokens_ahead(request.priority));
  const double wait = drain_seconds(now, to, queued);
  const double first = wait + scratch_.best.terms.first_token();
  const double all = wait + predicted_seconds(now, request, scratch_.best);
  const double missing = now + all - request.deadline;
  if (missing <= 0) {
    return {};
  }
  const bool late = now + first > request.deadline;
  return {Cause::deadline_unreachable,
          late ? limit_text("predicted_ttft_seconds", first) : limit_text("predicted_answer_seconds", all),
          clamp_retry(missing)};
}

RouterCore::Refusal RouterCore::check_queue(double now, const Request& request, Pool& to) {
  if (to.queue.requests() == 0) {
    return {};  // what is alone always fits, or it could never be served
  }
  const auto full = [&](const char* name, std::int64_t limit, std::int64_t is, std::int64_t more) -> Refusal {
    if (limit <= 0 || is + more <= limit) {
      return {};
    }
    const double mean_tokens = static_cast<double>(to.queue.tokens()) / static_cast<double>(to.queue.requests());
    const double excess = static_cast<double>(is + more - limit) / static_cast<double>(std::max<std::int64_t>(is, 1));
    const double tokens = std::max(mean_tokens, excess * static_cast<double>(to.queue.tokens()));
    const double seconds = drain_seconds(now, to, tokens);
    return {Cause::queue_full, limit_text(name, static_cast<double>(limit)),
            clamp_retry(seconds > 0 ? seconds : k_unknown_retry_seconds)};
  };
  Refusal refusal =
      full("max_queue_requests", config_.max_queue_requests, static_cast<std::int64_t>(to.queue.requests()), 1);
  if (refusal.cause == Cause::none) {
    refusal = full("max_queue_tokens", config_.max_queue_tokens, to.queue.tokens(), request.prompt_tokens);
  }
  if (refusal.cause == Cause::none) {
    refusal = full("max_queue_bytes", config_.max_queue_bytes, to.queue.bytes(), request.bytes);
  }
  return refusal;
}

QueuePlace RouterCore::enter_queue(double now, Request& request, bool front) {
  Pool& to = pool_of(request);
  QueueItem item;
  item.request = request.id;
  item.sequence = front ? request.id : ++sequence_;
  item.tenant = request.tenant;
  item.weight = tenants_.limits(request.tenant).weight;
  item.priority = request.priority;
  item.due = request.deadline == k_never ? due_without_deadline(now, request) : request.deadline;
  const std::int64_t output = to.output_ratio.expect(request.max_new_tokens) * request.choices;
  item.cost = static_cast<double>(request.prompt_tokens + output);
  item.tokens = request.prompt_tokens;
  item.bytes = request.bytes;
  item.front = front;
  request.queued_at = now;
  request.charged = item.cost / item.weight;
  request.blocked_version = UINT64_MAX;
  request.bypassed = 0;
  return to.queue.push(now, item);
}

// No deadline counts as the end of the longest wait: else it would always be passed by those that have one. Among those
// without, little work goes first (most requests then wait least), and waiting counts: a stretch of its own compute is
// what a request may be passed for.
double RouterCore::due_without_deadline(double now, const Request& request) {
  const double due = request.arrival + config_.queue_ttl_seconds;
  if (config_.order_stretch == 0) {
    return due;
  }
  index_.longest_prefix(request.hashes, lengths_);
  const bool anywhere = config_.prefix_fetch != 0;
  const placement::Worker* like = nullptr;
  std::uint32_t held = 0;
  for (const std::uint32_t slot : workers_.of_pool(request.pool)) {
    const placement::Worker& worker = workers_.at(slot);
    const bool computes = worker.spec.role == placement::Role::prefill && worker.usable(now);
    if (computes && like == nullptr) {
      like = &worker;
    }
    if (computes || anywhere) {
      held = std::max(held, lengths_.blocks[worker.index_slot]);
    }
  }
  if (like == nullptr) {
    return due;
  }
  const std::int64_t cached =
      std::min(static_cast<std::int64_t>(held) * like->spec.block_tokens, request.prompt_tokens - 1);
  return due + config_.order_stretch * placement::prefill_seconds(*like, request.prompt_tokens - cached, cached);
}

// Seconds until the pool has taken so many queued prompt tokens; 0 if its speed is unknown. The greater of what it
// could compute and what it took lately: a wrong refusal is worse than a late one.
double RouterCore::drain_seconds(double now, Pool& from, double tokens) const {
  double rate = from.drained_tokens.per_second(now);
  double capacity = 0.0;
  for (const std::uint32_t slot : workers_.of_pool(from.id)) {
    const placement::Worker& worker = workers_.at(slot);
    if (worker.spec.role != placement::Role::prefill || !worker.usable(now) || !worker.prefill.measured()) {
      continue;
    }
    const double seconds = worker.prefill.coefficients()[1];
    if (seconds > 0) {
      capacity += 1.0 / seconds;
    }
  }
  rate = std::max(rate, capacity);
  return rate > 0 ? tokens / rate : 0.0;
}

double RouterCore::clamp_retry(double seconds) const noexcept {
  return std::clamp(seconds, config_.retry_after_min_seconds,
                    std::max(config_.retry_after_min_seconds, config_.retry_after_max_seconds));
}

Pool& RouterCore::pool(const std::string& name) {
  const std::uint32_t id = workers_.pool_id(name);
  while (pools_.size() <= id) {
    pools_.push_back(std::make_unique<Pool>(static_cast<std::uint32_t>(pools_.size()), config_));
  }
  return *pools_[id];
}

}  // namespace twinpool::admission
