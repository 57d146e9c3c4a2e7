// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: calls to a router core in any order. Whatever comes, an event either follows the table or is a
// named error, every request ends once, and nothing is held after the last one has ended.
#include <map>
#include <string>
#include <vector>

#include "admission/calls.h"
#include "fuzz/bytes.h"

namespace {

using twinpool::CoreError;
using twinpool::fuzz::Bytes;
using twinpool::fuzz::expect;
using namespace twinpool::admission;
namespace placement = twinpool::placement;

class Session {
 public:
  explicit Session(Bytes bytes)
      : bytes_(bytes),
        core_(config(bytes_)) {}

  void run() {
    while (!bytes_.empty()) {
      step();
    }
    end_all();
  }

 private:
  static AdmissionConfig config(Bytes& bytes) {
    AdmissionConfig config;
    const std::uint32_t bits = bytes.below(256);
    config.preemption = bits & 1U;
    config.local_prefill = (bits >> 1U) & 1U;
    config.prefix_fetch = (bits >> 2U) & 1U;
    config.early_rejection = (bits >> 3U) & 1U;
    config.refuse_without_workers = (bits >> 4U) & 1U;
    config.max_resumes = (bits >> 5U) & 3U;
    config.preemption_grace_seconds = 0.1;
    config.prefill_window_tokens = 600;
    config.transfer_window_requests = 3;
    config.max_refusals = 3;
    config.max_queue_requests = 40;
    return config;
  }
  std::string name() { return std::string(bytes_.below(2) == 0 ? "p" : "d") + std::to_string(bytes_.below(3)); }
  std::vector<std::uint8_t> hashes() {
    std::vector<std::uint8_t> bytes;
    const std::uint32_t which = bytes_.below(3);
    for (std::uint32_t i = bytes_.below(9); i > 0; --i) {
      bytes.resize(bytes.size() + 15, static_cast<std::uint8_t>(which));
      bytes.push_back(static_cast<std::uint8_t>(bytes.size() / 16));
    }
    return bytes;
  }

