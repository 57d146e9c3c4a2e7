// SPDX-License-Identifier: Apache-2.0
// Content hashes of KV blocks. The byte strings below are the contract between router and workers, whatever their
// build, process or language; tests/unit/core/golden_hash.json pins them.
//
//   root  = SHA-256( "tp.root1" || field* )[:16]      field = tag (1 byte) || length (8 bytes LE) || bytes
//   block = SHA-256( "tp.blk.1" || parent (16 bytes) || tokens (4 bytes LE each) )[:16]
//
// Fields: 1 fingerprint, 2 tenant salt, 3 adapter. An absent field is left out; an empty one is there with length 0.
// Tag and length in front of each field keep salt "x" apart from adapter "x", and any split of bytes between fields.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "hash/hash128.h"

namespace twinpool {

struct Namespace {
  std::span<const std::uint8_t> fingerprint;
  std::optional<std::span<const std::uint8_t>> tenant_salt;
  std::optional<std::span<const std::uint8_t>> adapter;
};

Hash128 root_hash(const Namespace& fields);

/// Hash of one full block whose predecessor (or root) is ``parent``.
Hash128 block_hash(const Hash128& parent, std::span<const std::int32_t> tokens);

/// Chained hashes of the full blocks of ``tokens``; appends to ``out``. A partial last block has none. The parent comes
/// by value: it may be the last of ``out``.
void hash_blocks(Hash128 parent, std::span<const std::int32_t> tokens, std::size_t block_tokens,
                 std::vector<Hash128>& out);

}  // namespace twinpool
