// SPDX-License-Identifier: Apache-2.0
// One worker as the router sees it: what it is, what it reported, and what this router has placed on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "placement/fit.h"

namespace twinpool::placement {

enum class Role : std::uint8_t { prefill, decode };
enum class WorkerState : std::uint8_t { starting, ready, draining, flipping };

/// Throws CoreError that names the value and the allowed ones.
Role parse_role(const std::string& text);
WorkerState parse_worker_state(const std::string& text);
const char* name_of(Role role) noexcept;
const char* name_of(WorkerState state) noexcept;

struct WorkerSpec {
  std::string name;
  std::uint64_t incarnation = 0;
  std::string pool;
  Role role = Role::prefill;
  WorkerState state = WorkerState::starting;
  std::string fingerprint;
  std::uint32_t num_blocks = 0;
  std::uint32_t block_tokens = 0;
  std::uint32_t max_num_seqs = 0;
  std::vector<std::string> adapters;  // that it has loaded
  template <typename A>
  void archive(A& a) {
    a(name, incarnation, pool, role, state, fingerprint, num_blocks, block_tokens, max_num_seqs, adapters);
  }
  /// Every worker has the base model, whose name is empty.
  [[nodiscard]] bool has_adapter(std::string_view adapter) const {
    return adapter.empty() || std::find(adapters.begin(), adapters.end(), adapter) != adapters.end();
  }
};

/// What the worker said last; its own view, of all routers' work.
struct LoadReport {
  double at = 0.0;
  std::uint32_t running = 0;
  std::uint32_t waiting = 0;
  std::uint64_t waiting_prefill_tokens = 0;
  std::uint32_t available_blocks = 0;
  double step_seconds = 0.0;
  template <typename A>
  void archive(A& a) {
    a(at, running, waiting, waiting_prefill_tokens, available_blocks, step_seconds);
  }
};

/// An amount that this router put on a worker, kept apart from the worker's own figure and combined with it at read
/// time. What the last report cannot contain yet waits in ``pending`` (not acknowledged), ``due_next`` (in the next
/// report) or ``due_later`` (in the one after it); ``gone`` has ended since but is still in the last report.
struct Ledger {
  static constexpr std::uint32_t k_pending = UINT32_MAX;

  std::int64_t total = 0;
  std::int64_t pending = 0;
  std::int64_t due_next = 0;
  std::int64_t due_later = 0;
  std::int64_t gone = 0;

  template <typename A>
  void archive(A& a) {
    a(total, pending, due_next, due_later, gone);
  }
  [[nodiscard]] std::int64_t unseen() const noexcept { return pending + due_next + due_later; }
  /// The worker's figure brought up to now.
  [[nodiscard]] double combined(double reported) const noexcept {
    const double seen = reported - static_cast<double>(gone);
    return (seen > 0 ? seen : 0.0) + static_cast<double>(unseen());
  }
  void on_report() noexcept {
    due_next = due_later;
    due_later = gone = 0;
  }
  /// ``due``: k_pending, or in how many reports the amount shows (0: it already does).
  void add(std::int64_t amount, std::uint32_t due) noexcept {
    total += amount;
    part(due, amount);
  }
  void remove(std::int64_t amount, std::uint32_t due) noexcept {
    total -= amount;
    part(due, -amount);
  }
  /// Like remove, but what the report shows stays there until the next one: the worker itself says when it is gone.
  void leave(std::int64_t amount, std::uint32_t due) noexcept {
    total -= amount;
    if (due != 0) {
      part(due, -amount);
    }
  }
  void acknowledge(std::int64_t amount) noexcept {
    pending -= amount;
    due_next += amount;
  }

 private:
  void part(std::uint32_t due, std::int64_t amount) noexcept {
    (due == k_pending ? pending : due == 2 ? due_later : due == 1 ? due_next : gone) += due == 0 ? -amount : amount;
  }
};

/// Which worker a reservation or an attempt belongs to; ``epoch`` is unique to each registration, so a reference to a
/// removed worker never reaches its successor in the same slot.
struct WorkerRef {
  std::uint32_t slot = UINT32_MAX;
  std::uint64_t epoch = 0;

