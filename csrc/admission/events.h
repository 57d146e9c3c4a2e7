// SPDX-License-Identifier: Apache-2.0
// The events of a request: one type each, with one overload for each state that it is legal in. The result type is
// the target (``Either`` where the event's data decide), ``Ignored`` means: late or doubled, nothing happens. A state
// without an overload makes the event an error. The table in docs/lifecycle.md is generated from these signatures.
#pragma once

#include <string_view>
#include <utility>
#include <variant>

#include "admission/states.h"

namespace twinpool::admission {

struct Ignored {};

template <typename... Targets>
using Either = std::variant<Targets...>;

/// Nothing leaves a terminal state, and no message that comes after the end is an error.
struct IgnoredAtEnd {
  Ignored operator()(Finished&&) const { return {}; }
  Ignored operator()(Rejected&&) const { return {}; }
  Ignored operator()(Cancelled&&) const { return {}; }
  Ignored operator()(Expired&&) const { return {}; }
  Ignored operator()(Failed&&) const { return {}; }
};

/// What the legs of an attempt report is also ignored while they are being cleared.
struct LegEvent : IgnoredAtEnd {
  using IgnoredAtEnd::operator();
  Ignored operator()(Retrying&&) const { return {}; }
};

// --- made by the core itself ----------------------------------------------------------------------------------------

struct Enqueue {
  static constexpr std::string_view name = "enqueue";
  TenantSlot tenant;
  QueuePlace place;
  Queued operator()(Received&&) { return {std::move(tenant), std::move(place)}; }
};

struct Reject {
  static constexpr std::string_view name = "reject";
  Cause cause;
  Rejected operator()(Received&&) const { return {cause}; }
  Rejected operator()(Queued&&) const { return {cause}; }
};

struct Place {
  static constexpr std::string_view name = "place";
  placement::PrefillWork work;
  placement::TransferSlot transfer;
  placement::DecodeBlocks blocks;
  Prefilling operator()(Queued&& from) {
    return {std::move(from.tenant), std::move(work), std::move(transfer), std::move(blocks)};
  }
};

struct QueueTimeout {
  static constexpr std::string_view name = "queue_timeout";
  Cause cause;
  Expired operator()(Queued&&) const { return {cause}; }
};

struct Preempt {
  static constexpr std::string_view name = "preempt";
  Retrying operator()(Prefilling&& from) const { return {std::move(from.tenant), Cause::no_capacity}; }
};

// --- from the router ------------------------------------------------------------------------------------------------

struct DecodeReserved : LegEvent {
  static constexpr std::string_view name = "decode_reserved";
  using LegEvent::operator();
  Prefilling operator()(Prefilling&& from) const {
    from.blocks.acknowledge();
    from.reserved = true;
    return std::move(from);
  }
};

/// Nothing runs for the attempt, so it goes straight back to its place in the queue.
struct DecodeRefused : LegEvent {
  static constexpr std::string_view name = "decode_refused";
  bool again;  // refusals are left
  QueuePlace place;
  using LegEvent::operator();
  Either<Queued, Failed> operator()(Prefilling&& from) {
    if (again) {
      return Queued{std::move(from.tenant), std::move(place)};
    }
    return Failed{Cause::no_capacity};
  }
};

struct PrefillStarted : LegEvent {
  static constexpr std::string_view name = "prefill_started";
  using LegEvent::operator();
  Prefilling operator()(Prefilling&& from) const {
    from.started = true;
    return std::move(from);
  }
};

struct FirstToken : LegEvent {
  static constexpr std::string_view name = "first_token";
  using LegEvent::operator();
  HandingOff operator()(Prefilling&& from) const {
    return {std::move(from.tenant), std::move(from.transfer), std::move(from.blocks)};
  }
  Ignored operator()(Decoding&&) const { return {}; }  // overtaken by handoff_done on the other stream
};

struct HandoffDone : LegEvent {
  static constexpr std::string_view name = "handoff_done";
  using LegEvent::operator();
  Decoding operator()(HandingOff&& from) const { return {std::move(from.tenant), std::move(from.blocks)}; }
  Decoding operator()(Prefilling&& from) const {  // has overtaken first_token: all KV is there, so prefill is done
    from.blocks.acknowledge();
    return {std::move(from.tenant), std::move(from.blocks)};
  }
};

struct Token : LegEvent {
  static constexpr std::string_view name = "token";
  std::int64_t grown_blocks;
  using LegEvent::operator();
  Decoding operator()(Decoding&& from) const {
    from.blocks.grow(grown_blocks);
    return std::move(from);
  }
};

/// The client has tokens: placed anew, the answer goes on behind them.
struct Delivered : LegEvent {
  static constexpr std::string_view name = "delivered";
  using LegEvent::operator();
  HandingOff operator()(HandingOff&& from) const { return std::move(from); }
  Decoding operator()(Decoding&& from) const { return std::move(from); }
};

struct Finish : LegEvent {
  static constexpr std::string_view name = "finished";
  using LegEvent::operator();
  Finished operator()(HandingOff&&) const { return {}; }
  Finished operator()(Decoding&&) const { return {}; }
};

struct Cancel : IgnoredAtEnd {
  static constexpr std::string_view name = "cancel";
  using IgnoredAtEnd::operator();
  Cancelled operator()(Queued&&) const { return {}; }
  Cancelled operator()(Prefilling&&) const { return {}; }
  Cancelled operator()(HandingOff&&) const { return {}; }
  Cancelled operator()(Decoding&&) const { return {}; }
  Cancelled operator()(Retrying&&) const { return {}; }
};

struct Deadline : IgnoredAtEnd {
  static constexpr std::string_view name = "deadline";
  using IgnoredAtEnd::operator();
  Expired operator()(Queued&&) const { return {Cause::deadline_exceeded}; }
  Expired operator()(Prefilling&&) const { return {Cause::deadline_exceeded}; }
  Expired operator()(HandingOff&&) const { return {Cause::deadline_exceeded}; }
  Expired operator()(Decoding&&) const { return {Cause::deadline_exceeded}; }
  Expired operator()(Retrying&&) const { return {Cause::deadline_exceeded}; }
};

struct WorkerLost : LegEvent {
  static constexpr std::string_view name = "worker_lost";
  bool again;         // attempts are left, or resumes if the client has tokens
  bool prefill_side;  // the prefill worker; it no longer matters once the hand-off is done
  using LegEvent::operator();
  Either<Retrying, Failed> operator()(Prefilling&& from) const { return end(std::move(from.tenant)); }
  Either<Retrying, Failed> operator()(HandingOff&& from) const { return end(std::move(from.tenant)); }
  Either<Decoding, Retrying, Failed> operator()(Decoding&& from) const {
    if (prefill_side) {
      return std::move(from);
    }
    if (again) {
      return Retrying{std::move(from.tenant), Cause::worker_lost};
    }
    return Failed{Cause::worker_lost};
  }

