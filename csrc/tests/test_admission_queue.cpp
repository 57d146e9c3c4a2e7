// SPDX-License-Identifier: Apache-2.0
// Who waits how long, who goes first, who is refused: all in virtual time.
#include <cmath>
#include <functional>
#include <queue>
#include <random>

#include "tests/router_fixture.h"

namespace twinpool::test {
namespace {

using placement::Role;

/// Runs placed requests to their end after a fixed service time, one at a time on one pair of workers.
class Server {
 public:
  explicit Server(const AdmissionConfig& config, double seconds_per_token)
      : cluster(config),
        seconds_per_token_(seconds_per_token) {
    cluster.prefill(1);
    cluster.decode(1);
  }
  Cluster cluster;
  std::vector<std::uint64_t> order;                      // of placement
  std::function<void(std::uint64_t, double)> on_finish;  // request, time
  std::vector<Action> ends;

  /// Plans, and ends what runs when its time has come, until ``until``.
  void run(double until) {
    while (true) {
      for (const Action& action : cluster.plan()) {
        if (action.kind == Action::Kind::place) {
          order.push_back(action.request);
          const double work =
              static_cast<double>(cluster.core.request(action.request).prompt_tokens) * seconds_per_token_;
          free_at_ = std::max(free_at_, cluster.now) + work;
          running_.emplace(free_at_, action.request);
        } else {
          ends.push_back(action);
        }
      }
      const double next = running_.empty() ? INFINITY : running_.front().first;
      const double wake = cluster.core.next_wake(cluster.now);
      const double at = std::min(next, wake > cluster.now ? wake : INFINITY);
      if (at > until) {
        cluster.now = until;
        return;
      }
      cluster.now = at;
      if (next <= at) {
        const auto id = running_.front().second;
        running_.pop();
        cluster.finish(id);
        if (on_finish) {
          on_finish(id, at);
        }
      }
    }
  }

 private:
  double seconds_per_token_;
  double free_at_ = 0.0;
  std::queue<std::pair<double, std::uint64_t>> running_;
};

AdmissionConfig one_at_a_time() {
  AdmissionConfig config;
  config.transfer_window_requests = 1;
  config.prefill_window_tokens = 1;
  config.early_rejection = 0;
  config.queue_ttl_seconds = 1e4;
  config.max_queue_requests = 0;
  return config;
}

SubmitArguments of_tenant(Cluster& cluster, const std::string& tenant, std::int64_t prompt = 100) {
  auto arguments = cluster.request(prompt, 1);
  arguments.tenant = tenant;
  return arguments;
}

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

TEST(AdmissionQueue, DeadlinesEndRequestsInEveryState) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  auto arguments = cluster.request();
  arguments.deadline = 5.0;
  const auto running = cluster.accept(arguments);
  cluster.plan();
  cluster.event(running, "first_token");
  cluster.now = 4.9;
  EXPECT_TRUE(cluster.plan().empty());
  EXPECT_EQ(cluster.core.next_wake(cluster.now), 5.0);
  cluster.now = 5.0;
  const auto actions = cluster.plan();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].cause, Cause::deadline_exceeded);
  EXPECT_EQ(actions[0].attempt, 1U) << "whose legs are to be cancelled";
  cluster.expect_quiet();
  arguments = cluster.request();
  arguments.deadline = 4.0;
  EXPECT_EQ(cluster.submit(arguments).reason, Cause::deadline_exceeded) << "passed before it came";
}

TEST(AdmissionQueue, WhatCannotMeetItsDeadlineIsRefusedAtArrivalAndAtDequeue) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  auto arguments = cluster.request(1000);
  arguments.deadline = 0.5;
  const auto unmeasured = cluster.accept(arguments);  // a guess is no reason to refuse
  cluster.event(unmeasured, "cancel");
  for (int i = 0; i < 10; ++i) {
    cluster.core.observe_prefill("p0", 1, 500 + i, 0, (500 + i) * 1e-3);  // a millisecond a token
  }
  arguments = cluster.request(1000);
  arguments.deadline = 0.5;
  const Submission refused = cluster.submit(arguments);
  EXPECT_EQ(refused.reason, Cause::deadline_unreachable);
  EXPECT_NEAR(refused.retry_after, 0.5, 0.1) << "what is missing";
  EXPECT_NE(refused.limit.find("predicted_ttft_seconds="), std::string::npos);
  // Enough time at arrival, not enough when its turn comes.
  cluster.core.quarantine(0, "p0", 1, 3.5);
  arguments = cluster.request(1000);
  arguments.deadline = 4.0;
  const auto late = cluster.accept(arguments);
  EXPECT_TRUE(cluster.plan().empty());
  cluster.now = 3.5;
  const auto actions = cluster.plan();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].request, late);
  EXPECT_EQ(actions[0].cause, Cause::deadline_unreachable);
  EXPECT_EQ(cluster.state(late), "Rejected");
  EXPECT_EQ(cluster.core.request(late).placed, false);
}

