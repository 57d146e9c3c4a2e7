// SPDX-License-Identifier: Apache-2.0
// The limits of a router core: those that it begins with, and others later.
#include <array>
#include <string>
#include <string_view>

#include "admission/router_core.h"
#include "core/error.h"

namespace twinpool::admission {

namespace {

placement::PlacementLimits placement_limits(const AdmissionConfig& config) {
  placement::PlacementLimits limits;
  limits.prefill_window_tokens = config.prefill_window_tokens;
  limits.transfer_window_requests = config.transfer_window_requests;
  limits.harm_weight = config.harm_weight;
  limits.prefix_fetch = config.prefix_fetch != 0;
  limits.local_prefill = config.local_prefill != 0;
  return limits;
}

placement::ModelPriors model_priors(const AdmissionConfig& config) {
  return {config.prior_prefill_seconds, config.prior_prefill_token_seconds, config.prior_transfer_seconds,
          config.prior_transfer_block_seconds};
}

// What they say has gone into memory, or into what was learnt since.
constexpr std::array<std::string_view, 6> k_at_start{"expected_output_ratio",        "prior_prefill_seconds",
                                                     "prior_prefill_token_seconds",  "prior_transfer_seconds",
                                                     "prior_transfer_block_seconds", "index_max_bytes"};

}  // namespace

RouterCore::RouterCore(const AdmissionConfig& config)
    : config_(config),
      index_(static_cast<std::size_t>(config.index_max_bytes)),
      workers_(index_, model_priors(config)),
      placer_(workers_, placement_limits(config)),
      tenants_(config_) {}

void RouterCore::configure(double now, const AdmissionConfig& config) {
  for (const std::string_view field : k_at_start) {
    require(config.get(field) == config_.get(field), [&] { return std::string(field) + " counts at the start alone"; });
  }
  config_ = config;
  placer_.set_limits(placement_limits(config_));
  tenants_.reconfigure(now);
  for (const auto& each : pools_) {
    each->queue.set_ageing(now, config_.ageing_seconds);
  }
  // What did not fit may fit now.
  workers_.touch();
}

}  // namespace twinpool::admission
