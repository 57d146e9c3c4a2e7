// SPDX-License-Identifier: Apache-2.0
// What the router core tells about itself.
#include <algorithm>

#include "admission/router_core.h"

namespace twinpool::admission {

std::string_view RouterCore::state(std::uint64_t id) const {
  return name_of(request(id).state);
}

const Request& RouterCore::request(std::uint64_t id) const {
  const auto found = requests_.find(id);
  require(found != requests_.end(), [&] { return "request " + std::to_string(id) + " is not known"; });
  return found->second;
}

std::map<std::string, std::int64_t> RouterCore::stats() const {
  std::map<std::string, std::int64_t> out;
  std::int64_t queued = 0;
  std::int64_t tokens = 0;
  std::int64_t bytes = 0;
  for (const auto& pool : pools_) {
    queued += static_cast<std::int64_t>(pool->queue.requests());
    tokens += pool->queue.tokens();
    bytes += pool->queue.bytes();
  }
  out["queued"] = queued;
  out["queued_tokens"] = tokens;
  out["queued_bytes"] = bytes;
  const auto names = state_names();
  for (std::size_t i = 0; i < names.size(); ++i) {
    out["state_" + std::string(names[i])] = in_state_[i];
  }
  out["requests"] = static_cast<std::int64_t>(requests_.size());
  out["reservations"] = static_cast<std::int64_t>(workers_.reservations());
  out["workers"] = static_cast<std::int64_t>(workers_.size());
  out["tenants"] = static_cast<std::int64_t>(tenants_.size());
  out["bypassed"] = static_cast<std::int64_t>(bypassed_);
  out["preempted"] = static_cast<std::int64_t>(preempted_);
  out["index_blocks"] = static_cast<std::int64_t>(index_.blocks());
  out["index_bytes"] = static_cast<std::int64_t>(index_.bytes());
  out["index_evicted"] = static_cast<std::int64_t>(index_.evicted());
  for (const auto& [cause, count] : refused_) {
    out["refused_" + std::string(name_of(cause))] = count;
  }
  return out;
}

std::map<std::string, std::pair<std::int64_t, std::int64_t>> RouterCore::queues() const {
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> out;
  for (const auto& [name, id] : workers_.pool_ids()) {
    if (id < pools_.size() && pools_[id]->queue.requests() > 0) {
      out[name] = {static_cast<std::int64_t>(pools_[id]->queue.requests()), pools_[id]->queue.tokens()};
    }
  }
  return out;
}

std::vector<std::pair<std::uint64_t, std::uint32_t>> RouterCore::requests_on(const std::string& name,
                                                                             std::uint64_t incarnation) const {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> out;
  const placement::Worker* worker = const_cast<placement::WorkerTable&>(workers_).find(name, incarnation);
  if (worker == nullptr) {
    return out;
  }
  const placement::WorkerRef ref = workers_.ref(*worker);
  for (const auto& [id, request] : requests_) {
    const bool prefill = std::holds_alternative<Prefilling>(request.state);
    const bool decode =
        prefill || std::holds_alternative<HandingOff>(request.state) || std::holds_alternative<Decoding>(request.state);
    const placement::Candidate& pair = request.decision.best;
    // The prefill worker still pins the blocks while they are handed off.
    const bool owner = prefill || std::holds_alternative<HandingOff>(request.state);
    if ((owner && pair.prefill == ref) || (decode && pair.decode == ref)) {
      out.emplace_back(id, request.attempt);
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace twinpool::admission
