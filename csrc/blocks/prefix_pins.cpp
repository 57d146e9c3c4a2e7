// SPDX-License-Identifier: Apache-2.0
#include "blocks/prefix_pins.h"

#include <algorithm>

namespace twinpool {

const char* name_of(PrefixPinRefusal refusal) noexcept {
  switch (refusal) {
  case PrefixPinRefusal::none:
    return "";
  case PrefixPinRefusal::missing:
    return "missing";
  case PrefixPinRefusal::pins:
    return "pins";
  case PrefixPinRefusal::blocks:
    return "blocks";
  case PrefixPinRefusal::tenant_blocks:
    return "tenant_blocks";
  }
  return "";
}

const PrefixPins::Pin* PrefixPins::find(const std::string& pin) const {
  const auto at = pins_.find(pin);
  return at == pins_.end() ? nullptr : &at->second;
}

std::size_t PrefixPins::tenant_blocks(const std::string& tenant) const {
  const auto at = tenants_.find(tenant);
  return at == tenants_.end() ? 0 : at->second.size();
}

bool PrefixPins::tenant_has(const std::string& tenant, BlockId block) const {
  const auto at = tenants_.find(tenant);
  return at != tenants_.end() && at->second.contains(block);
}

std::optional<double> PrefixPins::next_expiry() const {
  return by_expiry_.empty() ? std::nullopt : std::optional(by_expiry_.begin()->first);
}

void PrefixPins::add(Pin pin) {
  Counts& counts = tenants_[pin.owner.tenant];
  for (const BlockId block : pin.blocks) {
    ++counts[block];
  }
  by_expiry_.emplace(pin.owner.expires_at, pin.owner.pin);
  std::string id = pin.owner.pin;
  pins_.emplace(std::move(id), std::move(pin));
}

double PrefixPins::prolong(const std::string& pin, double expires_at) {
  PrefixPinOwner& owner = pins_.at(pin).owner;
  if (expires_at > owner.expires_at) {
    by_expiry_.erase({owner.expires_at, pin});
    owner.expires_at = expires_at;
    by_expiry_.emplace(expires_at, pin);
  }
  return owner.expires_at;
}

std::vector<PrefixPins::Pin> PrefixPins::expire(double now) {
  std::vector<Pin> ended;
  while (!by_expiry_.empty() && by_expiry_.begin()->first <= now) {
    ended.push_back(remove(pins_.find(by_expiry_.begin()->second)));
  }
  return ended;
}

std::vector<PrefixPins::Pin> PrefixPins::take(const PrefixPinFilter& filter) {
  std::vector<Pin> ended;
  for (auto at = pins_.begin(); at != pins_.end();) {
    const Pin& pin = at->second;
    const bool meant = pin.owner.tenant == filter.tenant && (filter.pin.empty() || pin.owner.pin == filter.pin) &&
                       (filter.session.empty() || pin.owner.session == filter.session) &&
                       (!filter.last || pin.last == *filter.last);
    const auto next = std::next(at);
    if (meant) {
      ended.push_back(remove(at));
    }
    at = next;
  }
  return ended;
}

std::optional<PrefixPins::Pin> PrefixPins::take_next() {
  if (by_expiry_.empty()) {
    return std::nullopt;
  }
  return remove(pins_.find(by_expiry_.begin()->second));
}

bool PrefixPins::consistent() const {
  return by_expiry_.size() == pins_.size() && tenants_ == counted() &&
         std::ranges::all_of(by_expiry_, [this](const auto& entry) {
           const Pin* pin = find(entry.second);
           return pin != nullptr && pin->owner.expires_at == entry.first;
         });
}

PrefixPins::Pin PrefixPins::remove(Table::iterator at) {
  Pin pin = std::move(at->second);
  pins_.erase(at);
  by_expiry_.erase({pin.owner.expires_at, pin.owner.pin});
  const auto tenant = tenants_.find(pin.owner.tenant);
  for (const BlockId block : pin.blocks) {
    const auto count = tenant->second.find(block);
    if (--count->second == 0) {
      tenant->second.erase(count);
    }
  }
  if (tenant->second.empty()) {
    tenants_.erase(tenant);
  }
  return pin;
}

std::unordered_map<std::string, PrefixPins::Counts> PrefixPins::counted() const {
  std::unordered_map<std::string, Counts> found;
  for_each([&](const Pin& pin) {
    for (const BlockId block : pin.blocks) {
      ++found[pin.owner.tenant][block];
    }
  });
  return found;
}

}  // namespace twinpool
