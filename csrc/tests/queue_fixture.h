// SPDX-License-Identifier: Apache-2.0
// A pair of workers that serves one request at a time, in virtual time.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <string>
#include <vector>

#include "tests/router_fixture.h"

namespace twinpool::test {

/// Runs placed requests to their end after a fixed service time, one at a time on one pair of workers.
class Server {
 public:
  explicit Server(const AdmissionConfig& config, double seconds_per_token)
      : cluster(config),
        seconds_per_token_(seconds_per_token) {
    cluster.prefill(1);
    cluster.decode(1);
  }
  Cluster cluster;
  std::vector<std::uint64_t> order;                      // of placement
  std::function<void(std::uint64_t, double)> on_finish;  // request, time
  std::vector<Action> ends;

  /// Plans, and ends what runs when its time has come, until ``until``.
  void run(double until) {
    while (true) {
      for (const Action& action : cluster.plan()) {
        if (action.kind == Action::Kind::place) {
          order.push_back(action.request);
          const double work =
              static_cast<double>(cluster.core.request(action.request).prompt_tokens) * seconds_per_token_;
          free_at_ = std::max(free_at_, cluster.now) + work;
          running_.emplace(free_at_, action.request);
        } else {
          ends.push_back(action);
        }
      }
      const double next = running_.empty() ? INFINITY : running_.front().first;
      const double wake = cluster.core.next_wake(cluster.now);
      const double at = std::min(next, wake > cluster.now ? wake : INFINITY);
      if (at > until) {
        cluster.now = until;
        return;
      }
      cluster.now = at;
      if (next <= at) {
        const auto id = running_.front().second;
        running_.pop();
        cluster.finish(id);
        if (on_finish) {
          on_finish(id, at);
        }
      }
    }
  }

 private:
  double seconds_per_token_;
  double free_at_ = 0.0;
  std::queue<std::pair<double, std::uint64_t>> running_;
};

inline AdmissionConfig one_at_a_time() {
  AdmissionConfig config;
  config.transfer_window_requests = 1;
  config.prefill_window_tokens = 1;
  config.early_rejection = 0;
  config.queue_ttl_seconds = 1e4;
  config.max_queue_requests = 0;
  return config;
}

inline SubmitArguments of_tenant(Cluster& cluster, const std::string& tenant, std::int64_t prompt = 100) {
  auto arguments = cluster.request(prompt, 1);
  arguments.tenant = tenant;
  return arguments;
}

}  // namespace twinpool::test
