// SPDX-License-Identifier: Apache-2.0
// Helpers that the files of the placer share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "placement/placer.h"

namespace twinpool::placement {

inline constexpr double k_alike = 0.10;  // relative; models are not more exact than this
inline constexpr double k_tie = 1e-6;    // relative; costs closer than this are equal

inline std::int64_t blocks_of(std::int64_t tokens, std::int64_t block_tokens) {
  return (tokens + block_tokens - 1) / block_tokens;
}

inline bool contains(std::span<const WorkerRef> refs, std::uint32_t slot, std::uint64_t epoch) {
  return std::any_of(refs.begin(), refs.end(),
                     [&](const WorkerRef& ref) { return ref.slot == slot && ref.epoch == epoch; });
}

inline bool contains(std::span<const Preferred> preferred, std::uint32_t slot, std::uint64_t epoch) {
  return std::any_of(preferred.begin(), preferred.end(),
                     [&](const Preferred& p) { return p.worker.slot == slot && p.worker.epoch == epoch; });
}

/// When a worker that is out for a while comes back; the earliest of all is when to look again.
/// ``at``: when a back-off or quarantine ends. One that has ended already (a worker on probation) says nothing.
inline void note_retry(Decision& decision, double now, double at) {
  if (at > now && (decision.retry_at == 0.0 || at < decision.retry_at)) {
    decision.retry_at = at;
  }
}

inline double prefill_seconds(const Worker& worker, std::int64_t uncached, std::int64_t cached_tokens) {
  const double tokens = static_cast<double>(uncached);
  return worker.prefill.predict(tokens, tokens * (static_cast<double>(cached_tokens) + tokens / 2.0));
}

}  // namespace twinpool::placement
