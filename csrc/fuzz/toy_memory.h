// SPDX-License-Identifier: Apache-2.0
// A KV pool and host memory whose "KV" of a position is the token itself.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "blocks/block.h"
#include "scheduler/step_plan.h"

namespace twinpool::fuzz {

using Tokens = std::vector<std::int32_t>;

constexpr std::size_t k_block = 4;
constexpr std::int32_t k_poison = -7;

/// The "model": the next token is a function of all before it.
inline std::int32_t next_token(const Tokens& tokens) {
  std::uint32_t value = 17;
  for (const std::int32_t token : tokens) {
    value = value * 31 + static_cast<std::uint32_t>(token) + 1;
  }
  return static_cast<std::int32_t>(value % 50);
}

class ToyMemory {
 public:
  ToyMemory(std::size_t blocks, std::size_t host_blocks)
      : pool_(blocks * k_block, k_poison),
        host_(host_blocks * k_block, k_poison) {}

  std::int32_t& at(BlockId block, std::size_t offset) {
    return pool_[static_cast<std::size_t>(block) * k_block + offset];
  }
  void poison(std::span<const BlockId> blocks) {
    for (const BlockId block : blocks) {
      std::fill_n(&at(block, 0), k_block, k_poison);
    }
  }
  void save(const StepPlan& plan) { copy(host_, pool_, plan.swap_out); }
  void spoil_saved(const StepPlan& plan) {
    for (std::size_t i = 0; i < plan.swap_out.size(); i += 2) {
      host_[static_cast<std::size_t>(plan.swap_out[i + 1]) * k_block] = k_poison;
    }
  }
  /// What a runner does before and with a step. Copies all read what was there before.
  void run(const StepPlan& plan) {
    const Tokens before = pool_;
    copy(pool_, before, plan.copies);
    copy(pool_, host_, plan.swap_in);
    for (std::size_t i = 0; i < plan.slots.size(); ++i) {
      pool_[static_cast<std::size_t>(plan.slots[i])] = plan.token_ids[i];
    }
  }
  Tokens seen(const StepPlan& plan, std::size_t row) {
    Tokens tokens;
    for (std::size_t i = 0; i < static_cast<std::size_t>(plan.context[row]); ++i) {
      tokens.push_back(at((*plan.table)[row * plan.table_stride + i / k_block], i % k_block));
    }
    return tokens;
  }

 private:
  static void copy(Tokens& to, const Tokens& from, const std::vector<std::int32_t>& pairs) {
    for (std::size_t i = 0; i < pairs.size(); i += 2) {
      std::copy_n(from.begin() + pairs[i] * static_cast<std::ptrdiff_t>(k_block), k_block,
                  to.begin() + pairs[i + 1] * static_cast<std::ptrdiff_t>(k_block));
    }
  }

  Tokens pool_;
  Tokens host_;
};

}  // namespace twinpool::fuzz
