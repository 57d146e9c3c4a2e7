// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: a worker in miniature. The "KV" of a position is its token, so whatever the scheduler and the block
// manager do (cache, share, copy, preempt, swap, quarantine), a step must find exactly the tokens of its sequences.
#include <algorithm>
#include <map>
#include <vector>

#include "blocks/block_manager.h"
#include "core/error.h"
#include "fuzz/bytes.h"
#include "fuzz/toy_memory.h"
#include "hash/block_hash.h"
#include "scheduler/step_scheduler.h"

namespace {

using namespace twinpool;
using fuzz::Bytes;
using fuzz::expect;
using fuzz::k_block;
using fuzz::next_token;
using fuzz::Tokens;
using fuzz::ToyMemory;

SchedulerConfig limits(Bytes& bytes) {
  static const char* const policies[] = {"fcfs", "priority", "shortest_uncached"};
  SchedulerConfig config;
  config.max_num_seqs = 1 + bytes.below(5);
  config.max_batched_tokens = config.max_num_seqs + bytes.below(9);
  config.max_chunk_tokens = 1 + bytes.below(9);
  config.policy = policies[bytes.below(3)];
  config.max_overtaken = bytes.below(4);
  config.host_blocks = bytes.below(13);
  return config;
}

class Worker {
 public:
  explicit Worker(Bytes bytes)
      : bytes_(bytes),
        blocks_(6 + bytes_.below(9)),
        generations_(blocks_),
        manager_(static_cast<std::int64_t>(blocks_), k_block, generations_),
        config_(limits(bytes_)),
        scheduler_(manager_, config_),
        memory_(blocks_, static_cast<std::size_t>(config_.host_blocks)) {}

  void run() {
    while (!bytes_.empty()) {
      command();
      manager_.check();
      scheduler_.check();
    }
    end_all();
  }

 private:
  struct Known {
    Tokens tokens;  // prompt and outputs
    std::size_t prompt = 0;
    std::size_t limit = 0;
    bool reserved = false;
    [[nodiscard]] bool finished() const {
      return !reserved && tokens.size() - prompt >= std::max<std::size_t>(limit, 1);
    }
  };

  void command() {
    switch (bytes_.below(9)) {
    case 0:
    case 1:
      return add();
    case 2:
      return reserve();
    case 3:
      return arrive();
    case 4:
      return fork();
    case 5:
      return remove();
    case 6:
      step(bytes_.below(4) == 0);
      return;
    case 7:
      manager_.reset_cache();
      return poison();
    default:
      return transfer_fails();
    }
  }
  NewSequence request(Tokens& tokens, std::vector<Hash128>& hashes) {
    const std::uint32_t base = bytes_.below(3);
    tokens.resize(1 + bytes_.below(12));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<std::int32_t>((i + base) % 2);
    }
    hash_blocks({}, tokens, k_block, hashes);
    NewSequence made{.tokens = tokens, .hashes = hashes, .root = {}};
    made.max_new_tokens = 1 + bytes_.below(9);
    made.priority = static_cast<std::int64_t>(bytes_.below(3)) - 1;
    made.arrival = ++arrivals_;
    made.preemptible = bytes_.below(4) != 0;
    return made;
  }
  void add() {
    Tokens tokens;
    std::vector<Hash128> hashes;
    NewSequence made = request(tokens, hashes);
    made.use_cache = made.preemptible || made.priority > 0;
    try {
      known_[scheduler_.add(made)] = {tokens, tokens.size(), static_cast<std::size_t>(made.max_new_tokens)};
    } catch (const CoreError&) {
      expect((tokens.size() + static_cast<std::size_t>(made.max_new_tokens) + 2) / k_block >= blocks_,
             "only what exceeds the pool is refused");
    }
  }
  void reserve() {
    Tokens tokens;
    std::vector<Hash128> hashes;
    const NewSequence made = request(tokens, hashes);
    if (const auto id = scheduler_.reserve(made)) {
      known_[*id] = {tokens, tokens.size(), static_cast<std::size_t>(made.max_new_tokens), true};
    }
  }
  /// A random sequence for which ``fits`` is true; 0 if there is none.
  template <typename Fits>
  SequenceId pick(Fits&& fits) {
    std::vector<SequenceId> found;
    for (const auto& [id, known] : known_) {
      if (fits(known)) {
        found.push_back(id);
      }
    }
    return found.empty() ? 0 : found[bytes_.below(static_cast<std::uint32_t>(found.size()))];
  }
  static bool arrives(const Known& known) { return known.reserved && known.tokens.size() == known.prompt; }

