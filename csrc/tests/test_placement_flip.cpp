// SPDX-License-Identifier: Apache-2.0
// A worker that changes its role: what of it stays, and what is of the other role.
#include "tests/router_fixture.h"

namespace twinpool::test {
namespace {

using placement::Role;
using placement::WorkerState;

void set_role(Cluster& cluster, const std::string& name, Role role, WorkerState state = WorkerState::ready) {
  cluster.worker(name, role, 1, 1000, 64, "fp", "m", state);
}

const placement::Worker& worker(const Cluster& cluster, const std::string& name) {
  for (std::uint32_t slot = 0; slot < cluster.core.workers().slots(); ++slot) {
    const placement::Worker& found = cluster.core.workers().at(slot);
    if (found.epoch != 0 && found.spec.name == name) {
      return found;
    }
  }
  throw std::logic_error("no worker " + name);
}

TEST(Flip, LeavesOneFleetAndJoinsTheOther) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(2);
  set_role(cluster, "d1", Role::decode, WorkerState::flipping);
  for (int i = 0; i < 4; ++i) {
    const auto id = cluster.accept(cluster.request());
    EXPECT_EQ(cluster.plan().at(0).decode.first, "d0");
    cluster.finish(id);
    cluster.core.forget(id);
  }
  set_role(cluster, "d1", Role::prefill);
  std::map<std::string, int> prefills;
  for (int i = 0; i < 8; ++i) {
    const auto id = cluster.accept(cluster.request());
    const Action action = cluster.plan().at(0);
    EXPECT_EQ(action.decode.first, "d0");
    ++prefills[action.prefill.first];
    cluster.finish(id);
    cluster.core.forget(id);
  }
  // Level with its peer from the start: neither starves.
  EXPECT_EQ(prefills["p0"], 4);
  EXPECT_EQ(prefills["d1"], 4);
  cluster.expect_quiet();
}

TEST(Flip, LastOfARoleMakesRequestsWaitForAnother) {
  Cluster cluster;
  cluster.prefill(1);
  cluster.decode(1);
  set_role(cluster, "d0", Role::prefill);
  const auto id = cluster.accept(cluster.request());
  EXPECT_TRUE(cluster.plan().empty());
  set_role(cluster, "p0", Role::decode);
  const Action action = cluster.plan().at(0);
  EXPECT_EQ(action.prefill.first, "d0");
  EXPECT_EQ(action.decode.first, "p0");
  cluster.finish(id);
  cluster.expect_quiet();
}

TEST(Flip, KeepsItsPlaceInTheIndex) {
  Cluster cluster;
  cluster.prefill(2);
  cluster.decode(2);
  std::vector<std::uint8_t> prompt;
  for (int i = 0; i < 6 * 16; ++i) {
    prompt.push_back(static_cast<std::uint8_t>(i));
  }
  cluster.core.index_stored("d1", 1, prompt, prefix::Tier::device, false);
  set_role(cluster, "d1", Role::decode, WorkerState::flipping);
  set_role(cluster, "d1", Role::prefill);
  std::vector<std::pair<const placement::Worker*, std::uint32_t>> holders;
  cluster.core.longest_prefix(prompt, holders);
  ASSERT_EQ(holders.size(), 1U);
  EXPECT_EQ(holders[0].first->spec.name, "d1");
  EXPECT_EQ(holders[0].second, 6U);
  // What it has cached draws the prompts that it computes now.
  SubmitArguments arguments = cluster.request(6 * 16 + 4);
  arguments.hashes = prompt;
  const auto id = cluster.accept(arguments);
  EXPECT_EQ(cluster.plan().at(0).prefill.first, "d1");
  cluster.finish(id);
  cluster.expect_quiet();
}

TEST(Flip, WhatWasPlacedInTheOtherRoleEndsAsItWould) {
  Cluster cluster;
  cluster.prefill(2);
  cluster.decode(1);
  const auto id = cluster.accept(cluster.request());
  const std::string name = cluster.plan().at(0).prefill.first;
  set_role(cluster, name, Role::prefill, WorkerState::flipping);
  set_role(cluster, name, Role::decode);
  EXPECT_GT(worker(cluster, name).holds, 0);
  cluster.finish(id);
  cluster.core.forget(id);
  cluster.expect_quiet();
}

TEST(Flip, ForgetsWhatItsStepsTookInTheOtherRole) {
  Cluster cluster;
  cluster.prefill(2);
  cluster.decode(1);
  const double guessed = worker(cluster, "p0").step.predict(8, 1e4);
  for (int i = 0; i < 20; ++i) {
    // Steps of prompts: a hundred times what a decode step takes.
    cluster.core.report_load(i, "p0", 1, {0, 8, 0, 0, 500, 0.5});
  }
  EXPECT_GT(worker(cluster, "p0").step.predict(8, 1e4), 10 * guessed);
  for (int i = 0; i < 20; ++i) {
    cluster.core.report_load(i, "d0", 1, {0, 8, 0, 0, 500, 0.02});
  }
  set_role(cluster, "p0", Role::decode);
  EXPECT_DOUBLE_EQ(worker(cluster, "p0").step.predict(8, 8000), worker(cluster, "d0").step.predict(8, 8000));
}

TEST(Flip, KeepsWhatPromptsTakeAndWhatItRefusedIsOver) {
  Cluster cluster;
  cluster.prefill(2);
  cluster.decode(1);
  for (int i = 0; i < 20; ++i) {
    cluster.core.observe_prefill("p0", 1, 100 * (1 + i % 3), 0, 0.001 * (1 + i % 3));
  }
  const double known = worker(cluster, "p0").prefill.predict(100, 5000);
  set_role(cluster, "p0", Role::decode);
  set_role(cluster, "p0", Role::prefill);
  EXPECT_DOUBLE_EQ(worker(cluster, "p0").prefill.predict(100, 5000), known);
}

}  // namespace
}  // namespace twinpool::test
