// SPDX-License-Identifier: Apache-2.0
// Random calls to a router core, and the book of what became of each request.
#pragma once

#include <array>
#include <random>
#include <unordered_map>
#include <unordered_set>

#include "tests/router_fixture.h"

namespace twinpool::test {

using placement::Role;

/// The cause allows exactly one state, so that a client's status depends on the cause alone.
inline std::string state_for(Cause cause) {
  switch (cause) {
  case Cause::none:
    return "Finished";
  case Cause::cancelled:
    return "Cancelled";
  case Cause::deadline_exceeded:
  case Cause::queue_timeout:
  case Cause::no_workers:
    return "Expired";
  case Cause::deadline_unreachable:
    return "Rejected";
  default:
    return "Failed";
  }
}

class Chaos {
 public:
  explicit Chaos(std::uint64_t seed, const AdmissionConfig& config)
      : cluster(config),
        random(seed) {
    for (int i = 0; i < 3; ++i) {
      add(Role::prefill, i);
      add(Role::decode, i);
    }
  }

  Cluster cluster;
  std::mt19937_64 random;
  std::unordered_set<std::uint64_t> alive;
  std::unordered_map<std::uint64_t, std::pair<std::string, Cause>> outcome;
  std::int64_t accepted = 0;
  std::int64_t refused = 0;

  void submit_one() {
    auto arguments =
        cluster.request(1 + static_cast<std::int64_t>(random() % 600), 1 + static_cast<std::int64_t>(random() % 64));
    arguments.deadline = cluster.now + static_cast<double>(random() % 5000) * 1e-6;  // 0 to 5 ms
    arguments.priority = static_cast<int>(random() % 3);
    arguments.tenant = std::string(1, static_cast<char>('a' + random() % 4));
    const Submission submission = cluster.submit(arguments);
    if (submission.accepted) {
      ++accepted;
      alive.insert(submission.request);
    } else {
      ++refused;
      EXPECT_TRUE(submission.reason == Cause::deadline_exceeded || submission.reason == Cause::queue_full ||
                  submission.reason == Cause::deadline_unreachable)
          << admission::name_of(submission.reason);
    }
  }
  void plan_once() {
    for (const Action& action : cluster.plan()) {
      if (action.kind == Action::Kind::end) {
        end(action.request, std::string(action.state), action.cause);
      }
    }
  }
  void poke() {
    if (alive.empty()) {
      return;
    }
    const auto id =
        *std::next(alive.begin(), static_cast<std::ptrdiff_t>(random() % std::min<std::size_t>(alive.size(), 8)));
    static constexpr std::array events{"decode_reserved", "decode_refused", "prefill_started", "first_token",
                                       "handoff_done",    "token",          "delivered",       "finished",
                                       "requeue",         "first_token",    "handoff_done",    "finished",
                                       "finished",        "requeue",        "cancel",          "deadline"};
    static constexpr std::array failures{"NO_CAPACITY:decode", "FENCED",    "TRANSFER:decode",
                                         "INTERNAL:prefill",   "PEER_LOST", "INVALID"};
    const auto pick = random() % 20;
    const auto& request = cluster.core.request(id);
    const auto attempt = request.attempt > 1 && random() % 8 == 0 ? request.attempt - 1 : request.attempt;
    try {
      Transition transition;
      if (pick < events.size()) {
        transition = cluster.event(id, events[pick], "", attempt);
      } else if (pick == events.size()) {
        transition = cluster.event(id, "worker_lost", random() % 2 == 0 ? "prefill" : "decode", attempt);
      } else {
        transition = cluster.event(id, "attempt_failed", failures[random() % failures.size()], attempt);
      }
      if (transition.terminal) {
        EXPECT_TRUE(transition.applied) << "an end was not told to anybody";
        end(id, std::string(transition.state), transition.cause);
      }
    } catch (const CoreError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("event=", 0), 0U) << error.what();
    }
  }
  void churn() {
    const int which = static_cast<int>(random() % 3);
    const Role role = random() % 2 == 0 ? Role::prefill : Role::decode;
    auto& incarnation = incarnations_[{role, which}];
    if (random() % 2 == 0) {
      cluster.core.remove_worker(cluster.now, name(role, which), incarnation);
    } else {
      add(role, which);
    }
    const auto busy = static_cast<std::uint32_t>(random() % 10);
    cluster.core.report_load(cluster.now, name(role, which), incarnation,
                             {0, busy, 0, busy * 100, 300 - busy * 10, 1e-3});
  }
  void end(std::uint64_t id, const std::string& state, Cause cause) {
    EXPECT_TRUE(outcome.emplace(id, std::make_pair(state, cause)).second) << "a second end of " << id;
    EXPECT_EQ(state, state_for(cause)) << admission::name_of(cause);
    alive.erase(id);
    cluster.core.forget(id);
  }
  void finish_all() {
    cluster.now += 3600;
    plan_once();
    while (!alive.empty()) {
      const auto id = *alive.begin();
      const Transition transition = cluster.event(id, "cancel");
      end(id, std::string(transition.state), transition.cause);
    }
    EXPECT_EQ(static_cast<std::int64_t>(outcome.size()), accepted);
    EXPECT_EQ(cluster.core.stats()["requests"], 0);
    cluster.core.plan(cluster.now, actions_);
    EXPECT_TRUE(actions_.empty());
    quiet();
  }

 private:
  static std::string name(Role role, int which) { return (role == Role::prefill ? "p" : "d") + std::to_string(which); }
  void add(Role role, int which) {
    auto& incarnation = incarnations_[{role, which}];
    if (random() % 4 != 0 || incarnation == 0) {
      ++incarnation;
    }
    cluster.worker(name(role, which), role, incarnation, 300, 32);
  }
  void quiet() {
    for (std::uint32_t slot = 0; slot < cluster.core.workers().slots(); ++slot) {
      const auto& worker = cluster.core.workers().at(slot);
      if (worker.epoch == 0) {
        continue;
      }
      EXPECT_EQ(worker.holds, 0);
      EXPECT_EQ(worker.prompt_blocks.total, 0);
      EXPECT_EQ(worker.prefill_tokens.total, 0);
      EXPECT_EQ(worker.sequences.total, 0);
      EXPECT_EQ(worker.growth_blocks, 0);
      EXPECT_EQ(worker.transfers, 0);
      EXPECT_EQ(worker.prompt_blocks.pending, 0);
      EXPECT_EQ(worker.sequences.pending, 0);
    }
  }
  std::map<std::pair<Role, int>, std::uint64_t> incarnations_;
  std::vector<Action> actions_;
};

inline AdmissionConfig chaos_config(bool preemption) {
  AdmissionConfig config;
  config.max_queue_requests = 500;
  config.preemption = preemption ? 1 : 0;
  config.preemption_grace_seconds = 0.001;
  config.prefill_window_tokens = 2000;
  config.transfer_window_requests = 8;
  return config;
}

}  // namespace twinpool::test