  void arrive() {
    const SequenceId id = pick(arrives);
    if (id == 0) {
      return;
    }
    poison();
    Known& known = known_[id];
    const Sequence& sequence = scheduler_.sequence(id);
    for (std::size_t i = sequence.cached_tokens; i < known.prompt; ++i) {
      memory_.at(sequence.blocks[i / k_block], i % k_block) = known.tokens[i];
    }
    const std::vector<SequenceId> forks = sequence.forks;
    const std::int32_t first = next_token(known.tokens);
    scheduler_.start(id, first);
    known.tokens.push_back(first);
    known.reserved = false;
    for (const SequenceId fork : forks) {
      if (const auto at = known_.find(fork); at != known_.end()) {
        at->second.reserved = false;
      }
    }
  }
  void fork() {
    const SequenceId id = pick([](const Known& known) { return arrives(known) || !known.reserved; });
    const auto first = static_cast<std::int32_t>(bytes_.below(50));
    const std::size_t limit = 1 + bytes_.below(9);
    if (id == 0 || (!known_[id].reserved && known_[id].tokens.size() == known_[id].prompt)) {
      return;
    }
    if (const auto child = scheduler_.fork(id, first, static_cast<std::int64_t>(limit))) {
      const Known& parent = known_[id];
      Known made{{parent.tokens.begin(), parent.tokens.begin() + static_cast<std::ptrdiff_t>(parent.prompt)},
                 parent.prompt,
                 limit,
                 parent.reserved};
      made.tokens.push_back(first);
      known_[*child] = std::move(made);
    }
  }
  void remove() {
    if (const SequenceId id = pick([](const Known&) { return true; }); id != 0) {
      forget(id);
    }
  }
  void forget(SequenceId id) {
    scheduler_.remove(id);
    known_.erase(id);
  }
  /// Its blocks go to quarantine, and a late write still lands in them.
  void transfer_fails() {
    const SequenceId id = pick(arrives);
    if (id == 0) {
      return;
    }
    const Sequence& sequence = scheduler_.sequence(id);
    for (const SequenceId fork : std::vector(sequence.forks)) {
      if (known_.contains(fork)) {
        forget(fork);
      }
    }
    const auto from = sequence.blocks.begin() + static_cast<std::ptrdiff_t>(sequence.cached_tokens / k_block);
    const std::vector<BlockId> lost(from, sequence.blocks.end());
    manager_.quarantine(lost);
    forget(id);
    for (const BlockId block : lost) {
      memory_.at(block, 0) = 99;
    }
    manager_.check();
    manager_.unquarantine(lost);
  }

  void poison() { memory_.poison(manager_.drain_freed()); }

  bool step(bool fails) {
    const StepPlan plan = scheduler_.plan(0);
    memory_.save(plan);
    poison();
    for (const SequenceId id : plan.preempted) {
      expect(scheduler_.sequence(id).preemptible, "what is not preemptible keeps its blocks");
    }
    if (fails) {
      memory_.spoil_saved(plan);
      scheduler_.abort_plan(plan);
      return false;
    }
    if (plan.seq.empty()) {
      return false;
    }
    memory_.run(plan);
    Tokens sampled;
    for (std::size_t row = 0; row < plan.seq.size(); ++row) {
      sampled.push_back(read(plan, row));
    }
    const SequenceId removed = bytes_.below(8) == 0 ? pick([](const Known&) { return true; }) : 0;
    if (removed != 0) {
      forget(removed);  // a client hangs up while the step runs
    }
    scheduler_.advance(plan, sampled);
    return true;
  }
  /// Checks what a row of the plan sees; its next token, which it gets, or 0.
  std::int32_t read(const StepPlan& plan, std::size_t row) {
    Known& known = known_.at(plan.seq[row]);
    const Tokens seen = memory_.seen(plan, row);
    expect(seen.size() <= known.tokens.size() && std::equal(seen.begin(), seen.end(), known.tokens.begin()),
           "a sequence sees its own tokens");
    if (plan.sample[row] == 0) {
      return 0;
    }
    expect(seen.size() == known.tokens.size(), "the next token follows all others");
    known.tokens.push_back(next_token(seen));
    expect(known.tokens.size() - known.prompt <= std::max<std::size_t>(known.limit, 1), "nobody runs past its limit");
    return known.tokens.back();
  }

  void end_all() {
    for (SequenceId id; (id = pick([](const Known& known) { return known.reserved; })) != 0;) {
      forget(id);
    }
    for (int steps = 0; !known_.empty(); ++steps) {
      expect(steps < 5000, "every sequence ends");
      for (SequenceId id; (id = pick([](const Known& known) { return known.finished(); })) != 0;) {
        forget(id);
      }
      expect(known_.empty() || step(false), "something runs while nobody else holds blocks");
    }
    manager_.check();
    scheduler_.check();
    expect(manager_.available_blocks() == blocks_ && scheduler_.host_blocks_used() == 0, "nothing is held at the end");
  }

  Bytes bytes_;
  std::size_t blocks_;
  std::vector<std::uint64_t> generations_;
  BlockManager manager_;
  SchedulerConfig config_;
  StepScheduler scheduler_;
  ToyMemory memory_;
  std::map<SequenceId, Known> known_;
  double arrivals_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Worker(Bytes(data, size)).run();
  return 0;
}
