// SPDX-License-Identifier: Apache-2.0
#include "scheduler/config.h"

#include "core/error.h"

namespace twinpool {

namespace {

constexpr std::int64_t seats_limit = 65'536;
constexpr std::int64_t tokens_limit = 16'777'216;

void require_range(const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
  require(value >= least && value <= most, [&] {
    return std::string(field) + " is " + std::to_string(value) + "; allowed are " + std::to_string(least) + " to " +
           std::to_string(most);
  });
}

}  // namespace

void SchedulerConfig::validate() const {
  require_range("max_num_seqs", max_num_seqs, 1, seats_limit);
  require_range("max_batched_tokens", max_batched_tokens, max_num_seqs, tokens_limit);
  require_range("max_chunk_tokens", max_chunk_tokens, 1, tokens_limit);
  require_range("max_overtaken", max_overtaken, 0, tokens_limit);
  require_range("host_blocks", host_blocks, 0, tokens_limit);
  require(policy == "fcfs" || policy == "priority" || policy == "shortest_uncached",
          [&] { return "policy is \"" + policy + "\"; allowed are \"fcfs\", \"priority\" and \"shortest_uncached\""; });
}

}  // namespace twinpool
