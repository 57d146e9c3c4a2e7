// SPDX-License-Identifier: Apache-2.0
// Admission, placement and prefix index of one router. No I/O, no clock, no threads: ``now`` is seconds, passed in,
// and never runs backwards by more than the caller wishes. Same calls, same answers.
//
// The caller's loop:
//   1. ``upsert_worker``, ``report_load``, ``index_*`` as news come in.
//   2. ``submit`` each request; a refusal says why and when to retry.
//   3. ``plan`` after each submit and advance, and when ``next_wake`` says so; do what the actions say.
//   4. ``advance`` with what the workers and the client do; stop at a terminal state, then ``forget``.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "admission/config.h"
#include "admission/machine.h"
#include "admission/pool.h"
#include "admission/request.h"
#include "hash/hash128.h"
#include "placement/placer.h"
#include "placement/worker_table.h"
#include "prefix/prefix_index.h"

namespace twinpool::admission {

using WorkerName = std::pair<std::string, std::uint64_t>;

/// Name, incarnation, and how many leading blocks of the prompt the worker had after its session's last turn; 0: that
/// was too long ago to say.
using SessionWorker = std::tuple<std::string, std::uint64_t, std::int64_t>;
inline constexpr std::size_t k_prefer_max = 8;

struct SubmitArguments {
  std::string request_id;
  std::string pool;
  std::string tenant;
  std::int64_t prompt_tokens = 0;
  std::int64_t max_new_tokens = 0;
  std::int64_t choices = 1;
  std::int64_t bytes = 0;
  int priority = 0;
  double deadline = 0.0;  // on the same clock as now; 0: none
  std::span<const std::uint8_t> hashes;
  bool preemptible = true;
  std::string adapter;  // empty: the base model
  std::vector<SessionWorker> prefer;
};

struct Submission {
  bool accepted = false;
  std::uint64_t request = 0;
  Cause reason = Cause::none;
  std::string limit;  // the limit that was hit, with its value
  double retry_after = 0.0;
};

struct Action {
  enum class Kind : std::uint8_t { place, end, preempt };
  Kind kind = Kind::place;
  std::uint64_t request = 0;
  std::uint32_t attempt = 0;
  std::uint64_t by = 0;  // of preempt: the request that it gives way to
  WorkerName prefill;
  WorkerName decode;
  WorkerName fetch_from;  // empty name: nothing is fetched
  std::int64_t fetch_blocks = 0;
  bool local = false;
  std::int64_t prefill_cached_blocks = 0;
  std::int64_t decode_cached_blocks = 0;
  double ttft_seconds = 0.0;
  std::string_view state;
  Cause cause = Cause::none;
  double retry_after = 0.0;
};

struct Transition {
  bool applied = false;
  std::string_view state;
  bool terminal = false;
  Cause cause = Cause::none;
  std::uint32_t attempt = 0;
};

class RouterCore {
 public:
  explicit RouterCore(const AdmissionConfig& config);
  RouterCore(const RouterCore&) = delete;
  RouterCore& operator=(const RouterCore&) = delete;
  ~RouterCore() = default;

  /// Other limits from now on, as if the core had begun with them: requests that wait are placed, ordered and refused
  /// by them, but keep the end of their time in the queue. Throws CoreError, and changes nothing, for another value of
  /// a field that counts at the start alone (router_configure.cpp).
  void configure(double now, const AdmissionConfig& config);

  // Cluster view (router_workers.cpp). Figures of unknown incarnations are ignored: they are late.
  void upsert_worker(double now, const placement::WorkerSpec& spec);
  void remove_worker(double now, const std::string& name, std::uint64_t incarnation);
  void report_load(double now, const std::string& name, std::uint64_t incarnation, placement::LoadReport load);
  /// ``probation``: once it is over, the worker gets one placement, and no other before the next call of this.
  void quarantine(double now, const std::string& name, std::uint64_t incarnation, double until, bool probation = false);
  void observe_prefill(const std::string& name, std::uint64_t incarnation, std::int64_t tokens,
                       std::int64_t cached_tokens, double seconds);
  void observe_transfer(const std::string& name, std::uint64_t incarnation, std::int64_t blocks, double seconds);
  /// Seconds that a pull of ``blocks`` blocks by the worker is expected to take; 0 for an unknown incarnation.
  [[nodiscard]] double predict_transfer(const std::string& name, std::uint64_t incarnation, std::int64_t blocks);
  /// Seeds a worker's cost model; ``kind``: "prefill", "transfer" or "step".
  void set_cost_model(const std::string& name, std::uint64_t incarnation, const std::string& kind,
                      const std::array<double, 3>& coefficients);
  void set_tenant(double now, const std::string& tenant, const TenantLimits& limits);

  // Prefix index (router_workers.cpp).
  void index_stored(const std::string& name, std::uint64_t incarnation, prefix::HashBytes hashes, prefix::Tier tier,
                    bool counted);
  void index_removed(const std::string& name, std::uint64_t incarnation, prefix::HashBytes hashes, prefix::Tier tier);
  void index_cleared(const std::string& name, std::uint64_t incarnation);
  /// All blocks that a worker holds in a tier, in no order; none for an unknown worker.
  void index_hashes(const std::string& name, std::uint64_t incarnation, prefix::Tier tier,
                    std::vector<Hash128>& out) const;
  /// Live workers that hold at least the first block, in the order of their slots.
  void longest_prefix(prefix::HashBytes hashes, std::vector<std::pair<const placement::Worker*, std::uint32_t>>& out);

