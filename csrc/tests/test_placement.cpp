// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <random>

#include "tests/router_fixture.h"

namespace twinpool::test {
namespace {

using placement::Obstacle;
using placement::Role;
using placement::WorkerState;

std::map<std::string, int> count_workers(const std::vector<Action>& actions) {
  std::map<std::string, int> count;
  for (const Action& action : actions) {
    if (action.kind == Action::Kind::place) {
      ++count[action.prefill.first];
      ++count[action.decode.first];
    }
  }
  return count;
}

TEST(Placement, LoadCountsFromTheChoiceOnSoThatEqualWorkersShareEqually) {
  Cluster cluster;
  cluster.prefill(3);
  cluster.decode(3);
  for (int i = 0; i < 32; ++i) {
    cluster.accept(cluster.request(32, 1));
  }
  const auto count = count_workers(cluster.plan());
  ASSERT_EQ(count.size(), 6U);
  for (const auto& [name, placed] : count) {
    EXPECT_GE(placed, 9) << name;
    EXPECT_LE(placed, 12) << name;
  }
}

TEST(Placement, TiesRotate) {
  Cluster cluster;
  cluster.prefill(4);
  cluster.decode(4);
  std::map<std::string, int> count;
  for (int i = 0; i < 40; ++i) {  // one after the other: every choice is a tie between idle workers
    const auto id = cluster.accept(cluster.request());
    for (const auto& [name, placed] : count_workers(cluster.plan())) {
      count[name] += placed;
    }
    cluster.finish(id);
    cluster.core.forget(id);
  }
  for (const auto& [name, placed] : count) {
    EXPECT_EQ(placed, 10) << name;
  }
  cluster.expect_quiet();
}

TEST(Placement, AWorkerWithoutAReportIsUnknownNotIdle) {
  Cluster cluster;
  cluster.prefill(3);
  cluster.decode(1);
  cluster.core.report_load(0, "p0", 1, {0, 2, 0, 8000, 1000, 0});
  cluster.core.report_load(0, "p1", 1, {0, 1, 0, 2000, 1000, 0});
  const auto id = cluster.accept(cluster.request());
  EXPECT_EQ(cluster.plan().at(0).prefill.first, "p1") << "p2 counts as busy as p0 and p1 are on average";
  EXPECT_EQ(cluster.core.request(id).decision.pairs, 3U);
}

TEST(Placement, AReportDoesNotEraseWhatIsOnItsWay) {
  Cluster cluster;
  cluster.prefill(2);
  cluster.decode(1);
  for (int i = 0; i < 10; ++i) {
    cluster.accept(cluster.request(500));
  }
  cluster.plan();
  for (const char* name : {"p0", "p1"}) {
    for (std::uint32_t slot = 0; slot < cluster.core.workers().slots(); ++slot) {
      const auto& worker = cluster.core.workers().at(slot);
      if (worker.spec.name == name) {
        EXPECT_EQ(worker.queued_prefill_tokens(), 2500) << name;
        cluster.core.report_load(0, name, 1, {0, 0, 0, 0, 1000, 0});  // made before the commands arrived
        EXPECT_EQ(worker.queued_prefill_tokens(), 2500) << name;
        cluster.core.report_load(0, name, 1, {0, 5, 0, 2400, 1000, 0});
        EXPECT_EQ(worker.queued_prefill_tokens(), 2400) << name << ": now the worker's own figure";
      }
    }
  }
}

TEST(Placement, OnlyReadyWorkersOfOnePoolAndOneFingerprintPair) {
  Cluster cluster;
  cluster.worker("starting", Role::prefill, 1, 1000, 64, "fp", "m", WorkerState::starting);
  cluster.worker("draining", Role::prefill, 1, 1000, 64, "fp", "m", WorkerState::draining);
  cluster.worker("flipping", Role::prefill, 1, 1000, 64, "fp", "m", WorkerState::flipping);
  cluster.worker("elsewhere", Role::prefill, 1, 1000, 64, "fp", "other");
  cluster.worker("d0", Role::decode);
  const auto id = cluster.accept(cluster.request());
  EXPECT_TRUE(cluster.plan().empty());
  EXPECT_EQ(cluster.core.request(id).decision.obstacle, Obstacle::no_prefill_worker);
  cluster.worker("old", Role::prefill, 1, 1000, 64, "fp-old");
  EXPECT_TRUE(cluster.plan().empty());
  EXPECT_EQ(cluster.core.request(id).decision.obstacle, Obstacle::no_pair);
  cluster.worker("d-old", Role::decode, 1, 1000, 64, "fp-old");
  const auto actions = cluster.plan();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].prefill.first, "old");
  EXPECT_EQ(actions[0].decode.first, "d-old");
}

