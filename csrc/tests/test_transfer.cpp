// SPDX-License-Identifier: Apache-2.0
// The reader's part of the core: covers of a generation table, and tickets as they come over the wire.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "transfer/cover.h"
#include "transfer/ticket.h"

namespace twinpool {
namespace {

using Bytes = std::vector<std::uint8_t>;

void check_cover(const std::vector<std::int32_t>& blocks, std::int64_t gap) {
  const Cover found = cover(blocks, gap);
  ASSERT_EQ(found.positions.size(), blocks.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    ASSERT_EQ(found.entries.at(static_cast<std::size_t>(found.positions[i])), blocks[i]);
  }
  ASSERT_TRUE(std::ranges::is_sorted(found.entries));
  ASSERT_EQ(std::ranges::adjacent_find(found.entries), found.entries.end());
  const std::set<std::int32_t> wanted(blocks.begin(), blocks.end());
  for (const std::int32_t entry : found.entries) {
    const auto next = wanted.lower_bound(entry);
    ASSERT_NE(next, wanted.end());
    if (*next != entry) {
      ASSERT_NE(next, wanted.begin());
      ASSERT_LE(*next - *std::prev(next), gap);
    }
  }
}

TEST(TransferCover, HoldsEveryBlockAndNoGapThatIsTooWide) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::int32_t> blocks(random() % 80);
    for (auto& block : blocks) {
      block = static_cast<std::int32_t>(random() % 3000);
    }
    check_cover(blocks, random() % 700);
  }
}

TEST(TransferCover, JoinsWhatIsNear) {
  EXPECT_EQ(cover(std::vector<std::int32_t>{9, 2, 5}, 3).entries, (std::vector<std::int32_t>{2, 3, 4, 5, 9}));
  EXPECT_EQ(cover(std::vector<std::int32_t>{9, 2, 5}, 4).entries.size(), 8U);
  EXPECT_TRUE(cover(std::vector<std::int32_t>{}, 4).entries.empty());
}

TEST(TransferCover, TheGreatestBlockHasNoNeighbourBehindIt) {
  const std::int32_t last = std::numeric_limits<std::int32_t>::max();
  check_cover({last, last - 9, 0}, 8);
}

Bytes varint(std::uint64_t value) {
  Bytes out;
  for (; value >= 0x80; value >>= 7U) {
    out.push_back(static_cast<std::uint8_t>(value | 0x80U));
  }
  out.push_back(static_cast<std::uint8_t>(value));
  return out;
}

