// SPDX-License-Identifier: Apache-2.0
// Which entries of a generation table to read for a set of blocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace twinpool {

struct Cover {
  std::vector<std::int32_t> entries;    // ascending
  std::vector<std::int64_t> positions;  // entries[positions[i]] == blocks[i]
};

/// Entries that cover ``blocks``, which may come in any order and more than once. Blocks that are at most ``gap`` apart
/// are joined into one run, with what lies between them. Costs a sort of the blocks, and the entries.
Cover cover(std::span<const std::int32_t> blocks, std::int64_t gap);

}  // namespace twinpool
