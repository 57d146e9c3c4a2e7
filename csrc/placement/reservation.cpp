// SPDX-License-Identifier: Apache-2.0
#include "placement/reservation.h"

#include <algorithm>

#include "placement/worker_table.h"

namespace twinpool::placement {

namespace {

// A command may still be on its way when the next report is made, so only the report after it is sure to contain it.
constexpr std::uint32_t k_unacknowledged_reports = 2;

std::uint32_t due_in(std::uint32_t reports_due, std::uint32_t reports_since) noexcept {
  return reports_since >= reports_due ? 0 : reports_due - reports_since;
}

}  // namespace

PrefillWork::PrefillWork(WorkerTable& table, WorkerRef ref, std::int64_t tokens, std::int64_t blocks)
    : tokens_(tokens),
      blocks_(blocks) {
  Worker* worker = table.get(ref);
  if (worker == nullptr) {
    return;
  }
  table_ = &table;
  ref_ = ref;
  reports_ = worker->reports;
  worker->prefill_tokens.add(tokens_, k_unacknowledged_reports);
  worker->prompt_blocks.add(blocks_, k_unacknowledged_reports);
  ++worker->holds;
}

PrefillWork& PrefillWork::operator=(PrefillWork&& other) noexcept {
  Reservation::operator=(std::move(other));
  tokens_ = other.tokens_;
  blocks_ = other.blocks_;
  reports_ = other.reports_;
  return *this;
}

void PrefillWork::reset() noexcept {
  WorkerTable* table = std::exchange(table_, nullptr);
  Worker* worker = table == nullptr ? nullptr : table->get(ref_);
  if (worker == nullptr) {
    return;
  }
  const std::uint32_t due = due_in(k_unacknowledged_reports, worker->reports - reports_);
  worker->prefill_tokens.remove(tokens_, due);
  worker->prompt_blocks.leave(blocks_, due);  // pinned for the reader until the hand-off is over
  --worker->holds;
  table->touch();
}

TransferSlot::TransferSlot(WorkerTable& table, WorkerRef ref, std::int64_t blocks)
    : blocks_(blocks) {
  Worker* worker = table.get(ref);
  if (worker == nullptr) {
    return;
  }
  table_ = &table;
  ref_ = ref;
  ++worker->transfers;
  worker->transfer_blocks += blocks_;
  ++worker->holds;
}

TransferSlot& TransferSlot::operator=(TransferSlot&& other) noexcept {
  Reservation::operator=(std::move(other));
  blocks_ = other.blocks_;
  return *this;
}

void TransferSlot::reset() noexcept {
  WorkerTable* table = std::exchange(table_, nullptr);
  Worker* worker = table == nullptr ? nullptr : table->get(ref_);
  if (worker == nullptr) {
    return;
  }
  --worker->transfers;
  worker->transfer_blocks -= blocks_;
  --worker->holds;
  table->touch();
}

DecodeBlocks::DecodeBlocks(WorkerTable& table, WorkerRef ref, std::int64_t prompt_blocks, std::int64_t growth_blocks,
                           std::int64_t sequences)
    : prompt_blocks_(prompt_blocks),
      growth_blocks_(growth_blocks),
      sequences_(sequences) {
  Worker* worker = table.get(ref);
  if (worker == nullptr) {
    return;
  }
  table_ = &table;
  ref_ = ref;
  worker->prompt_blocks.add(prompt_blocks_, Ledger::k_pending);
  worker->sequences.add(sequences_, Ledger::k_pending);
  worker->growth_blocks += growth_blocks_;
  ++worker->holds;
}

DecodeBlocks& DecodeBlocks::operator=(DecodeBlocks&& other) noexcept {
  Reservation::operator=(std::move(other));
  prompt_blocks_ = other.prompt_blocks_;
  growth_blocks_ = other.growth_blocks_;
  sequences_ = other.sequences_;
  acknowledged_ = other.acknowledged_;
  reports_ = other.reports_;
  return *this;
}

void DecodeBlocks::reset() noexcept {
  WorkerTable* table = std::exchange(table_, nullptr);
  Worker* worker = table == nullptr ? nullptr : table->get(ref_);
  if (worker == nullptr) {
    return;
  }
  const std::uint32_t due = acknowledged_ ? due_in(1, worker->reports - reports_) : Ledger::k_pending;
  worker->prompt_blocks.remove(prompt_blocks_, due);
  worker->sequences.remove(sequences_, due);
  worker->growth_blocks -= growth_blocks_;
  --worker->holds;
  table->touch();
}

void DecodeBlocks::acknowledge() noexcept {
  Worker* worker = table_ == nullptr ? nullptr : table_->get(ref_);
  if (worker == nullptr || acknowledged_) {
    return;
  }
  acknowledged_ = true;
  reports_ = worker->reports;
  worker->prompt_blocks.acknowledge(prompt_blocks_);
  worker->sequences.acknowledge(sequences_);
}

void DecodeBlocks::grow(std::int64_t blocks) noexcept {
  Worker* worker = table_ == nullptr ? nullptr : table_->get(ref_);
  const std::int64_t grown = std::min(blocks, growth_blocks_);
  if (worker == nullptr || grown <= 0) {
    return;
  }
  growth_blocks_ -= grown;
  worker->growth_blocks -= grown;
}

}  // namespace twinpool::placement
