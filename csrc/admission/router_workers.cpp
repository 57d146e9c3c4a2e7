// SPDX-License-Identifier: Apache-2.0
// The cluster view and the prefix index of the router core.
#include <algorithm>

#include "admission/router_core.h"

namespace twinpool::admission {

void RouterCore::upsert_worker(double /*now*/, const placement::WorkerSpec& spec) {
  workers_.upsert(spec);
}

void RouterCore::remove_worker(double /*now*/, const std::string& name, std::uint64_t incarnation) {
  workers_.remove(name, incarnation);
}

void RouterCore::report_load(double now, const std::string& name, std::uint64_t incarnation,
                             placement::LoadReport load) {
  placement::Worker* worker = workers_.find(name, incarnation);
  if (worker == nullptr) {
    return;
  }
  load.at = now;
  workers_.report(*worker, load);
}

void RouterCore::quarantine(double /*now*/, const std::string& name, std::uint64_t incarnation, double until,
                            bool probation) {
  placement::Worker* worker = workers_.find(name, incarnation);
  if (worker == nullptr) {
    return;
  }
  worker->quarantined_until = until;
  worker->on_probation = probation;
  worker->served_before = worker->served;
  workers_.touch();
}

void RouterCore::observe_prefill(const std::string& name, std::uint64_t incarnation, std::int64_t tokens,
                                 std::int64_t cached_tokens, double seconds) {
  placement::Worker* worker = workers_.find(name, incarnation);
  if (worker == nullptr || tokens <= 0) {
    return;
  }
  const double computed = static_cast<double>(tokens);
  worker->prefill.add(computed, computed * (static_cast<double>(cached_tokens) + computed / 2.0), seconds);
  worker->observed = true;
  workers_.share(*worker, &placement::Worker::prefill);
}

void RouterCore::observe_transfer(const std::string& name, std::uint64_t incarnation, std::int64_t blocks,
                                  double seconds) {
  placement::Worker* worker = workers_.find(name, incarnation);
  if (worker != nullptr && blocks > 0) {
    worker->transfer.add(static_cast<double>(blocks), 0.0, seconds);
    workers_.share(*worker, &placement::Worker::transfer);
  }
}

double RouterCore::predict_transfer(const std::string& name, std::uint64_t incarnation, std::int64_t blocks) {
  const placement::Worker* worker = workers_.find(name, incarnation);
  return worker == nullptr ? 0.0 : worker->transfer.predict(static_cast<double>(blocks), 0.0);
}

void RouterCore::set_cost_model(const std::string& name, std::uint64_t incarnation, const std::string& kind,
                                const std::array<double, 3>& coefficients) {
  placement::Worker* worker = workers_.find(name, incarnation);
  if (worker != nullptr) {
    worker->model(kind).seed(coefficients);
    worker->observed = worker->observed || kind == "prefill";
  }
}

void RouterCore::set_tenant(double now, const std::string& tenant, const TenantLimits& limits) {
  tenants_.configure(now, tenant, limits);
}

void RouterCore::index_stored(const std::string& name, std::uint64_t incarnation, prefix::HashBytes hashes,
                              prefix::Tier tier, bool counted) {
  const placement::Worker* worker = workers_.find(name, incarnation);
  if (worker != nullptr) {
    index_.store(worker->index_slot, hashes, tier, counted);
  }
}

void RouterCore::index_removed(const std::string& name, std::uint64_t incarnation, prefix::HashBytes hashes,
                               prefix::Tier tier) {
  const placement::Worker* worker = workers_.find(name, incarnation);
  if (worker != nullptr) {
    index_.remove(worker->index_slot, hashes, tier);
  }
}

void RouterCore::index_cleared(const std::string& name, std::uint64_t incarnation) {
  placement::Worker* worker = workers_.find(name, incarnation);
  if (worker != nullptr) {
    workers_.clear_index(*worker);
  }
}

void RouterCore::index_hashes(const std::string& name, std::uint64_t incarnation, prefix::Tier tier,
                              std::vector<Hash128>& out) const {
  const placement::Worker* worker = const_cast<placement::WorkerTable&>(workers_).find(name, incarnation);
  if (worker == nullptr) {
    return;
  }
  index_.for_each([&](prefix::PrefixIndex::Slot slot, prefix::Tier where, const std::uint8_t* hash) {
    if (slot == worker->index_slot && where == tier) {
      out.push_back(Hash128::from_bytes(hash));
    }
  });
}

void RouterCore::longest_prefix(prefix::HashBytes hashes,
                                std::vector<std::pair<const placement::Worker*, std::uint32_t>>& out) {
  out.clear();
  index_.longest_prefix(hashes, lengths_);
  for (std::uint32_t slot = 0; slot < lengths_.blocks.size(); ++slot) {
    if (lengths_.blocks[slot] == 0) {
      continue;
    }
    if (const placement::Worker* worker = workers_.get(workers_.by_index_slot(slot))) {
      out.emplace_back(worker, lengths_.blocks[slot]);
    }
  }
}

}  // namespace twinpool::admission
