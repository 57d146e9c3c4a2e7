// SPDX-License-Identifier: Apache-2.0
// A worker that comes back from quarantine on probation: one placement, until somebody says how it went.
#include "tests/router_fixture.h"

namespace twinpool::test {
namespace {

std::size_t placed_on(const std::vector<Action>& actions, const std::string& decode) {
  std::size_t count = 0;
  for (const Action& action : actions) {
    count += action.decode.first == decode ? 1U : 0U;
  }
  return count;
}

TEST(Probation, GivesOnePlacementAfterTheQuarantineAndNoOther) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  cluster.core.quarantine(0, "d0", 1, 5.0, true);
  for (int i = 0; i < 3; ++i) {
    cluster.accept(cluster.request());
  }
  EXPECT_TRUE(cluster.plan().empty());
  EXPECT_EQ(cluster.core.next_wake(cluster.now), 5.0);
  cluster.now = 5.0;
  EXPECT_EQ(placed_on(cluster.plan(), "d0"), 1U);
  cluster.now = 6.0;
  EXPECT_TRUE(cluster.plan().empty());
  // Whoever waits for it is not to be asked for again and again meanwhile.
  EXPECT_GT(cluster.core.next_wake(cluster.now), cluster.now);
  cluster.core.quarantine(cluster.now, "d0", 1, cluster.now, false);
  EXPECT_EQ(placed_on(cluster.plan(), "d0"), 2U);
}

TEST(Probation, IsAnsweredWithAnotherQuarantineOrAnotherPlacement) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  cluster.core.quarantine(0, "d0", 1, 0.0, true);
  for (int i = 0; i < 3; ++i) {
    cluster.accept(cluster.request());
  }
  EXPECT_EQ(placed_on(cluster.plan(), "d0"), 1U);
  cluster.core.quarantine(cluster.now, "d0", 1, cluster.now + 2.0, true);
  EXPECT_TRUE(cluster.plan().empty());
  cluster.now += 2.0;
  EXPECT_EQ(placed_on(cluster.plan(), "d0"), 1U);
  // Nobody has heard how it went: it is asked once more.
  cluster.core.quarantine(cluster.now, "d0", 1, cluster.now, true);
  EXPECT_EQ(placed_on(cluster.plan(), "d0"), 1U);
}

TEST(Probation, OthersTakeTheWorkMeanwhile) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(2);
  cluster.core.quarantine(0, "d0", 1, 0.0, true);
  for (int i = 0; i < 6; ++i) {
    cluster.accept(cluster.request());
  }
  const auto actions = cluster.plan();
  EXPECT_EQ(actions.size(), 6U);
  EXPECT_LE(placed_on(actions, "d0"), 1U);
}

}  // namespace
}  // namespace twinpool::test
