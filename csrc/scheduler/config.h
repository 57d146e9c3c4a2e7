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
  std::string policy = "fcfs";             ///< "fcfs" or "priority": what orders waiting and victims

  /// Throws CoreError that names the field, its value and what is allowed.
  void validate() const;
};

}  // namespace twinpool
