// SPDX-License-Identifier: Apache-2.0
#include "admission/tenants.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace twinpool::admission {

namespace {
constexpr double k_default_burst_seconds = 10.0;
}

void Tenants::configure(double now, const std::string& name, const TenantLimits& limits) {
  require(std::isfinite(limits.weight) && limits.weight >= 1e-3 && limits.weight <= 1e6,
          "tenant weight; allowed: 0.001 to 1000000");
  require(limits.max_requests >= 0 && limits.tokens_per_second >= 0 && limits.burst_tokens >= 0,
          "tenant limits; allowed: 0 (no limit) or more");
  require(limits.max_priority >= -100 && limits.max_priority <= 100, "tenant max_priority; allowed: -100 to 100");
  Tenant& tenant = tenants_[id(now, name)];
  limit(now, tenant, limits);
  tenant.configured = true;
}

void Tenants::reconfigure(double now) {
  for (const auto& [name, id] : by_name_) {
    if (!tenants_[id].configured) {
      limit(now, tenants_[id], defaults());
    }
  }
}

void Tenants::limit(double now, Tenant& tenant, const TenantLimits& limits) const noexcept {
  refill(now, tenant);
  const double burst_before = tenant.limits.burst_tokens;
  tenant.limits = limits;
  if (tenant.limits.burst_tokens <= 0) {
    tenant.limits.burst_tokens = limits.tokens_per_second * k_default_burst_seconds;
  }
  // A raised burst is there at once; a debt stays one.
  tenant.level =
      std::min(tenant.level + std::max(0.0, tenant.limits.burst_tokens - burst_before), tenant.limits.burst_tokens);
}

TenantLimits Tenants::defaults() const noexcept {
  TenantLimits limits;
  limits.max_requests = config_.max_tenant_requests;
  limits.tokens_per_second = config_.tenant_tokens_per_second;
  limits.burst_tokens = config_.tenant_burst_tokens > 0 ? config_.tenant_burst_tokens
                                                        : config_.tenant_tokens_per_second * k_default_burst_seconds;
  limits.max_priority = config_.tenant_max_priority;
  return limits;
}

TenantId Tenants::id(double now, const std::string& name) {
  const auto known = by_name_.find(name);
  if (known != by_name_.end()) {
    return known->second;
  }
  if (by_name_.size() >= collect_at_) {
    collect(now);
  }
  TenantId tenant = static_cast<TenantId>(tenants_.size());
  if (free_.empty()) {
    tenants_.emplace_back();
  } else {
    tenant = free_.back();
    free_.pop_back();
  }
  tenants_[tenant] = Tenant{name, defaults(), false, 0, 0.0, now};
  tenants_[tenant].level = tenants_[tenant].limits.burst_tokens;
  by_name_.emplace(name, tenant);
  return tenant;
}

void Tenants::refill(double now, Tenant& tenant) const noexcept {
  if (now <= tenant.filled_at) {
    return;
  }
  tenant.level =
      std::min(tenant.limits.burst_tokens, tenant.level + (now - tenant.filled_at) * tenant.limits.tokens_per_second);
  tenant.filled_at = now;
}

double Tenants::wait_for(double now, TenantId id, double tokens) {
  Tenant& tenant = tenants_[id];
  if (tenant.limits.tokens_per_second <= 0) {
    return 0.0;
  }
  refill(now, tenant);
  const double needed = std::min(tokens, tenant.limits.burst_tokens);
  return tenant.level >= needed ? 0.0 : (needed - tenant.level) / tenant.limits.tokens_per_second;
}

void Tenants::take(double now, TenantId id, double tokens) {
  Tenant& tenant = tenants_[id];
  if (tenant.limits.tokens_per_second <= 0) {
    return;
  }
  refill(now, tenant);
  tenant.level -= tokens;
}

void Tenants::give_back(TenantId id, double tokens) noexcept {
  Tenant& tenant = tenants_[id];
  if (tenant.limits.tokens_per_second <= 0) {
    return;
  }
  tenant.level = std::min(tenant.limits.burst_tokens, tenant.level + tokens);
}

TenantSlot Tenants::enter(TenantId tenant) {
  ++tenants_[tenant].in_flight;
  return TenantSlot(*this, tenant);
}

// Names come from clients, so they must not pile up: a tenant about which nothing is to be remembered is forgotten.
void Tenants::collect(double now) {
  for (TenantId id = 0; id < tenants_.size(); ++id) {
    Tenant& tenant = tenants_[id];
    const auto known = by_name_.find(tenant.name);
    if (known == by_name_.end() || known->second != id || tenant.configured || tenant.in_flight > 0) {
      continue;
    }
    refill(now, tenant);
    if (tenant.level < tenant.limits.burst_tokens) {
      continue;
    }
    by_name_.erase(known);
    free_.push_back(id);
  }
  collect_at_ = std::max<std::size_t>(1024, by_name_.size() * 2);
}

}  // namespace twinpool::admission
