// SPDX-License-Identifier: Apache-2.0
// Deadlines, caps, buckets and other limits: who is refused, or ended, and with which hint. All in virtual time.
#include "tests/queue_fixture.h"

namespace twinpool::test {
namespace {

TEST(AdmissionLimits, DeadlinesEndRequestsInEveryState) {
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

TEST(AdmissionLimits, WhatCannotMeetItsDeadlineIsRefusedAtArrivalAndAtDequeue) {
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

TEST(AdmissionLimits, ADeadlineIsOfTheWholeAnswer) {
  AdmissionConfig config;
  config.max_resumes = 1;
  Cluster cluster(config);
  cluster.prefill(1);
  cluster.decode(1);
  const auto asked = [&](double deadline) {
    auto arguments = cluster.request(100, 100);
    arguments.deadline = deadline;
    return cluster.submit(arguments);
  };
  for (int i = 0; i < 10; ++i) {
    cluster.core.observe_prefill("p0", 1, 500 + i, 0, (500 + i) * 1e-3);
    cluster.core.report_load(cluster.now, "d0", 1, {cluster.now, 1U + static_cast<unsigned>(i % 2), 0, 0, 900, 0.1});
  }
  EXPECT_TRUE(asked(5.0).accepted) << "how long answers are was not seen yet";
  for (int i = 0; i < 10; ++i) {
    const auto id = cluster.accept(cluster.request(100, 100));
    cluster.plan();
    for (const char* name : {"decode_reserved", "prefill_started", "first_token", "delivered", "handoff_done"}) {
      EXPECT_TRUE(cluster.event(id, name).applied) << name;
    }
    EXPECT_TRUE(cluster.event(id, "token", "100").applied);
    EXPECT_TRUE(cluster.event(id, "finished").terminal);
  }
  const Submission refused = asked(5.0);  // the first token comes after 0.1 s, the other 99 take 0.1 each
  EXPECT_EQ(refused.reason, Cause::deadline_unreachable);
  EXPECT_NE(refused.limit.find("predicted_answer_seconds="), std::string::npos) << refused.limit;
  EXPECT_NEAR(refused.retry_after, 5.0, 1.5);
  auto arguments = cluster.request(100, 100);
  arguments.deadline = 15.0;
  const auto going = cluster.accept(arguments);
  EXPECT_EQ(cluster.plan().size(), 1U);
  // It has two seconds left when it loses its worker: its client goes on reading for as long as it can.
  for (const char* name : {"decode_reserved", "prefill_started", "first_token", "delivered", "handoff_done"}) {
    cluster.event(going, name);
  }
  cluster.now = 13.0;
  cluster.event(going, "worker_lost", "decode");
  cluster.worker("d1", placement::Role::decode);
  cluster.event(going, "requeue");
  cluster.plan();
  EXPECT_EQ(cluster.state(going), "Prefilling");
}

TEST(AdmissionLimits, TheDeadlineCountsTheQueueAhead) {
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

TEST(AdmissionLimits, CapsByCountTokensAndBytes) {
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

TEST(AdmissionLimits, ARetryHintFollowsTheDrainRate) {
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

TEST(AdmissionLimits, TokenBucketsPayForPromptAndOutput) {
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

TEST(AdmissionLimits, UnusedTokensGoBackToTheBucket) {
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

TEST(AdmissionLimits, ConcurrencyCountsUntilTheEnd) {
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

TEST(AdmissionLimits, ATenantsPriorityIsLoweredToItsHighest) {
  Cluster cluster;
  cluster.core.set_tenant(0, "t", {.max_priority = 2});
  auto arguments = of_tenant(cluster, "t");
  arguments.priority = 50;
  EXPECT_EQ(cluster.core.request(cluster.accept(arguments)).priority, 2);
}

TEST(AdmissionLimits, TenantNamesDoNotPileUp) {
  Cluster cluster;
  for (int i = 0; i < 20000; ++i) {
    const auto id = cluster.accept(of_tenant(cluster, "tenant-" + std::to_string(i)));
    cluster.event(id, "cancel");
    cluster.core.forget(id);
  }
  EXPECT_LE(cluster.core.stats()["tenants"], 2048);
}

TEST(AdmissionLimits, WhatFitsNoWorkerIsRefusedAtOnce) {
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

TEST(AdmissionLimits, ArgumentsOutOfRangeAreErrors) {
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
