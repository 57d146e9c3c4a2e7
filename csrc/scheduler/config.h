// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace twinpool {

/// Limits of a step.
struct SchedulerConfig {
  std::int64_t max_num_seqs = 64;          ///< sequences that run or are reserved; rows of the block table
  std::int64_t max_batched_tokens = 2048;  ///< query tokens of a step; at least max_num_seqs, so that all decodes fit
  std::int64_t max_chunk_tokens = 512;     ///< query tokens of one sequence in a step: what a decode waits for at most
  /// Who is served first: "fcfs", by arrival; "priority", then by arrival; "shortest_uncached", who has the fewest
  /// tokens to compute. Under "priority" it also decides first who gives way.
  std::string policy = "fcfs";
  /// Admissions that a waiting sequence sees at most before it goes first, whatever the policy; 0: no bound.
  std::int64_t max_overtaken = 64;
  /// Blocks of host memory in which preempted sequences keep their KV; 0: they are recomputed.
  std::int64_t host_blocks = 0;

  /// Throws CoreError that names the field, its value and what is allowed.
  void validate() const;
};

}  // namespace twinpool
