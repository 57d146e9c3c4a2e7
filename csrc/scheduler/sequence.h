// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "blocks/block.h"
#include "hash/hash128.h"
#include "scheduler/host_blocks.h"

namespace twinpool {

using SequenceId = std::int64_t;

/// Positions are int32; prompt and output may take half of them each.
constexpr std::int64_t length_limit = std::numeric_limits<std::int32_t>::max() / 2;
/// Output tokens for which a sequence makes room at once; more of them grow the vector as usual.
constexpr std::size_t output_room = 1024;

inline std::string name_of(SequenceId id) {
  return "sequence " + std::to_string(id);
}

enum class SequenceState : std::uint8_t {
  waiting,     ///< no blocks; in the waiting queue
  reserved,    ///< blocks, but its prompt's KV has not arrived; no row
  ready,       ///< decodes from the next plan on; gets its row there
  prefilling,  ///< a row behind the decodes; more than its newest token is to be computed
  decoding,    ///< a row among the decodes; exactly its newest token is to be computed
  done,        ///< blocks, but no row; nothing more is computed
};

/// One sequence. Tokens are prompt then output; KV is in ``blocks`` for the first ``computed`` of them.
/// Between plans: committed == computed / block_tokens, and blocks cover computed (all tokens while prefilling).
/// If it was preempted to host memory, the KV of the first ``restorable`` tokens is in ``host`` until the first step
/// after its next admission has run.
struct Sequence {
  SequenceId id = 0;
  SequenceState state = SequenceState::waiting;
  bool planned = false;       ///< part of the outstanding plan
  bool ahead = false;         ///< part of the plan that was made ahead
  bool removed = false;       ///< removed while planned; ends with the last plan that it is part of
  bool preempted = false;     ///< waits after a preemption
  bool follower = false;      ///< a fork that was made before its parent's start, and so starts with it
  bool knows_cached = false;  ///< cached_tokens is set
  bool preemptible = true;    ///< false: it gets all blocks that it may ever need at once, and keeps them
  bool use_cache = true;      ///< false: until its first token is drawn, no position is taken from the cache
  bool overdue = false;       ///< waits, and has been overtaken as often as is allowed
  std::int64_t rank = 0;      ///< higher goes first; the priority, or 0 under fcfs
  std::size_t cost = 0;       ///< lower goes first: tokens to compute when it began to wait, or 0 under other policies
  double arrival = 0;
  std::uint64_t waits_since = 0;  ///< admissions that had been made when it began to wait
  Sequence* older = nullptr;      ///< its neighbours in the order in which they began to wait
  Sequence* newer = nullptr;

  std::size_t prompt_tokens = 0;
  std::size_t max_new_tokens = 0;
  std::size_t computed = 0;
  std::size_t committed = 0;      ///< leading blocks that are published
  std::size_t query = 0;          ///< tokens that the outstanding plan computes
  std::size_t cached_tokens = 0;  ///< found in the cache when it first got blocks
  std::size_t row = 0;            ///< while prefilling or decoding

  std::vector<std::int32_t> tokens;
  std::vector<BlockId> blocks;
  std::vector<Hash128> hashes;  ///< of its leading full blocks, as far as known
  Hash128 root;

  std::vector<HostBlock> host;  ///< copies of its leading blocks
  std::size_t restorable = 0;

  BlockId copy_source = no_block;  ///< referenced until its content has been copied to copy_target, a block of this one
  BlockId copy_target = no_block;
  /// While reserved: generations of blocks[private_from...], which only this sequence may hold.
  std::vector<std::uint64_t> generations;
  std::size_t private_from = 0;
  std::vector<SequenceId> forks;  ///< while reserved: those that start with it
  std::int32_t first_token = 0;   ///< of a fork that is still reserved
  std::size_t spare_seats = 0;    ///< while reserved: kept for its forks
  SequenceId seat_of = 0;         ///< of a fork that sits on a spare seat of that sequence

  /// Tokens whose KV need not be computed: what is there, and what the next step brings back from the host.
  [[nodiscard]] std::size_t known() const noexcept { return std::max(computed, restorable); }
  [[nodiscard]] std::size_t left() const noexcept { return tokens.size() - known(); }
  /// The planned step computes its newest token and so samples the next.
  [[nodiscard]] bool samples() const noexcept { return query == left(); }
  [[nodiscard]] std::size_t outputs() const noexcept { return tokens.size() - prompt_tokens; }
  /// Leading blocks that the cache may give it. At least the last token is computed: its result is the next token.
  [[nodiscard]] std::size_t cacheable(std::size_t block_tokens) const noexcept {
    return use_cache || outputs() > 0 ? std::min(hashes.size(), (tokens.size() - 1) / block_tokens) : 0;
  }
};

}  // namespace twinpool
