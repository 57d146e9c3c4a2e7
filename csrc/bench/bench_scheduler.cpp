// SPDX-License-Identifier: Apache-2.0
// What the hash, the block manager and the step scheduler cost, without Python. Prints one line a figure: the median of
// some rounds and the fastest. Run it on an idle machine: cmake -DTWINPOOL_BENCH=ON -DCMAKE_BUILD_TYPE=Release.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "blocks/block_manager.h"
#include "hash/block_hash.h"
#include "hash/digest.h"
#include "scheduler/step_scheduler.h"

namespace {

using namespace twinpool;
using Tokens = std::vector<std::int32_t>;
using Hashes = std::vector<Hash128>;

constexpr std::size_t block_tokens = 64;
constexpr int rounds = 9;

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// ``work`` returns the seconds of a round; ``scale`` turns them into the unit.
void report(const std::string& name, const char* unit, double scale, const std::function<double()>& work) {
  std::vector<double> taken;
  for (int round = 0; round < rounds; ++round) {
    taken.push_back(work() * scale);
  }
  std::ranges::sort(taken);
  std::printf("%-58s %10.3f %-18s (fastest %.3f)\n", name.c_str(), taken[rounds / 2], unit, taken.front());
}

Tokens tokens_of(std::size_t count, std::int32_t seed) {
  Tokens tokens(count);
  for (std::size_t i = 0; i < count; ++i) {
    tokens[i] = static_cast<std::int32_t>((i * 7919 + static_cast<std::size_t>(seed) * 104729) % 128000);
  }
  return tokens;
}

struct Prompt {
  explicit Prompt(std::size_t count, std::int32_t seed)
      : tokens(tokens_of(count, seed)) {
    hash_blocks({}, tokens, block_tokens, hashes);
  }
  [[nodiscard]] NewSequence request(std::int64_t max_new_tokens, double arrival = 0) const {
    return {.tokens = tokens,
            .hashes = hashes,
            .root = {},
            .max_new_tokens = max_new_tokens,
            .priority = 0,
            .arrival = arrival};
  }
  Tokens tokens;
  Hashes hashes;
};

struct Pool {
  explicit Pool(std::size_t blocks, const SchedulerConfig& config)
      : generations(blocks),
        manager(static_cast<std::int64_t>(blocks), block_tokens, generations),
        scheduler(manager, config) {}
  std::vector<std::uint64_t> generations;
  BlockManager manager;
  StepScheduler scheduler;
};

void bench_hash() {
  const Tokens tokens = tokens_of(1 << 20, 1);
  report("hash, 1 M tokens", "ns/block of 64", 1e9 / (double(tokens.size()) / block_tokens), [&] {
    Hashes hashes;
    return seconds([&] { hash_blocks({}, tokens, block_tokens, hashes); });
  });
  std::vector<std::uint8_t> block(4U << 20U, 3);
  report("block digest, 4 MiB", "us", 1e6, [&] {
    return seconds([&] {
      volatile std::uint64_t kept = digest64(block);
      (void)kept;
    });
  });
}

void bench_admit(std::size_t count) {
  constexpr int requests = 200;
  std::vector<Tokens> prompts;
  std::vector<Hashes> hashes(requests);
  for (int i = 0; i < requests; ++i) {
    prompts.push_back(tokens_of(count, i));
    hash_blocks({}, prompts.back(), block_tokens, hashes[static_cast<std::size_t>(i)]);
  }
  const auto run = [&](bool with_hash) {
    Pool pool(64, {});
    return seconds([&] {
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        Hashes own;
        if (with_hash) {
          hash_blocks({}, prompts[i], block_tokens, own);
        }
        pool.scheduler.add({.tokens = prompts[i],
                            .hashes = with_hash ? own : hashes[i],
                            .root = {},
                            .max_new_tokens = 256,
                            .priority = 0,
                            .arrival = static_cast<double>(i)});
      }
    });
  };
  const std::string name = "admit (add), " + std::to_string(count) + " tokens";
  report(name + ", with hash", "us/request", 1e6 / requests, [&] { return run(true); });
  report(name + ", hashes given", "us/request", 1e6 / requests, [&] { return run(false); });
}

