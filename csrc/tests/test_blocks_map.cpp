// SPDX-License-Identifier: Apache-2.0
#include <random>
#include <unordered_map>

#include "tests/block_fixture.h"

namespace twinpool::test {
namespace {

/// A hash that lands on a chosen place of the map and shares its tag with others, so that probing is really tried.
Hash128 crowded_hash(std::uint64_t home, std::uint64_t tag, std::uint64_t rest) {
  const std::array<std::uint64_t, 2> words = {home, (rest << 32U) | tag};
  return Hash128::from_bytes(words.data());
}

TEST(BlockMap, AgreesWithATableUnderCollisions) {
  std::vector<Block> blocks(64);
  BlockMap map(blocks);
  std::unordered_map<Hash128, BlockId> model;
  std::vector<BlockId> unused;
  for (BlockId id = 0; id < 64; ++id) {
    unused.push_back(id);
  }
  std::mt19937 draw(3);
  for (int round = 0; round < 200000; ++round) {
    // Homes near both ends of the table, so that runs wrap around.
    const std::uint64_t home = (draw() % 2 == 0) ? draw() % 6 : 255 - draw() % 6;
    const Hash128 hash = crowded_hash(home, draw() % 2, draw() % 8);
    const auto known = model.find(hash);
    ASSERT_EQ(map.find(hash), known == model.end() ? no_block : known->second);
    if (known != model.end()) {
      map.erase(known->second);
      unused.push_back(known->second);
      model.erase(known);
    } else if (!unused.empty()) {
      const BlockId id = unused.back();
      unused.pop_back();
      blocks[static_cast<std::size_t>(id)].hash = hash;
      map.insert(id);
      model.emplace(hash, id);
    }
  }
  for (const auto& [hash, id] : model) {
    EXPECT_EQ(map.find(hash), id);
  }
}

}  // namespace
}  // namespace twinpool::test
