// SPDX-License-Identifier: Apache-2.0
// The states of a request. Each owns exactly what may be held in it; all are move-only, so a transition moves what
// goes on and drops, and thereby gives back, what does not.
#pragma once

#include <string_view>
#include <variant>

#include "admission/cause.h"
#include "admission/fair_queue.h"
#include "admission/tenants.h"
#include "placement/reservation.h"

namespace twinpool::admission {

/// Checked by nothing yet; lives only within ``submit``.
struct Received {
  static constexpr std::string_view name = "Received";
};

/// Waits for a pair of workers with room.
struct Queued {
  static constexpr std::string_view name = "Queued";
  TenantSlot tenant;
  QueuePlace place;
  template <typename A>
  void archive(A& a) {
    a(tenant, place);
  }
};

/// Placed: the decode worker is asked for blocks, then the prefill worker computes.
struct Prefilling {
  static constexpr std::string_view name = "Prefilling";
  TenantSlot tenant;
  placement::PrefillWork work;
  placement::TransferSlot transfer;
  placement::DecodeBlocks blocks;
  bool reserved = false;  // the decode worker holds its blocks
  bool started = false;   // the prefill worker computes
  template <typename A>
  void archive(A& a) {
    a(tenant, work, transfer, blocks, reserved, started);
  }
};

/// The first token is there; the rest of the KV is on its way.
struct HandingOff {
  static constexpr std::string_view name = "HandingOff";
  TenantSlot tenant;
  placement::TransferSlot transfer;
  placement::DecodeBlocks blocks;
  template <typename A>
  void archive(A& a) {
    a(tenant, transfer, blocks);
  }
};

/// The decode worker holds the KV and generates.
struct Decoding {
  static constexpr std::string_view name = "Decoding";
  TenantSlot tenant;
  placement::DecodeBlocks blocks;
  template <typename A>
  void archive(A& a) {
    a(tenant, blocks);
  }
};

/// The attempt is over; its legs are being cleared before the next one.
struct Retrying {
  static constexpr std::string_view name = "Retrying";
  TenantSlot tenant;
  Cause cause = Cause::none;
  template <typename A>
  void archive(A& a) {
    a(tenant, cause);
  }
};

struct Finished {
  static constexpr std::string_view name = "Finished";
  static constexpr Cause cause = Cause::none;
};

/// Refused before any work was placed.
struct Rejected {
  static constexpr std::string_view name = "Rejected";
  Cause cause = Cause::none;
  template <typename A>
  void archive(A& a) {
    a(cause);
  }
};

struct Cancelled {
  static constexpr std::string_view name = "Cancelled";
  static constexpr Cause cause = Cause::cancelled;
};

/// A limit of time passed.
struct Expired {
  static constexpr std::string_view name = "Expired";
  Cause cause = Cause::none;
  template <typename A>
  void archive(A& a) {
    a(cause);
  }
};

struct Failed {
  static constexpr std::string_view name = "Failed";
  Cause cause = Cause::none;
  template <typename A>
  void archive(A& a) {
    a(cause);
  }
};

using State = std::variant<Received, Queued, Prefilling, HandingOff, Decoding, Retrying, Finished, Rejected, Cancelled,
                           Expired, Failed>;

template <typename S>
inline constexpr bool is_terminal =
    std::is_same_v<S, Finished> || std::is_same_v<S, Rejected> || std::is_same_v<S, Cancelled> ||
    std::is_same_v<S, Expired> || std::is_same_v<S, Failed>;

}  // namespace twinpool::admission
