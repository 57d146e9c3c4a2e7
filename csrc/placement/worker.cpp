// SPDX-License-Identifier: Apache-2.0
#include "placement/worker.h"

#include <algorithm>

#include "core/error.h"

namespace twinpool::placement {

namespace {

// Prefill and transfer grow with their size, a step is mostly its base.
FitPrior prefill_prior(const ModelPriors& priors) {
  return {{priors.prefill_seconds, priors.prefill_token_seconds, 1e-9}, 1000.0, 1e6, {100.0, 1.0, 10.0}};
}
FitPrior transfer_prior(const ModelPriors& priors) {
  return {{priors.transfer_seconds, priors.transfer_block_seconds, 0.0}, 16.0, 1.0, {10.0, 1.0, 1.0}};
}
constexpr FitPrior k_step_prior{{5e-3, 1e-4, 1e-8}, 8.0, 1e4, {1.0, 10.0, 10.0}};

}  // namespace

Worker::Worker(const ModelPriors& priors)
    : prefill(prefill_prior(priors)),
      transfer(transfer_prior(priors)),
      step(k_step_prior) {}

Fit& Worker::model(const std::string& kind) {
  if (kind == "prefill") {
    return prefill;
  }
  if (kind == "transfer") {
    return transfer;
  }
  if (kind == "step") {
    return step;
  }
  throw CoreError("model=" + kind + "; allowed: prefill, transfer, step");
}

Role parse_role(const std::string& text) {
  if (text == "prefill") {
    return Role::prefill;
  }
  if (text == "decode") {
    return Role::decode;
  }
  throw CoreError("role=" + text + "; allowed: prefill, decode");
}

WorkerState parse_worker_state(const std::string& text) {
  if (text == "starting") {
    return WorkerState::starting;
  }
  if (text == "ready") {
    return WorkerState::ready;
  }
  if (text == "draining") {
    return WorkerState::draining;
  }
  if (text == "flipping") {
    return WorkerState::flipping;
  }
  throw CoreError("state=" + text + "; allowed: starting, ready, draining, flipping");
}

const char* name_of(Role role) noexcept {
  return role == Role::prefill ? "prefill" : "decode";
}

const char* name_of(WorkerState state) noexcept {
  switch (state) {
  case WorkerState::starting:
    return "starting";
  case WorkerState::ready:
    return "ready";
  case WorkerState::draining:
    return "draining";
  case WorkerState::flipping:
    return "flipping";
  }
  return "";
}

double Worker::queued_prefill_tokens() const noexcept {
  if (!report) {
    return static_cast<double>(prefill_tokens.total);
  }
  return prefill_tokens.combined(static_cast<double>(report->waiting_prefill_tokens));
}

double Worker::available_blocks() const noexcept {
  const double growth = static_cast<double>(growth_blocks);
  if (!report) {
    return static_cast<double>(spec.num_blocks) - static_cast<double>(prompt_blocks.total) - growth;
  }
  const double available =
      static_cast<double>(report->available_blocks) + static_cast<double>(prompt_blocks.gone - prompt_blocks.unseen());
  return std::min(available, static_cast<double>(spec.num_blocks)) - growth;
}

double Worker::context_tokens() const noexcept {
  const double used = std::max(0.0, static_cast<double>(spec.num_blocks) - available_blocks());
  return used * static_cast<double>(spec.block_tokens);
}

double Worker::busy_sequences() const noexcept {
  if (!report) {
    return static_cast<double>(sequences.total);
  }
  return sequences.combined(static_cast<double>(report->running) + static_cast<double>(report->waiting));
}

}  // namespace twinpool::placement
