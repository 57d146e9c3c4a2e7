// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "tests/prefix_pin_fixture.h"

namespace twinpool::test {
namespace {

constexpr PrefixPinLimits no_limit{.pins = 100, .blocks = 100, .tenant_blocks = 100};

void expect_pinned(BlockPool& pool, const PrefixPinResult& result, std::size_t blocks, double expires_at) {
  EXPECT_EQ(result.refusal, PrefixPinRefusal::none) << name_of(result.refusal);
  EXPECT_EQ(result.blocks, blocks);
  EXPECT_EQ(result.expires_at, expires_at);
  pool.manager.check();
}

TEST(PrefixPins, KeepAPrefixThroughPressureThatEvictsAllElse) {
  BlockPool pool(6);
  const Hashes pinned = chain(1, 2);
  const Hashes other = chain(2, 3);
  pool.cache(pinned);
  pool.cache(other);
  expect_pinned(pool, pool.manager.pin_prefix(owner("a", 5), pinned, no_limit), 2, 5);
  pool.expect_counts(1, 5, 0);
  EXPECT_EQ(pool.manager.available_blocks(), 4U) << "a pinned block is cached, but not to be had";
  EXPECT_EQ(pool.manager.prefix_pinned_blocks(), 2U);
  const Ids all = pool.allocate(4);
  pool.expect_counts(0, 2, 4);
  Ids none;
  EXPECT_FALSE(pool.manager.allocate(1, none));
  EXPECT_EQ(pool.manager.lookup(pinned), 2U);
  EXPECT_EQ(pool.manager.lookup(other), 0U);
  EXPECT_EQ(pool.manager.expire_prefix_pins(4.9), 0U);
  EXPECT_EQ(pool.manager.next_prefix_expiry(), 5.0);
  EXPECT_EQ(pool.manager.expire_prefix_pins(5.0), 1U);
  EXPECT_FALSE(pool.manager.next_prefix_expiry());
  pool.expect_counts(0, 2, 4);
  EXPECT_EQ(pool.manager.available_blocks(), 2U);
  pool.allocate(2);
  EXPECT_EQ(pool.manager.lookup(pinned), 0U);
  EXPECT_EQ(pool.manager.prefix_pinned_blocks(), 0U);
}

TEST(PrefixPins, AHeldPrefixIsPinnedAndComesBackAsPinned) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 2);
  const Ids ids = pool.allocate(2);
  pool.commit(ids, hashes);
  pool.manager.pin_prefix(owner("a", 5), hashes, no_limit);
  pool.expect_counts(2, 0, 2);
  pool.manager.release(ids);
  pool.expect_counts(2, 2, 0);
  EXPECT_EQ(pool.manager.available_blocks(), 2U);
  EXPECT_EQ(pool.acquire(hashes), ids) << "a pinned block is taken like a cached one";
  pool.expect_counts(2, 0, 2);
  EXPECT_EQ(pool.manager.unpin_prefixes({.tenant = "t", .pin = "a", .session = "", .last = {}}).size(), 1U);
  pool.expect_counts(2, 0, 2);
  pool.manager.release(ids);
  EXPECT_EQ(pool.manager.available_blocks(), 4U);
}

TEST(PrefixPins, TakingAPinnedPrefixTakesNothingAvailable) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 2);
  pool.cache(hashes);
  pool.manager.pin_prefix(owner("a", 5), hashes, no_limit);
  Ids out;
  EXPECT_EQ(pool.manager.acquire(hashes, 5, 0, out), std::nullopt);
  EXPECT_EQ(pool.manager.acquire(hashes, 4, 0, out), 2U);
  pool.expect_counts(0, 0, 4);
}

TEST(PrefixPins, AChildPublishedBehindAPinnedPrefixIsEvictedFirst) {
  BlockPool pool(3);
  const Hashes hashes = chain(1, 3);
  const Hashes prefix(hashes.begin(), hashes.begin() + 2);
  pool.cache(prefix);
  pool.manager.pin_prefix(owner("a", 5), prefix, no_limit);
  Ids ids = pool.acquire(prefix);
  const Ids fresh = pool.allocate(1);
  pool.commit(fresh, {hashes[2]}, hashes[1]);
  ids.push_back(fresh[0]);
  pool.manager.release(ids);
  pool.expect_counts(0, 3, 0);
  EXPECT_EQ(pool.manager.available_blocks(), 1U);
  pool.manager.unpin_prefixes({.tenant = "t", .pin = "", .session = "", .last = {}});
  pool.expect_counts(0, 3, 0);  // checks the LRU order as well
  EXPECT_EQ(pool.allocate(1), fresh);
}