TEST(AdmissionQueue, TheDeadlineCountsTheQueueAhead) {
  AdmissionConfig config;
  config.prefill_window_tokens = 1;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(1);
  for (int i = 0; i < 10; ++i) {
    cluster.core.observe_prefill("p0", 1, 500 + i, 0, (500 + i) * 1e-3);
  }
  for (int i = 0; i < 11; ++i) {
    cluster.accept(cluster.request(1000));
    cluster.plan();
  }
  auto arguments = cluster.request(1000);
  arguments.deadline = 8.0;  // ten seconds wait ahead of it
  EXPECT_EQ(cluster.submit(arguments).reason, Cause::deadline_unreachable);
  arguments.priority = 1;  // those wait behind it
  EXPECT_TRUE(cluster.submit(arguments).accepted);
}

TEST(AdmissionQueue, CapsByCountTokensAndBytes) {
  AdmissionConfig config;
  config.max_queue_requests = 3;
  config.max_queue_tokens = 1000;
  config.max_queue_bytes = 5000;
  const auto refused = [&](std::int64_t prompt, std::int64_t bytes, const char* limit) {
    Cluster cluster(config);
    int accepted = 0;
    for (int i = 0; i < 10; ++i) {
      auto arguments = cluster.request(prompt);
      arguments.bytes = bytes;
      const Submission submission = cluster.submit(arguments);
      if (submission.accepted) {
        ++accepted;
        continue;
      }
      EXPECT_EQ(submission.reason, Cause::queue_full);
      EXPECT_EQ(submission.limit, limit);
      EXPECT_GT(submission.retry_after, 0);
    }
    return accepted;
  };
  EXPECT_EQ(refused(10, 10, "max_queue_requests=3"), 3);
  EXPECT_EQ(refused(600, 10, "max_queue_tokens=1000"), 1);
  EXPECT_EQ(refused(10, 2500, "max_queue_bytes=5000"), 2);
  EXPECT_EQ(refused(2000, 10, "max_queue_tokens=1000"), 1) << "what is alone always fits";
}

TEST(AdmissionQueue, ARetryHintFollowsTheDrainRate) {
  AdmissionConfig config = one_at_a_time();
  config.max_queue_requests = 10;
  Server server(config, 1e-2);  // a request of 100 tokens a second
  double hint = 0;
  for (int i = 0; i < 300; ++i) {
    const Submission submission = server.cluster.submit(of_tenant(server.cluster, "t"));
    if (!submission.accepted) {
      hint = submission.retry_after;
    }
    server.run(server.cluster.now + 0.2);
  }
  EXPECT_NEAR(hint, 1.0, 0.5) << "one place becomes free each second";
}

TEST(AdmissionQueue, TokenBucketsPayForPromptAndOutput) {
  Cluster cluster;
  cluster.core.set_tenant(0, "t", {.tokens_per_second = 100, .burst_tokens = 1000});
  EXPECT_TRUE(cluster.submit(of_tenant(cluster, "t", 600)).accepted);
  const Submission refused = cluster.submit(of_tenant(cluster, "t", 600));
  EXPECT_EQ(refused.reason, Cause::tenant_rate);
  EXPECT_NEAR(refused.retry_after, 2.02, 1e-6) << "601 of 399 tokens are there, 100 come a second";
  EXPECT_TRUE(cluster.submit(of_tenant(cluster, "other", 600)).accepted);
  cluster.now = 2.1;
  EXPECT_TRUE(cluster.submit(of_tenant(cluster, "t", 600)).accepted);
  cluster.now = 1000;
  EXPECT_TRUE(cluster.submit(of_tenant(cluster, "t", 5000)).accepted) << "larger than the bucket: allowed when full";
  EXPECT_NEAR(cluster.submit(of_tenant(cluster, "t", 1)).retry_after, 40.03, 0.05) << "and paid off";
}