void bench_decode(std::size_t context) {
  constexpr std::size_t sequences = 64;
  constexpr int steps = 512;
  constexpr std::size_t limit = (rounds + 1) * steps;
  const std::size_t blocks = sequences * ((context + limit) / block_tokens + 2);
  Pool pool(blocks, {});
  for (std::size_t i = 0; i < sequences; ++i) {
    const Prompt prompt(context, static_cast<std::int32_t>(i));
    pool.scheduler.start(pool.scheduler.reserve(prompt.request(limit)).value(), 1);
  }
  const Tokens sampled(sequences, 5);
  report("decode, 64 running, context " + std::to_string(context), "ns/request,step", 1e9 / (steps * double(sequences)),
         [&] {
           return seconds([&] {
             for (int step = 0; step < steps; ++step) {
               const StepPlan plan = pool.scheduler.plan(0);
               pool.scheduler.advance(plan, sampled);
             }
           });
         });
}

void bench_plan(std::size_t waiting) {
  constexpr int steps = 200;
  Pool pool(64 * 40, {.max_num_seqs = 64});
  for (std::int32_t i = 0; i < 64; ++i) {
    const Prompt prompt(1024, i);
    pool.scheduler.start(pool.scheduler.reserve(prompt.request(1024)).value(), 1);
  }
  for (std::size_t i = 0; i < waiting; ++i) {
    const Prompt prompt(256, static_cast<std::int32_t>(1000 + i));
    pool.scheduler.add(prompt.request(64, static_cast<double>(i)));
  }
  report("plan + abort, 64 running, " + std::to_string(waiting) + " waiting", "us/plan", 1e6 / steps, [&] {
    return seconds([&] {
      for (int step = 0; step < steps; ++step) {
        const StepPlan plan = pool.scheduler.plan(0);
        pool.scheduler.abort_plan(plan);
      }
    });
  });
}

/// A prompt that is wholly cached but for its last block: add and the plan that takes the prefix.
void bench_prefix_hit(std::size_t cached) {
  constexpr int requests = 20;
  const Prompt prompt(cached + 32, 3);
  Pool pool(cached / block_tokens + 512, {});
  const Tokens sampled = {1};
  const SequenceId first = pool.scheduler.add(prompt.request(0));
  while (pool.scheduler.sequence(first).state != SequenceState::done) {
    const StepPlan plan = pool.scheduler.plan(0);
    pool.scheduler.advance(plan, sampled);
  }
  pool.scheduler.remove(first);
  const std::string name = "prefix-hit admit, " + std::to_string(cached) + " cached";
  double removing = 0;
  report(name + ", add + plan", "us/request", 1e6 / requests, [&] {
    double total = 0;
    for (int i = 0; i < requests; ++i) {
      SequenceId id = 0;
      total += seconds([&] {
        id = pool.scheduler.add(prompt.request(0));
        const StepPlan plan = pool.scheduler.plan(0);
        pool.scheduler.abort_plan(plan);
      });
      removing += seconds([&] { pool.scheduler.remove(id); });
    }
    return total;
  });
  std::printf("%-58s %10.3f us/request\n", "  and its remove", removing * 1e6 / (rounds * requests));
  report("prefix-hit reserve, " + std::to_string(cached) + " cached", "us/request", 1e6 / requests, [&] {
    double total = 0;
    for (int i = 0; i < requests; ++i) {
      std::optional<SequenceId> id;
      total += seconds([&] { id = pool.scheduler.reserve(prompt.request(8)); });
      pool.scheduler.remove(id.value());
    }
    return total;
  });
}

}  // namespace

int main() {
  bench_hash();
  bench_admit(256);
  bench_admit(2048);
  for (const std::size_t context : {1024U, 32768U, 131072U}) {
    bench_decode(context);
  }
  for (const std::size_t waiting : {0U, 1000U, 10000U}) {
    bench_plan(waiting);
  }
  for (const std::size_t cached : {8192U, 32768U, 81920U}) {
    bench_prefix_hit(cached);
  }
  return 0;
}
