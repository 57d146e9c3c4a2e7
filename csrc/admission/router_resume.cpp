// SPDX-License-Identifier: Apache-2.0
// Answers that go on elsewhere behind the tokens that their client has.
#include "admission/router_core.h"

namespace twinpool::admission {

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
