// SPDX-License-Identifier: Apache-2.0
#include "admission/calls.h"

#include <iomanip>
#include <sstream>

namespace twinpool::admission::calls {

namespace {

enum class Outcome : std::uint8_t { error, nothing, submission, actions, transition, done };

// An outcome is written as one string, so that it can be compared and skipped without being understood.
template <typename... T>
void put(std::string& out, Outcome outcome, const T&... values) {
  std::string body;
  Writer{body}(outcome, values...);
  Writer{out}(body);
}

struct Row {
  std::uint8_t kind = 0;
  std::uint64_t request = 0;
  std::uint32_t attempt = 0;
  WorkerName prefill, decode, fetch_from;
  bool local = false;
  std::int64_t prefill_cached = 0;
  std::int64_t decode_cached = 0;
  double ttft = 0.0;
  std::string state;
  Cause cause = Cause::none;
  double retry_after = 0.0;
  template <typename A>
  void archive(A& a) {
    a(kind, request, attempt, prefill, decode, fetch_from, local, prefill_cached, decode_cached, ttft, state, cause,
      retry_after);
  }
};

template <typename... Calls>
Call decode_as(Reader& reader, std::size_t index, const std::variant<Calls...>* /*list*/) {
  Call call;
  std::size_t at = 0;
  // NOLINTNEXTLINE(readability-redundant-lambda-parameter-list): C++20 asks for it
  const auto read = [&]<typename C>() {
    if (at++ == index) {
      C each{};
      reader(each);
      call = std::move(each);
    }
  };
  (read.template operator()<Calls>(), ...);
  return call;
}

void describe_actions(std::ostream& text, const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    text << " | "
         << (row.kind == 0   ? "place"
             : row.kind == 1 ? "end"
                             : "preempt")
         << " request=" << row.request << " attempt=" << row.attempt;
    if (row.kind == 1) {
      text << " " << row.state << " " << name_of(row.cause);
      continue;
    }
    text << " " << row.prefill.first << " -> " << row.decode.first << " cached=" << row.prefill_cached << "/"
         << row.decode_cached << " ttft=" << row.ttft << (row.local ? " local" : "");
  }
}

}  // namespace

AdmissionConfig Configure::config() const {
  require(fields.size() == values.size(), "log: limits");
  AdmissionConfig config;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    config.set(fields[i], values[i]);
  }
  return config;
}

Nothing Configure::run(RouterCore& core) const {
  core.configure(now, config());
  return {};
}

void encode(std::string& out, const Nothing& /*nothing*/) {
  put(out, Outcome::nothing);
}

void encode(std::string& out, const Submission& s) {
  put(out, Outcome::submission, s.accepted, s.request, s.reason, s.limit, s.retry_after);
}

void encode(std::string& out, const std::vector<Action>& actions) {
  std::vector<Row> rows;
  rows.reserve(actions.size());
  for (const Action& a : actions) {
    rows.push_back({static_cast<std::uint8_t>(a.kind), a.request, a.attempt, a.prefill, a.decode, a.fetch_from, a.local,
                    a.prefill_cached_blocks, a.decode_cached_blocks, a.ttft_seconds, std::string(a.state), a.cause,
                    a.retry_after});
  }
  put(out, Outcome::actions, rows);
}

void encode(std::string& out, const Transition& t) {
  put(out, Outcome::transition, t.applied, std::string(t.state), t.terminal, t.cause, t.attempt);
}

void encode(std::string& out, bool done) {
  put(out, Outcome::done, done);
}

void encode_error(std::string& out, const std::string& message) {
  put(out, Outcome::error, message);
}

Call decode(const std::string& bytes) {
  Reader reader(bytes);
  std::uint8_t index = 0;
  reader(index);
  require(index < std::variant_size_v<Call>, "log: unknown call");
  Call call = decode_as(reader, index, static_cast<const Call*>(nullptr));
  require(reader.at_end(), "log: call");
  return call;
}

