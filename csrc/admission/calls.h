// SPDX-License-Identifier: Apache-2.0
// Every call that changes a router core, as a value that can be recorded and made again.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "admission/router_core.h"
#include "placement/archive.h"

namespace twinpool::admission::calls {

using Bytes = std::vector<std::uint8_t>;

struct Nothing {
  template <typename A>
  void archive(A& /*a*/) {}
};

struct UpsertWorker {
  double now;
  placement::WorkerSpec spec;
  template <typename A>
  void archive(A& a) {
    a(now, spec);
  }
  Nothing run(RouterCore& core) const {
    core.upsert_worker(now, spec);
    return {};
  }
};

struct RemoveWorker {
  double now;
  std::string name;
  std::uint64_t incarnation;
  template <typename A>
  void archive(A& a) {
    a(now, name, incarnation);
  }
  Nothing run(RouterCore& core) const {
    core.remove_worker(now, name, incarnation);
    return {};
  }
};

struct ReportLoad {
  double now;
  std::string name;
  std::uint64_t incarnation;
  placement::LoadReport load;
  template <typename A>
  void archive(A& a) {
    a(now, name, incarnation, load);
  }
  Nothing run(RouterCore& core) const {
    core.report_load(now, name, incarnation, load);
    return {};
  }
};

struct Quarantine {
  double now;
  std::string name;
  std::uint64_t incarnation;
  double until;
  bool probation;
  template <typename A>
  void archive(A& a) {
    a(now, name, incarnation, until, probation);
  }
  Nothing run(RouterCore& core) const {
    core.quarantine(now, name, incarnation, until, probation);
    return {};
  }
};

struct ObservePrefill {
  std::string name;
  std::uint64_t incarnation;
  std::int64_t tokens;
  std::int64_t cached_tokens;
  double seconds;
  template <typename A>
  void archive(A& a) {
    a(name, incarnation, tokens, cached_tokens, seconds);
  }
  Nothing run(RouterCore& core) const {
    core.observe_prefill(name, incarnation, tokens, cached_tokens, seconds);
    return {};
  }
};

struct ObserveTransfer {
  std::string name;
  std::uint64_t incarnation;
  std::int64_t blocks;
  double seconds;
  template <typename A>
  void archive(A& a) {
    a(name, incarnation, blocks, seconds);
  }
  Nothing run(RouterCore& core) const {
    core.observe_transfer(name, incarnation, blocks, seconds);
    return {};
  }
};

struct SetCostModel {
  std::string name;
  std::uint64_t incarnation;
  std::string kind;
  std::array<double, 3> coefficients;
  template <typename A>
  void archive(A& a) {
    a(name, incarnation, kind, coefficients);
  }
  Nothing run(RouterCore& core) const {
    core.set_cost_model(name, incarnation, kind, coefficients);
    return {};
  }
};

struct SetTenant {
  double now;
  std::string tenant;
  TenantLimits limits;
  template <typename A>
  void archive(A& a) {
    a(now, tenant, limits);
  }
  Nothing run(RouterCore& core) const {
    core.set_tenant(now, tenant, limits);
    return {};
  }
};

struct IndexStored {
  std::string name;
  std::uint64_t incarnation;
  Bytes hashes;
  prefix::Tier tier;
  bool counted;
  template <typename A>
  void archive(A& a) {
    a(name, incarnation, hashes, tier, counted);
  }
  Nothing run(RouterCore& core) const {
    core.index_stored(name, incarnation, hashes, tier, counted);
    return {};
  }
};

struct IndexRemoved {
  std::string name;
  std::uint64_t incarnation;
  Bytes hashes;
  prefix::Tier tier;
  template <typename A>
  void archive(A& a) {
    a(name, incarnation, hashes, tier);
  }
  Nothing run(RouterCore& core) const {
    core.index_removed(name, incarnation, hashes, tier);
    return {};
  }
};

struct IndexCleared {
  std::string name;
  std::uint64_t incarnation;
  template <typename A>
  void archive(A& a) {
    a(name, incarnation);
  }
  Nothing run(RouterCore& core) const {
    core.index_cleared(name, incarnation);
    return {};
  }
};

struct Submit {
  double now;
  SubmitArguments arguments;  // its hashes are those below
  Bytes hashes;
  template <typename A>
  void archive(A& a) {
    // NOLINTNEXTLINE(misc-const-correctness): a Reader writes it
    SubmitArguments& s = arguments;
    a(now, s.request_id, s.pool, s.tenant, s.prompt_tokens, s.max_new_tokens, s.choices, s.bytes, s.priority,
      s.deadline, s.preemptible, s.adapter, s.prefer, hashes);
  }
  Submission run(RouterCore& core) const {
    SubmitArguments with_hashes = arguments;
    with_hashes.hashes = hashes;
    return core.submit(now, with_hashes);
  }
};

struct Plan {
  double now;
  template <typename A>
  void archive(A& a) {
    a(now);
  }
  std::vector<Action> run(RouterCore& core) const {
    std::vector<Action> actions;
    core.plan(now, actions);
    return actions;
  }
};

struct Advance {
  double now;
  std::uint64_t request;
  std::uint32_t attempt;
  std::string event;
  std::string detail;
  template <typename A>
  void archive(A& a) {
    a(now, request, attempt, event, detail);
  }
  Transition run(RouterCore& core) const { return core.advance(now, request, attempt, event, detail); }
};

struct Forget {
  std::uint64_t request;
  template <typename A>
  void archive(A& a) {
    a(request);
  }
  Nothing run(RouterCore& core) const {
    core.forget(request);
    return {};
  }
};

struct Extend {
  std::uint64_t request;
  std::int64_t prompt_tokens;
  std::int64_t max_new_tokens;
  Bytes hashes;
  template <typename A>
  void archive(A& a) {
    a(request, prompt_tokens, max_new_tokens, hashes);
  }
  bool run(RouterCore& core) const { return core.extend(request, prompt_tokens, max_new_tokens, hashes); }
};

/// Changes what the index evicts first.
struct LongestPrefix {
  Bytes hashes;
  template <typename A>
  void archive(A& a) {
    a(hashes);
  }
  Nothing run(RouterCore& core) const {
    std::vector<std::pair<const placement::Worker*, std::uint32_t>> found;
    core.longest_prefix(hashes, found);
    return {};
  }
};

struct Configure {
  double now;
  std::vector<std::string> fields;
  std::vector<double> values;
  template <typename A>
  void archive(A& a) {
    a(now, fields, values);
  }
  [[nodiscard]] AdmissionConfig config() const;
  Nothing run(RouterCore& core) const;
};

/// In the order of their numbers in a log.
using Call = std::variant<UpsertWorker, RemoveWorker, ReportLoad, Quarantine, ObservePrefill, ObserveTransfer,
                          SetCostModel, SetTenant, IndexStored, IndexRemoved, IndexCleared, Submit, Plan, Advance,
                          Forget, LongestPrefix, Extend, Configure>;

/// What a call led to, as bytes that are equal where the outcomes are.
void encode(std::string& out, const Nothing& nothing);
void encode(std::string& out, const Submission& submission);
void encode(std::string& out, const std::vector<Action>& actions);
void encode(std::string& out, const Transition& transition);
void encode(std::string& out, bool done);
void encode_error(std::string& out, const std::string& message);

/// A call, and a result that ``encode`` made, as a line for people.
std::string describe(const Call& call);
std::string describe_result(const std::string& result);

/// Throws CoreError if the bytes are not a call.
Call decode(const std::string& bytes);

}  // namespace twinpool::admission::calls
