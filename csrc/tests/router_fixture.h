// SPDX-License-Identifier: Apache-2.0
// A router core with a few workers, and short names for what tests do with it.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "admission/router_core.h"

namespace twinpool::test {

using admission::Action;
using admission::AdmissionConfig;
using admission::Cause;
using admission::RouterCore;
using admission::Submission;
using admission::SubmitArguments;
using admission::Transition;

struct Cluster {
  explicit Cluster(const AdmissionConfig& config = {})
      : core(config) {}

  RouterCore core;
  double now = 0.0;
  int submitted = 0;
  std::vector<std::uint8_t> no_hashes;

  void worker(const std::string& name, placement::Role role, std::uint64_t incarnation = 1, std::uint32_t blocks = 1000,
              std::uint32_t seqs = 64, const std::string& fingerprint = "fp", const std::string& pool = "m",
              placement::WorkerState state = placement::WorkerState::ready) {
    core.upsert_worker(now, {name, incarnation, pool, role, state, fingerprint, blocks, 16, seqs, {}});
  }
  void prefill(int count) {
    for (int i = 0; i < count; ++i) {
      worker("p" + std::to_string(i), placement::Role::prefill);
    }
  }
  void decode(int count, std::uint32_t blocks = 1000, std::uint32_t seqs = 64) {
    for (int i = 0; i < count; ++i) {
      worker("d" + std::to_string(i), placement::Role::decode, 1, blocks, seqs);
    }
  }
  SubmitArguments request(std::int64_t prompt = 100, std::int64_t output = 10) {
    SubmitArguments arguments;
    arguments.request_id = "r" + std::to_string(submitted++);
    arguments.pool = "m";
    arguments.prompt_tokens = prompt;
    arguments.max_new_tokens = output;
    return arguments;
  }
  Submission submit(const SubmitArguments& arguments) { return core.submit(now, arguments); }
  std::uint64_t accept(const SubmitArguments& arguments) {
    const Submission submission = submit(arguments);
    EXPECT_TRUE(submission.accepted) << admission::name_of(submission.reason);
    return submission.request;
  }
  std::vector<Action> plan() {
    std::vector<Action> actions;
    core.plan(now, actions);
    return actions;
  }
  Transition event(std::uint64_t id, std::string_view name, std::string_view detail = "", std::uint32_t attempt = 0) {
    return core.advance(now, id, attempt == 0 ? core.request(id).attempt : attempt, name, detail);
  }
  /// Runs a placed request to its end.
  void finish(std::uint64_t id) {
    for (const char* name :
         {"decode_reserved", "prefill_started", "first_token", "delivered", "handoff_done", "token"}) {
      EXPECT_TRUE(event(id, name).applied) << name;
    }
    EXPECT_TRUE(event(id, "finished").terminal);
  }
  std::string state(std::uint64_t id) const { return std::string(core.state(id)); }
  /// Nothing is held by anyone.
  void expect_quiet() const {
    auto stats = core.stats();
    EXPECT_EQ(stats["reservations"], 0);
    EXPECT_EQ(stats["queued"], 0);
    EXPECT_EQ(stats["queued_tokens"], 0);
    EXPECT_EQ(stats["queued_bytes"], 0);
    for (std::uint32_t slot = 0; slot < core.workers().slots(); ++slot) {
      const placement::Worker& worker = core.workers().at(slot);
      if (worker.epoch == 0) {
        continue;
      }
      EXPECT_EQ(worker.prefill_tokens.total, 0) << worker.spec.name;
      EXPECT_EQ(worker.prompt_blocks.total, 0) << worker.spec.name;
      EXPECT_EQ(worker.sequences.total, 0) << worker.spec.name;
      EXPECT_EQ(worker.growth_blocks, 0) << worker.spec.name;
      EXPECT_EQ(worker.transfers, 0) << worker.spec.name;
      EXPECT_EQ(worker.transfer_blocks, 0) << worker.spec.name;
      if (!worker.report) {
        EXPECT_EQ(worker.available_blocks(), worker.spec.num_blocks) << worker.spec.name;
        EXPECT_EQ(worker.queued_prefill_tokens(), 0) << worker.spec.name;
      }
    }
  }
};

}  // namespace twinpool::test
