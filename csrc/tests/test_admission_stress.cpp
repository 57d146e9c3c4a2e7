// SPDX-License-Identifier: Apache-2.0
// Many requests with very short deadlines, cancels, failures and workers that come and go: one outcome each, nothing
// left over. Once in one thread, once from several under a lock, as the binding uses it.
#include <atomic>
#include <mutex>
#include <thread>

#include "tests/router_chaos.h"

namespace twinpool::test {
namespace {

TEST(AdmissionStress, ExactlyOneOutcomeEach) {
  for (const bool preemption : {false, true}) {
    Chaos chaos(preemption ? 1 : 2, chaos_config(preemption));
    for (int i = 0; i < 50'000; ++i) {
      chaos.cluster.now += 10e-6;
      chaos.submit_one();
      if (i % 3 == 0) {
        chaos.plan_once();
      }
      for (int k = 0; k < 4; ++k) {
        chaos.poke();
      }
      if (i % 50 == 0) {
        chaos.churn();
      }
    }
    chaos.finish_all();
    std::map<std::string, int> states;
    for (const auto& [id, end] : chaos.outcome) {
      ++states[end.first];
    }
    for (const char* state : {"Finished", "Cancelled", "Expired", "Failed"}) {
      EXPECT_GT(states[state], 30) << state << ": the test does not reach it";
    }
  }
}

TEST(AdmissionStress, SeveralThreadsUnderOneLock) {
  Chaos chaos(3, chaos_config(true));
  std::mutex mutex;
  std::atomic<bool> stop{false};
  const auto loop = [&](auto work) {
    return std::thread([&, work] {
      while (!stop) {
        {
          const std::lock_guard<std::mutex> lock(mutex);
          chaos.cluster.now += 5e-6;
          work();
        }
        std::this_thread::yield();
      }
    });
  };
  std::vector<std::thread> threads;
  threads.push_back(loop([&] { chaos.plan_once(); }));
  threads.push_back(loop([&] { chaos.poke(); }));
  threads.push_back(loop([&] { chaos.churn(); }));
  for (int i = 0; i < 20'000; ++i) {
    const std::lock_guard<std::mutex> lock(mutex);
    chaos.cluster.now += 5e-6;
    chaos.submit_one();
  }
  stop = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  chaos.finish_all();
}

}  // namespace
}  // namespace twinpool::test
