// SPDX-License-Identifier: Apache-2.0
// Where a session's next turn goes.
#include "tests/router_fixture.h"

namespace twinpool::test {
namespace {

using placement::Role;
using placement::WorkerState;

/// Places one request that prefers p1 and d1, and ends it.
Action turn(Cluster& cluster, std::int64_t blocks = 0, std::int64_t hashes = 0) {
  std::vector<std::uint8_t> prompt;
  for (std::int64_t i = 0; i < hashes * 16; ++i) {
    prompt.push_back(static_cast<std::uint8_t>(i));
  }
  SubmitArguments arguments = cluster.request(1600);
  arguments.hashes = prompt;
  arguments.prefer = {{"p1", 1, blocks}, {"d1", 1, blocks}};
  const auto id = cluster.accept(arguments);
  const std::vector<Action> actions = cluster.plan();
  EXPECT_EQ(actions.size(), 1U);
  cluster.finish(id);
  cluster.core.forget(id);
  return actions.at(0);
}

TEST(Sessions, PreferTheWorkersOfTheLastTurnAmongEqualOnes) {
  Cluster cluster;
  cluster.prefill(4);
  cluster.decode(4);
  for (int i = 0; i < 8; ++i) {
    const Action action = turn(cluster);
    EXPECT_EQ(action.prefill.first, "p1");
    EXPECT_EQ(action.decode.first, "d1");
  }
  cluster.expect_quiet();
}

TEST(Sessions, GiveWayToLoad) {
  Cluster cluster;
  cluster.prefill(2);
  cluster.decode(2);
  for (const char* name : {"p0", "p1", "d0", "d1"}) {
    cluster.core.report_load(0, name, 1, {0, 0, 0, 0, 1000, 0.0});
  }
  cluster.core.report_load(0, "p1", 1, {0, 1, 0, 8000, 1000, 0.0});
  cluster.core.report_load(0, "d1", 1, {0, 32, 8, 0, 1000, 0.05});
  const Action action = turn(cluster);
  EXPECT_EQ(action.prefill.first, "p0");
  EXPECT_EQ(action.decode.first, "d0");
}

TEST(Sessions, GiveWayToQuarantineDrainAndANewIncarnation) {
  Cluster cluster;
  cluster.prefill(2);
  cluster.decode(2);
  cluster.core.quarantine(0, "p1", 1, 100, false);
  cluster.worker("d1", Role::decode, 1, 1000, 64, "fp", "m", WorkerState::draining);
  const Action action = turn(cluster);
  EXPECT_EQ(action.prefill.first, "p0");
  EXPECT_EQ(action.decode.first, "d0");
  cluster.worker("p1", Role::prefill, 2);
  EXPECT_NO_THROW(turn(cluster)) << "an incarnation that is gone is nobody";
}

TEST(Sessions, BelieveWhatTheLastTurnLeftBeforeItsEventsCome) {
  Cluster cluster;
  cluster.prefill(2);
  cluster.decode(2);
  std::vector<std::uint8_t> half;
  for (std::int64_t i = 0; i < 50L * 16; ++i) {
    half.push_back(static_cast<std::uint8_t>(i));
  }
  // Without the session, the worker that the index knows to hold half of the prompt.
  cluster.core.index_stored("p0", 1, half, prefix::Tier::device, false);
  EXPECT_EQ(turn(cluster, 0, 100).prefill.first, "p0");
  const Action action = turn(cluster, 99, 100);
  EXPECT_EQ(action.prefill.first, "p1");
  EXPECT_EQ(action.prefill_cached_blocks, 99);
}

TEST(Sessions, StopBelievingAfterAWhile) {
  AdmissionConfig config;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(2);
  std::vector<std::uint8_t> prompt(16L * 10);
  SubmitArguments arguments = cluster.request(160);
  arguments.hashes = prompt;
  arguments.prefer = {{"p0", 1, 9}};
  cluster.core.quarantine(0, "p0", 1, 3.0, false);
  cluster.accept(arguments);
  EXPECT_TRUE(cluster.plan().empty());
  cluster.now = 3.5;
  const std::vector<Action> actions = cluster.plan();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].prefill_cached_blocks, 0);
}

TEST(Sessions, WrongArgumentsAreNamed) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  SubmitArguments arguments = cluster.request();
  arguments.prefer = {{"p0", 1, 1}};
  EXPECT_THROW(cluster.submit(arguments), CoreError) << "more blocks than the prompt has";
  arguments.prefer.assign(admission::k_prefer_max + 1, {"p0", 1, 0});
  EXPECT_THROW(cluster.submit(arguments), CoreError);
}

}  // namespace
}  // namespace twinpool::test
