// SPDX-License-Identifier: Apache-2.0
// Short names for tests of pinned prefixes.
#pragma once

#include <string>
#include <vector>

#include "tests/block_fixture.h"

namespace twinpool::test {

inline PrefixPinOwner owner(const std::string& pin, double expires_at, const std::string& tenant = "t",
                            const std::string& session = "") {
  return {.pin = pin, .tenant = tenant, .session = session, .expires_at = expires_at};
}

/// The first ``shared`` hashes of one chain and ``count`` more of another token.
inline Hashes branch(std::size_t shared, std::int32_t token, std::size_t count) {
  Hashes hashes = chain(1, shared);
  const Hashes rest = chain(token, count, hashes.empty() ? Hash128{} : hashes.back());
  hashes.insert(hashes.end(), rest.begin(), rest.end());
  return hashes;
}

inline std::vector<std::uint64_t> generations_of(const BlockPool& pool, const Ids& ids) {
  std::vector<std::uint64_t> found;
  for (const BlockId id : ids) {
    found.push_back(pool.manager.generation(id));
  }
  return found;
}

}  // namespace twinpool::test
