// SPDX-License-Identifier: Apache-2.0
// Chooses the pair of workers for a request: least predicted time to first token plus harm to running streams.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "placement/worker_table.h"

namespace twinpool::placement {

struct PlacementLimits {
  std::int64_t prefill_window_tokens = 0;     // 0: no limit
  std::int64_t transfer_window_requests = 0;  // 0: no limit
  double harm_weight = 0.1;                   // seconds of delay that a second of slowed streams is worth
  double harm_horizon_tokens = 64.0;          // output tokens that the harm is counted over at most
  bool prefix_fetch = false;                  // a prefill worker may pull a cached prefix from any worker
  bool local_prefill = false;                 // a decode worker may compute a short suffix itself
};

struct Query {
  double now = 0.0;
  std::uint32_t pool = 0;
  std::span<const std::uint32_t> cached_blocks;  // by index slot
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;  // expected, of one choice
  std::int64_t choices = 1;
  std::span<const WorkerRef> avoid;
  bool any_load = false;  // predict on ready workers as if all had room
};

/// Seconds of each part of a pair's cost.
struct CostTerms {
  double prefill_wait = 0.0;
  double fetch = 0.0;
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
  WorkerRef fetch_from;  // invalid: nothing is fetched
  bool local = false;
  CostTerms terms;
  std::int64_t prefill_cached_blocks = 0;
  std::int64_t decode_cached_blocks = 0;
  std::int64_t uncached_tokens = 0;  // to compute
  std::int64_t prompt_blocks = 0;    // to allocate on the decode worker
  std::int64_t growth_blocks = 0;    // expected of the output
  template <typename A>
  void archive(A& a) {
    a(prefill, decode, fetch_from, local, terms, prefill_cached_blocks, decode_cached_blocks, uncached_tokens,
      prompt_blocks, growth_blocks);
  }
};

enum class Obstacle : std::uint8_t {
  none,
  no_prefill_worker,  // none of the pool is ready
  no_decode_worker,
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

  /// Changes nothing but the scratch memory.
  void choose(const Query& query, Decision& decision);
  /// Counts a placement, so that the next tie goes elsewhere.
  void chosen(const Candidate& candidate);
  template <typename A>
  void archive(A& a) {
    a(rotation_);
  }

 private:
  struct PrefillSide {
    std::uint32_t slot, fingerprint;
    std::int64_t cached, uncached;
    double wait, fetch, compute, done;  // done: seconds from placement to the first token
    std::uint64_t served, turn;
    WorkerRef fetch_from;
    bool unknown;
  };
  struct DecodeSide {
    std::uint32_t slot, fingerprint;
    std::int64_t cached, prompt_blocks, growth_blocks;
    double transfer, last_chunk, wait, harm;
    double local_compute, local_harm;  // negative compute: not offered
    std::int64_t local_uncached;
    std::uint64_t served, turn;
    bool unknown;
  };

  Obstacle prefill_sides(const Query& query, Decision& decision);
  Obstacle decode_sides(const Query& query, Decision& decision);
  void add_prefill(const Query& query, const Worker& worker, std::uint32_t slot, std::int64_t cached);
  void add_decode(const Query& query, const Worker& worker, std::uint32_t slot, std::int64_t cached);
  void fetch_option(const Query& query, const Worker& worker, PrefillSide& side) const;
  void pairs(Decision& decision);
  void offer(Decision& decision, const PrefillSide* prefill, const DecodeSide& decode);  // no prefill: local
  void keep_other(Decision& decision, const PrefillSide* prefill, const DecodeSide& decode, double transfer,
                  double total);
  Candidate candidate(const PrefillSide* prefill, const DecodeSide& decode, double transfer) const;

  WorkerTable& workers_;
  PlacementLimits limits_;
  std::uint64_t rotation_ = 0;
  std::vector<PrefillSide> prefill_;
  std::vector<DecodeSide> decode_;
  std::array<std::uint64_t, 3> best_tie_{};
  double best_total_ = 0.0;
};

}  // namespace twinpool::placement
