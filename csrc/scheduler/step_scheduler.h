// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "blocks/block_manager.h"
#include "scheduler/config.h"
#include "scheduler/row_table.h"
#include "scheduler/sequence.h"
#include "scheduler/step_plan.h"
#include "scheduler/waiting_queue.h"

namespace twinpool {

/// What a new sequence is made of. ``hashes`` are the chained hashes of the prompt's full blocks from ``root`` on.
struct NewSequence {
  std::span<const std::int32_t> tokens;
  std::span<const Hash128> hashes;
  Hash128 root;
  std::int64_t max_new_tokens = 0;
  std::int64_t priority = 0;
  double arrival = 0;
  bool preemptible = true;
  bool use_cache = true;   ///< of one that is added: false computes every position of the prompt
  std::int64_t seats = 1;  ///< of a reservation: sequences that will run, its forks included
};

/// Plans steps over a block manager: plan -> run -> advance (or abort_plan), one plan at a time, and one more that
/// follows it (plan_ahead). Cost of a step: per sequence O(1) whatever its context length, per waiting sequence
/// nothing. Not thread-safe; methods that throw CoreError have changed nothing.
class StepScheduler {
 public:
  StepScheduler(BlockManager& blocks, const SchedulerConfig& config);
  StepScheduler(const StepScheduler&) = delete;
  StepScheduler& operator=(const StepScheduler&) = delete;
  ~StepScheduler() = default;

  SequenceId add(const NewSequence& request);
  std::optional<SequenceId> reserve(const NewSequence& request);
  void start(SequenceId id, std::int32_t first_token);
  std::optional<SequenceId> fork(SequenceId id, std::int32_t first_token, std::int64_t max_new_tokens);
  void remove(SequenceId id);

  StepPlan plan(double now);
  /// What comes after the outstanding plan, before its tokens are known: one more token of each of its sequences that
  /// has one to come. Empty, with nothing changed but blocks that sequences got early, unless all of it decodes and
  /// nobody else is to be served. Becomes the outstanding plan when that one is advanced; aborting that one aborts it,
  /// too.
  StepPlan plan_ahead(const StepPlan& plan);
  void advance(const StepPlan& plan, std::span<const std::int32_t> sampled);
  void abort_plan(const StepPlan& plan);

  [[nodiscard]] const Sequence& sequence(SequenceId id) const;
  [[nodiscard]] std::size_t running() const noexcept { return table_.rows() + ready_.size(); }
  [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.size(); }
  /// Seats that are taken by sequences that have not started.
  [[nodiscard]] std::size_t reserved() const noexcept { return reserved_; }
  /// Tokens to be computed before the waiting and the prefilling sequences can decode; what the cache holds of a
  /// waiting one counts in full.
  [[nodiscard]] std::size_t waiting_tokens() const noexcept { return waiting_tokens_; }
  /// Blocks of the host pool that hold the KV of preempted sequences.
  [[nodiscard]] std::size_t host_blocks_used() const noexcept { return host_.count() - host_.free(); }

  /// Throws CoreError if an invariant does not hold. O(everything).
  void check() const;

 private:
  // Life of a sequence (step_scheduler.cpp)
  [[nodiscard]] Sequence& find(SequenceId id) const;
  std::unique_ptr<Sequence> make(const NewSequence& request) const;
  SequenceId keep(std::unique_ptr<Sequence> sequence);
  [[nodiscard]] bool has_seats(std::size_t count) const noexcept { return running() + reserved_ + count <= max_seqs_; }
  [[nodiscard]] std::size_t blocks_for(std::size_t tokens) const noexcept {
    return (tokens + block_tokens_ - 1) / block_tokens_;
  }
  [[nodiscard]] std::size_t blocks_at_end(const Sequence& sequence) const noexcept;
  [[nodiscard]] std::size_t blocks_at_start(const Sequence& sequence, std::size_t wanted) const noexcept;
  void begin_decode(Sequence& sequence, std::int32_t first_token);
  void check_reserved_blocks(const Sequence& sequence) const;
  std::unique_ptr<Sequence> make_fork(const Sequence& parent, std::size_t max_new_tokens) const;
  bool share_blocks(const Sequence& parent, Sequence& child);
  void end(Sequence& sequence);
  void return_seats(const Sequence& sequence);
  void note_generations(Sequence& sequence, std::size_t from) const;
  [[nodiscard]] bool lost(const Sequence& sequence, std::size_t index) const;
  void forget_lost_blocks(Sequence& sequence) const;
  void release_blocks(Sequence& sequence);
  void enqueue(Sequence& sequence);
  void dequeue(Sequence& sequence);

  // Planning (step_scheduler_plan.cpp)
  void seat_ready();
  void grow_decodes(StepPlan& plan);
  bool grow(Sequence& sequence);
  [[nodiscard]] Sequence& victim() const;
  void preempt(StepPlan& plan, Sequence& sequence);
  void plan_decodes(StepPlan& plan);
  void plan_prefills(StepPlan& plan);
  [[nodiscard]] bool overtakes(const Sequence& waiting, const Sequence& row) const noexcept;
  bool admit(std::size_t row);
  [[nodiscard]] std::size_t chunk_of(const Sequence& sequence, std::size_t budget) const noexcept;
  void emit(StepPlan& plan, Sequence& sequence, std::size_t query);
  void append_tokens(StepPlan& plan, const Sequence& sequence, std::size_t query) const;

  // One step further (step_scheduler_ahead.cpp)
  [[nodiscard]] bool can_follow() const noexcept;
  [[nodiscard]] static bool has_more(const Sequence& sequence) noexcept;
  void emit_ahead(StepPlan& plan, Sequence& sequence, std::size_t row) const;
  void promote_ahead();
  void forget_ahead();

  // Host memory (step_scheduler_swap.cpp)
  void swap_out(StepPlan& plan, Sequence& sequence);
  void swap_in(StepPlan& plan, const Sequence& sequence) const;
  void restored(Sequence& sequence);
  void forget_host(Sequence& sequence);
  void forget_swapped_out();

  // After a step (step_scheduler_advance.cpp)
  void step_done(Sequence& sequence, bool sampled, std::int32_t token);
  void commit_full_blocks(Sequence& sequence);
  void finish_copy(Sequence& sequence);
  void leave_table(Sequence& sequence);

  void check_sequence(const Sequence& sequence) const;

  BlockManager& blocks_;
  std::size_t block_tokens_;
  std::size_t max_seqs_;
  std::size_t max_batched_tokens_;
  std::size_t max_chunk_tokens_;
  bool by_priority_;
  bool by_cost_;

  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  WaitingQueue waiting_;
  RowTable table_;
  HostBlocks host_;
  std::vector<SequenceId> swapped_out_;  ///< by the outstanding plan
  std::vector<Sequence*> ready_;
  std::vector<Sequence*> in_flight_;  ///< of the outstanding plan, in its order
  std::uint64_t outstanding_ = 0;     ///< step of the outstanding plan; 0 if there is none
  std::vector<Sequence*> ahead_;      ///< of the plan that follows it, in its order
  std::uint64_t next_ = 0;            ///< step of the plan that follows; 0 if there is none
  std::uint64_t steps_ = 0;
  SequenceId last_id_ = 0;
  std::size_t reserved_ = 0;
  std::size_t waiting_tokens_ = 0;
  std::size_t waiting_preempted_ = 0;
  std::vector<BlockId> scratch_;
};

}  // namespace twinpool
