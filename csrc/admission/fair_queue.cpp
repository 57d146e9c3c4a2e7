// SPDX-License-Identifier: Apache-2.0
#include "admission/fair_queue.h"

#include <algorithm>

namespace twinpool::admission {

QueuePlace FairQueue::push(double now, const QueueItem& item) {
  const LineId id{item.priority, item.tenant};
  Band& band = bands_[item.priority];
  Line& line = lines_[id];
  if (line.waiting.empty()) {
    // Who was idle has saved nothing up: it starts level with the one served last.
    line.virtual_time = std::max(line.virtual_time, band.virtual_time);
    line.promote_at = now + ageing_seconds_;
    ++band.lines;
    compete(id, line, item.priority);
  }
  line.waiting.insert(key(item));
  items_.emplace(item.request, item);
  band.tokens += item.tokens;
  tokens_ += item.tokens;
  bytes_ += item.bytes;
  return {*this, item.request};
}

void FairQueue::age(double now) {
  while (!promotions_.empty() && promotions_.begin()->first <= now) {
    const LineId id = promotions_.begin()->second;
    Line& line = lines_.at(id);
    withdraw(id, line);
    const double steps = 1.0 + std::min((now - line.promote_at) / ageing_seconds_, 2.0 * k_highest_priority);
    line.promote_at += static_cast<int>(steps) * ageing_seconds_;
    compete(id, line, std::min(line.level + static_cast<int>(steps), k_highest_priority));
  }
}

void FairQueue::set_ageing(double now, double seconds) {
  ageing_seconds_ = seconds;
  for (auto& [id, line] : lines_) {
    const double latest = now + seconds;
    if (line.promote_at > latest) {
      if (promotions_.erase({line.promote_at, id}) > 0) {
        promotions_.emplace(latest, id);
      }
      line.promote_at = latest;
    }
  }
}

// In its own band a line competes with what it has paid; as a guest it comes level with the one served last there.
void FairQueue::compete(LineId id, Line& line, int level) {
  Band& band = bands_[level];
  line.level = level;
  line.tag = level == id.first ? line.virtual_time : band.virtual_time;
  band.active.emplace(line.tag, id.first, id.second);
  if (level < k_highest_priority) {
    promotions_.emplace(line.promote_at, id);
  }
}

void FairQueue::withdraw(LineId id, const Line& line) {
  bands_.at(line.level).active.erase({line.tag, id.first, id.second});
  promotions_.erase({line.promote_at, id});
}

void FairQueue::charge(double now, const QueueItem& item) {
  const LineId id{item.priority, item.tenant};
  Line& line = lines_.at(id);
  withdraw(id, line);
  Band& competed = bands_.at(line.level);
  competed.virtual_time = std::max(competed.virtual_time, line.tag);
  line.virtual_time += item.cost / item.weight;
  line.promote_at = now + ageing_seconds_;
  compete(id, line, item.priority);
}

void FairQueue::refund(int priority, TenantId tenant, double charged) {
  const auto found = lines_.find({priority, tenant});
  if (found == lines_.end()) {
    return;
  }
  Line& line = found->second;
  const bool competes = !line.waiting.empty();
  if (competes) {
    withdraw(found->first, line);
  }
  line.virtual_time = std::max(0.0, line.virtual_time - charged);
  if (competes) {
    compete(found->first, line, line.level);
  }
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

void FairQueue::erase(std::uint64_t request) {
  const auto found = items_.find(request);
  if (found == items_.end()) {
    return;
  }
  const QueueItem item = found->second;
  items_.erase(found);
  tokens_ -= item.tokens;
  bytes_ -= item.bytes;
  const LineId id{item.priority, item.tenant};
  Line& line = lines_.at(id);
  line.waiting.erase(key(item));
  Band& band = bands_.at(item.priority);
  band.tokens -= item.tokens;
  if (line.waiting.empty()) {
    const int level = line.level;
    withdraw(id, line);
    --band.lines;
    if (level != item.priority) {
      collect(level, bands_.at(level));
    }
    collect(item.priority, band);
  }
}

// Forgets idle lines about which there is nothing to remember; at the end of a busy period all are level again.
void FairQueue::collect(int priority, Band& band) {
  const auto first = lines_.lower_bound({priority, 0});
  const auto last = lines_.upper_bound({priority, UINT32_MAX});
  if (band.lines == 0) {
    lines_.erase(first, last);
    if (band.active.empty()) {
      bands_.erase(priority);
    } else {
      band.virtual_time = std::get<0>(*band.active.begin());  // guests only
    }
    return;
  }
  if (++idle_since_collection_ < 64) {
    return;
  }
  idle_since_collection_ = 0;
  for (auto at = first; at != last;) {
    const bool idle = at->second.waiting.empty() && at->second.virtual_time <= band.virtual_time;
    at = idle ? lines_.erase(at) : std::next(at);
  }
}

}  // namespace twinpool::admission
