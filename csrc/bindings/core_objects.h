// SPDX-License-Identifier: Apache-2.0
// The Python objects of the worker's core. A scheduler and its block manager share one lock: plan and advance run
// without the GIL while other threads pin, reserve or remove.
#pragma once

#include "bindings/bindings.h"
#include "blocks/block_manager.h"
#include "scheduler/step_scheduler.h"

namespace twinpool::bindings {

struct PyBlockManager {
  PyBlockManager(std::int64_t num_blocks, std::int64_t block_tokens, py::array generations_array);

  py::array generations;  ///< keeps the memory alive
  std::mutex mutex;
  BlockManager core;
};

struct PyStepScheduler {
  PyStepScheduler(std::shared_ptr<PyBlockManager> manager, const SchedulerConfig& config)
      : blocks(std::move(manager)),
        core(blocks->core, config) {}

  std::shared_ptr<PyBlockManager> blocks;
  StepScheduler core;
};

}  // namespace twinpool::bindings
