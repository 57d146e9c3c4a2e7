// SPDX-License-Identifier: Apache-2.0
// Chooses the pair of workers for a request: least predicted time to first
// token plus harm to running streams.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "placement/worker_table.h"

namespace twinpool::placement {

struct PlacementLimits {
  std::int64_t prefill_window_tokens = 0;     // 0: no limit
  std::int64_t transfer_window_requests = 0;  // 0: no limit
  double harm_weight = 0.1;                   // seconds of delay that a second of slowed streams is worth
  double harm_horizon_tokens = 64.0;          // output tokens that the harm is counted over at most
  bool prefix_fetch = false;                  // a worker may pull a cached prefix from any other
  bool local_prefill = false;                 // a decode worker may compute a prompt itself
  double quiet_arrivals = 1.0;                // requests a second and decode worker to expect
                                              // where fewer were seen
};

/// A worker that served the last turn of a request's session.
struct Preferred {
  WorkerRef worker;
  std::int64_t blocks = 0;  // leading ones of the prompt that it then had
  template <typename A>
  void archive(A& a) {
    a(worker, blocks);
  }
};

struct Query {
  double now = 0.0;
  std::uint32_t pool = 0;
  std::span<const std::uint32_t> cached_blocks;  // by index slot
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;  // expected, of one choice
  std::int64_t choices = 1;
  double arrivals = 0.0;     // requests of the pool a second, of late
  double waiting = 0.0;      // others of the pool that wait in the router
  std::uint64_t anchor = 0;  // of the prompt's content: what routers break ties alike by; 0: unknown
  std::span<const WorkerRef> avoid;
  std::span<const Preferred> prefer;
  std::string_view adapter;  // that a worker must have; empty: the base model
  bool any_load = false;     // predict on ready workers as if all had room
};

/// Seconds of each part of a pair's cost.
struct CostTerms {
  double prefill_wait = 0.0;
  double fetch = 0.0;  // what of the pull of a prefix is not hidden behind the wait
  double compute = 0.0;
  double transfer = 0.0;  // what of the pull is not hidden behind the compute
  double decode_wait = 0.0;
  double harm = 0.0;

  [[nodiscard]] double total() const noexcept { return prefill_wait + fetch + compute + transfer + decode_wait + harm; }
  template <typename A>
  void archive(A& a) {
    a(prefill_wait, fetch, compute, transfer, decode_wait, harm);
  }
  [[nodiscard]] double first_token() const noexcept { return prefill_wait + fetch + compute; }
};

struct Candidate {
  WorkerRef prefill;  // the decode worker itself if ``local``
  WorkerRef decode;
  WorkerRef fetch_from;           // invalid: nothing is fetched
  std::int64_t fetch_blocks = 0;  // leading blocks of the prompt that it holds
  bool local = false;
  CostTerms terms;
  std::int64_t prefill_cached_blocks = 0;  // without what is fetched
  std::int64_t decode_cached_blocks = 0;
  std::int64_t uncached_tokens = 0;  // to compute
  std::int64_t prompt_blocks = 0;    // to allocate on the decode worker
  std::int64_t growth_blocks = 0;    // expected of the output
  template <typename A>
  void archive(A& a) {
    a(prefill, decode, fetch_from, fetch_blocks, local, terms, prefill_cached_blocks, decode_cached_blocks,
      uncached_tokens, prompt_blocks, growth_blocks);
  }
};

enum class Obstacle : std::uint8_t {
  none,
  no_prefill_worker,  // none of the pool is ready
  no_decode_worker,
  no_adapter,      // ready ones exist, but none that has the request's adapter
  no_pair,         // ready ones exist, but no two of one fingerprint
  prefill_window,  // every prefill worker's window is full
  prefill_blocks,
  decode_sequences,
  decode_blocks,
  transfer_window,
  refused,  // only workers that refused or failed this request are left
};
const char* name_of(Obstacle obstacle) noexcept;

struct Decision {
  static constexpr std::size_t k_others = 3;
  Obstacle obstacle = Obstacle::none;
  Candidate best;
  std::array<Candidate, k_others> others;  // next best, for ``explain``
  std::size_t others_count = 0;
  std::uint32_t pairs = 0;  // looked at
  double retry_at = 0.0;    // when a back-off or quarantine ends; 0: none
  template <typename A>
  void archive(A& a) {
    a(obstacle, best, others, others_count, pairs, retry_at);
  }
};

class Placer {
 public:
  Placer(WorkerTable& workers, const PlacementLimits& limits)
      : workers_(workers),
        limits_(limits) {}

