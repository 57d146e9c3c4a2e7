// SPDX-License-Identifier: Apache-2.0
// Limits of admission and placement. Plain numbers, each checked against its range when set.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace twinpool::admission {

struct AdmissionConfig {
  // Queue, counted for each pool. 0: no limit.
  std::int64_t max_queue_requests = 4096;
  std::int64_t max_queue_tokens = 0;  // prompt tokens
  std::int64_t max_queue_bytes = 0;
  double queue_ttl_seconds = 60.0;  // longest wait in the queue
  double ageing_seconds = 10.0;     // a tenant's line that is not served rises one priority each time
  // A request without a deadline is due that many times its expected compute later: short ones go first, and a long one
  // is only passed by those that come within that time. 0: by arrival.
  double order_stretch = 4.0;
  std::int64_t max_bypass = 32;  // smaller requests that may go before one that does not fit yet

  // Attempts.
  std::int64_t max_attempts = 3;       // placements that failed, the first one included
  std::int64_t max_resumes = 0;        // times that an answer of which the client has tokens goes on elsewhere
  std::int64_t max_refusals = 64;      // refusals by decode workers, which cost no attempt
  double retry_backoff_seconds = 0.1;  // until a worker that failed a request gets it again, where all others did too
  double refusal_backoff_seconds = 0.25;  // how long a refusing worker is not asked again if its report stays the same

  // What a tenant without own settings may do. 0: no limit.
  std::int64_t max_tenant_requests = 0;   // in flight, queued ones included
  double tenant_tokens_per_second = 0.0;  // prompt and max_new_tokens together
  double tenant_burst_tokens = 0.0;       // 0: ten seconds' worth
  std::int64_t tenant_max_priority = 100;

  // Joint reservation. 0: no limit.
  std::int64_t prefill_window_tokens = 16384;  // uncached prompt tokens on one prefill worker
  std::int64_t transfer_window_requests = 32;  // hand-offs towards one decode worker

  // Policy.
  std::int64_t refuse_without_workers = 0;  // 1: refuse at once where a role has no worker at all; 0: wait for one
  std::int64_t early_rejection = 1;         // 1: refuse what cannot meet its deadline by prediction
  std::int64_t preemption = 0;            // 1: a higher priority takes the place of a lower one before its first token
  double preemption_grace_seconds = 0.5;  // how long the higher one waits first
  double expected_output_ratio = 0.5;     // of max_new_tokens, until outputs were seen
  double harm_weight = 0.1;               // seconds of delay that a second of slowed streams is worth
  std::int64_t prefix_fetch = 0;          // 1: a worker may pull a cached prefix from any other
  std::int64_t local_prefill = 0;         // 1: a decode worker may compute a prompt itself
  // What a worker is believed to take until it or one like it was measured.
  double prior_prefill_seconds = 2e-3;
  double prior_prefill_token_seconds = 1e-4;
  double prior_transfer_seconds = 1e-3;
  double prior_transfer_block_seconds = 1.3e-4;
  std::int64_t index_max_bytes = std::int64_t{256} * 1024 * 1024;  // memory of the prefix index; 0: no limit
  double retry_after_min_seconds = 0.05;
  double retry_after_max_seconds = 60.0;

  /// Throws CoreError that names the field, the value and the range.
  void set(std::string_view field, double value);
  [[nodiscard]] double get(std::string_view field) const;
  [[nodiscard]] static std::span<const std::string_view> fields() noexcept;
  /// True if the field is a whole number.
  [[nodiscard]] static bool whole(std::string_view field);
};

}  // namespace twinpool::admission
