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

TEST(Avoid, BetterTheWorkerThatFailedItThanNone) {
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
  const auto next = cluster.plan();
  ASSERT_EQ(next.size(), 1U);
  EXPECT_EQ(decoder_of(next[0]), first);
  cluster.finish(failed);
  cluster.expect_quiet();
}

}  // namespace
}  // namespace twinpool::test
