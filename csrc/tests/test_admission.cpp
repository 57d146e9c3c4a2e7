// SPDX-License-Identifier: Apache-2.0
// The life of a request: states, attempts, ends.
#include <set>

#include "tests/router_fixture.h"

namespace twinpool::test {
namespace {

using placement::Role;

class Admission : public ::testing::Test {
 protected:
  static AdmissionConfig two_attempts() {
    AdmissionConfig config;
    config.max_attempts = 2;
    config.max_refusals = 3;
    return config;
  }
  Cluster cluster{two_attempts()};

  void SetUp() override {
    cluster.prefill(2);
    cluster.decode(2);
  }
  std::uint64_t placed() {
    const auto id = cluster.accept(cluster.request());
    EXPECT_EQ(cluster.plan().size(), 1U);
    return id;
  }
};

TEST_F(Admission, TheStraightWay) {
  const auto id = cluster.accept(cluster.request());
  EXPECT_EQ(cluster.state(id), "Queued");
  EXPECT_EQ(cluster.plan().at(0).attempt, 1U);
  const std::vector<std::pair<const char*, const char*>> way{
      {"decode_reserved", "Prefilling"}, {"prefill_started", "Prefilling"}, {"first_token", "HandingOff"},
      {"delivered", "HandingOff"},       {"handoff_done", "Decoding"},      {"token", "Decoding"},
      {"finished", "Finished"}};
  for (const auto& [event, state] : way) {
    const Transition transition = cluster.event(id, event);
    EXPECT_TRUE(transition.applied) << event;
    EXPECT_EQ(transition.state, state) << event;
  }
  cluster.expect_quiet();
  cluster.core.forget(id);
  EXPECT_EQ(cluster.core.stats()["requests"], 0);
  EXPECT_FALSE(cluster.event(id == 0 ? 0 : id, "cancel", "", 1).applied) << "later than forgotten";
}

TEST_F(Admission, EventsThatAreNotLegalAreNamedErrorsAndChangeNothing) {
  const auto id = cluster.accept(cluster.request());
  try {
    cluster.event(id, "first_token");
    FAIL();
  } catch (const CoreError& error) {
    EXPECT_STREQ(error.what(), "event=first_token; state=Queued");
  }
  EXPECT_EQ(cluster.state(id), "Queued");
  cluster.plan();
  EXPECT_THROW(cluster.event(id, "finished"), CoreError);
  EXPECT_THROW(cluster.event(id, "requeue"), CoreError);
  EXPECT_THROW(cluster.event(id, "no_such_event"), CoreError);
  EXPECT_THROW(cluster.event(id, "enqueue"), CoreError) << "the core's own";
  EXPECT_THROW(cluster.event(id, "decode_reserved", "", 2), CoreError) << "an attempt that is not there yet";
  EXPECT_THROW(cluster.event(id, "attempt_failed", "NO_SUCH_REASON"), CoreError);
  EXPECT_THROW(cluster.event(id, "worker_lost", "left"), CoreError);
  EXPECT_THROW(cluster.core.advance(0, 999, 1, "cancel", ""), CoreError) << "never submitted";
  EXPECT_THROW(cluster.core.forget(id), CoreError) << "still alive";
  EXPECT_EQ(cluster.state(id), "Prefilling");
  EXPECT_EQ(cluster.core.stats()["reservations"], 3);
}

TEST_F(Admission, HandoffDoneMayOvertakeTheFirstToken) {
  const auto id = placed();
  EXPECT_EQ(cluster.event(id, "handoff_done").state, "Decoding");
  const Transition late = cluster.event(id, "first_token");
  EXPECT_FALSE(late.applied);
  EXPECT_EQ(late.state, "Decoding");
  EXPECT_TRUE(cluster.event(id, "finished").terminal);
  cluster.expect_quiet();
}

TEST_F(Admission, ARefusalByDecodeCostsNoAttemptAndAvoidsTheRefuser) {
  const auto id = placed();
  const std::string refuser = cluster.core.workers().get(cluster.core.request(id).decision.best.decode)->spec.name;
  const Transition refused = cluster.event(id, "decode_refused");
  EXPECT_EQ(refused.state, "Queued");
  EXPECT_EQ(refused.attempt, 2U);
  const auto actions = cluster.plan();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].attempt, 2U);
  EXPECT_NE(actions[0].decode.first, refuser);
  EXPECT_FALSE(cluster.event(id, "decode_reserved", "", 1).applied) << "of the older attempt";
  EXPECT_EQ(cluster.core.request(id).failures, 0);
  // The other one refuses too: both back off, then a report that changed opens the first again.
  cluster.event(id, "decode_refused");
  EXPECT_TRUE(cluster.plan().empty());
  EXPECT_NEAR(cluster.core.next_wake(0), cluster.core.config().refusal_backoff_seconds, 1e-9);
  cluster.core.report_load(0, refuser, 1, {0, 1, 0, 0, 900, 0});
  ASSERT_EQ(cluster.plan().size(), 1U);
  // Refusals are bounded.
  cluster.event(id, "decode_refused");
  cluster.now += 1;
  ASSERT_EQ(cluster.plan().size(), 1U);
  const Transition last = cluster.event(id, "decode_refused");
  EXPECT_EQ(last.state, "Failed");
  EXPECT_EQ(last.cause, Cause::no_capacity);
  cluster.expect_quiet();
}

