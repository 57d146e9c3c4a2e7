// SPDX-License-Identifier: Apache-2.0
// A core that was saved and loaded, and one whose calls are made again, decide as the first one did.
#include <algorithm>
#include <random>

#include "admission/recorder.h"
#include "tests/router_fixture.h"

namespace twinpool::test {
namespace {

namespace calls = admission::calls;
using admission::Recorder;
using admission::replay;
using calls::Call;
using placement::Role;

/// Random calls of every kind.
class Script {
 public:
  explicit Script(std::uint64_t seed)
      : random_(seed) {
    for (auto& byte : hashes_) {
      byte = static_cast<std::uint8_t>(random_());
    }
  }
  Call next() {
    now_ += static_cast<double>(random_() % 20) * 1e-3;
    const std::string name = std::string(random_() % 2 == 0 ? "p" : "d") + std::to_string(random_() % 3);
    const Role role = name[0] == 'p' ? Role::prefill : Role::decode;
    const std::uint64_t incarnation = 1 + random_() % 2;
    const auto kind = random_() % 24;
    if (calls_++ < 6 || kind == 0) {
      return calls::UpsertWorker{now_,
                                 {name, incarnation, "m", role, placement::WorkerState::ready, "fp", 200, 16, 16}};
    }
    switch (kind) {
    case 1:
      return calls::ReportLoad{now_,
                               name,
                               incarnation,
                               {now_, static_cast<std::uint32_t>(random_() % 8), 0, random_() % 3000,
                                static_cast<std::uint32_t>(random_() % 200), 0.01}};
    case 2:
      return calls::Quarantine{now_, name, incarnation, now_ + 0.05, false};
    case 3:
      return calls::ObservePrefill{name, incarnation, static_cast<std::int64_t>(1 + random_() % 900), 16,
                                   static_cast<double>(random_() % 100) * 1e-3};
    case 4:
      return calls::ObserveTransfer{name, incarnation, static_cast<std::int64_t>(1 + random_() % 30), 1e-3};
    case 5:
      return random_() % 8 == 0 ? Call(calls::RemoveWorker{now_, name, incarnation})
                                : Call(calls::SetTenant{now_, "b", {2.0, 0, 4000, 8000, 1}});
    case 6:
    case 7:
      return calls::IndexStored{name, incarnation, some_hashes(), prefix::Tier::device, random_() % 4 == 0};
    case 8:
      return calls::IndexRemoved{name, incarnation, some_hashes(), prefix::Tier::device};
    case 9:
      return random_() % 4 == 0 ? Call(calls::IndexCleared{name, incarnation})
                                : Call(calls::LongestPrefix{some_hashes()});
    case 10:
    case 11:
    case 12:
    case 13:
      return submit();
    case 14:
    case 15:
    case 16:
      return calls::Plan{now_};
    case 17:
      return calls::Forget{1 + random_() % std::max(1U, submitted_)};
    case 18:
      return random_() % 8 == 0 ? configure() : advance();
    default:
      return advance();
    }
  }

 private:
  Call configure() {
    return calls::Configure{
        now_,
        {"preemption", "max_queue_requests", "prefill_window_tokens", "ageing_seconds", "max_tenant_requests"},
        {1.0, static_cast<double>(4 + random_() % 40), static_cast<double>(200 + random_() % 2000),
         0.05 + static_cast<double>(random_() % 20) * 1e-2, static_cast<double>(random_() % 20)}};
  }
  calls::Bytes some_hashes() {
    return {hashes_.begin(), hashes_.begin() + static_cast<std::ptrdiff_t>(16 * (random_() % 13))};
  }
  Call submit() {
    SubmitArguments arguments;
    arguments.request_id = "r" + std::to_string(submitted_++);
    arguments.pool = "m";
    arguments.tenant = random_() % 2 == 0 ? "a" : "b";
    arguments.prompt_tokens = static_cast<std::int64_t>(200 + random_() % 800);
    arguments.max_new_tokens = static_cast<std::int64_t>(1 + random_() % 40);
    arguments.priority = static_cast<int>(random_() % 3);
    arguments.deadline = random_() % 3 == 0 ? now_ + 1.0 : 0.0;
    return calls::Submit{now_, arguments, some_hashes()};
  }
  Call advance() {
    static constexpr std::array events{"decode_reserved", "decode_refused", "first_token",   "handoff_done",
                                       "token",           "delivered",      "finished",      "cancel",
                                       "requeue",         "worker_lost",    "attempt_failed"};
    const std::string event = events[random_() % events.size()];
    const std::string detail = event == "attempt_failed" ? "TRANSFER:decode" : event == "token" ? "20" : "";
    // Recent requests of the first attempts: many events are legal, some are late, some are errors.
    const std::uint64_t request = submitted_ - std::min<std::uint64_t>(random_() % 12, submitted_ - 1);
    return calls::Advance{now_, request, static_cast<std::uint32_t>(1 + random_() % 2), event, detail};
  }

