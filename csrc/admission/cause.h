// SPDX-License-Identifier: Apache-2.0
// Why a request ended, or was refused. The client's status depends on this alone.
#pragma once

#include <cstdint>
#include <string_view>

namespace twinpool::admission {

enum class Cause : std::uint8_t {
  none,
  // Refusals.
  duplicate_request,
  tenant_concurrency,
  tenant_rate,
  exceeds_capacity,
  no_workers,
  deadline_unreachable,
  queue_full,
  // Ends in the queue.
  queue_timeout,
  // Ends at any time.
  cancelled,
  deadline_exceeded,
  // Failed attempts.
  no_capacity,
  worker_lost,
  kv_fenced,
  transfer_failed,
  invalid_argument,
  internal,
};

/// UPPER_SNAKE, as in docs/errors.md; empty for ``none``.
std::string_view name_of(Cause cause) noexcept;

/// What a worker said about a failed leg: the name of a FailureReason of worker.proto without its prefix.
struct Failure {
  Cause cause = Cause::internal;
  bool retryable = false;
  bool same_worker = true;  // false: a retry must not use the worker again
  bool counted = true;      // false: the worker leaves in good order, which costs no attempt
};
/// Throws CoreError that names the allowed ones.
Failure parse_failure(std::string_view reason);

}  // namespace twinpool::admission