TEST_F(Admission, ARefusalOfALargePromptDoesNotKeepSmallOnesAway) {
  const auto large = cluster.accept(cluster.request(4000));
  cluster.plan();
  cluster.event(large, "decode_refused");
  cluster.plan();
  cluster.event(large, "decode_refused");
  EXPECT_TRUE(cluster.plan().empty());
  const auto small = cluster.accept(cluster.request(50));
  EXPECT_EQ(cluster.plan().size(), 1U);
  EXPECT_EQ(cluster.state(small), "Prefilling");
}

TEST_F(Admission, FailedAttemptsAreRetriedElsewhereThenFinal) {
  const auto id = placed();
  const std::string first = cluster.core.workers().get(cluster.core.request(id).decision.best.prefill)->spec.name;
  const Transition failed = cluster.event(id, "attempt_failed", "FAILURE_REASON_INTERNAL:prefill");
  EXPECT_EQ(failed.state, "Retrying");
  EXPECT_EQ(failed.cause, Cause::internal);
  EXPECT_EQ(cluster.core.stats()["reservations"], 0);
  // The other leg of the failed attempt still talks.
  for (const char* late : {"decode_reserved", "first_token", "handoff_done", "token", "finished", "delivered"}) {
    EXPECT_FALSE(cluster.event(id, late).applied) << late;
  }
  EXPECT_TRUE(cluster.plan().empty()) << "not before its legs are cleared";
  EXPECT_EQ(cluster.event(id, "requeue").state, "Queued");
  const auto actions = cluster.plan();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].attempt, 2U);
  EXPECT_NE(actions[0].prefill.first, first);
  const Transition last = cluster.event(id, "attempt_failed", "TRANSFER:decode");
  EXPECT_EQ(last.state, "Failed") << "two attempts";
  EXPECT_EQ(last.cause, Cause::transfer_failed);
  cluster.expect_quiet();
}

TEST_F(Admission, NothingIsRetriedOnceTheClientHasAToken) {
  const auto id = placed();
  cluster.event(id, "first_token");
  cluster.event(id, "delivered");
  const Transition failed = cluster.event(id, "worker_lost", "decode");
  EXPECT_EQ(failed.state, "Failed");
  EXPECT_EQ(failed.cause, Cause::worker_lost);
  cluster.expect_quiet();
}

TEST_F(Admission, WhatIsNotRetryableEndsAtOnceWithItsOwnCause) {
  const std::vector<std::tuple<const char*, const char*, Cause>> ends{
      {"INVALID", "Failed", Cause::invalid_argument},
      {"UNSPECIFIED", "Failed", Cause::internal},
      {"DUPLICATE", "Failed", Cause::duplicate_request},
      {"DEADLINE:decode", "Expired", Cause::deadline_exceeded}};
  for (const auto& [reason, state, cause] : ends) {
    const auto id = placed();
    const Transition end = cluster.event(id, "attempt_failed", reason);
    EXPECT_EQ(end.state, state) << reason;
    EXPECT_EQ(end.cause, cause) << reason;
    EXPECT_TRUE(end.terminal);
  }
  cluster.expect_quiet();
}

TEST_F(Admission, AnInternalFailureIsNotRepeatedOnTheOnlyWorker) {
  cluster.core.remove_worker(0, "p1", 1);
  const auto id = placed();
  EXPECT_EQ(cluster.event(id, "attempt_failed", "INTERNAL:prefill").state, "Failed");
}