  template <typename A>
  void archive(A& a) {
    a(slot, epoch);
  }
  [[nodiscard]] bool valid() const noexcept { return epoch != 0; }
  friend bool operator==(const WorkerRef&, const WorkerRef&) = default;
};

/// What a worker is believed to take until it, or one like it, was measured: a mid-size accelerator. What matters then
/// is the ratio: moving a block of latent KV costs a fiftieth of computing it.
struct ModelPriors {
  double prefill_seconds = 2e-3;
  double prefill_token_seconds = 1e-4;
  double transfer_seconds = 1e-3;
  double transfer_block_seconds = 1.3e-4;
};

struct Worker {
  WorkerSpec spec;
  std::uint64_t epoch = 0;  // 0: the slot is vacant
  std::uint32_t pool_id = 0;
  std::uint32_t fingerprint_id = 0;
  std::uint32_t index_slot = 0;  // in the prefix index
  std::optional<LoadReport> report;
  std::uint32_t reports = 0;       // counts reports, so that a reservation knows whether one came since
  double quarantined_until = 0.0;  // exclusive
  // After its quarantine it has to prove itself: it is given one placement, until it is told to be sound or put into
  // quarantine again.
  bool on_probation = false;
  std::uint64_t served_before = 0;  // value of ``served`` then

  // Since the worker refused: a request that needs as much or more is not offered again before the report changes or
  // the back-off passes.
  double refused_until = 0.0;
  std::int64_t refused_blocks = 0;
  std::uint32_t refused_report = 0;  // value of ``changes`` then
  std::uint32_t changes = 0;         // counts reports that differ from the one before

  Ledger prefill_tokens;  // uncached prompt tokens to compute
  Ledger prompt_blocks;   // blocks of prompts
  Ledger sequences;
  std::int64_t growth_blocks = 0;    // expected output not allocated yet
  std::int64_t transfers = 0;        // hand-offs towards this worker
  std::int64_t transfer_blocks = 0;  // blocks of them
  std::int64_t holds = 0;            // reservation objects alive
  std::uint64_t served = 0;          // placements, for ties
  bool observed = false;             // prefill times are measured by the worker itself

  Fit prefill;   // seconds of a prompt over (uncached tokens, uncached tokens * mean context)
  Fit transfer;  // seconds of a pull over (blocks, -)
  Fit step;      // seconds of a decode step over (sequences, context tokens)

  Worker()
      : Worker(ModelPriors{}) {}
  explicit Worker(const ModelPriors& priors);
  template <typename A>
  void archive(A& a) {
    a(spec, epoch, pool_id, fingerprint_id, index_slot, report, reports, quarantined_until, on_probation, served_before,
      refused_until, refused_blocks, refused_report, changes, prefill_tokens, prompt_blocks, sequences, growth_blocks,
      transfers, transfer_blocks, holds, served, observed, prefill, transfer, step);
  }

  /// The model that a name stands for: "prefill", "transfer" or "step". Throws CoreError for others.
  Fit& model(const std::string& kind);

  [[nodiscard]] bool usable(double now) const noexcept {
    return epoch != 0 && spec.state == WorkerState::ready && now >= quarantined_until &&
           (!on_probation || served == served_before);
  }
  /// True if an offer of so many blocks would be refused again.
  [[nodiscard]] bool refuses(double now, std::int64_t blocks) const noexcept {
    return now < refused_until && refused_report == changes && blocks >= refused_blocks;
  }
  [[nodiscard]] double queued_prefill_tokens() const noexcept;
  [[nodiscard]] double available_blocks() const noexcept;
  [[nodiscard]] double busy_sequences() const noexcept;
  /// Tokens that its sequences attend to.
  [[nodiscard]] double context_tokens() const noexcept;
};

}  // namespace twinpool::placement