TEST(AdmissionQueue, UnusedTokensGoBackToTheBucket) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  cluster.core.set_tenant(0, "t", {.tokens_per_second = 1e-3, .burst_tokens = 1000});
  auto arguments = of_tenant(cluster, "t", 100);
  arguments.max_new_tokens = 900;
  const auto queued = cluster.accept(arguments);
  cluster.event(queued, "cancel");
  arguments.request_id = "second";
  const auto run = cluster.accept(arguments);  // all of it is back
  cluster.plan();
  cluster.event(run, "handoff_done");
  cluster.event(run, "token", "50");
  cluster.event(run, "finished");
  EXPECT_TRUE(cluster.submit(of_tenant(cluster, "t", 840)).accepted) << "850 of 900 output tokens came back";
  EXPECT_FALSE(cluster.submit(of_tenant(cluster, "t", 20)).accepted);
}

TEST(AdmissionQueue, ConcurrencyCountsUntilTheEnd) {
  AdmissionConfig config;
  config.max_tenant_requests = 2;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(1);
  const auto first = cluster.accept(of_tenant(cluster, "t"));
  cluster.accept(of_tenant(cluster, "t"));
  const Submission refused = cluster.submit(of_tenant(cluster, "t"));
  EXPECT_EQ(refused.reason, Cause::tenant_concurrency);
  EXPECT_EQ(refused.limit, "max_tenant_requests=2");
  EXPECT_TRUE(cluster.submit(of_tenant(cluster, "u")).accepted);
  cluster.plan();
  EXPECT_FALSE(cluster.submit(of_tenant(cluster, "t")).accepted) << "placed ones count";
  cluster.event(first, "cancel");
  EXPECT_TRUE(cluster.submit(of_tenant(cluster, "t")).accepted);
}

TEST(AdmissionQueue, ATenantsPriorityIsLoweredToItsHighest) {
  Cluster cluster;
  cluster.core.set_tenant(0, "t", {.max_priority = 2});
  auto arguments = of_tenant(cluster, "t");
  arguments.priority = 50;
  EXPECT_EQ(cluster.core.request(cluster.accept(arguments)).priority, 2);
}

TEST(AdmissionQueue, TenantNamesDoNotPileUp) {
  Cluster cluster;
  for (int i = 0; i < 20000; ++i) {
    const auto id = cluster.accept(of_tenant(cluster, "tenant-" + std::to_string(i)));
    cluster.event(id, "cancel");
    cluster.core.forget(id);
  }
  EXPECT_LE(cluster.core.stats()["tenants"], 2048);
}

TEST(AdmissionQueue, WhatFitsNoWorkerIsRefusedAtOnce) {
  Cluster cluster;
  EXPECT_TRUE(cluster.submit(cluster.request(1 << 20)).accepted) << "nothing is known yet";
  cluster.prefill(1);
  cluster.decode(1, 100, 4);
  const Submission refused = cluster.submit(cluster.request(100 * 16));
  EXPECT_EQ(refused.reason, Cause::exceeds_capacity);
  EXPECT_EQ(refused.retry_after, 0) << "a retry does not help";
  EXPECT_TRUE(cluster.submit(cluster.request(99 * 16)).accepted);
  auto arguments = cluster.request(10);
  arguments.choices = 5;
  EXPECT_EQ(cluster.submit(arguments).reason, Cause::exceeds_capacity) << "more choices than sequences";
}

TEST(AdmissionQueue, ArgumentsOutOfRangeAreErrors) {
  Cluster cluster;
  const auto bad = [&](auto change) {
    auto arguments = cluster.request();
    change(arguments);
    EXPECT_THROW(cluster.submit(arguments), CoreError);
  };
  bad([](SubmitArguments& a) { a.request_id.clear(); });
  bad([](SubmitArguments& a) { a.prompt_tokens = 0; });
  bad([](SubmitArguments& a) { a.max_new_tokens = 0; });
  bad([](SubmitArguments& a) { a.choices = 0; });
  bad([](SubmitArguments& a) { a.priority = 101; });
  bad([](SubmitArguments& a) { a.bytes = -1; });
  bad([](SubmitArguments& a) { a.deadline = NAN; });
  bad([](SubmitArguments& a) {
    static const std::vector<std::uint8_t> odd(17);
    a.hashes = odd;
  });
  AdmissionConfig config;
  EXPECT_THROW(config.set("max_attempts", 0), CoreError);
  EXPECT_THROW(config.set("max_attempts", 1.5), CoreError);
  EXPECT_THROW(config.set("max_attemps", 2), CoreError);
  EXPECT_THROW(config.set("queue_ttl_seconds", NAN), CoreError);
  EXPECT_EQ(cluster.core.stats()["requests"], 0);
}

}  // namespace
}  // namespace twinpool::test
