// SPDX-License-Identifier: Apache-2.0
// Who waits how long, and who goes first: all in virtual time.
#include <random>

#include "tests/queue_fixture.h"

namespace twinpool::test {
namespace {

using placement::Role;

// One tenant sends ten times as much as the other, which still sends more than its share can take; for four minutes,
// in which requests wait for many times the ageing time.
TEST(AdmissionQueue, SharesFollowWeightsWhateverTheTenantsSend) {
  for (const double weight : {1.0, 3.0}) {
    Server server(one_at_a_time(), 1e-3);
    Cluster& cluster = server.cluster;
    cluster.core.set_tenant(0, "small", {.weight = weight});
    std::mt19937_64 random(11);
    std::uniform_int_distribution<int> prompt(20, 400);
    while (cluster.now < 240.0) {
      cluster.accept(of_tenant(cluster, "small", prompt(random)));  // one second's work a second
      for (int k = 0; k < 10; ++k) {
        cluster.accept(of_tenant(cluster, "big", prompt(random)));
      }
      server.run(cluster.now + 0.21);
    }
    std::map<std::uint32_t, double> tokens;
    for (const auto id : server.order) {
      const auto& request = cluster.core.request(id);
      tokens[request.tenant] += static_cast<double>(request.prompt_tokens + 1);
    }
    const double share = tokens[0] / (tokens[0] + tokens[1]);
    EXPECT_NEAR(share, weight / (weight + 1.0), 0.05 * weight / (weight + 1.0)) << "weight " << weight;
  }
}

TEST(AdmissionQueue, AnIdleTenantSavesNothingUp) {
  Server server(one_at_a_time(), 1e-3);
  for (int i = 0; i < 1000; ++i) {
    server.cluster.accept(of_tenant(server.cluster, "busy"));
  }
  server.run(50.0);
  for (int i = 0; i < 200; ++i) {
    server.cluster.accept(of_tenant(server.cluster, "late"));
  }
  const std::size_t before = server.order.size();
  server.run(60.0);
  int late = 0;
  for (std::size_t i = before; i < server.order.size(); ++i) {
    late += server.cluster.core.request(server.order[i]).tenant == 1 ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(late) / static_cast<double>(server.order.size() - before), 0.5, 0.03);
}

// A steady stream of the highest band that alone fills the worker: the lowest is served within its ageing bound.
TEST(AdmissionQueue, TheLowestBandIsServedWithinTheAgeingBound) {
  AdmissionConfig config = one_at_a_time();
  config.ageing_seconds = 2.0;
  Server server(config, 1e-3);  // 0.1 s a request
  auto low = of_tenant(server.cluster, "t");
  low.priority = 0;
  std::map<std::uint64_t, double> submitted;
  const auto lowest = server.cluster.accept(low);
  submitted[lowest] = 0;
  double served = -1;
  server.on_finish = [&](std::uint64_t id, double at) {
    if (id == lowest) {
      served = at;
    }
  };
  for (int i = 0; i < 600; ++i) {  // twice what can be served
    auto high = of_tenant(server.cluster, i % 2 == 0 ? "a" : "b");
    high.priority = 5;
    server.cluster.accept(high);
    server.run(server.cluster.now + 0.05);
  }
  ASSERT_GE(served, 0) << "starved";
  // Five steps of ageing bring it level; then its tenant has its third of the worker.
  EXPECT_LE(served, 5 * 2.0 + 1.0);
  EXPECT_GT(served, 9.0) << "nor too early";
}

TEST(AdmissionQueue, HigherBandsGoFirstThenDeadlinesThenArrival) {
  Server server(one_at_a_time(), 1e-3);
  Cluster& cluster = server.cluster;
  cluster.accept(of_tenant(cluster, "t"));  // runs at once
  cluster.plan();
  server.order.clear();
  std::vector<std::uint64_t> expected(5);
  expected[4] = cluster.accept(of_tenant(cluster, "t"));  // no deadline
  auto arguments = of_tenant(cluster, "t");
  arguments.deadline = 500;
  expected[2] = cluster.accept(arguments);
  arguments = of_tenant(cluster, "t");
  arguments.deadline = 400;
  expected[1] = cluster.accept(arguments);
  arguments = of_tenant(cluster, "t");
  arguments.deadline = 500;
  expected[3] = cluster.accept(arguments);
  arguments = of_tenant(cluster, "t");
  arguments.priority = 1;
  expected[0] = cluster.accept(arguments);
  cluster.finish(1);
  server.run(1.0);
  EXPECT_EQ(server.order, expected);
}

TEST(AdmissionQueue, ASmallOneMayPassABlockedLargeOneButNotForEver) {
  AdmissionConfig config;
  config.order_stretch = 0;
  config.max_bypass = 5;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(1, 100, 64);
  cluster.accept(cluster.request(1000, 16));  // 63 blocks
  ASSERT_EQ(cluster.plan().size(), 1U);
  const auto large = cluster.accept(cluster.request(1000, 16));
  int passed = 0;
  for (int i = 0; i < 20; ++i) {
    const auto id = cluster.accept(cluster.request(16, 1));
    for (const Action& action : cluster.plan()) {
      ASSERT_EQ(action.request, id);
      ++passed;
      cluster.finish(id);
    }
  }
  EXPECT_EQ(passed, 5);
  cluster.finish(1);
  EXPECT_EQ(cluster.plan().at(0).request, large);
}

TEST(AdmissionQueue, ALowerBandNeverPassesABlockedHigherOne) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1, 100, 64);
  cluster.accept(cluster.request(1000, 16));
  cluster.plan();
  auto arguments = cluster.request(1000, 16);
  arguments.priority = 1;
  cluster.accept(arguments);
  cluster.accept(cluster.request(16, 1));
  EXPECT_TRUE(cluster.plan().empty());
}

TEST(AdmissionQueue, TheWaitEndsWithAReasonThatFitsTheCluster) {
  AdmissionConfig config;
  config.queue_ttl_seconds = 10;
  Cluster cluster(config);
  const auto nobody = cluster.accept(cluster.request());
  EXPECT_EQ(cluster.core.next_wake(0), 10.0);
  cluster.now = 10.0;
  auto actions = cluster.plan();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].kind, Action::Kind::end);
  EXPECT_EQ(actions[0].request, nobody);
  EXPECT_EQ(actions[0].cause, Cause::no_workers);
  EXPECT_EQ(cluster.state(nobody), "Expired");
  cluster.prefill(1);
  cluster.decode(1, 1000, 1);
  cluster.accept(cluster.request());
  const auto second = cluster.accept(cluster.request());
  ASSERT_EQ(cluster.plan().size(), 1U);
  cluster.now = 20.0;
  actions = cluster.plan();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].request, second);
  EXPECT_EQ(actions[0].cause, Cause::queue_timeout);
  EXPECT_GT(actions[0].retry_after, 0);
}

TEST(AdmissionQueue, WithoutAnyWorkerThePolicySaysRefuseOrWait) {
  AdmissionConfig config;
  config.refuse_without_workers = 1;
  Cluster cluster(config);
  EXPECT_EQ(cluster.submit(cluster.request()).reason, Cause::no_workers);
  cluster.prefill(1);
  EXPECT_EQ(cluster.submit(cluster.request()).reason, Cause::no_workers);
  cluster.worker("d0", Role::decode, 1, 100, 4, "fp", "m", placement::WorkerState::starting);
  EXPECT_TRUE(cluster.submit(cluster.request()).accepted) << "one is on its way";
}

}  // namespace
}  // namespace twinpool::test