TEST(PrefixPins, ASecondCallMakesItLongerAndNeverShorter) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 2);
  pool.cache(hashes);
  expect_pinned(pool, pool.manager.pin_prefix(owner("a", 5), hashes, no_limit), 2, 5);
  expect_pinned(pool, pool.manager.pin_prefix(owner("a", 9), hashes, no_limit), 2, 9);
  expect_pinned(pool, pool.manager.pin_prefix(owner("a", 7), hashes, no_limit), 2, 9);
  EXPECT_EQ(pool.manager.prefix_pins(), 1U);
  EXPECT_EQ(pool.manager.expire_prefix_pins(8), 0U);
  EXPECT_EQ(pool.manager.expire_prefix_pins(9), 1U);
}

TEST(PrefixPins, SharedBlocksStayUntilTheLastPinEnds) {
  BlockPool pool(8);
  const Hashes first = branch(2, 2, 1);
  const Hashes second = branch(2, 3, 2);
  pool.cache(first);
  pool.manager.release(pool.acquire(first));
  Ids ids = pool.acquire(second);
  const Ids fresh = pool.allocate(2);
  pool.commit(fresh, {second[2], second[3]}, second[1]);
  ids.insert(ids.end(), fresh.begin(), fresh.end());
  pool.manager.release(ids);
  pool.manager.pin_prefix(owner("a", 5, "t"), first, no_limit);
  pool.manager.pin_prefix(owner("b", 6, "u"), second, no_limit);
  EXPECT_EQ(pool.manager.prefix_pinned_blocks(), 5U);
  EXPECT_EQ(pool.manager.expire_prefix_pins(5), 1U);
  EXPECT_EQ(pool.manager.prefix_pinned_blocks(), 4U);
  pool.expect_counts(3, 5, 0);
  EXPECT_EQ(pool.manager.available_blocks(), 4U);
}

TEST(PrefixPins, LimitsCountEachBlockOnceAndRefuseAllOrNothing) {
  BlockPool pool(10);
  const Hashes first = branch(2, 2, 1);
  const Hashes second = branch(2, 3, 1);
  pool.cache(first);
  const Ids ids = pool.acquire(second);
  const Ids fresh = pool.allocate(1);
  pool.commit(fresh, {second[2]}, second[1]);
  pool.manager.release(fresh);
  pool.manager.release(ids);
  PrefixPinLimits limits{.pins = 2, .blocks = 4, .tenant_blocks = 3};
  const auto refused = [&](const PrefixPinOwner& who, const Hashes& hashes) {
    const std::size_t before = pool.manager.prefix_pinned_blocks();
    const PrefixPinResult result = pool.manager.pin_prefix(who, hashes, limits);
    EXPECT_EQ(pool.manager.prefix_pinned_blocks(), before);
    pool.manager.check();
    return result.refusal;
  };
  expect_pinned(pool, pool.manager.pin_prefix(owner("a", 5), first, limits), 3, 5);
  EXPECT_EQ(refused(owner("b", 5), second), PrefixPinRefusal::tenant_blocks) << "2 of 3 are counted already";
  expect_pinned(pool, pool.manager.pin_prefix(owner("b", 5, "u"), second, limits), 3, 5);
  EXPECT_EQ(pool.manager.prefix_pinned_blocks(), 4U);
  EXPECT_EQ(refused(owner("c", 5, "v"), chain(1, 1)), PrefixPinRefusal::pins);
  limits = {.pins = 9, .blocks = 3, .tenant_blocks = 9};
  EXPECT_EQ(refused(owner("c", 5, "v"), first), PrefixPinRefusal::blocks);
  limits.tenant_blocks = 0;
  EXPECT_EQ(refused(owner("a", 9), first), PrefixPinRefusal::tenant_blocks) << "a quota that shrank ends renewals";
}