Bytes operator+(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

Bytes framed(std::uint8_t tag, const Bytes& content) {
  return Bytes{tag} + varint(content.size()) + content;
}

/// A ticket of two blocks, 3 and 300, with every field that is read and two that are not.
Bytes whole() {
  return Bytes{0x09, 5, 0, 0, 0, 0, 0, 0, 0} + framed(0x12, {0x0a, 1, 'w'}) + framed(0x1a, {0x10, 1}) + Bytes{0x20, 1} +
         framed(0x2a, Bytes{3} + varint(300)) +
         framed(0x32, Bytes{1} + varint(std::numeric_limits<std::uint64_t>::max())) +
         framed(0x3a, {1, 0, 0, 0, 0, 0, 0, 0x80, 2, 0, 0, 0, 0, 0, 0, 0}) + Bytes{0x40, 40} +
         framed(0x4a, {0x08, 3, 0x10, 4});
}

constexpr TicketBounds bounds{.pool_blocks = 301, .prompt_tokens = 40, .block_tokens = 16, .lease_seconds_max = 60};

TEST(TransferTicket, IsReadWhole) {
  const auto ticket = read_ticket(whole());
  ASSERT_TRUE(ticket);
  EXPECT_EQ(ticket->transfer_id, 5U);
  EXPECT_EQ(ticket->first_block, 1U);
  EXPECT_EQ(ticket->blocks, (std::vector<std::uint32_t>{3, 300}));
  EXPECT_EQ(ticket->generations, (std::vector<std::uint64_t>{1, std::numeric_limits<std::uint64_t>::max()}));
  EXPECT_EQ(ticket->digests, (std::vector<std::uint64_t>{0x8000000000000001U, 2}));
  EXPECT_EQ(ticket->length_tokens, 40U);
  EXPECT_EQ(ticket->lease_seconds, 3);
  EXPECT_EQ(ticket->lease_nanos, 4);
  EXPECT_EQ(problem_of(*ticket, bounds), std::nullopt);
}

TEST(TransferTicket, CutAnywhereIsRefusedOrContradictsItself) {
  const Bytes message = whole();
  for (std::size_t size = 0; size < message.size(); ++size) {
    const auto ticket = read_ticket(std::span(message).first(size));
    EXPECT_TRUE(!ticket || problem_of(*ticket, bounds)) << size;
  }
}

TEST(TransferTicket, NoByteThatChangesReadsPastTheEnd) {
  std::mt19937 random(11);
  const Bytes sound = whole();
  for (int round = 0; round < 5'000; ++round) {
    Bytes message = sound;
    for (unsigned change = 0; change <= random() % 4; ++change) {
      message[random() % message.size()] = static_cast<std::uint8_t>(random());
    }
    const auto ticket = read_ticket(message);
    if (ticket && !problem_of(*ticket, bounds)) {
      ASSERT_EQ(ticket->blocks.size(), ticket->generations.size());
      ASSERT_LT(ticket->blocks.empty() ? 0 : std::ranges::max(ticket->blocks), 301U);
    }
  }
}

std::string problem_with(void (*change)(TicketFields&)) {
  TicketFields ticket = *read_ticket(whole());
  change(ticket);
  return problem_of(ticket, bounds).value_or("");
}

TEST(TransferTicket, EachContradictionHasItsSentence) {
  const std::string lease = "the lease is not positive, or longer than 60 s";
  EXPECT_EQ(problem_with([](auto& t) { t.transfer_id = 0; }), "transfer id 0");
  EXPECT_EQ(problem_with([](auto& t) { t.first_block = 2; }), "blocks up to 4 for a prompt of 3");
  EXPECT_EQ(problem_with([](auto& t) { t.first_block = ~0U; }), "blocks up to 4294967297 for a prompt of 3");
  EXPECT_EQ(problem_with([](auto& t) { t.generations.pop_back(); }), "1 generations for 2 blocks");
  EXPECT_EQ(problem_with([](auto& t) { t.digests.pop_back(); }), "1 digests for 2 blocks");
  EXPECT_EQ(problem_with([](auto& t) { t.digests.clear(); }), "");
  EXPECT_EQ(problem_with([](auto& t) { t.blocks[0] = 301; }), "block 301 is outside the owner's pool of 301");
  EXPECT_EQ(problem_with([](auto& t) { t.blocks[0] = ~0U; }), "block 4294967295 is outside the owner's pool of 301");
  EXPECT_EQ(problem_with([](auto& t) { t.blocks[0] = 300; }), "a block is named twice");
  EXPECT_EQ(problem_with([](auto& t) { t.length_tokens = 48; }), "48 tokens up to block 3, the prompt has 40 there");
  EXPECT_EQ(problem_with([](auto& t) { t.lease_seconds = 60, t.lease_nanos = 0; }), "");
  EXPECT_EQ(problem_with([](auto& t) { t.lease_seconds = 60, t.lease_nanos = 1; }), lease);
  EXPECT_EQ(problem_with([](auto& t) { t.lease_seconds = 0, t.lease_nanos = 0; }), lease);
  EXPECT_EQ(problem_with([](auto& t) { t.lease_seconds = 1, t.lease_nanos = -2'000'000'000; }), lease);
  EXPECT_EQ(problem_with([](auto& t) { t.lease_seconds = std::numeric_limits<std::int64_t>::max(); }), lease);
  EXPECT_EQ(problem_with([](auto& t) { t.lease_seconds = std::numeric_limits<std::int64_t>::min(); }), lease);
}

}  // namespace
}  // namespace twinpool