TEST(Placement, AWorkerThatBecomesReadyTakesTheQueue) {
  Cluster cluster;
  cluster.decode(1);
  cluster.worker("p0", Role::prefill, 1, 1000, 64, "fp", "m", WorkerState::starting);
  cluster.accept(cluster.request());
  EXPECT_TRUE(cluster.plan().empty());
  cluster.worker("p0", Role::prefill);
  EXPECT_EQ(cluster.plan().size(), 1U);
}

TEST(Placement, QuarantineEndsByTime) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  cluster.core.quarantine(0, "p0", 1, 5.0);
  cluster.accept(cluster.request());
  EXPECT_TRUE(cluster.plan().empty());
  EXPECT_EQ(cluster.core.next_wake(cluster.now), 5.0);
  cluster.now = 5.0;
  EXPECT_EQ(cluster.plan().size(), 1U);
}

TEST(Placement, TheCachedPrefixDrawsButDoesNotRule) {
  Cluster cluster;
  cluster.prefill(2);
  cluster.decode(1);
  std::mt19937_64 random(1);
  std::vector<std::uint8_t> hashes(40 * 16);
  for (auto& byte : hashes) {
    byte = static_cast<std::uint8_t>(random());
  }
  cluster.core.index_stored("p1", 1, hashes, prefix::Tier::device, false);
  auto arguments = cluster.request(40 * 16 + 10);
  arguments.hashes = hashes;
  const auto first = cluster.accept(arguments);
  const auto actions = cluster.plan();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].prefill.first, "p1");
  EXPECT_EQ(actions[0].prefill_cached_blocks, 40);
  EXPECT_EQ(cluster.core.request(first).decision.best.uncached_tokens, 10);
  // p1 is now so busy that computing the whole prompt on p0 is quicker.
  cluster.core.report_load(0, "p0", 1, {0, 0, 0, 0, 1000, 0});
  cluster.core.report_load(0, "p1", 1, {0, 9, 0, 9000, 1000, 0});
  arguments.request_id = "again";
  cluster.accept(arguments);
  EXPECT_EQ(cluster.plan().at(0).prefill.first, "p0");
}

TEST(Placement, TheWholePromptCachedStillComputesOneToken) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  std::vector<std::uint8_t> hashes(4 * 16, 9);
  hashes[16] = 1;
  hashes[32] = 2;
  hashes[48] = 3;
  cluster.core.index_stored("p0", 1, hashes, prefix::Tier::device, false);
  cluster.core.index_stored("d0", 1, hashes, prefix::Tier::device, false);
  auto arguments = cluster.request(64);
  arguments.hashes = hashes;
  const auto id = cluster.accept(arguments);
  const auto actions = cluster.plan();
  EXPECT_EQ(actions.at(0).prefill_cached_blocks, 3) << "the last token is computed for its logits";
  EXPECT_EQ(actions.at(0).decode_cached_blocks, 4);
  EXPECT_EQ(cluster.core.request(id).decision.best.uncached_tokens, 16);
}

TEST(Placement, DecodeRoomIsReservedJointly) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1, /*blocks=*/20, /*seqs=*/64);  // 16 tokens a block
  for (int i = 0; i < 4; ++i) {
    cluster.accept(cluster.request(100, 32));  // 7 blocks, and 1 or 2 for the output
  }
  EXPECT_EQ(cluster.plan().size(), 2U);
  const auto blocked = cluster.core.request(3).decision.obstacle;
  EXPECT_EQ(blocked, Obstacle::decode_blocks);
  cluster.finish(1);
  EXPECT_EQ(cluster.plan().size(), 1U);
}

TEST(Placement, DecodeSequencesAreACap) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1, 1000, 3);
  auto arguments = cluster.request();
  arguments.choices = 2;
  cluster.accept(arguments);
  const auto waiting = cluster.accept([&] {
    auto other = cluster.request();
    other.choices = 2;
    return other;
  }());
  EXPECT_EQ(cluster.plan().size(), 1U);
  EXPECT_EQ(cluster.core.request(waiting).decision.obstacle, Obstacle::decode_sequences);
}

TEST(Placement, WindowsHoldAndAnIdleWorkerTakesAnyPrompt) {
  AdmissionConfig config;
  config.order_stretch = 0;
  config.prefill_window_tokens = 1000;
  config.transfer_window_requests = 3;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(1);
  const auto large = cluster.accept(cluster.request(5000));
  const auto second = cluster.accept(cluster.request(100));
  EXPECT_EQ(cluster.plan().size(), 1U) << "larger than the window, yet placed on the idle worker";
  EXPECT_EQ(cluster.core.request(second).decision.obstacle, Obstacle::prefill_window);
  cluster.event(large, "first_token");
  for (int i = 0; i < 4; ++i) {
    cluster.accept(cluster.request(100));
  }
  EXPECT_EQ(cluster.plan().size(), 2U) << "the hand-off of the first still counts";
  EXPECT_EQ(cluster.core.request(second + 2).decision.obstacle, Obstacle::transfer_window);
  cluster.event(large, "handoff_done");
  EXPECT_EQ(cluster.plan().size(), 1U);
}

