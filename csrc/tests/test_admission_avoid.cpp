// SPDX-License-Identifier: Apache-2.0
// Workers that have failed a request: who gets it next.
#include "tests/router_fixture.h"

namespace twinpool::test {
namespace {

std::string decoder_of(const Action& action) {
  return std::string(action.decode.first);
}

TEST(Avoid, AnotherWorkerThatIsBusyIsWorthTheWait) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(2, 1000, 1);
  const auto failed = cluster.accept(cluster.request());
  const auto other = cluster.accept(cluster.request());
  const auto placed = cluster.plan();
  ASSERT_EQ(placed.size(), 2U);
  ASSERT_NE(decoder_of(placed[0]), decoder_of(placed[1]));
  EXPECT_EQ(cluster.event(failed, "attempt_failed", "TRANSFER:decode").state, "Retrying");
  EXPECT_EQ(cluster.event(failed, "requeue").state, "Queued");
  EXPECT_TRUE(cluster.plan().empty()) << "the one that failed it has nothing to do, and would fail it again";
  cluster.finish(other);
  const auto next = cluster.plan();
  ASSERT_EQ(next.size(), 1U);
  EXPECT_EQ(decoder_of(next[0]), decoder_of(placed[1]));
  cluster.finish(failed);
  cluster.expect_quiet();
}

TEST(Avoid, BetterTheWorkerThatFailedItThanNoneButNotAtOnce) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(2, 1000, 1);
  const auto failed = cluster.accept(cluster.request());
  const auto placed = cluster.plan();
  ASSERT_EQ(placed.size(), 1U);
  const std::string first = decoder_of(placed[0]);
  cluster.event(failed, "attempt_failed", "TRANSFER:decode");
  cluster.core.remove_worker(cluster.now, first == "d0" ? "d1" : "d0", 1);
  cluster.event(failed, "requeue");
  EXPECT_TRUE(cluster.plan().empty());
  const double wait = cluster.core.config().retry_backoff_seconds;
  EXPECT_NEAR(cluster.core.next_wake(cluster.now), cluster.now + wait, 1e-9);
  cluster.now += wait;
  const auto next = cluster.plan();
  ASSERT_EQ(next.size(), 1U);
  EXPECT_EQ(decoder_of(next[0]), first);
  cluster.finish(failed);
  cluster.expect_quiet();
}

TEST(Avoid, TheWaitIsDoubledAndEndsWhenAnotherWorkerComes) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  const auto failed = cluster.accept(cluster.request());
  const double wait = cluster.core.config().retry_backoff_seconds;
  for (const double factor : {1.0, 2.0}) {
    ASSERT_EQ(cluster.plan().size(), 1U);
    cluster.event(failed, "attempt_failed", "TRANSFER:decode");
    cluster.event(failed, "requeue");
    EXPECT_TRUE(cluster.plan().empty());
    EXPECT_NEAR(cluster.core.next_wake(cluster.now), cluster.now + wait * factor, 1e-9);
    if (factor == 1.0) {
      cluster.now += wait;
    }
  }
  cluster.worker("d1", placement::Role::decode);
  const auto next = cluster.plan();
  ASSERT_EQ(next.size(), 1U);
  EXPECT_EQ(decoder_of(next[0]), "d1");
  cluster.finish(failed);
  cluster.expect_quiet();
}

TEST(Avoid, OneThatWaitsForItsReturnHoldsNobodyBack) {
  AdmissionConfig config;
  config.max_bypass = 1;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(1);
  const auto failed = cluster.accept(cluster.request());
  ASSERT_EQ(cluster.plan().size(), 1U);
  cluster.event(failed, "attempt_failed", "TRANSFER:decode");
  cluster.event(failed, "requeue");
  for (int other = 0; other < 3; ++other) {
    const auto id = cluster.accept(cluster.request());
    ASSERT_EQ(cluster.plan().size(), 1U);
    cluster.finish(id);
  }
  cluster.now += cluster.core.config().retry_backoff_seconds;
  ASSERT_EQ(cluster.plan().size(), 1U);
  cluster.finish(failed);
  cluster.expect_quiet();
}

}  // namespace
}  // namespace twinpool::test
