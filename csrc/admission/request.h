// SPDX-License-Identifier: Apache-2.0
// One request, from submit to forget. What it holds is in its state; the rest is what is known about it.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "admission/states.h"
#include "placement/placer.h"

namespace twinpool::admission {

inline constexpr double k_never = std::numeric_limits<double>::infinity();

// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding): in the order of meaning
struct Request {
  std::uint64_t id = 0;
  std::string request_id;
  std::string adapter;
  std::uint32_t pool = 0;
  TenantId tenant = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t max_new_tokens = 0;
  std::int64_t choices = 1;
  std::int64_t bytes = 0;
  int priority = 0;
  bool preemptible = true;  // before its first token, by a higher priority
  double arrival = 0.0;
  double deadline = k_never;
  std::vector<std::uint8_t> hashes;          // 16 bytes a full block
  std::vector<placement::Preferred> prefer;  // served its session's last turn

  State state;
  std::uint32_t attempt = 1;  // of the placement that runs, or comes next
  std::int64_t failures = 0;
  std::int64_t resumes = 0;  // failures after the client had tokens
  std::int64_t refusals = 0;
  std::int64_t output_tokens = 0;           // of the attempt, over all choices
  bool delivered = false;                   // the client has tokens
  std::vector<placement::WorkerRef> avoid;  // have failed it
  double return_at = 0.0;                   // before which none of them gets it again

  double queued_at = 0.0;
  double queue_until = k_never;                // end of the longest wait
  double timer_at = k_never;                   // its entry in the timers
  std::int64_t bypassed = 0;                   // times that a smaller request went first
  std::uint64_t blocked_version = UINT64_MAX;  // of the worker table, when it could not be placed
  double blocked_until = 0.0;                  // or until then, whichever comes first

  // The last placement.
  placement::Decision decision;
  bool placed = false;  // ever
  double placed_at = 0.0;
  double computing_since = 0.0;  // as far as is known
  double predicted_first = 0.0;  // seconds from the placement to the first token; 0: not by measurements
  double predicted_token = 0.0;  // seconds of each further one
  bool clean_sample = false;     // the prefill worker was idle: its time tells its speed
  double charged = 0.0;          // virtual time that the tenant paid
  double bucket_tokens = 0.0;    // taken from the tenant's bucket
};

}  // namespace twinpool::admission
