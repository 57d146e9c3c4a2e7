// SPDX-License-Identifier: Apache-2.0
#include "placement/worker_table.h"

#include <algorithm>
#include <optional>

#include "core/error.h"

namespace twinpool::placement {

Worker* WorkerTable::find(const std::string& name, std::uint64_t incarnation) noexcept {
  const auto it = by_name_.find(name);
  if (it == by_name_.end() || workers_[it->second].spec.incarnation != incarnation) {
    return nullptr;
  }
  return &workers_[it->second];
}

Worker& WorkerTable::upsert(const WorkerSpec& spec) {
  require(!spec.name.empty(), "worker name is empty");
  require(spec.incarnation != 0, "incarnation=0; allowed: any other 64-bit number");
  require(spec.num_blocks > 0 && spec.block_tokens > 0 && spec.max_num_seqs > 0,
          [&] { return "worker " + spec.name + ": num_blocks, block_tokens and max_num_seqs must be at least 1"; });
  const auto known = by_name_.find(spec.name);
  std::optional<Worker> before;
  if (known != by_name_.end() && workers_[known->second].spec.incarnation != spec.incarnation) {
    before = workers_[known->second];
    remove(spec.name, before->spec.incarnation);
  }
  Worker* worker = find(spec.name, spec.incarnation);
  const bool fresh = worker == nullptr;
  if (fresh) {
    worker = &enroll(spec);
  } else if (worker->spec.pool != spec.pool) {
    const std::uint32_t slot = ref(*worker).slot;
    detach(slot);
    attach(slot, spec.pool);
  }
  const bool flipped = !fresh && worker->spec.role != spec.role;
  worker->spec = spec;
  worker->fingerprint_id =
      fingerprint_ids_.emplace(spec.fingerprint, static_cast<std::uint32_t>(fingerprint_ids_.size())).first->second;
  if (fresh) {
    for (Fit Worker::* const model : {&Worker::prefill, &Worker::transfer, &Worker::step}) {
      seed_model(*worker, before ? &*before : nullptr, model);
    }
  } else if (flipped) {
    begin_role(*worker);
  }
  touch();
  return *worker;
}

Worker& WorkerTable::enroll(const WorkerSpec& spec) {
  const std::uint32_t index_slot = index_.add_holder();  // first: it may throw
  std::uint32_t slot = static_cast<std::uint32_t>(workers_.size());
  if (free_.empty()) {
    workers_.emplace_back();
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  Worker& worker = workers_[slot];
  worker = Worker(priors_);
  worker.epoch = next_epoch_++;
  worker.index_slot = index_slot;
  own_index_slot(worker);
  by_name_.emplace(spec.name, slot);
  attach(slot, spec.pool);
  level(worker, spec.role);
  return worker;
}

// A newcomer starts level with its peers: otherwise it would win every tie until it has caught up.
void WorkerTable::level(Worker& worker, Role role) {
  std::uint64_t fewest = UINT64_MAX;
  for (const std::uint32_t slot : of_pool(worker.pool_id)) {
    const Worker& peer = workers_[slot];
    if (&peer != &worker && peer.spec.role == role) {
      fewest = std::min(fewest, peer.served);
    }
  }
  worker.served = fewest == UINT64_MAX ? 0 : fewest;
}

// What it refused and how long its steps took was in the other role. Prompts and pulls take what they took.
void WorkerTable::begin_role(Worker& worker) {
  level(worker, worker.spec.role);
  worker.served_before = worker.served;
  worker.refused_until = 0.0;
  worker.refused_blocks = 0;
  worker.step = Worker(priors_).step;
  seed_model(worker, nullptr, &Worker::step);
}

void WorkerTable::own_index_slot(const Worker& worker) {
  if (index_owner_.size() <= worker.index_slot) {
    index_owner_.resize(worker.index_slot + 1);
  }
  index_owner_[worker.index_slot] = ref(worker);
}

// A newcomer is as fast as its last incarnation, or else as the like worker that was measured most.
void WorkerTable::seed_model(Worker& worker, const Worker* before, Fit Worker::* model) {
  const Worker* like = before;
  if (like == nullptr || like->fingerprint_id != worker.fingerprint_id || like->spec.role != worker.spec.role) {
    like = nullptr;
    for (const std::uint32_t slot : of_pool(worker.pool_id)) {
      const Worker& peer = workers_[slot];
      const bool alike = &peer != &worker && peer.fingerprint_id == worker.fingerprint_id &&
                         peer.spec.role == worker.spec.role && (peer.*model).measured();
      if (alike && (like == nullptr || (peer.*model).samples() > (like->*model).samples())) {
        like = &peer;
      }
    }
  }
  if (like != nullptr) {
    (worker.*model).seed((like->*model).coefficients());
  }
}

void WorkerTable::share(const Worker& worker, Fit Worker::* model) {
  const Fit& fit = worker.*model;
  // Once, and rarely again: a guess needs no more, and the loop is over all workers.
  if (!fit.measured() || fit.samples() % Fit::k_measured_samples != 0) {
    return;
  }
  for (const std::uint32_t slot : of_pool(worker.pool_id)) {
    Worker& peer = workers_[slot];
    if (peer.fingerprint_id == worker.fingerprint_id && (peer.*model).samples() == 0) {
      (peer.*model).seed(fit.coefficients());
    }
  }
}

bool WorkerTable::remove(const std::string& name, std::uint64_t incarnation) {
  Worker* worker = find(name, incarnation);
  if (worker == nullptr) {
    return false;
  }
  const std::uint32_t slot = ref(*worker).slot;
  index_.drop_holder(worker->index_slot);
  index_owner_[worker->index_slot] = WorkerRef{};
  detach(slot);
  by_name_.erase(name);
  worker->epoch = 0;
  free_.push_back(slot);
  touch();
  return true;
}

void WorkerTable::clear_index(Worker& worker) {
  index_.drop_holder(worker.index_slot);
  index_owner_[worker.index_slot] = WorkerRef{};
  worker.index_slot = index_.add_holder();
  own_index_slot(worker);
}

WorkerRef WorkerTable::by_index_slot(std::uint32_t slot) const noexcept {
  return slot < index_owner_.size() ? index_owner_[slot] : WorkerRef{};
}

void WorkerTable::report(Worker& worker, const LoadReport& load) {
  const bool changed = !worker.report || worker.report->running != load.running ||
                       worker.report->waiting != load.waiting ||
                       worker.report->available_blocks != load.available_blocks ||
                       worker.report->waiting_prefill_tokens != load.waiting_prefill_tokens;
  worker.report = load;
  ++worker.reports;
  if (changed) {
    ++worker.changes;
  }
  worker.prefill_tokens.on_report();
  worker.prompt_blocks.on_report();
  worker.sequences.on_report();
  if (load.step_seconds > 0 && load.running > 0) {
    const double used = static_cast<double>(worker.spec.num_blocks) - static_cast<double>(load.available_blocks);
    worker.step.add(load.running, std::max(0.0, used) * worker.spec.block_tokens, load.step_seconds);
  }
  if (changed) {
    touch();
  }
}

const std::vector<std::uint32_t>& WorkerTable::of_pool(std::uint32_t pool) const noexcept {
  static const std::vector<std::uint32_t> none;
  return pool < pools_.size() ? pools_[pool] : none;
}

std::uint32_t WorkerTable::pool_id(const std::string& name) {
  const auto id = pool_ids_.emplace(name, static_cast<std::uint32_t>(pool_ids_.size())).first->second;
  if (pools_.size() <= id) {
    pools_.resize(id + 1);
  }
  return id;
}

std::uint64_t WorkerTable::reservations() const noexcept {
  std::uint64_t count = 0;
  for (const Worker& worker : workers_) {
    if (worker.epoch != 0) {
      count += static_cast<std::uint64_t>(worker.holds);
    }
  }
  return count;
}

void WorkerTable::attach(std::uint32_t slot, const std::string& pool) {
  workers_[slot].pool_id = pool_id(pool);
  pools_[workers_[slot].pool_id].push_back(slot);
}

void WorkerTable::detach(std::uint32_t slot) {
  std::erase(pools_[workers_[slot].pool_id], slot);
}

}  // namespace twinpool::placement