TEST_F(Admission, ALostPrefillWorkerMattersUntilTheHandoffIsDone) {
  const auto early = placed();
  cluster.event(early, "first_token");
  EXPECT_EQ(cluster.event(early, "worker_lost", "prefill").state, "Retrying");
  const auto late = placed();
  cluster.event(late, "first_token");
  cluster.event(late, "handoff_done");
  EXPECT_EQ(cluster.event(late, "worker_lost", "prefill").state, "Decoding");
  EXPECT_EQ(cluster.core.request(late).failures, 0);
  EXPECT_EQ(cluster.event(late, "worker_lost", "decode").state, "Retrying");
}

TEST_F(Admission, CancelAndDeadlineEndAnyLivingState) {
  for (const char* event : {"cancel", "deadline"}) {
    const auto end = [&](std::uint64_t id) {
      const Transition transition = cluster.event(id, event, "", 1);
      EXPECT_TRUE(transition.applied && transition.terminal);
      EXPECT_EQ(transition.cause, event == std::string("cancel") ? Cause::cancelled : Cause::deadline_exceeded);
      EXPECT_FALSE(cluster.event(id, event).applied) << "once";
      EXPECT_FALSE(cluster.event(id, "finished").applied) << "the end beats a late success";
    };
    end(cluster.accept(cluster.request()));
    end(placed());
    auto id = placed();
    cluster.event(id, "first_token");
    end(id);
    id = placed();
    cluster.event(id, "handoff_done");
    end(id);
    id = placed();
    cluster.event(id, "attempt_failed", "FENCED");
    end(id);
  }
  cluster.expect_quiet();
}

TEST_F(Admission, IdsAreUniqueUntilForgotten) {
  auto arguments = cluster.request();
  const auto id = cluster.accept(arguments);
  Submission again = cluster.submit(arguments);
  EXPECT_FALSE(again.accepted);
  EXPECT_EQ(again.reason, Cause::duplicate_request);
  cluster.event(id, "cancel");
  EXPECT_FALSE(cluster.submit(arguments).accepted);
  cluster.core.forget(id);
  EXPECT_TRUE(cluster.submit(arguments).accepted);
}

TEST_F(Admission, TheTableNamesEveryPairOnce) {
  const auto table = admission::transition_table();
  std::set<std::pair<std::string_view, std::string_view>> pairs;
  const auto states = admission::state_names();
  for (const auto& row : table) {
    EXPECT_TRUE(pairs.emplace(row.event, row.state).second);
    for (const auto state : states) {
      if (state == row.state && (state == "Finished" || state == "Rejected" || state == "Cancelled" ||
                                 state == "Expired" || state == "Failed")) {
        EXPECT_TRUE(row.result == "ignored" || row.result == "error") << row.event << " leaves " << row.state;
      }
    }
  }
  EXPECT_EQ(states.size(), 11U);
  EXPECT_EQ(table.size(), 11U * 18U);
}

TEST_F(Admission, APreemptedRequestIsNextOfItsTenant) {
  AdmissionConfig config;
  config.preemption = 1;
  config.preemption_grace_seconds = 1.0;
  config.transfer_window_requests = 2;
  Cluster two(config);
  two.prefill(1);
  two.decode(1);
  const auto low_first = two.accept(two.request());
  const auto low_second = two.accept(two.request());
  ASSERT_EQ(two.plan().size(), 2U);
  const auto low_third = two.accept(two.request());
  auto arguments = two.request();
  arguments.priority = 5;
  const auto high = two.accept(arguments);
  EXPECT_TRUE(two.plan().empty()) << "the grace";
  EXPECT_EQ(two.core.next_wake(0), 1.0);
  two.now = 1.0;
  const auto actions = two.plan();
  ASSERT_EQ(actions.size(), 2U);
  EXPECT_EQ(actions[0].kind, Action::Kind::preempt);
  EXPECT_EQ(actions[0].request, low_second) << "the one with least to lose";
  EXPECT_EQ(actions[1].request, high);
  EXPECT_EQ(two.event(low_second, "requeue").state, "Queued");
  two.event(low_first, "first_token");
  two.finish(high);
  const auto next = two.plan();
  ASSERT_EQ(next.size(), 1U);
  EXPECT_EQ(next[0].request, low_second) << "before " << low_third;
  EXPECT_EQ(next[0].attempt, 2U);
}

}  // namespace
}  // namespace twinpool::test
