// SPDX-License-Identifier: Apache-2.0
// What is weighed beside a request's own first token, and that routers with the same view choose the same.
#include <algorithm>
#include <random>
#include <set>

#include "tests/router_fixture.h"

namespace twinpool::test {
namespace {

using placement::Role;

std::vector<std::uint8_t> prompt_hashes(int blocks, std::uint64_t seed) {
  std::vector<std::uint8_t> hashes(static_cast<std::size_t>(blocks) * 16);
  std::mt19937_64 random(seed);
  for (auto& byte : hashes) {
    byte = static_cast<std::uint8_t>(random());
  }
  return hashes;
}

AdmissionConfig fetching() {
  AdmissionConfig config;
  config.prefix_fetch = 1;
  return config;
}

struct Idle : Cluster {
  explicit Idle(int before = 0)
      : Cluster(fetching()) {
    prefill(4);
    decode(2);
    for (int i = 0; i < before; ++i) {
      const auto id = accept(request());
      plan();
      finish(id);
    }
  }
  std::string choice(std::uint64_t seed) {
    const auto hashes = prompt_hashes(20, seed);
    auto arguments = request(20 * 16 + 5);
    arguments.hashes = hashes;
    const auto id = accept(arguments);
    const auto actions = plan();
    EXPECT_EQ(actions.size(), 1U);
    const std::string name = actions.at(0).prefill.first;
    finish(id);
    return name;
  }
};

TEST(Agreement, RoutersThatPlacedDifferentThingsBeforeChooseTheSame) {
  Idle one;
  Idle other(7);
  std::set<std::string> chosen;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const std::string name = one.choice(seed);
    EXPECT_EQ(other.choice(seed), name);
    chosen.insert(name);
  }
  EXPECT_EQ(chosen.size(), 4U) << "and the prompts are spread over all";
}

TEST(Agreement, AmongThoseAlikeTheOneThatPullsLeastIsTaken) {
  Cluster cluster(fetching());
  cluster.prefill(4);
  cluster.decode(1);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto hashes = prompt_hashes(60, seed);
    const std::string holder = "p" + std::to_string(seed % 4);
    cluster.core.index_stored(holder, 1, hashes, prefix::Tier::device, false);
    auto arguments = cluster.request(60 * 16 + 800);
    arguments.hashes = hashes;
    const auto id = cluster.accept(arguments);
    EXPECT_EQ(cluster.plan().at(0).prefill.first, holder) << "a pull costs so little that the costs are alike";
    cluster.finish(id);
  }
}

TEST(Agreement, WhatAllPromptsBeginWithPilesNothingUp) {
  Cluster cluster(fetching());
  cluster.prefill(4);
  cluster.decode(1);
  const auto shared = prompt_hashes(2, 99);
  cluster.core.index_stored("p0", 1, shared, prefix::Tier::device, false);
  std::set<std::string> chosen;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    auto hashes = prompt_hashes(40, seed);
    std::copy(shared.begin(), shared.end(), hashes.begin());
    auto arguments = cluster.request(40 * 16 + 5);
    arguments.hashes = hashes;
    const auto id = cluster.accept(arguments);
    chosen.insert(cluster.plan().at(0).prefill.first);
    cluster.finish(id);
  }
  EXPECT_EQ(chosen.size(), 4U);
}

TEST(Pressure, ABusyPoolPullsWhatAnIdleOneWouldRatherCompute) {
  const auto choice = [](int waiting) {
    AdmissionConfig config = fetching();
    config.prefill_window_tokens = 1;
    Cluster cluster(config);
    cluster.prefill(2);
    cluster.decode(1);
    const auto hashes = prompt_hashes(60, 1);
    cluster.core.index_stored("p1", 1, std::span(hashes).first(40 * 16), prefix::Tier::device, false);
    // In the middle of a long step, after which it would answer: longer than the blocks take to compute.
    cluster.core.report_load(0.0, "p1", 1, {0.0, 1, 0, 100, 1000, 0.3});
    cluster.core.report_load(0.0, "p0", 1, {0.0, 0, 0, 0, 1000, 0.0});
    auto arguments = cluster.request(60 * 16 + 5);
    arguments.hashes = hashes;
    arguments.priority = 1;
    cluster.accept(arguments);
    for (int i = 0; i < waiting; ++i) {
      cluster.accept(cluster.request(100));
    }
    return cluster.plan().at(0).fetch_blocks;
  };
  EXPECT_EQ(choice(0), 0);
  EXPECT_EQ(choice(10), 40);
}

TEST(PrefixFetch, IsHiddenBehindTheWaitOfItsPrompt) {
  AdmissionConfig config = fetching();
  config.prefill_window_tokens = 0;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(1);
  const auto hashes = prompt_hashes(60, 1);
  cluster.core.index_stored("d0", 1, std::span(hashes).first(40 * 16), prefix::Tier::device, false);
  cluster.core.report_load(0.0, "d0", 1, {0.0, 1, 0, 0, 1000, 10.0});  // answers in five seconds
  const auto fetched = [&](std::int64_t queued) {
    cluster.core.report_load(0.0, "p0", 1, {0.0, 0, 1, static_cast<std::uint64_t>(queued), 1000, 0.0});
    auto arguments = cluster.request(60 * 16 + 5);
    arguments.hashes = hashes;
    const auto id = cluster.accept(arguments);
    const auto actions = cluster.plan();
    const auto blocks = actions.at(0).fetch_blocks;
    cluster.event(id, "cancel");
    return blocks;
  };
  EXPECT_EQ(fetched(0), 0);
  EXPECT_EQ(fetched(60'000), 40) << "six seconds of others' prompts come first";
}

TEST(AdmissionOrder, LittleWorkGoesFirstAndWaitingCounts) {
  AdmissionConfig config;
  config.order_stretch = 4.0;
  config.prefill_window_tokens = 1;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(1);
  const auto running = cluster.accept(cluster.request(100));
  ASSERT_EQ(cluster.plan().size(), 1U);
  const auto large = cluster.accept(cluster.request(10'000));  // about a second of compute by the priors
  const auto small = cluster.accept(cluster.request(100));
  cluster.now = 5.0;
  const auto late = cluster.accept(cluster.request(100));
  cluster.finish(running);
  ASSERT_EQ(cluster.plan().at(0).request, small);
  cluster.finish(small);
  ASSERT_EQ(cluster.plan().at(0).request, large) << "it has waited its stretch";
  cluster.finish(large);
  EXPECT_EQ(cluster.plan().at(0).request, late);
}

TEST(AdmissionOrder, CachedPromptsAreLittleWork) {
  AdmissionConfig config;
  config.prefill_window_tokens = 1;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(1);
  const auto hashes = prompt_hashes(500, 1);
  cluster.core.index_stored("p0", 1, hashes, prefix::Tier::device, false);
  const auto running = cluster.accept(cluster.request(100));
  ASSERT_EQ(cluster.plan().size(), 1U);
  const auto fresh = cluster.accept(cluster.request(2000));
  auto arguments = cluster.request(500 * 16 + 5);
  arguments.hashes = hashes;
  const auto cached = cluster.accept(arguments);
  cluster.finish(running);
  EXPECT_EQ(cluster.plan().at(0).request, cached);
  cluster.finish(cached);
  EXPECT_EQ(cluster.plan().at(0).request, fresh);
}

}  // namespace
}  // namespace twinpool::test
