// SPDX-License-Identifier: Apache-2.0
#include "transfer/cover.h"

#include <algorithm>
#include <iterator>

namespace twinpool {

namespace {

struct Run {
  std::int64_t first;
  std::int64_t last;
  std::int64_t offset;  // of its first entry
};

std::vector<Run> runs_of(std::span<const std::int32_t> blocks, std::int64_t gap) {
  const auto [low, high] = std::ranges::minmax(blocks);
  if (std::int64_t{high} - low <= gap) {
    return {{low, high, 0}};
  }
  std::vector<std::int32_t> ordered(blocks.begin(), blocks.end());
  std::ranges::sort(ordered);
  std::vector<Run> runs{{ordered.front(), ordered.front(), 0}};
  for (const std::int32_t block : ordered) {
    Run& run = runs.back();
    if (block - run.last <= gap) {
      run.last = block;
    } else {
      runs.push_back({block, block, run.offset + run.last - run.first + 1});
    }
  }
  return runs;
}

}  // namespace

Cover cover(std::span<const std::int32_t> blocks, std::int64_t gap) {
  Cover found;
  if (blocks.empty()) {
    return found;
  }
  const std::vector<Run> runs = runs_of(blocks, gap);
  found.entries.reserve(static_cast<std::size_t>(runs.back().offset + runs.back().last - runs.back().first + 1));
  for (const Run& run : runs) {
    for (std::int64_t entry = run.first; entry <= run.last; ++entry) {
      found.entries.push_back(static_cast<std::int32_t>(entry));
    }
  }
  found.positions.reserve(blocks.size());
  for (const std::int64_t block : blocks) {
    const auto after = std::ranges::upper_bound(runs, block, {}, &Run::first);
    const Run& run = *std::prev(after);
    found.positions.push_back(run.offset + block - run.first);
  }
  return found;
}

}  // namespace twinpool