  void step() {
    now_ += bytes_.below(16) * 0.03;
    switch (bytes_.below(9)) {
    case 0:
      return upsert();
    case 1:
      return core_.remove_worker(now_, name(), 1 + bytes_.below(2));
    case 2: {
      const std::uint32_t load = bytes_.below(40);
      return core_.report_load(now_, name(), 1 + bytes_.below(2), {now_, load % 8, load % 3, load * 20, load, 0.01});
    }
    case 3:
      return bytes_.below(2) == 0 ? core_.quarantine(now_, name(), 1, now_ + 0.2)
                                  : core_.observe_prefill(name(), 1, 1 + bytes_.below(500), 16, 0.1);
    case 4: {
      const auto blocks = hashes();
      return bytes_.below(2) == 0 ? core_.index_stored(name(), 1, blocks, twinpool::prefix::Tier::device, false)
                                  : core_.index_removed(name(), 1, blocks, twinpool::prefix::Tier::device);
    }
    case 5:
      return submit();
    case 6:
      return plan();
    default:
      return advance();
    }
  }
  void upsert() {
    const std::string worker = name();
    const auto role = worker[0] == 'p' ? placement::Role::prefill : placement::Role::decode;
    const auto state = static_cast<placement::WorkerState>(bytes_.below(4));
    core_.upsert_worker(
        now_, {worker, 1 + bytes_.below(2), "m", role, state, bytes_.below(4) == 0 ? "old" : "fp", 40, 16, 4});
  }
  void submit() {
    SubmitArguments arguments;
    arguments.request_id = "r" + std::to_string(bytes_.below(64));
    arguments.pool = "m";
    arguments.tenant = std::string(1, static_cast<char>('a' + bytes_.below(3)));
    arguments.prompt_tokens = 130 + bytes_.below(400);
    arguments.max_new_tokens = 1 + bytes_.below(40);
    arguments.choices = 1 + bytes_.below(2);
    arguments.priority = static_cast<int>(bytes_.below(3)) - 1;
    arguments.deadline = bytes_.below(3) == 0 ? now_ + 0.5 : 0.0;
    const auto blocks = hashes();
    arguments.hashes = blocks;
    arguments.preemptible = arguments.priority != 0;
    const Submission submission = core_.submit(now_, arguments);
    if (submission.accepted) {
      expect(attempts_.emplace(submission.request, 1).second, "a number is used once");
    } else {
      expect(submission.reason != Cause::none, "a refusal has a reason");
    }
  }
  void plan() {
    std::vector<Action> actions;
    core_.plan(now_, actions);
    for (const Action& action : actions) {
      const auto live = attempts_.find(action.request);
      expect(live != attempts_.end(), "an action is about a living request");
      expect(action.attempt == live->second, "an action is about the newest attempt");
      if (action.kind == Action::Kind::end) {
        expect(action.cause != Cause::none, "an end has a cause");
        ended(action.request);
      }
    }
    core_.plan(now_, actions);
    expect(core_.config().preemption != 0 || actions.empty(), "a second plan has nothing to do");
    expect(core_.next_wake(now_) >= now_, "a wake-up is not in the past");
  }
  void advance() {
    static const auto events = event_names();
    static const std::vector<std::string> failures{"FENCED", "INTERNAL:prefill", "NO_CAPACITY:decode", "INVALID"};
    if (attempts_.empty()) {
      return;
    }
    const auto live = std::next(attempts_.begin(), bytes_.below(static_cast<std::uint32_t>(attempts_.size())));
    const auto id = live->first;
    const auto event = events[bytes_.below(static_cast<std::uint32_t>(events.size()))];
    const std::string detail = event == AttemptFailed::name ? failures[bytes_.below(4)]
                               : event == WorkerLost::name  ? (bytes_.below(2) == 0 ? "prefill" : "decode")
                                                            : "";
    const std::uint32_t attempt = live->second - (bytes_.below(8) == 0 ? 1 : 0);
    const std::string before(core_.state(id));
    if (event == Requeue::name && before == Retrying::name && bytes_.below(2) == 0) {
      const auto blocks = hashes();
      expect(core_.extend(id, longest_ += 16, 1 + bytes_.below(40), blocks), "what is retried can go on");
    }
    try {
      const Transition transition = core_.advance(now_, id, attempt, event, detail);
      expect(transition.applied || transition.state == before, "what is ignored changes nothing");
      expect(transition.attempt == live->second || transition.state == "Queued", "only a new place is a new attempt");
      live->second = transition.attempt;
      if (transition.terminal) {
        ended(id);
      }
    } catch (const CoreError& error) {
      expect(std::string(error.what()).starts_with("event="), "an error names event and state");
      expect(core_.state(id) == before, "an error changes nothing");
    }
  }
  void ended(std::uint64_t id) {
    expect(!core_.advance(now_, id, attempts_.at(id), "finished", "").applied, "nothing follows an end");
    attempts_.erase(id);
    core_.forget(id);
  }
  void end_all() {
    while (!attempts_.empty()) {
      const auto id = attempts_.begin()->first;
      expect(core_.advance(now_, id, 0, "cancel", "").terminal, "a cancel ends any living request");
      ended(id);
    }
    auto stats = core_.stats();
    for (const char* key : {"requests", "reservations", "queued", "queued_tokens"}) {
      expect(stats[key] == 0, key);
    }
    for (std::uint32_t slot = 0; slot < core_.workers().slots(); ++slot) {
      const placement::Worker& worker = core_.workers().at(slot);
      expect(worker.epoch == 0 || (worker.prompt_blocks.total == 0 && worker.prefill_tokens.total == 0 &&
                                   worker.sequences.total == 0 && worker.growth_blocks == 0 && worker.transfers == 0 &&
                                   worker.transfer_blocks == 0 && worker.prompt_blocks.pending == 0),
             "nothing is held at the end");
    }
  }

  Bytes bytes_;
  RouterCore core_;
  double now_ = 0.0;
  std::int64_t longest_ = 530;                       // prompts only grow
  std::map<std::uint64_t, std::uint32_t> attempts_;  // of living requests
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Session(Bytes(data, size)).run();
  return 0;
}
