// SPDX-License-Identifier: Apache-2.0
#include "admission/fair_queue.h"

#include <algorithm>

namespace twinpool::admission {

QueuePlace FairQueue::push(double now, const QueueItem& item) {
  const Entry entry{item, item.priority, now + ageing_seconds_};
  items_.emplace(item.request, entry);
  insert(entry);
  tokens_ += item.tokens;
  bytes_ += item.bytes;
  if (entry.band < k_highest_priority) {
    promotions_.emplace(entry.promote_at, item.request);
  }
  return QueuePlace(*this, item.request);
}

void FairQueue::age(double now) {
  while (!promotions_.empty() && promotions_.begin()->first <= now) {
    const std::uint64_t request = promotions_.begin()->second;
    promotions_.erase(promotions_.begin());
    Entry& entry = items_.at(request);
    extract(entry);
    const double late = now - entry.promote_at;
    const int steps = 1 + static_cast<int>(std::min(late / ageing_seconds_, 2.0 * k_highest_priority));
    entry.band = std::min(entry.band + steps, k_highest_priority);
    entry.promote_at += steps * ageing_seconds_;
    insert(entry);
    if (entry.band < k_highest_priority) {
      promotions_.emplace(entry.promote_at, request);
    }
  }
}

void FairQueue::refund(TenantId tenant, int band_priority, double charged) noexcept {
  const auto band = bands_.find(band_priority);
  if (band == bands_.end()) {
    return;
  }
  const auto flow = band->second.flows.find(tenant);
  if (flow == band->second.flows.end()) {
    return;
  }
  Flow& f = flow->second;
  const bool active = !f.waiting.empty();
  if (active) {
    band->second.active.erase({f.virtual_time, tenant});
  }
  f.virtual_time = std::max(0.0, f.virtual_time - charged);
  if (active) {
    band->second.active.emplace(f.virtual_time, tenant);
  }
}

int FairQueue::band(std::uint64_t request) const noexcept {
  const auto it = items_.find(request);
  return it == items_.end() ? 0 : it->second.band;
}

std::int64_t FairQueue::tokens_ahead(int priority) const noexcept {
  std::int64_t tokens = 0;
  for (const auto& [band_priority, band] : bands_) {
    if (band_priority < priority) {
      break;
    }
    tokens += band.tokens;
  }
  return tokens;
}

void FairQueue::insert(const Entry& entry) {
  Band& band = bands_[entry.band];
  Flow& flow = band.flows[entry.item.tenant];
  if (flow.waiting.empty()) {
    // Who was idle has saved nothing up: it starts level with the one served last.
    flow.virtual_time = std::max(flow.virtual_time, band.virtual_time);
    band.active.emplace(flow.virtual_time, entry.item.tenant);
  }
  flow.waiting.insert(key(entry.item));
  band.tokens += entry.item.tokens;
}

void FairQueue::extract(const Entry& entry) {
  const auto found = bands_.find(entry.band);
  Band& band = found->second;
  Flow& flow = band.flows.at(entry.item.tenant);
  flow.waiting.erase(key(entry.item));
  band.tokens -= entry.item.tokens;
  if (!flow.waiting.empty()) {
    return;
  }
  band.active.erase({flow.virtual_time, entry.item.tenant});
  if (band.active.empty()) {
    bands_.erase(found);  // the end of a busy period: all tenants are level again
  } else if (band.flows.size() > 2 * band.active.size() + 64) {
    std::erase_if(band.flows, [&](const auto& idle) {
      return idle.second.waiting.empty() && idle.second.virtual_time <= band.virtual_time;
    });
  }
}

void FairQueue::charge(const Entry& entry) {
  Band& band = bands_.at(entry.band);
  Flow& flow = band.flows.at(entry.item.tenant);
  band.active.erase({flow.virtual_time, entry.item.tenant});
  band.virtual_time = flow.virtual_time;
  flow.virtual_time += entry.item.cost / entry.item.weight;
  band.active.emplace(flow.virtual_time, entry.item.tenant);
}

void FairQueue::erase(std::uint64_t request) {
  const auto it = items_.find(request);
  if (it == items_.end()) {
    return;
  }
  const Entry& entry = it->second;
  extract(entry);
  tokens_ -= entry.item.tokens;
  bytes_ -= entry.item.bytes;
  promotions_.erase({entry.promote_at, request});
  items_.erase(it);
}

}  // namespace twinpool::admission