 private:
  Either<Retrying, Failed> end(TenantSlot&& tenant) const {
    if (again) {
      return Retrying{std::move(tenant), Cause::worker_lost};
    }
    return Failed{Cause::worker_lost};
  }
};

struct AttemptFailed : LegEvent {
  static constexpr std::string_view name = "attempt_failed";
  bool again;
  Cause cause;
  using LegEvent::operator();
  Either<Retrying, Failed, Expired> operator()(Prefilling&& from) const { return end(std::move(from.tenant)); }
  Either<Retrying, Failed, Expired> operator()(HandingOff&& from) const { return end(std::move(from.tenant)); }
  Either<Retrying, Failed, Expired> operator()(Decoding&& from) const { return end(std::move(from.tenant)); }

 private:
  Either<Retrying, Failed, Expired> end(TenantSlot&& tenant) const {
    if (cause == Cause::deadline_exceeded) {
      return Expired{cause};
    }
    if (again) {
      return Retrying{std::move(tenant), cause};
    }
    return Failed{cause};
  }
};

/// Both legs of the failed attempt are cleared.
struct Requeue : IgnoredAtEnd {
  static constexpr std::string_view name = "requeue";
  QueuePlace place;
  using IgnoredAtEnd::operator();
  Queued operator()(Retrying&& from) { return {std::move(from.tenant), std::move(place)}; }
};

template <typename... Events>
struct EventList {};
/// In the order of the table. The first five are made by the core itself.
using AllEvents =
    EventList<Enqueue, Reject, Place, QueueTimeout, Preempt, DecodeReserved, DecodeRefused, PrefillStarted, FirstToken,
              HandoffDone, Token, Delivered, Finish, Cancel, Deadline, WorkerLost, AttemptFailed, Requeue>;

}  // namespace twinpool::admission
