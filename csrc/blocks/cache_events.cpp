// SPDX-License-Identifier: Apache-2.0
#include "blocks/cache_events.h"

namespace twinpool {

void CacheEvents::stored(const Hash128& hash, const Hash128& parent) {
  // The next link of the chain that was stored last goes into the same event.
  if (!runs_.empty() && runs_.back().kind == Kind::stored && hashes_.back() == parent) {
    ++runs_.back().count;
  } else {
    runs_.push_back({Kind::stored, parent, 1});
  }
  hashes_.push_back(hash);
}

void CacheEvents::removed(const Hash128& hash, bool announced) {
  const Kind kind = announced ? Kind::removed_announced : Kind::removed_untold;
  if (!runs_.empty() && runs_.back().kind == kind) {
    ++runs_.back().count;
  } else {
    runs_.push_back({kind, {}, 1});
  }
  hashes_.push_back(hash);
}

std::vector<CacheEvent> CacheEvents::drain() {
  std::vector<CacheEvent> events;
  std::size_t at = 0;
  for (const Run& run : runs_) {
    const bool stored = run.kind == Kind::stored;
    const auto first = hashes_.begin() + static_cast<std::ptrdiff_t>(at);
    const auto last = first + static_cast<std::ptrdiff_t>(run.count);
    at += run.count;
    if (!stored && !events.empty() && !events.back().stored) {
      events.back().hashes.insert(events.back().hashes.end(), first, last);
    } else {
      events.push_back({stored, run.parent, {first, last}});
    }
  }
  runs_.clear();
  hashes_.clear();
  ++epoch_;
  return events;
}

}  // namespace twinpool