TEST(PrefixPins, ReleaseIsOfTheTenantAloneAndIdempotent) {
  BlockPool pool(6);
  const Hashes one = chain(1, 2);
  const Hashes two = chain(2, 2);
  pool.cache(one);
  pool.cache(two);
  pool.manager.pin_prefix(owner("a", 5, "t", "s"), one, no_limit);
  pool.manager.pin_prefix(owner("b", 5, "t"), two, no_limit);
  pool.manager.pin_prefix(owner("c", 5, "u", "s"), two, no_limit);
  const auto ended = [&](const PrefixPinFilter& filter) { return pool.manager.unpin_prefixes(filter).size(); };
  EXPECT_EQ(ended({.tenant = "u", .pin = "a", .session = "", .last = {}}), 0U);
  EXPECT_EQ(ended({.tenant = "t", .pin = "", .session = "s", .last = {}}), 1U);
  EXPECT_EQ(ended({.tenant = "t", .pin = "", .session = "s", .last = {}}), 0U);
  EXPECT_EQ(ended({.tenant = "t", .pin = "", .session = "", .last = one.back()}), 0U);
  EXPECT_EQ(ended({.tenant = "t", .pin = "", .session = "", .last = two.back()}), 1U);
  EXPECT_EQ(pool.manager.prefix_pinned_blocks(), 2U) << "the other tenant's";
  EXPECT_TRUE(pool.manager.end_next_prefix_pin());
  EXPECT_FALSE(pool.manager.end_next_prefix_pin());
  pool.expect_counts(2, 4, 0);
}

TEST(PrefixPins, WhatIsNotAllCachedIsNotPinned) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 3);
  const Hashes cached(hashes.begin(), hashes.begin() + 2);
  pool.cache(cached);
  const PrefixPinResult result = pool.manager.pin_prefix(owner("a", 5), hashes, no_limit);
  EXPECT_EQ(result.refusal, PrefixPinRefusal::missing);
  EXPECT_EQ(result.blocks, 2U);
  EXPECT_EQ(pool.manager.prefix_pins(), 0U);
  const Hashes middle(hashes.begin() + 1, hashes.begin() + 2);
  expect_error("a chain from its root", [&] { pool.manager.pin_prefix(owner("a", 5), middle, no_limit); });
  expect_error("at least one", [&] { pool.manager.pin_prefix(owner("a", 5), {}, no_limit); });
  expect_error("a number", [&] {
    pool.manager.pin_prefix(owner("a", std::numeric_limits<double>::quiet_NaN()), cached, no_limit);
  });
  pool.manager.pin_prefix(owner("a", 5), cached, no_limit);
  expect_error("another prefix or tenant", [&] { pool.manager.pin_prefix(owner("a", 5, "u"), cached, no_limit); });
}

TEST(PrefixPins, EndWithTheCache) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 2);
  pool.cache(hashes);
  pool.manager.pin_prefix(owner("a", 5), hashes, no_limit);
  EXPECT_EQ(pool.manager.reset_cache(), 2U);
  EXPECT_EQ(pool.manager.prefix_pins(), 0U);
  pool.expect_counts(4, 0, 0);
}

TEST(Demote, PutsASessionFirstAndLeavesWhatOthersBuildOn) {
  BlockPool pool(5);
  const Hashes first = branch(1, 2, 2);
  const Hashes second = branch(1, 3, 1);
  Ids ids = pool.cache(first);
  Ids others = pool.acquire(second);
  const Ids fresh = pool.allocate(1);
  pool.commit(fresh, {second[1]}, second[0]);
  others.push_back(fresh[0]);
  pool.manager.release(others);
  pool.manager.release(pool.acquire(first));  // the most recently used now
  auto generations = generations_of(pool, ids);
  EXPECT_EQ(pool.manager.demote(ids, generations), 2U) << "all but the block that the other chain is built on";
  pool.expect_counts(1, 4, 0);
  EXPECT_EQ(pool.manager.demote(ids, generations), 2U) << "again, to the same effect";
  pool.allocate(1);
  EXPECT_EQ(pool.allocate(1), Ids{ids[2]});
  EXPECT_EQ(pool.allocate(1), Ids{ids[1]});
  EXPECT_EQ(pool.manager.lookup(second), 2U);
  EXPECT_EQ(pool.manager.demote(ids, generations), 0U) << "their content is another one by now";
}

TEST(Demote, LeavesWhatIsHeldOrPinned) {
  BlockPool pool(4);
  const Hashes hashes = chain(1, 3);
  const Ids ids = pool.cache(hashes);
  const auto generations = generations_of(pool, ids);
  pool.manager.pin_prefix(owner("a", 5), Hashes(hashes.begin(), hashes.begin() + 1), no_limit);
  EXPECT_EQ(pool.manager.demote(ids, generations), 2U);
  pool.manager.check();
  const Ids taken = pool.acquire(hashes);
  EXPECT_EQ(pool.manager.demote(ids, generations), 0U);
  pool.manager.release(taken);
  expect_error("does not exist", [&] { pool.manager.demote(Ids{9}, std::vector<std::uint64_t>{0}); });
  expect_error("one generation a block", [&] { pool.manager.demote(ids, {}); });
}

}  // namespace
}  // namespace twinpool::test
