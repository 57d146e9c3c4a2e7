// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "prefix/prefix_index.h"

namespace twinpool::prefix {
namespace {

using Bytes = std::vector<std::uint8_t>;

class Prefix : public ::testing::Test {
 protected:
  std::mt19937_64 random{7};

  Bytes chain(std::size_t blocks) {
    Bytes bytes(blocks * k_hash_bytes);
    for (auto& byte : bytes) {
      byte = static_cast<std::uint8_t>(random());
    }
    return bytes;
  }
  static HashBytes first(const Bytes& bytes, std::size_t blocks) {
    return HashBytes(bytes).first(blocks * k_hash_bytes);
  }
  static HashBytes last(const Bytes& bytes, std::size_t blocks) { return HashBytes(bytes).last(blocks * k_hash_bytes); }
  static std::uint32_t length(PrefixIndex& index, PrefixIndex::Slot slot, HashBytes hashes) {
    PrefixLengths lengths;
    index.longest_prefix(hashes, lengths);
    return slot < lengths.blocks.size() ? lengths.blocks[slot] : 0;
  }
};

TEST_F(Prefix, KeysAreABijectionOfHashes) {
  for (int i = 0; i < 1000; ++i) {
    const Bytes hash = chain(1);
    Bytes back(k_hash_bytes);
    Key::load(hash.data()).store(back.data());
    ASSERT_EQ(hash, back);
  }
}

TEST_F(Prefix, FindsEveryDepthOfEveryHolderInOnePass) {
  for (const std::size_t blocks : {1U, 2U, 3U, 7U, 8U, 9U, 100U, 2048U}) {
    const int workers = blocks == 2048 ? 600 : 1 + static_cast<int>(blocks % 7) * 40;  // one to many words of slots
    PrefixIndex index;
    const Bytes prompt = chain(blocks);
    std::vector<std::pair<PrefixIndex::Slot, std::size_t>> expected;
    for (int worker = 0; worker < workers; ++worker) {
      const auto slot = index.add_holder();
      const std::size_t depth = random() % (blocks + 1);
      index.store(slot, first(prompt, depth));
      expected.emplace_back(slot, depth);
    }
    PrefixLengths lengths;
    index.longest_prefix(prompt, lengths);
    for (const auto& [slot, depth] : expected) {
      ASSERT_EQ(lengths.blocks[slot], depth) << blocks << " blocks, slot " << slot;
    }
  }
}

TEST_F(Prefix, AMatchIsAnchoredAtTheStart) {
  PrefixIndex index;
  const auto a = index.add_holder();
  const auto b = index.add_holder();
  const Bytes prompt = chain(8);
  index.store(a, last(prompt, 4));  // holds blocks 4..7 only
  index.store(b, first(prompt, 2));
  EXPECT_EQ(length(index, a, prompt), 0U);
  EXPECT_EQ(length(index, b, prompt), 2U);
}

TEST_F(Prefix, EmptyPromptAndEmptyIndex) {
  PrefixIndex index;
  PrefixLengths lengths;
  index.longest_prefix({}, lengths);
  const auto slot = index.add_holder();
  EXPECT_EQ(length(index, slot, {}), 0U);
  EXPECT_EQ(length(index, slot, chain(5)), 0U);
}

TEST_F(Prefix, StoresAreIdempotentUnlessCounted) {
  PrefixIndex index;
  const auto slot = index.add_holder();
  const Bytes prompt = chain(4);
  index.store(slot, prompt);
  index.store(slot, prompt);
  index.remove(slot, prompt);
  EXPECT_EQ(length(index, slot, prompt), 0U);
  EXPECT_EQ(index.blocks(), 0U);

  index.store(slot, prompt, Tier::device, true);
  index.store(slot, prompt, Tier::device, true);
  index.remove(slot, prompt);
  EXPECT_EQ(length(index, slot, prompt), 4U) << "one copy is left";
  index.remove(slot, prompt);
  EXPECT_EQ(length(index, slot, prompt), 0U);
  index.remove(slot, prompt);
  EXPECT_EQ(index.blocks(), 0U);
}

TEST_F(Prefix, TiersAreApart) {
  PrefixIndex index;
  const auto slot = index.add_holder();
  const Bytes prompt = chain(3);
  index.store(slot, prompt, Tier::device);
  index.store(slot, prompt, Tier::host);
  index.remove(slot, prompt, Tier::device);
  EXPECT_EQ(length(index, slot, prompt), 3U) << "the host tier still holds it";
  index.remove(slot, prompt, Tier::host);
  EXPECT_EQ(index.blocks(), 0U);
}

TEST_F(Prefix, ADroppedHolderIsGoneAtOnceAndItsSlotIsCleanWhenReused) {
  PrefixIndex index;
  const auto a = index.add_holder();
  const auto b = index.add_holder();
  const Bytes prompt = chain(500);
  index.store(a, prompt);
  index.store(b, first(prompt, 100));
  index.drop_holder(a);
  EXPECT_EQ(length(index, a, prompt), 0U);
  EXPECT_EQ(length(index, b, prompt), 100U);
  EXPECT_EQ(index.blocks(), 100U);
  while (index.sweeping()) {
    index.maintain(16);
  }
  EXPECT_EQ(index.blocks(), 100U);
  const auto again = index.add_holder();
  EXPECT_EQ(again, a);
  EXPECT_EQ(length(index, again, prompt), 0U);
  index.store(again, first(prompt, 50));
  EXPECT_EQ(length(index, again, prompt), 50U);
}

TEST_F(Prefix, StoresDuringASweepDoNotResurrectTheDropped) {
  PrefixIndex index;
  const auto a = index.add_holder();
  const auto b = index.add_holder();
  const Bytes prompt = chain(1000);
  index.store(a, prompt);
  index.drop_holder(a);
  index.maintain(1);
  index.store(b, prompt);  // goes on sweeping meanwhile
  while (index.sweeping()) {
    index.maintain(8);
  }
  const auto again = index.add_holder();
  ASSERT_EQ(again, a);
  EXPECT_EQ(length(index, again, prompt), 0U);
  EXPECT_EQ(length(index, b, prompt), 1000U);
}

TEST_F(Prefix, StaysUnderItsCapAndTellsWhatItDropped) {
  constexpr std::size_t cap = 2U << 20U;
  PrefixIndex index(cap);
  const auto slot = index.add_holder();
  for (int i = 0; i < 200; ++i) {
    index.store(slot, chain(2048));
    ASSERT_LE(index.bytes(), cap) << "round " << i;
  }
  EXPECT_GT(index.evicted(), 0U);
  EXPECT_EQ(index.blocks(), index.blocks_of(slot));
  EXPECT_EQ(index.blocks() + index.evicted(), 200U * 2048U);
  EXPECT_THROW(PrefixIndex(1000), std::invalid_argument);
}

TEST_F(Prefix, StaysUnderItsCapWhateverTakesTheBytes) {
  constexpr std::size_t cap = 1U << 20U;
  PrefixIndex index(cap);
  std::vector<PrefixIndex::Slot> slots;
  for (int i = 0; i < 200; ++i) {
    slots.push_back(index.add_holder());
  }
  index.store(slots[0], chain(40'000));
  // A set of holders of its own for each block, then copies to count.
  const Bytes blocks = chain(4000);
  std::uint64_t state = 1;
  for (std::size_t block = 0; block < 4000; ++block) {
    const auto one = std::span(blocks).subspan(block * k_hash_bytes, k_hash_bytes);
    for (int holder = 0; holder < 6; ++holder) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      index.store(slots[(state >> 33U) % slots.size()], one, Tier::device, true);
      index.store(slots[(state >> 33U) % slots.size()], one, Tier::device, true);
      ASSERT_LE(index.bytes(), cap) << "block " << block;
    }
  }
  std::size_t entries = 0;
  for (const PrefixIndex::Slot slot : slots) {
    entries += index.blocks_of(slot);
  }
  EXPECT_GE(entries, index.blocks());
}

// At twice the cap, what is asked for stays findable: the clock spares what searches touch, and the deepest block found
// speaks for forgotten ancestors.
TEST_F(Prefix, WhatIsUsedSurvivesPressure) {
  PrefixIndex index(2U << 20U);
  const auto slot = index.add_holder();
  std::vector<Bytes> hot;
  for (int i = 0; i < 8; ++i) {
    hot.push_back(chain(1024));
    index.store(slot, hot.back());
  }
  for (int i = 0; i < 100; ++i) {
    index.store(slot, chain(1024));
    for (const Bytes& prompt : hot) {
      length(index, slot, prompt);
    }
  }
  double found = 0;
  for (const Bytes& prompt : hot) {
    found += length(index, slot, prompt);
  }
  EXPECT_GE(found / (8 * 1024), 0.95) << "share of the hot prefixes that is still found";
}

TEST_F(Prefix, MemoryIsFlatOverRoundsOfChurn) {
  PrefixIndex index;
  std::size_t after_second = 0;
  for (int round = 0; round < 10; ++round) {
    const auto slot = index.add_holder();
    std::vector<Bytes> chains;
    for (int i = 0; i < 50; ++i) {
      chains.push_back(chain(1000));
      index.store(slot, chains.back());
    }
    if (round % 2 == 0) {
      for (const Bytes& each : chains) {
        index.remove(slot, each);
      }
      EXPECT_EQ(index.blocks(), 0U);
    }
    index.drop_holder(slot);
    EXPECT_EQ(index.blocks(), 0U);
    while (index.sweeping()) {
      index.maintain(1000);
    }
    if (round == 1) {
      after_second = index.bytes();
    }
  }
  EXPECT_LE(index.bytes(), after_second + after_second / 10);
}

// Random stores, removals and drops against sets of blocks; closed under ancestors, as workers keep them.
TEST_F(Prefix, AgreesWithAModel) {
  for (int trial = 0; trial < 30; ++trial) {
    PrefixIndex index;
    std::vector<Bytes> prompts;
    for (int i = 0; i < 6; ++i) {
      Bytes prompt = chain(1 + random() % 40);
      if (i > 0) {  // shares the start of another one
        const Bytes& other = prompts[random() % prompts.size()];
        const std::size_t shared = random() % (std::min(other.size(), prompt.size()) / k_hash_bytes + 1);
        std::copy_n(other.begin(), shared * k_hash_bytes, prompt.begin());
      }
      prompts.push_back(std::move(prompt));
    }
    std::map<PrefixIndex::Slot, std::set<Bytes>> model;
    for (int i = 0; i < 5; ++i) {
      model[index.add_holder()];
    }
    const auto block = [](const Bytes& prompt, std::size_t i) {
      return Bytes(prompt.begin() + static_cast<std::ptrdiff_t>(i * k_hash_bytes),
                   prompt.begin() + static_cast<std::ptrdiff_t>((i + 1) * k_hash_bytes));
    };
    const auto model_length = [&](PrefixIndex::Slot slot, const Bytes& prompt) {
      std::size_t n = 0;
      while (n < prompt.size() / k_hash_bytes && model[slot].contains(block(prompt, n))) {
        ++n;
      }
      return n;
    };
    for (int step = 0; step < 300; ++step) {
      auto at = std::next(model.begin(), static_cast<std::ptrdiff_t>(random() % model.size()));
      const Bytes& prompt = prompts[random() % prompts.size()];
      const std::size_t blocks = prompt.size() / k_hash_bytes;
      const auto action = random() % 10;
      if (action < 5) {
        const std::size_t depth = 1 + random() % blocks;
        index.store(at->first, first(prompt, depth));
        for (std::size_t i = 0; i < depth; ++i) {
          at->second.insert(block(prompt, i));
        }
      } else if (action < 9) {
        // A leaf that no other prompt continues from, as eviction takes it.
        const std::size_t depth = model_length(at->first, prompt);
        if (depth == 0) {
          continue;
        }
        const Bytes leaf = block(prompt, depth - 1);
        const bool continued = std::any_of(prompts.begin(), prompts.end(), [&](const Bytes& other) {
          return other.size() / k_hash_bytes > depth && block(other, depth - 1) == leaf &&
                 at->second.contains(block(other, depth));
        });
        if (!continued) {
          index.remove(at->first, leaf);
          at->second.erase(leaf);
        }
      } else {
        index.drop_holder(at->first);
        model.erase(at);
        model[index.add_holder()];
      }
      std::set<Bytes> all;
      for (const auto& [slot, held] : model) {
        all.insert(held.begin(), held.end());
        ASSERT_EQ(index.blocks_of(slot), held.size());
        for (const Bytes& each : prompts) {
          ASSERT_EQ(length(index, slot, each), model_length(slot, each));
        }
      }
      ASSERT_EQ(index.blocks(), all.size());
    }
    std::set<std::tuple<PrefixIndex::Slot, Bytes>> visited;
    index.for_each([&](PrefixIndex::Slot slot, Tier, const std::uint8_t* hash) {
      visited.emplace(slot, Bytes(hash, hash + k_hash_bytes));
    });
    std::size_t total = 0;
    for (const auto& [slot, held] : model) {
      total += held.size();
    }
    ASSERT_EQ(visited.size(), total);
  }
}

}  // namespace
}  // namespace twinpool::prefix