TEST(Placement, ReservationsDieWithTheIncarnation) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  const auto id = cluster.accept(cluster.request());
  cluster.plan();
  EXPECT_EQ(cluster.core.stats()["reservations"], 3);
  cluster.worker("d0", Role::decode, 2);  // restarted
  EXPECT_EQ(cluster.core.stats()["reservations"], 1);
  cluster.core.remove_worker(0, "p0", 1);
  EXPECT_EQ(cluster.core.stats()["reservations"], 0);
  cluster.worker("p0", Role::prefill, 2);
  cluster.event(id, "cancel");
  cluster.expect_quiet();
}

TEST(Placement, LateFiguresOfAnOldIncarnationAreIgnored) {
  Cluster cluster;
  cluster.worker("d0", Role::decode, 7);
  cluster.core.report_load(0, "d0", 6, {0, 60, 0, 0, 0, 0});
  cluster.core.quarantine(0, "d0", 6, 100);
  cluster.core.remove_worker(0, "d0", 6);
  EXPECT_EQ(cluster.core.stats()["workers"], 1);
  EXPECT_FALSE(cluster.core.workers().at(0).report.has_value());
}

TEST(Placement, PrefersTheDecodeWorkerWithFewerStreams) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(2);
  cluster.core.report_load(0, "d0", 1, {0, 40, 0, 0, 500, 0});
  cluster.core.report_load(0, "d1", 1, {0, 2, 0, 0, 950, 0});
  cluster.accept(cluster.request());
  EXPECT_EQ(cluster.plan().at(0).decode.first, "d1");
}

TEST(Placement, OptionsOfTheCostAreOffUnlessAskedFor) {
  std::vector<std::uint8_t> hashes(60 * 16);
  std::mt19937_64 random(3);
  for (auto& byte : hashes) {
    byte = static_cast<std::uint8_t>(random());
  }
  for (const bool on : {false, true}) {
    AdmissionConfig config;
    config.prefix_fetch = on ? 1 : 0;
    Cluster cluster(config);
    cluster.prefill(1);
    cluster.decode(1);
    cluster.core.index_stored("d0", 1, hashes, prefix::Tier::device, false);
    auto arguments = cluster.request(60 * 16 + 5);
    arguments.hashes = hashes;
    cluster.accept(arguments);
    const auto actions = cluster.plan();
    ASSERT_EQ(actions.size(), 1U);
    EXPECT_EQ(actions[0].fetch_from.first, on ? "d0" : "");
  }
  for (const bool on : {false, true}) {
    AdmissionConfig config;
    config.local_prefill = on ? 1 : 0;
    Cluster cluster(config);
    cluster.prefill(1);
    cluster.decode(1);
    cluster.core.index_stored("d0", 1, hashes, prefix::Tier::device, false);
    auto arguments = cluster.request(60 * 16 + 5);
    arguments.hashes = hashes;
    const auto id = cluster.accept(arguments);
    const auto actions = cluster.plan();
    ASSERT_EQ(actions.size(), 1U);
    EXPECT_EQ(actions[0].local, on);
    cluster.finish(id);
    cluster.expect_quiet();
  }
}

TEST(Fit, LearnsALineAndShrugsAtOutliers) {
  placement::Fit fit({{1e-3, 1e-4, 0.0}, 1000.0, 1e6});
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> tokens(10, 4000);
  std::normal_distribution<double> noise(0, 0.02);
  for (int i = 0; i < 400; ++i) {
    const double x = tokens(random);
    double seconds = (0.02 + 2e-3 * x) * (1.0 + noise(random));
    if (i % 20 == 7) {
      seconds += 30.0;  // a pause of the machine
    }
    fit.add(x, 0, seconds);
  }
  EXPECT_NEAR(fit.predict(1000, 0), 2.02, 0.15);
  EXPECT_NEAR(fit.predict(4000, 0), 8.02, 0.6);
  EXPECT_TRUE(fit.measured());
  for (int i = 0; i < 200; ++i) {  // the worker became three times as fast for good
    const double x = tokens(random);
    fit.add(x, 0, (0.02 + 2e-3 * x) / 3.0);
  }
  EXPECT_NEAR(fit.predict(1000, 0), 2.02 / 3.0, 0.1);
}

TEST(Fit, CoefficientsNeverTurnNegativeNorNotANumber) {
  placement::Fit fit({{1e-3, 1e-4, 1e-9}, 1000.0, 1e6});
  for (int i = 0; i < 100; ++i) {
    fit.add(100.0 + i, 0, 1.0 / (1 + i));  // falls with work: nonsense, but no reason for nonsense
    fit.add(std::nan(""), 0, 1);
    fit.add(10, 0, -1);
    fit.add(10, 0, INFINITY);
  }
  for (const double coefficient : fit.coefficients()) {
    EXPECT_GE(coefficient, 0);
    EXPECT_TRUE(std::isfinite(coefficient));
  }
}

}  // namespace
}  // namespace twinpool::test
