// SPDX-License-Identifier: Apache-2.0
// Where the KV of a prompt comes from: the worker's own cache, another worker's, a prefill worker, or the decode
// worker.
#include <random>

#include "tests/router_fixture.h"

namespace twinpool::test {
namespace {

using placement::Obstacle;
using placement::Role;

std::vector<std::uint8_t> some_hashes(int blocks, int seed = 3) {
  std::vector<std::uint8_t> hashes(static_cast<std::size_t>(blocks) * 16);
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  for (auto& byte : hashes) {
    byte = static_cast<std::uint8_t>(random());
  }
  return hashes;
}

struct Sources : Cluster {
  static AdmissionConfig options(bool fetch, bool local) {
    AdmissionConfig config;
    config.prefix_fetch = fetch ? 1 : 0;
    config.local_prefill = local ? 1 : 0;
    return config;
  }
  explicit Sources(bool fetch, bool local, int blocks = 60)
      : Cluster(options(fetch, local)),
        hashes(some_hashes(blocks)) {}

  std::vector<std::uint8_t> hashes;

  void holds(const std::string& name, int blocks) {
    core.index_stored(name, 1, std::span(hashes).first(static_cast<std::size_t>(blocks) * 16), prefix::Tier::device,
                      false);
  }
  /// A prompt of all those blocks and a bit.
  SubmitArguments prompt(std::int64_t more = 5) {
    auto arguments = request(static_cast<std::int64_t>(hashes.size()) + more);
    arguments.hashes = hashes;
    return arguments;
  }
  Action place(const SubmitArguments& arguments) {
    accept(arguments);
    const auto actions = plan();
    EXPECT_EQ(actions.size(), 1U);
    return actions.empty() ? Action{} : actions[0];
  }
};

TEST(PrefixFetch, NamesTheHolderAndItsBlocks) {
  Sources cluster(true, false);
  cluster.prefill(1);
  cluster.decode(2);
  cluster.holds("p0", 10);
  cluster.holds("d1", 50);
  const Action action = cluster.place(cluster.prompt());
  EXPECT_EQ(action.fetch_from.first, "d1");
  EXPECT_EQ(action.fetch_blocks, 50);
  EXPECT_EQ(action.prefill_cached_blocks, 50) << "what the prefill worker should find, the fetch included";
  EXPECT_EQ(cluster.core.workers().at(0).prefill_tokens.total, 10 * 16 + 5) << "only the rest is computed";
}

TEST(PrefixFetch, TheBlockOfTheLastTokenIsNotFetched) {
  Sources cluster(true, false);
  cluster.prefill(1);
  cluster.decode(1);
  cluster.holds("d0", 60);
  EXPECT_EQ(cluster.place(cluster.prompt(0)).fetch_blocks, 59);
}

TEST(PrefixFetch, WhatIsFasterToComputeIsComputed) {
  Sources cluster(true, false, 1);
  cluster.prefill(1);
  cluster.decode(1);
  cluster.holds("d0", 1);
  EXPECT_EQ(cluster.place(cluster.prompt()).fetch_blocks, 1) << "1.6 ms of compute, 1.1 ms of pull";
  // Pulls turn out slow.
  for (int i = 0; i < 20; ++i) {
    cluster.core.observe_transfer("p0", 1, 4, 0.1);
  }
  EXPECT_EQ(cluster.place(cluster.prompt()).fetch_blocks, 0);
}

TEST(PrefixFetch, AHolderThatIsInALongStepAnswersLate) {
  Sources cluster(true, false, 20);
  cluster.prefill(1);
  cluster.decode(1);
  cluster.holds("d0", 20);
  cluster.core.report_load(0, "d0", 1, {0, 4, 0, 0, 900, 0.2});
  EXPECT_EQ(cluster.place(cluster.prompt()).fetch_blocks, 0) << "32 ms of compute, 100 ms until it answers";
  cluster.core.report_load(0, "d0", 1, {0, 4, 0, 0, 900, 0.01});
  EXPECT_EQ(cluster.place(cluster.prompt()).fetch_blocks, 20);
}

TEST(PrefixFetch, HoldersOfAsMuchTakeTurns) {
  Sources cluster(true, false);
  cluster.prefill(1);
  cluster.decode(3);
  for (const char* name : {"d0", "d1", "d2"}) {
    cluster.holds(name, 60);
  }
  std::map<std::string, int> asked;
  for (int i = 0; i < 12; ++i) {
    const Action action = cluster.place(cluster.prompt());
    ++asked[action.fetch_from.first];
    cluster.finish(action.request);
  }
  EXPECT_EQ(asked.size(), 3U);
  EXPECT_EQ(asked.count(""), 0U);
}

TEST(PrefixFetch, AWorkerInQuarantineIsNotAsked) {
  Sources cluster(true, false);
  cluster.prefill(1);
  cluster.decode(2);
  cluster.holds("d1", 60);
  cluster.core.quarantine(0, "d1", 1, 5.0);
  EXPECT_EQ(cluster.place(cluster.prompt()).fetch_from.first, "");
  cluster.now = 6.0;
  EXPECT_EQ(cluster.place(cluster.prompt()).fetch_from.first, "d1");
}

TEST(LocalPrefill, AShortSuffixIsComputedWhereItsPrefixIs) {
  Sources cluster(true, true);
  cluster.prefill(2);
  cluster.decode(2);
  cluster.holds("d1", 60);
  const auto id = cluster.accept(cluster.prompt());
  const auto actions = cluster.plan();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_TRUE(actions[0].local);
  EXPECT_EQ(actions[0].prefill, actions[0].decode);
  EXPECT_EQ(actions[0].decode.first, "d1");
  EXPECT_EQ(actions[0].fetch_blocks, 0);
  EXPECT_EQ(cluster.core.stats()["reservations"], 2) << "its blocks and the tokens to compute, no hand-off";
  cluster.finish(id);
  cluster.expect_quiet();
}

TEST(LocalPrefill, ALongPromptGoesToAPrefillWorkerEvenIfNothingRuns) {
  Sources cluster(true, true);
  cluster.prefill(1);
  cluster.decode(1);
  EXPECT_TRUE(cluster.place(cluster.request(100)).local) << "12 ms: not worth a hand-off";
  Sources other(true, true);
  other.prefill(1);
  other.decode(1);
  EXPECT_FALSE(other.place(other.request(12'000)).local) << "1.2 s in which the next streams would crawl";
}

TEST(LocalPrefill, RunningStreamsWeighAgainstIt) {
  Sources cluster(true, true);
  cluster.prefill(1);
  cluster.decode(1);
  cluster.core.report_load(0, "d0", 1, {0, 30, 0, 0, 900, 0.005});
  EXPECT_FALSE(cluster.place(cluster.request(200)).local);
}

TEST(LocalPrefill, MuchTrafficWeighsAgainstIt) {
  Sources cluster(true, true);
  cluster.prefill(1);
  cluster.decode(1);
  const auto ended = [&](int count) {
    for (int i = 0; i < count; ++i) {
      const auto id = cluster.accept(cluster.request(20));
      cluster.event(id, "cancel");
    }
  };
  EXPECT_TRUE(cluster.place(cluster.request(1000)).local);
  cluster.event(1, "cancel");
  ended(2000);
  EXPECT_FALSE(cluster.place(cluster.request(1000)).local) << "hundreds of requests a second";
}

TEST(LocalPrefill, WhatADecodeWorkerHasToComputeIsInItsWay) {
  Sources cluster(true, true);
  cluster.prefill(1);
  cluster.decode(1);
  const Action first = cluster.place(cluster.request(1000));
  EXPECT_TRUE(first.local);
  EXPECT_FALSE(cluster.place(cluster.request(1000)).local) << "it would wait for the first";
  cluster.event(first.request, "decode_reserved");
  cluster.event(first.request, "first_token");
  EXPECT_EQ(cluster.core.workers().at(1).prefill_tokens.total, 0);
}

TEST(LocalPrefill, WithoutPrefillWorkersDecodeWorkersDoAll) {
  Sources cluster(true, true);
  cluster.decode(1);
  EXPECT_TRUE(cluster.place(cluster.request(12'000)).local);
}

TEST(LocalPrefill, AFullPrefillWorkerIsWaitedForWhereThatCostsLess) {
  AdmissionConfig config = Sources::options(true, true);
  config.prefill_window_tokens = 10'000;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(1, 4000);
  const auto first = cluster.accept(cluster.request(9'000));
  ASSERT_EQ(cluster.plan().size(), 1U);
  cluster.core.report_load(0, "d0", 1, {0, 30, 0, 0, 3000, 0.005});
  const auto second = cluster.accept(cluster.request(8'000));
  EXPECT_TRUE(cluster.plan().empty()) << "0.8 s for thirty streams, or 0.9 s of waiting";
  EXPECT_EQ(cluster.core.request(second).decision.obstacle, Obstacle::prefill_window);
  const auto small = cluster.accept(cluster.request(10));
  const auto actions = cluster.plan();
  EXPECT_EQ(actions.size(), 1U) << "fits into the window";
  cluster.event(small, "cancel");
  cluster.event(first, "cancel");
  EXPECT_EQ(cluster.plan().size(), 1U);
}

TEST(LocalPrefill, PullsItsPrefixFromAnotherDecodeWorkerWhereItsOwnHasNoRoom) {
  Sources cluster(true, true);
  cluster.prefill(1);
  cluster.decode(2, 1000, 4);
  cluster.holds("d0", 60);
  cluster.core.report_load(0, "d0", 1, {0, 4, 0, 0, 900, 0.001});
  const Action action = cluster.place(cluster.prompt());
  EXPECT_TRUE(action.local);
  EXPECT_EQ(action.decode.first, "d1");
  EXPECT_EQ(action.fetch_from.first, "d0");
  EXPECT_EQ(action.fetch_blocks, 60);
}

TEST(CostModel, WhatOneWorkerHasMeasuredIsTheGuessForOthersOfItsKind) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  cluster.worker("p9", Role::prefill, 1, 1000, 64, "other");
  for (int i = 0; i < 8; ++i) {
    cluster.core.observe_prefill("p0", 1, 1000 + 50 * i, 0, 1.0 + 0.05 * i);
    cluster.core.observe_transfer("d0", 1, 10 + i, 0.02 + 0.002 * i);
  }
  const auto& workers = cluster.core.workers();
  EXPECT_NEAR(workers.at(1).prefill.predict(1000, 0), 1.0, 0.2) << "a decode worker is as fast";
  EXPECT_NEAR(workers.at(0).transfer.predict(10, 0), 0.02, 0.005);
  EXPECT_LT(workers.at(2).prefill.predict(1000, 0), 0.2) << "another fingerprint is another model";
  EXPECT_EQ(workers.at(1).prefill.samples(), 0U);
}

TEST(CostModel, PriorsComeFromTheConfiguration) {
  AdmissionConfig config;
  config.prior_prefill_token_seconds = 0.01;
  config.prior_transfer_block_seconds = 0.5;
  Cluster cluster(config);
  cluster.prefill(1);
  EXPECT_NEAR(cluster.core.workers().at(0).prefill.predict(100, 0), 1.002, 1e-6);
  EXPECT_NEAR(cluster.core.workers().at(0).transfer.predict(4, 0), 2.001, 1e-6);
}

}  // namespace
}  // namespace twinpool::test