std::string describe(const Call& call) {
  std::ostringstream text;
  text << std::setprecision(9);
  std::visit(
      [&]<typename C>(const C& c) {
        if constexpr (requires { c.now; }) {
          text << c.now << " ";
        }
        if constexpr (std::is_same_v<C, UpsertWorker>) {
          text << "upsert_worker " << c.spec.name << " pool=" << c.spec.pool << " " << placement::name_of(c.spec.role)
               << " " << placement::name_of(c.spec.state);
        } else if constexpr (std::is_same_v<C, RemoveWorker>) {
          text << "remove_worker " << c.name;
        } else if constexpr (std::is_same_v<C, ReportLoad>) {
          text << "report_load " << c.name << " running=" << c.load.running << " waiting=" << c.load.waiting
               << " prefill_tokens=" << c.load.waiting_prefill_tokens << " available=" << c.load.available_blocks
               << " step=" << c.load.step_seconds;
        } else if constexpr (std::is_same_v<C, Quarantine>) {
          text << "quarantine " << c.name << " until=" << c.until << (c.probation ? " then probation" : "");
        } else if constexpr (std::is_same_v<C, ObservePrefill>) {
          text << "observe_prefill " << c.name << " tokens=" << c.tokens << " cached=" << c.cached_tokens
               << " seconds=" << c.seconds;
        } else if constexpr (std::is_same_v<C, ObserveTransfer>) {
          text << "observe_transfer " << c.name << " blocks=" << c.blocks << " seconds=" << c.seconds;
        } else if constexpr (std::is_same_v<C, SetCostModel>) {
          text << "set_cost_model " << c.name << " " << c.kind;
        } else if constexpr (std::is_same_v<C, SetTenant>) {
          text << "set_tenant weight=" << c.limits.weight;
        } else if constexpr (std::is_same_v<C, IndexStored>) {
          text << "index_stored " << c.name << " blocks=" << c.hashes.size() / prefix::k_hash_bytes;
        } else if constexpr (std::is_same_v<C, IndexRemoved>) {
          text << "index_removed " << c.name << " blocks=" << c.hashes.size() / prefix::k_hash_bytes;
        } else if constexpr (std::is_same_v<C, IndexCleared>) {
          text << "index_cleared " << c.name;
        } else if constexpr (std::is_same_v<C, Submit>) {
          text << "submit " << c.arguments.request_id << " pool=" << c.arguments.pool
               << " prompt=" << c.arguments.prompt_tokens << " output=" << c.arguments.max_new_tokens
               << " n=" << c.arguments.choices << " priority=" << c.arguments.priority
               << (c.arguments.preemptible ? "" : " not preemptible") << " deadline=" << c.arguments.deadline
               << " blocks=" << c.hashes.size() / prefix::k_hash_bytes;
        } else if constexpr (std::is_same_v<C, Plan>) {
          text << "plan";
        } else if constexpr (std::is_same_v<C, Advance>) {
          text << "advance request=" << c.request << " attempt=" << c.attempt << " " << c.event
               << (c.detail.empty() ? "" : " ") << c.detail;
        } else if constexpr (std::is_same_v<C, Forget>) {
          text << "forget request=" << c.request;
        } else if constexpr (std::is_same_v<C, Extend>) {
          text << "extend request=" << c.request << " prompt=" << c.prompt_tokens << " output=" << c.max_new_tokens
               << " blocks=" << c.hashes.size() / prefix::k_hash_bytes;
        } else if constexpr (std::is_same_v<C, Configure>) {
          text << "configure";
        } else {
          static_assert(std::is_same_v<C, LongestPrefix>);
          text << "longest_prefix blocks=" << c.hashes.size() / prefix::k_hash_bytes;
        }
      },
      call);
  return text.str();
}

std::string describe_result(const std::string& result) {
  std::ostringstream text;
  Reader reader(result);
  Outcome outcome{};
  reader(outcome);
  switch (outcome) {
  case Outcome::nothing:
    break;
  case Outcome::error: {
    std::string message;
    reader(message);
    text << " -> error " << message;
    break;
  }
  case Outcome::submission: {
    Submission s;
    reader(s.accepted, s.request, s.reason, s.limit, s.retry_after);
    text << " -> "
         << (s.accepted
                 ? "request=" + std::to_string(s.request)
                 : std::string(name_of(s.reason)) + " " + s.limit + " retry_after=" + std::to_string(s.retry_after));
    break;
  }
  case Outcome::actions: {
    std::vector<Row> rows;
    reader(rows);
    describe_actions(text, rows);
    break;
  }
  case Outcome::transition: {
    Transition t;
    std::string state;
    reader(t.applied, state, t.terminal, t.cause, t.attempt);
    text << " -> " << state << " " << name_of(t.cause) << (t.applied ? "" : " (not applied)");
    break;
  }
  case Outcome::done: {
    bool done = false;
    reader(done);
    text << (done ? "" : " -> not applied");
    break;
  }
  }
  return text.str();
}

}  // namespace twinpool::admission::calls