  /// For placements from now on.
  void set_limits(const PlacementLimits& limits) noexcept { limits_ = limits; }
  /// Changes nothing but the scratch memory.
  void choose(const Query& query, Decision& decision);
  /// Counts a placement, so that the next tie goes elsewhere.
  void chosen(const Candidate& candidate);
  template <typename A>
  void archive(A& a) {
    a(rotation_);
  }

 private:
  /// How a worker comes by the KV of a prompt: what it has, what it pulls from
  /// whom, what it computes.
  struct Source {
    std::int64_t cached = 0;  // its own leading blocks that it can use
    std::int64_t uncached = 0;
    double fetch = 0.0;
    double compute = 0.0;
    WorkerRef fetch_from;
    std::int64_t fetch_blocks = 0;
  };
  struct PrefillSide {
    std::uint32_t slot, fingerprint;
    Source source;
    double wait, done;  // done: seconds from placement to the first token
    double harm;        // what the compute delays others
    double cost;        // done and harm; equal for those that are alike
    std::uint64_t pull, served, turn;
    bool preferred;
    bool unknown;
    bool full;  // takes nothing now; only what it would cost is looked at
  };
  struct DecodeSide {
    std::uint32_t slot, fingerprint;
    std::int64_t cached, prompt_blocks, growth_blocks;
    double transfer, last_chunk, wait, harm;
    bool local;  // it may compute the prompt itself:
    Source local_source;
    double local_wait, local_harm;
    std::uint64_t served, turn;
    bool preferred;
    bool unknown;
  };

  Obstacle prefill_sides(const Query& query, Decision& decision);
  Obstacle decode_sides(const Query& query, Decision& decision);
  void add_prefill(const Query& query, const Worker& worker, std::uint32_t slot, std::int64_t cached);
  void add_decode(const Query& query, const Worker& worker, std::uint32_t slot, std::int64_t cached);
  void add_local(const Query& query, const Worker& worker, std::int64_t cached, double busy, DecodeSide& side) const;
  [[nodiscard]] Source source_of(const Query& query, const Worker& worker, std::int64_t cached, double wait,
                                 double pressure) const;
  [[nodiscard]] double prefill_pressure(const Query& query) const;
  void settle_alike(const Query& query);
  void fetch_option(const Query& query, const Worker& worker, double wait, double pressure, Source& source) const;
  void pairs(Decision& decision);
  void offer(Decision& decision, const PrefillSide* prefill,
             const DecodeSide& decode);  // no prefill: local
  void keep_other(Decision& decision, const PrefillSide* prefill, const DecodeSide& decode, double transfer,
                  double total);
  Candidate candidate(const PrefillSide* prefill, const DecodeSide& decode, double transfer) const;

  WorkerTable& workers_;
  PlacementLimits limits_;
  std::uint64_t rotation_ = 0;
  double pressure_ = 0.0;
  std::vector<PrefillSide> prefill_;
  std::vector<DecodeSide> decode_;
  std::size_t decode_workers_ = 0;  // that are ready, with room or without
  std::array<std::uint64_t, 4> best_tie_{};
  double best_total_ = 0.0;
  double blocked_total_ = 0.0;  // least cost of a pair whose prefill worker is full
};

}  // namespace twinpool::placement
