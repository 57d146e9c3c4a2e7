// SPDX-License-Identifier: Apache-2.0
// What each tenant may do, and what it does now.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "admission/config.h"

namespace twinpool::admission {

using TenantId = std::uint32_t;

struct TenantLimits {
  double weight = 1.0;             // share of the pool against other tenants
  std::int64_t max_requests = 0;   // in flight; 0: no limit
  double tokens_per_second = 0.0;  // 0: no limit
  double burst_tokens = 0.0;       // 0: ten seconds' worth
  std::int64_t max_priority = 100;
  template <typename A>
  void archive(A& a) {
    a(weight, max_requests, tokens_per_second, burst_tokens, max_priority);
  }
};

class TenantSlot;

class Tenants {
 public:
  explicit Tenants(const AdmissionConfig& config)
      : config_(config) {}
  Tenants(const Tenants&) = delete;
  Tenants& operator=(const Tenants&) = delete;
  ~Tenants() = default;

  /// Throws CoreError if a limit is out of range.
  void configure(double now, const std::string& name, const TenantLimits& limits);
  /// The configuration has changed: tenants without own settings get what it says.
  void reconfigure(double now);
  /// The number of a tenant, kept while the tenant has requests, own settings or a bucket that is not full.
  TenantId id(double now, const std::string& name);

  [[nodiscard]] const TenantLimits& limits(TenantId tenant) const noexcept { return tenants_[tenant].limits; }
  [[nodiscard]] std::int64_t in_flight(TenantId tenant) const noexcept { return tenants_[tenant].in_flight; }

  /// Seconds until the bucket allows the tokens; 0: now. A request larger than the burst is allowed on a full bucket,
  /// which then goes into debt: otherwise it could never be served.
  [[nodiscard]] double wait_for(double now, TenantId tenant, double tokens);
  void take(double now, TenantId tenant, double tokens);
  void give_back(TenantId tenant, double tokens) noexcept;

  TenantSlot enter(TenantId tenant);
  template <typename A>
  void archive(A& a) {
    a(tenants_, free_, by_name_, collect_at_);
  }
  [[nodiscard]] std::size_t size() const noexcept { return by_name_.size(); }

 private:
  friend class TenantSlot;
  struct Tenant {
    std::string name;
    TenantLimits limits;
    bool configured = false;
    std::int64_t in_flight = 0;
    double level = 0.0;  // tokens in the bucket
    double filled_at = 0.0;
    template <typename A>
    void archive(A& a) {
      a(name, limits, configured, in_flight, level, filled_at);
    }
  };

  void limit(double now, Tenant& tenant, const TenantLimits& limits) const noexcept;
  void refill(double now, Tenant& tenant) const noexcept;
  void collect(double now);
  [[nodiscard]] TenantLimits defaults() const noexcept;

  const AdmissionConfig& config_;
  std::vector<Tenant> tenants_;
  std::vector<TenantId> free_;
  std::unordered_map<std::string, TenantId> by_name_;
  std::size_t collect_at_ = 1024;
};

/// One request in flight of a tenant. Move-only; leaves on destruction.
class TenantSlot {
 public:
  TenantSlot() = default;
  TenantSlot(const TenantSlot&) = delete;
  TenantSlot& operator=(const TenantSlot&) = delete;
  TenantSlot(TenantSlot&& other) noexcept
      : tenants_(std::exchange(other.tenants_, nullptr)),
        tenant_(other.tenant_),
        read_(std::exchange(other.read_, false)) {}
  TenantSlot& operator=(TenantSlot&& other) noexcept {
    if (this != &other) {
      reset();
      tenants_ = std::exchange(other.tenants_, nullptr);
      tenant_ = other.tenant_;
      read_ = std::exchange(other.read_, false);
    }
    return *this;
  }
  ~TenantSlot() { reset(); }
  template <typename A>
  void archive(A& a) {
    // NOLINTNEXTLINE(misc-const-correctness): a Reader writes it
    bool held = tenants_ != nullptr;
    a(held, tenant_);
    if constexpr (A::reading) {
      read_ = held;
    }
  }
  /// After an archive was read: the tenant counts it already.
  void attach(Tenants& tenants) noexcept { tenants_ = std::exchange(read_, false) ? &tenants : nullptr; }

 private:
  friend class Tenants;
  TenantSlot(Tenants& tenants, TenantId tenant)
      : tenants_(&tenants),
        tenant_(tenant) {}
  void reset() noexcept {
    if (Tenants* tenants = std::exchange(tenants_, nullptr)) {
      --tenants->tenants_[tenant_].in_flight;
    }
  }

  Tenants* tenants_ = nullptr;
  TenantId tenant_ = 0;
  bool read_ = false;
};

}  // namespace twinpool::admission