  // Requests.
  Submission submit(double now, const SubmitArguments& arguments);  // router_submit.cpp
  void plan(double now, std::vector<Action>& actions);              // router_plan.cpp
  [[nodiscard]] double next_wake(double now) const;                 // k_never: no need
  Transition advance(double now, std::uint64_t request, std::uint32_t attempt, std::string_view event,
                     std::string_view detail);  // router_advance.cpp
  /// A request in Retrying of which the client has tokens: they become the end of its prompt, and ``max_new_tokens`` is
  /// what is left to generate. False if it has ended meanwhile.
  bool extend(std::uint64_t request, std::int64_t prompt_tokens, std::int64_t max_new_tokens,
              std::span<const std::uint8_t> hashes);
  void forget(std::uint64_t request);
  [[nodiscard]] std::string_view state(std::uint64_t request) const;

  // What there is (router_stats.cpp).
  [[nodiscard]] std::map<std::string, std::int64_t> stats() const;
  /// By pool: requests that wait in its queue, and their prompt tokens. Pools without any are left out.
  [[nodiscard]] std::map<std::string, std::pair<std::int64_t, std::int64_t>> queues() const;
  [[nodiscard]] const Request& request(std::uint64_t request) const;
  [[nodiscard]] std::vector<std::pair<std::uint64_t, std::uint32_t>> requests_on(const std::string& name,
                                                                                 std::uint64_t incarnation) const;
  [[nodiscard]] const placement::WorkerTable& workers() const noexcept { return workers_; }
  [[nodiscard]] const prefix::PrefixIndex& index() const noexcept { return index_; }
  [[nodiscard]] const AdmissionConfig& config() const noexcept { return config_; }

  /// The whole state as bytes; ``load`` of another core of the same configuration makes the two decide alike from then
  /// on. Throws CoreError for bytes that are not such a state, after which the core is not to be used
  /// (core_archive.cpp).
  void save(std::string& out);
  void load(std::span<const char> in);

 private:
  template <typename A>
  void archive(A& a);
  void attach(Request& request);

  // Submit.
  struct Refusal {
    Cause cause = Cause::none;
    std::string limit;
    double retry_after = 0.0;
  };
  void check_arguments(double now, const SubmitArguments& arguments) const;
  Refusal check_tenant(double now, const SubmitArguments& arguments, TenantId tenant);
  Refusal check_capacity(const SubmitArguments& arguments, Pool& pool) const;
  Refusal check_deadline(double now, const Request& request, Pool& pool);
  Refusal check_queue(double now, const Request& request, Pool& pool);
  QueuePlace enter_queue(double now, Request& request, bool front);
  double due_without_deadline(double now, const Request& request);
  double drain_seconds(double now, Pool& pool, double tokens) const;
  /// Of each token behind the first, on that pair; 0 where that is not known.
  double token_seconds(const Request& request, const placement::Candidate& pair) const;
  double predicted_seconds(double now, const Request& request, const placement::Candidate& pair) const;
  void note_slip(double now, const Request& request);
  [[nodiscard]] double clamp_retry(double seconds) const noexcept;

  // Plan.
  void expire(double now, std::vector<Action>& actions);
  void place_pool(double now, Pool& pool, std::vector<Action>& actions);
  bool try_place(double now, Pool& pool, Request& request);
  bool fits_another(double now, const Request& request);
  void place(double now, Pool& pool, Request& request, std::vector<Action>& actions);
  bool preempt_for(double now, Pool& pool, const Request& request, std::vector<Action>& actions);
  void end_action(const Request& request, std::vector<Action>& actions, double retry_after);
  void decide(double now, const Request& request, placement::Decision& decision, bool any_load);
  [[nodiscard]] bool has_ready_pair(const Pool& pool) const;

  // Advance.
  bool on_decode_refused(double now, Request& request);
  bool on_first_token(double now, Request& request);
  bool on_tokens(double now, Request& request, std::string_view detail, bool delivered);
  bool on_worker_lost(double now, Request& request, std::string_view detail);
  bool on_attempt_failed(double now, Request& request, std::string_view detail);
  bool on_requeue(double now, Request& request);
  [[nodiscard]] bool has_other_worker(placement::WorkerRef worker) const noexcept;
  [[nodiscard]] bool attempts_left(const Request& request) const noexcept;
  void count_failure(double now, Request& request) const noexcept;

  /// The one place where states change: counts, timers and ends follow from it.
  template <typename Event>
  bool transition(double now, Request& request, Event&& event) {
    const std::size_t before = request.state.index();
    const bool applied = apply(request.state, event);
    if (applied) {
      changed(now, request, before);
    }
    return applied;
  }
  void changed(double now, Request& request, std::size_t before);
  void set_timer(Request& request);
  Pool& pool_of(const Request& request) { return *pools_[request.pool]; }
  Pool& pool(const std::string& name);

  AdmissionConfig config_;
  prefix::PrefixIndex index_;
  placement::WorkerTable workers_;
  placement::Placer placer_;
  Tenants tenants_;
  std::vector<std::unique_ptr<Pool>> pools_;  // by pool id of the worker table
  std::set<std::pair<double, std::uint64_t>> timers_;
  std::array<std::int64_t, std::variant_size_v<State>> in_state_{};
  std::map<Cause, std::int64_t> refused_;
  std::uint64_t next_request_ = 1;
  std::uint64_t sequence_ = 0;
  std::uint64_t bypassed_ = 0;
  std::uint64_t preempted_ = 0;
  prefix::PrefixLengths lengths_;
  placement::Decision scratch_;
  std::unordered_map<std::string, std::uint64_t> by_request_id_;
  std::unordered_map<std::uint64_t, Request> requests_;  // last: its reservations reach into all above
};

}  // namespace twinpool::admission