  std::mt19937_64 random_;
  std::array<std::uint8_t, 16 * 12> hashes_{};
  double now_ = 0.0;
  std::uint64_t calls_ = 0;
  unsigned submitted_ = 0;
};

AdmissionConfig config() {
  AdmissionConfig limits;
  limits.preemption = 1;
  limits.prefill_window_tokens = 2000;
  limits.transfer_window_requests = 4;
  limits.queue_ttl_seconds = 2;
  limits.max_tenant_requests = 40;
  return limits;
}

std::string outcome(RouterCore& core, const Call& call) {
  std::string result;
  std::visit(
      [&](const auto& each) {
        try {
          calls::encode(result, each.run(core));
        } catch (const CoreError& error) {
          calls::encode_error(result, error.what());
        }
      },
      call);
  return result;
}

TEST(AdmissionReplay, ASavedCoreGoesOnAsIfNothingHadHappened) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    RouterCore first(config());
    Script script(seed);
    for (int i = 0; i < 3000; ++i) {
      outcome(first, script.next());
    }
    std::string state;
    first.save(state);
    RouterCore second(first.config());
    second.load(state);
    EXPECT_EQ(first.stats(), second.stats());
    EXPECT_GT(first.stats()["reservations"], 0) << "the test saves nothing of interest";
    EXPECT_GT(first.stats()["index_blocks"], 0);
    for (int i = 0; i < 3000; ++i) {
      const Call call = script.next();
      ASSERT_EQ(outcome(first, call), outcome(second, call)) << calls::describe(call) << " seed " << seed;
    }
    EXPECT_EQ(first.stats(), second.stats());
  }
}

std::string record(RouterCore& core, std::uint64_t max_bytes, int count, std::uint64_t seed) {
  Recorder recorder(core);
  Script script(seed);
  for (int i = 0; i < 500; ++i) {  // begins in the middle of things
    outcome(core, script.next());
  }
  recorder.start(max_bytes);
  for (int i = 0; i < count; ++i) {
    const Call call = script.next();
    std::visit(
        [&](const auto& each) {
          try {
            recorder([&] { return call; }, [&] { return each.run(core); });
          } catch (const CoreError&) {}
        },
        call);
  }
  return recorder.dump();
}

TEST(AdmissionReplay, ALogLeadsToTheSameDecisions) {
  RouterCore core(config());
  const std::string log = record(core, 64U << 20U, 5000, 7);
  std::size_t lines = 0;
  const auto report = replay(log, [&](const std::string& line) { lines += line.empty() ? 0 : 1; });
  EXPECT_TRUE(report.equal) << report.mismatch;
  EXPECT_EQ(report.calls, 5000U);
  EXPECT_EQ(lines, 5000U);
  EXPECT_GT(report.placements, 50U);
}

TEST(AdmissionReplay, ABoundedLogKeepsItsNewestPart) {
  RouterCore core(config());
  const std::string log = record(core, 100'000, 20'000, 8);
  const auto report = replay(log, {});
  EXPECT_TRUE(report.equal) << report.mismatch;
  EXPECT_GT(report.calls, 100U);
  EXPECT_LT(report.calls, 5000U);
}

TEST(AdmissionReplay, ADifferenceIsNamed) {
  RouterCore core(config());
  Recorder recorder(core);
  recorder.start(1U << 20U);
  Cluster other;  // the outcome of another core is written into the log
  other.prefill(1);
  other.decode(1);
  other.accept(other.request());
  recorder([] { return Call(calls::Plan{0.0}); }, [&] { return other.plan(); });
  const auto report = replay(recorder.dump(), {});
  EXPECT_FALSE(report.equal);
  EXPECT_NE(report.mismatch.find("call 1: 0 plan\n  recorded: | place request=1"), std::string::npos)
      << report.mismatch;
}

TEST(AdmissionReplay, DamagedBytesAreErrorsWhateverTheirDamage) {
  RouterCore core(config());
  std::string log = record(core, 1U << 20U, 300, 9);
  EXPECT_THROW(replay({}, {}), CoreError);
  EXPECT_THROW(replay(std::string("nonsense, and long enough to be a header"), {}), CoreError);
  for (std::size_t cut = 0; cut < log.size(); cut += 97) {
    EXPECT_THROW(replay(std::span(log).first(cut), {}), CoreError) << cut;
  }
  std::mt19937_64 random(1);
  int found = 0;
  for (int i = 0; i < 200; ++i) {
    const std::size_t at = random() % log.size();
    std::string damaged = log;
    damaged[at] = static_cast<char>(damaged[at] ^ static_cast<char>(1U << (random() % 8)));
    try {  // a bit may mean nothing to the compression; then it must change nothing
      EXPECT_EQ(admission::unpack_log(damaged), admission::unpack_log(log)) << at;
    } catch (const CoreError&) {
      ++found;
    }
  }
  EXPECT_GE(found, 190);
}

TEST(AdmissionReplay, ADamagedStateIsRefused) {
  RouterCore core(config());
  Script script(3);
  for (int i = 0; i < 1000; ++i) {
    outcome(core, script.next());
  }
  std::string state;
  core.save(state);
  for (std::size_t cut = 0; cut < state.size(); cut += 13) {
    RouterCore other(config());
    EXPECT_THROW(other.load(std::span(state).first(cut)), CoreError);
  }
  RouterCore other(config());
  EXPECT_THROW(other.load(state + "x"), CoreError);
  EXPECT_THROW(core.load(state), CoreError) << "in use";
}

TEST(AdmissionReplay, NothingIsRecordedUnlessAskedFor) {
  RouterCore core(config());
  Recorder recorder(core);
  recorder([]() -> Call { throw std::logic_error("asked"); }, [] { return calls::Nothing{}; });
  EXPECT_TRUE(recorder.dump().empty());
  recorder.start(1);
  const auto report = replay(recorder.dump(), {});
  EXPECT_TRUE(report.equal) << "a log of no calls is one";
  EXPECT_EQ(report.calls, 0U);
}

}  // namespace
}  // namespace twinpool::test
