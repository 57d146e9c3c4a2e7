// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "scheduler/row_table.h"
#include "scheduler/sequence.h"

namespace twinpool {

/// What the next step runs, as flat arrays; see twinpool/_core.pyi. ``table`` is the scheduler's own: its first
/// seq.size() rows are this plan's until the plan is advanced or aborted.
struct StepPlan {
  const void* owner = nullptr;  ///< the scheduler that made it
  std::uint64_t step = 0;       ///< which plan of its scheduler this is; 0 if it is empty and so need not come back
  std::size_t decodes = 0;
  std::vector<SequenceId> seq;
  std::vector<std::int32_t> q_start = {0};
  std::vector<std::int32_t> context;
  std::vector<std::uint8_t> sample;
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> positions;
  std::vector<std::int64_t> slots;
  std::vector<SequenceId> preempted;
  std::vector<std::int32_t> follows;  ///< of a plan made ahead: the row of each sequence in the plan before it
  std::vector<BlockId> copies;        ///< source, target, source, target ...
  /// Device block, host block ...: to be copied before anything is written, since the plan has given the blocks out
  /// again.
  std::vector<std::int32_t> swap_out;
  std::vector<std::int32_t> swap_in;  ///< host block, device block ...

  std::shared_ptr<const RowTable::Storage> table;
  std::size_t table_stride = 0;
  std::size_t table_width = 0;
};

}  // namespace twinpool
