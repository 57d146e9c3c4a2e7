// SPDX-License-Identifier: Apache-2.0
// How often and when a request may be tried again, and answers that go on behind the tokens that their client has.
#include <algorithm>
#include <cmath>

#include "admission/router_core.h"

namespace twinpool::admission {

bool RouterCore::attempts_left(const Request& request) const noexcept {
  return request.delivered ? request.resumes < config_.max_resumes : request.failures + 1 < config_.max_attempts;
}

void RouterCore::count_failure(double now, Request& request) const noexcept {
  ++(request.delivered ? request.resumes : request.failures);
  const auto doublings = static_cast<int>(std::min<std::int64_t>(request.failures + request.resumes - 1, 6));
  request.return_at = now + std::ldexp(config_.retry_backoff_seconds, doublings);
}

bool RouterCore::extend(std::uint64_t id, std::int64_t prompt_tokens, std::int64_t max_new_tokens,
                        std::span<const std::uint8_t> hashes) {
  const auto found = requests_.find(id);
  require(found != requests_.end(), [&] { return "request " + std::to_string(id) + " is not known"; });
  Request& request = found->second;
  if (terminal(request.state)) {
    return false;
  }
  if (!std::holds_alternative<Retrying>(request.state)) {
    illegal_event("extend", name_of(request.state));
  }
  require(prompt_tokens >= request.prompt_tokens, "prompt_tokens; allowed: at least as many as before");
  require(max_new_tokens >= 1, "max_new_tokens; allowed: at least 1");
  require(hashes.size() % prefix::k_hash_bytes == 0, "hashes; allowed: 16 bytes each");
  request.prompt_tokens = prompt_tokens;
  request.max_new_tokens = max_new_tokens;
  request.hashes.assign(hashes.begin(), hashes.end());
  return true;
}

}  // namespace twinpool::admission
