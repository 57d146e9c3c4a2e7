// SPDX-License-Identifier: Apache-2.0
// All workers that the router knows, by name and by slot.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "placement/worker.h"
#include "prefix/prefix_index.h"

namespace twinpool::placement {

class WorkerTable {
 public:
  explicit WorkerTable(prefix::PrefixIndex& index, const ModelPriors& priors = {})
      : index_(index),
        priors_(priors) {}
  WorkerTable(const WorkerTable&) = delete;
  WorkerTable& operator=(const WorkerTable&) = delete;
  ~WorkerTable() = default;

  /// Adds or updates. Another incarnation under the same name replaces the old one. A change of pool, role,
  /// fingerprint or capacity keeps the reservations and the indexed blocks: it is the same process with the same
  /// blocks. In another role it begins level with its peers there, and as fast as they are.
  Worker& upsert(const WorkerSpec& spec);
  /// False if no such incarnation is known.
  bool remove(const std::string& name, std::uint64_t incarnation);
  /// All indexed blocks of the worker are gone at once.
  void clear_index(Worker& worker);

  [[nodiscard]] Worker* find(const std::string& name, std::uint64_t incarnation) noexcept;
  [[nodiscard]] Worker* get(WorkerRef ref) noexcept {
    return ref.slot < workers_.size() && workers_[ref.slot].epoch == ref.epoch && ref.epoch != 0 ? &workers_[ref.slot]
                                                                                                 : nullptr;
  }
  [[nodiscard]] const Worker* get(WorkerRef ref) const noexcept { return const_cast<WorkerTable*>(this)->get(ref); }
  [[nodiscard]] WorkerRef ref(const Worker& worker) const noexcept {
    return {static_cast<std::uint32_t>(&worker - workers_.data()), worker.epoch};
  }
  [[nodiscard]] WorkerRef by_index_slot(std::uint32_t slot) const noexcept;

  void report(Worker& worker, const LoadReport& load);

  /// A model of the worker was fed. Once it is measured, it is the best guess for those of its kind that have done no
  /// such thing yet, whatever their role: the same model, most likely on the same hardware.
  void share(const Worker& worker, Fit Worker::* model);

  /// Slots of a pool's workers, in the order of their arrival. Empty for an unknown pool.
  [[nodiscard]] const std::vector<std::uint32_t>& of_pool(std::uint32_t pool) const noexcept;
  [[nodiscard]] const Worker& at(std::uint32_t slot) const noexcept { return workers_[slot]; }
  [[nodiscard]] Worker& at(std::uint32_t slot) noexcept { return workers_[slot]; }
  [[nodiscard]] std::size_t size() const noexcept { return by_name_.size(); }
  [[nodiscard]] std::size_t slots() const noexcept { return workers_.size(); }

  /// Number of a pool's name; the same name gives the same number for ever.
  std::uint32_t pool_id(const std::string& name);
  /// Those numbers, by name.
  [[nodiscard]] const std::unordered_map<std::string, std::uint32_t>& pool_ids() const noexcept { return pool_ids_; }

  /// Rises with everything that may let a waiting request be placed.
  [[nodiscard]] std::uint64_t version() const noexcept { return version_; }
  void touch() noexcept { ++version_; }

  /// Reservations that live workers hold.
  [[nodiscard]] std::uint64_t reservations() const noexcept;

  template <typename A>
  void archive(A& a) {
    a(workers_, free_, by_name_, pool_ids_, fingerprint_ids_, pools_, index_owner_, next_epoch_, version_);
  }

 private:
  Worker& enroll(const WorkerSpec& spec);
  void own_index_slot(const Worker& worker);
  void level(Worker& worker, Role role);
  void begin_role(Worker& worker);
  void seed_model(Worker& worker, const Worker* before, Fit Worker::* model);
  void attach(std::uint32_t slot, const std::string& pool);
  void detach(std::uint32_t slot);

  prefix::PrefixIndex& index_;
  ModelPriors priors_;
  std::vector<Worker> workers_;
  std::vector<std::uint32_t> free_;
  std::unordered_map<std::string, std::uint32_t> by_name_;
  std::unordered_map<std::string, std::uint32_t> pool_ids_;
  std::unordered_map<std::string, std::uint32_t> fingerprint_ids_;
  std::vector<std::vector<std::uint32_t>> pools_;
  std::vector<WorkerRef> index_owner_;  // by index slot
  std::uint64_t next_epoch_ = 1;
  std::uint64_t version_ = 0;
};

}  // namespace twinpool::placement
